"""Writes the file of one column, and computes its checksums."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb.storage import crc32c, npy
from tf_dynemb.storage.errors import naming
from tf_dynemb.storage.manifest import ColumnFile


class ColumnWriter:
    """Appends rows to a column; used by one thread at a time.

    Attributes:
        path: the path of the file.
        rows: the number of rows so far.
    """

    def __init__(
        self,
        path: pathlib.Path,
        dtype: np.dtype[Any],
        row_shape: tuple[int, ...],
        checksum: crc32c.Checksum,
        block_bytes: int,
    ) -> None:
        self.path = path
        self.rows = 0
        self._dtype = dtype
        self._row_shape = row_shape
        self._checksum = checksum
        self._block_bytes = block_bytes
        # The first block's checksum excludes the header, which contains the number of rows.
        self._checksums = [0]
        self._bytes = npy.HEADER_BYTES
        self._file: ColumnFile | None = None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._write(memoryview(bytes(npy.HEADER_BYTES)))

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Appends rows to the column.

        Args:
            rows: [n, *row_shape] of the column's dtype.

        Raises:
            OSError: an error of the file system; the snapshot can no longer be published.
            ValueError: the rows have another dtype or shape, or the file is closed.
        """
        if rows.dtype != self._dtype or rows.shape[1:] != self._row_shape or rows.ndim == 0:
            raise ValueError(
                f"{self.path.name} needs {self._dtype} [n, {', '.join(map(str, self._row_shape))}],"
                f" got {rows.dtype} {list(rows.shape)}."
            )
        if self._descriptor < 0:
            raise ValueError(f"{self.path.name} is closed.")
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        self._write(data.data)
        room = len(self._checksums) * self._block_bytes - self._bytes
        last = self._checksums.pop()
        self._checksums += self._checksum(data, last, room, self._block_bytes)
        self._bytes += data.size
        self.rows += len(rows)

    def close(self) -> ColumnFile:
        """Writes the header, syncs and closes the file, if it is open; returns its entry.

        Raises:
            OSError: an error of the file system.
            ValueError: an earlier write has failed, or the file was abandoned.
        """
        if self._file:
            return self._file
        if self._descriptor < 0:
            raise ValueError(f"{self.path.name} is not complete: writing it failed.")
        header = npy.header(self._dtype, (self.rows, *self._row_shape))
        with naming(self.path):
            if os.pwrite(self._descriptor, header, 0) != len(header):
                raise OSError(f"{self.path}: the header could not be written.")
            os.fsync(self._descriptor)
        self.abandon()
        body = min(self._bytes, self._block_bytes) - len(header)
        first = crc32c.combine(crc32c.crc32c(header), self._checksums[0], body)
        self._file = ColumnFile(
            self.path.name, self._bytes, "".join(f"{c:08x}" for c in (first, *self._checksums[1:]))
        )
        return self._file

    def abandon(self) -> None:
        """Closes the file without completing it."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _write(self, data: memoryview) -> None:
        """Writes all of the data, in one or more system calls."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                self.abandon()
                raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from error
