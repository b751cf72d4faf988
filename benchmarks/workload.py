"""Keys and batches: uniform and zipf draws, and a hash that turns row numbers into keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


def keys_of(rows: Rows) -> Rows:
    """Distinct 64-bit keys in no order, one per row number (the finalizer of SplitMix64)."""
    x = rows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


class Draws:
    """Draws row numbers below `rows`, uniformly or by Zipf's law.

    With Zipf's law, the row of popularity rank k is drawn with a probability proportional to
    k ** -exponent. The rows have random ranks.
    """

    def __init__(self, rows: int, exponent: float | None, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._rows = rows
        self._cumulative: npt.NDArray[np.float64] | None = None
        if exponent is not None:
            weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
            self._cumulative = np.cumsum(weights)
            self._row_of_rank = self._random.permutation(rows)

    def take(self, count: int) -> Rows:
        """Draws `count` row numbers, which may repeat."""
        if self._cumulative is None:
            return self._random.integers(0, self._rows, count)
        chance = self._random.random(count) * self._cumulative[-1]
        return self._row_of_rank[np.searchsorted(self._cumulative, chance)]
