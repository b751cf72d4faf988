"""The bits of 16-bit rows do not depend on the reads during training."""

import threading

import keras
import numpy as np
import op_helpers as h
import pytest
import table_reader
import tensorflow as tf

import tf_dynemb as de

K = keras.optimizers
DIM, IDS, STEPS, BATCH = 6, 60, 12, 32
HALVES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def make_table(dtype, **options):
    return de.DynamicVariable(DIM, "normal", seed=3, dtype=dtype, **options)


def make_batches():
    rng = np.random.default_rng(5)
    return [rng.integers(0, IDS, [BATCH, 3]) for _ in range(STEPS)]


def content(table):
    rows = table_reader.rows_of(table)
    return rows.keys, rows.vectors, rows.state


def same(table, other):
    return all(np.array_equal(a, b) for a, b in zip(content(table), content(other), strict=True))


class Trainer:
    def __init__(self, table, optimizer):
        self.table = table
        self.optimizer = de.OptimizerWrapper(optimizer)

    @tf.function(reduce_retracing=True)
    def step(self, ids):
        with tf.GradientTape() as tape:
            pooled = de.lookup_sparse(self.table, ids, combiners="sum")
            loss = tf.reduce_mean((tf.cast(pooled, tf.float32) - 1) ** 2)
        self.optimizer.apply_gradients([(tape.gradient(loss, self.table), self.table)])

    def train(self):
        for ids in make_batches():
            self.step(tf.constant(ids))


class Serving:
    """Threads that read tables continuously while the `with` block runs."""

    def __init__(self, *tables):
        self._tables, self._reading = tables, threading.Event()
        self._reading.set()
        self._read = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while self._reading.is_set():
            for table in self._tables:
                table.lookup(tf.range(IDS, dtype=tf.int64), insert=False)
            self._read.set()

    def __enter__(self):
        self._thread.start()
        assert self._read.wait(60)

    def __exit__(self, *exception):
        self._reading.clear()
        self._thread.join()


OPTIMIZERS = {
    "adagrad": (lambda: K.Adagrad(0.3), {}),
    "generic": (lambda: K.Nadam(0.05), {}),
    "constraint": (
        lambda: K.Adagrad(0.3),
        {"constraint": lambda vectors: tf.clip_by_norm(vectors, 1.0, axes=[1])},
    ),
}


@HALVES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_does_not_depend_on_reads(name, dtype):
    make, options = OPTIMIZERS[name]
    plain = Trainer(make_table(dtype, **options), make())
    plain.train()

    evaluated = Trainer(make_table(dtype, **options), make())
    for number, ids in enumerate(make_batches()):
        evaluated.step(tf.constant(ids))
        for _ in range(number % 3):
            evaluated.table.lookup(np.arange(2 * IDS), insert=False)
    assert same(evaluated.table, plain.table)

    ahead = Trainer(make_table(dtype, **options), make())
    other = make_table(dtype)
    reads_other = de.prefetch_lookup(make_batches(), other, ids=lambda ids: ids)
    with Serving(ahead.table, other):
        for _, lookup in de.prefetch_lookup(make_batches(), ahead.table, ids=lambda ids: ids):
            ahead.step(lookup)
            next(reads_other)
        reads_other.close()
    assert same(ahead.table, plain.table)


@HALVES
def test_fit_does_not_depend_on_evaluation(dtype):
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, IDS, [64, 3]), rng.integers(0, 2, 64).astype(np.float32)

    def fit(evaluations):
        keras.utils.set_random_seed(1)
        layer = de.layers.Embedding(DIM, name="rounded", dtype=dtype)
        dense = keras.layers.Dense(1, activation="sigmoid")
        model = keras.Sequential([layer, keras.layers.Flatten(), dense])
        model.compile(de.OptimizerWrapper(K.Adagrad(0.3)), "binary_crossentropy")
        for _ in range(3):
            model.fit(ids, labels, batch_size=16, shuffle=False, verbose=0)
            for _ in range(evaluations):
                model.evaluate(ids, labels, batch_size=32, verbose=0)
                model.predict(ids, verbose=0)
        assert layer.table.dtype.name == dtype
        return content(layer.table)

    for got, want in zip(fit(2), fit(0), strict=True):
        np.testing.assert_array_equal(got, want)


