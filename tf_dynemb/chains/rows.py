"""The rows of a table after all snapshots of a chain, with every column; the columns stay on disk.

Vectors are in the format of the base, also those of deltas with another one.
Only the keys of deltas are kept in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb.format import key_index, npy
from tf_dynemb.format.vector_format import convert, decode
from tf_dynemb.serving.keys import Keys
from tf_dynemb.serving.overlay import Overlay, push
from tf_dynemb.serving.table import Schema
from tf_dynemb.storage import Chain, Change, DataLossError, Shard, Snapshot, TableEntry

# Rows per iteration.
CHUNK = 1 << 16

_NO_CHANGE = Change()
_ABSENT = -1
_DELETED = -2

Positions = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A shard of a snapshot; its columns are mapped when they are read."""

    snapshot: Snapshot
    table: TableEntry
    shard: Shard
    change: Change
    steps: tuple[float, ...]
    stored_as: str  # the format of vectors that `rows` returns

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the shard."""
        return self.snapshot.column(self.table.name, name, self.shard.rank)

    def rows(self, name: str, positions: Positions) -> npt.NDArray[Any]:
        """A column of some rows, as they are after all steps of the chain."""
        values = np.asarray(self.column(name)[positions])
        if name == "vectors" and self.change.log_decay:
            values = decode(values, self.table.dimension) * self.change.decay
        if name == "vectors":
            values = convert(values, self.table.dimension, self.stored_as)
        if name == "state" and self.steps and self.table.state is not None:
            values = self.change.state(values, self.table.state.widths, self.steps)
        return values


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Some rows of one source."""

    source: Source
    positions: Positions
    keys: Keys

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of these rows."""
        return self.source.rows(name, self.positions)


class TableRows:
    """The rows of a table: for each key, the shard that its row is in, and the position there.

    Attributes:
        entry: the table's entry in the base.
        sources: the shards that contain its rows, in order of publication.
        size: the number of its rows.

    Raises:
        ValueError: there is no base; or a delta has the table in another form than the base; or a
            shard is too large for an index.
    """

    def __init__(self, chain: Chain, name: str) -> None:
        if chain.base is None:
            raise ValueError(f"{chain} has deltas, but no base.")
        self.entry = chain.base.manifest.table(name)[1]
        changes = chain.changes(name)
        last_steps = [each.steps for each in chain.last.manifest.tables if each.name == name]
        self._steps = last_steps[0] if last_steps else ()
        self.sources = [
            self._source(chain.base, self.entry, shard, changes[0]) for shard in self.entry.shards
        ]
        self._base = [
            (npy.plain(source.column("keys")), _index(source), source.shard.index_salt)
            for source in self.sources
        ]
        self._levels: tuple[Overlay, ...] = ()
        self.size = sum(shard.rows for shard in self.entry.shards)
        for delta, change in zip(chain.deltas, changes[1:], strict=True):
            for entry in delta.manifest.tables:
                if entry.name == name:
                    self.add(delta, entry, change)

    def blocks(self, rank: int | None = None) -> Iterator[Block]:
        """Yields all rows, or the rows in a rank's shards, from 1 to `CHUNK` at a time."""
        for number, source in enumerate(self.sources):
            if rank not in (None, source.shard.rank):
                continue
            keys = source.column("keys")
            expected = number if number >= len(self._base) else _ABSENT
            for begin in range(0, keys.size, CHUNK):
                chunk_keys = np.asarray(keys[begin : begin + CHUNK])
                kept = np.flatnonzero(self._changed(chunk_keys)[:, 0] == expected)
                if kept.size:
                    yield Block(source, begin + kept, chunk_keys[kept])

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Returns which keys [n] have a row."""
        return self._places(keys)[:, 0] >= 0

    def gather(self, keys: Keys, column: str) -> npt.NDArray[Any]:
        """Returns a column of the rows of keys, all of which must have one."""
        places = self._places(keys)
        dtype, shape = self.entry.column_type(column, self.sources[0].shard)
        values = np.empty((keys.size, *shape[1:]), dtype)
        for number in np.unique(places[:, 0]):
            here = np.flatnonzero(places[:, 0] == number)
            values[here] = self.sources[number].rows(column, places[here, 1])
        return values

    def add(self, delta: Snapshot, entry: TableEntry, change: Change = _NO_CHANGE) -> None:
        """Adds the rows of a delta; raises ValueError if it has the table in another form.

        Args:
            delta: the delta that follows the last snapshot.
            entry: the table in it.
            change: what steps after the delta have done to its rows.
        """
        if (Schema.of(entry), entry.state) != (Schema.of(self.entry), self.entry.state):
            # load() accepts it if only the state differs, because rows can start with fresh state.
            # One table of all rows cannot contain both kinds of state.
            raise ValueError(
                f"{delta} has {Schema.of(entry)} with state {entry.state}, but its base "
                f"has {Schema.of(self.entry)} with state {self.entry.state}."
            )
        kinds = [e.evict_strategy if not e.accesses_are_times else "" for e in (entry, self.entry)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{delta} has evict_strategy {entry.evict_strategy!r}, but its base has "
                f"{self.entry.evict_strategy!r}: one table cannot contain the scores of both."
            )
        keys, places, deleted = [], [], []
        for shard in entry.shards:
            source = self._source(delta, entry, shard, change)
            place = np.empty((shard.rows, 2), np.int64)
            place[:, 0] = len(self.sources)
            place[:, 1] = np.arange(shard.rows)
            self.sources.append(source)
            places.append(place)
            keys.append(source.column("keys"))
            deleted.append(source.column("deleted"))
        if keys:
            level = Overlay.of(*(np.asarray(np.concatenate(c)) for c in (keys, places, deleted)))
            self.size += int((~self.contains(level.live)).sum())
            self.size -= int(self.contains(level.deleted).sum())
            self._levels = push(self._levels, level, lambda k: self._base_places(k)[:, 0] >= 0)

    def _source(
        self, snapshot: Snapshot, entry: TableEntry, shard: Shard, change: Change
    ) -> Source:
        return Source(snapshot, entry, shard, change, self._steps, self.entry.stored_as)

    def _places(self, keys: Keys) -> Positions:
        """Returns [n, 2]: the source's number, below 0 if there is no row, and the position."""
        changed = self._changed(keys)
        same = changed[:, 0] == _ABSENT
        changed[same] = self._base_places(keys[same])
        return changed

    def _base_places(self, keys: Keys) -> Positions:
        places = np.full((keys.size, 2), _ABSENT, np.int64)
        for number, (held, index, salt) in enumerate(self._base):
            positions = key_index.find(index, held, keys, salt)
            hits = positions >= 0
            places[hits, 0] = number
            places[hits, 1] = positions[hits]
        return places

    def _changed(self, keys: Keys) -> Positions:
        """Same as `_places`, for the deltas only."""
        places = np.full((keys.size, 2), _ABSENT, np.int64)
        for level in self._levels:
            positions = level.find(keys)
            hits = positions >= 0
            live = hits & (positions < len(level.rows))
            places[hits] = _DELETED
            places[live] = level.rows[positions[live]]
        return places


def tables_of(chain: Chain) -> tuple[str, ...]:
    """Returns the names of the tables of a chain's base.

    Raises:
        ValueError: the chain has no base.
        DataLossError: a delta has a table that the base does not have.
    """
    if chain.base is None:
        raise ValueError(f"{chain} has deltas, but no base.")
    names = tuple(entry.name for entry in chain.base.manifest.tables)
    for delta in chain.deltas:
        for entry in delta.manifest.tables:
            if entry.name not in names:
                raise DataLossError(f"{delta} has table {entry.name!r}, but its base does not.")
    return names


def _index(source: Source) -> npt.NDArray[np.uint32]:
    if "index" not in source.shard.files:
        raise ValueError(f"{source.snapshot} has a shard that is too large for an index.")
    return source.column("index")
