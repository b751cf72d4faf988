"""The arrays of get_weights() for a table: their copies are the table, or an error says so."""

import copy
import io
import pickle

import keras
import numpy as np
import pytest

import tf_dynemb as de

IDS = np.array([[1, 2**53 + 1, -7], [2**62, 5, 1]])
TARGETS = np.ones([2, 1])


def trained(ids=IDS, epochs=2, dtype="float32"):
    layer = de.layers.Embedding(4, dtype=dtype, name="ids")
    model = keras.Sequential([keras.Input([3], dtype="int64"), layer])
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(1))
    model.compile(de.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    model.fit(ids, TARGETS, epochs=epochs, verbose=0)
    return model


def vectors(model, ids=IDS):
    return model.layers[0].table.lookup(ids, insert=False).numpy()


def by_pickle(weights):
    return pickle.loads(pickle.dumps(weights))


def by_savez(weights, save=np.savez):
    file = io.BytesIO()
    save(file, *weights)
    file.seek(0)
    with np.load(file) as read:
        return [read[name] for name in read.files]


def by_save(weights):
    copies = []
    for each in weights:
        file = io.BytesIO()
        np.save(file, each)
        file.seek(0)
        copies.append(np.load(file))
    return copies


COPIES = {
    "same": lambda weights: weights,
    "pickle": by_pickle,
    "deepcopy": copy.deepcopy,
    "copy": lambda weights: [copy.copy(each) for each in weights],
    "method": lambda weights: [each.copy() for each in weights],
    "np.copy": lambda weights: [np.copy(each) for each in weights],
    "astype": lambda weights: [each.astype(np.float64) for each in weights],
    "savez": by_savez,
    "savez_compressed": lambda weights: by_savez(weights, np.savez_compressed),
    "save": by_save,
    "pickled copies": lambda weights: by_pickle(copy.deepcopy(weights)),
    "times one": lambda weights: [1.0 * each for each in weights],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", COPIES)
def test_copies_train_on_as_the_original(how, dtype):
    model = trained(dtype=dtype)
    other = trained(np.array([[8, 9, 10]] * 2), dtype=dtype)
    other.set_weights(COPIES[how](model.get_weights()))
    assert len(other.layers[0].table) == len(model.layers[0].table)
    np.testing.assert_array_equal(vectors(other), vectors(model))
    # The optimizer state of the rows is there as well.
    other.optimizer.core.iterations.assign(model.optimizer.core.iterations)
    for target, source in zip(
        other.optimizer.core.variables[2:], model.optimizer.core.variables[2:], strict=True
    ):
        target.assign(source)
    for each in (model, other):
        each.fit(IDS, TARGETS, verbose=0)
    np.testing.assert_array_equal(vectors(other), vectors(model))


def test_averages_of_models_with_the_same_ids():
    first, second, third = trained(), trained(IDS[::-1], 5), trained(IDS)
    mean = [(a + b) / 2 for a, b in zip(first.get_weights(), second.get_weights(), strict=True)]
    third.set_weights(mean)
    np.testing.assert_allclose(
        vectors(third), (vectors(first) + vectors(second)) / 2, rtol=1e-6, atol=1e-7
    )
    weight = first.get_weights()[0]
    weight *= 2
    third.layers[0].set_weights([weight])
    np.testing.assert_array_equal(vectors(third), 2 * vectors(first))


@pytest.mark.parametrize("ids", [IDS + 1, IDS[:1].repeat(2, 0)])
def test_averages_of_models_with_other_ids_are_refused(ids):
    first, second = trained().get_weights()[0], trained(ids).get_weights()[0]
    with pytest.raises(ValueError, match=r"whose keys differ: .* rows.*de.export"):
        first + second


@pytest.mark.parametrize(
    "spoil",
    [
        np.asarray,
        lambda w: w[::-1],
        lambda w: np.sort(w, axis=0),
        lambda w: np.mean([w, w], axis=0),
        lambda w: np.zeros_like(w),
        lambda w: w > 0,
    ],
)
def test_results_without_keys_are_refused(spoil):
    model = trained()
    weights = model.get_weights()
    before = vectors(model)
    with pytest.raises(TypeError, match="array of vectors without keys cannot be set"):
        model.set_weights([spoil(weights[0]), *weights[1:]])
    np.testing.assert_array_equal(vectors(model), before)


def test_they_are_arrays_of_vectors():
    model = trained()
    weight = model.get_weights()[0]
    assert weight.shape == (5, 4)
    assert weight.keys.tolist() == sorted(np.unique(IDS).tolist())
    np.testing.assert_array_equal(np.asarray(weight), vectors(model, weight.keys))
    assert weight.mean() == np.asarray(weight).mean()
    assert (weight @ np.ones(4)).shape == (5,)
    assert np.linalg.norm(weight, axis=1).shape == (5,)
    assert np.histogram(weight)[0].sum() == 20


def test_what_keras_does_with_weights(tmp_path):
    model, seen = trained(epochs=1), []
    stop = keras.callbacks.EarlyStopping("loss", patience=0, mode="max", restore_best_weights=True)
    save = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.keras", "loss", save_best_only=True, mode="max"
    )
    see = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(vectors(model)))
    model.fit(IDS, TARGETS, epochs=4, verbose=0, callbacks=[see, stop, save])
    assert len(seen) > stop.best_epoch + 1
    np.testing.assert_array_equal(vectors(model), seen[stop.best_epoch])
    loaded = keras.models.load_model(tmp_path / "best.keras")
    np.testing.assert_array_equal(vectors(loaded), vectors(model))
    clone = keras.models.clone_model(trained(IDS + 3))
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(clone.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
