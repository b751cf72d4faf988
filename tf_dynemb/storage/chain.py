"""Reading of snapshots, and of the chain of snapshots at a path."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tf_dynemb._presence import exists, is_directory, local_path
from tf_dynemb.format import crc32c, npy, safetensors
from tf_dynemb.format.errors import DataLossError
from tf_dynemb.format.manifest import MOST_BYTES, Manifest
from tf_dynemb.format.steps import Change, changes
from tf_dynemb.format.table_entry import ColumnFile

MANIFEST = "MANIFEST.json"

T = TypeVar("T")

_DIRECTORY = re.compile(r"(\d{8,})-(base|delta)-([0-9a-f]{32})")

# The maximum number of attempts, if files were removed because a newer base superseded them.
_ATTEMPTS = 5

# The errors that a missing file causes.
LOSSES = (DataLossError, FileNotFoundError)


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


def list_snapshots(path: pathlib.Path, begin: str = "") -> list[Name]:
    """Returns all snapshots at a path, including superseded ones, in order of publication.

    Args:
        path: the path.
        begin: the name of a snapshot; if it is there, those published before it are left out, so
            that a long chain is not parsed and sorted again and again.
    """
    found = os.listdir(path)
    if begin in found:
        least = _digits(begin)
        found = [name for name in found if _digits(name) >= least]
    return sorted(name for name in map(Name.parse, found) if name)


def _digits(name: str) -> tuple[int, str]:
    """Returns what orders names as their numbers do."""
    digits = name.partition("-")[0]
    return len(digits), digits


def no_snapshot(path: pathlib.Path) -> FileNotFoundError:
    """Returns the error for a path without snapshots, which says what is there."""
    if not exists(path):
        return FileNotFoundError(f"{path} holds no snapshot: it does not exist.")
    if not is_directory(path):
        return FileNotFoundError(f"{path} holds no snapshot: it is a file.")
    if exists(path / "saved_model.pb"):
        return FileNotFoundError(
            f"{path} holds no snapshot: it is a SavedModel. `tf-dynemb inspect {path}` prints "
            "where its tables are: pass that path."
        )
    there = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
    return FileNotFoundError(f"{path} holds no snapshot; in it: {there}.")


def since_last_base(names: list[Name]) -> list[Name]:
    """Returns the last base and the snapshots after it; all snapshots if there is no base."""
    bases = [i for i, name in enumerate(names) if name.kind == "base"]
    return names[bases[-1] :] if bases else names


class Snapshot:
    """A published snapshot, read-only; threads can share one.

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
                text = opened.read(MOST_BYTES + 1).decode()
        except FileNotFoundError as error:
            raise DataLossError(f"{file} is missing.") from error
        except UnicodeDecodeError as error:
            raise DataLossError(
                f"{file} is damaged: invalid UTF-8 at byte offset {error.start}."
            ) from error
        self.manifest = Manifest.from_json(text, str(file))
        for table in self.manifest.tables:
            if not table.shards:
                raise DataLossError(f"{file} is damaged: table {table.name!r} has no shards.")
        name = Name.parse(self.directory.name)
        if name and (name.kind, name.id) != (self.manifest.kind, self.manifest.id):
            raise DataLossError(
                f"{file} is of another snapshot: {self.manifest.kind}-{self.manifest.id}."
            )

    def __repr__(self) -> str:
        return f"Snapshot({str(self.directory)!r})"

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
            f"{self.directory}: table {entry.name!r} ({number}) has no column {column!r} of rank "
            f"{rank}."
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
            arrays |= safetensors.read(self.directory / files[each].file, files[each].bytes)
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
        total = sum(file.bytes for file in files)
        done = 0
        for file in files:
            for end in self._verify_file(file, checksum):
                if progress:
                    progress(done + end, total)
            done += file.bytes

    def _verify_file(self, file: ColumnFile, checksum: crc32c.Checksum) -> Iterator[int]:
        """Compares a file with its checksums; yields the offset up to which it is verified."""
        path = self._checked(file)
        block_bytes = self.manifest.block_bytes
        block = 0
        for end, found in crc32c.of_file(path, file.bytes, block_bytes, checksum):
            for value in found:
                if f"{value:08x}" != file.crc32c[8 * block : 8 * block + 8]:
                    raise DataLossError(
                        f"{path} is damaged: the CRC32C of its block of up to {block_bytes} bytes "
                        f"at byte offset {block * block_bytes} differs from that in the manifest."
                    )
                block += 1
            yield end

    def _checked(self, file: ColumnFile) -> pathlib.Path:
        """Returns the file's path if it has the size in the manifest."""
        path = self.directory / file.file
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise DataLossError(f"{path} is missing.") from error
        if size != file.bytes:
            raise DataLossError(f"{path} has {size} bytes; {MANIFEST} says {file.bytes}.")
        return path

    def _map(
        self, file: ColumnFile, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        path = self._checked(file)
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


@dataclasses.dataclass(frozen=True)
class Chain:
    """The last base at a path and the deltas after it; only deltas if there is no base."""

    base: Snapshot | None
    deltas: list[Snapshot]

    @property
    def snapshots(self) -> list[Snapshot]:
        """All snapshots, in order."""
        return [self.base, *self.deltas] if self.base else self.deltas

    @property
    def last(self) -> Snapshot:
        """The latest snapshot."""
        return self.snapshots[-1]

    @property
    def dense_source(self) -> Snapshot | None:
        """The last snapshot that has dense variables; None: no snapshot has."""
        return next((each for each in reversed(self.snapshots) if each.manifest.dense), None)

    def changes(self, name: str) -> list[Change]:
        """Returns, for each snapshot, what later steps do to rows of a table that it has.

        A row of a key that a later snapshot has, too, is the one of that snapshot.
        """
        records = []
        for snapshot in self.snapshots:
            entries = [each for each in snapshot.manifest.tables if each.name == name]
            records.append(entries[0].steps if entries else ())
        return changes(records)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Chain:
        """Opens the chain at a path, or the one snapshot whose directory is given.

        The files of the chain are not opened yet, and a new base can remove them; `load` handles
        this.

        Raises:
            FileNotFoundError: there is no snapshot.
            DataLossError: a manifest is missing or damaged, or a snapshot does not continue the
                one before it.
            ValueError: a snapshot has a version that this code does not read.
        """
        return Chain.load(path, lambda chain: chain)

    @staticmethod
    def load(path: str | os.PathLike[str], read: Callable[[Chain], T]) -> T:
        """Calls `read` with the chain at a path, and returns its result.

        If a new base has removed files meanwhile, `read` is called again, with the new chain.

        Raises:
            the errors of `open` and of `read`.
        """
        return read_again(
            lambda: Chain.names(path),
            lambda names: read(Chain.of(path, names)),
            lambda error: isinstance(error, LOSSES),
        )

    @staticmethod
    def names(path: str | os.PathLike[str], begin: str = "") -> list[str]:
        """Returns the names of the directories of a path's chain; none if it is a snapshot itself.

        Args:
            path: the path.
            begin: a name; if it is in the chain, the names before it are left out.

        Raises:
            FileNotFoundError: there is no snapshot.
        """
        path = local_path(path, "path")
        try:
            if exists(path / MANIFEST):
                return []
            names = since_last_base(list_snapshots(path, begin))
        except (NotADirectoryError, FileNotFoundError) as error:
            raise no_snapshot(path) from error
        if not names:
            raise no_snapshot(path)
        return [str(name) for name in names]

    @staticmethod
    def names_until(path: str | os.PathLike[str], until: str | int) -> list[str]:
        """Returns the names of the directories of the chain that ends with an earlier snapshot.

        Args:
            path: a path with snapshots, of which later bases may have superseded some.
            until: the id of the snapshot, or its first digits; or a time in nanoseconds since 1970
                UTC: the last snapshot that was published and is not of a later time.

        Raises:
            FileNotFoundError: there is no such snapshot; the message names the existing ones.
            ValueError: several snapshots have these first digits.
            DataLossError: a manifest is damaged.
        """
        path = local_path(path, "path")
        try:
            names = list_snapshots(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise no_snapshot(path) from error
        if isinstance(until, int):
            what = "that was written then or before"
            found = [
                place
                for place, name in enumerate(names)
                if Snapshot(path / str(name)).manifest.watermark_utc_ns <= until
            ][-1:]
        else:
            what = until
            found = [place for place, name in enumerate(names) if name.id.startswith(until)]
            if not found:  # a base may have the state of one that is no longer there
                found = [
                    place
                    for place, name in enumerate(names)
                    if name.kind == "base"
                    and any(i.startswith(until) for i in Snapshot(path / str(name)).manifest.ids)
                ]
        if not found:
            there = ", ".join(f"{name.id[:8]} ({name.kind})" for name in names[-20:]) or "none"
            raise FileNotFoundError(f"{path} holds no snapshot {what}; those there: {there}.")
        if len(found) > 1:
            raise ValueError(f"{path} holds several snapshots {what}; pass more digits of the id.")
        return [str(name) for name in since_last_base(names[: found[0] + 1])]

    @staticmethod
    def of(path: str | os.PathLike[str], names: Sequence[str]) -> Chain:
        """Opens the chain with the names that `names` returned; raises the errors of `open`."""
        path = local_path(path, "path")
        snapshots = [Snapshot(path / name) for name in names] or [Snapshot(path)]
        for before, after in itertools.pairwise(snapshots):
            if after.manifest.parent not in before.manifest.ids:
                raise DataLossError(
                    f"a gap before {after.directory}: it continues snapshot "
                    f"{after.manifest.parent}, but before it is {before.manifest.id} "
                    f"({before.directory})."
                )
        base = snapshots[0] if snapshots[0].manifest.kind == "base" else None
        return Chain(base, snapshots[1:] if base else snapshots)


def read_again(
    list_names: Callable[[], list[str]],
    read: Callable[[list[str]], T],
    is_loss: Callable[[Exception], bool],
) -> T:
    """Calls `read` with the names of a chain; calls it again if a new base has superseded them.

    Args:
        list_names: returns the result of `Chain.names` for a path.
        read: called with the names.
        is_loss: returns whether missing files may have caused an error of `read`.

    Raises:
        the errors of `read` and `list_names`.
    """
    names = list_names()
    for _ in range(_ATTEMPTS - 1):
        try:
            return read(names)
        except Exception as error:
            if not is_loss(error):
                raise
            found = list_names()
            if found[:1] == names[:1]:  # the snapshots that were read have not been superseded
                raise
            names = found
    return read(names)
