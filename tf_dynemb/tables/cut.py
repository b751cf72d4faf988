"""Cuts: tables as they are at one moment, read while they can be trained."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.tables.admission_options import Frequency
from tf_dynemb.tables.table import StateSpec, Table

# A time of operators.
NOW = -1
# The bytes that are read at a time under a table's lock; a batch may have to wait for this read.
_BLOCK_BYTES = 2 << 20


class Rows(NamedTuple):
    """Some rows of a table; row i of every array belongs to key i.

    Attributes:
        keys: [n], of the table's key type.
        vectors: [n, dimension]; bfloat16 vectors as the uint16 of their bits.
        state: float32 [n, floats of state].
        updates: uint32 [n], ticks of last update, minus the cut's base.
        accesses: uint32 [n], ticks of last access, minus the cut's base; the scores of the rows if
            the table has scores (`TableOptions.has_scores`).
    """

    keys: npt.NDArray[Any]
    vectors: npt.NDArray[Any]
    state: npt.NDArray[Any]
    updates: npt.NDArray[Any]
    accesses: npt.NDArray[Any]


class CutInfo(NamedTuple):
    """A table of a cut.

    Attributes:
        most_rows: the maximum number of rows.
        base: the base of the times.
        spec: the state of the optimizer in the rows.
        deleted: the deleted keys.
        expiry_marks: the marks by which the ages of the rows are known (`tables/expiry.py`).
        steps: the steps of an optimizer with `catch_up`, which rows can lack that the cut does not
            have (docs/file_format.md); empty for other optimizers.
    """

    most_rows: int
    base: int
    spec: StateSpec
    deleted: npt.NDArray[Any]
    expiry_marks: tuple[int, ...]
    steps: tuple[float, ...]


class Cut:
    """Tables as they are when the `with` statement is entered; they can be trained meanwhile.

    Entering waits until other threads' cuts of the tables have ended.

    Args:
        tables: the tables, each once.
        since: for each table, the tick after which updated rows belong to the cut; -1: all rows.
        with_deleted: whether the cut includes the keys that were deleted since then.
        with_used: whether it includes the rows that were used since then, and perhaps some that are
            used while it is read; all rows of a table with scores. Only with `with_deleted`.

    Attributes:
        tick: the moment of the cut: greater than the ticks of all batches before it.
        utc_ns: the same moment as a time, in nanoseconds since 1970 UTC.

    Raises:
        tf.errors.FailedPreconditionError: on entering: a table is in another cut of this thread, or
            does not remember all deletions.
        RuntimeError: on entering: this is inside a `tf.function`.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        since: Sequence[int],
        with_deleted: bool,
        with_used: bool = False,
    ) -> None:
        self._tables = list(tables)
        self._since = list(since)
        self._with_deleted = with_deleted
        self._with_used = with_used
        self._handle: tf.Tensor | None = None
        self._locks = contextlib.ExitStack()
        self.tick = 0
        self.utc_ns = 0

    def __enter__(self) -> Cut:
        if not tf.executing_eagerly():
            raise RuntimeError("tables are dumped eagerly only: call this outside tf.function.")
        if not self._tables:
            self.tick = last_tick()
            self.utc_ns = time.time_ns()
            return self
        with contextlib.ExitStack() as locks:
            # All threads lock in this order, so that none waits in a circle.
            for table in sorted(self._tables, key=id):
                locks.enter_context(table.cut_lock)
            handle, tick, utc_ns = _ops.library().dynemb_snapshot(
                [table.handle for table in self._tables],
                tf.constant(self._since, tf.int64),
                with_deleted=self._with_deleted,
                with_used=self._with_used,
            )
            self._locks = locks.pop_all()
        self._handle, self.tick, self.utc_ns = handle, int(tick), int(utc_ns)
        return self

    def __exit__(self, *_: object) -> None:
        with self._locks:
            if self._handle is not None:
                _ops.library().dynemb_snapshot_end(self._handle)
                self._handle = None

    def info(self, number: int) -> CutInfo:
        """Returns what is known about a table of the cut. It copies the deleted keys."""
        info = _ops.library().dynemb_snapshot_info(self._handle, number)
        most, base, optimizer, widths, inits, deleted, marks, steps = info
        spec = (
            optimizer.numpy().decode(),
            tuple(widths.numpy().tolist()),
            tuple(inits.numpy().tolist()),
        )
        key_type = self._tables[number].key_type.as_numpy_dtype
        keys = deleted.numpy().astype(np.uint32 if key_type == np.int32 else np.uint64)
        marks, steps = (tuple(each.numpy().tolist()) for each in (marks, steps))
        return CutInfo(int(most), int(base), spec, keys.view(key_type), marks, steps)

    def counters(self, number: int) -> tuple[npt.NDArray[np.uint64], int]:
        """Returns a table's admission counters, and the number of their first line.

        They are uint64 [lines, 8], as in docs/file_format.md; [0, 8] if the table counts no keys.
        """
        if self._handle is None or not isinstance(
            self._tables[number].options.admission, Frequency
        ):
            return np.empty((0, 8), np.uint64), 0
        lines, first = _ops.library().dynemb_snapshot_admission(self._handle, number)
        return lines.numpy(), int(first)

    def blocks(self) -> Iterator[tuple[int, Rows]]:
        """Yields all rows of the cut, some at a time, with the number of their table."""
        next_block = _ops.library().dynemb_snapshot_next
        while self._handle is not None:
            table, *columns = next_block(self._handle, _BLOCK_BYTES)
            number = int(table)
            if number < 0:
                return
            keys, vectors, state, updates, accesses = (column.numpy() for column in columns)
            yield number, Rows(*self._typed(number, keys, vectors), state, updates, accesses)

    def no_rows(self, number: int) -> Rows:
        """Returns an empty `Rows` of a table."""
        table = self._tables[number]
        key_bytes = table.key_type.size
        keys = np.empty((0, key_bytes), np.uint8)
        vectors = np.empty((0, table.dimension * table.dtype.size), np.uint8)
        times = np.empty([0], np.uint32)
        return Rows(*self._typed(number, keys, vectors), np.empty((0, 0), np.float32), times, times)

    def _typed(
        self, number: int, keys: npt.NDArray[Any], vectors: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        table = self._tables[number]
        keys = keys.view(table.key_type.as_numpy_dtype).reshape(-1)
        dtype = np.uint16 if table.dtype == tf.bfloat16 else table.dtype.as_numpy_dtype
        return keys, vectors.view(dtype).reshape(-1, table.dimension)


def last_tick() -> int:
    """Returns the number of this process's last batch."""
    return int(_ops.library().dynemb_tick_before(2**63 - 1))


def advance_clock(tick: int) -> None:
    """Ensures that this process's next batch has a number above `tick`."""
    _ops.library().dynemb_advance_clock(tick, NOW)


def bits(tensor: tf.Tensor) -> npt.NDArray[Any]:
    """Returns a tensor as an array; a bfloat16 tensor as the uint16 of its bits."""
    array: npt.NDArray[Any]
    array = (tf.bitcast(tensor, tf.uint16) if tensor.dtype == tf.bfloat16 else tensor).numpy()
    return array


def from_bits(array: npt.NDArray[Any], dtype: str) -> tf.Tensor:
    """The inverse of `bits`."""
    tensor = tf.constant(array)
    return tf.bitcast(tensor, tf.bfloat16) if dtype == "bfloat16" else tensor
