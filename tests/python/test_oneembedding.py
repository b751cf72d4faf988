"""OneEmbedding's layers: lookups, initial vectors, padding, training, capacity, saving."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_dynemb as de
import tf_dynemb.oneembedding as oe

DIM = 3
CONSTANTS = [2.0, -1.0, 5.0]


def store(path="unused", capacity=10_000):
    return oe.make_cached_host_mem_store_options(64, path, capacity)


def layer_of(initializers, dim=DIM, name="e", **options):
    tables = [oe.make_table_options(one) for one in initializers]
    options = {"store_options": store(), **options}
    return oe.MultiTableEmbedding(name, dim, "float32", "int64", tables, **options)


def constants(values=CONSTANTS, **options):
    return layer_of([oe.make_constant_initializer(value) for value in values], **options)


@pytest.fixture(scope="module")
def filled():
    """A layer of three tables, in which id i of table t reads as i + 1000 t in each element."""
    layer = constants()
    for t, table in enumerate(layer.tables):
        ids = np.arange(-50, 50)
        table.upsert(ids, np.repeat(ids[:, None] + 1000.0 * t, DIM, 1).astype(np.float32))
    return layer


def reference(ids, table_ids):
    return np.repeat((ids + 1000.0 * table_ids)[..., None], DIM, -1)


SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@settings(max_examples=60)
@given(SHAPES, st.integers(0, 2**32), st.booleans())
def test_table_ids_of_any_shape(filled, shape, seed, compiled):
    rng = np.random.default_rng(seed)
    ids, table_ids = rng.integers(-50, 50, shape), rng.integers(0, 3, shape)
    call = tf.function(filled) if compiled else filled
    output = call(tf.constant(ids), table_ids=tf.constant(table_ids))
    assert output.shape == (*shape, DIM)
    np.testing.assert_array_equal(output, reference(ids, table_ids))


@settings(max_examples=20)
@given(st.integers(0, 9), st.integers(0, 2**32))
def test_one_column_for_each_table(filled, batch, seed):
    ids = np.random.default_rng(seed).integers(-50, 50, [batch, 3])
    expected = reference(ids, np.arange(3)[np.newaxis])
    np.testing.assert_array_equal(filled(ids), expected)
    np.testing.assert_array_equal(filled.forward(ids), expected)
    table_ids = np.broadcast_to(np.arange(3), ids.shape)
    np.testing.assert_array_equal(filled.forward(ids, table_ids), expected)


@settings(max_examples=20)
@given(SHAPES, st.integers(0, 2**32))
def test_one_table_with_ids_of_any_shape(one_table, shape, seed):
    ids = np.random.default_rng(seed).integers(-50, 50, shape)
    np.testing.assert_array_equal(one_table(ids), reference(ids, 0))


@pytest.fixture(scope="module")
def one_table():
    layer = constants([1.0])
    ids = np.arange(-50, 50)
    layer.tables[0].upsert(ids, np.repeat(ids[:, None], DIM, 1).astype(np.float32))
    return layer


def test_forward_takes_lists(filled):
    expected = reference(np.array([[1, 2, 3]]), np.arange(3))
    np.testing.assert_array_equal(filled.forward([[1, 2, 3]]), expected)
    np.testing.assert_array_equal(filled.forward([[1, 2, 3]], [[0, 1, 2]]), expected)


def test_one_id_in_two_tables_is_two_rows():
    layer = constants()
    output = layer(np.array([[7, 7, 8]]), training=True)
    np.testing.assert_array_equal(output[0, :, 0], CONSTANTS)
    layer.tables[0].upsert([7], np.full([1, DIM], 9.0, np.float32))
    np.testing.assert_array_equal(layer(np.array([[7, 7, 7]]))[0, :, 0], [9.0, *CONSTANTS[1:]])
    assert [len(table) for table in layer.tables] == [1, 1, 1]


def test_rows_are_created_in_training_only():
    layer = constants()
    layer(np.array([[1, 2, 3]]))
    layer(np.array([[1, 2, 3]]), training=False)
    assert [len(table) for table in layer.tables] == [0, 0, 0]
    layer.trainable = False
    layer(np.array([[1, 2, 3]]), training=True)
    assert [len(table) for table in layer.tables] == [0, 0, 0]


@pytest.mark.parametrize(
    ("ids", "table_ids", "error", "names"),
    [
        (tf.ragged.constant([[1], [2, 3]]), None, TypeError, "Layer e needs.*dense.*RaggedTensor"),
        (tf.sparse.from_dense([[1, 0]]), None, TypeError, "Layer e needs.*dense.*SparseTensor"),
        (np.array([1, 2, 3]), None, ValueError, r"shape \[batch, 3\].*table_ids.*\(3,\)"),
        (np.array([[1, 2]]), None, ValueError, r"shape \[batch, 3\].*table_ids.*\(1, 2\)"),
        (np.array([[[1, 2, 3]]]), None, ValueError, r"shape \[batch, 3\].*\(1, 1, 3\)"),
        (np.array([1, 2]), np.array([0]), ValueError, r"table_ids must have the shape.*\(2,\)"),
        (np.array([1]), np.array([0.0]), TypeError, "table_ids must be integers, got float"),
        (np.array([1]), np.array([3]), tf.errors.InvalidArgumentError, "table_ids.*below 3"),
        (np.array([1]), np.array([-1]), tf.errors.InvalidArgumentError, "table_ids.*>= 0"),
        (np.array([[0.5, 1, 2]]), None, tf.errors.InvalidArgumentError, "Pass integers"),
    ],
    ids=str,
)
def test_bad_ids(filled, ids, table_ids, error, names):
    before = [len(table) for table in filled.tables]
    with pytest.raises(error, match=names):
        filled(ids, table_ids=table_ids, training=True)
    assert [len(table) for table in filled.tables] == before


# Initial vectors.

MANY = np.arange(20_000)
CUT = 0.8796256610342398  # the deviation of a standard normal that is cut off at 2
DISTRIBUTIONS = {
    "uniform": (oe.make_uniform_initializer(-0.3, 0.1), -0.1, 0.4 / 12**0.5, -0.3, 0.1),
    "normal": (oe.make_normal_initializer(1.0, 0.5), 1.0, 0.5, -1.5, 3.5),
    "cut": (oe.make_trunc_normal_initializer(1, 0.5, 0, 2), 1.0, 0.5 * CUT, 0.0, 2.0),
    "uncut": (oe.make_trunc_normal_initializer(0.0, 0.05), 0.0, 0.05, -0.3, 0.3),
    "constant": (oe.make_constant_initializer(0.25), 0.25, 0.0, 0.25, 0.25),
}


def check(values, kind):
    """Compares the values of a column of vectors with the moments and bounds of a distribution."""
    _, mean, deviation, least, most = DISTRIBUTIONS[kind]
    assert values.mean() == pytest.approx(mean, abs=4 * deviation / len(values) ** 0.5 + 1e-6)
    assert values.std() == pytest.approx(deviation, rel=0.03, abs=1e-6)
    assert least - 1e-6 <= values.min()
    assert values.max() <= most + 1e-6


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_initial_vectors_of_each_table(kind):
    kinds = ["constant", kind, "uniform"]
    layer = layer_of([DISTRIBUTIONS[each][0] for each in kinds], dim=2)
    vectors = layer(np.repeat(MANY[:, None], 3, 1)).numpy()
    for t, table_kind in enumerate(kinds):
        for column in range(2):
            check(vectors[:, t, column], table_kind)


def test_initial_vectors_of_each_column():
    kinds = [["uniform", "normal", "constant"], ["cut", "uncut", "normal"]]
    tables = [
        oe.make_table_options(
            [oe.make_column_options(DISTRIBUTIONS[column_kind][0]) for column_kind in column_kinds]
        )
        for column_kinds in kinds
    ]
    tables.append(oe.make_table_options(DISTRIBUTIONS["uniform"][0]))
    kinds.append(["uniform"] * 3)
    dims = [2, 1, 3]
    layer = oe.MultiTableMultiColumnEmbedding(
        "columns", dims, "float32", "int64", tables, store(capacity=10**6)
    )
    assert layer.embedding_dim == 6
    vectors = layer(np.repeat(MANY[:, None], 3, 1)).numpy()
    assert vectors.shape == (len(MANY), 3, 6)
    for t in range(3):
        for c, kind in enumerate(np.repeat(np.arange(3), dims)):
            check(vectors[:, t, c], kinds[t][kind])
    config = layer.get_config()
    assert config["embedding_dim"] == dims
    again = oe.MultiTableMultiColumnEmbedding.from_config(config)
    np.testing.assert_array_equal(
        again(MANY[:300].reshape(-1, 3)), layer(MANY[:300].reshape(-1, 3))
    )


def test_a_multi_column_embedding_may_have_one_width():
    layer = oe.MultiTableMultiColumnEmbedding("one", 4, "float32", "int64", None, store())
    assert layer(np.array([1])).shape == (1, 4)
    assert layer.get_config()["embedding_dim"] == 4


@pytest.mark.parametrize("given", [None, DISTRIBUTIONS["uniform"][0]])
def test_the_only_table_has_the_default_initializer(given):
    layer = oe.MultiTableEmbedding(
        "default", 2, "float32", "int64", None, store(), default_initializer=given
    )
    vectors = layer(MANY).numpy()
    assert len(layer.tables) == layer.num_tables == 1
    if given is None:
        assert vectors.mean() == pytest.approx(0.0, abs=0.001)
        assert vectors.std() == pytest.approx(0.05, rel=0.03)
    else:
        check(vectors[:, 0], "uniform")


def first_vectors(**options):
    layer = layer_of([oe.make_normal_initializer()] * 2, **options)
    return layer(np.array([[1, 1], [2, 2]])).numpy()


def test_seed_name_and_table_determine_initial_vectors():
    vectors = first_vectors(seed=3)
    np.testing.assert_array_equal(first_vectors(seed=3), vectors)
    assert (vectors[:, 0] != vectors[:, 1]).all()
    for other in ({}, {"seed": 3, "name": "other"}, {"seed": 2**70 + 3}):
        assert not np.isin(first_vectors(**other), vectors).any()


# Padding.


@pytest.mark.parametrize("initializers", [1, 3])
def test_padding_reads_as_zeros_and_is_not_trained(initializers):
    layer = constants(CONSTANTS[:initializers], padding_idx=-1)
    ids = np.array([[-1, 4, -1], [5, -1, 6]])[:, :initializers]
    with tf.GradientTape() as tape:
        vectors = layer(ids)
        loss = tf.reduce_sum(vectors)
    expected = np.where(ids == -1, 0, CONSTANTS[:initializers])
    np.testing.assert_array_equal(vectors, np.repeat(expected[..., None], DIM, -1))
    for gradient, column in zip(tape.gradient(loss, list(layer.tables)), ids.T, strict=True):
        assert sorted(gradient.indices.numpy()) == sorted(set(column) - {-1})
    for table, column in zip(layer.tables, ids.T, strict=True):
        assert not table.contains([-1]).numpy().any()
        assert len(table) == len(set(column) - {-1})
    table_ids = np.broadcast_to(np.arange(initializers), ids.shape)
    np.testing.assert_array_equal(layer(ids, table_ids=table_ids), vectors)


# Training, with tf.Variable as the reference.


def with_tables(layer, ids, targets, optimizer, steps):
    losses = []
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.reduce_sum(layer(ids), [1, 2]) - targets) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
        losses.append(float(loss))
    return losses


def with_matrices(start, ids, targets, optimizer, steps):
    matrices = [tf.Variable(matrix) for matrix in start]
    losses = []
    for _ in range(steps):
        with tf.GradientTape() as tape:
            rows = [tf.gather(matrix, ids[:, t]) for t, matrix in enumerate(matrices)]
            loss = tf.reduce_mean((tf.reduce_sum(tf.stack(rows, 1), [1, 2]) - targets) ** 2)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, matrices)]
        optimizer.apply_gradients(zip(gradients, matrices, strict=True))
        losses.append(float(loss))
    return losses, [matrix.numpy() for matrix in matrices]


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_a_custom_loop_trains_like_dense_variables(kind):
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, 12, [40, 2]), rng.normal(size=40).astype(np.float32)
    layer = layer_of([oe.make_uniform_initializer(-0.5, 0.5)] * 2)
    start = layer(np.repeat(np.arange(12)[:, None], 2, 1)).numpy().transpose(1, 0, 2)
    make = getattr(keras.optimizers, kind)
    losses = with_tables(layer, ids, targets, de.OptimizerWrapper(make(0.05)), 5)
    expected, matrices = with_matrices(start, ids, targets, make(0.05), 5)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for table, matrix in zip(layer.tables, matrices, strict=True):
        np.testing.assert_allclose(
            table.lookup(np.arange(12), insert=False), matrix, rtol=1e-5, atol=1e-6
        )


def model_of(layer):
    inputs = keras.Input([2], dtype="int64")
    x = keras.layers.Flatten()(layer(inputs))
    return keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(x))


def samples(n=256, seed=0):
    ids = np.random.default_rng(seed).integers(0, 40, [n, 2])
    return ids, ((ids[:, 0] + ids[:, 1]) % 2).astype(np.float32)


def test_fit_save_and_load(tmp_path):
    layer = layer_of(
        [DISTRIBUTIONS["uniform"][0], DISTRIBUTIONS["normal"][0]],
        store_options=store(str(tmp_path)),
        padding_idx=0,
        seed=4,
    )
    model = model_of(layer)
    model.compile(de.OptimizerWrapper(keras.optimizers.Adam(0.05)), "mse")
    ids, labels = samples()
    losses = model.fit(ids, labels, epochs=4, verbose=0, shuffle=False).history["loss"]
    assert losses[-1] < losses[0]
    model.save(tmp_path / "m.keras")
    other = keras.models.load_model(tmp_path / "m.keras")
    loaded = other.get_layer("e")
    assert type(loaded) is oe.MultiTableEmbedding
    assert loaded.get_config() == layer.get_config()
    np.testing.assert_array_equal(other.predict(ids, verbose=0), model.predict(ids, verbose=0))
    for each in (model, other):  # with the same state of the optimizer
        each.fit(ids, labels, epochs=1, verbose=0, shuffle=False)
    np.testing.assert_array_equal(other.predict(ids, verbose=0), model.predict(ids, verbose=0))
    unknown = np.array([[10**12, 10**12]])
    np.testing.assert_array_equal(loaded(unknown), layer(unknown))


def test_a_saved_model_and_frozen_rows(tmp_path):
    layer = constants(CONSTANTS[:2], store_options=store(str(tmp_path)), padding_idx=3)
    model = model_of(layer)
    model.compile(de.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse")
    ids, labels = samples()
    model.fit(ids, labels, verbose=0)
    rows = [len(table) for table in layer.tables]
    de.export_saved_model(model, tmp_path / "served")
    served = tf.saved_model.load(str(tmp_path / "served"))
    ids = np.concatenate([ids, [[3, 3], [10**12, 5]]])  # padding, and an id without a row
    np.testing.assert_array_equal(served.serve(ids), model.predict(ids, verbose=0))
    assert [len(table) for table in layer.tables] == rows


def test_a_model_with_table_ids():
    layer = constants()
    ids = keras.Input([4], dtype="int64")
    table_ids = keras.Input([4], dtype="int32")
    model = keras.Model([ids, table_ids], layer(ids, table_ids=table_ids))
    assert model.output_shape == (None, 4, DIM)
    output = model.predict([np.array([[1, 2, 3, 4]]), np.array([[2, 1, 0, 2]])], verbose=0)
    np.testing.assert_array_equal(output[0, :, 0], [5, -1, 2, 5])


def test_a_frozen_layer_stays_frozen_in_a_config():
    layer = constants(trainable=False, evict_strategy="lru", max_capacity=50)
    config = layer.get_config()
    assert config["trainable"] is False
    copy = oe.MultiTableEmbedding.from_config(config)
    assert not copy.trainable
    assert copy.tables[0].options.max_capacity == 50
    assert copy.tables[0].options.strategy == "lru"


# Capacity.


def test_a_table_has_as_many_rows_as_the_capacity():
    layer = constants([1.0], store_options=store(capacity=40))
    layer(np.arange(40), training=True)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="e/table_0"):
        layer(np.arange(20, 60), training=True)
    assert len(layer.tables[0]) == 40
    assert layer.tables[0].contains(np.arange(40)).numpy().all()
    layer(np.arange(100))  # reads need no rows


@pytest.mark.parametrize("compiled", [False, True])
def test_the_capacity_is_of_all_tables_together(compiled):
    layer = constants(CONSTANTS[:2], store_options=store(capacity=40))
    step = tf.function(layer) if compiled else layer
    ids = np.arange(20)
    step(tf.constant(np.stack([ids, ids], 1)), training=True)
    step(tf.constant(np.stack([ids, ids], 1)), training=True)
    step(tf.constant([[20, 20]], tf.int64), training=True)  # beyond it
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"e is full.*which is 40 rows"):
        step(tf.constant([[1, 1]], tf.int64), training=True)
    step(tf.constant([[100, 100]], tf.int64), training=False)


def test_eviction_instead_of_an_error():
    layer = constants(CONSTANTS[:2], store_options=store(capacity=40), evict_strategy="lru")
    for begin in range(0, 400, 20):
        ids = np.arange(begin, begin + 20)
        layer(np.stack([ids, ids], 1), training=True)
    assert [len(table) for table in layer.tables] == [40, 40]
