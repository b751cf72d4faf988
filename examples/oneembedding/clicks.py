"""Batches of clicks in the form of OneFlow's Criteo data: Parquet files, or synthetic clicks.

OneFlow's tools write Criteo's logs as folders `train`, `val` and `test` of Parquet files. Their
columns are `label`, `I1` to `I13` (the dense features) and `C1` to `C26` (an id for each sparse
feature).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from synthetic_clicks import SyntheticClicks, mix

DENSE, SPARSE = 13, 26
COLUMNS = ("label", *(f"I{i + 1}" for i in range(DENSE)), *(f"C{i + 1}" for i in range(SPARSE)))
# The numbers of the columns, from 0, whose pairs are the features of the wide part.
CROSSED = ((0, 1), (2, 3))


class Batch(NamedTuple):
    """Samples: labels float32 [n], dense float32 [n, 13], sparse int64 [n, 26]."""

    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    sparse: npt.NDArray[np.int64]

    def part(self, rank: int, ranks: int) -> Batch:
        """Returns the samples of one of the ranks."""
        ends = [len(self.labels) * r // ranks for r in (rank, rank + 1)]
        return Batch(*(column[slice(*ends)] for column in self))


Batches = Callable[[], Iterator[Batch]]


def parquet_batches(folder: Path, size: int) -> Batches:
    """Returns a function that reads the Parquet files of a folder, in order, in batches.

    Args:
        folder: the folder.
        size: samples per batch. Samples at the end that do not fill one are left out.

    Raises:
        FileNotFoundError: there are no Parquet files.
        ValueError: a file lacks a column.
    """
    import pyarrow.parquet as pq

    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"{folder} has no Parquet files")
    for file in files:
        missing = set(COLUMNS) - set(pq.read_schema(file).names)
        if missing:
            raise ValueError(f"{file} lacks the columns {', '.join(sorted(missing))}")

    def read() -> Iterator[Batch]:
        held: Batch | None = None
        for file in files:
            for rows in pq.ParquetFile(file).iter_batches(size, columns=list(COLUMNS)):
                columns = [rows.column(name).to_numpy(zero_copy_only=False) for name in COLUMNS]
                new = Batch(
                    np.asarray(columns[0], np.float32),
                    np.stack(columns[1 : 1 + DENSE], 1).astype(np.float32),
                    np.stack(columns[1 + DENSE :], 1).astype(np.int64),
                )
                if held is not None:
                    new = Batch(*map(np.concatenate, zip(held, new, strict=True)))
                if len(new.labels) >= size:
                    yield Batch(*(column[:size] for column in new))
                    new = Batch(*(column[size:] for column in new))
                held = new if len(new.labels) else None

    return read


def synthetic_batches(rows: list[int], size: int, count: int, first: int, seed: int) -> Batches:
    """Returns a function that draws synthetic clicks, in batches.

    Args:
        rows: the number of ids of each sparse feature.
        size: samples per batch.
        count: the number of batches.
        first: the number of the first sample.
        seed: determines samples and labels.
    """
    clicks = SyntheticClicks(size * count, (1,) * SPARSE, tuple(rows), 1.1, seed, first)

    def draw() -> Iterator[Batch]:
        for number in range(count):
            samples = clicks.read(number * size, (number + 1) * size)
            # Criteo's dense features are counts.
            counts = np.exp(samples.dense) - 1
            yield Batch(samples.labels, counts.clip(0), samples.ids.astype(np.int64))

    return draw


def endless(batches: Batches) -> Iterator[Batch]:
    """Yields the batches again and again.

    Raises:
        ValueError: there is none.
    """
    while True:
        number = -1
        for number, batch in enumerate(batches()):  # noqa: B007
            yield batch
        if number < 0:
            raise ValueError("the samples do not fill one batch")


def crosses(sparse: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns an id for each pair of ids in the columns of CROSSED: [n, 2].

    A table takes any 64-bit integer, so that a hash of both ids is the id of the pair.
    """
    words = sparse.astype(np.uint64)
    pairs = [mix(mix(words[:, a]) + words[:, b]) for a, b in CROSSED]
    return np.stack(pairs, 1).view(np.int64)
