"""`from_keras` and `to_keras`: the expected values come from the Keras model itself."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

ROWS, DIM = 40, 4
DATA = np.random.default_rng(1)
# No id is twice in a batch: Keras's sparse gradients square the parts of a repeated id.
IDS = np.concatenate([DATA.permutation(ROWS)[:24].reshape(8, 3) for _ in range(12)])
LABELS = DATA.normal(size=(len(IDS), 1)).astype(np.float32)


def sequential(**options):
    return keras.Sequential(
        [
            keras.Input([3], dtype=options.pop("input_dtype", "int64")),
            keras.layers.Embedding(ROWS, DIM, name="ids", **options),
            keras.layers.Flatten(),
            keras.layers.Dense(5, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "sgd decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.8, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.02),
    "amsgrad": lambda: keras.optimizers.Adam(0.02, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.02),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True, epsilon=1e-3),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
}


def fit(model, part):
    """Trains on a third of the data, and returns the losses of the batches."""
    losses = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: losses.append(logs["loss"])
    )
    batch = slice(part * 32, part * 32 + 32)
    model.fit(IDS[batch], LABELS[batch], batch_size=8, shuffle=False, verbose=0, callbacks=[log])
    return losses


def vectors(model):
    return model.get_layer("ids").table.peek(np.arange(ROWS)).numpy()


def matrix(model):
    return model.get_layer("ids").get_weights()[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_as_in_keras(name):
    """The tolerance is the same as for catch-up: missed steps are added up in another order."""
    model = sequential()
    model.compile(OPTIMIZERS[name](), "mse", metrics=["mae"])
    fit(model, 0)
    fit(model, 1)
    model.optimizer.learning_rate = float(model.optimizer.learning_rate) / 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = de.from_keras(model)
    np.testing.assert_array_equal(vectors(converted), matrix(model))
    np.testing.assert_array_equal(converted.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    assert int(converted.optimizer.core.iterations) == 8
    before = matrix(model)
    losses = fit(converted, 2)
    np.testing.assert_array_equal(matrix(model), before)  # the model keeps its own weights
    np.testing.assert_allclose(losses, fit(model, 2), rtol=1e-5)
    np.testing.assert_allclose(vectors(converted), matrix(model), rtol=2e-5, atol=1e-6)
    for got, expected in zip(converted.get_weights()[1:], model.get_weights()[1:], strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_there_and_back(name):
    model = sequential()
    model.compile(OPTIMIZERS[name](), "mse")
    fit(model, 0)
    back = de.to_keras(de.from_keras(model))
    for got, expected in zip(back.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert type(back.optimizer) is type(model.optimizer)
    for got, expected in zip(back.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(fit(back, 1), fit(model, 1))


@pytest.mark.parametrize("name", ["momentum", "adagrad", "adam"])
def test_training_continues_in_keras(name):
    model = sequential()
    model.compile(OPTIMIZERS[name](), "mse")
    fit(model, 0)
    converted = de.from_keras(model)
    fit(converted, 1)
    fit(model, 1)
    back = de.to_keras(converted)
    np.testing.assert_allclose(matrix(back), matrix(model), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(fit(back, 2), fit(model, 2), rtol=2e-5)


def test_the_layer_has_the_arguments_of_keras():
    model = sequential(
        mask_zero=True,
        embeddings_initializer=keras.initializers.RandomNormal(stddev=0.5),
        embeddings_regularizer="l2",
        embeddings_constraint="non_neg",
    )
    model.get_layer("ids").trainable = False
    layer = de.from_keras(model, max_capacity=100).get_layer("ids")
    assert layer.mask_zero
    assert not layer.trainable
    assert layer.initializer.stddev == 0.5
    assert isinstance(layer.embeddings_regularizer, keras.regularizers.L2)
    assert isinstance(layer.embeddings_constraint, keras.constraints.NonNeg)
    assert layer.table.options.max_capacity == 100
    with pytest.raises(ValueError, match="max_capacity=10 is less than the 40 rows"):
        de.from_keras(model, max_capacity=10)
    back = de.to_keras(de.from_keras(model)).get_layer("ids")
    config = {**back.get_config(), "dtype": None}
    assert config == {**model.get_layer("ids").get_config(), "dtype": None}


def test_pretrained_vectors_are_no_initializer_for_new_ids():
    start = DATA.normal(size=(ROWS, DIM)).astype(np.float32)
    model = sequential(embeddings_initializer=keras.initializers.Constant(start))
    with pytest.warns(UserWarning, match="New ids of layer 'ids' start from 'uniform'"):
        converted = de.from_keras(model)
    np.testing.assert_array_equal(vectors(converted), start)
    assert np.all(np.abs(converted.get_layer("ids").table.peek([ROWS + 1])) <= 0.05)


def tower():
    ids = keras.Input([3], dtype="int32", name="tower_ids")
    rows = keras.layers.Embedding(ROWS, DIM, name="rows", mask_zero=True)(ids)
    return keras.Model(ids, keras.layers.LSTM(3, recurrent_initializer="ones")(rows), name="tower")


def nested():
    """Shared embeddings and towers, several inputs in a dict, masks, an adapted vocabulary."""
    inputs = {
        "user": keras.Input([3], dtype="int32", name="user"),
        "item": keras.Input([3], name="item"),
        "word": keras.Input([2], dtype="string", name="word"),
        "age": keras.Input([1], name="age"),
    }
    shared, one_tower = keras.layers.Embedding(ROWS, DIM, name="shared"), tower()
    words = keras.layers.StringLookup(name="vocabulary")
    words.adapt(np.array([["a", "b", "c", "b"]]))
    ages = keras.layers.Normalization(axis=None)
    ages.adapt(np.array([10.0, 20.0, 40.0]))
    inner = keras.Sequential(
        [keras.layers.Embedding(4, 2, name="of_words"), keras.layers.Flatten()]
    )
    parts = [
        keras.layers.Flatten()(shared(inputs["user"])) * 2.0,
        keras.layers.Flatten()(shared(inputs["item"])),
        one_tower(inputs["user"]),
        one_tower(inputs["item"]),
        inner(words(inputs["word"])),
        ages(inputs["age"]),
    ]
    out = keras.layers.Dense(1, name="out")(keras.layers.Concatenate()(parts))
    return keras.Model(inputs, {"out": out}, name="both")


def nested_data(rows=64):
    return {
        "user": DATA.integers(0, ROWS, (rows, 3)),
        "item": DATA.integers(0, ROWS, (rows, 3)),
        "word": DATA.choice(["a", "b", "c", "?"], (rows, 2)),
        "age": DATA.normal(size=(rows, 1)),
    }


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "bfloat16"])
def test_models_in_models(policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = nested()
        data = {**nested_data(), "word": tf.constant(nested_data()["word"])}
        model.compile("adam", {"out": "mse"})
        targets = {"out": np.ones((64, 1), np.float32)}
        model.fit(data, targets, verbose=0)
        converted = de.from_keras(model)
        expected = model.predict(data, verbose=0)["out"]
        np.testing.assert_array_equal(converted.predict(data, verbose=0)["out"], expected)
        assert converted.count_params() == model.count_params()
        shared = converted.get_layer("shared")
        inner = converted.get_layer("tower").get_layer("rows")
        assert len(shared.table) == len(inner.table) == ROWS
        assert shared.dtype_policy.name == policy
        large = {**data, "user": np.full((64, 3), 2**60), "item": np.full((64, 3), 2**53 + 1)}
        converted.fit(large, targets, verbose=0)
        assert shared.table.contains([2**60, 2**53 + 1]).numpy().all()
        assert inner.table.contains([2**60, 2**53 + 1]).numpy().all()
        back = de.to_keras(de.from_keras(model))
        np.testing.assert_array_equal(back.predict(data, verbose=0)["out"], expected)
        scaler = keras.optimizers.LossScaleOptimizer
        assert isinstance(back.optimizer, scaler) == (policy == "mixed_float16")
    finally:
        keras.config.set_dtype_policy("float32")


class Scale(keras.layers.Layer):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def build(self, shape):
        self.weight = self.add_weight(shape=(shape[-1],), initializer="normal")

    def call(self, x):
        return x * self.factor * self.weight

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


class OwnStep(keras.Model):
    steps = 0

    def train_step(self, data):
        self.steps += 1
        return super().train_step(data)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_layers_of_all_kinds_continue(policy):
    """Masks through attention and recurrent layers, dropout, code of the user, a schedule."""
    keras.config.set_dtype_policy(policy)
    try:
        inputs = keras.Input([3])
        x = keras.layers.Embedding(ROWS, DIM, mask_zero=True, name="ids")(inputs)
        x = keras.layers.MultiHeadAttention(2, 2)(x, x)
        x = keras.layers.Bidirectional(keras.layers.GRU(3))(x)
        x = keras.layers.Lambda(lambda x: x * 2)(Scale(3.0)(keras.layers.Dropout(0.3)(x)))
        model = OwnStep(inputs, keras.layers.Dense(1)(x), name="own")
        schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.9)
        model.compile(
            keras.optimizers.Adam(schedule, clipnorm=0.5),
            keras.losses.Huber(),
            metrics=[keras.metrics.MeanAbsoluteError()],
        )
        fit(model, 0)
        converted = de.from_keras(model)
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(converted) is OwnStep
    assert converted.name == "own"
    ids = IDS.astype(np.float32)
    expected = model.predict(ids, verbose=0)
    np.testing.assert_array_equal(converted.predict(ids, verbose=0), expected)
    np.testing.assert_allclose(fit(converted, 1), fit(model, 1), rtol=1e-4)
    assert converted.steps
    assert converted.metrics_names == model.metrics_names
    back = de.to_keras(de.from_keras(model))
    assert type(back) is OwnStep
    np.testing.assert_array_equal(fit(back, 2), fit(model, 2))


@pytest.mark.parametrize("passed_on", [False, True])
@pytest.mark.parametrize("mask_zero", [False, True])
def test_a_mask_of_the_user(mask_zero, passed_on):
    inputs = keras.Input([3], dtype="int64")
    rows = keras.layers.Embedding(ROWS, DIM, mask_zero=mask_zero, name="ids")(inputs)
    mask = keras.ops.not_equal(inputs, 5)
    if passed_on:  # The mask of a layer's output, which pooling takes by itself, is this one.
        hidden = keras.layers.SimpleRNN(DIM, return_sequences=True)(rows, mask=mask)
        outputs = keras.layers.GlobalAveragePooling1D()(hidden)
    else:
        outputs = keras.layers.GlobalAveragePooling1D()(rows, mask=mask)
    model = keras.Model(inputs, outputs)
    ids = np.array([[5, 1, 2], [3, 5, 5]])
    expected = model.predict(ids, verbose=0)
    np.testing.assert_array_equal(de.from_keras(model).predict(ids, verbose=0), expected)


def converted_with_warnings(model):
    """Returns `de.from_keras(model)`, and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        converted = de.from_keras(model)
    return converted, [str(each.message) for each in caught]


