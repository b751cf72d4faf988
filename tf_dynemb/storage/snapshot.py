"""Snapshots: their names, and the reading of one in a directory."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb import _html
from tf_dynemb._presence import exists
from tf_dynemb.format import crc32c, npy, safetensors
from tf_dynemb.format.errors import DataLossError
from tf_dynemb.format.manifest import MOST_BYTES, DenseFile, Manifest
from tf_dynemb.format.table_entry import ColumnFile, TableEntry

MANIFEST = "MANIFEST.json"

_DIRECTORY = re.compile(r"(\d{8,})-(base|delta)-([0-9a-f]{32})")


@dataclasses.dataclass(frozen=True, order=True)
class Name:
    """The name of a snapshot's directory: NUMBER-KIND-ID."""

    number: int
    kind: str
    id: str

    def __str__(self) -> str:
        return f"{self.number:08d}-{self.kind}-{self.id}"

    @staticmethod
    def parse(name: str) -> Name | None:
        """Parses the name of a directory; None if it is not the name of a snapshot."""
        match = _DIRECTORY.fullmatch(name)
        return Name(int(match[1]), match[2], match[3]) if match else None


def since_last_base(names: list[Name]) -> list[Name]:
    """Returns the last base and the snapshots after it; all snapshots if there is no base."""
    bases = [i for i, name in enumerate(names) if name.kind == "base"]
    return names[bases[-1] :] if bases else names


def next_number(names: Sequence[Name]) -> int:
    """Returns the number of the snapshot after those of a place, which are in order."""
    return names[-1].number + 1 if names else 1


def superseded(names: list[Name], keep: int) -> list[Name]:
    """Returns the snapshots before the last bases: before the last one, and `keep` before it."""
    bases = [place for place, name in enumerate(names) if name.kind == "base"]
    return names[: bases[-1 - min(keep, len(bases) - 1)]] if bases else []


def manifest_of(text: bytes, name: Name | None, where: str) -> Manifest:
    """Returns the manifest of a published snapshot.

    Args:
        text: the content of its file.
        name: the name of the snapshot, if it is known.
        where: the place of the file, for errors.

    Raises:
        DataLossError: it is damaged, or of another snapshot.
        ValueError: it is of an unknown version.
    """
    try:
        manifest = Manifest.from_json(text.decode(), where)
    except UnicodeDecodeError as error:
        raise DataLossError(
            f"{where} is damaged: invalid UTF-8 at byte offset {error.start}."
        ) from error
    for table in manifest.tables:
        if not table.shards:
            raise DataLossError(f"{where} is damaged: table {table.name!r} has no shards.")
    if name and (name.kind, name.id) != (manifest.kind, manifest.id):
        raise DataLossError(f"{where} is of another snapshot: {manifest.kind}-{manifest.id}.")
    return manifest


