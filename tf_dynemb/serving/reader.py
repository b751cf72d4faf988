"""Reader: lookups in the state that a chain of snapshots describes."""

from __future__ import annotations

import dataclasses
import datetime
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb import _html
from tf_dynemb._presence import is_url, local_path
from tf_dynemb.format.safetensors import Array
from tf_dynemb.format.vector_format import Vectors
from tf_dynemb.serving.keys import Keys
from tf_dynemb.serving.state import Lineage, State
from tf_dynemb.serving.table import Mask, Table
from tf_dynemb.storage import Chain, Snapshot
from tf_dynemb.storage.chain import LOSSES
from tf_dynemb.storage.place import Place
from tf_dynemb.storage.places import place_of
from tf_dynemb.storage.snapshot import Name

# The maximum number of attempts, if files were removed because a newer base superseded them.
_ATTEMPTS = 5


# The readers of this process. A forked child replaces their locks.
_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


def _make_locks() -> None:
    """In a forked child: the thread that held a lock is in the parent."""
    for reader in _readers:
        reader._following = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_locks)


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    """The state of a reader.

    Attributes:
        state: the state that lookups read; None before the first.
        lineage: the lineage of the state.
        last: the name of the directory of the last snapshot that was applied.
    """

    state: State | None = None
    lineage: Lineage = dataclasses.field(default_factory=Lineage)
    last: str = ""


