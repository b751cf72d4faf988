"""SOK's own comparisons: tables spread over ranks, and matrices that TensorFlow and Keras train.

The matrices are trained by the first rank, with `tf.nn.embedding_lookup_sparse`, on the batches of
all ranks.
"""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from parallel.ranks.gathered import (
    close,
    draw,
    square_error,
    sum_of_all,
    whole_matrix,
    whole_table,
)


@dataclasses.dataclass(frozen=True)
class Table:
    rows: int
    dim: int
    hotness: int
    combiner: str
    mode: str | None = None


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a training: samples per step, steps, and the divisor of the published rows."""

    batch: int
    steps: int
    rows: int = 1


# The published form takes minutes if four ranks share two cores. The small one has the same
# widths, hotness, and ids per row and step.
SMALL, PUBLISHED = Size(512, 12, 16), Size(8192, 20)


def distributed(size, combiners=("mean", "sum")):
    return [
        Table(40960 // size.rows, 128, 10, combiners[0]),
        Table(8192 // size.rows, 4, 3, combiners[1]),
    ]


def localized(size, ranks):
    """One table for each rank, at least two; the first half uses mean, the rest sum."""
    count = max(ranks, 2)
    return [
        Table(
            8192 // size.rows,
            128 - 8 * i,
            i + 1,
            "mean" if i < count // 2 else "sum",
            f"localized:{i % ranks}",
        )
        for i in range(count)
    ]


class Batches:
    """The batches of all steps, the same on every rank, and the weight of each pooled number."""

    def __init__(self, tables, size, weighted):
        rng = np.random.default_rng(7)
        self.tables, self.size, self.weighted = tables, size, weighted
        self._all = [draw(rng, t.rows, size.batch * size.steps, t.hotness) for t in tables]
        self.upstream = [rng.normal(size=(size.batch, t.dim)).astype(np.float32) for t in tables]

    def of(self, step):
        begin = step * self.size.batch
        return [bags[begin : begin + self.size.batch] for bags in self._all]

    def ids(self):
        """Returns the distinct ids of each table in all steps."""
        return [np.unique(bags.ids) for bags in self._all]

    def spec(self, dtype):
        return [tf.RaggedTensorSpec([None, None], dtype, 1, tf.int64) for _ in self.tables]


class Dense:
    """The same training with TensorFlow only, in this process, on the batches of all ranks."""

    def __init__(self, initial, batches):
        self.variables = [tf.Variable(value) for value in initial]
        self.losses = []
        self._batches = batches
        self._optimizer = keras.optimizers.SGD(1.0)
        specs = [
            [tf.SparseTensorSpec([None, None], dtype) for _ in initial]
            for dtype in (tf.int64, tf.float32)
        ]
        self._step = tf.function(self._step, input_signature=specs)

    def _step(self, ids, weights):
        batches = self._batches
        with tf.GradientTape() as tape:
            loss = tf.constant(0.0)
            for i, (table, upstream) in enumerate(
                zip(batches.tables, batches.upstream, strict=True)
            ):
                pooled = tf.nn.embedding_lookup_sparse(
                    self.variables[i],
                    ids[i],
                    weights[i] if batches.weighted else None,
                    combiner=table.combiner,
                )
                loss += tf.reduce_sum(pooled * upstream)
        grads = tape.gradient(loss, self.variables)
        self._optimizer.apply_gradients(zip(grads, self.variables, strict=True))
        return loss

    def step(self, bags):
        self.losses.append(
            self._step([b.sparse() for b in bags], [b.sparse(b.weights) for b in bags])
        )


def train(comm, variables, batches, optimizer, initial):
    """Trains tables on all ranks, and their twins on the first.

    Returns:
        The losses of all ranks together, and on the first rank the twins.
    """
    rank, ranks = comm.rank, comm.size
    upstream = [u[_share(rank, ranks, len(u))] for u in batches.upstream]
    combiners = [t.combiner for t in batches.tables]
    twins = Dense(initial, batches) if rank == 0 else None

    @tf.function(input_signature=[batches.spec(tf.int64), batches.spec(tf.float32)])
    def step(ids, weights):
        with tf.GradientTape() as tape:
            pooled = de.lookup_sparse(
                variables, ids, weights if batches.weighted else None, combiners=combiners
            )
            loss = tf.add_n([tf.reduce_sum(p * u) for p, u in zip(pooled, upstream, strict=True)])
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    losses = []
    for i in range(batches.size.steps):
        bags = [b.part(rank, ranks) for b in batches.of(i)]
        losses.append(step([b.ragged() for b in bags], [b.ragged(b.weights) for b in bags]))
        if twins is not None:
            twins.step(batches.of(i))
    return sum_of_all(comm, np.array(losses)), twins


def check(got, losses, twins, batches):
    """Compares tables and losses with TensorFlow's; `got` has the vectors of `batches.ids()`."""
    if twins is None:
        return
    # Weights from N(0, 1) may have a sum near 0, and "mean" divides by it.
    tolerance = 1e-3 if batches.weighted else 1e-4
    for values, variable, ids in zip(got, twins.variables, batches.ids(), strict=True):
        expected = variable.numpy()[ids]
        assert square_error(values, expected) < 1e-6
        close(values, expected, tolerance)
    assert square_error(losses, twins.losses) < 1e-6
    close(losses, twins.losses, tolerance)


