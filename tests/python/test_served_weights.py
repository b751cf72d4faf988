"""The dense weights of exported models, which follow the snapshots together with the rows."""

import contextlib
import json
import threading
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from online_trainer import PROBE, SNAPSHOTS, predictions, trainer

import tf_dynemb as de


@pytest.mark.slow
def test_each_answer_is_the_prediction_of_its_watermark(tmp_path):
    """A request has the rows and the weights of one snapshot, while 200 are published."""
    answers, stop = [[], []], threading.Event()
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(trainer(tmp_path))
        loaded = tf.saved_model.load(tmp_path / "model")
        inputs = {name: tf.constant(ids) for name, ids in PROBE.items()}

        @tf.function
        def serve():
            return loaded.serve(inputs), loaded.watermark()

        def ask(given):
            while not stop.is_set():
                scores, state = serve()
                given.append((state["id"].numpy().decode(), scores.numpy().tobytes()))

        threads = [threading.Thread(target=ask, args=(given,)) for given in answers]
        for thread in threads:
            thread.start()
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(stop.set)
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(120)
        expected = predictions(tmp_path)
        last, end = list(expected)[-1], time.monotonic() + 20
        while any(given[-1][0] != last for given in answers):
            assert time.monotonic() < end, loaded.watermark()["follow_error"].numpy().decode()
            time.sleep(0.01)
    for given in answers:
        assert [each for each in given if expected[each[0]] != each[1]] == []
        assert len({id_ for id_, _ in given}) > SNAPSHOTS / 10


def dense_model(width=8, hidden="hidden", layers=1, table="table"):
    ids = keras.Input((1,), dtype="int64", name="ids")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name=table)(ids))
    for number in range(layers):
        vectors = keras.layers.Dense(width, "tanh", name=f"{hidden}{number or ''}")(vectors)
    return keras.Model(ids, keras.layers.Dense(1, name="out")(vectors))


IDS = np.arange(7)[:, None]


def change(model, seed=1):
    """Gives a model other rows and other weights."""
    rng = np.random.default_rng(seed)
    for table in de.named_tables(model).values():
        table.upsert(np.arange(9), rng.normal(size=[9, table.dimension]))
    for weight in de.filter_variables(model.weights)[1]:
        weight.assign(rng.uniform(0.5, 1.5, weight.shape).astype(weight.dtype))


def same(served, model, ids=IDS):
    """Whether two models give the same bits."""
    found, expected = served(tf.constant(ids)).numpy(), model.predict_on_batch(ids)
    return found.tobytes() == expected.tobytes()


def export(model, folder, **options):
    """Exports a model over a new chain; returns the loaded model and the chain."""
    de.dump(folder / "chain", options.pop("dumped", model))
    de.export_saved_model(model, folder / "model", "link", folder / "chain", **options)
    return tf.saved_model.load(folder / "model"), folder / "chain"


def apply(loaded, path):
    return int(loaded.apply_delta(tf.constant(str(path)))["applied"])


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
    "a shape": ({"width": 9}, r"'hidden/bias' is F32 \[9\], and in the other F32 \[8\]"),
    "a name": ({"hidden": "other"}, "it lacks 'hidden/bias'|it has 'other/bias'"),
    "a new layer": ({"layers": 2}, "it has 'hidden1/bias', and the other has not"),
    "a layer less": ({"layers": 0}, "it lacks 'hidden/bias'|'out/kernel' is"),
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
    assert "of another structure than the one that is served" in error
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


class Reading(keras.layers.Layer):
    """A layer that reads its weight in a tf.function."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

    @tf.function
    def scaled(self, inputs):
        return inputs * self.scale

    def call(self, inputs):
        return self.scaled(inputs)


class Foreign(keras.layers.Layer):
    """A layer with a variable that Keras does not know."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = tf.Variable(2.0, name="foreign")

    def call(self, inputs):
        return inputs * self.inner


