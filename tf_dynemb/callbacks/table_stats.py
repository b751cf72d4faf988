"""TableStats: what happens in the tables of a model during training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.unwrap import filter_variables, unwrap

# Counts of `stats()`; they are reported since the last report.
_COUNTS = (
    *("inserts", "evictions", "erased", "expired", "refused", "unadmitted", "promotions"),
    *("dropped_gradients", "nonfinite_gradients"),
)
_FILE_COUNTS = (
    *("file_hits", "file_hits_ahead", "file_rows_written", "file_rows_compacted"),
    *("file_bytes_read", "file_bytes_written", "file_reads", "file_writes", "file_errors"),
)


class TableStats(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds numbers about the tables of a model to the logs of each epoch, and to TensorBoard.

    The logs get `<table>/<number>` for each table:

    - `size`: the rows at the end of the epoch.
    - `load`: the share of the slots of the index that are in use.
    - `hit_rate`: the share of the ids looked up in the epoch, validation included, whose key had a
      row; not there if nothing was looked up.
    - `inserts`, `evictions`, `erased`, `expired`, `refused`, `unadmitted`, `promotions`,
      `dropped_gradients`, `nonfinite_gradients`: as in `DynamicVariable.stats`, since the last
      epoch.
    - Of tables with `file_path` also: `file_rows` and `file_bytes` at the end of the epoch;
      `memory_hit_rate`, the share of the hits whose row was in memory; and `file_hits`,
      `file_hits_ahead`, `file_rows_written`, `file_rows_compacted`, `file_bytes_read`,
      `file_bytes_written`, `file_reads`, `file_writes`, `file_errors`, as in
      `DynamicVariable.stats`, since the last epoch.

    Callbacks after it in the list see them, such as CSVLogger, and so do `History` and
    EarlyStopping. On several ranks, the numbers are those of the rank's own rows.

    Example:
    >>> import tf_dynemb as de
    >>> items = de.layers.Embedding(4, name="items")
    >>> model = keras.Sequential([keras.Input([1], dtype="int64"), items, keras.layers.Dense(1)])
    >>> model.compile(de.OptimizerWrapper("adam"), loss="mse")
    >>> ids, labels = tf.constant([[3], [5]]), tf.constant([[[0.0]], [[1.0]]])
    >>> history = model.fit(ids, labels, callbacks=[TableStats()], verbose=0)
    >>> history.history["items/embeddings/size"]
    [2]

    Args:
        tables: the tables to report; None: those of the model.
        log_dir: a directory to which the numbers are also written for TensorBoard, with the number
            of batches trained so far as the step. None: they are not.
        update_freq: "epoch", or a number of batches: the numbers are then also written to `log_dir`
            after every so many batches.

    Raises:
        TypeError: `tables` has an element that is not a table.
        ValueError: `update_freq` is neither "epoch" nor a positive integer, or a number is given
            without `log_dir`.
    """

    def __init__(
        self,
        tables: Sequence[DynamicVariable] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        update_freq: str | int = "epoch",
    ) -> None:
        super().__init__()
        for table in tables or ():
            if not isinstance(unwrap(table), DynamicVariable):
                raise TypeError(f"tables must be DynamicVariables, got {table!r:.120}.")
        if update_freq != "epoch":
            is_integer = hasattr(update_freq, "__index__") and not isinstance(update_freq, bool)
            if not is_integer or int(update_freq) < 1:
                raise ValueError(
                    f'update_freq must be "epoch" or a positive integer, got {update_freq!r}.'
                )
            if log_dir is None:
                raise ValueError(f"update_freq={update_freq!r} needs log_dir.")
        self._given = None if tables is None else [unwrap(table) for table in tables]
        self._log_dir = log_dir
        self._update_freq = update_freq
        self._writer: Any = None
        self._batches = self._batches_before_epoch = 0
        # The counters at the last report, for the logs and for TensorBoard.
        self._reported: dict[str, dict[str, dict[str, int]]] = {"logs": {}, "events": {}}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count."""
        for before in self._reported.values():
            before.clear()
            before.update({table.name: table.stats() for table in self._tables()})
        if self._log_dir is not None and self._writer is None:
            self._writer = tf.summary.create_file_writer(os.fspath(self._log_dir))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the number of batches so far."""
        self._batches_before_epoch = self._batches

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the numbers of some batches for TensorBoard."""
        # A call stands for several batches if Keras runs them in one (`steps_per_execution`).
        before = self._batches
        self._batches = self._batches_before_epoch + batch + 1
        if self._update_freq != "epoch":
            every = int(self._update_freq)
            if self._batches // every > before // every:
                self._write()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the numbers of an epoch to the logs."""
        if logs is not None:
            logs.update(self._report("logs"))
        if self._update_freq == "epoch":
            self._write()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the files of TensorBoard."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _tables(self) -> list[DynamicVariable]:
        if self._given is not None:
            return self._given
        ours = [unwrap(variable) for variable in filter_variables(self.model.variables)[0]]
        return [table for table in ours if isinstance(table, DynamicVariable)]

    def _report(self, what: str) -> dict[str, float]:
        before = self._reported[what]
        numbers: dict[str, float] = {}
        for table in self._tables():
            now = table.stats()
            then = before.get(table.name, dict.fromkeys(now, 0))
            since = {name: now[name] - then[name] for name in now}
            before[table.name] = now
            prefix = table.name.removesuffix(":0")
            numbers[f"{prefix}/size"] = now["size"]
            numbers[f"{prefix}/load"] = now["size"] / max(1, now["slots"])
            asked = since["hits"] + since["misses"]
            if asked:
                numbers[f"{prefix}/hit_rate"] = since["hits"] / asked
            counts: tuple[str, ...] = _COUNTS
            if table.attributes.get("file_path"):
                counts += _FILE_COUNTS
                numbers[f"{prefix}/file_rows"] = now["file_rows"]
                numbers[f"{prefix}/file_bytes"] = now["file_bytes"]
                if since["hits"]:
                    numbers[f"{prefix}/memory_hit_rate"] = 1 - since["file_hits"] / since["hits"]
            numbers.update({f"{prefix}/{name}": since[name] for name in counts})
        return numbers

    def _write(self) -> None:
        if self._writer is None:
            return
        # Not tf.summary.scalar, which needs the package of TensorBoard.
        numbers = self._report("events").items()
        values = [tf.compat.v1.Summary.Value(tag=name, simple_value=n) for name, n in numbers]
        summary = tf.compat.v1.Summary(value=values).SerializeToString()
        with self._writer.as_default():
            tf.summary.experimental.write_raw_pb(summary, step=self._batches)
        self._writer.flush()
