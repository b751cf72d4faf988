"""DynamicVariable is a TensorFlow resource variable, and a hash table."""

import copy
import datetime
import doctest
import gc
import importlib
import pathlib
import pickle
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

KEY_EXTREMES = {
    tf.int64: [-(2**63), -1, 0, 1, 2**63 - 1],
    tf.int32: [-(2**31), -1, 0, 1, 2**31 - 1],
    tf.uint64: [0, 1, 2**63 - 1, 2**63, 2**64 - 1],
}


def exported(table):
    keys, values = de.export(table)
    return {int(k): v for k, v in zip(keys.numpy(), values.numpy(), strict=True)}


def test_is_a_variable_with_the_shape_of_a_table():
    table = de.DynamicVariable(3, name="users", key_type=tf.int32)
    assert isinstance(table, tf.Variable)
    assert table.shape.as_list() == [None, 3]
    assert (table.dtype, table.key_type) == (tf.float32, tf.int32)
    assert table.name == "users:0"
    assert table.trainable
    assert table.handle.dtype == tf.resource
    assert table.size.numpy().tolist() == [0, 3]
    table.lookup([5, 6, 5])
    assert table.size.numpy().tolist() == [2, 3]
    assert len(table) == 2
    assert all(isinstance(v, int) for v in table.stats().values())


@pytest.mark.parametrize("key_type", [tf.int64, tf.int32, tf.uint64])
def test_every_key_is_legal(key_type):
    keys = KEY_EXTREMES[key_type]
    table = de.DynamicVariable(2, "zeros", key_type=key_type)
    values = np.arange(2 * len(keys), dtype=np.float32).reshape(-1, 2)
    de.assign(table, keys, values)
    held = exported(table)
    assert set(held) == set(keys)
    for key, value in zip(keys, values, strict=True):
        np.testing.assert_array_equal(held[key], value)
        np.testing.assert_array_equal(table.lookup([key], insert=False)[0], value)
    assert table.contains(keys).numpy().all()
    assert int(table.erase(keys[:2])) == 2
    assert table.contains(keys).numpy().tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_tensorflow_lookups_read_the_rows(dtype):
    table = de.DynamicVariable(2, "zeros", dtype=dtype)
    de.assign(table, [1, 2, 3], [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    got = tf.nn.embedding_lookup(table, [[3, 1], [2, 2]])
    assert got.dtype == dtype
    expected = [[[3, 30], [1, 10]], [[2, 20], [2, 20]]]
    np.testing.assert_array_equal(tf.cast(got, tf.float32), expected)
    np.testing.assert_array_equal(tf.cast(table.sparse_read([2]), tf.float32), [[2, 20]])
    np.testing.assert_array_equal(
        tf.cast(table.gather_nd([[2], [1]]), tf.float32), [[2, 20], [1, 10]]
    )
    np.testing.assert_array_equal(tf.cast(tf.gather(table, [3]), tf.float32), [[3, 30]])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_tensorflow_sparse_lookups(weighted, safe, fast):
    table = de.DynamicVariable(2, "zeros")
    values = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]], np.float32)
    de.assign(table, [0, 1, 2, 3], values)
    dense = tf.Variable(values)
    indices = [[0, 0], [0, 1], [1, 0], [2, 3]]
    ids = tf.SparseTensor(indices, tf.constant([1, 3, 0, 1], tf.int64), [3, 4])
    weights = tf.SparseTensor(indices, [2.0, 0.5, 1.0, 3.0], [3, 4]) if weighted else None
    look_up = tf.nn.safe_embedding_lookup_sparse if safe else tf.nn.embedding_lookup_sparse

    def run(params):
        with tf.GradientTape() as tape:
            out = look_up(params, ids, weights, combiner="mean", allow_fast_lookup=fast)
            loss = tf.reduce_sum(out * [[1.0, 2.0]])
        return out, tf.IndexedSlices(*_summed(tape.gradient(loss, params)))

    (out, grad), (expected, expected_grad) = run(table), run(dense)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    np.testing.assert_array_equal(grad.indices, expected_grad.indices)
    np.testing.assert_allclose(grad.values, expected_grad.values, rtol=1e-6)