@HALVES
def test_additions_do_not_depend_on_reads(dtype):
    rng = np.random.default_rng(2)
    additions = [rng.normal(size=[IDS, DIM]).astype(np.float32) / 64 for _ in range(STEPS)]
    keys = np.arange(IDS)

    def add(table, number, read):
        change = table.scatter_sub if number % 2 else table.scatter_add
        change(tf.IndexedSlices(tf.constant(additions[number]), keys))
        if read:
            table.lookup(keys, insert=False)
            # The rounding of additions does not count the steps of an optimizer.
            sgd.apply_gradients([(tf.IndexedSlices(tf.zeros([1, DIM]), [0]), table)])

    sgd = de.OptimizerWrapper(K.SGD(0.0))
    plain, read = make_table(dtype), make_table(dtype)
    for number in range(STEPS):
        add(plain, number, read=False)
    with Serving(read):
        for number in range(STEPS):
            add(read, number, read=True)
    assert same(read, plain)


def half_way(dtype, n):
    """Returns gradients that, at a learning rate of 1, move 1 halfway to the next number below."""
    return np.full([n, h.DIM], 2.0 ** (-12 if dtype == tf.float16 else -9), np.float32)


@pytest.fixture(params=[tf.float16, tf.bfloat16], ids=lambda dtype: dtype.name)
def sgd_step(request):
    """Returns a function that steps a table of ones, in a call with `tasks` tasks of the table."""
    dtype = request.param
    hyper = h.HYPER.copy()
    hyper[0] = 1.0

    def run(step, tasks=1, hyper_step=1.0):
        handle = h.make_table(h.DIM, dtype=dtype, initial=1.0, stochastic_rounding=True, seed=4)
        keys = np.arange(200)
        h.lookup(handle, keys, dtype=dtype)
        hyper[11] = hyper_step
        h.ops.dynemb_apply_gradients(
            [handle] * tasks, [keys] * tasks, [np.zeros(0, np.uint32)] * tasks,
            [half_way(dtype, 200)] * tasks, hyper, tf.constant(step, tf.int64), optimizer="sgd",
        )  # fmt: skip
        return h.ops.dynemb_read_rows(handle, keys).values.numpy()

    return run


def test_step_numbers_are_exact(sgd_step):
    """Also beyond the integers that float32 represents."""
    for step in (1, 2**24, 2**53):
        np.testing.assert_array_equal(sgd_step(step), sgd_step(step))
        assert not np.array_equal(sgd_step(step), sgd_step(step + 1))
    # The step in the optimizer's formula does not affect the rounding.
    np.testing.assert_array_equal(sgd_step(7, hyper_step=3.0), sgd_step(7, hyper_step=4.0))


def test_tasks_of_one_table_do_not_share_random_bits(sgd_step):
    once, twice = sgd_step(1), sgd_step(1, tasks=2)
    # The first task rounds half of the elements down by one unit. In the second, all are halfway
    # again. With the same random bits, each would be rounded as before, and none lower by one unit.
    unit = 1.0 - once.min()
    down = np.rint((1.0 - twice) / unit)
    assert 0.4 < np.mean(once < 1.0) < 0.6
    assert 0.4 < np.mean(down == 1) < 0.6


def test_constraint_and_step_are_rounded_separately():
    handle = h.make_table(h.DIM, dtype=tf.bfloat16, initial=1.0, stochastic_rounding=True, seed=4)
    keys = np.arange(200)
    values, state = 1.0 - half_way(tf.bfloat16, 200), np.zeros([200, 0], np.float32)

    def write(step, what):
        h.ops.dynemb_write_rows(handle, keys, values, state, step, insert=True, what=what)
        return h.ops.dynemb_read_rows(handle, keys).values.numpy()

    updates = [(1, "step"), (2, "step"), (1, "constraint"), (2, "constraint")]
    written = [write(*update) for update in updates]
    for number, update in enumerate(updates):
        same_as = [np.array_equal(write(*update), other) for other in written]
        assert same_as == [i == number for i in range(len(updates))]
