"""prefetch_lookup: the exchange for the next batch while the current one is trained on.

On several ranks, keys and vectors are exchanged ahead. In one process, rows in files are read ahead
(docs/file_tier.md); the table does not change, and the lookup is an ordinary one.

**On several ranks.** The step that runs meanwhile can change rows that were read ahead. When a
batch is used, the owners of its rows therefore check which rows have been updated, removed or
replaced since they were read, and send only those again. A prefetched lookup thus gives the same
result as a lookup at that time; no vector is ever older than the last step. Prefetching saves the
exchange of all keys, and of the vectors that the last step did not change. Rows in files are read
without the table's lock, and then moved to memory.

Reading from other ranks creates no rows, and so evicts none that the running step needs. Rows for
unknown keys are created when the batch is used. Reading counts as an access: a full table evicts
other rows than it would without it, but none that the next batch is going to use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Tuple  # noqa: UP035 (an ExtensionType's fields are typing's)

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

from tf_dynemb import _ops, communicator
from tf_dynemb.ids.bags import Bags
from tf_dynemb.lookup.features import as_features, as_list
from tf_dynemb.parallel import exchange, key_counts
from tf_dynemb.parallel.exchange import Request, Spread
from tf_dynemb.parallel.placement import by_placement, device_of
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.unwrap import unwrap

_Tensors = Tuple[tf.Tensor, ...]  # noqa: UP006


class Prefetched(tf.experimental.ExtensionType):  # type: ignore[misc]
    """Ids that have been looked up ahead; `lookup_sparse` accepts them as `sp_ids`.

    Attributes:
        keys: the keys of each feature. This and the next three are the fields of `bags.Bags`.
        bags: the bags of each feature.
        weights: the weights of each feature.
        num_bags: the number of bags of each feature.
        index: for each feature in a table that is spread over ranks, the positions of its keys in
            the request. This and the next three are the fields of an `exchange.Request`.
        owned: for each of these tables, the keys that this rank is asked for (`Request.keys`).
        asked: the number of keys that this rank asks each rank for.
        served: the number of keys that each rank asks this rank for.
        vectors: for each of these tables, the vectors that were read.
        rows: for each of these tables, the row ids of `owned` when they were read.
        tick: a tick before the vectors were read.
    """

    keys: _Tensors
    bags: _Tensors
    weights: _Tensors
    num_bags: _Tensors
    index: _Tensors
    owned: _Tensors
    asked: tf.Tensor
    served: tf.Tensor
    vectors: _Tensors
    rows: _Tensors
    tick: tf.Tensor

    @property
    def features(self) -> list[Bags]:
        """The ids of each feature."""
        fields = zip(self.keys, self.bags, self.weights, self.num_bags, strict=True)
        return [Bags(*values, static_num_bags=None) for values in fields]


def prefetch_lookup(
    dataset: Iterable[Any],
    params: Any,
    ids: Callable[[Any], Any],
    weights: Callable[[Any], Any] | None = None,
) -> Iterator[tuple[Any, Prefetched]]:
    """Iterates over a dataset, and looks up the ids of each batch while the one before is in use.

    On several ranks it is collective: every rank iterates over the same number of batches. Nothing
    is read ahead if a table has `admission`, because the batch in use can change the vectors of
    unknown keys.

    In one process, the rows of tables with `file_path` are read from their files ahead, into memory
    besides `max_dram_for_vectors`: the rows of three batches. Other tables need not wait.

    Example:
    >>> users = DynamicVariable(dimension=2, initializer="1")
    >>> dataset = tf.data.Dataset.from_tensor_slices([[1, 2], [2, 3]])
    >>> for batch, ahead in prefetch_lookup(dataset, users, ids=lambda batch: batch):
    ...     print(lookup_sparse(users, ahead, combiners="sum").shape)
    (2, 2)
    (2, 2)

    Args:
        dataset: an iterable of batches, such as a `tf.data.Dataset`.
        params: a table or a list of tables, as in `lookup_sparse`.
        ids: a function that returns the ids of a batch: `sp_ids` of `lookup_sparse`.
        weights: a function that returns their weights: `sp_weights` of `lookup_sparse`.

    Yields:
        (batch, ahead): `ahead` replaces `sp_ids` in one call of `lookup_sparse` with the same
        `params`. The call can be inside a `tf.function` that has `ahead` as an argument.

    Raises:
        ValueError, TypeError: the ids or weights of a batch are invalid, as in `lookup_sparse`;
            raised by the iteration.
    """
    single = not isinstance(params, (list, tuple))
    tables = [unwrap(t) for t in as_list(params)]

    def features(batch: Any) -> list[Bags]:
        sp_weights = None if weights is None else weights(batch)
        return as_features(tables, single, ids(batch), sp_weights)

    reader: _Reader | _FileReader
    if reads_ahead(tables):
        reader = _Reader(tables)
    elif communicator.get().size == 1 and any(_has_files(t) for t in tables):
        reader = _FileReader(tables)
    else:
        for batch in dataset:
            yield batch, _nothing_ahead(features(batch))
        return
    batches = iter(dataset)

    def next_batch() -> tuple[Any, Prefetched] | None:
        try:
            batch = next(batches)
        except StopIteration:
            return None
        return batch, reader.read(features(batch))

    coming = _Task(next_batch)
    try:
        while (one := coming.result()) is not None:
            coming = _Task(next_batch)
            yield one
    finally:
        reader.close()


def reads_ahead(tables: Sequence[Any]) -> bool:
    """Whether `prefetch_lookup` reads the vectors of these tables ahead."""
    spread, _, _ = exchange.spread_tables(tables)
    admits = any(t.is_dynamic and t.variable.options.admission for t in spread)
    return communicator.get().size > 1 and not admits


class _Task(threading.Thread):
    """A call in its own thread, which the process does not wait for when it exits.

    It is not run by an executor, because a process waits for an executor's threads when it exits,
    and this thread can be in an exchange with ranks that have failed.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="dynemb_prefetch", daemon=True)
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Runs the function; `threading.Thread` calls it."""
        try:
            self._result = self._function()
        except BaseException as error:  # raised again by result()
            self._error = error

    def result(self) -> Any:
        """Waits for the function; returns its result, or raises its error."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._result


