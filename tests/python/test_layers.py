"""The Keras layers in models: fit, evaluate, predict, save; against keras.layers.Embedding."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

K = keras.optimizers
VOCABULARY, DIM, FEATURES = 48, 4, 3


def make_data(n=512, seed=0, batches="random"):
    """Ids [n, FEATURES] and labels.

    batches: "random"; "distinct": no id twice in 16 rows; "every": each id once in 16 rows.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, (n, FEATURES))
    if batches == "every":
        ids = np.stack([rng.permutation(VOCABULARY) for _ in range(n // 16)]).reshape(n, FEATURES)
    elif batches == "distinct":
        ids = np.stack([rng.choice(200, 48, replace=False) for _ in range(n // 16)])
        ids = ids.reshape(n, FEATURES)
    labels = (rng.random(n) < 1 / (1 + np.exp(-(ids % 7 - 3).sum(1)))).astype(np.float32)
    return ids.astype(np.int64), labels


def functional(embedding):
    inputs = keras.Input((FEATURES,), dtype="int64")
    x = keras.layers.Flatten()(embedding(inputs))
    x = keras.layers.Dense(
        8, activation="relu", kernel_initializer=keras.initializers.GlorotUniform(1)
    )(x)
    outputs = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(2), dtype="float32"
    )(x)
    return keras.Model(inputs, outputs)


def sequential(embedding):
    return keras.Sequential(
        [
            keras.Input((FEATURES,), dtype="int64"),
            embedding,
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


class Subclassed(keras.Model):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.head = keras.layers.Dense(1)

    def call(self, ids):
        return self.head(keras.ops.sum(self.embedding(ids), axis=1))


MODELS = {"functional": functional, "sequential": sequential, "subclassed": Subclassed}
BCE = keras.losses.BinaryCrossentropy(from_logits=True)


def vectors_of(layer, ids=None):
    ids = np.arange(VOCABULARY) if ids is None else ids
    return layer.table.lookup(ids, insert=False).numpy()


class Losses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


@pytest.mark.parametrize("kind", MODELS)
def test_fit_evaluate_predict(kind):
    ids, labels = make_data()
    layer = de.layers.Embedding(DIM)
    model = MODELS[kind](layer)
    model.compile(de.OptimizerWrapper(K.Adam(0.1)), BCE, metrics=["accuracy"])
    history = model.fit(ids, labels, epochs=6, batch_size=32, verbose=0)
    assert history.history["loss"][-1] < 0.7 * history.history["loss"][0]
    assert len(layer.table) == VOCABULARY
    new = ids + 10**12
    before = vectors_of(layer)
    model.evaluate(new, labels, verbose=0)
    predicted = model.predict(new, verbose=0)
    assert predicted.shape == (512, 1)
    assert len(layer.table) == VOCABULARY
    np.testing.assert_array_equal(vectors_of(layer), before)
    np.testing.assert_allclose(model(ids[:4]), model.predict(ids[:4], verbose=0), rtol=1e-5)
    assert model.count_params() >= VOCABULARY * DIM
    model.summary(print_fn=lambda *args, **kwargs: None)


# Keras 3.15 does not sum the gradients of repeated ids of its own Embedding before it squares them
# (or, in RMSprop, fails), so batches without repeats are what the two layers can be compared on;
# with repeats test_optimizer.py compares with the dense gradient. Optimizers whose state decays
# move every row of a dense matrix in every step: there, every row is touched.
OPTIMIZERS = {
    "sgd": (lambda: K.SGD(0.5), "random"),
    "sgd_clipvalue": (lambda: K.SGD(0.5, clipvalue=0.001), "distinct"),
    "adagrad": (lambda: K.Adagrad(0.1), "distinct"),
    "ftrl": (lambda: K.Ftrl(0.1), "every"),
    "momentum": (lambda: K.SGD(0.1, momentum=0.9), "every"),
    "nesterov": (lambda: K.SGD(0.1, momentum=0.9, nesterov=True), "every"),
    "adam": (lambda: K.Adam(0.01), "every"),
    "adamw": (lambda: K.AdamW(0.01), "every"),
    "adamax": (lambda: K.Adamax(0.01), "every"),
    "rmsprop": (lambda: K.RMSprop(0.01, momentum=0.5, centered=True), "every"),
    "adadelta": (lambda: K.Adadelta(1.0), "every"),
    "lion": (lambda: K.Lion(0.001), "every"),
    "nadam": (lambda: K.Nadam(0.01), "every"),
    "clipnorm": (lambda: K.Adam(0.01, clipnorm=0.01), "every"),
    "global_clipnorm": (lambda: K.Adam(0.01, global_clipnorm=0.05), "every"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_those_of_the_keras_embedding(name):
    make, batches = OPTIMIZERS[name]
    ids, labels = make_data(n=1600, batches=batches)
    rows = ids.max() + 1
    start = np.random.default_rng(7).normal(size=(rows, DIM)).astype(np.float32) * 0.1
    static = keras.layers.Embedding(int(rows), DIM, weights=[start])
    dynamic = de.layers.Embedding(DIM)
    de.assign(dynamic.table, np.arange(rows), start)
    losses = []
    for layer, optimizer in ((static, make()), (dynamic, de.OptimizerWrapper(make()))):
        model = functional(layer)
        model.compile(optimizer, BCE)
        record = Losses()
        model.fit(ids, labels, batch_size=16, shuffle=False, callbacks=[record], verbose=0)
        losses.append(record.losses)
    assert len(losses[0]) == 100
    assert np.ptp(losses[0]) > 0.01
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_a_plain_optimizer_says_that_it_must_be_wrapped():
    ids, labels = make_data()
    model = functional(de.layers.Embedding(DIM))
    model.compile("adam", BCE)
    with pytest.raises(TypeError, match="OptimizerWrapper"):
        model.fit(ids, labels, verbose=0)


def test_callbacks_and_learning_rate(tmp_path):
    ids, labels = make_data()
    layer = de.layers.Embedding(DIM)
    model = functional(layer)
    model.compile(de.OptimizerWrapper(K.SGD(0.1)), BCE)
    rates = []
    model.fit(
        ids,
        labels,
        epochs=4,
        verbose=0,
        validation_data=(ids, labels),
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.EarlyStopping(patience=10),
            keras.callbacks.BackupAndRestore(str(tmp_path / "backup")),
            keras.callbacks.ModelCheckpoint(
                str(tmp_path / "best.weights.h5"), save_weights_only=True, save_best_only=True
            ),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate))
            ),
        ],
    )
    np.testing.assert_allclose(rates, [0.05, 0.025, 0.0125, 0.00625], rtol=1e-6)
    best = vectors_of(layer)
    layer.table.clear()
    model.load_weights(str(tmp_path / "best.weights.h5"))
    np.testing.assert_array_equal(vectors_of(layer), best)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", min_delta=100, patience=1, factor=0.5)
    model.fit(ids, labels, epochs=3, verbose=0, callbacks=[plateau])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.00625 / 4)


def test_early_stopping_restores_the_best_rows():
    ids, labels = make_data()
    layer = de.layers.Embedding(DIM)
    model = functional(layer)
    model.compile(de.OptimizerWrapper(K.Adam(0.1)), BCE)
    model.fit(ids, labels, epochs=1, verbose=0)
    best = vectors_of(layer)
    weights = model.get_weights()
    model.fit(ids + 20, labels, epochs=1, verbose=0)
    assert len(layer.table) > VOCABULARY
    model.set_weights(weights)
    assert len(layer.table) == VOCABULARY
    np.testing.assert_array_equal(vectors_of(layer), best)
    with pytest.raises(TypeError, match="assign"):
        layer.set_weights([np.zeros((VOCABULARY, DIM))])
    stop = keras.callbacks.EarlyStopping("loss", patience=0, mode="max", restore_best_weights=True)
    model.fit(ids, labels, epochs=3, verbose=0, callbacks=[stop])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float16", "bfloat16"])
def test_dtype_policies(policy):
    ids, labels = make_data()
    keras.config.set_dtype_policy(policy)
    try:
        layer = de.layers.Embedding(DIM)
        bag = de.layers.EmbeddingBag(DIM)
        model = functional(layer)
        model.compile(de.OptimizerWrapper(K.Adam(0.02, epsilon=1e-4)), BCE)
        history = model.fit(ids, labels, epochs=5, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    compute = policy.removeprefix("mixed_")
    assert layer(ids[:2]).dtype.name == bag(ids[:2]).dtype.name == compute
    assert layer.table.dtype.name == ("float32" if policy.startswith("mixed") else compute)
    assert history.history["loss"][-1] < history.history["loss"][0]
    scaled = isinstance(model.optimizer.inner_optimizer, K.LossScaleOptimizer)
    assert type(model.optimizer) is de.OptimizerWrapper
    assert scaled == (policy == "mixed_float16")
    # Ids are never rounded to the compute dtype.
    keys, _ = de.export(layer.table)
    assert set(keys.numpy().tolist()) == set(ids.ravel().tolist())


def test_compiled_with_jit_auto_and_schedule():
    ids, labels = make_data()
    layer = de.layers.Embedding(DIM)
    model = functional(layer)
    schedule = K.schedules.ExponentialDecay(0.1, 10, 0.9)
    model.compile(de.OptimizerWrapper(K.SGD(schedule)), BCE, jit_compile="auto")
    model.fit(ids, labels, verbose=0)
    assert not model.jit_compile
    assert float(model.optimizer.learning_rate) < 0.1


def train_once(model, ids, labels):
    model.compile(de.OptimizerWrapper(K.Adam(0.05)), BCE)
    model.fit(ids, labels, epochs=2, batch_size=64, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("trained_before", [False, True])
def test_save_and_load_weights_with_state(tmp_path, trained_before):
    ids, labels = make_data()
    model = train_once(functional(de.layers.Embedding(DIM)), ids, labels)
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    other = functional(de.layers.Embedding(DIM))
    if trained_before:
        train_once(other, ids + 7, labels)
    else:
        other.compile(de.OptimizerWrapper(K.Adam(0.05)), BCE)
        other.optimizer.build(other.trainable_variables)
    other.load_weights(path)
    layer, other_layer = model.layers[1], other.layers[1]
    assert len(other_layer.table) == len(layer.table)
    np.testing.assert_array_equal(vectors_of(other_layer), vectors_of(layer))
    # Both go on alike: the optimizer's state came along.
    for m in (model, other):
        m.fit(ids, labels, batch_size=64, shuffle=False, verbose=0)
    np.testing.assert_allclose(vectors_of(other_layer), vectors_of(layer), rtol=1e-6)


def test_save_and_load_a_whole_model(tmp_path):
    ids, labels = make_data()
    model = train_once(functional(de.layers.Embedding(DIM, key_type="int64", seed=3)), ids, labels)
    model.save(str(tmp_path / "model.keras"))
    loaded = keras.models.load_model(str(tmp_path / "model.keras"))
    np.testing.assert_allclose(loaded.predict(ids, verbose=0), model.predict(ids, verbose=0))
    assert type(loaded.optimizer) is de.OptimizerWrapper


def test_a_frozen_layer_reads_and_does_not_change():
    ids, labels = make_data()
    layer = de.layers.Embedding(DIM)
    model = functional(layer)
    layer(np.arange(5), training=True)
    layer.trainable = False
    assert not layer.table.trainable  # so no tape watches it
    before = vectors_of(layer)
    model.compile(de.OptimizerWrapper(K.SGD(0.5)), BCE)
    model.fit(ids, labels, verbose=0)
    assert len(layer.table) == 5
    np.testing.assert_array_equal(vectors_of(layer), before)
    layer.trainable = True
    model.compile(de.OptimizerWrapper(K.SGD(0.5)), BCE)
    model.fit(ids, labels, verbose=0)
    assert len(layer.table) == VOCABULARY


def test_rows_are_made_under_a_tape_if_nothing_says_whether_it_is_training():
    layer = de.layers.Embedding(DIM)
    layer(np.array([1]))
    assert len(layer.table) == 0
    with tf.GradientTape():
        layer(np.array([1]))
        layer(np.array([2]), training=False)
    assert de.export(layer.table)[0].numpy().tolist() == [1]


def test_keras_constraint():
    ids, labels = make_data()
    layer = de.layers.Embedding(DIM, embeddings_constraint=keras.constraints.UnitNorm(axis=1))
    model = functional(layer)
    model.compile(de.OptimizerWrapper(K.Adam(0.05)), BCE)
    model.fit(ids, labels, verbose=0)
    np.testing.assert_allclose(np.linalg.norm(vectors_of(layer), axis=1), 1, rtol=1e-4)


def test_padding_id_reads_zeros_and_gets_no_row_and_no_gradient():
    layer = de.layers.Embedding(2, "ones", padding_id=-1)
    with tf.GradientTape() as tape:
        out = layer(tf.constant([[1, -1], [-1, -1], [2, 1]], tf.int64), training=True)
    assert out.numpy()[..., 0].tolist() == [[1, 0], [0, 0], [1, 1]]
    assert sorted(de.export(layer.table)[0].numpy().tolist()) == [1, 2]
    assert sorted(tape.gradient(out, layer.weights[0]).indices.numpy().tolist()) == [1, 2]


@pytest.mark.parametrize("form", ["dense", "ragged", "sparse"])
def test_bag_without_padding(form):
    layer = de.layers.EmbeddingBag(1, "mean", "zeros", padding_id=0)
    de.assign(layer.table, [1, 2, 3], [[1.0], [2.0], [6.0]])
    ids = tf.constant([[1, 3, 0], [0, 0, 0], [2, 0, 2]], tf.int64)
    weights = tf.constant([[1.0, 3.0, 9.0], [1.0, 1.0, 1.0], [2.0, 5.0, 2.0]])
    if form == "ragged":
        ids, weights = (tf.RaggedTensor.from_tensor(t) for t in (ids, weights))
    elif form == "sparse":
        every = tf.ones([3, 3], tf.bool)
        ids, weights = (
            tf.SparseTensor(tf.where(every), tf.reshape(t, [-1]), [3, 3]) for t in (ids, weights)
        )
    assert layer(ids).numpy().ravel().tolist() == [3.5, 0, 2]
    assert layer(ids, weights=weights).numpy().ravel().tolist() == [4.75, 0, 2]
    assert len(layer.table) == 3


def test_default_vector_outside_training():
    layer = de.layers.Embedding(2, "ones", default_vector=[7.0, 8.0], padding_id=9)
    bag = de.layers.EmbeddingBag(2, "sum", "ones", default_vector=0.5)
    layer(tf.constant([1]), training=True)
    bag(tf.constant([[1]]), training=True)
    assert layer(tf.constant([1, 5, 9])).numpy().tolist() == [[1, 1], [7, 8], [0, 0]]
    assert bag(tf.constant([[1, 5]])).numpy().tolist() == [[1.5, 1.5]]
    assert layer(tf.constant([5]), training=True).numpy().tolist() == [[1, 1]]
    assert len(bag.table) == 1


def test_combiner_and_shapes():
    ids = tf.constant([[[1, 2], [2, 2]]], tf.int64)
    layer = de.layers.Embedding(3, "ones", combiner="sum")
    assert layer(ids).shape == (1, 2, 3)
    assert float(layer(ids)[0, 0, 0]) == 2.0
    assert layer.compute_output_shape((None, 5, 2)) == (None, 5, 3)
    ragged = tf.ragged.constant([[1], [2, 3]], dtype=tf.int64)
    assert layer(ragged).shape == (2, 3)
    sequence = de.layers.Embedding(3)(ragged)
    assert isinstance(sequence, tf.RaggedTensor)
    assert sequence.shape.as_list() == [2, None, 3]


def test_mask_zero():
    layer = de.layers.Embedding(3, mask_zero=True)
    out = layer(tf.constant([[1, 0]]))
    assert keras.src.backend.get_keras_mask(out).numpy().tolist() == [[True, False]]


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_bag_in_a_model(kind):
    ids, labels = make_data()
    inputs = keras.Input(
        (None,) if kind != "dense" else (FEATURES,),
        dtype="int64",
        ragged=kind == "ragged",
        sparse=kind == "sparse",
    )
    layer = de.layers.EmbeddingBag(DIM, "sum")
    outputs = keras.layers.Dense(1)(layer(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(de.OptimizerWrapper(K.Adam(0.05)), BCE)
    data = tf.constant(ids)
    if kind == "ragged":
        data = tf.RaggedTensor.from_tensor(data)
    elif kind == "sparse":
        data = tf.SparseTensor(tf.where(data > -1), tf.reshape(data, [-1]), data.shape)
    dataset = tf.data.Dataset.from_tensor_slices((data, labels)).batch(32)
    history = model.fit(dataset, epochs=4, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert len(layer.table) == VOCABULARY


def test_bag_weights_have_a_gradient():
    layer = de.layers.EmbeddingBag(1, "sum", "zeros")
    de.assign(layer.table, [1, 2], [[1.0], [5.0]])
    weights = tf.Variable([[1.0, 2.0]])
    with tf.GradientTape() as tape:
        out = layer(tf.constant([[1, 2]]), weights=weights)
    assert tape.gradient(out, weights).numpy().tolist() == [[1.0, 5.0]]


def test_multi_table_same_id_is_two_rows_and_shared_tables_share():
    layer = de.layers.MultiTableEmbedding(
        2,
        tables=[{"initializer": "1"}, {"initializer": 2.0, "max_capacity": 100}],
        feature_tables=[0, 1, 1],
    )
    ids = tf.constant([[5, 5, 6], [5, 6, 6]], tf.int64)
    out = layer(ids, training=True)
    assert out.shape == (2, 3, 2)
    assert out.numpy()[..., 0].tolist() == [[1, 2, 2], [1, 2, 2]]
    assert [len(table) for table in layer.tables] == [1, 2]
    assert layer.tables[1].options.max_capacity == 100


def test_multi_table_agrees_with_single_tables_and_trains():
    rng = np.random.default_rng(0)
    ids = rng.integers(-5, 5, (16, 4))
    layer = de.layers.MultiTableEmbedding(3, tables=3, feature_tables=[2, 0, 0, 1], padding_id=-5)
    upstream = rng.normal(size=(16, 4, 3)).astype(np.float32)
    with tf.GradientTape() as tape:
        out = layer(tf.constant(ids), training=True)
        loss = tf.reduce_sum(out * upstream)
    grads = tape.gradient(loss, layer.trainable_weights)
    for f, t in enumerate([2, 0, 0, 1]):
        expected = layer.tables[t].lookup(ids[:, f], insert=False).numpy()
        expected[ids[:, f] == -5] = 0
        np.testing.assert_array_equal(out[:, f], expected)
    for t, grad in enumerate(grads):
        features = [f for f, of in enumerate([2, 0, 0, 1]) if of == t]
        for key, value in zip(grad.indices.numpy(), grad.values.numpy(), strict=True):
            expected = sum(upstream[ids[:, f] == key, f].sum(0) for f in features)
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
            assert key != -5


@pytest.mark.parametrize("traced", [False, True])
def test_multi_table_with_table_ids(traced):
    layer = de.layers.MultiTableEmbedding(
        1, tables=[{"initializer": float(i)} for i in range(3)], feature_tables=[0]
    )
    call = tf.function(layer) if traced else layer
    ids = tf.constant([[1, 1], [1, 2]], tf.int64)
    out = call(ids, table_ids=tf.constant([[0, 1], [2, 2]]), training=True)
    assert out.numpy()[..., 0].tolist() == [[0, 1], [2, 2]]
    assert [len(table) for table in layer.tables] == [1, 1, 2]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="table_ids"):
        call(ids, table_ids=tf.constant([[0, 1], [2, 3]]), training=True)


def test_multi_table_in_a_model(tmp_path):
    ids, labels = make_data()
    inputs = keras.Input((FEATURES,), dtype="int64")
    layer = de.layers.MultiTableEmbedding(DIM, tables=FEATURES)
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile(de.OptimizerWrapper(K.Adagrad(0.1)), BCE)
    history = model.fit(ids, labels, epochs=4, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    model.save(str(tmp_path / "model.keras"))
    loaded = keras.models.load_model(str(tmp_path / "model.keras"))
    np.testing.assert_allclose(loaded.predict(ids, verbose=0), model.predict(ids, verbose=0))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: de.layers.Embedding(
            3,
            keras.initializers.RandomNormal(0.0, 2.0, seed=5),
            combiner="max",
            padding_id=0,
            default_vector=1.5,
            key_type="int32",
            name="users",
            max_capacity=9,
            seed=4,
            embeddings_constraint=keras.constraints.NonNeg(),
            dtype="bfloat16",
            trainable=False,
        ),
        lambda: de.layers.EmbeddingBag(3, "sqrtn", ["1", 2.0, keras.initializers.Ones()]),
        lambda: de.layers.MultiTableEmbedding(3, [{"max_capacity": 7}, {}], [1, 0, 0]),
    ],
)
def test_config_round_trip(layer):
    layer = layer()
    copy = keras.layers.deserialize(keras.layers.serialize(layer))
    assert copy.get_config() == layer.get_config()
    table, other = layer.weights[0].value, copy.weights[0].value
    assert table.options == other.options
    assert (table.dtype, table.key_type) == (other.dtype, other.key_type)
    np.testing.assert_array_equal(
        tf.cast(table.lookup([5]), tf.float32), tf.cast(other.lookup([5]), tf.float32)
    )


def test_float_ids_work_as_far_as_they_are_exact():
    layer = de.layers.Embedding(2)
    model = keras.Sequential([layer, keras.layers.Flatten()])  # its implicit Input is float32
    assert model(np.array([[1, 2**24 - 1]])).shape == (1, 4)
    mixed = de.layers.Embedding(2, dtype="mixed_bfloat16")
    mixed(np.array([[1001.0]], np.float32), training=True)  # ids are not cast to the compute dtype
    assert de.export(mixed.table)[0].numpy().tolist() == [1001]
    for ids in ([[2.0**24]], [[1.5]], [[np.nan]]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="dtype='int64'"):
            layer(np.array(ids, np.float32))


def test_a_layer_is_a_weight_for_keras_and_a_table_for_tensorflow():
    layer = de.layers.Embedding(DIM, name="users")
    (weight,) = layer.trainable_weights
    assert isinstance(weight, keras.Variable)
    assert weight.value is layer.table
    assert weight.path == "users/embeddings"
    assert layer.count_params() == 0 if layer.built else True
    layer(np.array([[1, 2]]), training=True)
    assert layer.count_params() == 2 * DIM
    assert weight.shape == (2, DIM)
    assert not layer.supports_jit
