"""Dense weights in dumps and deltas: names, files, and what is refused."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import warnings

import keras
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import table_reader
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

import tf_dynemb as de
from tf_dynemb import storage
from tf_dynemb.chains.merge import merge, rollback
from tf_dynemb.cli import main as cli
from tf_dynemb.dense.names import dense_variables
from tf_dynemb.format import safetensors as own

IDS = np.arange(24).reshape(8, 3)


def functional(hidden=4, name=None, extra_layer=False, dtype=None):
    inputs = keras.Input((3,), dtype="int64")
    x = keras.layers.Flatten()(de.layers.Embedding(2, name="ids")(inputs))
    x = keras.layers.Dense(hidden, name=name, dtype=dtype)(x)
    x = keras.layers.BatchNormalization()(x)
    if extra_layer:
        x = keras.layers.Dense(hidden)(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(keras.layers.Dropout(0.5)(x)))


def compiled(optimizer="adam", **options):
    model = functional(**options)
    model.compile(de.OptimizerWrapper(optimizer), "mse")
    return model


def train(model, times=1):
    model.fit(IDS, np.ones([8, 1]), epochs=times, verbose=0, batch_size=4, shuffle=False)
    return model


def values(model):
    """Returns the values of all dense variables."""
    _, dense = de.filter_variables(model.variables)
    if getattr(model, "optimizer", None) is not None:
        dense += de.filter_variables(model.optimizer.variables)[1]
    return [np.array(each) for each in dense]


def num_rows(table):
    return len(table_reader.rows_of(table).keys)


def same(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


# Names.


def names(model):
    weights, training = dense_variables(model)
    return list(weights), list(training)


def test_names_do_not_depend_on_other_models():
    expected = (
        ["layers/3/kernel", "layers/3/bias"]
        + [f"layers/4/{each}" for each in ("gamma", "beta", "moving_mean", "moving_variance")]
        + ["out/kernel", "out/bias"],
        ["seeds/layers/5/seed_generator"],
    )
    assert names(functional()) == expected
    assert names(functional()) == expected
    assert names(functional(name="tower"))[0][0] == "tower/kernel"


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = de.layers.Embedding(2)
        self.tower = [keras.layers.Dense(2), keras.layers.Dense(2)]
        self.heads = {"click": keras.layers.Dense(1), "buy": keras.layers.Dense(1)}
        self._private = keras.layers.Dense(2, use_bias=False)
        self.scale = self.add_weight(shape=(), name="scale")
        self.anonymous = self.add_weight(shape=(2,))

    def call(self, ids):
        x = self._private(keras.ops.mean(self.table(ids), 1))
        for layer in self.tower:
            x = layer(x)
        return (self.heads["click"](x) + self.heads["buy"](x)) * self.scale + self.anonymous[0]


def test_names_of_attributes():
    model = Subclassed()
    model(IDS)
    expected = {
        "scale",
        "weights/1",
        "_private/kernel",
        *(f"{layer}/{weight}" for layer in ("tower/0", "tower/1") for weight in ("kernel", "bias")),
        *(f"heads/{head}/{weight}" for head in ("click", "buy") for weight in ("kernel", "bias")),
    }
    assert set(names(model)[0]) == expected


def test_every_variable_of_keras_has_a_name():
    inputs = keras.Input((5, 4))
    inner = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.1)])
    shared = keras.layers.Dense(4)
    x = keras.layers.MultiHeadAttention(2, 2, dropout=0.1)(inputs, inputs)
    x = keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True, dropout=0.1))(x)
    x = keras.layers.TimeDistributed(keras.layers.Dense(4))(x)
    model = keras.Model(inputs, shared(inner(shared(x))))
    weights, training = dense_variables(model)
    found = {id(each) for each in [*weights.values(), *training.values()]}
    assert found == {id(each) for each in model.variables}
    assert not [name for name in weights if name.startswith("variables/")]
    assert len(training) == 4


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self._table = de.DynamicVariable(2, name="ids")
        self.layers = [keras.layers.Dense(2), {"w": tf.Variable([1.0, 2.0])}]
        self.random = tf.random.Generator.from_seed(3)
        self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.layers[0].build([None, 2])


def test_a_module(tmp_path):
    module = Module()
    weights, training = names(module)
    assert weights == ["layers/0/kernel", "layers/0/bias", "layers/1/w", "steps"]
    assert training == ["seeds/random"]
    module._table.lookup([1, 2])
    module.random.normal([3])
    module.steps.assign(7)
    de.dump(tmp_path, module)
    other = Module()
    de.load(tmp_path, other)
    assert other.steps.numpy() == 7
    assert num_rows(other._table) == 2
    assert np.array_equal(other.random.normal([3]), module.random.normal([3]))
    assert np.array_equal(other.layers[0].kernel, module.layers[0].kernel)


def test_a_dict_of_variables(tmp_path):
    def make(value):
        return {
            "table": de.DynamicVariable(2),
            "w": tf.Variable([value, value]),
            "k": keras.Variable([[value]], name="anything"),
            "b": tf.Variable([value], dtype=tf.bfloat16),
        }

    one, two = make(1.5), make(0.0)
    one["table"].lookup([1, 2, 3])
    watermark = de.dump(tmp_path, one, extra={"hour": 3, "shards": [1, {"a": None}]})
    assert watermark.extra == {"hour": 3, "shards": [1, {"a": None}]}
    loaded = de.load(tmp_path, two)
    assert loaded == watermark
    assert loaded.extra == watermark.extra
    assert num_rows(two["table"]) == 3
    assert np.array_equal(two["w"], [1.5, 1.5])
    assert np.array_equal(two["k"], [[1.5]])
    assert np.array_equal(tf.cast(two["b"], tf.float32), [1.5])


# Files.

ARRAYS = st.dictionaries(
    st.text(max_size=8),
    st.sampled_from([name for name in own.DTYPES if name != "bfloat16"]).flatmap(
        lambda dtype: st.tuples(
            st.just(dtype), st_numpy.arrays(dtype, st_numpy.array_shapes(min_dims=0, min_side=0))
        )
    ),
    max_size=5,
)


@given(ARRAYS)
def test_files_are_those_of_the_library(tmp_path_factory, arrays):
    arrays.pop("__metadata__", None)
    folder = tmp_path_factory.mktemp("files")
    size = own.write(folder / "own", {name: own.Array(*each) for name, each in arrays.items()})
    assert (folder / "own").stat().st_size == size
    copies = {name: np.array(value, order="C") for name, (_, value) in arrays.items()}
    safetensors.numpy.save_file(copies, folder / "library")
    library = safetensors.numpy.load_file(folder / "own")
    read = own.read(folder / "own", size)
    other = own.read(folder / "library", (folder / "library").stat().st_size)
    assert library.keys() == read.keys() == other.keys() == arrays.keys()
    for name, (dtype, value) in arrays.items():
        for found in (library[name], read[name].values, other[name].values):
            assert found.dtype == value.dtype
            assert found.shape == value.shape
            assert found.tobytes() == value.tobytes()
        assert read[name].dtype == dtype


def test_bfloat16_is_that_of_the_library(tmp_path):
    value = np.array([1.5, -3.0, 1e30], ml_dtypes.bfloat16)
    own.write(tmp_path / "file", {"b": own.Array("bfloat16", value.view(np.uint16))})
    found = safetensors.numpy.load_file(tmp_path / "file")["b"]
    assert found.dtype == ml_dtypes.bfloat16
    assert np.array_equal(found, value)


@given(st.data())
def test_damaged_files_are_data_loss(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("files") / "file"
    size = own.write(path, {"a": own.Array("float32", np.ones([3], np.float32))})
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, size - 13))  # in the header
    content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(storage.DataLossError):
        for array in own.read(path, size).values():
            array.values.sum()


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[8]}}',
        '{"a":{"dtype":"F32","shape":[-1,2],"data_offsets":[8,0]}}',
        '{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}',
        '{"a":[]}',
        '{"a":{"dtype":"F32","shape":[0,140737488355328,140737488355328],"data_offsets":[0,0]}}',
        '{"a":{"dtype":"U8","shape":[' + "1," * 70 + '12],"data_offsets":[0,12]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"a":{"dtype":"F32","shape":[3],'
        '"data_offsets":[0,12]}}',
        '{"\\ud800":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}',
        "[]",
        "{",
        "[" * 5000,
    ],
)
def test_wrong_headers(tmp_path, header):
    text = header.encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(storage.DataLossError, match="file"):
        own.read(tmp_path / "file", 20 + len(text))


def test_a_damaged_file_changes_nothing(tmp_path):
    model = train(compiled())
    de.dump(tmp_path, model, model.optimizer)
    for part in ("weights", "training"):
        (file,) = tmp_path.glob(f"*/dense.r0.{part}.safetensors")
        whole = file.read_bytes()
        for content in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1], None):
            file.unlink()
            if content is not None:
                file.write_bytes(content)
            other = train(compiled())
            before, rows = values(other), num_rows(de.named_tables(other)["ids/embeddings"])
            with pytest.raises(storage.DataLossError, match=re.escape(str(file))):
                de.load(tmp_path, other, other.optimizer)
            assert same(values(other), before)
            assert num_rows(de.named_tables(other)["ids/embeddings"]) == rows
            assert cli(["verify", str(tmp_path)]) == 1
        file.write_bytes(whole)


# What is written, and what is read.


def test_a_training_goes_on(tmp_path):
    model = train(compiled(), 2)
    de.dump(tmp_path, model, model.optimizer)
    other = compiled()
    de.load(tmp_path, other, other.optimizer)
    assert same(values(other), values(model))
    assert same(values(train(other)), values(train(model)))


def test_a_chain(tmp_path):
    model = train(compiled())
    states, watermarks = [], []
    for number in range(4):
        function = de.incremental_dump if number else de.dump
        watermarks.append(
            function(tmp_path, model, optimizer=model.optimizer, extra={"number": number})
        )
        states.append(values(model))
        train(model)
    for state, watermark in zip(states, watermarks, strict=True):
        other = compiled()
        loaded = de.load(tmp_path, other, other.optimizer, until=watermark)
        assert loaded.extra == watermark.extra
        assert same(values(other), state)


def test_apply_delta(tmp_path):
    model, follower = train(compiled()), compiled()
    de.dump(tmp_path, model, model.optimizer)
    de.load(tmp_path, follower, follower.optimizer)
    for number in range(3):
        train(model)
        de.incremental_dump(tmp_path, model, optimizer=model.optimizer)
        if number == 2:
            table = de.named_tables(model)["ids/embeddings"]
            table.upsert([1], [[1.0, 2.0]])
            de.incremental_dump(tmp_path, model, dense=None)
        de.apply_delta(tmp_path, follower, follower.optimizer)
        if number < 2:
            assert same(values(follower), values(model))
    assert same(follower.get_layer("out").get_weights(), model.get_layer("out").get_weights())


def test_a_delta_without_a_change_is_not_written(tmp_path):
    model = train(compiled())
    first = de.dump(tmp_path, model, model.optimizer)
    assert de.incremental_dump(tmp_path, model, optimizer=model.optimizer) == first
    bias = model.get_layer("out").bias
    bias.assign(bias + 1)
    second = de.incremental_dump(tmp_path, model, optimizer=model.optimizer)
    assert second != first
    third = de.incremental_dump(tmp_path, model, optimizer=model.optimizer, extra={"a": 1})
    assert third != second
    assert de.incremental_dump(tmp_path, model, optimizer=model.optimizer, extra={"a": 1}) == third


def test_weights_only(tmp_path):
    model = train(compiled())
    de.dump(tmp_path, model, model.optimizer, dense="weights")
    assert not list(tmp_path.glob("*/dense.*.training.*"))
    other = train(compiled())
    with pytest.raises(ValueError, match='was written with dense="weights"'):
        de.load(tmp_path, other, other.optimizer)
    de.load(tmp_path, other, other.optimizer, dense="weights")
    assert same(other.get_layer("out").get_weights(), model.get_layer("out").get_weights())


def test_without_dense_weights(tmp_path):
    model = train(compiled())
    de.dump(tmp_path, model, model.optimizer, dense=None)
    assert not list(tmp_path.glob("*/dense.*"))
    other = train(compiled())
    before = values(other)
    with pytest.raises(ValueError, match=r"have no dense weights.*Pass dense=None"):
        de.load(tmp_path, other, other.optimizer)
    assert same(values(other), before)
    de.load(tmp_path, other, other.optimizer, dense=None)


def test_tables_of_a_chain_with_weights(tmp_path):
    model = train(compiled())
    de.dump(tmp_path, model, model.optimizer)
    table = de.DynamicVariable(2, name="any")
    de.load(tmp_path, {"ids/embeddings": table})
    assert num_rows(table) == num_rows(de.named_tables(model)["ids/embeddings"])


def test_older_weights_are_named(tmp_path):
    model = train(compiled())
    de.dump(tmp_path, model, model.optimizer)
    expected = model.get_layer("out").get_weights()
    train(model)
    tables = de.named_tables(model)
    de.incremental_dump(tmp_path, tables, optimizer=model.optimizer)
    other = compiled()
    with pytest.warns(UserWarning, match="older than the rows"):
        de.load(tmp_path, other, dense="weights")
    assert same(other.get_layer("out").get_weights(), expected)


def test_models_of_another_structure_are_refused(tmp_path):
    model = train(compiled(name="tower"))
    de.dump(tmp_path, model, model.optimizer)
    wrong = {
        r"'tower/kernel' has float32 \[6, 4\] in .*, but float32 \[6, 5\]": {
            "hidden": 5,
            "name": "tower",
        },
        r"it has 'tower/bias', 'tower/kernel', and the model has 'layers/3": {},
        r"it has fewer dense variables, and the model has 'layers/5": {
            "name": "tower",
            "extra_layer": True,
        },
        r"'tower/kernel' has float32 .* Pass cast=True": {"name": "tower", "dtype": "float64"},
    }
    for message, options in wrong.items():
        other = compiled(**options)
        before = values(other)
        with pytest.raises(ValueError, match=message):
            de.load(tmp_path, other, dense="weights")
        assert same(values(other), before)
        assert num_rows(de.named_tables(other)["ids/embeddings"]) == 0
    de.load(tmp_path, other, dense="weights", cast=True)
    assert np.array_equal(
        other.get_layer("tower").kernel, np.float64(model.get_layer("tower").kernel)
    )


def test_another_optimizer_is_refused(tmp_path):
    model = train(compiled("adam"))
    de.dump(tmp_path, model, model.optimizer)
    other = compiled("adagrad")
    with pytest.raises(ValueError, match=r"with the optimizer Adam.* no state for Adagrad"):
        de.load(tmp_path, other, other.optimizer)
    other = compiled(keras.optimizers.Adam(amsgrad=True))
    with pytest.raises(ValueError, match="velocity_hat"):
        de.load(tmp_path, other, other.optimizer)
    de.dump(tmp_path / "plain", model)
    with pytest.raises(ValueError, match="was written without an optimizer"):
        de.load(tmp_path / "plain", other, other.optimizer)


@pytest.mark.parametrize("dense", ["everything", True, 1, ""])
def test_wrong_choices(tmp_path, dense):
    for call in (de.dump, de.incremental_dump, de.load, de.apply_delta):
        with pytest.raises(ValueError, match='dense must be "all", "weights" or None'):
            call(tmp_path, compiled(), dense=dense)


@pytest.mark.parametrize("extra", [3, [1], {1: 2}, {"a": (1, 2)}, {"a": float("nan")}, {"a": {1}}])
def test_extra_that_json_would_change(tmp_path, extra):
    with pytest.raises(TypeError, match="extra must be a dict"):
        de.dump(tmp_path, compiled(), extra=extra)
    assert not tmp_path.exists() or not list(tmp_path.glob("0*"))


def test_texts_cannot_be_dumped(tmp_path):
    variables = {"table": de.DynamicVariable(2), "text": tf.Variable(["a"])}
    with pytest.raises(TypeError, match="'text' has the dtype"):
        de.dump(tmp_path, variables)


# Other readers and writers of chains.


def test_merge_and_rollback(tmp_path):
    model = train(compiled())
    first = de.dump(tmp_path, model, model.optimizer, extra={"n": 0})
    states = [values(model)]
    for number in (1, 2):
        states.append(values(train(model)))
        de.incremental_dump(tmp_path, model, optimizer=model.optimizer, extra={"n": number})
    merge(tmp_path, keep=9)
    other = compiled()
    assert de.load(tmp_path, other, other.optimizer).extra == {"n": 2}
    assert same(values(other), states[2])
    rollback(tmp_path, first.id)
    assert de.load(tmp_path, other, other.optimizer).extra == {"n": 0}
    assert same(values(other), states[0])


def test_a_reader(tmp_path):
    model = train(compiled(dtype="bfloat16"))
    de.dump(tmp_path, model, model.optimizer, extra={"n": 0})
    reader = de.serving.Reader(tmp_path)
    before = reader.dense()
    assert reader.extra == {"n": 0}
    names, _ = dense_variables(model)
    expected = {name: np.array(tf.cast(each, tf.float32)) for name, each in names.items()}
    assert before.keys() == names.keys()
    assert all(np.array_equal(before[name], expected[name]) for name in names)
    assert not any(array.flags.writeable for array in before.values())
    train(model)
    de.incremental_dump(tmp_path, model, optimizer=model.optimizer)
    assert reader.follow() == 1
    assert np.array_equal(reader.dense()["out/kernel"], model.get_layer("out").kernel)
    # What was read before stays as it was, also when its file is removed.
    merge(tmp_path)
    assert np.array_equal(before["out/kernel"], expected["out/kernel"])
    plain = tmp_path / "plain"
    de.dump(plain, de.named_tables(model))
    with pytest.raises(KeyError, match="has no dense weights"):
        de.serving.Reader(plain).dense()


def test_a_base_without_weights_leaves_those_of_a_reader(tmp_path):
    variables = {"table": de.DynamicVariable(2), "w": tf.Variable([1.0])}
    de.dump(tmp_path, variables)
    reader = de.serving.Reader(tmp_path)
    variables["table"].lookup([1])
    de.dump(tmp_path, {"table": variables["table"]})
    assert reader.follow() == 1
    assert reader.size() == 1
    assert reader.dense()["w"].tolist() == [1.0]


def test_a_reader_refuses_the_weights_of_another_model(tmp_path):
    variables = {"table": de.DynamicVariable(2), "w": tf.Variable([1.0])}
    de.dump(tmp_path, variables)
    reader = de.serving.Reader(tmp_path)
    variables["table"].lookup([1])
    de.incremental_dump(tmp_path, {**variables, "more": tf.Variable(1.0)})
    with pytest.raises(storage.DataLossError, match="have other names, dtypes or shapes"):
        reader.follow()
    assert list(reader.dense()) == ["w"]
    assert reader.size() == 0


def test_inspect(tmp_path, capsys):
    model = train(compiled())
    de.dump(tmp_path, model, model.optimizer, extra={"n": 0})
    assert cli(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "dense variables: 8 for weights" in shown
    assert 'extra: {"n": 0}' in shown
    assert cli(["inspect", "--json", str(tmp_path)]) == 0
    (snapshot,) = json.loads(capsys.readouterr().out)["snapshots"]
    assert snapshot["dense"]["weights"]["out/kernel"] == ["float32", [4, 1]]
    (folder,) = tmp_path.glob("0*")
    sizes = [file.stat().st_size for file in pathlib.Path(folder).iterdir()]
    assert snapshot["bytes"] == sum(sizes) - (folder / "MANIFEST.json").stat().st_size


def test_an_optimizer_is_built_for_a_first_dump(tmp_path):
    model, other = compiled(), compiled()
    de.dump(tmp_path, model, model.optimizer)
    de.load(tmp_path, other, other.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(other)
    keras.utils.set_random_seed(1)
    assert same(values(other), values(train(model)))


# What a user of Keras meets.


def test_layers_that_compute_constants_of_their_weights(tmp_path):
    def model(data):
        inputs, features = keras.Input((3,), dtype="int64"), keras.Input((2,))
        norm = keras.layers.Normalization(name="norm")
        norm.adapt(data) if data is not None else norm.build((None, 2))
        x = keras.layers.Flatten()(de.layers.Embedding(2, name="ids")(inputs))
        x = keras.layers.Concatenate()([x, norm(features)])
        made = keras.Model([inputs, features], keras.layers.Dense(1, name="out")(x))
        made.compile(de.OptimizerWrapper("adam"), "mse")
        return made

    data = np.random.default_rng(0).normal(5, 3, (8, 2)).astype(np.float32)
    one, two = model(data), model(None)
    de.dump(tmp_path, one)
    two.predict([IDS, data], verbose=0)  # which traces a function with other constants
    de.load(tmp_path, two)
    expected = one.predict([IDS, data], verbose=0)
    assert np.array_equal(two.predict([IDS, data], verbose=0), expected)


@pytest.mark.parametrize("wrap", [lambda m: [m], lambda m: {"m": m}])
def test_models_in_lists_and_dicts(tmp_path, wrap):
    model, other = train(compiled()), compiled()
    de.dump(tmp_path, wrap(model))
    de.load(tmp_path, wrap(other))
    assert np.array_equal(model.get_layer("out").kernel, other.get_layer("out").kernel)


def test_names_in_lists_and_dicts():
    assert names([functional(), functional()])[0][7] == "0/out/bias"
    assert names([functional(), functional()])[0][15] == "1/out/bias"
    assert names({"user": functional(), "item": functional()})[0][7] == "user/out/bias"


class Counting(keras.layers.Layer):
    """Has what Keras does not list among a layer's variables."""

    def __init__(self):
        super().__init__()
        self.steps = tf.Variable(0.0, trainable=False)
        self.random = tf.random.Generator.from_seed(1)
        self.modules = [Module()]

    def call(self, x):
        return x + self.steps


