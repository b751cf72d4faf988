"""Lookups in tables that are spread over ranks.

A key is held by one rank, its owner. A lookup of several tables is one exchange of keys and one of
vectors, for any number of tables. Its gradient is one more exchange:

    ids ─route─> words ─alltoall─> keys asked of this rank ─look up─> vectors
    pooled <─pool─ vectors asked for <─alltoall─ words <─pack────────────┘

Each rank asks for a key once, in one list for all features that read the table (its *request*, in
the order of the owners). Gradients are summed for each key of the request before they are sent, and
the owner sums them for each key over the ranks. The result of `tape.gradient` for a table is
therefore the sum over all ranks, for the rows that this rank holds. `docs/scaling.md` counts the
bytes.

All functions are collective: every rank looks up the same tables in the same order, even if it has
no ids.

The work before and after the alltoalls runs where the tables are: on a GPU if all of them are on
it, otherwise on the CPU. The alltoalls run on a GPU if the ranks use NCCL, directly or by Horovod.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import config as tf_config
from tensorflow.python.ops import resource_variable_ops

from tf_dynemb import _ops, communicator
from tf_dynemb.ids.bags import Bags
from tf_dynemb.parallel.key_counts import (
    add_counts,
    count_repeats,
    find_present,
    without_absent,
)
from tf_dynemb.parallel.placement import Placed, by_placement, common_device

# The owners of the keys of a distributed table, as in the attribute of DynembRoute.
BY_HASH = -1
BY_MODULO = -2


class SpreadOptions(Protocol):
    """The members of `TableOptions` that this room needs."""

    @property
    def admission(self) -> object | None:
        """The choice of the keys that get a row; None: all do."""

    @property
    def counts_keys(self) -> bool:
        """Whether scores count how often a key is asked for."""


class SpreadTable(Placed, Protocol):
    """The members of a DynamicVariable that this room needs."""

    @property
    def mode(self) -> str | None:
        """How the table is spread over ranks."""

    @property
    def options(self) -> SpreadOptions:
        """The table's options."""

    @property
    def spread(self) -> Spread:
        """The description of the table for an exchange."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """The description of a table for an exchange.

    Attributes:
        variable: the DynamicVariable or Variable.
        key_type: the dtype of its keys.
        dimension: the width of its vectors.
        owner: BY_HASH, BY_MODULO, or the rank that holds the table.
        name: the name for the counters of `stats()`, unique in the process.
        wire: the wire type of vectors and gradients: "same", or one of options.EXCHANGE_DTYPES.
        is_dynamic: whether it is a hash table.
    """

    variable: tf.Variable
    key_type: tf.DType
    dimension: int
    owner: int
    name: str
    wire: str
    is_dynamic: bool

    @property
    def table(self) -> SpreadTable:
        """The variable, if it is a hash table."""
        table: SpreadTable = self.variable
        return table

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the vectors."""
        return self.variable.dtype