def _has_files(table: Any) -> bool:
    return isinstance(table, DynamicVariable) and table.options.file_path is not None


class _FileReader:
    """Reads rows from the files of tables, before the lookup that needs them."""

    def __init__(self, tables: Sequence[Any]) -> None:
        self._lock, self._is_closed = threading.Lock(), False
        # Each table, and the positions of its features.
        self._tables = [
            (table, [i for i, other in enumerate(tables) if other is table])
            for table in {id(table): table for table in tables if _has_files(table)}.values()
        ]

    def read(self, features: Sequence[Bags]) -> Prefetched:
        """Reads the rows of a batch."""
        with self._lock:
            if not self._is_closed:
                for table, places in self._tables:
                    self._read(table, [features[i].keys for i in places])
        return _nothing_ahead(features)

    def _read(self, table: Any, keys: Sequence[Any]) -> None:
        with _ops.on(device_of(table)):
            _ops.library().dynemb_read_ahead(table.handle, tf.concat(keys, 0))

    def close(self) -> None:
        """Frees the rows of the last batches. Does not wait for a batch, which may never come."""
        with self._lock:
            self._is_closed = True
            for table, _ in self._tables:
                _free_ahead(table)


def _free_ahead(table: DynamicVariable) -> None:
    """Frees the rows that the last two reads have read ahead from a table's files."""
    with _ops.on(device_of(table)):
        for _ in range(2):
            _ops.library().dynemb_read_ahead(table.handle, tf.zeros([0], table.key_type))


