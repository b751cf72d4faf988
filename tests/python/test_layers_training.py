"""The Keras layers in models: fit, evaluate, predict, save; against keras.layers.Embedding."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_helpers import BCE, DIM, MODELS, VOCABULARY, functional, make_data, vectors_of
from optimizer_cases import CASES

import tf_dynemb as de

K = keras.optimizers


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


# With its own Embedding, Keras 3.15 squares the gradients of repeated ids before it sums them, and
# RMSprop fails. So only plain SGD is compared on batches with repeats here; test_optimizer.py
# compares repeats with the dense gradient. Optimizers whose state decays change every row of a
# dense matrix in every step, so their batches contain every row.
CLIPPED = {
    "clipvalue": lambda: K.SGD(0.5, clipvalue=0.001),
    "clipnorm": lambda: K.Adam(0.01, clipnorm=0.01),
    "global_clipnorm": lambda: K.Adam(0.01, global_clipnorm=0.05),
}


# Keras 3.15 builds ScheduleFreeAdamW in its traced step, where its copy of the vectors is lost, so
# that the first step of `fit` sets all weights to nearly 0; test_optimizer.py compares it.
@pytest.mark.parametrize(
    "name", [*(name for name in CASES if name != "schedule_free_adamw"), *CLIPPED]
)
def test_losses_equal_the_keras_embedding(name):
    make, batches = CLIPPED.get(name), "every"
    if make is None:
        make = CASES[name].make
        batches = "every" if CASES[name].every_row else "random" if name == "sgd" else "distinct"
    ids, labels = make_data(n=1600, batches=batches)
    rows = ids.max() + 1
    start = np.random.default_rng(7).normal(size=(rows, DIM)).astype(np.float32) * 0.1
    static = keras.layers.Embedding(int(rows), DIM, weights=[start])
    dynamic = de.layers.Embedding(DIM)
    de.assign(dynamic.table, np.arange(rows), start)
    losses = []
    for layer, optimizer in ((static, make()), (dynamic, de.OptimizerWrapper(make()))):
        model = functional(layer)
        # Keras would compile the static model by XLA, whose sums differ, and which needs more of
        # CUDA on a GPU than TensorFlow itself.
        model.compile(optimizer, BCE, jit_compile=False)
        record = Losses()
        model.fit(ids, labels, batch_size=16, shuffle=False, callbacks=[record], verbose=0)
        losses.append(record.losses)
        assert not model.jit_compile
    assert len(losses[0]) == 100
    assert np.ptp(losses[0]) > 0.01
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_plain_optimizer_is_refused():
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


def test_set_weights_restores_rows():
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


@pytest.mark.parametrize("by", ["policy", "floatx", "dtype"])
@pytest.mark.parametrize("optimizer", ["Adam", "Nadam"])
def test_float64(by, optimizer):
    """Vectors are float64, as in Keras's layer; the rows are float32."""
    ids, labels = make_data()
    dtype = "float64" if by == "dtype" else None
    large = ids.astype(np.int64) + 2**53
    before = keras.config.floatx()
    try:
        if by == "policy":
            keras.config.set_dtype_policy("float64")
        elif by == "floatx":
            keras.config.set_floatx("float64")
            keras.config.set_dtype_policy("float64")  # other tests have set it
        layers = [
            de.layers.Embedding(DIM, dtype=dtype, embeddings_regularizer="l2"),
            de.layers.Embedding(DIM, dtype=dtype, combiner="mean"),
            de.layers.EmbeddingBag(DIM, dtype=dtype),
            de.layers.MultiTableEmbedding(DIM, ids.shape[1], dtype=dtype),
        ]
        reference = keras.layers.Embedding(VOCABULARY, DIM, dtype=dtype)
        for layer in layers:
            model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
            model.compile(de.OptimizerWrapper(getattr(K, optimizer)(0.02)), "mse")
            losses = model.fit(large, labels, epochs=3, verbose=0).history["loss"]
            assert losses[-1] < losses[0]
            outputs = layer(large)
            assert outputs.dtype == reference(ids % VOCABULARY).dtype == tf.float64
            for weight in layer.weights:
                assert weight.value.dtype == tf.float32
                assert de.export(weight.value)[0].numpy().min() >= 2**53
            copy = type(layer).from_config(layer.get_config())
            assert copy(large).dtype == tf.float64
        weights = tf.ones(ids.shape, tf.float64)
        assert layers[2](large, weights=weights).dtype == tf.float64
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(before)
    with pytest.raises(TypeError, match="rows are of float32, float16 or bfloat16"):
        de.DynamicVariable(DIM, dtype="float64")


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


def test_jit_auto_and_learning_rate_schedule():
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
    # Both models continue alike, so the optimizer's state was loaded too.
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


def test_frozen_layer_does_not_change():
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


def test_keras_constraint():
    ids, labels = make_data()
    layer = de.layers.Embedding(DIM, embeddings_constraint=keras.constraints.UnitNorm(axis=1))
    model = functional(layer)
    model.compile(de.OptimizerWrapper(K.Adam(0.05)), BCE)
    model.fit(ids, labels, verbose=0)
    np.testing.assert_allclose(np.linalg.norm(vectors_of(layer), axis=1), 1, rtol=1e-4)