def _share(rank, ranks, count):
    return slice(rank * count // ranks, (rank + 1) * count // ranks)


def random_matrices(tables):
    rng = np.random.default_rng(3)
    return [rng.random((t.rows, t.dim), np.float32) for t in tables]


@pytest.mark.parametrize("place", ["distributed", "localized"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_static_tables(comm, place, weighted):
    check_static(comm, place, weighted, SMALL)


def check_static(comm, place, weighted, size):
    tables = distributed(size) if place == "distributed" else localized(size, comm.size)
    batches = Batches(tables, size, weighted)
    initial = random_matrices(tables)
    variables = [de.Variable(v, mode=t.mode) for v, t in zip(initial, tables, strict=True)]
    # SOK's scripts step these variables with the Keras optimizer itself.
    losses, twins = train(comm, variables, batches, keras.optimizers.SGD(1.0), initial)
    got = [whole_matrix(comm, v)[ids] for v, ids in zip(variables, batches.ids(), strict=True)]
    check(got, losses, twins, batches)


@pytest.mark.parametrize("place", ["distributed", "localized"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_dynamic_tables_from_constants(comm, place, weighted):
    check_dynamic(comm, place, weighted, SMALL)


def check_dynamic(comm, place, weighted, size):
    tables = distributed(size, ("sum", "sum"))
    if weighted:
        tables = distributed(size, ("mean", "sum"))
    if place == "localized":
        tables = localized(size, comm.size)
    batches = Batches(tables, size, weighted)
    starts = [13 + 4 * i for i in range(len(tables))]
    variables = [
        de.DynamicVariable(t.dim, initializer=str(start), mode=t.mode)
        for t, start in zip(tables, starts, strict=True)
    ]
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(1.0), gradient_reduction="sum")
    initial = [
        np.full((t.rows, t.dim), start, np.float32) for t, start in zip(tables, starts, strict=True)
    ]
    losses, twins = train(comm, variables, batches, optimizer, initial)
    whole = [whole_table(comm, v) for v in variables]
    for rows, ids in zip(whole, batches.ids(), strict=True):
        np.testing.assert_array_equal(rows.keys, ids)
    check([rows.vectors for rows in whole], losses, twins, batches)


@pytest.mark.slow
@pytest.mark.parametrize("check_kind", [check_static, check_dynamic], ids=["static", "dynamic"])
def test_tables_of_the_published_size(comm, check_kind):
    check_kind(comm, "distributed", weighted=False, size=PUBLISHED)


def test_gradients_of_weights(comm):
    """Against TensorFlow on this rank's share: a weight's gradient involves no other rank."""
    tables = [Table(300, 8, 6, "sum"), Table(200, 5, 4, "mean"), Table(100, 3, 5, "sqrtn")]
    batches = Batches(tables, Size(64, 1), weighted=True)
    initial = random_matrices(tables)
    static = [de.Variable(v) for v in initial]
    dynamic = [de.DynamicVariable(t.dim, "zeros") for t in tables]
    for table, value in zip(dynamic, initial, strict=True):
        de.assign(table, np.arange(len(value)), value)
    bags = [b.part(comm.rank, comm.size) for b in batches.of(0)]
    upstream = [u[_share(comm.rank, comm.size, len(u))] for u in batches.upstream]
    bag_weights = [tf.constant(b.weights) for b in bags * 2]
    expected = [tf.constant(b.weights) for b in bags]
    with tf.GradientTape() as tape:
        tape.watch(bag_weights)
        pooled = de.lookup_sparse(
            static + dynamic,
            [b.ragged() for b in bags] * 2,
            [b.ragged(w) for b, w in zip(bags * 2, bag_weights, strict=True)],
            [t.combiner for t in tables] * 2,
        )
        loss = tf.add_n([tf.reduce_sum(p * u) for p, u in zip(pooled, upstream * 2, strict=True)])
    grads = tape.gradient(loss, bag_weights)
    with tf.GradientTape() as tape:
        tape.watch(expected)
        reference = [
            tf.nn.embedding_lookup_sparse(v, b.sparse(), b.sparse(w), combiner=t.combiner)
            for v, b, w, t in zip(map(tf.constant, initial), bags, expected, tables, strict=True)
        ]
        loss = tf.add_n([tf.reduce_sum(p * u) for p, u in zip(reference, upstream, strict=True)])
    expected_grads = tape.gradient(loss, expected)
    for got, want in zip(pooled, reference * 2, strict=True):
        close(got, want, 1e-4)
    for got, want in zip(grads, expected_grads * 2, strict=True):
        close(got, want, 1e-4)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(1.0),
    "momentum": lambda: keras.optimizers.SGD(1.0, momentum=0.9),
    "adagrad": lambda: keras.optimizers.Adagrad(1.0),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adamax": lambda: keras.optimizers.Adamax(1.0),
    "ftrl": lambda: keras.optimizers.Ftrl(1.0),
    "adam": lambda: keras.optimizers.Adam(1.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(1.0),
    "nadam": lambda: keras.optimizers.Nadam(1.0),
}


class RowByRow:
    """A Keras optimizer on a tf.Variable, where a step changes only rows with a gradient."""

    def __init__(self, value, optimizer):
        self.variable = tf.Variable(value)
        self._optimizer = optimizer
        optimizer.build([self.variable])
        self._parts = [self.variable] + [
            v.value for v in optimizer.variables if v.shape == self.variable.shape
        ]

    def numpy(self):
        return self.variable.numpy()

    @tf.function(reduce_retracing=True)
    def step(self, ids, upstream):
        before = [tf.identity(part) for part in self._parts]
        grad = tf.math.unsorted_segment_sum(upstream, ids, self.variable.shape[0])
        self._optimizer.apply_gradients([(grad, self.variable)])
        touched = tf.scatter_nd(ids[:, None], tf.ones_like(ids), self.variable.shape[:1]) > 0
        for part, old in zip(self._parts, before, strict=True):
            part.assign(tf.where(touched[:, None], part, old))


class AdagradOnRows:
    """Keras's Adagrad by its formula, in numpy: fast if few of many rows have a gradient."""

    def __init__(self, value):
        self._value = value.copy()
        self._sum = np.full_like(value, 0.1)

    def step(self, ids, upstream):
        rows, index = np.unique(ids, return_inverse=True)
        grad = np.zeros((len(rows), self._value.shape[1]), np.float32)
        np.add.at(grad, index, upstream)
        self._sum[rows] += np.square(grad)
        self._value[rows] -= grad / np.sqrt(self._sum[rows] + 1e-7)

    def numpy(self):
        return self._value


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_tables_train_like_variables(comm, name):
    """The published form is larger in every respect, and takes minutes for each optimizer."""
    check_optimizer(comm, name, rows=1024, dim=6, most=512, steps=20)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"sgd", "adagrad", "adam"}))
def test_tables_train_like_variables_with_other_optimizers(comm, name):
    check_optimizer(comm, name, rows=1024, dim=6, most=512, steps=20)


def check_optimizer(comm, name, rows, dim, most, steps, make_reference=None):
    rng = np.random.default_rng(5)
    table = de.DynamicVariable(dim, name=f"trained_with_{name}", seed=1)
    every = np.arange(rows)
    start = table.lookup(every).numpy()
    reference = None
    if comm.rank == 0 and make_reference is not None:
        reference = make_reference(start)
    elif comm.rank == 0:
        reference = RowByRow(start, OPTIMIZERS[name]())
    optimizer = de.OptimizerWrapper(OPTIMIZERS[name](), gradient_reduction="sum")

    @tf.function(reduce_retracing=True)
    def step(ids, upstream):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) * upstream)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    for i in range(steps):
        ids = rng.integers(0, rows, rng.integers(1, most + 1))
        ids[: len(ids) // 3] = ids[-(len(ids) // 3) or len(ids) :]  # repeated ids, on several ranks
        upstream = rng.normal(size=(len(ids), dim)).astype(np.float32)
        rank_slice = slice(comm.rank, None, comm.size)
        if i % 4:
            step(tf.constant(ids[rank_slice]), tf.constant(upstream[rank_slice]))
        else:
            step.python_function(tf.constant(ids[rank_slice]), tf.constant(upstream[rank_slice]))
        if reference is not None:
            reference.step(tf.constant(ids), tf.constant(upstream))
    values = whole_table(comm, table).at(every)
    assert int(optimizer.iterations) == steps
    if reference is not None:
        expected = reference.numpy()
        assert square_error(values, expected) < 1e-6
        assert np.mean(np.square(values - expected)) < 1e-6
        close(values, expected, 1e-4)


@pytest.mark.slow
def test_tables_of_the_published_size_train_like_variables(comm):
    check_optimizer(comm, "adagrad", 131072, 128, 8192, 40, make_reference=AdagradOnRows)
