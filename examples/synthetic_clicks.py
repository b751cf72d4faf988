"""Synthetic clicks that can be learned: ids by a power law, labels from a planted model.

A sample is a function of the seed and its number. Every rank can therefore generate any sample, and
the batches are the same for any number of ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from criteo import DENSE, Samples

Words = npt.NDArray[np.uint64]
Reals = npt.NDArray[np.float64]

_CHUNK = 4096  # samples generated at a time
_WEYL = 0x9E3779B97F4A7C15


def mix(words: Words) -> Words:
    """The finalizer of SplitMix64: maps distinct words to words that look random."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def uniform(words: Words) -> Reals:
    """Maps words to numbers in [0, 1)."""
    return (mix(words) >> np.uint64(11)) * 2.0**-53


class SyntheticClicks:
    """Samples with the shape of Criteo's.

    The id of popularity rank k, among the `rows[i]` ids of feature i, is drawn with a probability
    proportional to about k ** -exponent. The log odds of a click are a sum over the dense features
    and the bags of ids, in which each id has its own effect.

    Args:
        count: the number of samples.
        hotness: ids per sample of each feature.
        rows: distinct ids of each feature.
        exponent: exponent of the power law; 0 is uniform.
        seed: determines the samples and the planted model.
        first: the number of the first sample.
    """

    BIAS = -1.0
    DENSE_EFFECT = 0.2
    BAG_EFFECT = 0.45  # the standard deviation of a bag's part of the log odds

    def __init__(
        self,
        count: int,
        hotness: tuple[int, ...],
        rows: tuple[int, ...],
        exponent: float,
        seed: int,
        first: int = 0,
    ) -> None:
        self.hotness = hotness
        self._count, self._first = count, first
        self._seed = mix(np.array([seed], np.uint64) + np.uint64(_WEYL))
        self._exponent = exponent
        feature = np.repeat(np.arange(len(hotness)), hotness)
        self._rows = np.asarray(rows, np.float64)[feature]
        self._begins = np.cumsum((0, *hotness[:-1]))
        self._salt = mix(self._seed + (np.arange(len(hotness), dtype=np.uint64) << np.uint64(40)))
        self._salt_of_id = self._salt[feature]

    def __len__(self) -> int:
        return self._count

    def read(self, begin: int, end: int) -> Samples:
        """Returns the samples from `begin` up to `end`."""
        chunks = [
            self._make(np.arange(at, min(at + _CHUNK, end)))[0]
            for at in range(begin, max(end, begin + 1), _CHUNK)
        ]
        return Samples(*(np.concatenate(part) for part in zip(*chunks, strict=True)))

    def chances(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Returns the planted model's probabilities of a click, the best possible prediction."""
        chunks = [
            self._make(np.arange(at, min(at + _CHUNK, end)))[1]
            for at in range(begin, max(end, begin + 1), _CHUNK)
        ]
        return np.concatenate(chunks).astype(np.float32)

    def _make(self, numbers: npt.NDArray[np.int64]) -> tuple[Samples, Reals]:
        width = DENSE + len(self._rows) + 1
        places = (numbers + self._first)[:, None] * width + np.arange(width)
        drawn = uniform(places.astype(np.uint64) * np.uint64(_WEYL) + self._seed)
        dense = (drawn[:, :DENSE] * 2 - 1) * np.sqrt(3.0)
        ranks = self._ranks(drawn[:, DENSE:-1])
        effects = (uniform(ranks.astype(np.uint64) + self._salt_of_id) * 2 - 1) * np.sqrt(3.0)
        bags = np.add.reduceat(effects, self._begins, axis=1) / np.sqrt(self.hotness)
        signs = np.where(np.arange(DENSE) % 2, 1.0, -1.0)
        odds = self.BIAS + self.DENSE_EFFECT * dense @ signs + self.BAG_EFFECT * bags.sum(axis=1)
        chances = 1 / (1 + np.exp(-odds))
        labels = drawn[:, -1] < chances
        # Arbitrary 32-bit integers, as in Criteo's data.
        ids = (ranks.astype(np.uint32) * np.uint32(0x9E3779B1)).view(np.int32)
        return Samples(dense.astype(np.float32), ids, labels.astype(np.float32)), chances

    def _ranks(self, drawn: Reals) -> npt.NDArray[np.int64]:
        """Maps numbers in [0, 1) to ranks below `rows`: a continuous power law, truncated."""
        power = 1.0 - self._exponent
        if power == 0.0:
            values = (self._rows + 1) ** drawn
        else:
            values = (drawn * ((self._rows + 1) ** power - 1) + 1) ** (1 / power)
        return np.minimum(values, self._rows).astype(np.int64) - 1
