"""The Keras callback that publishes what `fit` trains, and resumes it."""

from __future__ import annotations

import datetime
import numbers
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dynemb import communicator
from tf_dynemb._warn import warn
from tf_dynemb.callbacks.first_step import before_first_step, skip_batches
from tf_dynemb.parallel.agreement import OtherRankError, Ranks
from tf_dynemb.persistence.dump import dump, incremental_dump
from tf_dynemb.persistence.load import load
from tf_dynemb.persistence.watermark import Watermark
from tf_dynemb.storage.places import place_of
from tf_dynemb.variables.static import Variable
from tf_dynemb.variables.unwrap import tables_of

# The member of a snapshot's `extra` with the place in `fit`.
_PLACE = "fit"

Every = int | datetime.timedelta | str


class Publication(NamedTuple):
    """A publication of `Publish`.

    Attributes:
        watermark: the watermark; None: it failed.
        is_base: whether it is a base, not a delta.
        seconds: how long it took.
        error: the error, if it failed.
    """

    watermark: Watermark | None
    is_base: bool
    seconds: float
    error: Exception | None


class Publish(keras.callbacks.Callback):  # type: ignore[misc]
    """Publishes the model during `fit`: its tables, dense weights and optimizer, at one moment.

    When `fit` begins, the callback writes a base at `path`, which has no rows if the model is new;
    then deltas with what has changed, and further bases by `base_every`. Readers and exported
    models that follow the path have them shortly after. At the end of `fit` it publishes once more.

    With `resume`, a `fit` that was interrupted anywhere, even killed, goes on from the last
    publication: in a new process, the same script loads the model, its tables and the optimizer,
    and continues with the epoch and the batch that come next. If the data comes in the same order,
    the result is the one of an uninterrupted training, to the last bit. What is not published
    begins again: metrics, the state of other callbacks (EarlyStopping, ReduceLROnPlateau), the
    averages that `use_ema` keeps of rows, and the rows' part of `gradient_accumulation_steps`. For
    batches that are not trained again, callbacks get empty `logs`.

    On several ranks, every rank has this callback, after `SynchronizeRanks`.

    Example:
    >>> import tempfile
    >>> import tf_dynemb as de
    >>> ids = keras.Input([1], dtype="int64")  # so that the model is built
    >>> model = keras.Sequential([ids, de.layers.Embedding(4), keras.layers.Dense(1)])
    >>> model.compile(de.OptimizerWrapper("adam"), loss="mse")
    >>> ids, labels = tf.constant([[3], [5]]), tf.constant([[[0.0]], [[1.0]]])
    >>> path = tempfile.mkdtemp()
    >>> _ = model.fit(ids, labels, callbacks=[Publish(path, every=1, resume=True)], verbose=0)
    >>> de.serving.Reader(path).extra
    {'fit': {'epoch': 1, 'batch': 0}}

    Args:
        path: the path or URL of the chain, as for `dump`.
        every: when to publish: "epoch", at the end of each; a number of batches; or a
            `datetime.timedelta`, at the first end of a batch after that time.
        base_every: when to write a base instead of a delta, in the same ways. None: only when a
            delta cannot have all changes (`incremental_dump`). A model with `tf_dynemb.Variable`s
            publishes bases only. A base makes loading faster, and frees the space of the snapshots
            before it.
        resume: whether to go on from what is at `path`, if there is something. If False, a `path`
            with the snapshots of another training is an error.
        reread: with `resume`, whether the data begins with the epoch, so that the batches of it
            that were trained already are read and not trained. False: the data, such as an endless
            stream, begins with the batch that comes next; `extra` can record where that is.
        keep: the number of bases before the last one that stay at `path`, as for `dump`.
        dense: as for `dump`. `resume` needs "all".
        extra: a dict, or a function without arguments that returns one, which each snapshot has
            (`Watermark.extra`, `Reader.extra`), with the place in `fit` as the member "fit".
        compact_every: as for `incremental_dump`.
        raise_errors: whether a failed publication ends the training. If False, it is a warning, and
            the next one has its changes. A failure of the first publication always raises.
        verbose: 1: prints a line for each publication.

    Attributes:
        publications: the publications of the last `fit`, as `Publication`s.
        resumed: the watermark that the last `fit` went on from; None: it began afresh.

    Raises:
        ValueError, TypeError: an argument has another value or type; or, in `fit`, as `dump` and
            `load`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: Every = "epoch",
        base_every: Every | None = None,
        resume: bool = False,
        *,
        reread: bool = True,
        keep: int = 0,
        dense: str | None = "all",
        extra: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        compact_every: int | None = None,
        raise_errors: bool = False,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        if resume and dense != "all":
            raise ValueError(f'resume=True needs dense="all", got {dense!r}.')
        self._path = path
        place_of(path)  # raises unless it is one
        self._due = _Due(every, "every")
        self._base_due = None if base_every is None else _Due(base_every, "base_every")
        self._resume = resume
        self._reread = reread
        self._extra = extra
        self._options = {"keep": keep, "dense": dense, "quiet": True}
        self._compact_every = compact_every
        self._raise_errors = raise_errors
        self._verbose = verbose
        self.publications: list[Publication] = []
        self.resumed: Watermark | None = None
        self._place = (0, 0)  # the epoch and the batch that come next
        self._last_batch = -1  # of this epoch
        self._trained_before = 0  # the batches of this epoch that are not trained again

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resumes, or writes the first base; before the first step if the model is not built."""
        self.publications, self.resumed = [], None
        self._place, self._trained_before = (0, 0), 0
        if self.model.built:
            self._begin()
        elif self._resume:
            raise ValueError(
                "Publish(resume=True) needs a model that is built before fit, so that its weights "
                "can be loaded: call it once on a batch of ids, or build it."
            )
        else:
            before_first_step(self.model, self._begin)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        # Keras has read it. If it stayed, a later `fit` would begin there.
        self.model._initial_epoch = None
        self._place, self._last_batch = (epoch, 0), -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Publishes if it is time; what is due after the last batch, at the end of the epoch."""
        trained, self._last_batch = batch - self._last_batch, batch
        if batch < self._trained_before:
            return
        self._place = (self._place[0], batch + 1)
        for due in filter(None, (self._due, self._base_due)):
            due.batches += trained
        if batch + 1 != self.params.get("steps") and self._is_due(self._due):
            self._publish()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Publishes if it is time."""
        if self._last_batch + 1 < self._trained_before:
            warn(
                f"Publish: epoch {epoch} has {self._last_batch + 1} batches, but had "
                f"{self._trained_before} or more before the interruption."
            )
        self._trained_before = 0
        # Of an epoch that is stopped, the other batches are still to train. If Keras does not know
        # their number, the epoch may be complete: then reading on finds none.
        steps = self.params.get("steps")
        is_part = self._last_batch + 1 < steps if steps else self.model.stop_training
        if not is_part:
            self._place = (epoch + 1, 0)
        for due in filter(None, (self._due, self._base_due)):
            due.epochs += 1
        if self._is_due(self._due):
            self._publish()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Publishes what has changed since the last publication, such as by `use_ema`."""
        self.model._initial_epoch = None
        self._publish()

    def _begin(self) -> None:
        ranks = Ranks("Publish")
        with ranks.stage() as stage:
            stage.say(bool(place_of(self._path).names()))
        has_snapshots = stage.said[0]
        if self._resume and has_snapshots:
            self._load()
        else:
            self._extra_now()
            try:
                self._write(is_base=True)
            except ValueError as error:
                if not has_snapshots:
                    raise
                raise ValueError(
                    f"{self._path} has the snapshots of another training: pass resume=True to go "
                    f"on with it, or another path. ({error})"
                ) from error
        for due in filter(None, (self._due, self._base_due)):
            due.restart()

    def _load(self) -> None:
        self.resumed = load(self._path, self.model, self.model.optimizer, quiet=True)
        place = self.resumed.extra.get(_PLACE)
        if place is None:
            warn(f"{self._path} was not written by Publish: fit begins with its first epoch.")
            return
        epoch, batch = self._place = place["epoch"], place["batch"]
        if batch % self.model.steps_per_execution:
            raise ValueError(
                f"{self._path} was published after batch {batch} of an epoch, which is not a "
                f"multiple of steps_per_execution={self.model.steps_per_execution}: compile the "
                f"model with a steps_per_execution that divides {batch}."
            )
        if epoch >= self.params.get("epochs", epoch + 1):
            warn(
                f"Publish: {self._path} has trained {epoch} epochs, and fit has none left. To "
                "train more, pass a larger number of epochs."
            )
        # Keras has no other way to say this; its own BackupAndRestore uses it, too.
        self.model._initial_epoch = epoch
        self._trained_before = batch
        if batch:
            skip_batches(self.model, batch, self._reread)
        self._say(f"resumed {self.resumed.id[:8]} of {self._path}: {place}")

    def _publish(self) -> None:
        """Publishes; a failure is a warning unless it shall raise."""
        is_base = self._base_due is not None and self._is_due(self._base_due)
        began = time.monotonic()
        try:
            self._write(is_base)
        except Exception as error:
            seconds = time.monotonic() - began
            self.publications.append(Publication(None, is_base, seconds, error))
            if self._raise_errors:
                raise
            warn(f"Publish: the training continues, but {self._path} was not written: {error}")
        self._due.restart()

    def _write(self, is_base: bool) -> None:
        began = time.monotonic()
        model, optimizer = self.model, self.model.optimizer
        # Deltas cannot have a `tf_dynemb.Variable`, which does not record which rows changed.
        is_base = is_base or any(isinstance(each, Variable) for each in tables_of(model))
        options: dict[str, Any] = {**self._options, "extra": self._extra_now()}
        if not is_base:
            try:
                watermark = incremental_dump(
                    self._path,
                    model,
                    optimizer=optimizer,
                    compact_every=self._compact_every,
                    **options,
                )
            except Exception as error:
                if not _needs_base(error):
                    raise
                is_base = True
        if is_base:
            watermark = dump(self._path, model, optimizer, **options)
            if self._base_due is not None:
                self._base_due.restart()
        seconds = time.monotonic() - began
        self.publications.append(Publication(watermark, is_base, seconds, None))
        kind = "base" if is_base else "delta"
        self._say(f"published {kind} {watermark.id[:8]} at {self._path} in {seconds:.2f} s")

    def _extra_now(self) -> dict[str, Any]:
        """Returns the user's dict, with the place in `fit`."""
        extra = dict((self._extra() if callable(self._extra) else self._extra) or {})
        if _PLACE in extra:
            raise ValueError(f"extra must not have the name {_PLACE!r}, got {extra!r:.120}.")
        epoch, batch = self._place
        return {**extra, _PLACE: {"epoch": epoch, "batch": batch}}

    def _is_due(self, due: _Due) -> bool:
        """Whether it is time, by the clock of rank 0."""
        comm = communicator.get()
        if comm.size == 1 or not due.is_timed:
            return due.is_due()
        return bool(comm.gather_objects(due.is_due(), "dynemb/publish")[0])

    def _say(self, text: str) -> None:
        if self._verbose and communicator.get().rank == 0:
            print(f"\n{text}", flush=True)


