"""The gradient of a lookup over ranks: from pooled vectors to the rows that this rank holds.

It is the gradient of the operator that pools (DynembPoolRows). The operator's inputs include all
that the gradient needs from the exchange before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops

from tf_dynemb import _ops, communicator
from tf_dynemb.parallel.exchange import exchange_counts, send_gradients, send_rows


class _Pooled:
    """The inputs, outputs and attributes of a DynembPoolRows operation, by name."""

    def __init__(self, op: tf.Operation) -> None:
        inputs, outputs = list(op.inputs), list(op.outputs)
        self.table_of = [int(t) for t in op.get_attr("tables")]
        self.names, self.combiners, self.wire = (
            _ops.strings_of(op, name) for name in ("names", "combiners", "wire")
        )
        self.dynamic = [bool(d) for d in op.get_attr("dynamic")]
        self.in_order = bool(op.get_attr("in_order"))
        self.rank = int(op.get_attr("rank"))
        n = self.num_features = len(self.table_of)
        t = self.num_tables = len(self.names)
        remaining = iter(inputs)

        def take(count: int) -> list[tf.Tensor]:
            return list(itertools.islice(remaining, count))

        self.handles = take(n)
        (self.words,) = take(1)
        self.held = take(t)
        self.first_weight = n + 1 + t + 2 * n  # its position among the inputs
        self.index, self.bags, self.weights, self.num_bags = (take(n) for _ in range(4))
        self.owned_keys, self.owned_rows = take(t), take(t)
        self.received, self.sent, self.asked, self.served = take(4)
        self.outputs, self.argmax = outputs[:n], outputs[n:]
        # The operation's device. Its eager stand-in has none; its output has one.
        self.device = op.device if isinstance(op, tf.Operation) else outputs[0].device
        # The first feature that reads each table.
        self.first = [self.table_of.index(table) for table in range(t)]
        self.dims = [int(held.shape[1]) for held in self.held]

    def upstream(self, grads: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
        """Returns the gradients of the pooled vectors; zeros for vectors that have none."""
        return [
            tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
            for output, grad in zip(self.outputs, grads[: self.num_features], strict=True)
        ]


@tf.RegisterGradient("DynembPoolRows")  # type: ignore[untyped-decorator]
def _pool_gradient(
    op: tf.Operation, *grads: tf.Tensor | None
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    pooled = _Pooled(op)
    upstream = pooled.upstream(grads)
    n = pooled.num_features
    with record.stop_recording():
        if pooled.in_order:
            with _ops.on_host():  # except for the sums
                keys, sums, rows = _gradient_in_order(pooled, upstream)
        else:
            keys, sums, rows = _gradient(pooled, upstream)
        weight_grads = _weight_gradients(pooled, upstream, op)
    sums = [_without_gradient(total, upstream) for total in sums]
    handle_grads: list[tf.IndexedSlices | None] = [None] * n
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


def _without_gradient(sums: tf.Tensor, upstream: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns sums whose gradient is an error; without it, a second derivative would be missing."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(sums: tf.Tensor, *_: tf.Tensor) -> Any:
        def refuse(*_: tf.Tensor) -> NoReturn:
            raise NotImplementedError(
                "With several ranks there is no second derivative with respect to a table. "
                "Differentiate with respect to the vectors that a lookup returns."
            )

        return tf.identity(sums), refuse

    return identity(sums, *upstream)


def _gradient(pooled: _Pooled, upstream: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], ...]:
    """Sums for each key of the request, sends the sums to the owners, and sums what they receive.

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
    pooled: _Pooled, upstream: Sequence[tf.Tensor]
) -> tuple[list[tf.Tensor], ...]:
    """Same as `_gradient`, with the bits that one rank would get for the batches of all ranks.

    Adding floats in another order gives other bits. Each id's gradient is therefore sent
    separately, and the owner adds gradients as the operators of one process do: the ids of a
    feature in their order, rank after rank, and then feature after feature.
    """
    library = _ops.library()
    num_rows = [tf.size(index, out_type=tf.int64) for index in pooled.index]
    _, _, gradients = library.dynemb_pool_rows_grad(
        index=[tf.cast(tf.range(n), tf.uint32) for n in num_rows],
        bags=pooled.bags,
        weights=pooled.weights,
        argmax=pooled.argmax,
        grads=list(upstream),
        counts=tf.stack(num_rows)[:, tf.newaxis],  # as if there were only this rank
        tables=list(range(pooled.num_features)),
        dims=[pooled.dims[table] for table in pooled.table_of],
        combiners=pooled.combiners,
        wire=["same"] * pooled.num_features,
        names=[pooled.names[table] for table in pooled.table_of],
        rank=0,
        T=pooled.num_features,
    )
    # Each id belongs to the owner of its key. `place` is the key's position among the keys asked of
    # the owner.
    sent, places, ordered = [], [], []
    for index, gradient, table in zip(pooled.index, gradients, pooled.table_of, strict=True):
        ends = tf.cumsum(pooled.asked[table])
        begins = ends - pooled.asked[table]
        where = tf.cast(index, tf.int64)
        owner = tf.searchsorted(ends, where, side="right", out_type=tf.int64)
        order = tf.argsort(owner, stable=True)
        place = where - tf.gather(begins, owner)
        sent.append(tf.math.bincount(owner, minlength=communicator.get().size, dtype=tf.int64))
        places.append(tf.cast(tf.gather(place, order), tf.int32)[:, tf.newaxis])
        ordered.append(tf.gather(gradient, order))
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
    keys: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
    unique: Sequence[tf.Tensor],
    sums: Sequence[tf.Tensor],
    rows: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], ...]:
    """Joins the gradients of features to gradients of tables, in the order of the features.

    For a dynamic table, one process adds up the ids of each feature, and then the features. For a
    matrix it adds up all ids of all features at once.
    """
    joined_tables: tuple[list[tf.Tensor], ...] = ([], [], [])
    for table in range(pooled.num_tables):
        features = [i for i, t in enumerate(pooled.table_of) if t == table]
        if len(features) == 1:
            joined = (unique[features[0]], sums[features[0]], rows[features[0]])
        else:
            added = (unique, sums) if pooled.dynamic[table] else (keys, values)
            with _ops.on(pooled.device):
                joined = (
                    *_ops.library().dynemb_dedup_sum(
                        *(
                            tf.concat([feature_values[i] for i in features], 0)
                            for feature_values in added
                        )
                    ),
                    tf.zeros([0], tf.uint32),
                )
        for joined_values, table_values in zip(joined_tables, joined, strict=True):
            joined_values.append(table_values)
    return joined_tables


