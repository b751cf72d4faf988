"""The gradient of a lookup over ranks: from pooled vectors to the rows that this rank holds.

It is the gradient of the operator that pools (DynembPoolRows), whose inputs carry what it needs of
the exchange before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

from tf_dynemb import _ops, communicator
from tf_dynemb.parallel.exchange import exchange_counts, send_gradients, send_rows


class _Pooled:
    """The inputs, outputs and attributes of a DynembPoolRows operation, by name."""

    def __init__(self, op: Any) -> None:
        def attr(name: str) -> Any:
            value = op.get_attr(name)
            return [v.decode() if isinstance(v, bytes) else v for v in value]

        inputs, outputs = list(op.inputs), list(op.outputs)
        self.table_of = [int(t) for t in op.get_attr("tables")]
        self.names, self.combiners, self.wire = attr("names"), attr("combiners"), attr("wire")
        self.dynamic = [bool(d) for d in op.get_attr("dynamic")]
        self.in_order = bool(op.get_attr("in_order"))
        self.rank = int(op.get_attr("rank"))
        n = self.num_features = len(self.table_of)
        t = self.num_tables = len(self.names)
        rest = iter(inputs)

        def take(count: int) -> list[Any]:
            return list(itertools.islice(rest, count))

        self.handles = take(n)
        (self.words,) = take(1)
        self.held = take(t)
        self.first_weight = n + 1 + t + 2 * n  # of the inputs
        self.index, self.bags, self.weights, self.num_bags = (take(n) for _ in range(4))
        self.owned_keys, self.owned_rows = take(t), take(t)
        self.came, self.sent, self.asked, self.served = take(4)
        self.outputs, self.argmax = outputs[:n], outputs[n:]
        # Of the operation; of its eager stand-in, which has none, that of what it made.
        self.device = op.device if isinstance(op, tf.Operation) else outputs[0].device
        # The first feature that reads each table.
        self.first = [self.table_of.index(table) for table in range(t)]
        self.dims = [int(held.shape[1]) for held in self.held]

    def upstream(self, grads: Sequence[Any]) -> list[Any]:
        """The gradients of the pooled vectors; zeros where there is none."""
        return [
            tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
            for output, grad in zip(self.outputs, grads[: self.num_features], strict=True)
        ]


@tf.RegisterGradient("DynembPoolRows")  # type: ignore[untyped-decorator]
def _pool_gradient(op: Any, *grads: Any) -> list[Any]:
    pooled = _Pooled(op)
    upstream = pooled.upstream(grads)
    n = pooled.num_features
    with record.stop_recording():
        if pooled.in_order:
            with _ops.on_host():  # but for what is added up
                keys, sums, rows = _gradient_in_order(pooled, upstream)
        else:
            keys, sums, rows = _gradient(pooled, upstream)
        weight_grads = _weight_gradients(pooled, upstream, op)
    handle_grads: list[Any] = [None] * n
    for table, i in enumerate(pooled.first):
        if pooled.dynamic[table]:
            handle_grads[i] = _ops.row_gradient(keys[table], sums[table], rows[table])
        else:
            handle = pooled.handles[i]
            handle_grads[i] = tf.IndexedSlices(
                values=tf.cast(sums[table], pooled.held[table].dtype),
                indices=keys[table],
                dense_shape=resource_variable_ops.variable_shape(handle),
            )
    none: list[Any] = [None]
    before = pooled.first_weight - n
    after = len(op.inputs) - pooled.first_weight - n
    return handle_grads + none * before + weight_grads + none * after


def _gradient(pooled: _Pooled, upstream: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Sums per key of the request, sends them to the owners, and adds up what arrives there.

    Returns:
        (keys, sums, rows), each for every table.
    """
    rank = communicator.get().rank
    with _ops.on(pooled.device):
        words, splits, own = _ops.library().dynemb_pool_rows_grad(
            index=pooled.index,
            bags=pooled.bags,
            weights=pooled.weights,
            argmax=pooled.argmax,
            grads=list(upstream),
            counts=pooled.asked,
            tables=pooled.table_of,
            dims=pooled.dims,
            combiners=pooled.combiners,
            wire=pooled.wire,
            names=pooled.names,
            rank=rank,
            T=pooled.num_tables,
        )
    words = send_gradients(words, splits, pooled.device)
    with _ops.on(pooled.device):
        keys, sums, rows = _ops.library().dynemb_sum_received(
            keys=pooled.owned_keys,
            rows=pooled.owned_rows,
            words=words,
            own=own,
            counts=pooled.served,
            wire=pooled.wire,
            rank=rank,
        )
    return list(keys), list(sums), list(rows)


