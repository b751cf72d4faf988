"""The copies of keys below some paths: in snapshots, remains of unfinished ones, and flushes."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import stat
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb._presence import exists, is_directory
from tf_dynemb.chains import counters, flushes
from tf_dynemb.chains.saved_models import is_model, served_tables
from tf_dynemb.format import npy
from tf_dynemb.format.table_entry import KEY_TYPES
from tf_dynemb.serving.keys import Keys
from tf_dynemb.serving.string_hash import ids_of_strings
from tf_dynemb.storage import Snapshot, TableEntry
from tf_dynemb.storage.local_place import UNPUBLISHED
from tf_dynemb.storage.snapshot import MANIFEST, Name

# Keys per iteration.
_CHUNK = 1 << 20

_FLUSH = re.compile(rf"flush-[0-9]{{1,18}}({re.escape(flushes.NEW)})?")
# `forget` removes a file or folder as a whole only if its name is one that this package gives.
_UNFINISHED = re.compile(rf"{re.escape(UNPUBLISHED)}[0-9a-f]{{32}}(-dropped)?")
_RUNNING = re.compile(r"rows-[0-9]+-[0-9]+")
_FILE = re.compile(
    r"[0-9]{3,}\.r[0-9]+\.[a-z]+(\.[0-9a-f]{16})?\.npy|dense\.r[0-9]+\.[a-z]+\.safetensors"
)

Positions = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Query:
    """Keys as a user writes them.

    Attributes:
        texts: the keys.
        integers: how the keys of tables that hash strings are written: True: as integers; False:
            as strings; None: any of the two.
    """

    texts: tuple[bytes, ...]
    integers: bool | None
    _of: dict[tuple[str, bool], Keys] = dataclasses.field(default_factory=dict, compare=False)

    def of(self, entry: TableEntry) -> Keys:
        """Returns the keys that a table can have."""
        form = entry.key_type, entry.string_hash is not None
        if form not in self._of:  # a chain may have thousands of snapshots
            self._of[form] = self._keys_of(entry)
        return self._of[form]

    def _keys_of(self, entry: TableEntry) -> Keys:
        key_type = KEY_TYPES[entry.key_type]
        both = self.integers is None and entry.string_hash is not None
        as_integers = entry.string_hash is None or self.integers is True
        found = [*(self._numbers() if as_integers or both else ())]
        if entry.string_hash is not None and self.integers is not True:
            found += self._hashes()
        limits = np.iinfo(key_type)
        return np.unique(
            np.array([n for n in found if limits.min <= n <= limits.max], dtype=key_type)
        )

    def bits(self, hashes_strings: bool | None) -> npt.NDArray[np.uint64]:
        """Returns the bits of the keys in a table of an unknown key type.

        Args:
            hashes_strings: whether the table hashes strings. None: not known, so that texts that
                are not integers are strings.
        """
        numbers = [] if hashes_strings and self.integers is False else self._numbers()
        if hashes_strings is not False and self.integers is not True:
            numbers += self._hashes(only_texts=hashes_strings is None and self.integers is False)
        # An int32 key is its 32 bits, zero-extended.
        narrow = [n % 2**32 for n in numbers if -(2**31) <= n < 0]
        wide = [n % 2**64 for n in numbers if -(2**63) <= n < 2**64]
        return np.unique(np.array(narrow + wide, np.uint64))

    def _numbers(self) -> list[int]:
        numbers = []
        for text in self.texts:
            try:
                numbers.append(int(text))
            except ValueError:
                continue
        return numbers

    def _hashes(self, only_texts: bool = False) -> list[int]:
        strings = [text for text in self.texts if not only_texts or not _is_number(text)]
        array = np.empty(len(strings), object)
        array[:] = strings
        hashes: list[int] = ids_of_strings(array).tolist()
        return hashes


@dataclasses.dataclass(frozen=True)
class Copy:
    """Keys that are in a file.

    Attributes:
        place: the snapshot or flush, or what is left of one.
        table: the name of the table; None: not known.
        what: "row"; "deleted", in the list of deleted keys; "counter", an admission counter that
            may be of the key; "forgotten", in the list of keys that a flush leaves out; "remains",
            a file that no snapshot has.
        keys: how many of the keys.
        file: the file that has the keys.
    """

    place: pathlib.Path
    table: str | None
    what: str
    keys: int
    file: pathlib.Path


def places(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Returns the snapshots, flushes and remains of them below some paths, each once.

    Symbolic links below the paths are not followed; tables of SavedModels that are elsewhere are.

    Raises:
        FileNotFoundError: a path does not exist.
        OSError: the file system did not answer.
    """
    found: dict[pathlib.Path, pathlib.Path] = {}
    pending = list(paths)
    for path in pending:
        if not is_directory(path):
            raise FileNotFoundError(f"{path} is not a folder.")
    while pending:
        path = pending.pop(0)
        for place in _below(path):
            if is_model(place):
                outside = [each.path for each in served_tables(place) if not each.is_inside]
                pending += [each for each in outside if is_directory(each)]
            else:
                found.setdefault(pathlib.Path(os.path.realpath(place)), place)
    return list(found.values())


