"""Copies of snapshots that have some of the rows, in a smaller format."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb.chains.conditions import given
from tf_dynemb.chains.rows import TableRows
from tf_dynemb.chains.selection import WORDS, Clock, Selection, text_of
from tf_dynemb.chains.snapshot_copy import (
    CHUNK,
    SnapshotCopy,
    in_format,
    of_table,
    with_format,
)
from tf_dynemb.format import key_index
from tf_dynemb.format.manifest import Manifest
from tf_dynemb.format.vector_format import FORMATS, decode
from tf_dynemb.serving.keys import Keys
from tf_dynemb.storage import Chain, Shard, Snapshot, TableEntry

Scores = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Thinning:
    """What of the rows a copy has; each member is of one table, or of all by None.

    Attributes:
        rows: the formats of vectors, by the names of tables; under None, of all others.
        where: conditions on rows, likewise.
        max_rows: numbers of rows, likewise; 0: any number.
        clock: the times of ticks.
    """

    rows: Mapping[str | None, str]
    where: Mapping[str | None, Mapping[str, Any]]
    max_rows: Mapping[str | None, int]
    clock: Clock

    @classmethod
    def of(cls, rows: Any, where: Any, max_rows: Any, before: Mapping[str, Any] | None) -> Thinning:
        """Returns the thinning that the arguments of `publish` ask for.

        Args:
            rows: a format, or a mapping from tables to formats; None: as before.
            where: conditions, or a mapping from tables to conditions; None: as before.
            max_rows: a number, or a mapping from tables to numbers; None: as before.
            before: `options` of the last snapshot of the copy.

        Raises:
            TypeError, ValueError: an argument is wrong; the message names it.
        """
        before = before or {}
        rows, where, max_rows = (
            before.get(name) if value is None else value
            for name, value in (("rows", rows), ("where", where), ("max_rows", max_rows))
        )
        formats = formats_by_table(rows)
        if where is not None and not isinstance(where, Mapping):
            raise TypeError(f"where must be a dict of conditions, got {where!r}.")
        tables = [isinstance(value, Mapping) for value in (where or {}).values()]
        if any(tables) and not all(tables):
            raise TypeError(
                f"where must have conditions, or the conditions of tables, got {where!r}."
            )
        conditions = {
            table: {name: text_of(name, value) for name, value in given(words, WORDS).items()}
            for table, words in _by_table(where or None, any(tables)).items()
        }
        limits = _by_table(max_rows, isinstance(max_rows, Mapping))
        for table, each in limits.items():
            if isinstance(each, bool) or not hasattr(each, "__index__") or each.__index__() < 0:
                raise ValueError(f"max_rows must be a number of rows, got {each!r}.")
            limits[table] = int(each)
        return cls(formats, conditions, limits, Clock(before.get("clock", ())))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that are not None, as the manifest of a copy has them."""
        return {
            name: values[None] if list(values) == [None] else values
            for name in ("rows", "where", "max_rows")
            if (values := getattr(self, name))
        }

    @property
    def options(self) -> dict[str, Any]:
        """The member `copy` of the manifest of a copy."""
        return {**self.arguments, "clock": self.clock.marks}

    def check_tables(self, manifest: Manifest) -> None:
        """Raises ValueError if there is no table of a name, or conditions do not go with one."""
        names = {entry.name for entry in manifest.tables}
        there = ", ".join(map(repr, sorted(names))) or "none"
        for argument in ("rows", "where", "max_rows"):
            for name in getattr(self, argument).keys() - names - {None}:
                raise ValueError(
                    f"{argument} has {name!r}, but the tables are {there}. (A copy remembers the "
                    "arguments of the call before.)"
                )
        for entry in manifest.tables:
            self.selection(entry, manifest)
            for argument in ("where", "max_rows"):
                if entry.matrix and getattr(self, argument).get(entry.name):
                    raise ValueError(
                        f"{argument} has {entry.name!r}, a dense variable: all its rows are needed."
                    )

    def selection(self, entry: TableEntry, manifest: Manifest) -> Selection | None:
        """Returns the selection of rows of a table of a snapshot; None: all of them."""
        conditions = of_table(self.where, entry.name)
        if not conditions or entry.matrix:
            return None
        return Selection(conditions, entry, self.clock, manifest.watermark_utc_ns)


