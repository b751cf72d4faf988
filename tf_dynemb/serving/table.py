"""The state of one table: shards of a base, mapped, and levels of changes over them.

Objects of this module do not change after they are created, so that any thread can read while
another creates the next state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb.format import key_index, npy
from tf_dynemb.format.table_entry import KEY_TYPES
from tf_dynemb.format.vector_format import Rows, Vectors, decode, encode, join
from tf_dynemb.serving.keys import Keys, as_keys
from tf_dynemb.serving.overlay import Overlay, push
from tf_dynemb.serving.unknown_keys import UnknownKeys
from tf_dynemb.storage import Change, DataLossError, Snapshot, TableEntry

Mask = npt.NDArray[np.bool_]
Decays = npt.NDArray[np.float64]

# Keys per iteration: few enough that the intermediate results stay in the cache.
_CHUNK = 1 << 14


@dataclasses.dataclass(frozen=True)
class Schema:
    """The properties on which all snapshots of a table must agree; fields as in the manifest."""

    name: str
    dimension: int
    key_type: str
    dtype: str

    @classmethod
    def of(cls, entry: TableEntry) -> Schema:
        """Returns the schema of a table in a manifest."""
        return cls(entry.name, entry.dimension, entry.key_type, entry.dtype)

    @property
    def numpy_key_type(self) -> np.dtype[Any]:
        """The numpy dtype of the keys."""
        return KEY_TYPES[self.key_type]

    def widened(self, rows: Rows) -> Vectors:
        """Converts stored vectors of any format to float32."""
        return decode(rows, self.dimension)

    def rounded(self, vectors: Vectors) -> Rows:
        """Rounds float32 to the table's dtype, to nearest even; the inverse of `widened`."""
        return encode(vectors, self.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """The columns of a base's shard that lookups need.

    Attributes:
        keys: [rows].
        rows: [rows, width], the vectors as they are stored.
        index: the index of `keys`.
        salt: the salt of the index.
    """

    keys: Keys
    rows: Rows
    index: npt.NDArray[np.uint32]
    salt: int

    def find(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Returns the positions of keys in `rows`, -1 if absent."""
        return key_index.find(self.index, self.keys, keys, self.salt)


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The state of a table.

    Attributes:
        schema: the schema of the table.
        shards: the shards of the base; a key is in at most one of them.
        levels: the changes since the base, oldest first.
        size: the number of keys.
        unknown: the rule for keys that the table does not have.
        string_hash: the hash that makes a key of a string; None: keys are integers.
        steps: the record of steps of the last snapshot that has one (format/steps.py).
        log_decay: the logarithm of the factor by which the steps since the base have multiplied the
            vectors of the rows that no delta has.
    """

    schema: Schema
    shards: tuple[Shard, ...]
    levels: tuple[Overlay, ...]
    size: int
    unknown: UnknownKeys
    string_hash: str | None
    steps: tuple[float, ...] = ()
    log_decay: float = 0.0

    @classmethod
    def of_base(cls, snapshot: Snapshot, entry: TableEntry) -> Table:
        """Maps a table of a base.

        Raises:
            ValueError: a shard is too large to have an index.
        """
        shards = []
        for shard in entry.shards:
            if "index" not in shard.files:
                raise ValueError(
                    f"Table {entry.name!r} has {shard.rows} rows in the shard of rank {shard.rank} "
                    "and therefore no index; lookups are only possible if more ranks write the "
                    "dump."
                )
            keys, rows, index = (
                snapshot.column(entry.name, column, shard.rank)
                for column in ("keys", "vectors", "index")
            )
            shards.append(Shard(keys, npy.plain(rows), index, shard.index_salt))
        size = sum(shard.rows for shard in entry.shards)
        unknown = UnknownKeys.of(entry)
        schema = Schema.of(entry)
        return cls(schema, tuple(shards), (), size, unknown, entry.string_hash, entry.steps)

    def with_delta(self, snapshot: Snapshot, entry: TableEntry) -> Table:
        """Returns the state after a delta, whose rows are copied into memory."""
        columns = {
            column: [
                np.asarray(snapshot.column(entry.name, column, shard.rank))
                for shard in entry.shards
            ]
            for column in ("keys", "vectors", "deleted")
        }
        log_decay = self.log_decay + Change.between(self.steps, entry.steps).log_decay
        changed = dataclasses.replace(
            self,
            unknown=UnknownKeys.of(entry),
            string_hash=entry.string_hash,
            steps=entry.steps or self.steps,
            log_decay=log_decay,
        )
        if not entry.shards:
            return changed
        keys, deleted = (np.concatenate(columns[c]) for c in ("keys", "deleted"))
        rows = self._joined(columns["vectors"])
        decays = np.full(keys.size, log_decay) if log_decay else None
        level = Overlay.of(keys, rows, deleted, decays)
        if (level.find(level.keys) != np.arange(level.keys.size)).any():
            raise DataLossError(
                f"{snapshot} is damaged: it has a key of table {entry.name!r} twice."
            )
        size = self.size + int((~self.contains(keys)).sum()) - int(self.contains(deleted).sum())
        levels = push(self.levels, level, self._base_contains, self._joined)
        return dataclasses.replace(changed, levels=levels, size=size)

    def as_keys(self, keys: npt.ArrayLike) -> Keys:
        """Converts what a user passes to an array of the key type; see `keys.as_keys`."""
        return as_keys(keys, self.schema.numpy_key_type, self.schema.name, self.string_hash)

    def lookup(self, keys: Keys, default: Vectors | None) -> Vectors:
        """Returns float32 [n, dimension] for keys [n].

        Keys without a row have the vector `default`, [] or [dimension]; None: as in the model.
        """
        out = np.empty((keys.size, self.schema.dimension), np.float32)
        for begin in range(0, keys.size, _CHUNK):
            rows = out[begin : begin + _CHUNK]
            present = self._read(keys[begin : begin + _CHUNK], rows)
            if not present.all():
                rows[~present] = (
                    self._unknown_vectors(keys[begin : begin + _CHUNK][~present])
                    if default is None
                    else default
                )
        return out

    def _unknown_vectors(self, keys: Keys) -> Vectors:
        return self.schema.widened(self.schema.rounded(self.unknown.vectors(keys)))

    def contains(self, keys: Keys) -> Mask:
        """Returns which keys [n] have a row."""
        return self._in_chunks(self._read, keys)

    def items(self, chunk: int) -> Iterator[tuple[Keys, Vectors]]:
        """Returns all keys and vectors, at most `chunk` at a time."""
        sources: list[tuple[Keys, Rows, Decays | None]] = [
            (shard.keys, shard.rows, None) for shard in self.shards
        ]
        newer = [self.levels] * len(sources)
        for i, level in enumerate(self.levels):
            sources.append((level.live, level.rows, level.decays))
            newer.append(self.levels[i + 1 :])
        for (keys, rows, decays), levels in zip(sources, newer, strict=True):
            for begin in range(0, keys.size, chunk):
                chunk_keys = np.asarray(keys[begin : begin + chunk])
                kept = np.ones(chunk_keys.size, np.bool_)
                for level in levels:
                    kept &= level.lacks(chunk_keys)
                if kept.any():
                    vectors = self.schema.widened(np.asarray(rows[begin : begin + chunk])[kept])
                    since = decays if decays is None else decays[begin : begin + chunk][kept]
                    yield chunk_keys[kept], self._decayed(vectors, since)

    def _joined(self, parts: list[Rows]) -> Rows:
        return join(parts, self.schema.dimension)

    def _base_contains(self, keys: Keys) -> Mask:
        return self._in_chunks(self._read_base, keys)

    def _in_chunks(self, read: Callable[[Keys, None], Mask], keys: Keys) -> Mask:
        masks = [read(keys[i : i + _CHUNK], None) for i in range(0, keys.size, _CHUNK)]
        return np.concatenate([np.zeros(0, np.bool_), *masks])

    def _read(self, keys: Keys, out: Vectors | None) -> Mask:
        """Returns which keys [n] are present; sets their rows in `out` [n, dimension], if any."""
        present = self._read_base(keys, out)
        if out is not None and self.log_decay:
            out[present] = self._decayed(out[present], None)
        for level in self.levels:
            positions = level.find(keys)
            hits = np.flatnonzero(positions >= 0)
            if hits.size:
                positions = positions[hits]
                alive = positions < len(level.rows)
                present[hits] = alive
                if out is not None:
                    positions = positions[alive]
                    decays = level.decays if level.decays is None else level.decays[positions]
                    vectors = self.schema.widened(level.rows[positions])
                    out[hits[alive]] = self._decayed(vectors, decays)
        return present

    def _decayed(self, vectors: Vectors, decays: Decays | None) -> Vectors:
        """Returns vectors [n, dimension] that were up to date at `decays` [n] as they are now."""
        if not self.log_decay:
            return vectors
        since = 0.0 if decays is None else decays[:, np.newaxis]
        factors = np.exp(self.log_decay - since).astype(np.float32)
        return self.schema.widened(self.schema.rounded(vectors * factors))

    def _read_base(self, keys: Keys, out: Vectors | None) -> Mask:
        present = np.zeros(keys.size, np.bool_)
        for shard in self.shards:
            if not shard.keys.size:
                continue
            missing = slice(None) if not present.any() else np.flatnonzero(~present)
            positions = shard.find(keys[missing])
            if out is None:
                present[missing] = positions >= 0
            elif isinstance(missing, slice):
                self._take(shard.rows, positions, out)
                np.greater_equal(positions, 0, out=present)
            else:
                hits = np.flatnonzero(positions >= 0)
                present[missing[hits]] = True
                out[missing[hits]] = self.schema.widened(npy.take(shard.rows, positions[hits]))
        return present

    def _take(self, rows: Rows, positions: npt.NDArray[np.int64], out: Vectors) -> None:
        """Copies rows at positions to `out`; where a position is -1, any row."""
        if rows.dtype == np.float32 and isinstance(rows, np.ndarray):
            np.take(rows, positions, axis=0, mode="clip", out=out)
        else:
            out[:] = self.schema.widened(npy.take(rows, positions))