def _nothing_ahead(features: Sequence[Bags]) -> Prefetched:
    none = tf.zeros([0, 1], tf.int64)
    return _prefetched(features, (), (), none, none, (), (), tf.constant(0, tf.int64))


def _prefetched(features: Sequence[Bags], *read: Any) -> Prefetched:
    return Prefetched(
        tuple(f.keys for f in features),
        tuple(f.bags for f in features),
        tuple(f.weights for f in features),
        tuple(f.num_bags for f in features),
        *read,
    )


class _Reader:
    """Reads the vectors of batches from the same tables every time.

    It reads in a graph, whose operations have names. The ranks match their exchanges by these.
    """

    def __init__(self, tables: Sequence[Any]) -> None:
        spread, self._table_of, self._places = exchange.spread_tables(tables)
        self._tables: list[Spread] = spread
        self._read = tf.function(self._read_keys, reduce_retracing=True, autograph=False)

    def read(self, features: Sequence[Bags]) -> Prefetched:
        """Looks up the ids of a batch."""
        if not self._tables:
            return _nothing_ahead(features)
        keys = [features[i].keys for i in self._places]
        with _ops.on(exchange.device_of(self._tables)):
            index, owned, asked, served, vectors, rows, tick = self._read(keys)
        return _prefetched(
            features,
            tuple(index),
            tuple(owned),
            asked,
            served,
            tuple(vectors),
            tuple(rows),
            tick,
        )

    def _read_owned(self, keys: Sequence[Any]) -> tuple[Any, Any]:
        """Reads the rows that other ranks ask for; rows in files without the tables' locks."""
        files = [
            (table.variable, table_keys)
            for table, table_keys in zip(self._tables, keys, strict=True)
            if _has_files(table.variable)
        ]
        for table, table_keys in files:
            with _ops.on(device_of(table)):
                _ops.library().dynemb_read_ahead(table.handle, table_keys)
        result = exchange.read_owned(self._tables, keys, insert=False)
        for table, _ in files:
            _free_ahead(table)
        return result

    def close(self) -> None:
        """Leaves a read that runs: ranks that have failed may never answer it."""

    def _read_keys(self, keys: list[Any]) -> tuple[Any, ...]:
        with record.stop_recording():
            asked = exchange.request(self._tables, keys, self._table_of, name="dynemb_ahead_keys")
            # Before the tables are read: rows updated after this tick are read again.
            with tf.control_dependencies(asked.keys):
                tick = _ops.library().dynemb_tick_before(tf.constant(2**63 - 1, tf.int64))
            with tf.control_dependencies([tick]), _ops.on(asked.device):
                owned = [tf.identity(table_keys) for table_keys in asked.keys]
            held, rows = self._read_owned(owned)
            vectors = asked.to_askers(held, "vectors", name="dynemb_ahead_vectors")
        return asked.index, owned, asked.asked, asked.served, vectors, rows, tick


def finish(
    tables: Sequence[Spread],
    table_of: Sequence[int],
    places: Sequence[int],
    ahead: Prefetched,
    combiners: Sequence[str],
    insert: bool,
) -> list[Any]:
    """Returns the pooled vectors, as they are now, of ids that were looked up ahead.

    Args:
        tables: the tables that are spread over ranks.
        table_of: for each feature that reads one of them, the number of the table.
        places: the positions of these features among all features.
        ahead: the ids and vectors that were read ahead.
        combiners: the combiners of these features.
        insert: whether unknown keys get rows.

    Returns:
        For each of these features, [num_bags, dimension] of its table's dtype.
    """
    if not tables:
        return []
    for table in tables:
        resource_variable_ops.variable_accessed(table.variable)
    features = ahead.features
    asked = Request(
        tables,
        list(ahead.index),
        ahead.asked,
        list(ahead.owned),
        ahead.served,
        exchange.device_of(tables),
    )
    with record.stop_recording():
        vectors, rows = _read_again(asked, ahead, insert)
        if insert:
            key_counts.add_counts(asked, key_counts.count_repeats(asked, table_of))
    received = exchange.Received.in_order(vectors)
    return exchange.pool(asked, [features[i] for i in places], table_of, combiners, received, rows)


