"""TableStats: what happens in the tables of a model during training."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.unwrap import filter_variables, unwrap

_SIZES = ("size", "load", "hit_rate")
# Counts of `stats()`, reported since the last report: of any table, and of one with files.
_COUNTS = (
    *("inserts", "evictions", "erased", "expired", "refused", "unadmitted", "promotions"),
    *("dropped_gradients", "nonfinite_gradients"),
)
_FILE_SIZES = ("file_rows", "file_bytes", "memory_hit_rate")
_FILE_COUNTS = (
    *("file_hits", "file_hits_ahead", "file_rows_written", "file_rows_compacted"),
    *("file_bytes_read", "file_bytes_written", "file_reads", "file_writes", "file_errors"),
)
_DEFAULT = (*_SIZES, "inserts", "evictions", "expired", "nonfinite_gradients", *_FILE_SIZES)
_ALL = (*_SIZES, *_COUNTS, *_FILE_SIZES, *_FILE_COUNTS)


class TableStats(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds numbers about the tables of a model to the logs of each epoch, and to TensorBoard.

    The logs get `tables/<number>` for all tables together, or with `per_table` `<table>/<number>`
    for each:

    - `size`: the rows at the end of the epoch.
    - `load`: the share of the slots of the index that are in use.
    - `hit_rate`: the share of the ids looked up in the epoch, validation included, whose key had a
      row; not there if nothing was looked up.
    - `inserts`, `evictions`, `erased`, `expired`, `refused`, `unadmitted`, `promotions`,
      `dropped_gradients`, `nonfinite_gradients`: as in `DynamicVariable.stats`, since the last
      epoch.
    - Only for tables with `file_path`: `file_rows` and `file_bytes` at the end of the epoch;
      `memory_hit_rate`, the share of the hits whose row was in memory; and `file_hits`,
      `file_hits_ahead`, `file_rows_written`, `file_rows_compacted`, `file_bytes_read`,
      `file_bytes_written`, `file_reads`, `file_writes`, `file_errors`, as in
      `DynamicVariable.stats`, since the last epoch.

    Callbacks after it in the list see them, such as CSVLogger, and so do `History` and
    EarlyStopping. On several ranks, the numbers count the rank's own rows.

    Example:
    >>> import tf_dynemb as de
    >>> items = de.layers.Embedding(4, name="items")
    >>> model = keras.Sequential([keras.Input([1], dtype="int64"), items, keras.layers.Dense(1)])
    >>> model.compile(de.OptimizerWrapper("adam"), loss="mse")
    >>> ids, labels = tf.constant([[3], [5]]), tf.constant([[[0.0]], [[1.0]]])
    >>> history = model.fit(ids, labels, callbacks=[TableStats()], verbose=0)
    >>> history.history["tables/size"]
    [2]

    Args:
        tables: the tables to report; None: the tables of the model.
        log_dir: a directory to which the numbers are also written for TensorBoard, with the number
            of batches trained so far as the step. None: they are not.
        update_freq: "epoch", or a number of batches: the numbers are then also written to `log_dir`
            after each such number of batches.
        stats: the numbers to report, by the names above; "all"; or None: `size`, `load`,
            `hit_rate`, `inserts`, `evictions`, `expired`, `nonfinite_gradients`, `file_rows`,
            `file_bytes` and `memory_hit_rate`.
        per_table: whether each table has its own numbers.

    Raises:
        TypeError: `tables` has an element that is not a table.
        ValueError: `update_freq` is neither "epoch" nor a positive integer, or a number is given
            without `log_dir`; or `stats` has an unknown name.
    """

    def __init__(
        self,
        tables: Sequence[DynamicVariable] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        update_freq: str | int = "epoch",
        stats: Sequence[str] | str | None = None,
        per_table: bool = False,
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
        if stats is None:
            stats = _DEFAULT
        names = (_ALL if stats == "all" else [stats]) if isinstance(stats, str) else list(stats)
        for name in names:
            if name not in _ALL:
                raise ValueError(f"stats has the unknown name {name!r}; known: {', '.join(_ALL)}.")
        self._stats = tuple(names)
        self._per_table = per_table
        self._given = None if tables is None else [unwrap(table) for table in tables]
        self._log_dir = log_dir
        self._update_freq = update_freq
        self._writer: tf.summary.SummaryWriter | None = None
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
        # A call represents several batches if Keras runs them in one (`steps_per_execution`).
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
        variables = [unwrap(variable) for variable in filter_variables(self.model.variables)[0]]
        return [table for table in variables if isinstance(table, DynamicVariable)]

    def _report(self, what: str) -> dict[str, float]:
        before = self._reported[what]
        # For each prefix: the sums of `stats()`, of the counts since, and of these counts for
        # tables in files.
        sums: dict[str, tuple[Counter[str], Counter[str], Counter[str]]] = {}
        for table in self._tables():
            now = table.stats()
            then = before.get(table.name, dict.fromkeys(now, 0))
            since = {name: now[name] - then[name] for name in now}
            before[table.name] = now
            prefix = table.name.removesuffix(":0") if self._per_table else "tables"
            prefix_sums = sums.setdefault(prefix, (Counter(), Counter(), Counter()))
            prefix_sums[0].update(now)
            prefix_sums[1].update(since)
            if table.attributes.get("file_path"):
                prefix_sums[2].update(since)
        numbers: dict[str, float] = {}
        for prefix, (now_of_all, since_of_all, in_files) in sums.items():
            found = _numbers(now_of_all, since_of_all, in_files)
            numbers |= {f"{prefix}/{name}": found[name] for name in self._stats if name in found}
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


def _numbers(now: Counter[str], since: Counter[str], in_files: Counter[str]) -> dict[str, float]:
    """Returns all numbers of some tables.

    Args:
        now: the sums of their `stats()`.
        since: those since the last report.
        in_files: those since the last report, of tables with files only; empty: there is none.
    """
    numbers: dict[str, float] = {
        "size": now["size"],
        "load": (now["size"] - now["file_rows"]) / max(1, now["slots"]),
    }
    if asked := since["hits"] + since["misses"]:
        numbers["hit_rate"] = since["hits"] / asked
    numbers |= {name: since[name] for name in _COUNTS}
    if in_files:
        numbers |= {name: now[name] for name in ("file_rows", "file_bytes")}
        if in_files["hits"]:
            numbers["memory_hit_rate"] = 1 - in_files["file_hits"] / in_files["hits"]
        numbers |= {name: since[name] for name in _FILE_COUNTS}
    return numbers