def _needs_base(error: Exception) -> bool:
    """Whether a delta failed, on all ranks, because one does not remember all deletions."""
    kinds = set(communicator.get().gather_objects(type(error).__name__, "dynemb/publish"))
    forgotten = tf.errors.FailedPreconditionError.__name__
    return forgotten in kinds and kinds <= {forgotten, OtherRankError.__name__}


class _Due:
    """Tells when a time has come, since the last `restart`.

    Attributes:
        batches: the batches since then, which the caller counts.
        epochs: the epochs since then, likewise.
        is_timed: whether it depends on the clock.
    """

    def __init__(self, every: Any, name: str) -> None:
        is_timed = isinstance(every, datetime.timedelta)
        is_number = isinstance(every, numbers.Integral) and not isinstance(every, bool)
        zero = datetime.timedelta(0) if is_timed else 0
        if every != "epoch" and not ((is_timed or is_number) and every > zero):
            raise ValueError(
                f'{name} must be "epoch", a positive number of batches or a positive '
                f"datetime.timedelta, got {every!r}."
            )
        self.is_timed = is_timed
        self._every = every
        self.restart()

    def restart(self) -> None:
        """Begins again."""
        self.batches, self.epochs = 0, 0
        self._began = time.monotonic()

    def is_due(self) -> bool:
        """Returns whether the time has come."""
        if self._every == "epoch":
            return self.epochs > 0
        if self.is_timed:
            return time.monotonic() - self._began >= float(self._every.total_seconds())
        return bool(self.batches >= self._every)