def test_accumulated_gradients():
    for part in (32, 24):  # 4 or 3 batches
        model = sequential()
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
        model.fit(IDS[:part], LABELS[:part], batch_size=8, shuffle=False, verbose=0)
        converted, said = converted_with_warnings(model)
        assert ["were accumulated" in text for text in said] == [True] * (part == 24)
        if part == 32:
            np.testing.assert_allclose(fit(converted, 1), fit(model, 1), rtol=1e-5)


def test_a_model_that_data_has_built():
    model = keras.Sequential([keras.layers.Embedding(ROWS, DIM), keras.layers.Flatten()])
    with pytest.raises(ValueError, match=r"is not built.*Call it on data"):
        de.from_keras(model)
    expected = model.predict(IDS, verbose=0)
    converted = de.from_keras(model)
    np.testing.assert_array_equal(converted.predict(IDS, verbose=0), expected)
    np.testing.assert_array_equal(de.to_keras(converted).predict(IDS, verbose=0), expected)


def test_an_input_that_also_feeds_others():
    inputs = keras.Input([3])
    rows = keras.layers.Flatten()(keras.layers.Embedding(ROWS, DIM, name="ids")(inputs))
    one = keras.Sequential([keras.layers.Embedding(ROWS, 2), keras.layers.Flatten()])(inputs)
    out = keras.layers.Concatenate()([rows, one, keras.layers.Dense(2)(inputs)])
    model = keras.Model(inputs, out)
    with pytest.warns(UserWarning, match="input .* also feeds layers that take no ids"):
        converted = de.from_keras(model)
    ids = IDS.astype(np.float32)
    np.testing.assert_array_equal(converted.predict(ids, verbose=0), model.predict(ids, verbose=0))


