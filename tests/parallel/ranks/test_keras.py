"""model.fit, evaluate and predict with SynchronizeRanks; broadcast_variables."""

from __future__ import annotations

import contextlib
import io
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from parallel.ranks.gathered import gather, one_rank, whole_table
from tf_dynemb import communicator
from tf_dynemb.parallel.agreement import OtherRankError

BATCH, STEPS, EPOCHS, FIELDS = 16, 4, 2, 3
SEVERAL = pytest.mark.ranks(2, 4)


def data(steps=STEPS, seed=0):
    """Ids and labels of all ranks, whole batches."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 40, (BATCH * steps, FIELDS))
    labels = (rng.random(len(ids)) < 1 / (1 + np.exp(-(ids % 5 - 2).sum(1)))).astype(np.float32)
    return ids, labels


def part(comm, *arrays):
    """Returns this rank's share of every batch, in the order of the batches."""
    share = BATCH // comm.size
    rank_slice = slice(comm.rank * share, (comm.rank + 1) * share)
    return [
        a.reshape(-1, BATCH, *a.shape[1:])[:, rank_slice].reshape(-1, *a.shape[1:]) for a in arrays
    ]


def layers(*others):
    return [
        de.layers.Embedding(4, initializer=keras.initializers.RandomNormal(stddev=0.1, seed=3)),
        keras.layers.Flatten(),
        keras.layers.Dense(8, activation="relu"),
        *others,
        keras.layers.Dense(1, activation="sigmoid"),
    ]


def make_model(built="with an input", optimizer=None, others=(), **options):
    """Creates a model; its dense weights depend on the state of Python's random generator."""
    inputs = [keras.Input((FIELDS,), dtype="int64")] if built == "with an input" else []
    model = keras.Sequential([*inputs, *layers(*others)])
    model.compile(
        optimizer=de.OptimizerWrapper(optimizer or keras.optimizers.Adam(0.05)),
        loss="binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc")],
        run_eagerly=built == "eager",
        **options,
    )
    return model


def fit(comm, model, arrays, callbacks=(), validation=None, **options):
    if validation is not None:
        options |= {
            "validation_data": tuple(validation),
            "validation_batch_size": BATCH // comm.size,
        }
    return model.fit(
        *arrays,
        batch_size=BATCH // comm.size,
        callbacks=[de.callbacks.SynchronizeRanks(), *callbacks],
        **{"epochs": EPOCHS, "shuffle": False, "verbose": 0, **options},
    ).history


def table_of(model):
    return model.layers[0].table


def dense_weights(model):
    return [v.numpy() for v in model.weights if v.path.split("/")[0] != model.layers[0].name]


def bits(arrays):
    return [array.tobytes().hex() for array in arrays]