def _summed(grad):
    if not isinstance(grad, tf.IndexedSlices):
        rows = np.flatnonzero(np.abs(grad.numpy()).sum(1))
        return tf.gather(grad, rows), rows
    keys, position = np.unique(grad.indices.numpy(), return_inverse=True)
    sums = np.zeros((len(keys), grad.values.shape[1]), np.float32)
    np.add.at(sums, position, grad.values.numpy())
    return sums, keys


def test_initial_vectors_depend_only_on_seed_and_key():
    a = de.DynamicVariable(4, "uniform", seed=3)
    b = de.DynamicVariable(4, "uniform", seed=3)
    c = de.DynamicVariable(4, "uniform", seed=4)
    first = a.lookup([7, 8, -9]).numpy()
    b.lookup(np.arange(1000))
    np.testing.assert_array_equal(b.lookup([7, 8, -9]), first)
    assert not np.array_equal(c.lookup([7, 8, -9]), first)
    a.erase([7])
    np.testing.assert_array_equal(a.lookup([7], insert=False)[0], first[0])
    assert not a.contains([7]).numpy().any()


@pytest.mark.parametrize(
    ("initializer", "low", "high", "mean", "stddev"),
    [
        (None, -0.05, 0.05, 0.0, 0.1 / 12**0.5),
        ("random", -0.05, 0.05, 0.0, 0.1 / 12**0.5),
        (keras.initializers.RandomUniform(1.0, 3.0), 1.0, 3.0, 2.0, 2 / 12**0.5),
        (keras.initializers.RandomNormal(1.0, 2.0), -np.inf, np.inf, 1.0, 2.0),
        (keras.initializers.TruncatedNormal(0.0, 1.0), -2.0, 2.0, 0.0, 0.8796),
        ("glorot_uniform", -((3 / 8) ** 0.5), (3 / 8) ** 0.5, 0.0, (1 / 8) ** 0.5),
        ("he_normal", -1.2, 1.2, 0.0, (2 / 8) ** 0.5),
    ],
)
def test_initializers_draw_their_distribution(initializer, low, high, mean, stddev):
    table = de.DynamicVariable(8, initializer, seed=1)
    values = table.lookup(np.arange(20000)).numpy()
    assert values.min() >= low
    assert values.max() <= high
    assert abs(values.mean() - mean) < 0.02 * stddev
    assert abs(values.std() - stddev) < 0.02 * stddev


def test_initializers_of_numbers_and_columns():
    lookup = lambda i: de.DynamicVariable(3, i).lookup([5])[0].numpy().tolist()  # noqa: E731
    assert lookup("13") == [13.0] * 3
    assert lookup(17) == [17.0] * 3
    assert lookup("zeros") == [0.0] * 3
    assert lookup(keras.initializers.Constant(2.5)) == [2.5] * 3
    columns = lookup([1.0, "2", keras.initializers.RandomUniform(5, 6)])
    assert columns[:2] == [1.0, 2.0]
    assert 5 <= columns[2] < 6


def test_default_seeds_differ_by_name_and_follow_the_global_seed():
    tf.random.set_seed(1)
    a = de.DynamicVariable(4, name="a").lookup([1]).numpy()
    b = de.DynamicVariable(4, name="b").lookup([1]).numpy()
    again = de.DynamicVariable(4, name="a").lookup([1]).numpy()
    tf.random.set_seed(2)
    other = de.DynamicVariable(4, name="a").lookup([1]).numpy()
    np.testing.assert_array_equal(a, again)
    assert not np.array_equal(a, b)
    assert not np.array_equal(a, other)