WORDS = ["one", "two", "three", "five"]


def lookup_model(lookup, rows=6, kind="functional", **options):
    dtype = "string" if isinstance(lookup, keras.layers.StringLookup) else "int32"
    layers = [lookup, keras.layers.Embedding(rows, 2, name="ids", **options)]
    if kind == "sequential":
        return keras.Sequential([keras.Input([2], dtype=dtype), *layers])
    inputs = out = keras.Input([2], dtype=dtype)
    for layer in layers:
        out = layer(out)
    return keras.Model(inputs, out)


STRINGS = tf.constant([["one", "five"], ["two", "?"], ["", "three"], ["another", "one"]])
INTEGERS = np.array([[7, 2**40], [9, 12], [0, 11], [-4, 7]])


@pytest.mark.parametrize("kind", ["sequential", "functional"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("strings", [False, True])
def test_lookups_are_removed(kind, mask, strings):
    if strings:
        token, data = "" if mask else None, STRINGS
        lookup = keras.layers.StringLookup(vocabulary=WORDS, mask_token=token)
    else:
        token, data = 0 if mask else None, INTEGERS
        # -4 is only in the vocabulary of the copy that keeps the lookup.
        lookup = keras.layers.IntegerLookup(vocabulary=[7, 9, 11, 1 << 30], mask_token=token)
        data = np.where(data > 2**31, 1 << 30, data)
    model = lookup_model(lookup, kind=kind)
    expected = model.predict(data, verbose=0)
    converted = de.from_keras(model, remove_lookups=True)
    assert not any(isinstance(layer, type(lookup)) for layer in converted.layers)
    np.testing.assert_array_equal(converted.predict(data, verbose=0), expected)
    table = converted.get_layer("ids").table
    assert len(table) == 4 + mask
    new = ["a new word", "another"] if strings else [2**60, -(2**60)]
    converted.compile(de.OptimizerWrapper(keras.optimizers.SGD(0.5)), "mse")
    converted.fit(tf.constant([new] * 2), np.ones((2, 2, 2)), verbose=0)
    assert table.contains(new).numpy().all()
    kept = de.from_keras(model)
    np.testing.assert_array_equal(kept.predict(data, verbose=0), expected)


@pytest.mark.parametrize("strings", [False, True])
def test_states_of_removed_lookups(strings):
    if strings:
        lookup, data = keras.layers.StringLookup(vocabulary=WORDS), STRINGS[:1]
    else:
        lookup, data = keras.layers.IntegerLookup(vocabulary=[12, 9, 7]), INTEGERS[1:2]
    model = lookup_model(lookup)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    target = np.ones((1, 2, 2), np.float32)
    model.fit(data, target, epochs=3, verbose=0)
    converted = de.from_keras(model, remove_lookups=True)
    losses = [m.fit(data, target, epochs=3, verbose=0).history for m in (converted, model)]
    np.testing.assert_allclose(losses[0]["loss"], losses[1]["loss"], rtol=1e-5)
    np.testing.assert_allclose(
        converted.predict(data, verbose=0), model.predict(data, verbose=0), rtol=1e-5
    )


def test_masks_of_removed_lookups():
    zero = np.array([[0, 0], [1, 2], [3, 4], [5, 6], [7, 8], [9, 9]], np.float32)
    words = keras.layers.StringLookup(vocabulary=WORDS, mask_token="")
    numbers = keras.layers.IntegerLookup(vocabulary=[7, 9], mask_token=0)
    for lookup, data in ((words, STRINGS), (numbers, INTEGERS)):
        model = lookup_model(lookup, mask_zero=True, weights=[zero])
        model = keras.Model(model.inputs, keras.layers.GlobalAveragePooling1D()(model.output))
        data = data if lookup is words else np.minimum(data, 100)
        converted = de.from_keras(model, remove_lookups=True)
        got, expected = (m.predict(data, verbose=0) for m in (converted, model))
        np.testing.assert_array_equal(got, expected)
    model = lookup_model(words, mask_zero=True, weights=[zero + 1])
    with pytest.raises(ValueError, match="index 0 in layer 'ids' is not zero"):
        de.from_keras(model, remove_lookups=True)


def with_two_lookups():
    inputs = [keras.Input([2], dtype="int64") for _ in range(2)]
    embedding = keras.layers.Embedding(6, 2, name="ids")
    found = [keras.layers.IntegerLookup(vocabulary=[i, i + 1])(x) for i, x in enumerate(inputs)]
    return keras.Model(inputs, [embedding(x) for x in found])


def with_an_output_of_indices():
    inputs = keras.Input([2], dtype="int64")
    found = keras.layers.IntegerLookup(vocabulary=[1, 2])(inputs)
    return keras.Model(inputs, [keras.layers.Embedding(6, 2)(found), found])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: lookup_model(keras.layers.Hashing(6)), "is a Hashing.*Leave remove_lookups out"),
        (
            lambda: lookup_model(keras.layers.IntegerLookup(vocabulary=[1, 2], num_oov_indices=3)),
            "num_oov_indices=3",
        ),
        (
            lambda: lookup_model(keras.layers.IntegerLookup(vocabulary=[1]), mask_zero=True),
            "has no mask_token",
        ),
        (with_two_lookups, "ids of several layers"),
        (with_an_output_of_indices, "no StringLookup or IntegerLookup is directly in front"),
        (sequential, "no StringLookup or IntegerLookup is directly in front"),
    ],
)
def test_lookups_that_cannot_be_removed(model, message):
    model = model()
    with pytest.raises(ValueError, match=message):
        de.from_keras(model, remove_lookups=True)
    data = np.array([[1, 2], [3, 4]])
    data = [data, data] if len(model.inputs) == 2 else data if len(model.layers) < 5 else IDS
    expected = keras.tree.flatten(model.predict(data, verbose=0))
    got = keras.tree.flatten(de.from_keras(model).predict(data, verbose=0))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(ROWS, DIM)

    def call(self, ids):
        return self.embedding(ids)


