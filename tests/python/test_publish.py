"""de.callbacks.Publish: what it writes during `fit`, and what `resume` continues."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import re
import warnings

import keras
import numpy as np
import publish_process
import pytest
import tensorflow as tf
from dump_helpers import run_script
from publish_process import BATCHES, EPOCHS, Interrupt, bits, build, fit

import tf_dynemb as de
from tf_dynemb.storage.local_place import list_snapshots


def interrupted(path, batches, seed=1, **options):
    with pytest.raises(KeyboardInterrupt):
        fit(build(seed=seed), path, Interrupt(batches), **options)


@pytest.fixture(autouse=True)
def end_at_once(monkeypatch):
    """Iterators of `tf.data` that are not read to their end are destroyed at once.

    Otherwise each waits until its autotuner looks again: for seconds.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    iterate = tf.data.Dataset.__iter__
    monkeypatch.setattr(
        tf.data.Dataset, "__iter__", lambda self: iterate(self.with_options(options))
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bits of a training that was not interrupted."""
    model = build(seed=1)
    fit(model, tmp_path_factory.mktemp("whole") / "chain")
    return bits(model)


# Before the first delta and after it, at an epoch's last batch and its first one, and later.
@pytest.mark.parametrize("batches", [1, 3, 5, BATCHES, BATCHES + 1, 2 * BATCHES + 4])
def test_a_resumed_training_ends_as_an_uninterrupted_one(tmp_path, whole, batches):
    interrupted(tmp_path, batches)
    model = build(seed=2)
    publish = fit(model, tmp_path)
    # The interruption comes before the publication after the same batch.
    epoch, batch = divmod(batches - 1, BATCHES)
    assert publish.resumed.extra == {"fit": {"epoch": epoch, "batch": batch // 3 * 3}}
    assert bits(model) == whole


def test_steps_that_run_several_batches(tmp_path):
    def model(seed):
        made = build(seed=seed)
        made.compile(made.optimizer, "mse", steps_per_execution=4)
        return made

    uninterrupted = model(1)
    fit(uninterrupted, tmp_path / "whole", every=4)
    with pytest.raises(KeyboardInterrupt):
        fit(model(1), tmp_path / "parts", Interrupt(2), every=4)
    resumed = model(2)
    publish = fit(resumed, tmp_path / "parts", every=4)
    assert publish.resumed.extra["fit"] == {"epoch": 0, "batch": 4}
    assert bits(resumed) == bits(uninterrupted)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 7, 0.5), 0.9),
        lambda: keras.optimizers.AdamW(0.02, amsgrad=True),
        lambda: keras.optimizers.Nadam(0.02),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad(0.1)),
    ],
)
def test_optimizers(tmp_path, optimizer):
    model = build(optimizer(), seed=1)
    fit(model, tmp_path / "whole", epochs=2)
    with pytest.raises(KeyboardInterrupt):
        fit(build(optimizer(), seed=1), tmp_path / "parts", Interrupt(17), epochs=2)
    resumed = build(optimizer(), seed=2)
    fit(resumed, tmp_path / "parts", epochs=2)
    assert bits(resumed) == bits(model)


def test_a_learning_rate_that_a_callback_has_changed(tmp_path):
    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rate = self.model.optimizer.learning_rate
            rate.assign(rate / 2)

    model = build(seed=1)
    fit(model, tmp_path / "whole", Halve())
    with pytest.raises(KeyboardInterrupt):
        fit(build(seed=1), tmp_path / "parts", Halve(), Interrupt(BATCHES + 5))
    resumed = build(seed=2)
    fit(resumed, tmp_path / "parts", Halve())
    assert bits(resumed) == bits(model)


def test_a_training_that_has_ended_is_not_trained_again(tmp_path, whole):
    fit(build(seed=1), tmp_path)
    before = sorted(tmp_path.iterdir())
    model = build(seed=2)
    with pytest.warns(UserWarning, match="has trained 3 epochs, and fit has none left"):
        fit(model, tmp_path)
    assert bits(model) == whole
    assert sorted(tmp_path.iterdir()) == before
    # More epochs go on, and a later `fit` without the callback begins with its own first epoch.
    fit(model, tmp_path, epochs=EPOCHS + 1)
    inputs, labels = publish_process.data()
    assert len(model.fit(inputs, labels, epochs=2, verbose=0).epoch) == 2


def test_a_training_that_is_stopped_in_an_epoch(tmp_path, whole):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 4

    fit(build(seed=1), tmp_path, Stop())
    resumed = build(seed=2)
    publish = fit(resumed, tmp_path)
    assert publish.resumed.extra["fit"] == {"epoch": 0, "batch": 5}
    assert bits(resumed) == whole


def test_a_training_that_is_stopped_after_an_epoch(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    fit(build(seed=1), tmp_path, Stop())
    assert de.serving.Reader(tmp_path).extra["fit"] == {"epoch": 1, "batch": 0}


def stream(first):
    inputs, labels = publish_process.data()
    for number in itertools.count(first):
        rows = np.arange(16 * number, 16 * number + 16) % len(labels)
        yield {name: ids[rows] for name, ids in inputs.items()}, labels[rows]


def test_an_endless_stream(tmp_path):
    """`extra` records how much was read, and `fit` gets the data from there."""
    results = []
    for batches in (None, 11):
        path, first = tmp_path / str(batches), 0
        for seed in (1, 2):
            read = itertools.count(first)
            model = build(seed=seed)

            class Count(keras.callbacks.Callback):
                def on_train_batch_end(self, batch, logs=None, read=read):
                    self.total = next(read) + 1

            count = Count()
            count.total = first
            publish = de.callbacks.Publish(
                path,
                every=2,
                resume=True,
                reread=False,
                extra=lambda count=count: {"read": count.total},
            )
            callbacks = [count, publish, *([Interrupt(batches)] if batches and seed == 1 else [])]
            with contextlib.suppress(KeyboardInterrupt):
                model.fit(
                    stream(first),
                    steps_per_epoch=8,
                    epochs=3,
                    verbose=0,
                    callbacks=callbacks,
                )
                break
            first = de.serving.Reader(path).extra["read"]
            assert first == 10
        results.append(bits(model))
    assert results[0] == results[1]


def test_an_epoch_that_has_become_shorter(tmp_path):
    interrupted(tmp_path, 8)
    model = build(seed=2)
    inputs, labels = publish_process.data()
    publish = de.callbacks.Publish(tmp_path, every=3, resume=True)
    few = {name: ids[:64] for name, ids in inputs.items()}
    with pytest.warns(UserWarning, match="epoch 0 has 4 batches, but had 6"):
        model.fit(few, labels[:64], batch_size=16, epochs=2, verbose=0, callbacks=[publish])
    # The second epoch is trained as a whole.
    assert int(model.optimizer.iterations) == 6 + 4


def test_other_steps_per_execution(tmp_path):
    interrupted(tmp_path, 5)
    model = build(seed=2)
    model.compile(model.optimizer, "mse", steps_per_execution=4)
    with pytest.raises(ValueError, match="after batch 3 of an epoch, which is not a multiple"):
        fit(model, tmp_path)


def test_a_fit_after_one_that_failed_begins_with_its_own_first_epoch(tmp_path):
    interrupted(tmp_path, BATCHES + 5)
    model = build(seed=2)
    with pytest.raises(KeyboardInterrupt):
        fit(model, tmp_path, Interrupt(1))
    before = int(model.optimizer.iterations)
    inputs, labels = publish_process.data()
    history = model.fit(inputs, labels, batch_size=16, epochs=2, verbose=0)
    assert history.epoch == [0, 1]
    assert int(model.optimizer.iterations) == before + 2 * BATCHES


@pytest.mark.slow
def test_a_process_killed_at_random_moments(tmp_path, path_or_s3):
    times = int(os.environ.get("PUBLISH_KILLS", "4"))
    path, limit = tmp_path / "kills", 200 + 10 * times
    url = [] if path_or_s3 is None else [path_or_s3]
    counts = run_script("publish_process.py", "kill", path, times, 1, *url, timeout=limit)
    assert counts["kills"] >= times
    assert counts["wrong"] == 0


def kinds(path):
    return [name.kind for name in list_snapshots(path)]


def test_what_is_written(tmp_path, capsys):
    publish = fit(build(), tmp_path, epochs=1, every=4, keep=9, base_every=6, verbose=1)
    # After 4 batches, 8, and at the end, which is also the end of the epoch.
    assert kinds(tmp_path) == ["base", "delta", "base", "delta"]
    assert [each.is_base for each in publish.publications[:4]] == [True, False, True, False]
    assert all(each.error is None and each.seconds > 0 for each in publish.publications)
    assert publish.publications[-1].watermark.id == de.serving.Reader(tmp_path).id
    assert capsys.readouterr().out.count("published base") == 2


def test_at_the_end_of_epochs(tmp_path):
    fit(build(), tmp_path, epochs=3, every="epoch", base_every="epoch", keep=9)
    assert kinds(tmp_path) == ["base", "base", "base", "base"]


def test_after_a_time(tmp_path):
    soon, never = datetime.timedelta(microseconds=1), datetime.timedelta(days=1)
    fit(build(), tmp_path / "soon", epochs=1, every=soon)
    fit(build(), tmp_path / "never", epochs=1, every=never)
    assert len(kinds(tmp_path / "soon")) == 1 + BATCHES
    assert kinds(tmp_path / "never") == ["base", "delta"]


def test_deltas_are_merged(tmp_path):
    fit(build(), tmp_path, epochs=1, every=2, compact_every=3)
    assert len(kinds(tmp_path)) <= 3
    resumed = build(seed=5)
    fit(resumed, tmp_path, epochs=1)
    expected = build(seed=6)
    de.load(tmp_path, expected, expected.optimizer)
    assert bits(resumed) == bits(expected)


def test_extra(tmp_path):
    numbers = iter(range(100))
    fit(build(), tmp_path, epochs=1, extra=lambda: {"hour": next(numbers)})
    extra = de.serving.Reader(tmp_path).extra
    assert extra == {"hour": extra["hour"], "fit": {"epoch": 1, "batch": 0}}
    assert extra["hour"] > 1
    assert de.load(tmp_path, build()).extra == extra


def test_a_failure_does_not_end_the_training(tmp_path, whole):
    """A folder whose file system has no space is simulated by a file in the way."""

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                (tmp_path / "chain").rename(tmp_path / "away")
                (tmp_path / "chain").write_text("")
            if batch == 4:
                (tmp_path / "chain").unlink()
                (tmp_path / "away").rename(tmp_path / "chain")

    model = build(seed=1)
    with pytest.warns(UserWarning, match="the training continues, but .*chain was not written"):
        publish = fit(model, tmp_path / "chain", Break(), epochs=1)
    first, failed, *later = publish.publications
    assert first.error is None
    assert failed.watermark is None
    assert isinstance(failed.error, OSError)
    assert all(each.error is None for each in later)
    # The next delta has the changes of the one that failed.
    resumed = build(seed=2)
    fit(resumed, tmp_path / "chain")
    assert bits(resumed) == whole


def test_a_failure_ends_the_training_if_asked(tmp_path):
    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                (tmp_path / "chain").rename(tmp_path / "away")
                (tmp_path / "chain").write_text("")

    with pytest.raises(OSError, match="chain"):
        fit(build(), tmp_path / "chain", Break(), epochs=1, raise_errors=True)


def test_the_first_publication_must_succeed(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        fit(build(), tmp_path / "file", epochs=1, resume=False)


def test_the_snapshots_of_another_training_stay(tmp_path):
    fit(build(), tmp_path, epochs=1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"of another training: pass resume=True"):
        fit(build(), tmp_path, epochs=1, resume=False)
    assert sorted(tmp_path.iterdir()) == before


def test_a_second_fit_continues_the_first(tmp_path):
    model = build()
    fit(model, tmp_path, epochs=1, resume=False)
    fit(model, tmp_path, epochs=1, resume=False)
    assert kinds(tmp_path)[0] == "base"


def test_a_chain_that_publish_has_not_written(tmp_path):
    model = build(seed=1)
    de.dump(tmp_path, model, model.optimizer)
    with pytest.warns(UserWarning, match="was not written by Publish"):
        publish = fit(build(seed=2), tmp_path, epochs=1)
    assert publish.resumed is not None
    assert kinds(tmp_path)[0] == "base"
    assert "delta" in kinds(tmp_path)


def test_a_model_that_is_not_built(tmp_path):
    def model():
        table = de.layers.Embedding(4, name="ids")
        made = keras.Sequential([table, keras.layers.Flatten(), keras.layers.Dense(1)])
        made.compile(de.OptimizerWrapper("adam"), "mse")
        return made

    ids, labels = np.arange(8).reshape(4, 2), np.ones([4, 1])
    publish = de.callbacks.Publish(tmp_path, every=1)
    model().fit(ids, labels, batch_size=2, callbacks=[publish], verbose=0)
    assert [each.is_base for each in publish.publications[:2]] == [True, False]
    publish = de.callbacks.Publish(tmp_path, every=1, resume=True)
    with pytest.raises(ValueError, match=r"resume=True\) needs a model that is built"):
        model().fit(ids, labels, callbacks=[publish], verbose=0)


def test_deltas_that_cannot_have_all_deletions_become_bases(tmp_path):
    model = build()
    table = de.named_tables(model)["user_table/embeddings"]

    class Erase(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                for first in range(0, 1_200_000, 400_000):
                    keys = np.arange(first, first + 400_000)
                    table.upsert(keys, np.zeros([len(keys), 4], np.float32))
                    table.erase(keys)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, tmp_path, Erase(), epochs=1, keep=9)
    assert kinds(tmp_path).count("base") == 2


def test_models_with_matrices_publish_bases(tmp_path):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = de.layers.Embedding(2, combiner="sum", name="table")
            self.matrix = de.Variable(np.ones([8, 2], np.float32), name="matrix", trainable=False)
            self.top = keras.layers.Dense(1)

        def call(self, ids):
            return self.top(self.table(ids) + tf.gather(self.matrix, ids[:, 0] % 8))

    model = Model()
    model.compile(de.OptimizerWrapper("adam"), "mse")
    ids, labels = np.arange(16).reshape(8, 2), np.ones([8, 1])
    model(ids)
    publish = de.callbacks.Publish(tmp_path, every=1, keep=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(ids, labels, batch_size=4, verbose=0, callbacks=[publish])
    assert set(kinds(tmp_path)) == {"base"}
    assert list(de.serving.Reader(tmp_path).tables) == ["table/embeddings", "matrix"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every must be"),
        ({"every": -1}, "every must be"),
        ({"every": True}, "every must be"),
        ({"every": 1.5}, "every must be"),
        ({"every": "batch"}, "every must be"),
        ({"every": datetime.timedelta(0)}, "every must be"),
        ({"base_every": "day"}, "base_every must be"),
        ({"resume": True, "dense": "weights"}, "resume=True needs dense"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        de.callbacks.Publish(tmp_path, **arguments)


def test_extra_without_a_place(tmp_path):
    with pytest.raises(ValueError, match="extra must not have the name 'fit'"):
        fit(build(), tmp_path, extra={"fit": 1})


def test_averages_of_rows_are_not_saved(tmp_path):
    optimizer = keras.optimizers.Adam(0.02, use_ema=True)
    with pytest.warns(UserWarning, match=r"the averages of rows \(use_ema\) are not in a"):
        fit(build(optimizer), tmp_path, epochs=1)
    # What is published last are the averages that `fit` ends with.
    model = build(keras.optimizers.Adam(0.02, use_ema=True))
    de.load(tmp_path, model, dense="weights")