@dataclasses.dataclass(frozen=True)
class Request:
    """The keys that this rank asks of each rank, and the keys that it is asked for.

    Attributes:
        tables: the tables that are asked.
        index: for each feature, uint32 [nnz]: the position of each id's key in its table's request.
        asked: int64 [tables, ranks]: the number of keys that this rank asks each rank for.
        keys: for each table, the keys that this rank is asked for, in the order of the ranks.
        served: int64 [tables, ranks]: the number of these keys for each rank.
        device: the device that keys and rows are on.
    """

    tables: Sequence[Spread]
    index: list[tf.Tensor]
    asked: tf.Tensor
    keys: list[tf.Tensor]
    served: tf.Tensor
    device: str

    @property
    def names(self) -> list[str]:
        """The names of the tables."""
        return [table.name for table in self.tables]

    @property
    def wire(self) -> list[str]:
        """The wire type of each table."""
        return [table.wire for table in self.tables]

    def to_askers(
        self, rows: Sequence[tf.Tensor], what: str, name: str | None = None
    ) -> list[tf.Tensor]:
        """Sends rows for `keys`, [n, width] for each table; returns rows for the request."""
        return self._exchange(rows, self.served, self.asked, what, name)

    def to_owners(self, rows: Sequence[tf.Tensor], what: str) -> list[tf.Tensor]:
        """Sends rows for the request; returns rows for `keys`."""
        return self._exchange(rows, self.asked, self.served, what, None)

    def words_to_askers(self, vectors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Sends vectors for `keys`; returns the messages as received, without this rank's own."""
        return send_words(
            self.names, self.wire, vectors, self.served, "vectors", device=self.device
        )

    def send_some(
        self, numbers: Sequence[int], rows: Sequence[tf.Tensor], name: str, to_owners: bool
    ) -> list[tf.Tensor]:
        """Sends rows of the tables with these numbers, as `to_owners` or `to_askers` does."""
        if not numbers:
            return []
        with _ops.on_host():
            counts = tf.gather(self.asked, numbers), tf.gather(self.served, numbers)
        sent, received = counts if to_owners else counts[::-1]
        names = [self.names[t] for t in numbers]
        wire = ["same"] * len(names)
        return send_rows(names, wire, rows, sent, received, "other", name, self.device)

    def num_asked(self, table: int) -> tf.Tensor:
        """Returns the number of keys in the request for a table: int64 scalar."""
        with _ops.on_host():
            return tf.reduce_sum(self.asked[table])

    def _exchange(
        self,
        rows: Sequence[tf.Tensor],
        sent: tf.Tensor,
        received: tf.Tensor,
        what: str,
        name: str | None,
    ) -> list[tf.Tensor]:
        return send_rows(self.names, self.wire, rows, sent, received, what, name, self.device)


@dataclasses.dataclass(frozen=True)
class Received:
    """Vectors for the request, in the memory that received them.

    Attributes:
        words: the messages of other ranks.
        held: for each table, the vectors that this rank sent; the vectors that it keeps are not in
            `words`.
        received: int64 [tables, ranks]: the number of vectors from each rank.
        sent: int64 [tables, ranks]: the number of vectors in `held` for each rank, in their order.
        rank: the number of this rank.
    """

    words: tf.Tensor
    held: Sequence[tf.Tensor]
    received: tf.Tensor
    sent: tf.Tensor
    rank: int

    @staticmethod
    def from_ranks(asked: Request, words: tf.Tensor, held: Sequence[tf.Tensor]) -> Received:
        """Creates it from the result of `asked.words_to_askers(held)`."""
        return Received(words, held, asked.asked, asked.served, communicator.get().rank)

    @staticmethod
    def in_order(vectors: Sequence[tf.Tensor]) -> Received:
        """Creates it from [n, dimension] for each table, in the order of the request."""
        with _ops.on_host():
            counts = tf.stack([tf.shape(table_vectors, tf.int64)[:1] for table_vectors in vectors])
        return Received(tf.zeros([0], tf.int32), vectors, counts, counts, 0)


def request(
    tables: Sequence[Spread],
    keys: Sequence[tf.Tensor],
    table_of: Sequence[int] | None = None,
    name: str = "dynemb_keys",
) -> Request:
    """Asks the owners for keys.

    Args:
        tables: the tables to ask, each once.
        keys: the keys of each feature: [nnz] of its table's key type.
        table_of: the number of each feature's table. None: one feature for each table.
        name: the name of the alltoall; see `Communicator.alltoall`.
    """
    comm = communicator.get()
    library = _ops.library()
    device = device_of(tables)
    with _ops.on(device):
        words, splits, own, asked, index = library.dynemb_route(
            keys=list(keys),
            N=len(keys),
            tables=list(range(len(tables)) if table_of is None else table_of),
            owners=[table.owner for table in tables],
            names=[table.name for table in tables],
            num_ranks=comm.size,
            rank=comm.rank,
        )
    words, splits = _alltoall(words, splits, name, device)
    with _ops.on(device):
        owned, served = library.dynemb_receive_keys(
            words, splits, own, Tkeys=[table.key_type for table in tables], rank=comm.rank
        )
        owned = [
            keys // comm.size if table.owner == BY_MODULO else keys
            for table, keys in zip(tables, owned, strict=True)
        ]
    return Request(tables, list(index), asked, owned, served, device)


@_ops.not_converted
def lookup(
    tables: Sequence[Spread],
    features: Sequence[Bags],
    table_of: Sequence[int],
    combiners: Sequence[str],
    insert: bool,
    default_value: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Looks up and pools the ids of features, `features[i]` in `tables[table_of[i]]`.

    Args:
        tables: the tables, each once.
        features: the ids, of the key types of their tables.
        table_of: the number of each feature's table.
        combiners: the combiner of each feature.
        insert: whether owners give unknown keys a row.
        default_value: a vector for unknown keys, if there is one table and `insert` is False.

    Returns:
        For each feature, [num_bags, dimension] of its table's dtype.
    """
    if not tables:
        return []
    for table in tables:
        resource_variable_ops.variable_accessed(table.variable)
    # The gradient goes directly from the pooled vectors to the tables: see exchange_gradient.
    with record.stop_recording():
        asked = request(tables, [feature.keys for feature in features], table_of)
        repeats = count_repeats(asked, table_of) if insert else {}
        held, rows = read_owned(tables, asked.keys, insert, default_value, repeats)
        words = asked.words_to_askers(held)
        add_counts(asked, repeats)
        is_present = find_present(asked, rows) if default_value is None else {}
    # Outside, so that the gradient of the weights passes through.
    asked, features = without_absent(asked, features, table_of, is_present)
    return pool(asked, features, table_of, combiners, Received.from_ranks(asked, words, held), rows)


def read_owned(
    tables: Sequence[Spread],
    keys: Sequence[tf.Tensor],
    insert: bool,
    default_value: tf.Tensor | None = None,
    repeats: Mapping[int, tf.Tensor] | None = None,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Reads the vectors of keys that this rank holds, and their row ids in dynamic tables.

    Args:
        tables: the tables.
        keys: for each table, the keys that this rank is asked for.
        insert: whether unknown keys get a row.
        default_value: as in `lookup`.
        repeats: the result of `count_repeats`; only tables without `admission` do without it.

    Returns:
        (vectors, rows): for each table [n, dimension], and uint32 [n] or [0].
    """
    library = _ops.library()
    vectors: list[tf.Tensor] = [None] * len(tables)
    rows: list[tf.Tensor] = [tf.zeros([0], tf.uint32)] * len(tables)
    dynamic = [t for t, table in enumerate(tables) if table.is_dynamic]
    if default_value is not None:
        vectors[0], rows[0] = library.dynemb_lookup(
            tables[0].table.handle, keys[0], default_value, insert=False
        )
    else:
        counted = [t for t in dynamic if insert and tables[t].table.options.admission]
        for t in counted:
            times = (repeats or {})[t] + 1
            vectors[t], rows[t] = library.dynemb_lookup_counted(
                tables[t].table.handle, keys[t], times, dtype=tables[t].dtype
            )
        at_once = [t for t in dynamic if t not in counted]
        for group in by_placement([tables[t].table for t in at_once]):
            numbers = [at_once[i] for i in group]
            read, read_rows, _ = library.dynemb_lookup_sparse(
                handles=[tables[t].table.handle for t in numbers],
                keys=[keys[t] for t in numbers],
                bags=[_ops.one_each()] * len(numbers),
                weights=[tf.zeros([0], tf.float32)] * len(numbers),
                num_bags=[tf.size(keys[t], out_type=tf.int64) for t in numbers],
                dtypes=[tables[t].dtype for t in numbers],
                dims=[tables[t].dimension for t in numbers],
                combiners=["sum"] * len(numbers),
                insert=insert,
            )
            for t, table_vectors, table_rows in zip(numbers, read, read_rows, strict=True):
                vectors[t], rows[t] = table_vectors, table_rows
    for t, table in enumerate(tables):
        if not table.is_dynamic:
            vectors[t] = resource_variable_ops.resource_gather(
                table.variable.handle, keys[t], dtype=table.dtype
            )
    return vectors, rows


def pool(
    asked: Request,
    features: Sequence[Bags],
    table_of: Sequence[int],
    combiners: Sequence[str],
    vectors: Received,
    rows: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Pools the vectors that this rank received; the gradient goes to the tables.

    Args:
        asked: the request that the vectors are for.
        features: the bags of each feature.
        table_of: the number of each feature's table.
        combiners: the combiner of each feature.
        vectors: the received vectors.
        rows: for each table, the row ids of `asked.keys`.

    Returns:
        For each feature, [num_bags, dimension] of its table's dtype.
    """
    tables = asked.tables
    with _ops.on(asked.device):
        outputs, _ = _ops.library().dynemb_pool_rows(
            handles=[tables[t].variable.handle for t in table_of],
            words=vectors.words,
            held=list(vectors.held),
            index=asked.index,
            bags=[feature.bags for feature in features],
            weights=[feature.weights for feature in features],
            num_bags=[feature.num_bags for feature in features],
            owned_keys=asked.keys,
            owned_rows=list(rows),
            received=vectors.received,
            sent=vectors.sent,
            asked=asked.asked,
            served=asked.served,
            dtypes=[tables[t].dtype for t in table_of],
            tables=list(table_of),
            names=asked.names,
            combiners=list(combiners),
            wire=asked.wire,
            rank=vectors.rank,
            dynamic=[table.is_dynamic for table in tables],
            in_order=tf_config.is_op_determinism_enabled(),
        )
    for feature, t, output in zip(features, table_of, outputs, strict=True):
        output.set_shape([feature.static_num_bags, tables[t].dimension])
    return list(outputs)


def send_rows(
    names: Sequence[str],
    wire: Sequence[str],
    rows: Sequence[tf.Tensor],
    sent: tf.Tensor,
    received: tf.Tensor,
    what: str,
    name: str | None = None,
    device: str = _ops.CPU,
) -> list[tf.Tensor]:
    """Sends rows of tables in one alltoall. The rows that this rank keeps are only copied.

    Args:
        names: the names of the tables.
        wire: the wire types of the tables.
        rows: the rows of each table, [n, width].
        sent: int64 [tables, ranks]: the number of rows for each rank.
        received: int64 [tables, ranks]: the number of rows from each rank.
        what: "vectors", "gradients" or "other"; other data is sent in its own type.
        name: the name of the alltoall; None: a name derived from `what`.
        device: the device that the rows are on, and that the result is on.

    Returns:
        For each table, the received rows, [n, width], in the order of the ranks.
    """
    wire = list(wire) if what != "other" else ["same"] * len(names)
    words = send_words(names, wire, rows, sent, what, name, device)
    with _ops.on(device):
        return list(
            _ops.library().dynemb_unpack_rows(
                words,
                received,
                list(rows),
                sent,
                dims=[int(table_rows.shape[1]) for table_rows in rows],
                wire=wire,
                rank=communicator.get().rank,
            )
        )


def send_words(
    names: Sequence[str],
    wire: Sequence[str],
    rows: Sequence[tf.Tensor],
    sent: tf.Tensor,
    what: str,
    name: str | None = None,
    device: str = _ops.CPU,
) -> tf.Tensor:
    """The first half of `send_rows`: returns the words of the received messages."""
    with _ops.on(device):
        words, splits = _ops.library().dynemb_pack_rows(
            rows=list(rows),
            counts=sent,
            wire=list(wire),
            what=what,
            rank=communicator.get().rank,
            names=list(names),
        )
    words, _ = _alltoall(words, splits, name or f"dynemb_{what}", device)
    return words


def send_gradients(words: tf.Tensor, splits: tf.Tensor, device: str) -> tf.Tensor:
    """Sends gradients that are already packed, in one alltoall."""
    words, _ = _alltoall(words, splits, "dynemb_gradients", device)
    return words


def _alltoall(
    words: tf.Tensor, splits: tf.Tensor, name: str, device: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """An alltoall on the device that the words are on, or on the CPU if it can only run there."""
    comm = communicator.get()
    with _ops.on(device if comm.alltoall_on_gpu else _ops.CPU):
        return comm.alltoall(words, splits, name)


def exchange_counts(counts: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the number of rows from each rank, given `counts` to each: int64 [tables, ranks]."""
    tables, ranks = counts.shape
    with _ops.on_host():
        received, _ = communicator.get().alltoall(
            tf.reshape(tf.transpose(counts), [-1]), tf.fill([ranks], tables), name
        )
        return tf.transpose(tf.reshape(received, [ranks, tables]))


def device_of(tables: Sequence[Spread]) -> str:
    """Returns the device of an exchange for these tables."""
    return common_device([table.variable for table in tables])


def spread_tables(variables: Sequence[tf.Variable]) -> tuple[list[Spread], list[int], list[int]]:
    """Finds the variables of a lookup that are spread over ranks.

    Returns:
        (tables, table_of, places): these tables, each once; the number of the table of each such
        variable; and the position of each such variable in `variables`.
    """
    places = [i for i, variable in enumerate(variables) if hasattr(variable, "spread")]
    tables = list({id(variables[i]): variables[i].spread for i in places}.values())
    number = {id(table.variable): n for n, table in enumerate(tables)}
    return tables, [number[id(variables[i])] for i in places], places


def exchange_stats(name: str) -> dict[str, int]:
    """Returns the keys and bytes that this rank has sent for a table, by its `Spread.name`."""
    with tf.init_scope(), _ops.on_host():
        names, values = _ops.library().dynemb_exchange_stats(table=name)
    return {
        name.decode(): int(value) for name, value in zip(names.numpy(), values.numpy(), strict=True)
    }