def _below(path: pathlib.Path) -> Iterator[pathlib.Path]:
    if is_model(path):
        yield path
    name = path.name
    is_flush = _FLUSH.fullmatch(name) and path.resolve().parent.name.endswith(flushes.ENDING)
    if exists(path / MANIFEST) or is_flush or _is_unfinished(path):
        yield path
        return
    if _RUNNING.fullmatch(name) and exists(path / "LOCK"):
        yield path
        return
    # Snapshots in the order of their publication.
    for name in sorted(os.listdir(path), key=lambda each: Name.parse(each) or Name(0, "", each)):
        try:
            is_folder = stat.S_ISDIR(os.lstat(path / name).st_mode)
        except FileNotFoundError:  # its process has removed it meanwhile
            continue
        if is_folder:
            yield from _below(path / name)


def _is_unfinished(path: pathlib.Path) -> bool:
    """Whether a folder is a snapshot that is being written, or was not published."""
    return (
        _UNFINISHED.fullmatch(path.name) is not None
        and exists(path.parent / "LOCK")
        and all(name == MANIFEST or _FILE.fullmatch(name) for name in os.listdir(path))
    )


def is_snapshot(place: pathlib.Path) -> bool:
    """Whether a place is a published snapshot."""
    return exists(place / MANIFEST) and not _is_unfinished(place)


def is_flush(place: pathlib.Path) -> bool:
    """Whether a place is a flush of a persistent table."""
    return _FLUSH.fullmatch(place.name) is not None


def is_unfinished_flush(place: pathlib.Path) -> bool:
    """Whether a flush is not complete, or is what a killed process has left of one."""
    return place.name.endswith(flushes.NEW) or not exists(place / flushes.MANIFEST)


def is_running(place: pathlib.Path) -> bool:
    """Whether a place has the files of a table in files that runs, or whose process was killed."""
    return _RUNNING.fullmatch(place.name) is not None


def table_of_flush(place: pathlib.Path) -> str:
    """Returns the name of the table of a flush."""
    folder = place.resolve().parent.name
    return urllib.parse.unquote(folder.removesuffix(flushes.ENDING))


def positions(column: npt.NDArray[Any], keys: Keys) -> Positions:
    """Returns where some keys are in a column of keys."""
    found = [np.zeros(0, np.int64)]
    for begin in range(0, column.size if keys.size else 0, _CHUNK):
        chunk = np.asarray(column[begin : begin + _CHUNK])
        found.append(begin + np.flatnonzero(np.isin(chunk, keys)))
    return np.concatenate(found)


