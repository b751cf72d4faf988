"""`verify`: checks every byte of a chain, and the rules of docs/file_format.md on its content."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tf_dynemb._presence import exists, is_directory, is_file
from tf_dynemb.cli import paths
from tf_dynemb.format import crc32c, key_index, npy, safetensors
from tf_dynemb.format.table_entry import INDEX_ROWS
from tf_dynemb.serving.keys import Keys
from tf_dynemb.storage import ColumnFile, DataLossError, DenseFile, Shard, Snapshot, TableEntry
from tf_dynemb.storage.chain import MANIFEST, list_snapshots, no_snapshot, since_last_base

# Keys per iteration, and the number of problems of one kind that are named for a file.
_CHUNK = 1 << 16
_NAMED = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("path", metavar="PATH", type=paths.argument)
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Checks files, checksums, keys and indexes; exit code 1 if anything is wrong."""
    directories = _directories(paths.chain_of(options.path))
    problems = list(_chain_problems(directories))
    if options.json:
        print(json.dumps({"problems": [dataclasses.asdict(p) for p in problems]}, indent=1))
    else:
        for problem in problems:
            print(problem)
        print(f"snapshots: {len(directories)}, problems: {len(problems)}")
    return int(bool(problems))


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem: its file or snapshot, its byte offset if it is known, and its description."""

    file: str
    offset: int | None
    problem: str

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at byte offset {self.offset}"
        return f"{self.file}{at}: {self.problem}"


def _directories(path: pathlib.Path) -> list[pathlib.Path]:
    if exists(path / MANIFEST):
        return [path]
    names = since_last_base(list_snapshots(path)) if is_directory(path) else []
    if not names:
        raise no_snapshot(path)
    return [path / str(name) for name in names]


def _chain_problems(directories: list[pathlib.Path]) -> Iterator[Problem]:
    before = None
    for directory in directories:
        try:
            snapshot = Snapshot(directory)
        except ValueError as error:
            yield Problem(str(directory / MANIFEST), None, str(error))
            before = None
            continue
        if directory is not directories[0]:
            yield from _gap(before, snapshot)
        for entry in snapshot.manifest.tables:
            yield from _table_problems(snapshot, entry)
        for file in snapshot.manifest.dense:
            yield from _dense_problems(snapshot, file)
        before = snapshot


def _gap(before: Snapshot | None, after: Snapshot) -> Iterator[Problem]:
    if before is None:
        yield Problem(str(after.directory), None, "the snapshot before it cannot be read")
    elif (
        after.manifest.parent not in before.manifest.ids
        or after.manifest.since > before.manifest.watermark
    ):
        yield Problem(
            str(after.directory),
            None,
            f"a gap: it continues snapshot {after.manifest.parent} since {after.manifest.since}, "
            f"but before it is {before.manifest.id} up to {before.manifest.watermark}",
        )


def _table_problems(snapshot: Snapshot, entry: TableEntry) -> Iterator[Problem]:
    checked: list[_Keys] = []
    for shard in entry.shards:
        sound = set()
        for column, file in shard.files.items():
            is_known = column in entry.columns(snapshot.manifest.kind, shard)
            header = npy.header(*entry.column_type(column, shard)) if is_known else b""
            problems = list(_file_problems(snapshot, file, header))
            yield from problems
            if not problems:
                sound.add(column)
        if "keys" in sound and shard.rows < INDEX_ROWS:
            columns = [_Keys(snapshot, entry, shard)]
            if "index" in sound:
                yield from columns[0].index_problems()
            if "deleted" in sound:
                columns.append(_Keys(snapshot, entry, shard, "deleted"))
            # A key occurs once in all shards together: one rank holds it, or one has deleted it.
            for keys in columns:
                yield from keys.repeated(keys)
                for other in checked:
                    yield from keys.repeated(other)
                checked.append(keys)


def _dense_problems(snapshot: Snapshot, file: DenseFile) -> Iterator[Problem]:
    problems = list(_file_problems(snapshot, file, b""))
    yield from problems
    if not problems:
        try:
            safetensors.read(snapshot.directory / file.file, file.bytes)
        except DataLossError as error:
            yield Problem(str(snapshot.directory / file.file), None, str(error))


def _file_problems(snapshot: Snapshot, file: ColumnFile, header: bytes) -> Iterator[Problem]:
    """The problems of a file, which must begin with a header."""
    path = snapshot.directory / file.file
    if not is_file(path):
        yield Problem(str(path), None, "the file is missing")
        return
    size = path.stat().st_size
    if size != file.bytes:
        yield Problem(str(path), min(size, file.bytes), f"{size} bytes instead of {file.bytes}")
        return
    with path.open("rb") as opened:
        if opened.read(len(header)) != header:
            yield Problem(str(path), 0, "the header does not match the manifest")
    block_bytes = snapshot.manifest.block_bytes
    block = bad = 0
    for _, checksums in crc32c.of_file(path, size, block_bytes, crc32c.blocks):
        for checksum in checksums:
            if f"{checksum:08x}" != file.crc32c[8 * block : 8 * block + 8]:
                bad += 1
                if bad <= _NAMED:
                    what = f"the CRC32C of the block of {block_bytes} bytes is wrong"
                    yield Problem(str(path), block * block_bytes, what)
            block += 1
    if bad > _NAMED:
        yield Problem(str(path), None, f"{bad - _NAMED} more such blocks")


class _Keys:
    """A column of keys, and an index that is built for it."""

    def __init__(
        self, snapshot: Snapshot, entry: TableEntry, shard: Shard, column: str = "keys"
    ) -> None:
        self._snapshot, self._entry, self._shard = snapshot, entry, shard
        self._column = column
        self._path = snapshot.directory / shard.files[column].file
        self._keys: Keys = np.asarray(snapshot.column(entry.name, column, shard.rank))
        # Not the snapshot's index, which can be wrong.
        self._index, self._salt = key_index.build(self._keys)

    def index_problems(self) -> Iterator[Problem]:
        """The problems of the snapshot's own index of these keys."""
        path = str(self._snapshot.directory / self._shard.files["index"].file)
        index = self._snapshot.column(self._entry.name, "index", self._shard.rank)
        entries = np.count_nonzero(index)
        if entries != self._keys.size:
            yield Problem(path, None, f"{entries} entries for {self._keys.size} keys")
        lost = 0
        try:
            for begin, chunk in self._chunks():
                missing = np.flatnonzero(
                    key_index.find(index, self._keys, chunk, self._shard.index_salt) < 0
                )
                for i in missing[: max(0, _NAMED - lost)]:
                    yield Problem(path, None, f"key {chunk[i]} is not found (row {begin + i})")
                lost += missing.size
        except DataLossError as error:
            yield Problem(path, None, str(error))
        if lost > _NAMED:
            yield Problem(path, None, f"{lost - _NAMED} more such keys")

    def repeated(self, other: _Keys) -> Iterator[Problem]:
        """The keys that are also in another column, or earlier in this one (`other` is self)."""
        bad = 0
        for begin, chunk in self._chunks():
            first = key_index.find(other._index, other._keys, chunk, other._salt)
            twice = first >= 0
            if other is self:
                twice &= first != np.arange(begin, begin + chunk.size)
            for i in np.flatnonzero(twice)[: max(0, _NAMED - bad)]:
                where = f"{other._path.name} at byte offset {other._offset(first[i])}"
                yield Problem(
                    str(self._path),
                    self._offset(begin + i),
                    f"key {chunk[i]} is in {where} too",
                )
            bad += int(twice.sum())
        if bad > _NAMED:
            yield Problem(str(self._path), None, f"{bad - _NAMED} more such keys")

    def _chunks(self) -> Iterator[tuple[int, Keys]]:
        for begin in range(0, self._keys.size, _CHUNK):
            yield begin, self._keys[begin : begin + _CHUNK]

    def _offset(self, position: int | np.integer[Any]) -> int:
        return npy.HEADER_BYTES + int(position) * self._keys.dtype.itemsize
