"""SynchronizeRanks and broadcast_variables in one process; tests/parallel has several ranks.

In one process they change nothing, and report the errors that several ranks would.
"""

from __future__ import annotations

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf
from layer_helpers import FEATURES, functional, make_data

import tf_dynemb as de
from tf_dynemb import communicator
from tf_dynemb.callbacks import SynchronizeRanks, rank_metrics


def compiled(**options):
    keras.utils.set_random_seed(0)
    model = functional(de.layers.Embedding(4, initializer="0.1"))
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.01))
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
    return model


def fit(model, callbacks, **options):
    ids, labels = make_data(64)
    options = {"epochs": 2, "batch_size": 16, "verbose": 0, **options}
    validation = (ids[:32], labels[:32])
    return model.fit(ids, labels, callbacks=callbacks, validation_data=validation, **options)


def test_fit_is_unchanged():
    plain, watched = compiled(), compiled()
    wanted, got = fit(plain, []), fit(watched, [SynchronizeRanks()])
    assert wanted.history == got.history
    assert set(got.history) == {"loss", "mae", "val_loss", "val_mae"}
    for plain_weight, watched_weight in zip(plain.weights[1:], watched.weights[1:], strict=True):
        np.testing.assert_array_equal(plain_weight.numpy(), watched_weight.numpy())


def test_evaluate_and_predict_are_unchanged():
    model = compiled()
    ids, labels = make_data(64)
    options = {"batch_size": 16, "verbose": 0}
    wanted = model.evaluate(ids, labels, **options)
    assert wanted == model.evaluate(ids, labels, callbacks=[SynchronizeRanks()], **options)
    predicted = model.predict(ids, callbacks=[SynchronizeRanks()], **options)
    np.testing.assert_array_equal(predicted, model.predict(ids, **options))


def test_the_progress_is_printed():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        history = fit(compiled(), [SynchronizeRanks()], verbose=2)
    assert out.getvalue().count("val_loss") == 2
    assert history.params["verbose"] == 2


def test_an_unbuilt_model():
    model = keras.Sequential(
        [de.layers.Embedding(4), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile(optimizer=de.OptimizerWrapper(keras.optimizers.SGD(0.1)), loss="mse")
    assert len(fit(model, [SynchronizeRanks()]).history["loss"]) == 2


class TwoRanks(communicator.Communicator):
    """This is rank 1. Rank 0 has the same values, except those that a test sets in `other`."""

    rank, size, local_rank = 1, 2, 1

    def __init__(self):
        self.other = {}

    def alltoall(self, tensor, splits, name):
        raise NotImplementedError

    def allreduce(self, tensors, average, name):
        return [tensor if average else tensor * 2 for tensor in tensors]

    def allgather(self, tensor, name):
        raise NotImplementedError

    def broadcast(self, tensor, root, name):
        return tensor

    def gather_objects(self, value, name):
        return [self.other.get(name, value), value]


@pytest.fixture
def two_ranks(monkeypatch):
    comm = TwoRanks()
    monkeypatch.setattr(communicator, "get", lambda: comm)
    return comm


def dense_model():
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    return model


def test_reduced_metrics_keep_their_means(two_ranks):
    model = dense_model()
    ids, labels = make_data(32)
    wanted = model.evaluate(ids, labels, verbose=0, return_dict=True)
    got = rank_metrics.reduce_metrics(model)
    assert got == {name: pytest.approx(value, rel=1e-6) for name, value in wanted.items()}
    # The samples of both ranks are counted.
    assert float(model.metrics[0].count) == 2 * len(ids)


def test_variables_of_metrics_that_are_means_are_averaged(two_ranks):
    class Latest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="latest")
            self.value = self.add_variable((), "zeros", aggregation="mean", name="value")
            self.rank_value = self.add_variable((), "zeros", aggregation="none", name="own")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(3.0)
            self.rank_value.assign(5.0)

        def result(self):
            return self.value + self.rank_value

    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(loss="mse", metrics=[Latest()])
    model.evaluate(*make_data(8), verbose=0)
    assert rank_metrics.reduce_metrics(model)["latest"] == 8.0


def test_logs_that_are_not_metrics(two_ranks):
    two_ranks.other["dynemb/logs"] = {"number": 3, "array": [1.0, 5.0], "flag": 0.0, "nan": 1.0}
    logs = {
        "number": 1,
        "array": np.array([1.0, 2.0]),
        "flag": np.True_,
        "text": "this rank's",
        "metric": 7.0,
        "nan": float("nan"),
    }
    rank_metrics.replace_logs(logs, {"metric": 8.0, "another": 9.0})
    assert np.isnan(logs.pop("nan"))
    text = {"text": "this rank's"}
    assert logs == {"number": 2.0, "array": [1.0, 3.5], "flag": 0.5, "metric": 8.0, **text}


def test_logs_with_different_names(two_ranks):
    two_ranks.other["dynemb/logs"] = {"a": 1.0}
    with pytest.raises(
        ValueError, match=r"same names on all ranks, got \['a'\] on rank 0, \['b'\]"
    ):
        rank_metrics.replace_logs({"b": 1.0}, {})


def test_untrained_weights_are_averaged(two_ranks, monkeypatch):
    layer = keras.layers.BatchNormalization()
    frozen = de.layers.EmbeddingBag(2, trainable=False)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), frozen, layer])
    layer.moving_mean.assign([1.0, 3.0])
    # The other rank has zeros.
    monkeypatch.setattr(two_ranks, "allreduce", lambda tensors, average, name: tensors)
    rank_metrics.average_untrained(model)
    assert layer.moving_mean.numpy().tolist() == [0.5, 1.5]
    assert layer.gamma.numpy().tolist() == [1.0, 1.0]


def test_broadcast_variables_in_one_process():
    table = de.DynamicVariable(2)
    variables = [tf.Variable(1.0), keras.Variable([2, 3]), table, de.Variable(np.ones([2, 2]))]
    de.broadcast_variables(iter(variables))
    de.broadcast_variables([])
    assert float(variables[0]) == 1.0
    with pytest.raises(TypeError, match="variables must be variables that have a value, got 3"):
        de.broadcast_variables([3])
    for root in (1, -1, True, 0.5, "0"):
        with pytest.raises(ValueError, match=r"root_rank must be in \[0, 1\)"):
            de.broadcast_variables(variables, root_rank=root)
    with pytest.raises(RuntimeError, match="eagerly only"):
        tf.function(lambda: de.broadcast_variables(variables))()