def test_gradient_is_slices_over_unique_keys():
    table = de.DynamicVariable(2, "ones")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [[7, 3], [7, 7]]) * [1.0, 2.0])
    (grad,) = tape.gradient(loss, [table])
    assert isinstance(grad, tf.IndexedSlices)
    assert (grad.indices.dtype, grad.values.dtype) == (tf.int64, tf.float32)
    found = {int(k): v.tolist() for k, v in zip(grad.indices, grad.values.numpy(), strict=True)}
    assert len(grad.indices) == 2
    assert found == {7: [3.0, 6.0], 3: [1.0, 2.0]}


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize("key_type", [tf.int32, tf.uint64])
def test_gradient_types(dtype, key_type):
    table = de.DynamicVariable(2, "ones", dtype=dtype, key_type=key_type)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup([1, 1]))
    grad = tape.gradient(loss, table)
    assert (grad.indices.dtype, grad.values.dtype) == (key_type, tf.float32)
    np.testing.assert_array_equal(grad.values, [[2.0, 2.0]])


@pytest.mark.parametrize("tape_inside", [True, False])
def test_gradient_through_a_function(tape_inside):
    table = de.DynamicVariable(2, "ones")

    @tf.function
    def inside(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
        grad = tape.gradient(loss, table)
        assert hasattr(grad.indices, "_dynemb_rows")
        return grad

    @tf.function
    def forward(ids):
        return tf.reduce_sum(tf.nn.embedding_lookup(table, ids))

    ids = tf.constant([4, 4, 9], tf.int64)
    if tape_inside:
        grad = inside(ids)
    else:
        with tf.GradientTape() as tape:
            loss = forward(ids)
        grad = tape.gradient(loss, table)
    values, keys = _summed(grad)
    np.testing.assert_array_equal(keys, [4, 9])
    np.testing.assert_array_equal(values, [[2, 2], [1, 1]])


def test_gradients_of_two_lookups_add_up():
    table = de.DynamicVariable(1, "ones")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup([1, 2])) + 10 * tf.reduce_sum(table.lookup([2, 3]))
    values, keys = _summed(tape.gradient(loss, table))
    np.testing.assert_array_equal(keys, [1, 2, 3])
    np.testing.assert_array_equal(values, [[1], [11], [10]])


def test_untrainable_tables_are_not_watched():
    table = de.DynamicVariable(1, "ones", trainable=False)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup([1]))
    assert tape.watched_variables() == ()
    assert tape.gradient(loss, table) is None


def test_scatter_operations():
    table = de.DynamicVariable(2, "ones")
    assert table.scatter_update(tf.IndexedSlices([[5.0, 6.0]], [1])) is table
    table.scatter_add(tf.IndexedSlices([[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]], [1, 1, 9]))
    table.scatter_sub(tf.IndexedSlices([[0.5, 0.0]], [1]))
    held = exported(table)
    assert held[1].tolist() == [6.5, 8.0]
    assert held[9].tolist() == [3.0, 3.0]  # from its initial vector
    table.scatter_update(tf.IndexedSlices([[1.0, 1.0], [2.0, 2.0]], [4, 4]))
    assert exported(table)[4].tolist() == [2.0, 2.0]  # the last one wins
    table.clear()
    assert len(table) == 0


def test_lookup_without_insert_reads_default_or_initial_vector():
    table = de.DynamicVariable(2, "ones")
    de.assign(table, [1], [[5.0, 5.0]])
    np.testing.assert_array_equal(table.lookup([1, 2], insert=False), [[5, 5], [1, 1]])
    got = table.lookup([1, 2], insert=False, default_value=[7.0, 8.0])
    np.testing.assert_array_equal(got, [[5, 5], [7, 8]])
    assert len(table) == 1


def test_export_of_more_rows_than_one_chunk(monkeypatch):
    monkeypatch.setattr("tf_dynemb.variables.transfer.CHUNK", 100)
    table = de.DynamicVariable(2, "zeros")
    keys = np.arange(-500, 500)
    de.assign(table, keys, np.stack([keys, 2 * keys], 1).astype(np.float32))
    held = exported(table)
    assert set(held) == set(keys.tolist())
    assert all(v.tolist() == [k, 2 * k] for k, v in held.items())
    empty_keys, empty_values = de.export(de.DynamicVariable(2))
    assert (empty_keys.shape, empty_values.shape) == ((0,), (0, 2))


