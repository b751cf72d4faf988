"""Lookups in tables that are spread over ranks.

A key is held by one rank, its owner. A lookup of several tables is one exchange of keys and one of
vectors, whatever the number of tables; its gradient is one more exchange:

    ids ─route─> words ─alltoall─> keys asked of this rank ─look up─> vectors
    pooled <─pool─ vectors asked for <─alltoall─ words <─pack────────────┘

Each rank asks for a key once, in one list of all features that read the table (its *request*, in
the order of the owners). Gradients are summed per key of the request before they travel, and per
key over ranks where they arrive: what `tape.gradient` gives for a table is the sum over all ranks,
for the rows that this rank holds. `docs/scaling.md` counts the bytes.

All of it is collective: every rank looks up the same tables in the same order, if only with no
ids.

What is before and after the alltoalls runs where the tables are: on the GPU that all of them are
on, else on the CPU. The alltoalls themselves are Horovod's, on a GPU if it was built for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import config as tf_config
from tensorflow.python.ops import resource_variable_ops

from tf_dynemb import _ops, communicator
from tf_dynemb.ids.bags import Bags
from tf_dynemb.parallel.placement import by_placement, common_device

# Owners of a table's keys that are not one rank: as the attribute of DynembRoute.
BY_HASH = -1
BY_MODULO = -2


@dataclasses.dataclass(frozen=True)
class Spread:
    """A table as the exchange sees it.

    Attributes:
        variable: the DynamicVariable or Variable.
        key_type: of its keys.
        dimension: of its vectors.
        owner: BY_HASH, BY_MODULO, or the rank that holds the table.
        name: for the counters of `stats()`; no other table of the process has it.
        wire: how vectors and gradients travel: "same", or one of options.EXCHANGE_DTYPES.
        is_dynamic: whether it is a hash table.
    """

    variable: Any
    key_type: Any
    dimension: int
    owner: int
    name: str
    wire: str
    is_dynamic: bool

    @property
    def dtype(self) -> Any:
        """Of the vectors."""
        return self.variable.dtype


@dataclasses.dataclass(frozen=True)
class Request:
    """The keys that this rank has asked of each rank, and those it was asked for.

    Attributes:
        tables: that were asked.
        index: for each feature uint32 [nnz]: where in the request of its table each id's key is.
        asked: int64 [tables, ranks]: keys that this rank asks each rank for.
        keys: for each table the keys that this rank was asked for, rank after rank.
        served: int64 [tables, ranks]: how many by each rank.
        device: where keys and rows are.
    """

    tables: Sequence[Spread]
    index: list[Any]
    asked: Any
    keys: list[Any]
    served: Any
    device: str

    @property
    def names(self) -> list[str]:
        """Of the tables."""
        return [table.name for table in self.tables]

    @property
    def wire(self) -> list[str]:
        """How the rows of each table travel."""
        return [table.wire for table in self.tables]

    def to_askers(self, rows: Sequence[Any], what: str, name: str | None = None) -> list[Any]:
        """Rows for `keys`, [n, width] for each table, come as rows for the request."""
        return self._exchange(rows, self.served, self.asked, what, name)

    def to_owners(self, rows: Sequence[Any], what: str) -> list[Any]:
        """Rows for the request come as rows for `keys`."""
        return self._exchange(rows, self.asked, self.served, what, None)

    def words_to_askers(self, vectors: Sequence[Any]) -> Any:
        """Vectors for `keys` travel; they stay as they come, beside those that this rank holds."""
        return send_words(
            self.names, self.wire, vectors, self.served, "vectors", device=self.device
        )

    def num_asked(self, table: int) -> Any:
        """How many keys the request for a table has: int64 scalar."""
        with _ops.on_host():
            return tf.reduce_sum(self.asked[table])

    def _exchange(
        self, rows: Sequence[Any], sent: Any, received: Any, what: str, name: str | None
    ) -> list[Any]:
        return send_rows(self.names, self.wire, rows, sent, received, what, name, self.device)


@dataclasses.dataclass(frozen=True)
class Received:
    """Vectors for the request, where they came to lie.

    Attributes:
        words: the messages of other ranks.
        held: for each table the vectors that this rank sent; those for itself are not in `words`.
        came: int64 [tables, ranks]: how many are from each rank.
        sent: int64 [tables, ranks]: to which ranks those in `held` are, in their order.
        rank: of this one.
    """

    words: Any
    held: Sequence[Any]
    came: Any
    sent: Any
    rank: int

    @staticmethod
    def from_ranks(asked: Request, words: Any, held: Sequence[Any]) -> Received:
        """As `asked.words_to_askers(held)` gave them."""
        return Received(words, held, asked.asked, asked.served, communicator.get().rank)

    @staticmethod
    def in_order(vectors: Sequence[Any]) -> Received:
        """Of each table [n, dimension] in the order of the request."""
        with _ops.on_host():
            counts = tf.stack([tf.shape(of_table, tf.int64)[:1] for of_table in vectors])
        return Received(tf.zeros([0], tf.int32), vectors, counts, counts, 0)


def request(
    tables: Sequence[Spread],
    keys: Sequence[Any],
    table_of: Sequence[int] | None = None,
    name: str = "dynemb_keys",
) -> Request:
    """Asks the owners for keys.

    Args:
        tables: to ask; each once.
        keys: of each feature: [nnz] of its table's key type.
        table_of: the number of each feature's table. None: one feature for each table.
        name: of the alltoall; see `Communicator.alltoall`.
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
    default_value: Any = None,
) -> list[Any]:
    """Looks up and pools the ids of features, `features[i]` in `tables[table_of[i]]`.

    Args:
        tables: each once.
        features: the ids, of the key types of their tables.
        table_of: for each feature.
        combiners: for each feature.
        insert: whether owners give unknown keys a row.
        default_value: a vector for unknown keys, if there is one table and `insert` is False.
    """
    if not tables:
        return []
    for table in tables:
        resource_variable_ops.variable_accessed(table.variable)
    # The gradient goes from the pooled vectors to the tables directly: see exchange_gradient.
    with record.stop_recording():
        asked = request(tables, [feature.keys for feature in features], table_of)
        held, rows = read_owned(tables, asked.keys, insert, default_value)
        words = asked.words_to_askers(held)
    return pool(asked, features, table_of, combiners, Received.from_ranks(asked, words, held), rows)