class ThinCopies:
    """Writes copies of the snapshots of a chain, one after the other.

    Args:
        target: the path of the copies.
        thinning: what they have.
    """

    def __init__(self, target: pathlib.Path, thinning: Thinning) -> None:
        self._target = target
        self._thinning = thinning
        self._there: dict[str, TableRows] = {}  # the rows at the target, opened when needed

    def write(self, snapshot: Snapshot, directory: pathlib.Path) -> None:
        """Writes the copy of a snapshot to an empty directory.

        Raises:
            ValueError: a condition does not go with a table, or the copies have a shard that is too
                large for an index.
            OSError: an error of the file system.
        """
        copy = SnapshotCopy(snapshot, directory)
        try:
            tables = [
                self._write_table(copy, snapshot, number, entry)
                for number, entry in enumerate(copy.manifest.tables)
            ]
            copy.finish(tables, self._thinning.options)
        finally:
            copy.abandon()

    def note_times(self, snapshots: Sequence[Snapshot]) -> None:
        """Notes the times of the snapshots of a chain."""
        marks = [(s.manifest.watermark, s.manifest.watermark_utc_ns) for s in snapshots]
        clock = Clock([*self._thinning.clock.marks, *marks])
        self._thinning = dataclasses.replace(self._thinning, clock=clock)

    def published(self, snapshot: Snapshot) -> None:
        """Notes that a copy has been published at the target."""
        for entry in snapshot.manifest.tables:
            if entry.name in self._there:
                self._there[entry.name].add(snapshot, entry)

    def _write_table(
        self, copy: SnapshotCopy, snapshot: Snapshot, number: int, entry: TableEntry
    ) -> TableEntry:
        thinning = self._thinning
        stored_as = in_format(entry, of_table(thinning.rows, entry.name))
        selection = thinning.selection(entry, snapshot.manifest)
        limit = 0 if entry.matrix else of_table(thinning.max_rows, entry.name) or 0
        if selection is None and not limit:
            return copy.write_vectors(number, stored_as)
        shards = [_Rows(snapshot, entry, shard) for shard in entry.shards]
        if selection is not None:
            for rows in shards:
                rows.select(selection)
        deleted: Keys = np.empty(0, shards[0].keys.dtype)
        if snapshot.manifest.kind == "base":
            _keep_best(shards, limit)
        else:
            deleted = self._fallen(entry, shards, limit)
        written = []
        for rows in shards:
            gone, deleted = deleted, deleted[:0]  # the first shard has all of them
            written.append(copy.write_rows(number, rows.shard, rows.kept, gone, stored_as))
        return dataclasses.replace(with_format(entry, stored_as), shards=tuple(written))

    def _fallen(self, entry: TableEntry, shards: list[_Rows], limit: int) -> Keys:
        """Returns the keys at the target that a delta deletes because they fall out.

        If there are too many rows after the delta, the worst ones fall out, down to 63/64 of the
        limit, so that few deltas need to read the scores of all rows.
        """
        if entry.name not in self._there:
            self._there[entry.name] = TableRows(Chain.open(self._target), entry.name)
        there = self._there[entry.name]
        out = np.concatenate([rows.keys[~rows.kept] for rows in shards])
        fallen = out[there.contains(out)]
        if not limit:
            return fallen
        kept, scores_of_kept = _kept(shards)
        listed = np.concatenate([rows.deleted for rows in shards])
        gone = np.concatenate([listed, fallen])
        count = there.size - int(there.contains(gone).sum()) + int((~there.contains(kept)).sum())
        if count <= limit:
            return fallen
        replaced = np.sort(np.concatenate([gone, kept]))
        keys, scores = [kept], [scores_of_kept]
        for block in there.blocks():
            same = ~_is_in(block.keys, replaced)
            source = block.source
            keys.append(block.keys[same])
            scores.append(_scores(source.table, source.shard, block.column("accesses"))[same])
        worst = _worst(np.concatenate(keys), np.concatenate(scores), count - limit + limit // 64)
        _drop(shards, worst)
        return np.concatenate([fallen, worst[there.contains(worst)]])


class _Rows:
    """The rows of a shard of a snapshot, and which of them a copy has."""

    def __init__(self, snapshot: Snapshot, entry: TableEntry, shard: Shard) -> None:
        self.shard = shard
        self._snapshot = snapshot
        self._entry = entry
        self.keys: Keys = np.asarray(self._column("keys"))
        self.kept: Mask = np.ones(shard.rows, np.bool_)

    @property
    def deleted(self) -> Keys:
        """The keys that the snapshot, a delta, deletes."""
        return np.asarray(self._column("deleted"))

    @property
    def scores(self) -> Scores:
        """[rows]: scores, or ticks of last accesses."""
        return _scores(self._entry, self.shard, np.asarray(self._column("accesses")))

    def select(self, selection: Selection) -> None:
        """Keeps the rows that satisfy conditions."""
        updates, accesses, vectors = (
            self._column(name) for name in ("updates", "accesses", "vectors")
        )
        for begin in range(0, self.shard.rows, CHUNK):
            chunk = slice(begin, begin + CHUNK)

            def vectors_of_chunk(chunk: slice = chunk) -> npt.NDArray[np.float32]:
                return decode(np.asarray(vectors[chunk]), self._entry.dimension)

            self.kept[chunk] = selection.of(
                self.keys[chunk],
                updates[chunk].astype(np.uint64) + np.uint64(self.shard.base_tick),
                _scores(self._entry, self.shard, accesses[chunk]),
                vectors_of_chunk,
            )

    def _column(self, name: str) -> npt.NDArray[Any]:
        return self._snapshot.column(self._entry.name, name, self.shard.rank)


def _keep_best(shards: list[_Rows], limit: int) -> None:
    """Keeps at most `limit` rows, the best ones; 0: all."""
    count = sum(int(np.count_nonzero(rows.kept)) for rows in shards)
    if not limit or count <= limit:
        return
    _drop(shards, _worst(*_kept(shards), count - limit))


def _kept(shards: list[_Rows]) -> tuple[Keys, Scores]:
    """Returns the keys that are kept, and their scores."""
    keys, scores = (
        np.concatenate([each[rows.kept] for rows, each in zip(shards, columns, strict=True)])
        for columns in ([rows.keys for rows in shards], [rows.scores for rows in shards])
    )
    return keys, scores


def _drop(shards: list[_Rows], keys: Keys) -> None:
    """Makes keys ones that are not kept."""
    ordered = np.sort(keys)
    for rows in shards:
        rows.kept &= ~_is_in(rows.keys, ordered)


def _worst(keys: Keys, scores: Scores, count: int) -> Keys:
    """Returns the keys [count] with the lowest scores; of equal ones, those with lower hashes."""
    bound = np.partition(scores, count - 1)[count - 1]
    below, equal = keys[scores < bound], keys[scores == bound]
    order = np.argsort(key_index.mix(equal))
    return np.concatenate([below, equal[order[: count - below.size]]])


def _is_in(keys: Keys, ordered: Keys) -> Mask:
    """Returns which keys [n] are in a sorted array."""
    if not ordered.size:
        return np.zeros(keys.shape, np.bool_)
    places = np.minimum(np.searchsorted(ordered, keys), ordered.size - 1)
    found: Mask = ordered[places] == keys
    return found


def _scores(entry: TableEntry, shard: Shard, accesses: npt.NDArray[Any]) -> Scores:
    """Returns scores, or ticks of last access, from values of the column `accesses`."""
    base = shard.base_tick if entry.accesses_are_times else 0
    scores: Scores = accesses.astype(np.uint64) + np.uint64(base)
    return scores


def formats_by_table(rows: Any) -> dict[str | None, str]:
    """Returns the formats that an argument `rows` asks for; raises ValueError if one is unknown."""
    formats = _by_table(rows, isinstance(rows, Mapping))
    for each in formats.values():
        if not isinstance(each, str) or each not in FORMATS:
            raise ValueError(f"rows must be one of {', '.join(FORMATS)}, got {each!r}.")
    return formats


def _by_table(value: Any, is_by_table: bool) -> dict[str | None, Any]:
    """Returns an argument by the names of tables; under None, what holds for all others."""
    if value is None:
        return {}
    if not is_by_table:
        return {None: value}
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"The name of a table must be a str, got {name!r}.")
    return dict(value)
