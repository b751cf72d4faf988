"""prefetch_lookup gives the results of plain lookups, however rows change in between."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb.variables import transfer

pytestmark = pytest.mark.engines

STEPS = 12
BATCH = 16


def make_tables(prefix, **options):
    return [
        de.DynamicVariable(
            dimension=8, initializer="normal", name=f"{prefix}_a", seed=3, **options
        ),
        de.DynamicVariable(
            dimension=3, initializer="0.5", name=f"{prefix}_b", dtype=tf.float16, seed=4, **options
        ),
        de.Variable(np.linspace(-1, 1, 400 * 4).reshape(400, 4).astype(np.float32)),
        de.DynamicVariable(
            dimension=2, name=f"{prefix}_c", mode="localized:0", seed=5, initializer="normal"
        ),
    ]


def make_batches(comm, ids=40):
    """Few ids, so that each step updates rows that the next one reads."""
    random = np.random.default_rng(10 + comm.rank)
    return [
        tuple(random.integers(0, ids, size=(BATCH, hotness)) for hotness in (3, 1, 2, 2))
        for _ in range(STEPS)
    ]


class Trainer:
    def __init__(self, tables):
        self.tables = tables
        # Two features read one table.
        self.params = [tables[0], tables[1], tables[2], tables[3], tables[0]]
        self.optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.5))

    @staticmethod
    def ids(batch):
        return [*batch, batch[0] + 1]

    @tf.function(reduce_retracing=True)
    def step(self, ids):
        with tf.GradientTape() as tape:
            outputs = de.lookup_sparse(
                self.params, ids, combiners=["sum", "mean", "sum", "max", "sqrtn"]
            )
            loss = tf.add_n(
                [tf.reduce_mean(tf.square(tf.cast(output, tf.float32) - 1)) for output in outputs]
            )
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.tables), self.tables, strict=True)
        )
        return loss


def rows_of(table):
    if isinstance(table, de.Variable):
        return [table.numpy()]
    keys, values, state = (part.numpy() for part in transfer.export_rows(table))
    order = np.argsort(keys)
    return [keys[order], values[order], state[order]]


def assert_same_rows(tables, others):
    for table, other in zip(tables, others, strict=True):
        for a, b in zip(rows_of(table), rows_of(other), strict=True):
            np.testing.assert_array_equal(a, b)


def test_training_with_prefetch_has_the_same_bits(comm):
    batches = make_batches(comm)
    plain = Trainer(make_tables("plain"))
    ahead = Trainer(make_tables("plain"))
    expected = [float(plain.step(plain.ids(batch))) for batch in batches]
    got = [
        float(ahead.step(lookup))
        for _, lookup in de.prefetch_lookup(batches, ahead.params, ids=ahead.ids)
    ]
    assert got == expected
    assert_same_rows(plain.tables, ahead.tables)


def test_rows_that_change_between_prefetch_and_lookup(comm):
    def alter(trainer, number):
        """A change of another kind before each step."""
        a = trainer.tables[0]
        keys = tf.range(number % 7, 40, 3, dtype=tf.int64)
        ones = tf.ones([tf.size(keys), 8])
        match number % 4:
            case 0:
                a.upsert(keys, ones * number)
            case 1:
                a.erase(keys)
            case 2:
                a.scatter_add(tf.IndexedSlices(ones, keys))
            case _:
                a.clear()

    batches = make_batches(comm)
    plain, ahead = Trainer(make_tables("plain")), Trainer(make_tables("plain"))
    expected, got = [], []
    for number, batch in enumerate(batches):
        alter(plain, number)
        expected.append(float(plain.step(plain.ids(batch))))
    prefetched = de.prefetch_lookup(batches, ahead.params, ids=ahead.ids)
    for number, (_, lookup) in enumerate(prefetched):
        alter(ahead, number)
        got.append(float(ahead.step(lookup)))
    assert got == expected
    assert_same_rows(plain.tables, ahead.tables)


def test_a_full_table_evicts_no_row_of_the_running_batch(comm):
    batches = make_batches(comm, ids=400)
    ahead = Trainer(make_tables("full", init_capacity=130, max_capacity=130))
    for _, lookup in de.prefetch_lookup(batches, ahead.params, ids=ahead.ids):
        assert np.isfinite(float(ahead.step(lookup)))
    stats = [table.stats() for table in ahead.tables]
    assert sum(table_stats.get("evictions", 0) for table_stats in stats) > 0 or comm.size > 1
    assert [table_stats.get("dropped_gradients", 0) for table_stats in stats] == [0] * 4


@pytest.mark.parametrize("default_vector", [None, 7.0])
def test_prefetch_creates_no_rows(comm, default_vector):
    table = de.DynamicVariable(
        dimension=2, initializer="normal", name=f"inference_{default_vector}", seed=1
    )
    table.default_vector = default_vector
    table.upsert([1, 2], tf.ones([2, 2]))
    batches = [np.array([[1, 100 + comm.rank]]), np.array([[2, 200]])]
    for batch, lookup in de.prefetch_lookup(batches, table, ids=lambda batch: batch):
        got = de.lookup_sparse(table, lookup, combiners="sum", insert=False)
        expected = de.lookup_sparse(table, batch, combiners="sum", insert=False)
        np.testing.assert_array_equal(got, expected)
    total = comm.allreduce([tf.constant(len(table))], average=False, name="rows")[0]
    assert int(total) == 2


def test_weights_and_their_gradient(comm):
    table = de.DynamicVariable(dimension=2, initializer="normal", name="weighted", seed=1)
    batch = (np.array([[1, 2], [3, 1]]), np.array([[0.5, 2.0], [1.0, -1.0]], np.float32))

    def gradient(ids, weights):
        with tf.GradientTape() as tape:
            output = de.lookup_sparse(table, ids, sp_weights=weights, combiners="mean")
            loss = tf.reduce_sum(output * output)
        grad = tape.gradient(loss, table)
        return output.numpy(), dict(
            zip(grad.indices.numpy().tolist(), grad.values.numpy().tolist(), strict=True)
        )

    expected = gradient(batch[0], batch[1])
    ((_, lookup),) = de.prefetch_lookup([batch], table, ids=lambda b: b[0], weights=lambda b: b[1])
    got = gradient(lookup, None)
    np.testing.assert_array_equal(got[0], expected[0])
    assert got[1] == expected[1]


def test_a_dataset_and_an_error_in_an_iterator(comm):
    table = de.DynamicVariable(dimension=2, initializer="1", name="dataset")
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(8).reshape(4, 2, 1))
    seen = [batch.numpy() for batch, _ in de.prefetch_lookup(dataset, table, ids=lambda b: b)]
    np.testing.assert_array_equal(seen, np.arange(8).reshape(4, 2, 1))

    def broken():
        yield np.array([[1]])
        raise OSError("no more data")

    with pytest.raises(OSError, match="no more data"):
        for _ in de.prefetch_lookup(broken(), table, ids=lambda b: b):
            pass


def test_wrong_arguments(comm):
    tables = make_tables("wrong")[:2]
    ((_, lookup),) = de.prefetch_lookup([np.array([[1]])], tables, ids=lambda batch: [batch, batch])
    with pytest.raises(ValueError, match="2 features"):
        de.lookup_sparse(tables[:1], lookup)
    with pytest.raises(ValueError, match="sp_weights"):
        de.lookup_sparse(tables, lookup, sp_weights=[None, None])
    with pytest.raises(TypeError, match="integers"):
        next(iter(de.prefetch_lookup([np.array([[0.5]])], tables[0], ids=lambda batch: batch)))