def test_variables_that_keras_does_not_list(tmp_path):
    def model():
        inputs = keras.Input((3,), dtype="int64")
        x = Counting()(keras.layers.Flatten()(de.layers.Embedding(2, name="table")(inputs)))
        return keras.Model(inputs, keras.layers.Dense(1)(x))

    one, two = model(), model()
    one.layers[-2].steps.assign(7.0)
    one.layers[-2].random.normal([3])
    one.layers[-2].modules[0].steps.assign(5)
    de.dump(tmp_path, one)
    de.load(tmp_path, two)
    assert two.layers[-2].steps.numpy() == 7.0
    assert two.layers[-2].modules[0].steps.numpy() == 5
    assert np.array_equal(two.layers[-2].random.normal([3]), one.layers[-2].random.normal([3]))


def test_gradient_accumulation(tmp_path):
    def optimizer():
        return keras.optimizers.Adam(0.1, gradient_accumulation_steps=3)

    model, other = train(compiled(optimizer()), 3), compiled(optimizer())  # 6 batches
    de.dump(tmp_path, model, model.optimizer)
    de.load(tmp_path, other, other.optimizer)
    assert same(values(other), values(model))
    assert same(values(train(other, 3)), values(train(model, 3)))


def test_variables_that_an_optimizer_does_not_list(tmp_path):
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.1))

    model, other = train(compiled(optimizer()), 3), compiled(optimizer())
    de.dump(tmp_path, model, model.optimizer)
    de.load(tmp_path, other, other.optimizer)
    assert float(other.optimizer.core._u_product) == float(model.optimizer.core._u_product) < 1
    assert same(values(train(other, 3)), values(train(model, 3)))


