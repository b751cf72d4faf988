"""The content of a chain of snapshots, read with numpy alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tf_dynemb.format import key_index
from tf_dynemb.storage import Chain


class Rows(NamedTuple):
    """All rows of a table in the order of their keys; bfloat16 as uint16, times in ticks."""

    keys: np.ndarray
    vectors: np.ndarray
    state: np.ndarray
    updates: np.ndarray
    accesses: np.ndarray

    def same(self, other: Rows, columns=("keys", "vectors", "state")) -> bool:
        """Returns whether both are equal, bit by bit."""
        pairs = [(getattr(self, column), getattr(other, column)) for column in columns]
        return all(
            a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
            for a, b in pairs
        )


def in_order(keys, *columns) -> Rows:
    """Rows in the order of their keys, which are distinct."""
    order = np.argsort(keys)
    keys = keys[order]
    assert (keys[1:] != keys[:-1]).all()
    return Rows(keys, *(column[order] for column in columns))


def read_snapshot(snapshot, name) -> tuple[Rows, np.ndarray]:
    """Returns the rows of a table in a snapshot, and the keys that it deletes."""
    _, entry = snapshot.manifest.table(name)
    parts, deleted = [], []
    for shard in entry.shards:
        keys, vectors, updates, accesses = (
            np.array(snapshot.column(name, column, shard.rank))
            for column in ("keys", "vectors", "updates", "accesses")
        )
        state = np.zeros((len(keys), 0), np.float32)
        if "state" in shard.files:
            state = np.array(snapshot.column(name, "state", shard.rank))
        times = (shard.base_tick + column.astype(np.int64) for column in (updates, accesses))
        parts.append((keys, vectors, state, *times))
        if "deleted" in shard.files:
            deleted.append(np.array(snapshot.column(name, "deleted", shard.rank)))
        if "index" in shard.files:
            index = snapshot.column(name, "index", shard.rank)
            found = key_index.find(index, keys, keys, shard.index_salt)
            np.testing.assert_array_equal(found, np.arange(len(keys)))
    rows = in_order(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    gone = np.concatenate([np.empty(0, rows.keys.dtype), *deleted])
    assert not np.isin(gone, rows.keys).any()
    return rows, gone


def fold(chain: Chain) -> dict[str, Rows]:
    """Returns the tables that a chain's base and deltas form; verifies all of its files."""
    tables: dict[str, Rows] = {}
    for snapshot in chain.snapshots:
        snapshot.verify()
        for entry in snapshot.manifest.tables:
            rows, deleted = read_snapshot(snapshot, entry.name)
            old = tables.get(entry.name)
            if old is not None:
                kept = ~np.isin(old.keys, np.concatenate([deleted, rows.keys]))
                both = zip(old, rows, strict=True)
                rows = in_order(*(np.concatenate([a[kept], b]) for a, b in both))
            tables[entry.name] = rows
    return tables
