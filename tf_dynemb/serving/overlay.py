"""The changes of deltas, in memory: levels that are merged as they grow.

A level is newer than all before it. A new level is merged with the levels before it that are less
than `GROWTH` times as large. A key is therefore probed in few levels and copied few times, for any
number and size of deltas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb.format import key_index
from tf_dynemb.serving.keys import Keys

GROWTH = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Overlay:
    """Rows by key, and deleted keys.

    Attributes:
        keys: [n], distinct: the keys of `rows`, then the deleted keys.
        rows: [at most n, ...].
        index: the index of `keys`.
        salt: the salt of the index.
        decays: [rows]: the `Table.log_decay` at which each row was up to date; None: all of them at
            0.
    """

    keys: Keys
    rows: npt.NDArray[Any]
    index: npt.NDArray[np.uint32]
    salt: int
    decays: npt.NDArray[np.float64] | None = None

    @classmethod
    def of(
        cls,
        keys: Keys,
        rows: npt.NDArray[Any],
        deleted: Keys,
        decays: npt.NDArray[np.float64] | None = None,
    ) -> Overlay:
        """Indexes the keys of `rows` and the deleted keys; no key can be in both."""
        both = np.concatenate([keys, deleted])
        return cls(both, rows, *key_index.build(both), decays)

    @property
    def live(self) -> Keys:
        """The keys of `rows`."""
        return self.keys[: len(self.rows)]

    @property
    def deleted(self) -> Keys:
        """The deleted keys."""
        return self.keys[len(self.rows) :]

    def find(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Returns positions in `self.keys`, -1 if absent; from `len(rows)` on, keys are deleted."""
        return key_index.find(self.index, self.keys, keys, self.salt)

    def lacks(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Returns which keys are neither in `rows` nor deleted."""
        return self.find(keys) < 0


def push(
    levels: tuple[Overlay, ...],
    level: Overlay,
    beneath: Callable[[Keys], npt.NDArray[np.bool_]],
    join: Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]] = np.concatenate,
) -> tuple[Overlay, ...]:
    """Returns the levels with a newer one on top; levels of similar size are merged.

    Args:
        levels: the levels, oldest first.
        level: the newer level.
        beneath: returns which keys are in the table beneath all levels. The lowest level needs to
            record deletions of these keys only.
        join: concatenates the rows of levels.
    """
    while levels and len(levels[-1].keys) < GROWTH * len(level.keys):
        level = _merge(levels[-1], level, join)
        levels = levels[:-1]
    if not levels and len(level.deleted):
        deleted = level.deleted[beneath(level.deleted)]
        level = Overlay.of(level.live, level.rows, deleted, level.decays)
    return (*levels, level) if len(level.keys) else levels


def _merge(
    older: Overlay, newer: Overlay, join: Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]]
) -> Overlay:
    kept = newer.lacks(older.live)
    decays = None
    if older.decays is not None or newer.decays is not None:
        before, after = (
            np.zeros(len(level.rows)) if level.decays is None else level.decays
            for level in (older, newer)
        )
        decays = np.concatenate([before[kept], after])
    return Overlay.of(
        np.concatenate([older.live[kept], newer.live]),
        join([older.rows[kept], newer.rows]),
        np.concatenate([older.deleted[newer.lacks(older.deleted)], newer.deleted]),
        decays,
    )
