"""Writes the file of one column, and computes its checksums."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tf_dynemb.format import crc32c, npy
from tf_dynemb.format.errors import naming, write_all
from tf_dynemb.format.table_entry import ColumnFile

# Data is written in multiples of this, at offsets that are multiples of it. Kernels that keep files
# in large folios (ext4 since Linux 6.16, XFS since 6.6) then map them in pages of 2 MiB, in which
# lookups of served tables have fewer TLB misses. (Writes of 2 MiB have this effect too, and take
# twice as long.)
WRITE_UNIT = 4 << 20


class Output(Protocol):
    """The file of a column that is being written.

    Attributes:
        path: its path or URL.
    """

    path: str

    def write(self, data: memoryview) -> None:
        """Appends bytes to those after the header; `data` can change after the call.

        Raises:
            OSError: it failed, and the file is abandoned.
        """

    def finish(self, header: bytes) -> None:
        """Completes the file, with its header of `npy.HEADER_BYTES`; it survives crashes then.

        Raises:
            OSError: it failed.
        """

    def abandon(self) -> None:
        """Stops writing, unless it is finished."""


class LocalOutput:
    """An `Output` to a new local file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.write(memoryview(bytes(npy.HEADER_BYTES)))

    def write(self, data: memoryview) -> None:
        """Appends bytes, in one or more system calls."""
        try:
            with naming(self.path):
                write_all(self._descriptor, data)
        except OSError:
            self.abandon()
            raise

    def finish(self, header: bytes) -> None:
        """Writes the header, syncs and closes the file."""
        with naming(self.path):
            if os.pwrite(self._descriptor, header, 0) != len(header):
                raise OSError(f"{self.path}: the header could not be written.")
            os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class ColumnWriter:
    """Appends rows to a column; used by one thread at a time.

    The file lacks up to WRITE_UNIT bytes of what was appended until it is flushed or closed.

    Attributes:
        path: the path or URL of the file.
        rows: the number of rows so far.
    """

    def __init__(
        self,
        output: Output,
        dtype: np.dtype[Any],
        row_shape: tuple[int, ...],
        checksum: crc32c.Checksum,
        block_bytes: int,
    ) -> None:
        self.path = output.path
        self._output: Output | None = output  # None: it is abandoned or closed
        self.rows = 0
        self._dtype = dtype
        self._row_shape = row_shape
        self._checksum = checksum
        self._block_bytes = block_bytes
        # The first block's checksum excludes the header, which contains the number of rows.
        self._checksums = [0]
        self._bytes = npy.HEADER_BYTES
        self._file: ColumnFile | None = None
        # The bytes after the last multiple of WRITE_UNIT: the first ones of the buffer. It exists
        # from the first append to the next flush.
        self._buffer: npt.NDArray[np.uint8] | None = None
        self._num_unwritten = 0

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Appends rows to the column.

        Args:
            rows: `[n, *row_shape]` of the column's dtype.

        Raises:
            OSError: an error of the file system; the snapshot can no longer be published.
            ValueError: the rows have another dtype or shape, or the file is closed.
        """
        if rows.dtype != self._dtype or rows.shape[1:] != self._row_shape or rows.ndim == 0:
            raise ValueError(
                f"{self._name} needs {self._dtype} [n, {', '.join(map(str, self._row_shape))}],"
                f" got {rows.dtype} {list(rows.shape)}."
            )
        if self._output is None:
            raise ValueError(f"{self._name} is closed.")
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        self._write(data)
        room = len(self._checksums) * self._block_bytes - self._bytes
        last = self._checksums.pop()
        self._checksums += self._checksum(data, last, room, self._block_bytes)
        self._bytes += data.size
        self.rows += len(rows)

    def flush(self) -> None:
        """Writes all that was appended, and frees the memory that it was kept in.

        Raises:
            OSError: an error of the file system.
        """
        if self._buffer is not None:
            if self._num_unwritten:
                self._write_all(self._buffer[: self._num_unwritten])
            self._buffer = None
            self._num_unwritten = 0

    def close(self) -> ColumnFile:
        """Writes the header, syncs and closes the file, if it is open; returns its entry.

        Raises:
            OSError: an error of the file system.
            ValueError: an earlier write has failed, or the file was abandoned.
        """
        if self._file:
            return self._file
        if self._output is None:
            raise ValueError(f"{self._name} is not complete: writing it failed.")
        header = npy.header(self._dtype, (self.rows, *self._row_shape))
        self.flush()
        self._output.finish(header)
        self.abandon()
        body = min(self._bytes, self._block_bytes) - len(header)
        first = crc32c.combine(crc32c.crc32c(header), self._checksums[0], body)
        self._file = ColumnFile(
            self._name, self._bytes, "".join(f"{c:08x}" for c in (first, *self._checksums[1:]))
        )
        return self._file

    def abandon(self) -> None:
        """Stops writing the file without completing it."""
        self._buffer = None
        output, self._output = self._output, None
        if output is not None:
            output.abandon()

    @property
    def _name(self) -> str:
        return self.path.rpartition("/")[2]

    def _write(self, data: npt.NDArray[np.uint8]) -> None:
        """Writes data, except for the last bytes, of which it keeps a copy."""
        if self._buffer is None:
            self._buffer = np.empty(WRITE_UNIT, np.uint8)
        at = self._bytes
        while data.size:
            to_unit = WRITE_UNIT - at % WRITE_UNIT
            taken = min(data.size, to_unit)
            if not self._num_unwritten and taken == to_unit:
                taken += (data.size - to_unit) // WRITE_UNIT * WRITE_UNIT
                self._write_all(data[:taken])
            else:
                end = self._num_unwritten + taken
                self._buffer[self._num_unwritten : end] = data[:taken]
                self._num_unwritten = end
                if taken == to_unit:
                    self._write_all(self._buffer[:end])
                    self._num_unwritten = 0
            at += taken
            data = data[taken:]

    def _write_all(self, data: npt.NDArray[np.uint8]) -> None:
        assert self._output is not None
        try:
            self._output.write(data.data)
        except OSError:
            self.abandon()
            raise