def test_modules_track_tables():
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.users = de.DynamicVariable(2)
            self.frozen = [de.DynamicVariable(2, trainable=False)]
            self.dense = tf.Variable(1.0)

    model = Model()
    assert {id(v) for v in model.trainable_variables} == {id(model.users), id(model.dense)}
    assert len(model.variables) == 3


def test_tables_are_arguments_of_functions():
    a, b = de.DynamicVariable(1, "1"), de.DynamicVariable(1, "2")

    @tf.function
    def look(table, ids):
        return tf.nn.embedding_lookup(table, ids)

    assert float(look(a, [3])[0, 0]) == 1.0
    assert float(look(b, [3])[0, 0]) == 2.0
    assert (len(a), len(b)) == (1, 1)


def test_creation_inside_a_function_is_lifted():
    made = []

    @tf.function
    def step(ids):
        if not made:
            made.append(de.DynamicVariable(2, "ones"))
        return tf.nn.embedding_lookup(made[0], ids)

    np.testing.assert_array_equal(step(tf.constant([1], tf.int64)), [[1, 1]])
    np.testing.assert_array_equal(step(tf.constant([2], tf.int64)), [[1, 1]])
    assert len(made[0]) == 2


def test_a_table_is_destroyed_with_the_object():
    """Immediately: a table has too much memory to wait for the garbage collector."""
    table = de.DynamicVariable(2)
    gc.collect()
    gc.disable()
    try:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.lookup_sparse(table, [[1]]))
        tape.gradient(loss, table)
        table.upsert([2], [[1.0, 2.0]])
        handle = table.handle
        del table, tape, loss
    finally:
        gc.enable()
    from tf_dynemb import _ops

    with pytest.raises(tf.errors.OpError):
        _ops.library().dynemb_size(handle)


def test_garbage_is_collected_before_a_table_is_refused(monkeypatch):
    from tf_dynemb import _ops

    class Model:
        def __init__(self):
            self.itself, self.table = self, de.DynamicVariable(2)

    real = _ops.library()
    model = weakref.ref(Model())

    class Library:
        """Fails to allocate as long as the model exists."""

        def dynemb_table(self, **attributes):
            if model() is not None:
                raise tf.errors.ResourceExhaustedError(None, None, "no room")
            return real.dynemb_table(**attributes)

        def __getattr__(self, name):
            return getattr(real, name)

    gc.disable()
    try:
        assert model() is not None
        monkeypatch.setattr(_ops, "library", Library)
        assert len(de.DynamicVariable(2)) == 0
        model = weakref.ref(kept := Model())
        with pytest.raises(tf.errors.ResourceExhaustedError, match="no room"):
            de.DynamicVariable(2)
        assert kept.itself is kept
    finally:
        gc.enable()


def test_tables_of_one_name_are_separate():
    a, b = de.DynamicVariable(1, name="t"), de.DynamicVariable(1, name="t")
    a.lookup([1])
    assert (len(a), len(b)) == (1, 0)


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t.numpy(),
        lambda t: t.read_value(),
        lambda t: t.value(),
        lambda t: t + 1.0,
        lambda t: t[0],
        lambda t: tf.convert_to_tensor(t),
        lambda t: np.asarray(t),
        lambda t: t.assign(tf.zeros([1, 2])),
        lambda t: t.assign_add(tf.zeros([1, 2])),
        lambda t: t.assign_sub(tf.zeros([1, 2])),
        lambda t: t.scatter_mul(tf.IndexedSlices([[1.0, 1.0]], [1])),
        lambda t: t.scatter_nd_add([[1]], [[1.0, 1.0]]),
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_dense_operations_are_refused(operation):
    table = de.DynamicVariable(2, name="users")
    table.lookup([1])
    with pytest.raises(NotImplementedError, match="users"):
        operation(table)
    assert len(table) == 1


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize(
    "operation",
    [
        tf.reduce_sum,
        tf.square,
        tf.shape,
        tf.nn.l2_loss,
        lambda t: tf.concat([t, t], 0),
        lambda t: tf.stack([t, t]),
        lambda t: keras.ops.sum(t),
        lambda t: keras.ops.take(t, [1], axis=0),
    ],
)
def test_tensorflow_operations_on_the_dense_value_say_what_to_do(operation, in_function):
    table = de.DynamicVariable(2, name="users")
    table.lookup([1])
    call = tf.function(operation) if in_function else operation
    with pytest.raises(NotImplementedError, match=r"(?s)users.*de\.export"):
        call(table)
    assert len(table) == 1