def in_snapshot(
    snapshot: Snapshot, query: Query, tables: Sequence[str] | None = None
) -> Iterator[Copy]:
    """Returns the copies of keys in a snapshot, and what is left of its rewriting.

    Raises:
        DataLossError: the snapshot's keys are damaged.
    """
    with_keys = [
        file
        for entry in snapshot.manifest.tables
        for shard in entry.shards
        for column, file in shard.files.items()
        if column in ("keys", "deleted", "admission")
    ]
    snapshot.verify(files=with_keys)
    for entry in snapshot.manifest.tables:
        if tables is not None and entry.name not in tables:
            continue
        keys = query.of(entry)
        for shard in entry.shards:
            for column, what in (("keys", "row"), ("deleted", "deleted")):
                if column not in shard.files:
                    continue
                values = snapshot.column(entry.name, column, shard.rank)
                count = len(positions(values, keys))
                if count:
                    file = snapshot.directory / shard.files[column].file
                    yield Copy(snapshot.directory, entry.name, what, count, file)
            if shard.admission_lines and entry.admission_lines:
                lines = snapshot.column(entry.name, "admission", shard.rank)
                counted = counters.counted(
                    lines, keys, shard.first_admission_line, entry.admission_lines
                )
                if counted:
                    file = snapshot.directory / shard.files["admission"].file
                    yield Copy(snapshot.directory, entry.name, "counter", counted, file)
    bits = query.bits(None)
    for file in remains_of(snapshot):
        count = _in_raw_keys(file, bits) if _has_keys(file) else 0
        # The rows of the other columns are not known.
        if count or not _has_keys(file):
            yield Copy(snapshot.directory, None, "remains", count, file)


def remains_of(snapshot: Snapshot) -> list[pathlib.Path]:
    """Returns the column files in the directory of a snapshot that it does not have.

    They are left if a process that replaces files of the snapshot is killed.
    """
    known = {file.file for file in snapshot.files}
    names = sorted(os.listdir(snapshot.directory))
    return [
        snapshot.directory / name for name in names if _FILE.fullmatch(name) and name not in known
    ]


def in_unfinished(place: pathlib.Path, query: Query) -> Iterator[Copy]:
    """Returns the copies of keys in a snapshot that was not published."""
    bits = query.bits(None)
    for name in sorted(os.listdir(place)):
        if _FILE.fullmatch(name) and _has_keys(place / name):
            count = _in_raw_keys(place / name, bits)
            if count:
                yield Copy(place, None, "remains", count, place / name)


def _has_keys(file: pathlib.Path) -> bool:
    return file.name.split(".")[2] in ("keys", "deleted")


def _in_raw_keys(file: pathlib.Path, bits: npt.NDArray[np.uint64]) -> int:
    """Returns the number of keys in a file of keys whose header can be missing."""
    with file.open("rb") as opened:
        header = opened.read(npy.HEADER_BYTES)
    data = np.fromfile(file, np.uint8, offset=min(len(header), npy.HEADER_BYTES))
    found = 0
    if b"'<i4'" not in header:
        found = len(positions(data[: data.size // 8 * 8].view(np.uint64), bits))
    if b"'<i8'" not in header and b"'<u8'" not in header:
        narrow = bits[bits < 2**32].astype(np.uint32)
        found = max(found, len(positions(data[: data.size // 4 * 4].view(np.uint32), narrow)))
    return found


def in_flush(place: pathlib.Path, query: Query, hashes_strings: bool | None) -> Iterator[Copy]:
    """Returns the copies of keys in a flush of a persistent table."""
    name = table_of_flush(place)
    flush = flushes.Flush(place)
    bits = query.bits(hashes_strings)
    for file, rows in flush.rows_of(bits).items():
        yield Copy(place, name, "row", len(rows), file)
    noted = len(np.intersect1d(flush.forgotten, bits))
    if noted:
        yield Copy(place, name, "forgotten", noted, flush.path / flushes.FORGOTTEN)


def _is_number(text: bytes) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True