class _Changed(NamedTuple):
    """The data that this rank has for the ranks that read a table's rows ahead.

    Attributes:
        rows: the row ids of all keys that this rank is asked for; [0] for a static table.
        places: int32 [n, 1]: the keys whose vectors are sent again, in the order of the ranks; each
            counts from the first key that its rank asks for.
        vectors: the vectors of these keys.
        counts: int64 [ranks]: the number of these keys for each rank.
    """

    rows: Any
    places: Any
    vectors: Any
    counts: Any


def _read_again(asked: Request, ahead: Prefetched, insert: bool) -> tuple[list[Any], list[Any]]:
    """Reads rows that have changed since `ahead` again; returns the current (vectors, rows)."""
    tables = asked.tables
    changed_rows = {**_changed_rows(asked, ahead, insert), **_all_static_rows(asked)}
    changed = [changed_rows[t] for t in range(len(tables))]
    with _ops.on_host():
        counts = tf.stack([each.counts for each in changed])
        arriving = exchange.exchange_counts(counts, "dynemb_changed")
        sent_twice, arriving_twice = tf.tile(counts, [2, 1]), tf.tile(arriving, [2, 1])
    received = exchange.send_rows(
        [table.name for table in tables] * 2,
        ["same"] * len(tables) + [table.wire for table in tables],
        [each.places for each in changed] + [each.vectors for each in changed],
        sent_twice,
        arriving_twice,
        "vectors",
        name="dynemb_again",
        device=asked.device,
    )
    places, vectors = received[: len(tables)], received[len(tables) :]
    current = []
    for t in range(len(tables)):
        with _ops.on_host():
            first = tf.repeat(tf.cumsum(asked.asked[t], exclusive=True), arriving[t])
            first = first[:, tf.newaxis]
        with _ops.on(asked.device):
            where = tf.cast(places[t], tf.int64) + first
            current.append(tf.tensor_scatter_nd_update(ahead.vectors[t], where, vectors[t]))
    return current, [each.rows for each in changed]


def _changed_rows(asked: Request, ahead: Prefetched, insert: bool) -> dict[int, _Changed]:
    """Reads the rows of dynamic tables that have changed; returns them by number of the table."""
    tables = asked.tables
    dynamic = [t for t, table in enumerate(tables) if table.is_dynamic]
    changed = {}
    for group in by_placement([tables[t].variable for t in dynamic]):
        numbers = [dynamic[i] for i in group]
        with _ops.on_host():
            served = tf.gather(asked.served, numbers)
        rows, places, vectors, counts = _ops.library().dynemb_read_again(
            handles=[tables[t].variable.handle for t in numbers],
            keys=[asked.keys[t] for t in numbers],
            rows_before=[ahead.rows[t] for t in numbers],
            served=served,
            since=ahead.tick,
            dtypes=[tables[t].dtype for t in numbers],
            insert=insert,
        )
        for i, t in enumerate(numbers):
            changed[t] = _Changed(rows[i], places[i], vectors[i], counts[i])
    return changed


def _all_static_rows(asked: Request) -> dict[int, _Changed]:
    """Reads all rows of static tables: a matrix does not record which ones were updated."""
    static = [t for t, table in enumerate(asked.tables) if not table.is_dynamic]
    if not static:
        return {}
    vectors, rows = exchange.read_owned(
        [asked.tables[t] for t in static], [asked.keys[t] for t in static], insert=False
    )
    changed = {}
    for i, t in enumerate(static):
        with _ops.on_host():
            served = asked.served[t]
            places = tf.cast(tf.ragged.range(served).flat_values, tf.int32)[:, tf.newaxis]
        changed[t] = _Changed(rows[i], places, vectors[i], served)
    return changed