class Snapshot:
    """A published snapshot, read-only; threads can share one. str(snapshot) is its place.

    Attributes:
        directory: its directory.
        manifest: its manifest.

    Raises:
        DataLossError: MANIFEST.json is missing or damaged, or belongs to another snapshot.
        ValueError: the snapshot has a version that this code does not read.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = pathlib.Path(directory)
        file = self.directory / MANIFEST
        try:
            with file.open("rb") as opened:
                text = opened.read(MOST_BYTES + 1)
        except FileNotFoundError as error:
            raise DataLossError(f"{file} is missing.") from error
        self.manifest = manifest_of(text, Name.parse(self.directory.name), str(file))

    def __str__(self) -> str:
        return str(self.directory)

    def __repr__(self) -> str:
        return f"Snapshot({str(self)!r})"

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the rows and bytes, and the tables."""
        manifest = self.manifest
        lines = {
            **_html.watermark(manifest.id, manifest.watermark, manifest.watermark_utc),
            "continues": (manifest.parent or "")[:8],
            manifest.kind: content([self]),
            **forms(manifest.tables),
            "extra": str(manifest.extra or ""),
        }
        return _html.table(f"Snapshot {self}", lines)

    def column(self, table: int | str, column: str, rank: int = 0) -> npt.NDArray[Any]:
        """Returns a column of a table's shard, mapped from its file.

        This checks the header and the size of the file; only `verify` checks its content.

        Args:
            table: the number or name of the table.
            column: the name of the column in docs/file_format.md; "state" only for tables that have
                state.
            rank: the rank of the shard.

        Returns:
            A read-only array [rows, ...]; bfloat16 vectors as the uint16 of their bits.

        Raises:
            KeyError: there is no such table, shard or column.
            DataLossError: the file is missing, or does not match the manifest.
        """
        number, entry = self.manifest.table(table)
        for shard in entry.shards:
            if shard.rank == rank and column in shard.files:
                dtype, shape = entry.column_type(column, shard)
                return self._map(shard.files[column], dtype, shape)
        raise KeyError(
            f"{self}: table {entry.name!r} ({number}) has no column {column!r} of rank {rank}."
        )

    @property
    def files(self) -> list[ColumnFile]:
        """All files of the snapshot, except its manifest."""
        return [file for file, _ in self.manifest.files_of_ranks]

    def dense(self, part: str, rank: int = 0) -> dict[str, safetensors.Array] | None:
        """Returns dense variables, mapped from their file; None if the snapshot has no such part.

        This checks the form and the size of the file; only `verify` checks its content.

        Args:
            part: "weights" or "training".
            rank: the rank whose values are returned, as far as they differ from rank 0's.

        Raises:
            DataLossError: the file is missing, or does not match the manifest.
        """
        files = {file.rank: file for file in self.manifest.dense if file.part == part}
        if not files:
            return None
        arrays: dict[str, safetensors.Array] = {}
        for each in sorted({0, rank} & files.keys()):
            arrays |= self.arrays(files[each])
        return arrays

    def verify(
        self,
        checksum: crc32c.Checksum = crc32c.blocks,
        progress: Callable[[int, int], None] | None = None,
        files: Sequence[ColumnFile] | None = None,
    ) -> None:
        """Reads files and compares them with their checksums.

        Args:
            checksum: a faster function that is equivalent to `crc32c.blocks`.
            progress: called with the number of bytes verified so far and in total.
            files: the files to verify; None: all.

        Raises:
            DataLossError: a file is missing or differs; the message names the first such file, and
                the offset.
        """
        files = self.files if files is None else files
        self._expect(files)
        total = sum(file.bytes for file in files)
        done = 0
        for file in files:
            for part in self.read(file, checksum):
                done += part.size
                if progress:
                    progress(done, total)

    def _expect(self, files: Sequence[ColumnFile]) -> None:
        """Notes that files will be read, one after the other."""

    def read(
        self, file: ColumnFile, checksum: crc32c.Checksum = crc32c.blocks
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Reads a file, and compares it with its checksums.

        Args:
            file: the file.
            checksum: as of `verify`.

        Yields:
            uint8 [n], some verified bytes; the next ones take their place in memory.

        Raises:
            DataLossError: the file is missing or differs; the message has the offset.
        """
        block_bytes = self.manifest.block_bytes
        block = 0
        for part in self.parts(file):
            for value in checksum(part, 0, block_bytes, block_bytes):
                if f"{value:08x}" != file.crc32c[8 * block : 8 * block + 8]:
                    raise DataLossError(
                        f"{self}/{file.file} is damaged: the CRC32C of its block of up to "
                        f"{block_bytes} bytes at byte offset {block * block_bytes} differs from "
                        "the CRC32C in the manifest."
                    )
                block += 1
            yield part

    def parts(self, file: ColumnFile) -> Iterator[npt.NDArray[np.uint8]]:
        """Reads a file, some blocks of checksums at a time; see `read`.

        Raises:
            DataLossError: the file is missing, or has another size than in the manifest.
        """
        self._check_size(file)
        path = self.directory / file.file
        yield from crc32c.parts_of(path, file.bytes, self.manifest.block_bytes)

    def arrays(self, file: DenseFile) -> dict[str, safetensors.Array]:
        """Returns the arrays of a file of dense variables; raises as `dense`."""
        return safetensors.read(self.directory / file.file, file.bytes)

    def size(self, file: ColumnFile) -> int | None:
        """Returns the size that a file has, in bytes; None if it is missing."""
        path = self.directory / file.file
        return path.stat().st_size if exists(path) else None

    def _check_size(self, file: ColumnFile) -> None:
        """Raises DataLossError if a file does not have the size in the manifest."""
        size = self.size(file)
        if size is None:
            raise DataLossError(f"{self}/{file.file} is missing.")
        if size != file.bytes:
            raise DataLossError(
                f"{self}/{file.file} has {size} bytes; {MANIFEST} says {file.bytes}."
            )

    def _map(
        self, file: ColumnFile, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        self._check_size(file)
        path = self.directory / file.file
        expected = npy.header(dtype, shape)
        try:
            with path.open("rb") as opened:
                if opened.read(len(expected)) != expected:
                    raise DataLossError(
                        f"{path} is damaged at byte offset 0: its header is not the header of "
                        f"{dtype} {list(shape)}."
                    )
                if 0 not in shape:
                    return np.memmap(opened, dtype, "r", len(expected), shape)
        except FileNotFoundError as error:
            raise DataLossError(f"{path} is missing.") from error
        empty = np.empty(shape, dtype)
        empty.flags.writeable = False
        return empty


def content(snapshots: Sequence[Snapshot]) -> str:
    """Returns how much snapshots have, as text."""
    tables = [entry for each in snapshots for entry in each.manifest.tables]
    rows = sum(shard.rows for entry in tables for shard in entry.shards)
    deleted = sum(shard.deleted for entry in tables for shard in entry.shards)
    count = sum(file.bytes for each in snapshots for file in each.files)
    keys = f", {deleted:,} deleted" if deleted else ""
    return f"{rows:,} rows{keys}, {_html.size(count)}"


def forms(tables: Iterable[TableEntry]) -> dict[str, str]:
    """Returns lines with the types of tables."""
    return {
        f"table {entry.name}": f"{entry.key_type} to {entry.dimension} x {entry.stored_as}"
        for entry in tables
    }