class Reader:
    """Vectors of dumped tables by key.

    The base is mapped, not read: opening takes the same time for a base of any size, and processes
    that open the same files share the memory. The changes of deltas are kept in memory. Any number
    of threads can look up keys while one thread follows; each lookup sees all tables as of one
    snapshot.

    In a store, lookups read the ranges of the base that they need, in a few round trips. If a new
    base has superseded it and removed its files, they raise FileNotFoundError until `follow` has
    been called. A process that looks up keys all the time reads a local copy, which `publish`
    makes.

    After a fork, a reader works in parent and child, also if another thread was following, and each
    of them follows on its own; deltas that were applied before are shared memory. A pickled reader
    is its absolute path and its arguments: the copy is opened when it is unpickled, at the last
    snapshot that is there then.

    Args:
        path: the directory of a chain of snapshots, or of one base; or the URL of a chain, such as
            `s3://bucket/served`. A relative path is relative to the current directory of now.
        tables: the names of the tables to open; None: all.
        verify: whether to check the checksums of the base too, which reads all of it. Deltas are
            always checked before they are applied.

    If a delta is damaged, such as one that is still being copied, or one between two others is
    missing, the reader warns, and has the state before it.

    Raises:
        FileNotFoundError: there is no base at the path.
        DataLossError: the base is damaged.
        TypeError: `tables` is a string.
        ValueError: the base lacks one of `tables`, or has a table without an index, or has a
            version that this code cannot read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tables: Iterable[str] | None = None,
        verify: bool = False,
    ) -> None:
        if isinstance(tables, str):
            raise TypeError(f"tables must be a list of names, got the string {tables!r}.")
        self._place = _absolute(path)
        self._wanted = None if tables is None else tuple(tables)
        self._verify = verify
        # Held while the next state is created; lookups do not lock.
        self._following = threading.Lock()
        # Replaced as a whole: a process can be forked between any two statements.
        self._held = _Held()
        _readers.add(self)
        try:
            self._advance(self._place)
        except LOSSES as error:
            if self._held.state is None:
                raise
            warnings.warn(
                f"{self._place} is read as of its snapshot {self.id}, because the next one cannot "
                f"be read: {error} follow() tries again.",
                stacklevel=2,
            )
        if self._held.state is None:
            raise FileNotFoundError(f"{self._place} holds no snapshot.")

    def __reduce__(self) -> tuple[type[Reader], tuple[str, tuple[str, ...] | None, bool]]:
        return type(self), (str(self._place), self._wanted, self._verify)

    def __repr__(self) -> str:
        state = self._state
        sizes = ", ".join(f"{name}={table.size}" for name, table in state.tables.items())
        return f"Reader({str(self._place)!r}, id={self.id[:8]}, utc={self.watermark_utc}, {sizes})"

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the snapshot, and the rows of each table."""
        state = self._state
        last = state.last
        tables = {
            f"table {name}": f"{table.size:,} rows: {table.schema.key_type} to "
            f"{table.schema.dimension} x {table.schema.dtype}"
            for name, table in state.tables.items()
        }
        lines = {
            **_html.watermark(last.id, last.watermark, last.watermark_utc),
            **tables,
            "dense weights": str(len(state.dense or ()) or ""),
            "extra": str(last.extra or ""),
        }
        return _html.table(f"Reader of {self._place}", lines)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables, in the order of the dump."""
        return tuple(self._state.tables)

    @property
    def id(self) -> str:
        """The id of the last snapshot applied."""
        return self._state.last.id

    @property
    def watermark(self) -> int:
        """The tick up to which all changes are in the state."""
        return self._state.last.watermark

    @property
    def watermark_utc(self) -> datetime.datetime:
        """The time at which the watermark was taken, to the microsecond."""
        return self._state.last.watermark_utc

    @property
    def extra(self) -> Mapping[str, Any]:
        """The dict that `dump` or `incremental_dump` was given for the last snapshot applied."""
        return self._state.last.extra or {}

    def dense(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the dense weights of the model that was dumped, by name.

        They are those of the last snapshot that has some; the rows of all lookups that are in the
        same state are as of then or later.

        Returns:
            Read-only arrays, mapped from a file; bfloat16 as float32. `tf_dynemb.dump` says which
            name a weight has.

        Raises:
            KeyError: no snapshot has dense weights.
        """
        dense = self._state.dense
        if dense is None:
            raise KeyError(f"{self._place} has no dense weights: it was dumped without the model.")
        return {name: _as_numpy(array) for name, array in dense.items()}

    def dimension(self, table: str | None = None) -> int:
        """Returns the width of a table's vectors; raises KeyError for an unknown table."""
        return _table(self._state, table).schema.dimension

    def key_type(self, table: str | None = None) -> str:
        """Returns int64, int32 or uint64; raises KeyError for an unknown table."""
        return _table(self._state, table).schema.key_type

    def size(self, table: str | None = None) -> int:
        """Returns the number of keys in a table; raises KeyError for an unknown table."""
        return _table(self._state, table).size

    def lookup(
        self, keys: npt.ArrayLike, table: str | None = None, default: npt.ArrayLike | None = None
    ) -> Vectors:
        """Returns the vectors of keys.

        Args:
            keys: integers in any shape, of any integer type. For the table of a layer with
                `hash_strings=True` also strings, in lists or arrays of str or bytes.
            table: the name of the table; may be None if there is only one.
            default: the vector of keys that are not in the table: a number, or a vector
                [dimension]. None: the vector that the model reads for them outside training.

        Returns:
            float32, keys.shape + [dimension].

        Raises:
            KeyError: there is no such table.
            TypeError: `keys` are not integers.
            OverflowError: a key is out of the range of the table's key type.
            ValueError: `default` has another shape, or `table` is None and there are several.
        """
        return _lookup(_table(self._state, table), keys, default)

    def lookup_many(
        self, keys: Mapping[str, npt.ArrayLike], default: npt.ArrayLike | None = None
    ) -> dict[str, Vectors]:
        """Same as `lookup`, for several tables as of one snapshot.

        Args:
            keys: the keys for each table, by its name.
            default: the vector of keys that are not in a table: a number, or a vector that fits all
                the tables. None: as in `lookup`.

        Returns:
            For each table, by its name, float32, keys.shape + [dimension].

        Raises:
            KeyError, TypeError, OverflowError, ValueError: as in `lookup`.
        """
        state = self._state
        return {name: _lookup(_table(state, name), ids, default) for name, ids in keys.items()}

    def contains(self, keys: npt.ArrayLike, table: str | None = None) -> Mask:
        """Returns which keys are in a table: bool, of the shape of `keys`. Errors: see `lookup`."""
        held = _table(self._state, table)
        array = held.as_keys(keys)
        return held.contains(array.ravel()).reshape(array.shape)

    def items(self, table: str | None = None, chunk: int = 65536) -> Iterator[tuple[Keys, Vectors]]:
        """Returns all keys and vectors of the current state, in no particular order.

        Args:
            table: the name of the table; may be None if there is only one.
            chunk: the maximum number of rows at a time.

        Returns:
            An iterator over keys [n] and float32 vectors [n, dimension], n > 0. Snapshots that are
            applied meanwhile do not change its results.

        Raises:
            KeyError: there is no such table.
            ValueError: `chunk` is below 1, or `table` is None and there are several.
        """
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}.")
        return _table(self._state, table).items(chunk)

    def follow(self, path: str | os.PathLike[str] | None = None, *, unrelated: bool = False) -> int:
        """Applies the snapshots that have been published since the last one applied.

        Each delta becomes visible in all tables at once; a base, together with the deltas after it.
        If a snapshot is damaged, or does not continue the state, neither it nor any after it is
        applied. The reader stays at the snapshot before it, and the next call continues from there.

        Args:
            path: the path of the snapshots: another base, which replaces the state, or deltas that
                continue it. None: the path that the reader was opened with.
            unrelated: whether a base of other tables replaces the state, such as the base of a
                model that was retrained from scratch, which `dump(..., overwrite=True)` has
                published.

        Returns:
            The number of snapshots that were applied.

        Raises:
            DataLossError: a snapshot is damaged; the message names it and the problem.
            FileNotFoundError: `path` does not exist.
            ValueError: a new base lacks one of the tables that were requested, or is of other
                tables of these names and `unrelated` is False; or a snapshot has a version that
                this code cannot read.
        """
        return self._advance(self._place if path is None else _absolute(path), unrelated)

    @property
    def _state(self) -> State:
        # Each method reads this once, so that all of its result is as of one snapshot.
        state = self._held.state
        assert state is not None
        return state

    def _advance(self, place: Place, unrelated: bool = False) -> int:
        with self._following:
            count = 0
            for attempt in range(1, _ATTEMPTS + 1):
                names = Chain.names(place, self._held.last)
                applied, error = self._apply(place, names or [""], unrelated)
                count += applied
                if error is None:
                    break
                # Files of snapshots that a newer base superseded may have been removed.
                lost = isinstance(error, LOSSES) and attempt < _ATTEMPTS
                if not lost or Chain.names(place, self._held.last)[:1] == names[:1]:
                    raise error
            return count

    def _apply(
        self, place: Place, names: list[str], unrelated: bool
    ) -> tuple[int, Exception | None]:
        """Applies a chain: "The state of a reader" in docs/file_format.md.

        cc/serving/served_model.cc (ApplyChain) has the same rule.

        Args:
            place: the place of the chain.
            names: the names of its snapshots; "": the one that the place is.
            unrelated: as of `follow`.

        Returns:
            (count, error): the number of snapshots that were applied, and the error of the next.
        """
        parsed = [Name.parse(name or str(place).rpartition("/")[2]) for name in names]
        state, lineage, replaces = self._held.state, self._held.lineage, False
        done, older = lineage.places([name.id if name else None for name in parsed])
        if max(done, older) == len(names):
            return 0, None
        failure: Exception | None = None
        count = 0
        try:
            if not done:
                first = _open(place, names[0])
                # The directory can have another name.
                if len(names) == 1 and first.manifest.id in lineage:
                    return 0, None
                if first.manifest.kind == "base":
                    done = 1
                    if state is None or not lineage.has_earlier(first.manifest, state.last.id):
                        foreign = lineage.foreign_table(first.manifest)
                        if foreign is not None and not unrelated:
                            raise ValueError(
                                f"{first} is of another table {foreign!r} than this reader's, and "
                                "does not replace it: open a new Reader, or call "
                                "follow(unrelated=True)."
                            )
                        if self._verify:
                            first.verify()
                        state = State.of_base(first, self._wanted, state)
                        lineage, replaces, count = Lineage.of(first.manifest), True, 1
                    lineage.applied.add(first.manifest.id)
            for name in names[done:]:
                delta = _open(place, name)
                if state is None:
                    raise FileNotFoundError(f"{delta} is a delta, and there is no base.")
                after = state.after_delta(delta, lineage)
                count += after is not state
                state, done = after, done + 1
                if not replaces:
                    self._held = _Held(state, lineage, name)
                # Last: a delta of the state that the lineage lacks has no effect when it is applied
                # again, in a process that was forked in between.
                lineage.applied.add(delta.manifest.id)
        except Exception as error:
            failure = error
        if replaces:
            if done <= older:
                return 0, failure
            self._held = _Held(state, lineage, names[done - 1])
        return count, failure


