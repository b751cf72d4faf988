"""`verify`: checks every byte of a chain, and the rules of docs/file_format.md on its content."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tf_dynemb.cli import paths
from tf_dynemb.format import crc32c, key_index, npy
from tf_dynemb.format.table_entry import INDEX_ROWS
from tf_dynemb.serving.keys import Keys
from tf_dynemb.storage import ColumnFile, DataLossError, DenseFile, Shard, Snapshot, TableEntry
from tf_dynemb.storage.place import Place
from tf_dynemb.storage.places import place_of
from tf_dynemb.storage.snapshot import MANIFEST, since_last_base

# Keys per iteration, and the number of problems of one kind that are named for a file.
_CHUNK = 1 << 16
_NAMED = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("path", metavar="PATH", type=paths.path_or_url)
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Checks files, checksums, keys and indexes; exit code 1 if anything is wrong."""
    place = place_of(paths.chain_of(options.path))
    names = [str(name) for name in since_last_base(place.names())]
    if not names and not place.is_snapshot:
        raise place.absent()
    problems = list(_chain_problems(place, names or [""]))
    if options.json:
        print(json.dumps({"problems": [dataclasses.asdict(p) for p in problems]}, indent=1))
    else:
        for problem in problems:
            print(problem)
        print(f"snapshots: {len(names) or 1}, problems: {len(problems)}")
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


def _chain_problems(place: Place, names: Sequence[str]) -> Iterator[Problem]:
    before = None
    for name in names:
        try:
            snapshot = place.open([name] if name else [])[0]
        except ValueError as error:
            yield Problem("/".join(filter(None, [str(place), name, MANIFEST])), None, str(error))
            before = None
            continue
        if name != names[0]:
            yield from _gap(before, snapshot)
        for entry in snapshot.manifest.tables:
            yield from _table_problems(snapshot, entry)
        for file in snapshot.manifest.dense:
            yield from _dense_problems(snapshot, file)
        before = snapshot


def _gap(before: Snapshot | None, after: Snapshot) -> Iterator[Problem]:
    if before is None:
        yield Problem(str(after), None, "the snapshot before it cannot be read")
    elif (
        after.manifest.parent not in before.manifest.ids
        or after.manifest.since > before.manifest.watermark
    ):
        yield Problem(
            str(after),
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
            snapshot.arrays(file)
        except DataLossError as error:
            yield Problem(f"{snapshot}/{file.file}", None, str(error))


def _file_problems(snapshot: Snapshot, file: ColumnFile, header: bytes) -> Iterator[Problem]:
    """The problems of a file, which must begin with a header."""
    path = f"{snapshot}/{file.file}"
    size = snapshot.size(file)
    if size is None:
        yield Problem(path, None, "the file is missing")
        return
    if size != file.bytes:
        yield Problem(path, min(size, file.bytes), f"{size} bytes instead of {file.bytes}")
        return
    block_bytes = snapshot.manifest.block_bytes
    block = bad = 0
    for part in snapshot.parts(file):
        if not block and part[: len(header)].tobytes() != header:
            yield Problem(path, 0, "the header does not match the manifest")
        for checksum in crc32c.blocks(part, 0, block_bytes, block_bytes):
            if f"{checksum:08x}" != file.crc32c[8 * block : 8 * block + 8]:
                bad += 1
                if bad <= _NAMED:
                    what = f"the CRC32C of the block of {block_bytes} bytes is wrong"
                    yield Problem(path, block * block_bytes, what)
            block += 1
    if bad > _NAMED:
        yield Problem(path, None, f"{bad - _NAMED} more such blocks")


class _Keys:
    """A column of keys, and an index that is built for it."""

    def __init__(
        self, snapshot: Snapshot, entry: TableEntry, shard: Shard, column: str = "keys"
    ) -> None:
        self._snapshot, self._entry, self._shard = snapshot, entry, shard
        self._column = column
        self._path = f"{snapshot}/{shard.files[column].file}"
        self._keys: Keys = np.asarray(snapshot.column(entry.name, column, shard.rank))
        # Not the snapshot's index, which can be wrong.
        self._index, self._salt = key_index.build(self._keys)

    def index_problems(self) -> Iterator[Problem]:
        """The problems of the snapshot's own index of these keys."""
        path = f"{self._snapshot}/{self._shard.files['index'].file}"
        index = np.asarray(self._snapshot.column(self._entry.name, "index", self._shard.rank))
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
                where = f"{other._path.rpartition('/')[2]} at byte offset {other._offset(first[i])}"
                yield Problem(
                    self._path,
                    self._offset(begin + i),
                    f"key {chunk[i]} is in {where} too",
                )
            bad += int(twice.sum())
        if bad > _NAMED:
            yield Problem(self._path, None, f"{bad - _NAMED} more such keys")

    def _chunks(self) -> Iterator[tuple[int, Keys]]:
        for begin in range(0, self._keys.size, _CHUNK):
            yield begin, self._keys[begin : begin + _CHUNK]

    def _offset(self, position: int | np.integer[Any]) -> int:
        return npy.HEADER_BYTES + int(position) * self._keys.dtype.itemsize
