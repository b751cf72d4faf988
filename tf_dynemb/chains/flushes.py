"""Flushes of persistent tables (cc/file/flush_manifest.h, cc/file/segment.h): reading, forgetting.

To forget keys, a new flush is written beside the old one, with links to the files that stay, and
takes its place at once. Nothing that a file has is changed.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb._presence import exchange, exists, remove_tree
from tf_dynemb.format.crc32c import crc32c
from tf_dynemb.format.errors import DataLossError
from tf_dynemb.storage.files import sync_directory, write_file

ENDING = ".persistent"
NEW = ".new"
FORGOTTEN = "forgotten"

MANIFEST = "manifest"
_MAGIC = b"tf_dynemb flush 3"
_FORGOTTEN_MAGIC = b"tf_dynemb forgotten keys 1"
_INDEX = np.dtype([("hash", "<u8"), ("place", "<u4"), ("updated", "<u4"), ("score", "<u4")])
_SEGMENT = struct.Struct("<IIIIQ")

# As in cc/file/segment.cc.
_UNIT_HEADER = 16
_ROW_HEADER = 24
_BLOCK = 4096
_MOST_BLOCKS = 8
# Bytes of segments that are examined at a time.
_CHUNK = 1 << 24

Bits = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class _Segment:
    number: int
    sequence: int
    rows: int
    epoch: int
    content_bytes: int

    @property
    def file(self) -> str:
        return f"{self.sequence}.rows"

    @property
    def row_bytes(self) -> int:
        return -(-(_ROW_HEADER + self.content_bytes) // 8) * 8

    @property
    def unit(self) -> tuple[int, int]:
        """The bytes and the rows of a unit: RowFormat in cc/file/segment.cc."""
        row = self.row_bytes
        least = -(-(_UNIT_HEADER + row) // _BLOCK)
        best, found = 0.0, (0, 0)
        for blocks in range(least, max(least, _MOST_BLOCKS) + 1):
            size = blocks * _BLOCK
            rows = (size - _UNIT_HEADER) // row
            used = rows * row / size
            if used > best:
                best, found = used, (size, rows)
                if used >= 5 / 6:
                    break
        return found


class Flush:
    """A flush on disk.

    Attributes:
        path: its folder.
        forgotten: the bits of the keys that a restart leaves out.

    Raises:
        DataLossError: a file is missing or damaged.
        ValueError: the flush has a version that this code does not read.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        content = _Content(path / MANIFEST, _MAGIC)
        self._head = content.take(24)  # salt, place_shift, epoch, content_bytes
        (self._shift,) = struct.unpack_from("<I", self._head, 8)
        size = content.number()
        self._segments = [
            _Segment(*_SEGMENT.unpack(content.take(_SEGMENT.size))) for _ in range(size)
        ]
        self._rows = content.number()
        (self._index_crc,) = struct.unpack("<I", content.take(4))
        self._table = content.take(content.number())
        content.end()
        self.forgotten: Bits = np.zeros(0, np.uint64)
        if exists(path / FORGOTTEN):
            content = _Content(path / FORGOTTEN, _FORGOTTEN_MAGIC)
            self.forgotten = np.frombuffer(content.take(8 * content.number()), "<u8")
            content.end()

    def rows_of(self, bits: Bits) -> dict[pathlib.Path, Rows]:
        """Returns the rows of keys in each file that has some, including rows that moved since."""
        found = {}
        for segment in self._segments:
            rows = self._rows_in(segment, bits)
            if len(rows):
                found[self.path / segment.file] = rows
        return found

    def verify(self) -> None:
        """Compares the index and all rows with their checksums.

        Raises:
            DataLossError: a file is missing or damaged.
        """
        index = self._index()
        if crc32c(index.tobytes()) != self._index_crc:
            raise DataLossError(f"{self.path / 'index'} is damaged: its checksum is wrong.")
        for segment in self._segments:
            size, per_unit = segment.unit
            units = self._units(segment)[: -(-segment.rows // per_unit)]
            for number, unit in enumerate(units):
                head = unit[:_UNIT_HEADER].view("<u4")
                same = (int(head[1]), int(head[2])) == (segment.sequence, number)
                if not same or crc32c(unit[4:].tobytes()) != int(head[0]):
                    raise DataLossError(
                        f"{self.path / segment.file} at byte offset {number * size} is damaged: "
                        "its checksum is wrong, or it is not the block that was written."
                    )

    def forget(self, bits: Bits) -> None:
        """Replaces the flush by one that does not have keys.

        The lock of the table must be held. If the process is killed, the flush is the one before or
        the new one, and `clear` removes what is left of the other.

        Raises:
            OSError: an error of the file system, such as one that cannot exchange two folders.
        """
        self.clear()
        new = self.path.with_name(self.path.name + NEW)
        new.mkdir()
        removed: list[npt.NDArray[np.uint32]] = []
        for segment in self._segments:
            rows = self._rows_in(segment, bits)
            if not len(rows):
                os.link(self.path / segment.file, new / segment.file)
                continue
            removed.append((segment.number << self._shift | rows).astype(np.uint32))
            write_file(new / segment.file, self._without(segment, rows))
        index = self._index()
        gone = np.concatenate(removed) if removed else np.zeros(0, np.uint32)
        index = index[~np.isin(index["place"], gone)]
        write_file(new / "index", index.tobytes())
        forgotten = np.setdiff1d(self.forgotten, bits)
        if len(forgotten):
            listed = struct.pack("<Q", len(forgotten)) + forgotten.astype("<u8").tobytes()
            write_file(new / FORGOTTEN, _sealed(_FORGOTTEN_MAGIC, listed))
        sync_directory(new)
        segments = b"".join(_SEGMENT.pack(*dataclasses.astuple(s)) for s in self._segments)
        body = (
            self._head
            + struct.pack("<Q", len(self._segments))
            + segments
            + struct.pack("<QI", len(index), crc32c(index.tobytes()))
            + struct.pack("<Q", len(self._table))
            + self._table
        )
        write_file(new / MANIFEST, _sealed(_MAGIC, body))
        sync_directory(new)
        sync_directory(self.path.parent)
        if not exchange(new, self.path):
            remove_tree(new)
            raise OSError(
                f"the file system of {self.path} cannot exchange two folders at once: call "
                "table.forget(keys) and table.flush() in a process that has the table."
            )
        sync_directory(self.path.parent)
        self.clear()

    def clear(self) -> None:
        """Removes what a call of `forget` that was killed has left."""
        new = self.path.with_name(self.path.name + NEW)
        if exists(new):
            remove_tree(new)
            sync_directory(self.path.parent)

    def _without(self, segment: _Segment, rows: Rows) -> bytes:
        """Returns the bytes of a segment with zeros as some rows, up to its last row in use."""
        _, per_unit = segment.unit
        units = np.array(self._units(segment)[: -(-segment.rows // per_unit)])
        for row in rows[rows < len(units) * per_unit].tolist():
            at = _UNIT_HEADER + row % per_unit * segment.row_bytes
            units[row // per_unit, at : at + segment.row_bytes] = 0
        for number in np.unique(rows[rows < len(units) * per_unit] // per_unit).tolist():
            checksum = crc32c(units[number, 4:].tobytes())
            units[number, :4] = np.frombuffer(struct.pack("<I", checksum), np.uint8)
        return units.tobytes()

    def _rows_in(self, segment: _Segment, bits: Bits) -> Rows:
        size, per_unit = segment.unit
        units = self._units(segment)
        found = [np.zeros(0, np.int64)]
        step = max(1, _CHUNK // size)
        for begin in range(0, len(units), step):
            chunk = units[begin : begin + step]
            counts = np.ascontiguousarray(chunk[:, 12:16]).view("<u4")
            places = np.arange(per_unit)[:, np.newaxis] * segment.row_bytes + np.arange(_ROW_HEADER)
            heads = np.ascontiguousarray(chunk[:, _UNIT_HEADER + places])
            keys, updated, _ = np.moveaxis(heads.view("<u8").reshape(len(chunk), per_unit, 3), 2, 0)
            # A row that was removed is zeros. No other one has been updated at tick 0.
            is_row = (keys != 0) | (updated != 0)
            hits = np.isin(keys, bits) & is_row & (np.arange(per_unit) < counts)
            found.append(begin * per_unit + np.flatnonzero(hits))
        return np.concatenate(found)

    def _units(self, segment: _Segment) -> npt.NDArray[np.uint8]:
        """Maps the whole units of a segment: [units, bytes]."""
        file = self.path / segment.file
        size, per_unit = segment.unit
        try:
            units = file.stat().st_size // size
        except FileNotFoundError as error:
            raise DataLossError(f"{file} is missing.") from error
        if units * per_unit < segment.rows:
            raise DataLossError(f"{file} has {units} blocks, too few for {segment.rows} rows.")
        return (
            np.memmap(file, np.uint8, "r", shape=(units, size))
            if units
            else np.zeros((0, size), np.uint8)
        )

    def _index(self) -> npt.NDArray[Any]:
        file = self.path / "index"
        try:
            index = np.fromfile(file, _INDEX)
        except FileNotFoundError as error:
            raise DataLossError(f"{file} is missing.") from error
        if len(index) != self._rows or file.stat().st_size != index.nbytes:
            raise DataLossError(f"{file} has {len(index)} rows instead of {self._rows}.")
        return index


class _Content:
    """The bytes of a file that begins with a text and ends with a checksum."""

    def __init__(self, file: pathlib.Path, magic: bytes) -> None:
        self._file = file
        try:
            content = file.read_bytes()
        except FileNotFoundError as error:
            raise DataLossError(f"{file} is missing.") from error
        self._left = content[:-4]
        if len(content) < 4 or struct.pack("<I", crc32c(content[:-4])) != content[-4:]:
            raise DataLossError(f"{file} is damaged: its checksum is wrong.")
        if self.take(self.number()) != magic:
            raise ValueError(f"{file} is of another version than this tf_dynemb reads.")

    def number(self) -> int:
        found: int = struct.unpack("<Q", self.take(8))[0]
        return found

    def take(self, count: int) -> bytes:
        if count > len(self._left):
            raise DataLossError(f"{self._file} is damaged: it is too short.")
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def end(self) -> None:
        if self._left:
            raise DataLossError(f"{self._file} is damaged: it is too long.")


def in_use(folder: pathlib.Path) -> str:
    """The error if a process has the persistent table whose rows are to be removed."""
    return (
        f"a process has the table of {folder}: call table.forget(keys) and table.flush() there, or "
        "end it first."
    )


def _sealed(magic: bytes, body: bytes) -> bytes:
    content = struct.pack("<Q", len(magic)) + magic + body
    return content + struct.pack("<I", crc32c(content))