def test_forward_derivatives_are_refused():
    table = de.DynamicVariable(2, name="users")
    accumulator = tf.autodiff.ForwardAccumulator(table, tf.ones([1, 2]))
    with pytest.raises(NotImplementedError, match="users"), accumulator:
        tf.nn.embedding_lookup(table, [1])


def test_a_full_table_evicts_the_least_recently_used():
    table = de.DynamicVariable(1, "zeros", init_capacity=64, max_capacity=64)
    for start in range(0, 640, 32):
        table.lookup(np.arange(start, start + 32))
    assert len(table) <= 64
    assert table.contains(np.arange(608, 640)).numpy().all()


def test_a_full_table_without_eviction_refuses_rows_and_is_unchanged():
    table = de.DynamicVariable(
        1, "zeros", name="small", init_capacity=8, max_capacity=8, evict_strategy="none"
    )
    table.lookup(np.arange(8))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="small"):
        table.lookup(np.arange(100, 108))
    assert set(exported(table)) == set(range(8))


def test_filter_variables_and_static_variable():
    dynamic, static = de.DynamicVariable(2), de.Variable([[1.0, 2.0]], mode="distributed")
    plain, layer = tf.Variable(1.0), de.layers.Embedding(2)
    embedding_variables, others = de.filter_variables([dynamic, plain, static, *layer.weights])
    assert [id(v) for v in embedding_variables] == [id(dynamic), id(static), id(layer.weights[0])]
    assert [id(v) for v in others] == [id(plain)]
    assert isinstance(static, tf.Variable)
    assert static.mode == "distributed"
    assert static.size.numpy().tolist() == [1, 2]
    static.assign([[3.0, 4.0]])
    np.testing.assert_array_equal(static.numpy(), [[3, 4]])


def modules_with_examples():
    package = pathlib.Path(de.__file__).parent
    files = [path for path in sorted(package.rglob("*.py")) if ">>>" in path.read_text()]
    return [".".join(path.relative_to(package).with_suffix("").parts) for path in files]


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_in_docstrings(module):
    names = {name: getattr(de, name) for name in de.__all__} | vars(de.layers)
    names |= {"de": de, "keras": keras, "tf": tf, "datetime": datetime}
    found = importlib.import_module(f"tf_dynemb.{module}")
    result = doctest.testmod(found, globs=names | vars(found))
    assert result.attempted > 0
    assert result.failed == 0


def test_concurrent_lookups_from_threads():
    table = de.DynamicVariable(4, "ones")
    dataset = tf.data.Dataset.range(64).map(
        lambda i: tf.reduce_sum(table.lookup(tf.range(i * 10, i * 10 + 100))),
        num_parallel_calls=4,
    )
    assert [float(x) for x in dataset] == [400.0] * 64
    assert len(table) == 730


def test_a_table_equals_only_itself():
    a, b = de.DynamicVariable(2, name="a"), de.DynamicVariable(2, name="b")
    assert (a == a, a == b, a != b, a != a, a == 1) == (True, False, True, False, False)
    assert [b, a].index(a) == 1
    assert {a: 1, b: 2}[b] == 2

    @tf.function
    def compare():
        return a == b

    assert not compare()
