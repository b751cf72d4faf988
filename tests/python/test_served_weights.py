"""The dense weights of exported models, which follow the snapshots together with the rows."""

import contextlib
import threading
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from online_trainer import PROBE, count_of, predictions, trainer
from served_weights_helpers import IDS, apply, change, dense_model, export, same

import tf_dynemb as de


@pytest.mark.slow
def test_each_answer_is_the_prediction_of_its_watermark(tmp_path, path_or_s3):
    """A request has the rows and the weights of one snapshot, while others are published."""
    answers, stop = [[], []], threading.Event()
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(trainer(tmp_path, path_or_s3))
        loaded = tf.saved_model.load(tmp_path / "model")
        inputs = {name: tf.constant(ids) for name, ids in PROBE.items()}

        @tf.function
        def serve():
            return loaded.serve(inputs), loaded.watermark()

        def ask(given):
            while not stop.is_set():
                scores, state = serve()
                given.append((state["id"].numpy().decode(), scores.numpy().tobytes()))
                time.sleep(0.001)  # the trainer has two cores, too

        threads = [threading.Thread(target=ask, args=(given,)) for given in answers]
        for thread in threads:
            thread.start()
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(stop.set)
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(300)
        expected = predictions(tmp_path)
        assert len(expected) == count_of(path_or_s3) + 1
        last, end = list(expected)[-1], time.monotonic() + 20
        while any(given[-1][0] != last for given in answers):
            assert time.monotonic() < end, loaded.watermark()["follow_error"].numpy().decode()
            time.sleep(0.01)
    for given in answers:
        assert [each for each in given if expected[each[0]] != each[1]] == []
        assert len({id_ for id_, _ in given}) > count_of(path_or_s3) / 10


def test_snapshots_without_weights_leave_them(tmp_path):
    model = dense_model()
    change(model, 1)
    loaded, chain = export(model, tmp_path)
    kernel = model.get_layer("out").kernel
    before = kernel.numpy()
    kernel.assign(before * 2)
    tables = de.named_tables(model)
    (table,) = tables.values()
    table.upsert([3], [[9.0] * 4])
    de.incremental_dump(chain, tables)
    assert apply(loaded, chain) == 1
    kernel.assign(before)
    assert same(loaded.serve, model)
    de.dump(chain, tables)
    assert apply(loaded, chain) == 1
    assert same(loaded.serve, model)
    kernel.assign(before * 2)
    de.incremental_dump(chain, model)
    assert apply(loaded, chain) == 1
    assert same(loaded.serve, model)


def test_a_base_that_replaces_the_state(tmp_path):
    model = dense_model()
    loaded, chain = export(model, tmp_path)
    for seed in (1, 2):
        change(model, seed)
        de.dump(chain, model)
        change(model, seed + 10)
        de.incremental_dump(chain, model)
        assert apply(loaded, chain) == 2
        assert same(loaded.serve, model)


OTHERS = {
    "a shape": ({"width": 9}, r"'hidden/bias' is F32 \[9\] instead of F32 \[8\]"),
    "a name": ({"hidden": "other"}, "'hidden/bias' is missing|'other/bias' is new"),
    "a new layer": ({"layers": 2}, "'hidden1/bias' is new"),
    "a layer less": ({"layers": 0}, "'hidden/bias' is missing|'out/kernel' is"),
}


