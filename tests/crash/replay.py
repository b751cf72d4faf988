"""The states in which a crash can leave the files that a recorded process wrote.

A trace (recorder.c) is fed to a `Disk`, record by record. At any point, some operations are durable
and the others are pending; a crash keeps any of the pending ones that the model permits.

POSIX, the strict model: a sync of a file makes its contents durable, and not its names. A sync of a
directory makes its names durable, and not the contents of the files. Any subset of all other
operations may be lost. A change of a name is atomic. A write is not: any of its sectors may be
lost. A file that a write made longer may have its new size without the bytes, which then read as
zeros.

ORDERED is what ext4 does with data=ordered: names change in the order of the calls, every sync
makes all of them durable, and a file does not get longer without its bytes.

A sync that fails makes nothing durable. `forgets` is what Linux does with the pages of the file
then: they count as written, and no later sync writes them.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import pathlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np


class Kind(enum.IntEnum):
    """As in recorder.c."""

    CREATE = 1
    MKDIR = 2
    WRITE = 3
    TRUNCATE = 4
    SYNC = 5
    RENAME = 6
    LINK = 7
    UNLINK = 8
    RMDIR = 9
    MARK = 10
    UNKNOWN = 11


T = TypeVar("T")

_HEAD = struct.Struct("<IiQQIIQ")


@dataclasses.dataclass(frozen=True)
class Record:
    """A call, or a mark. `path` begins with / and is relative to the folder."""

    kind: Kind
    error: int
    inode: int
    offset: int
    path: str
    other: str
    data: bytes

    def __str__(self) -> str:
        words = [self.kind.name, self.path, self.other]
        if self.kind in (Kind.WRITE, Kind.TRUNCATE):
            words.append(f"inode {self.inode} at {self.offset}, {len(self.data)} bytes")
        if self.error:
            words.append(f"failed: {os.strerror(self.error)}")
        return " ".join(word for word in words if word)


def read_trace(path: str | os.PathLike[str]) -> list[Record]:
    """Reads a trace; raises ValueError if a call in it was not understood."""
    data = pathlib.Path(path).read_bytes()
    records = []
    at = 0
    while at < len(data):
        kind, error, inode, offset, *sizes = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        parts = []
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        texts = [part.decode() for part in parts[:2]]
        records.append(Record(Kind(kind), error, inode, offset, *texts, parts[2]))
        if kind == Kind.UNKNOWN:
            raise ValueError(f"the recorder cannot follow {records[-1]}")
    return records


@dataclasses.dataclass(frozen=True)
class Model:
    """The effects that a crash can have. `sector`: the bytes of which a write keeps all or none."""

    name: str
    ordered: bool = False
    sector: int = 4096
    forgets: bool = False


POSIX = Model("posix")
ORDERED = Model("ordered", ordered=True)


class Inode:
    """A file (bytes) or a directory (a dict of inodes by name)."""

    def __init__(self, is_directory: bool) -> None:
        self.is_directory = is_directory
        self.version = 0
        self.bytes = b""
        self.entries: dict[str, Inode] = {}
        # A directory is ignored if its contents are not checked; a file, if all of its names are in
        # ignored directories.
        self.is_ignored = not is_directory


@dataclasses.dataclass(eq=False)
class Op:
    """A pending operation: on the bytes of a file, or on names, which change together.

    Attributes:
        is_lost: whether no sync makes it durable any more.
    """

    record: Record
    file: Inode | None = None
    names: tuple[tuple[Inode, str, Inode | None], ...] = ()
    in_ignored: bool = False
    is_lost: bool = False

    @property
    def is_ignored(self) -> bool:
        """Whether it can make no difference, so far."""
        return self.in_ignored if self.file is None else self.file.is_ignored


# The effect of an operation on bytes that a crash keeps: None for all of it, otherwise the kept
# sectors of the file, and whether the file has the new size. An operation on names has None.
Kept = tuple[frozenset[int], bool] | None
Choice = dict[Op, Kept]


def _changed(before: bytes, record: Record, kept: Kept, sector: int) -> bytes:
    if record.kind is Kind.TRUNCATE:
        return before[: record.offset].ljust(record.offset, b"\0")
    first, end = record.offset, record.offset + len(record.data)
    if kept is None:
        return before[:first].ljust(first, b"\0") + record.data + before[end:]
    sectors, has_size = kept
    out = bytearray(before)
    if has_size and len(out) < end:
        out.extend(bytes(end - len(out)))
    for number in sorted(sectors):
        low, high = max(first, number * sector), min(end, (number + 1) * sector)
        if len(out) < high:
            out.extend(bytes(high - len(out)))
        out[low:high] = record.data[low - first : high - first]
    return bytes(out)


class State:
    """The state that a crash has left: directories, and files with their names."""

    def __init__(self, model: Model, root: Inode, choice: Choice, ops: Iterable[Op]) -> None:
        self._names: dict[tuple[int, str], Inode | None] = {}
        self._entries: dict[int, list[str]] = {}
        self._writes: dict[int, list[tuple[Record, Kept]]] = {}
        self._sector = model.sector
        for op in ops:
            if op not in choice:
                continue
            for directory, name, inode in op.names:
                self._names[id(directory), name] = inode
                self._entries.setdefault(id(directory), []).append(name)
            if op.file is not None:
                self._writes.setdefault(id(op.file), []).append((op.record, choice[op]))
        self.directories: list[str] = []
        self.files: list[tuple[str, Inode]] = []
        self._walk("", root)

    def _walk(self, path: str, directory: Inode) -> None:
        entries = dict.fromkeys([*directory.entries, *self._entries.get(id(directory), ())])
        for name in sorted(entries):
            key = (id(directory), name)
            inode = self._names[key] if key in self._names else directory.entries.get(name)
            if inode is None:
                continue
            at = f"{path}/{name}"
            if not inode.is_directory:
                self.files.append((at, inode))
            elif not inode.is_ignored:
                self.directories.append(at)
                self._walk(at, inode)

    def content(self, file: Inode) -> bytes:
        out = file.bytes
        for record, kept in self._writes.get(id(file), ()):
            out = _changed(out, record, kept, self._sector)
        return out

    def digest(self, known: dict[object, bytes]) -> bytes:
        """A hash of names and contents. `known` keeps the hashes of files from state to state."""
        whole = hashlib.blake2b("\n".join(self.directories).encode(), digest_size=16)
        for path, file in self.files:
            writes = self._writes.get(id(file), [])
            key = (file, file.version, tuple((id(record), kept) for record, kept in writes))
            if key not in known:
                known[key] = hashlib.blake2b(self.content(file), digest_size=16).digest()
            whole.update(path.encode() + b"\0" + known[key])
        return whole.digest()

    def write(self, folder: pathlib.Path) -> None:
        """Makes the files in an empty folder."""
        top = str(folder)
        for path in self.directories:
            os.mkdir(top + path)
        made: dict[int, str] = {}
        for path, file in self.files:
            if id(file) in made:
                os.link(made[id(file)], top + path)
                continue
            made[id(file)] = top + path
            with open(top + path, "wb", buffering=0) as out:
                out.write(self.content(file))


class Disk:
    """The files of a trace at one point of it: the durable ones, and the pending operations.

    Args:
        model: what a crash can do.
        ignored: whether a directory of this path is a cache, which is not looked at.
    """

    def __init__(self, model: Model, ignored: Callable[[str], bool] = lambda path: False) -> None:
        self.model = model
        self._ignored = ignored
        self.root = Inode(is_directory=True)
        self.pending: list[Op] = []
        self._live = {"": self.root}  # paths, as the process sees them
        self._inodes: dict[int, Inode] = {}

    def feed(self, record: Record) -> None:
        """Makes one call."""
        kind, path, other = record.kind, record.path, record.other
        if kind is Kind.SYNC:
            self._sync(record)
        if record.error or kind in (Kind.SYNC, Kind.MARK):
            return
        if kind in (Kind.CREATE, Kind.MKDIR):
            inode = Inode(kind is Kind.MKDIR)
            self._inodes[record.inode] = inode
            if inode.is_directory:
                inode.is_ignored = self._ignored(path) or self._parent(path).is_ignored
            self._live[path] = inode
            self._name(record, (path, inode))
        elif kind in (Kind.WRITE, Kind.TRUNCATE):
            self.pending.append(Op(record, self._inodes[record.inode]))
        elif kind is Kind.LINK:
            self._live[other] = self._live[path]
            self._name(record, (other, self._live[path]))
        elif kind in (Kind.UNLINK, Kind.RMDIR):
            del self._live[path]
            self._name(record, (path, None))
        elif kind is Kind.RENAME:
            self._name(record, (path, None), (other, self._live[path]))
            moved = [at for at in self._live if at == path or at.startswith(path + "/")]
            self._live.pop(other, None)
            for at in moved:
                self._live[other + at[len(path) :]] = self._live.pop(at)

    def state(self, choice: Choice) -> State:
        return State(self.model, self.root, choice, self.pending)

    def everything(self) -> State:
        """The state that the process sees."""
        return self.state(dict.fromkeys(self.pending))

    def _parent(self, path: str) -> Inode:
        return self._live[path.rpartition("/")[0]]

    def _name(self, record: Record, *changes: tuple[str, Inode | None]) -> None:
        names = []
        in_ignored = True
        for path, inode in changes:
            directory = self._parent(path)
            in_ignored &= directory.is_ignored or self._ignored(path)
            names.append((directory, path.rpartition("/")[2], inode))
            if inode is not None and not inode.is_directory:
                inode.is_ignored &= directory.is_ignored
        self.pending.append(Op(record, None, tuple(names), in_ignored))

    def _sync(self, record: Record) -> None:
        inode = self._live.get(record.path)
        if inode is None or not inode.is_directory:
            inode = self._inodes[record.inode]
        ops = [op for op in self.pending if op.file is inode]
        if record.error:
            if self.model.forgets:
                for op in ops:
                    op.is_lost = True
            return
        names = [op for op in self.pending if op.names]
        if not self.model.ordered:
            # With those before them on the same names, whose place they take.
            touched: set[tuple[int, str]] = set()
            kept = []
            for op in reversed(names):
                here = {(id(directory), name) for directory, name, _ in op.names}
                if touched & here or any(directory is inode for directory, _, _ in op.names):
                    touched |= here
                    kept.append(op)
            names = kept[::-1]
        for op in names:
            for directory, name, target in op.names:
                directory.version += 1
                if target is None:
                    directory.entries.pop(name, None)
                else:
                    directory.entries[name] = target
        for op in ops:
            if not op.is_lost:
                inode.version += 1
                inode.bytes = _changed(inode.bytes, op.record, None, self.model.sector)
        done = {id(op) for op in (*names, *(op for op in ops if not op.is_lost))}
        self.pending = [op for op in self.pending if id(op) not in done]


# --- The states of one point


def _kept_part(op: Op, model: Model, rng: np.random.Generator) -> Kept:
    """A random part of a write."""
    if op.file is None or op.record.kind is Kind.TRUNCATE:
        return None
    first = op.record.offset // model.sector
    end = -(-(op.record.offset + len(op.record.data)) // model.sector)
    sectors = frozenset((first + np.flatnonzero(rng.random(end - first) < rng.random())).tolist())
    return sectors, bool(rng.random() < 0.5) and not model.ordered


def choices(disk: Disk, new: int, samples: int, rng: np.random.Generator) -> Iterator[Choice]:
    """The changes that crashes can keep at one point.

    All and nothing; what there was after each new operation; all but one operation, and one alone;
    a part of one write; and random ones.

    Args:
        disk: the disk.
        new: the number of pending operations that are new since the point before.
        samples: the number of random ones, and of each other kind if there are more.
        rng: the source of all randomness.
    """
    model = disk.model
    ops = [op for op in disk.pending if not op.is_ignored]
    names = [op for op in ops if op.names]
    data = [op for op in ops if op.file is not None]
    new = sum(not op.is_ignored for op in disk.pending[len(disk.pending) - new :])

    def sample(items: Sequence[T]) -> Sequence[T]:
        if len(items) <= samples:
            return items
        return [items[i] for i in sorted(rng.choice(len(items), samples, replace=False))]

    for end in range(len(ops) - new, len(ops) + 1):
        yield dict.fromkeys(ops[:end])
    for end in sample(range(len(names) + 1)) if model.ordered else (0,):
        yield dict.fromkeys(names[:end])
        yield dict.fromkeys([*names[:end], *data])
    alone = data if model.ordered else ops
    for op in sample(alone):
        yield dict.fromkeys(other for other in ops if other is not op)
        yield {op: None}
    for op in sample(data):
        for part in ((frozenset(), True), _kept_part(op, model, rng)):
            if not (model.ordered and part is not None and part[1]):
                yield {other: part if other is op else None for other in ops}
    for _ in range(samples if len(ops) > 1 else 0):
        share = rng.random()
        last = int(rng.integers(len(names) + 1)) if model.ordered else len(names)
        kept = [*names[:last]] if model.ordered else [op for op in names if rng.random() < share]
        choice: Choice = dict.fromkeys(kept)
        for op in data:
            if rng.random() < share:
                choice[op] = _kept_part(op, model, rng) if rng.random() < 0.3 else None
        yield choice


@dataclasses.dataclass(frozen=True)
class Crash:
    """A state, and where it comes from.

    Attributes:
        at: the number of records before the crash.
        state: what is left.
        choice: what the crash has kept of the pending operations.
        pending: all pending operations.
    """

    at: int
    state: State
    choice: Choice
    pending: tuple[Op, ...]

    def __str__(self) -> str:
        lines = [f"a crash after {self.at} records, with these operations pending (+ kept):"]
        for op in self.pending:
            if not op.is_ignored:
                kept = self.choice.get(op, "")
                sign = "-" if op not in self.choice else "+" if kept is None else "~"
                lines.append(f"  {sign} {op.record}{f' of which {kept}' if sign == '~' else ''}")
        return "\n".join(lines)


def crashes(
    trace: Iterable[Record],
    model: Model,
    ignored: Callable[[str], bool],
    samples: int,
    seed: int,
    phase: Callable[[Record], object],
) -> Iterator[Crash]:
    """All different states, each of them once in each phase.

    Points are those before each sync and each mark, and the end: between them, operations only
    become pending, and what they are then is among the choices of the next point.

    Args:
        trace: the records.
        model: what a crash can do.
        ignored: as of `Disk`.
        samples: as of `choices`.
        seed: of the random choices.
        phase: called with each mark; what it returns, until the next mark, is what is expected.
    """
    disk = Disk(model, ignored)
    rng = np.random.default_rng(seed)
    known: dict[object, bytes] = {}
    seen: set[tuple[object, bytes]] = set()
    now: object = None
    new = 0
    trace = list(trace)
    for at in range(len(trace) + 1):
        record = trace[at] if at < len(trace) else None
        if record is None or record.kind in (Kind.SYNC, Kind.MARK):
            for choice in choices(disk, min(new, len(disk.pending)), samples, rng):
                state = disk.state(choice)
                key = (now, state.digest(known))
                if key not in seen:
                    seen.add(key)
                    yield Crash(at, state, choice, tuple(disk.pending))
            new = 0
        if record is None:
            return
        before = len(disk.pending)
        disk.feed(record)
        new += max(0, len(disk.pending) - before)
        if record.kind is Kind.MARK:
            now = phase(record)