@SEVERAL
@pytest.mark.parametrize(
    ("built", "optimizer"),
    [
        ("with an input", "Adam"),
        ("by its data", "Adam"),
        ("eager", "SGD"),
    ],
)
def test_training_matches_one_process(comm, built, optimizer):
    def make(seed):
        keras.utils.set_random_seed(seed)
        return make_model(built, getattr(keras.optimizers, optimizer)(0.05))

    spread = make(seed=100 + comm.rank)
    validation = data(2, seed=9)
    history = fit(comm, spread, part(comm, *data()), validation=part(comm, *validation))
    with one_rank():
        alone = make(seed=100)
        wanted = fit(communicator.LOCAL, alone, data(), validation=validation)

    assert history.keys() == wanted.keys()
    assert len(history) == 6
    for name, values in wanted.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    for spread_weights, alone_weights in zip(
        dense_weights(spread), dense_weights(alone), strict=True
    ):
        np.testing.assert_allclose(spread_weights, alone_weights, rtol=1e-4, atol=1e-5)
    rows, rows_alone = whole_table(comm, table_of(spread)), whole_table_of_one(alone)
    np.testing.assert_array_equal(rows.keys, rows_alone.keys)
    np.testing.assert_allclose(rows.vectors, rows_alone.vectors, rtol=1e-4, atol=1e-5)

    predicted = spread.predict(part(comm, *data())[0], batch_size=BATCH, verbose=0)
    with one_rank():
        by_one = alone.predict(part(comm, *data())[0], batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(predicted, by_one, rtol=1e-4, atol=1e-5)


def whole_table_of_one(model):
    with one_rank():
        return whole_table(communicator.LOCAL, table_of(model))


@SEVERAL
@pytest.mark.parametrize("built", ["with an input", "by its data"])
def test_all_ranks_have_the_same_bits(comm, built):
    """Also with layers that have statistics, or that drop units with a seed of each rank."""
    keras.utils.set_random_seed(100 + comm.rank)
    others = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = make_model(built, others=others)
    initial = bits(dense_weights(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit(comm, model, part(comm, *data()), validation=part(comm, *data(2)))
    assert not [w for w in caught if "differ between ranks" in str(w.message)]

    gathered = comm.gather_objects([bits(dense_weights(model)), history, initial], "test")
    assert all(weights == gathered[0][0] for weights, _, _ in gathered)
    assert all(other == gathered[0][1] for _, other, _ in gathered)
    assert model.weights[4].shape == (8,)
    if built == "with an input":
        assert gathered[0][2] != gathered[1][2], "the ranks started with different weights"
    seeds = comm.gather_objects(bits([v.numpy() for v in model.layers[4].variables]), "test")
    assert len({str(seed) for seed in seeds}) == comm.size


@SEVERAL
def test_metrics_cover_the_samples_of_all_ranks(comm):
    """Shares of different sizes: the mean of the ranks' losses is not the loss of all samples."""
    model = make_model()
    fit(comm, model, part(comm, *data()), epochs=1)
    rows = 2 * BATCH - comm.rank  # two steps, of which the last is smaller on later ranks
    rng = np.random.default_rng(comm.rank)
    ids, labels = rng.integers(0, 40, (rows, FIELDS)), rng.integers(0, 2, rows).astype(np.float32)

    local = model.evaluate(ids, labels, batch_size=BATCH, verbose=0, return_dict=True)
    callbacks = [de.callbacks.SynchronizeRanks()]
    options = {"batch_size": BATCH, "verbose": 0, "callbacks": callbacks}
    got = model.evaluate(ids, labels, return_dict=True, **options)
    for name, weights in [("loss", rows), ("accuracy", rows)]:
        gathered = comm.gather_objects([local[name], weights], "test")
        values, counts = zip(*gathered, strict=True)
        assert len(set(values)) > 1
        assert got[name] == pytest.approx(np.average(values, weights=counts), rel=1e-5)

    predicted = model.predict(ids, batch_size=BATCH, verbose=0)
    auc = keras.metrics.AUC()
    auc.update_state(gather(comm, labels), gather(comm, predicted[:, 0]))
    assert got["auc"] == pytest.approx(float(auc.result()), abs=1e-6)
    # Also in `fit`.
    history = fit(comm, model, part(comm, *data()), validation=(ids, labels), epochs=1)
    assert len({str(h) for h in comm.gather_objects(history, "test")}) == 1
    again = model.evaluate(ids, labels, **options)
    assert history["val_loss"] == [pytest.approx(again[0], rel=1e-5)]


class Scripted(keras.Model):
    """A model whose log in each epoch is a value of `script`, which differs between ranks."""

    def __init__(self, script):
        super().__init__()
        self.script, self.epoch = script, 0
        self.layer = keras.layers.Dense(1)
        self.layer.build((None, FIELDS))
        self.built = True

    def train_step(self, batch):
        return {"scripted": tf.constant(self.script[self.epoch])}

    def next_epoch(self):
        return keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: setattr(self, "epoch", epoch)
        )


def fit_script(script, callbacks, first=True):
    model = Scripted(script)
    model.compile(run_eagerly=True)
    synchronize = [de.callbacks.SynchronizeRanks()]
    callbacks = [*synchronize, *callbacks] if first else [*callbacks, *synchronize]
    ids = np.zeros((4, FIELDS), np.float32)
    epochs = {"epochs": len(script), "verbose": 0}
    return model.fit(ids, callbacks=[model.next_epoch(), *callbacks], **epochs).history


@SEVERAL
def test_logs_that_are_not_metrics_are_averaged(comm):
    script = [1.0 + comm.rank, 5.0]
    assert fit_script(script, []) == {"scripted": [pytest.approx((1 + comm.size) / 2), 5.0]}


@SEVERAL
def test_early_stopping_on_all_ranks_in_the_same_epoch(comm):
    """Alone, rank 0 would continue to the end, and rank 1 would stop after the second epoch."""
    scripts = [[9.0, 6.0, 5.0, 4.0, 3.0], [1.0, 1.5, 7.0, 8.0, 9.0], [0.0] * 5, [0.0] * 5]
    stopping = keras.callbacks.EarlyStopping("scripted", mode="min", patience=1)
    history = fit_script(scripts[comm.rank], [stopping])
    assert len(history["scripted"]) == 3, "the mean is lowest in the second epoch"
    assert stopping.stopped_epoch == 2
    assert len({str(h) for h in comm.gather_objects(history, "test")}) == 1


@SEVERAL
def test_a_stop_on_one_rank_stops_all(comm):
    def stop(epoch, logs):
        if epoch == 1 and comm.rank == 1:
            stopper.model.stop_training = True

    stopper = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    assert len(fit_script([0.0] * 4, [stopper], first=False)["scripted"]) == 2


@SEVERAL
def test_only_the_first_rank_prints(comm):
    model = make_model()
    written = {}
    for verbose in ("auto", 2):
        arrays, few = part(comm, *data()), part(comm, *data(2))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            fit(comm, model, arrays, verbose=verbose, epochs=1, validation=few)
        written["fit", verbose] = out.getvalue()
        options = {"verbose": verbose, "callbacks": [de.callbacks.SynchronizeRanks()]}
        with contextlib.redirect_stdout(io.StringIO()) as out:
            model.evaluate(*part(comm, *data()), **options)
        written["evaluate", verbose] = out.getvalue()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            model.predict(part(comm, *data())[0], **options)
        written["predict", verbose] = out.getvalue()
    if comm.rank == 0:
        assert all("step" in text for text in written.values())
    else:
        assert set(written.values()) == {""}


@SEVERAL
def test_all_ranks_get_the_optimizer_of_the_first(comm):
    """As after a checkpoint that only the first rank has loaded."""
    keras.utils.set_random_seed(1)
    model = make_model()
    if comm.rank == 0:
        with one_rank():
            fit(communicator.LOCAL, model, data(), epochs=1)
        model.optimizer.learning_rate = 0.125
    state = [v.numpy() for v in model.optimizer.variables]
    fit(comm, model, part(comm, *data(1)), epochs=1)
    assert int(model.optimizer.iterations) == STEPS + 1
    assert float(model.optimizer.learning_rate) == 0.125
    gathered = comm.gather_objects(bits([v.numpy() for v in model.optimizer.variables]), "test")
    assert all(other == gathered[0] for other in gathered)
    if comm.rank == 0:
        assert len(state) == len(model.optimizer.variables) > 2


@SEVERAL
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_different_numbers_of_steps_are_refused(comm, method):
    model = make_model()
    ids, labels = data()
    rows = BATCH * (2 + (comm.rank == 1))
    options = {"batch_size": BATCH, "verbose": 0, "callbacks": [de.callbacks.SynchronizeRanks()]}
    arrays = [ids[:rows]] if method == "predict" else [ids[:rows], labels[:rows]]
    with pytest.raises(ValueError, match=rf"model.{method} .*steps.* 2 on rank 0, 3 on rank 1"):
        getattr(model, method)(*arrays, **options)
    assert len(table_of(model)) == 0
    getattr(model, method)(*(array[:BATCH] for array in arrays), **options)


@SEVERAL
def test_different_numbers_of_epochs_are_refused(comm):
    with pytest.raises(ValueError, match="epochs on all ranks, got 1 on rank 0, 2 on rank 1"):
        fit(comm, make_model(), part(comm, *data()), epochs=1 + comm.rank)


@SEVERAL
def test_different_models_are_refused(comm):
    others = [keras.layers.Dense(5 + comm.rank)]
    with pytest.raises(ValueError, match=r"is float32 \[8, 5\] on rank 0, but float32 \[8, 6\] on"):
        fit(comm, make_model(others=others), part(comm, *data()))
    others = [keras.layers.Dense(5) for _ in range(comm.rank)]
    with pytest.raises(ValueError, match=r"There are \d+ dense variables on rank 0, but \d+ on"):
        fit(comm, make_model(others=others), part(comm, *data()))
    built = ["with an input", "by its data"][min(comm.rank, 1)]
    with pytest.raises(ValueError, match="built on some ranks"):
        fit(comm, make_model(built), part(comm, *data()))


@SEVERAL
def test_weights_that_differ_cause_a_warning(comm):
    """An optimizer that does not reduce gradients over ranks."""
    model = keras.Sequential([keras.Input((FIELDS,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    ids, labels = part(comm, *data())
    with pytest.warns(UserWarning, match="differ between ranks.*OptimizerWrapper"):
        fit(comm, model, (ids.astype(np.float32), labels), epochs=1)


@SEVERAL
def test_validation_data_of_unknown_length(comm):
    model = make_model()
    rank_data = part(comm, *data(2))

    def batches():
        for array in np.arange(2):
            yield tuple(m.reshape(2, -1, *m.shape[1:])[array] for m in rank_data)

    def dataset():
        spec = tuple(tf.TensorSpec([None, *m.shape[1:]], m.dtype) for m in rank_data)
        return tf.data.Dataset.from_generator(batches, output_signature=spec)

    history = model.fit(
        *part(comm, *data()),
        batch_size=BATCH // comm.size,
        validation_data=dataset(),
        callbacks=[de.callbacks.SynchronizeRanks()],
        verbose=0,
    ).history
    again = model.evaluate(
        *rank_data,
        batch_size=BATCH // comm.size,
        callbacks=[de.callbacks.SynchronizeRanks()],
        verbose=0,
    )
    assert history["val_loss"] == [pytest.approx(again[0], rel=1e-6)]


# Horovod has no type for some of these.
VALUES = {
    "float32": [[0.5, 1.5], [2.5, 3.5]],
    "bfloat16": [0.5, 3.0],
    "float64": 1e300,
    "int64": 2**40 + 1,
    "int8": [-128, 127],
    "uint16": [65535],
    "uint32": [2**32 - 1, 7],
    "uint64": [2**64 - 1],
    "bool": [True, False, True],
    "complex64": 1 + 2j,
    "float16": np.zeros([0, 3]),
}


def test_broadcast_variables_of_any_type(comm):
    root = comm.size - 1

    def value(name):
        wanted = tf.constant(VALUES[name], tf.as_dtype(name))
        return wanted if comm.rank == root else tf.zeros_like(wanted)

    variables = [tf.Variable(value(name)) for name in VALUES]
    variables += [keras.Variable(value("float32")), keras.Variable(value("bool"), dtype="bool")]
    table = de.DynamicVariable(2, name="unequal on purpose", initializer="1")
    table.lookup([comm.rank])
    spread = de.Variable(np.ones([8, 2], np.float32))
    spread.assign(spread * comm.rank)
    de.broadcast_variables([table, *variables, spread], root_rank=root)
    for name, variable in zip([*VALUES, "float32", "bool"], variables, strict=True):
        wanted = tf.constant(VALUES[name], tf.as_dtype(name)).numpy()
        np.testing.assert_array_equal(np.asarray(variable.numpy()), wanted, err_msg=name)
    assert (spread.numpy() == comm.rank).all()


def test_broadcast_variables_in_groups(comm, monkeypatch):
    monkeypatch.setattr("tf_dynemb.variables.replicas._GROUP_BYTES", 100)
    rng = np.random.default_rng(comm.rank)
    variables = [tf.Variable(rng.normal(size=n)) for n in (3, 5, 100, 0, 1, 2, 9, 30)]
    de.broadcast_variables(variables)
    rng = np.random.default_rng(0)
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), rng.normal(size=variable.shape))


@SEVERAL
def test_broadcast_variables_refuses_invalid_arguments(comm):
    two = [tf.Variable(1.0), tf.Variable(2.0)]
    other = comm.rank == 1
    with pytest.raises(ValueError, match="2 dense variables on rank 0, but 1 on rank 1"):
        de.broadcast_variables(two[: 2 - other])
    with pytest.raises(ValueError, match=r"Dense variable 1 is float32 \[\] on rank 0, but int32"):
        de.broadcast_variables([two[0], tf.Variable(1) if other else two[1]])
    with pytest.raises(ValueError, match="root_rank is 0 on rank 0, but 1 on rank 1"):
        de.broadcast_variables(two, root_rank=int(other))
    with pytest.raises(ValueError, match=rf"root_rank must be in \[0, {comm.size}\), got -1"):
        de.broadcast_variables(two, root_rank=-1)
    with pytest.raises(TypeError if other else OtherRankError, match="variables must be variables"):
        de.broadcast_variables([1.0] if other else two)
    assert [float(v) for v in two] == [1.0, 2.0]