def read_owned(
    tables: Sequence[Spread], keys: Sequence[Any], insert: bool, default_value: Any = None
) -> tuple[list[Any], list[Any]]:
    """The vectors of keys that this rank holds, and the row ids of those of dynamic tables.

    Returns:
        (vectors, rows): for each table [n, dimension], and uint32 [n] or [0].
    """
    library = _ops.library()
    vectors: list[Any] = [None] * len(tables)
    rows: list[Any] = [tf.zeros([0], tf.uint32)] * len(tables)
    dynamic = [t for t, table in enumerate(tables) if table.is_dynamic]
    if default_value is not None:
        vectors[0], rows[0] = library.dynemb_lookup(
            tables[0].variable.handle, keys[0], default_value, insert=False
        )
    else:
        for group in by_placement([tables[t].variable for t in dynamic]):
            numbers = [dynamic[i] for i in group]
            read, read_rows, _ = library.dynemb_lookup_sparse(
                handles=[tables[t].variable.handle for t in numbers],
                keys=[keys[t] for t in numbers],
                bags=[_ops.one_each()] * len(numbers),
                weights=[tf.zeros([0], tf.float32)] * len(numbers),
                num_bags=[tf.size(keys[t], out_type=tf.int64) for t in numbers],
                dtypes=[tables[t].dtype for t in numbers],
                dims=[tables[t].dimension for t in numbers],
                combiners=["sum"] * len(numbers),
                insert=insert,
            )
            for t, of_table, its_rows in zip(numbers, read, read_rows, strict=True):
                vectors[t], rows[t] = of_table, its_rows
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
    rows: Sequence[Any],
) -> list[Any]:
    """Pools the vectors that came; the gradient goes to the tables.

    Args:
        asked: the request that they came for.
        features: the bags of each feature.
        table_of: for each feature.
        combiners: for each feature.
        vectors: what came.
        rows: for each table, the row ids of `asked.keys`.
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
            came=vectors.came,
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
    rows: Sequence[Any],
    sent: Any,
    received: Any,
    what: str,
    name: str | None = None,
    device: str = _ops.CPU,
) -> list[Any]:
    """One alltoall of rows of tables. Those of this rank for itself are only copied.

    Args:
        names: of the tables.
        wire: of the tables.
        rows: [n, width] of each.
        sent: int64 [tables, ranks]: rows for each rank.
        received: the same: rows that come from each.
        what: "vectors", "gradients", or "other": what is no embedding travels as it is.
        name: of the alltoall; None: made of `what`.
        device: where the rows are, and come to be.
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
                dims=[int(of_table.shape[1]) for of_table in rows],
                wire=wire,
                rank=communicator.get().rank,
            )
        )


def send_words(
    names: Sequence[str],
    wire: Sequence[str],
    rows: Sequence[Any],
    sent: Any,
    what: str,
    name: str | None = None,
    device: str = _ops.CPU,
) -> Any:
    """The first half of `send_rows`: the words of the messages that come."""
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


def send_gradients(words: Any, splits: Any, device: str) -> Any:
    """An alltoall of gradients that are packed already."""
    words, _ = _alltoall(words, splits, "dynemb_gradients", device)
    return words


def _alltoall(words: Any, splits: Any, name: str, device: str) -> tuple[Any, Any]:
    """An alltoall on the device where the words are, or on the CPU if it can only be there."""
    comm = communicator.get()
    with _ops.on(device if comm.alltoall_on_gpu else _ops.CPU):
        return comm.alltoall(words, splits, name)


def exchange_counts(counts: Any, name: str) -> Any:
    """How many rows come from each rank, where `counts` go to each: int64 [tables, ranks] both."""
    tables, ranks = counts.shape
    with _ops.on_host():
        received, _ = communicator.get().alltoall(
            tf.reshape(tf.transpose(counts), [-1]), tf.fill([ranks], tables), name
        )
        return tf.transpose(tf.reshape(received, [ranks, tables]))


def device_of(tables: Sequence[Spread]) -> str:
    """The device of an exchange for these tables."""
    return common_device([table.variable for table in tables])


def spread_tables(variables: Sequence[Any]) -> tuple[list[Spread], list[int], list[int]]:
    """Which of the variables of a lookup are spread over ranks.

    Returns:
        (tables, table_of, places): these, each once; and for each of their places among the
        variables the number of its table.
    """
    places = [i for i, variable in enumerate(variables) if hasattr(variable, "spread")]
    tables = list({id(variables[i]): variables[i].spread for i in places}.values())
    number = {id(table.variable): n for n, table in enumerate(tables)}
    return tables, [number[id(variables[i])] for i in places], places


def exchange_stats(name: str) -> dict[str, int]:
    """What this rank has sent to others for the table of this name in the exchange."""
    with tf.init_scope(), _ops.on_host():
        names, values = _ops.library().dynemb_exchange_stats(table=name)
    return {
        name.decode(): int(value) for name, value in zip(names.numpy(), values.numpy(), strict=True)
    }