class Counting(keras.layers.Layer):
    """A layer that counts its calls in a weight."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs + self.calls


REASONS = {
    Reading: "weight 'reads/scale' is read by a tf.function inside a layer",
    Foreign: "weight 'foreign:0' is not a keras.Variable",
    Counting: "a call of the model changes the weight 'reads/calls'",
}


@pytest.mark.parametrize("layer", REASONS, ids=lambda layer: layer.__name__)
def test_layers_whose_weights_cannot_follow(tmp_path, layer):
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name="table")(ids))
    model = keras.Model(ids, keras.layers.Dense(2, name="out")(layer(name="reads")(vectors)))
    model(IDS)  # traces what is a tf.function
    with pytest.warns(UserWarning, match=REASONS[layer]):
        loaded, chain = export(model, tmp_path)
    before = loaded.serve(tf.constant(IDS)).numpy()
    assert json.loads((tmp_path / "model/assets/tf_dynemb.json").read_text()).get("dense") is None
    model.get_layer("out").kernel.assign(model.get_layer("out").kernel * 2)
    de.incremental_dump(chain, model)
    assert apply(loaded, chain) == 1
    if layer is not Counting:
        assert np.array_equal(loaded.serve(tf.constant(IDS)).numpy(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        de.export_saved_model(model, tmp_path / "again", dense=None)


def test_a_chain_without_weights(tmp_path):
    model = dense_model()
    tables = de.named_tables(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, _ = export(model, tmp_path, dumped=tables)
    assert same(loaded.serve, model)
    with pytest.warns(UserWarning, match=r"chain has no dense weights, only tables\. Pass dense="):
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
    for options in ({"follow": chain}, {"tables": "link", "dump": chain}):
        de.export_saved_model(tower, model, part_of=whole, **options)
        loaded = tf.saved_model.load(model)
        assert same(loaded.serve, tower)
        change(whole, 2 + len(options))
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
    with pytest.raises(ValueError, match=r"part_of must be what is dumped.* the weight '"):
        de.export_saved_model(tower, tmp_path / "model", part_of=towers()[0])
    module = tf.Module()
    module.table = de.DynamicVariable(2)
    with pytest.raises(ValueError, match="part_of is for a Keras model"):
        de.export_saved_model(module, tmp_path / "module", part_of=whole)
    with pytest.raises(ValueError, match='dense must be "weights" or None'):
        de.export_saved_model(tower, tmp_path / "model", dense="all")


@pytest.mark.parametrize("is_functional", [True, False])
def test_a_function_of_a_layer_that_was_traced_for_another_shape(tmp_path, is_functional):
    """It would be traced in the export, with tensors of its graph, and then fail in training."""
    ids = keras.Input((1,), dtype="int64")
    embedding, reads = de.layers.Embedding(4, combiner="sum", name="table"), Reading(name="reads")
    heads = [keras.layers.Dense(2, name=name) for name in ("one", "two")]

    def call(ids):
        vectors = reads(embedding(ids))
        return [head(vectors) for head in heads]

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [embedding, reads, *heads]

        def call(self, ids):
            return call(ids)

    model = keras.Model(ids, call(ids)) if is_functional else Subclassed()
    model(IDS)
    for _ in range(2):
        with pytest.warns(UserWarning, match=REASONS[Reading]):
            de.export_saved_model(model, tmp_path / "model")
    model.compile(de.OptimizerWrapper("adam"), ["mse", "mse"])
    labels = np.zeros([7, 2], np.float32)
    model.fit(IDS, [labels, labels], verbose=0)
    loaded = tf.saved_model.load(tmp_path / "model")
    assert len(loaded.serve(tf.constant(IDS))) == 2
    assert len(model(IDS[:3])) == 2


@pytest.mark.parametrize("kind", [keras.layers.GRU, keras.layers.LSTM])
def test_states_go_on(tmp_path, kind):
    ids = keras.Input((3,), batch_size=2, dtype="int64")
    vectors = de.layers.Embedding(4, name="table")(ids)
    model = keras.Model(ids, kind(3, stateful=True, name="states")(vectors))
    loaded, chain = export(model, tmp_path)
    inputs = np.arange(6).reshape(2, 3)
    assert all(same(loaded.serve, model, inputs) for _ in range(3))
    change(model)
    de.incremental_dump(chain, model)
    assert apply(loaded, chain) == 1
    assert all(same(loaded.serve, model, inputs) for _ in range(3))


class Late(keras.Model):
    """A model with a layer that training does not use."""

    def __init__(self):
        super().__init__()
        self.table = de.layers.Embedding(4, combiner="sum", name="table")
        self.out, self.calibrated = keras.layers.Dense(1), keras.layers.Dense(1)

    def call(self, ids, training=False):
        score = self.out(self.table(ids))
        return score if training else self.calibrated(score)


def test_weights_that_the_export_makes(tmp_path):
    model = Late()
    model(IDS, training=True)
    with pytest.warns(UserWarning, match="was made by the export itself: call the model once"):
        de.export_saved_model(model, tmp_path / "model")
    loaded = tf.saved_model.load(tmp_path / "model")
    assert same(loaded.serve, model)


def test_constants_that_layers_compute(tmp_path):
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name="table")(ids))
    normalization = keras.layers.Normalization(name="norm")
    rng = np.random.default_rng(1)
    normalization.adapt(rng.normal(size=[50, 4]))
    model = keras.Model(ids, normalization(vectors))
    loaded, chain = export(model, tmp_path)
    assert same(loaded.serve, model)
    normalization.adapt(rng.normal(3, 2, size=[50, 4]))
    model.make_predict_function(force=True)
    assert not same(loaded.serve, model)
    de.incremental_dump(chain, model)
    assert apply(loaded, chain) == 1
    assert same(loaded.serve, model)


class Scaled(keras.layers.Layer):
    """A layer that computes a constant from its weight."""

    def build(self, shape):
        self.most = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False)
        self.finalize_state()

    def finalize_state(self):
        self.factor = tf.convert_to_tensor(1 / self.most)

    def call(self, inputs):
        return inputs * self.factor


def test_constants_of_other_layers(tmp_path):
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name="table")(ids))
    scaled = Scaled(name="scaled")
    model = keras.Model(ids, scaled(vectors))
    loaded, chain = export(model, tmp_path)
    scaled.most.assign([1.0, 2.0, 3.0, 4.0])
    scaled.finalize_state()
    de.incremental_dump(chain, model)
    assert apply(loaded, chain) == 1
    assert same(loaded.serve, model)


class Noise(keras.layers.Layer):
    """A layer that is random when it is not trained, too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seeds)


def test_random_seeds_go_on(tmp_path):
    ids = keras.Input((1,), dtype="int64")
    vectors = keras.layers.Flatten()(de.layers.Embedding(4, name="table")(ids))
    model = keras.Model(ids, Noise()(keras.layers.Dense(2)(vectors)))
    loaded, _ = export(model, tmp_path)
    answers = [loaded.serve(tf.constant(IDS)).numpy().tobytes() for _ in range(3)]
    assert len(set(answers)) == 3


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