def _sum_per_key(
    pooled: _Pooled,
    keys: Sequence[tf.Tensor],
    rows: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], ...]:
    """Adds up the values of equal keys in their order; `rows` of static tables can be missing."""
    rows = [
        table_rows if table_rows.shape[0] != 0 else tf.zeros(tf.shape(table_keys), tf.uint32)
        for table_rows, table_keys in zip(rows, keys, strict=True)
    ]
    count = len(keys)
    with _ops.on(pooled.device):  # where one rank would add them up
        summed = _ops.library().dynemb_lookup_sparse_grad(
            keys=list(keys),
            rows=rows,
            bags=[_ops.one_each()] * count,
            weights=[tf.zeros([0], tf.float32)] * count,
            argmax=[tf.zeros([0, int(v.shape[1])], tf.int32) for v in values],
            grads=list(values),
            combiners=["sum"] * count,
        )
    return tuple(map(list, summed))


def _weight_gradients(
    pooled: _Pooled, upstream: Sequence[tf.Tensor], op: tf.Operation
) -> list[tf.Tensor | None]:
    """Returns the gradients of the weights of each feature; None for those not requested."""
    skipped = getattr(op, "skip_input_indices", None) or ()
    n, first = pooled.num_features, pooled.first_weight
    # Zeros instead of None, even if this rank has no ids: the inputs of the weights have a gradient
    # on other ranks, and all ranks must reduce the same variables.
    weight_grads: list[tf.Tensor | None] = [
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
                received=pooled.received,
                sent=pooled.sent,
                tables=pick(pooled.table_of),
                combiners=pick(pooled.combiners),
                wire=pooled.wire,
                rank=pooled.rank,
            )
        for i, weight_grad in zip(wanted, computed, strict=True):
            weight_grads[i] = weight_grad
    return weight_grads