def test_models_that_cannot_be_converted():
    model = Subclassed()
    model(IDS)
    with pytest.raises(ValueError, match=r"is a Subclassed: only .*weights=\[keras_layer.get"):
        de.from_keras(model)
    with pytest.raises(ValueError, match=r"is a Subclassed: only .*tf_dynemb.export"):
        de.to_keras(model)
    with pytest.raises(TypeError, match=r"must be a keras.Model, got 3"):
        de.from_keras(3)
    dense = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"has no keras.layers.Embedding"):
        de.from_keras(dense)
    with pytest.raises(ValueError, match=r"has no tf_dynemb.layers.Embedding"):
        de.to_keras(dense)
    with pytest.raises(ValueError, match="Layer 'ids' has a table already"):
        de.from_keras(de.from_keras(sequential()))


def test_embeddings_that_stay():
    layers = [
        keras.layers.Embedding(ROWS, DIM, name="ids"),
        keras.layers.TimeDistributed(keras.layers.Embedding(ROWS, DIM), name="wrapped"),
        keras.layers.Embedding(ROWS, DIM, name="lora", lora_rank=2),
    ]
    inputs = keras.Input([3, 1], dtype="int64")
    model = keras.Model(inputs, [layer(inputs) for layer in layers])
    converted, said = converted_with_warnings(model)
    texts = " ".join(said)
    assert "'lora' has LoRA and stays" in texts
    assert "'wrapped', a TimeDistributed, stay" in texts
    for got, expected in zip(converted(IDS[..., None]), model(IDS[..., None]), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_moments_that_start_anew():
    model = sequential()
    model.compile(keras.optimizers.Nadam(0.01), "mse")
    fit(model, 0)
    converted, said = converted_with_warnings(model)
    texts = " ".join(said)
    assert "Nadam moves all rows in each step in Keras" in texts
    assert "states of Nadam for the rows of ids are reset" in texts
    dense, converted_momentums = model.optimizer._momentums[1:], converted.optimizer.core._momentums
    for momentum, converted_momentum in zip(dense, converted_momentums, strict=True):
        np.testing.assert_array_equal(momentum, converted_momentum)
    fit(converted, 1)


def test_what_weight_decay_excludes():
    for by_name in (False, True):
        model = sequential()
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        if by_name:
            optimizer.exclude_from_weight_decay(var_names=["ids", "bias"])
        else:
            optimizer.exclude_from_weight_decay(var_list=[model.layers[0].embeddings])
        model.compile(optimizer, "mse")
        fit(model, 0)
        converted = de.from_keras(model)
        back = de.to_keras(converted)
        losses = [fit(one, 1) for one in (converted, back, model)]
        np.testing.assert_allclose(losses[0], losses[2], rtol=1e-5)
        np.testing.assert_array_equal(losses[1], losses[2])


def table_model(keys, **options):
    layer = de.layers.Embedding(DIM, name="ids", **options)
    model = keras.Sequential([keras.Input([None], dtype="int64"), layer])
    layer.table.upsert(keys, DATA.normal(size=(len(keys), DIM)).astype(np.float32))
    return model


@pytest.mark.parametrize(
    ("keys", "unknown", "options", "count"),
    [
        ([3, 5, 1], [0, 2, 4], {}, 6),
        ([3, 5, 1], [0, 2, 4], {"default_vector": 0.5}, 6),
        ([3, 5, 1], [0, 4], {"mask_zero": True}, 6),
        ([3, 5, 1], [0, 4], {"padding_id": 0}, 6),
        ([-1, 5, 2**60], [0, -7], {"default_vector": 0.5}, 4),
        ([-1, 5, 2**60], [0, -7], {"initializer": "ones"}, 4),
        ([-1, 5, 2**60, 0], [-7], {"mask_zero": True, "default_vector": 0.5}, 5),
        ([-2, 5, 2**60], [0, -7], {"mask_zero": True, "default_vector": 0.5}, 5),
        ([3, 5, 1], [7, 99, -3], {"padding_id": 7, "default_vector": 0.5}, 5),
        ([], [7, 99], {"padding_id": 7, "default_vector": 0.5}, 3),
        ([], [0], {}, 1),
        ([2000], [0, 2], {"default_vector": 0.0}, 2),
    ],
)
def test_tables_become_matrices(keys, unknown, options, count):
    model = table_model(keys, **options)
    converted = de.to_keras(model)
    ids = np.array([[*keys, *unknown]])
    np.testing.assert_array_equal(converted.predict(ids, verbose=0), model.predict(ids, verbose=0))
    layer = converted.get_layer("ids")
    assert type(layer) is keras.layers.Embedding
    assert layer.input_dim == count
    got, expected = converted(ids), model(ids)
    mask, got_mask = getattr(expected, "_keras_mask", None), getattr(got, "_keras_mask", None)
    assert (mask is None) == (got_mask is None)
    if mask is not None:
        np.testing.assert_array_equal(got_mask, mask)


def test_lookups_of_functional_models_and_their_states():
    inputs = keras.Input([2], dtype="int64")
    outputs = keras.layers.Flatten()(de.layers.Embedding(DIM, name="ids")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    model.compile(de.OptimizerWrapper(keras.optimizers.Adam(0.1), catch_up=True), "mse")
    ids = np.array([[2**60, -5], [3, 2**50]])
    model.fit(ids, np.ones((2, 1)), epochs=3, verbose=0)
    back = de.to_keras(model)
    assert [layer.name for layer in back.layers][1:3] == ["ids_lookup", "ids"]
    losses = [
        m.fit(ids, np.ones((2, 1)), epochs=3, verbose=0).history["loss"] for m in (back, model)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    np.testing.assert_allclose(back(ids), model(ids), rtol=1e-5)


@pytest.mark.parametrize(
    ("layer", "dtype", "message"),
    [
        (de.layers.Embedding(2, combiner="sum"), "int64", "combiner='sum'"),
        (de.layers.EmbeddingBag(2, "sum"), "int64", "a EmbeddingBag, has no counterpart"),
        (de.layers.Embedding(2, hash_strings=True), "string", r"table.peek\(words\)"),
        (de.layers.Embedding(2, mask_zero=True, padding_id=3), "int64", "masks two ids"),
    ],
)
def test_tables_that_have_no_counterpart(layer, dtype, message):
    model = keras.Sequential([keras.Input([3], dtype=dtype), layer])
    with pytest.raises(ValueError, match=message):
        de.to_keras(model)


def test_saved_and_loaded_models(tmp_path):
    model = sequential()
    model.compile("adam", "mse")
    fit(model, 0)
    model.save(tmp_path / "keras.keras")
    converted = de.from_keras(keras.models.load_model(tmp_path / "keras.keras"))
    converted.save(tmp_path / "tables.keras")
    loaded = keras.models.load_model(tmp_path / "tables.keras")
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    np.testing.assert_allclose(fit(loaded, 1), fit(model, 1), rtol=1e-5)