def _as_numpy(array: Array) -> npt.NDArray[Any]:
    if array.dtype != "bfloat16":
        return array.values
    wide = (array.values.astype(np.uint32) << 16).view(np.float32)
    wide.flags.writeable = False
    return wide


def _absolute(path: str | os.PathLike[str]) -> Place:
    """Returns the place of a path, which does not depend on the current directory."""
    return place_of(path if is_url(path) else os.path.abspath(local_path(path, "path")))


def _open(place: Place, name: str) -> Snapshot:
    return place.open([name] if name else [])[0]


def _table(state: State, name: str | None) -> Table:
    there = ", ".join(map(repr, state.tables)) or "none"
    if name is None:
        if len(state.tables) != 1:
            raise ValueError(f"table is required: it must be one of {there}.")
        return next(iter(state.tables.values()))
    if not isinstance(name, str):
        raise TypeError(f"table must be a name, one of {there}, got {name!r:.80}: keys come first.")
    if name not in state.tables:
        raise KeyError(f"no table {name!r}: there is {there}.")
    return state.tables[name]


def _lookup(table: Table, keys: npt.ArrayLike, default: npt.ArrayLike | None) -> Vectors:
    dimension = table.schema.dimension
    array = table.as_keys(keys)
    fill = None if default is None else np.asarray(default, np.float32)
    if fill is not None and fill.shape not in ((), (dimension,)):
        raise ValueError(
            f"default must be a number or a vector [{dimension}] for table {table.schema.name!r}, "
            f"got shape {list(fill.shape)}."
        )
    vectors = table.lookup(array.ravel(), fill)
    return vectors.reshape(*array.shape, dimension)