def test_variables_without_names_in_another_order(tmp_path):
    def make():
        return {
            "table": de.DynamicVariable(1),
            "first": tf.Variable([1.0]),
            "second": tf.Variable([2.0]),
        }

    def step(variables, optimizer):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(variables["table"], [1])
            loss = tf.reduce_sum(rows * variables["first"] + 3 * variables["second"] ** 2)
        order = [variables[name] for name in ("second", "table", "first")]
        optimizer.apply_gradients(zip(tape.gradient(loss, order), order, strict=True))

    one, two = make(), make()
    optimizers = [de.OptimizerWrapper(keras.optimizers.SGD(0.1, momentum=0.9)) for _ in range(2)]
    step(one, optimizers[0])
    de.dump(tmp_path, one, optimizers[0])
    de.load(tmp_path, two, optimizers[1])
    for _ in range(3):
        for variables, optimizer in zip((one, two), optimizers, strict=True):
            step(variables, optimizer)
        assert np.array_equal(one["first"], two["first"])
        assert np.array_equal(one["second"], two["second"])


def test_a_failed_call_does_not_attach_its_optimizer(tmp_path):
    model = train(compiled("adam"))
    other = de.OptimizerWrapper("adagrad")
    with pytest.raises(FileNotFoundError):
        de.load(tmp_path / "nothing", model, other)
    train(model)
    with pytest.raises(ValueError, match=r"table 'ids/embeddings' is trained with 'adam"):
        de.dump(tmp_path, model, other)
    train(model)
    de.dump(tmp_path, model, model.optimizer)
    with pytest.raises(ValueError, match="with the optimizer Adam"):
        de.load(tmp_path, model, other)
    train(model)


def test_an_optimizer_of_some_weights(tmp_path):
    def make():
        model = functional()
        optimizer = de.OptimizerWrapper("adagrad")
        optimizer.build([de.named_tables(model)["ids/embeddings"]])
        return model, optimizer

    de.dump(tmp_path, *make())
    de.load(tmp_path, *make())
    with pytest.raises(ValueError, match="build it with the weights that it trains"):
        de.load(tmp_path, functional(), de.OptimizerWrapper("adagrad"))


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_files_cannot_have(tmp_path, name):
    with pytest.raises(TypeError, match="is a name that dumps cannot have"):
        de.dump(tmp_path, {"table": de.DynamicVariable(2), name: tf.Variable(1.0)})


def test_a_reader_verifies_dense_weights(tmp_path):
    model = compiled()
    de.dump(tmp_path, model)
    (file,) = tmp_path.glob("*/dense.r0.weights.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(storage.DataLossError, match="weights"):
        de.serving.Reader(tmp_path)