@pytest.mark.parametrize(("options", "message"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("is_base", [True, False])
def test_a_model_of_another_structure(tmp_path, options, message, is_base):
    model = dense_model()
    change(model)
    loaded, chain = export(model, tmp_path, follow=tmp_path / "chain", follow_seconds=0.01)
    other = dense_model(**options)
    de.load(chain, other, dense=None)
    change(other, 3)
    (de.dump if is_base else de.incremental_dump)(chain, other)
    with pytest.raises(tf.errors.FailedPreconditionError, match=message):
        apply(loaded, chain)
    end = time.monotonic() + 20
    while not (error := loaded.watermark()["follow_error"].numpy().decode()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "has other dense weights than the model that is served" in error
    assert error.endswith("Export the model again")
    assert same(loaded.serve, model)
    # Exported again, it follows.
    de.export_saved_model(other, tmp_path / "model", "link", chain)
    assert same(tf.saved_model.load(tmp_path / "model").serve, other)


def test_weights_that_stay(tmp_path):
    model = dense_model()
    loaded, chain = export(model, tmp_path, dense=None)
    frozen = [weight.numpy() for weight in de.filter_variables(model.weights)[1]]
    change(model)
    de.incremental_dump(chain, model)
    assert apply(loaded, chain) == 1
    assert not same(loaded.serve, model)
    for weight, value in zip(de.filter_variables(model.weights)[1], frozen, strict=True):
        weight.assign(value)
    assert same(loaded.serve, model)


def test_a_chain_without_weights(tmp_path):
    model = dense_model()
    tables = de.named_tables(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, _ = export(model, tmp_path, dumped=tables)
    assert same(loaded.serve, model)
    with pytest.warns(UserWarning, match=r"chain has no dense weights, only tables\. To silence"):
        de.export_saved_model(
            model, tmp_path / "model", "link", tmp_path / "chain", follow=tmp_path / "chain"
        )


def towers():
    """Returns a whole model, and a model of one of its towers."""
    user, item = (keras.Input((1,), dtype="int64", name=name) for name in ("user", "item"))
    vectors = []
    for name, ids in (("user", user), ("item", item)):
        vector = keras.layers.Flatten()(de.layers.Embedding(4, name=f"{name}_table")(ids))
        vectors.append(keras.layers.Dense(3)(vector))
    whole = keras.Model([user, item], keras.layers.Dot(1)(vectors))
    return whole, keras.Model(item, vectors[1])


def test_a_part_of_the_model_that_is_dumped(tmp_path):
    whole, tower = towers()
    change(whole)
    chain, model = tmp_path / "chain", tmp_path / "model"
    de.dump(chain, whole)
    with pytest.raises(ValueError, match="part of what is dumped, pass that as part_of"):
        de.export_saved_model(tower, model, follow=chain)
    assert not model.exists()
    with pytest.warns(UserWarning, match="part of what is dumped, pass that as part_of"):
        de.export_saved_model(tower, model, "link", chain)
    loaded = tf.saved_model.load(model)
    assert same(loaded.serve, tower)
    polls = {"follow": chain, "follow_seconds": 1e6}  # apply comes first
    for seed, options in enumerate((polls, {"tables": "link", "dump": chain}), 3):
        de.export_saved_model(tower, model, part_of=whole, **options)
        loaded = tf.saved_model.load(model)
        assert same(loaded.serve, tower)
        change(whole, seed)
        de.incremental_dump(chain, whole)
        assert apply(loaded, chain) >= 1
        assert same(loaded.serve, tower)


@pytest.mark.parametrize("form", [list, dict])
def test_a_part_of_several_models_that_are_dumped(tmp_path, form):
    models = [dense_model(3), dense_model(5, table="other")]
    dumped = models if form is list else dict(zip("ab", models, strict=True))
    chain = tmp_path / "chain"
    de.dump(chain, dumped)
    de.export_saved_model(models[1], tmp_path / "model", "link", chain, part_of=dumped)
    loaded = tf.saved_model.load(tmp_path / "model")
    assert same(loaded.serve, models[1])
    for model in models:
        change(model)
    de.incremental_dump(chain, dumped)
    assert apply(loaded, chain) == 1
    assert same(loaded.serve, models[1])


def test_wrong_arguments(tmp_path):
    whole, tower = towers()
    with pytest.raises(ValueError, match=r"part_of must be the dumped model.* the weight '"):
        de.export_saved_model(tower, tmp_path / "model", part_of=towers()[0])
    module = tf.Module()
    module.table = de.DynamicVariable(2)
    with pytest.raises(ValueError, match="part_of is for a Keras model"):
        de.export_saved_model(module, tmp_path / "module", part_of=whole)
    with pytest.raises(ValueError, match='dense must be "weights" or None'):
        de.export_saved_model(tower, tmp_path / "model", dense="all")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "bool", "uint32"])
def test_dtypes_and_shapes(tmp_path, dtype):
    """Also of scalars, of empty weights, and of weights whose size is not aligned."""
    shapes = [(), (0,), (3, 0, 2), (5,), (2, 3, 7), (65,)]

    class Returning(keras.layers.Layer):
        def build(self, _):
            self.all = [
                self.add_weight(shape=shape, dtype=dtype, initializer="zeros", autocast=False)
                for shape in shapes
            ]

        def call(self, inputs):
            flat = [tf.reshape(tf.cast(each, "float32"), [-1]) for each in self.all]
            return tf.concat([tf.reshape(inputs, [-1]), *flat], 0)

    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name="table")(ids))
    model = keras.Model(ids, Returning()(vectors))
    loaded, chain = export(model, tmp_path)
    rng = np.random.default_rng(2)
    for weight in de.filter_variables(model.weights)[1]:
        weight.assign(tf.cast(rng.integers(0, 2, weight.shape), weight.dtype))
    de.incremental_dump(chain, model)
    assert apply(loaded, chain) == 1
    assert same(loaded.serve, model)


def test_a_loaded_model_is_saved_again(tmp_path):
    model = dense_model()
    change(model)
    loaded, _ = export(model, tmp_path)
    tf.saved_model.save(loaded, tmp_path / "again", signatures=dict(loaded.signatures))
    again = tf.saved_model.load(tmp_path / "again")
    assert same(again.serve, model)


def test_an_operator_does_not_change_the_weights(tmp_path):
    """TensorFlow may reuse the memory of an input that nothing else needs."""
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name="table")(ids))

    class Doubling(keras.layers.Layer):
        def build(self, _):
            self.offset = self.add_weight(shape=(1 << 16,), initializer="ones")

        def call(self, inputs):
            return tf.reduce_sum(inputs) + tf.exp(-tf.abs(self.offset * 3.0))[:3]

    model = keras.Model(ids, Doubling()(vectors))
    loaded, _ = export(model, tmp_path)
    answers = {loaded.serve(tf.constant(IDS)).numpy().tobytes() for _ in range(5)}
    assert len(answers) == 1
    assert same(loaded.serve, model)


def test_a_descriptor_whose_dump_has_lost_its_weights(tmp_path):
    model = dense_model()
    chain = tmp_path / "chain"
    de.dump(chain, model)
    de.export_saved_model(model, tmp_path / "model", "external", chain)
    de.dump(chain, de.named_tables(model))
    with pytest.raises(tf.errors.FailedPreconditionError, match="chain has no dense weights"):
        tf.saved_model.load(tmp_path / "model")


def test_a_reader_has_the_weights_of_an_exported_model(tmp_path):
    model = dense_model()
    de.export_saved_model(model, tmp_path)
    dense = de.serving.Reader(tmp_path / "assets.extra/tf_dynemb").dense()
    assert np.array_equal(dense["out/kernel"], model.get_layer("out").kernel)