def _gradient_in_order(
    pooled: _Pooled, upstream: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """As `_gradient`, with the bits that one rank would get for the batches of all ranks in a row.

    Adding floats in another order gives other bits. So each id's part travels on its own, and the
    owner adds them up as the operators of one process do: the ids of a feature in their order, rank
    after rank; then feature after feature.
    """
    library = _ops.library()
    num_rows = [tf.size(index, out_type=tf.int64) for index in pooled.index]
    _, _, parts = library.dynemb_pool_rows_grad(
        index=[tf.cast(tf.range(n), tf.uint32) for n in num_rows],
        bags=pooled.bags,
        weights=pooled.weights,
        argmax=pooled.argmax,
        grads=list(upstream),
        counts=tf.stack(num_rows)[:, tf.newaxis],  # as if for one rank, this one
        tables=list(range(pooled.num_features)),
        dims=[pooled.dims[table] for table in pooled.table_of],
        combiners=pooled.combiners,
        wire=["same"] * pooled.num_features,
        names=[pooled.names[table] for table in pooled.table_of],
        rank=0,
        T=pooled.num_features,
    )
    # Each id belongs to the owner of its key; `place` is the key's among those asked of the owner.
    sent, places, ordered = [], [], []
    for index, part, table in zip(pooled.index, parts, pooled.table_of, strict=True):
        ends = tf.cumsum(pooled.asked[table])
        begins = ends - pooled.asked[table]
        where = tf.cast(index, tf.int64)
        owner = tf.searchsorted(ends, where, side="right", out_type=tf.int64)
        order = tf.argsort(owner, stable=True)
        place = where - tf.gather(begins, owner)
        sent.append(tf.math.bincount(owner, minlength=communicator.get().size, dtype=tf.int64))
        places.append(tf.cast(tf.gather(place, order), tf.int32)[:, tf.newaxis])
        ordered.append(tf.gather(part, order))
    counts = tf.ensure_shape(tf.stack(sent), [pooled.num_features, communicator.get().size])
    arrived_counts = exchange_counts(counts, "dynemb_counts")
    names = [pooled.names[table] for table in pooled.table_of]
    wire = [pooled.wire[table] for table in pooled.table_of]
    arrived_places = send_rows(names, wire, places, counts, arrived_counts, "other")
    arrived = send_rows(names, wire, ordered, counts, arrived_counts, "gradients")

    keys, rows = [], []
    for feature, table in enumerate(pooled.table_of):
        # Places count from the first key that their rank asked for.
        begins = tf.cumsum(pooled.served[table], exclusive=True)
        place = tf.cast(arrived_places[feature][:, 0], tf.int64)
        place += tf.repeat(begins, arrived_counts[feature])
        keys.append(tf.gather(pooled.owned_keys[table], place))
        has_rows = pooled.dynamic[table]
        rows.append(
            tf.gather(pooled.owned_rows[table], place)
            if has_rows
            else tf.zeros([tf.size(place)], tf.uint32)
        )
    summed = _sum_per_key(pooled, keys, rows, arrived)
    return _join_features(pooled, keys, arrived, *summed)


def _join_features(
    pooled: _Pooled,
    keys: Sequence[Any],
    values: Sequence[Any],
    unique: Sequence[Any],
    sums: Sequence[Any],
    rows: Sequence[Any],
) -> tuple[list[Any], list[Any], list[Any]]:
    """From gradients of features to those of tables, in the order of the features.

    One process adds up the ids of each feature of a dynamic table, and then the features; of a
    matrix all ids of all features at once.
    """
    of_tables: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for table in range(pooled.num_tables):
        its = [i for i, t in enumerate(pooled.table_of) if t == table]
        if len(its) == 1:
            parts = (unique[its[0]], sums[its[0]], rows[its[0]])
        else:
            added = (unique, sums) if pooled.dynamic[table] else (keys, values)
            with _ops.on(pooled.device):
                parts = (
                    *_ops.library().dynemb_dedup_sum(
                        *(tf.concat([part[i] for i in its], 0) for part in added)
                    ),
                    tf.zeros([0], tf.uint32),
                )
        for of_table, part in zip(of_tables, parts, strict=True):
            of_table.append(part)
    return of_tables


def _sum_per_key(
    pooled: _Pooled, keys: Sequence[Any], rows: Sequence[Any], values: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Adds up the values of equal keys, in their order. `rows` of static tables may be missing."""
    rows = [
        of_table if of_table.shape[0] != 0 else tf.zeros(tf.shape(its_keys), tf.uint32)
        for of_table, its_keys in zip(rows, keys, strict=True)
    ]
    count = len(keys)
    with _ops.on(pooled.device):  # as one rank would add them up there
        summed = _ops.library().dynemb_lookup_sparse_grad(
            keys=list(keys),
            rows=rows,
            bags=[_ops.one_each()] * count,
            weights=[tf.zeros([0], tf.float32)] * count,
            argmax=[tf.zeros([0, int(v.shape[1])], tf.int32) for v in values],
            grads=list(values),
            combiners=["sum"] * count,
        )
    return tuple(map(list, summed))  # type: ignore[return-value]


def _weight_gradients(pooled: _Pooled, upstream: Sequence[Any], op: Any) -> list[Any]:
    """The gradients of the weights of each feature; None where nothing asks for it."""
    skipped = getattr(op, "skip_input_indices", None) or ()
    n, first = pooled.num_features, pooled.first_weight
    # Zeros, not None, also where this rank has no ids: what the weights are made of has a gradient
    # on other ranks, and all of them must reduce the same variables.
    weight_grads: list[Any] = [
        None if first + i in skipped else tf.zeros_like(weights)
        for i, weights in enumerate(pooled.weights)
    ]
    wanted = [
        i
        for i in range(n)
        if pooled.weights[i].shape.dims is None or pooled.weights[i].shape[0] != 0
        if first + i not in skipped
    ]
    if wanted:

        def pick(values: Sequence[Any]) -> list[Any]:
            return [values[i] for i in wanted]

        with _ops.on(pooled.device):
            computed = _ops.library().dynemb_pool_rows_weight_grad(
                words=pooled.words,
                held=pooled.held,
                index=pick(pooled.index),
                bags=pick(pooled.bags),
                weights=pick(pooled.weights),
                argmax=pick(pooled.argmax),
                outputs=pick(pooled.outputs),
                grads=pick(upstream),
                came=pooled.came,
                sent=pooled.sent,
                tables=pick(pooled.table_of),
                combiners=pick(pooled.combiners),
                wire=pooled.wire,
                rank=pooled.rank,
            )
        for i, weight_grad in zip(wanted, computed, strict=True):
            weight_grads[i] = weight_grad
    return weight_grads
