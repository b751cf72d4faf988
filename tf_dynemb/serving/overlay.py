"""What deltas changed, in memory: levels that are merged as they grow.

A level is newer than all before it. A new one is merged with those before it that are not `GROWTH`
times as large, so that a key is probed in few levels and copied few times, however many deltas come
and however small they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb.serving.keys import Keys
from tf_dynemb.storage import key_index

GROWTH = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Overlay:
    """Rows by key, and keys that are gone.

    Attributes:
        keys: [n], distinct: those of `rows`, then those that were deleted.
        rows: [at most n, ...].
        index: of `keys`.
        salt: of the index.
    """

    keys: Keys
    rows: npt.NDArray[Any]
    index: npt.NDArray[np.uint32]
    salt: int

    @classmethod
    def of(cls, keys: Keys, rows: npt.NDArray[Any], deleted: Keys) -> Overlay:
        """Indexes the keys of `rows` and the deleted keys; no key may be in both."""
        both = np.concatenate([keys, deleted])
        return cls(both, rows, *key_index.build(both))

    @property
    def live(self) -> Keys:
        """The keys of `rows`."""
        return self.keys[: len(self.rows)]

    @property
    def deleted(self) -> Keys:
        """The keys that are gone."""
        return self.keys[len(self.rows) :]

    def find(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Positions in `self.keys`, -1 if absent; from `len(rows)` on the key is gone."""
        return key_index.find(self.index, self.keys, keys, self.salt)

    def lacks(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which keys it says nothing about."""
        return self.find(keys) < 0


def push(
    levels: tuple[Overlay, ...], level: Overlay, beneath: Callable[[Keys], npt.NDArray[np.bool_]]
) -> tuple[Overlay, ...]:
    """The levels with a newer one on top, merged where they are too close in size.

    Args:
        levels: the oldest first.
        level: what is newer.
        beneath: which keys what lies beneath all levels has: the lowest level need not say of any
            other key that it is gone.
    """
    while levels and len(levels[-1].keys) < GROWTH * len(level.keys):
        level = _merge(levels[-1], level)
        levels = levels[:-1]
    if not levels and len(level.deleted):
        level = Overlay.of(level.live, level.rows, level.deleted[beneath(level.deleted)])
    return (*levels, level) if len(level.keys) else levels


def _merge(older: Overlay, newer: Overlay) -> Overlay:
    kept = newer.lacks(older.live)
    return Overlay.of(
        np.concatenate([older.live[kept], newer.live]),
        np.concatenate([older.rows[kept], newer.rows]),
        np.concatenate([older.deleted[newer.lacks(older.deleted)], newer.deleted]),
    )
