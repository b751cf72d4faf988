"""Reads and splits the Adult data set as ids, and lists published scores on it.

Every field becomes an id. The id of a categorical value is a hash of its text. The id of a numeric
value is its bucket among 32 quantiles of the training rows. The upper 32 bits hold the number of
the field, so no two fields share an id. There is no vocabulary: a hash table takes any ids.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from scoring import score as score  # re-exported for scripts that use this data

DEFAULT_PATH = Path(__file__).resolve().parent / "data" / "adult.parquet"
TEST_ROWS = 16_281
VALIDATION_ROWS = 6_513
BUCKETS = 32
LABEL = "income"

# AUC and accuracy on the same test rows, mean of 15 seeds, from the code and results of
# "Revisiting Deep Learning Models for Tabular Data".
PUBLISHED = {
    "MLP": (0.9047, 0.8522),
    "DCNv2": (0.9057, 0.8529),
    "ResNet": (0.9080, 0.8544),
    "AutoInt": (0.9125, 0.8589),
    "FT-Transformer": (0.9135, 0.8587),
    "CatBoost, tuned": (0.9263, 0.8727),
}
# AUC, accuracy and logloss of the quickstart with `--embedding keras`, mean of 3 seeds, from
# benchmarks/results/2026-11-21_cpu.txt.
MEASURED = {"keras.layers.Embedding": (0.9127, 0.8599, 0.3058)}

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Split:
    """A subset of the rows: `ids` of shape (rows, fields) and `labels` of shape (rows,)."""

    ids: Ids
    labels: Floats

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Adult:
    """The three splits, and the names of the fields in the order of the columns of the ids."""

    fields: tuple[str, ...]
    train: Split
    validation: Split
    test: Split


def load(path: str | Path = DEFAULT_PATH, seed: int = 0) -> Adult:
    """Reads the data and splits it.

    Args:
        path: the Parquet file.
        seed: chooses the training rows that are held out for validation.

    Returns:
        The training, validation and test rows as ids and labels.
    """
    table = pq.read_table(path)
    columns = {
        name: np.asarray(table[name].to_pylist()) for name in table.column_names if name != LABEL
    }
    labels = np.asarray([text == ">50K" for text in table[LABEL].to_pylist()], np.float32)

    train_rows = TEST_ROWS + np.random.default_rng(seed).permutation(len(labels) - TEST_ROWS)
    validation_rows, train_rows = train_rows[:VALIDATION_ROWS], train_rows[VALIDATION_ROWS:]

    ids = np.stack(
        [
            (np.int64(field) << 32) | _field_ids(values, train_rows)
            for field, values in enumerate(columns.values())
        ],
        axis=1,
    )

    def split(rows: npt.NDArray[np.int64]) -> Split:
        return Split(ids[rows], labels[rows])

    return Adult(
        fields=tuple(columns),
        train=split(train_rows),
        validation=split(validation_rows),
        test=split(np.arange(TEST_ROWS)),
    )


def _field_ids(values: npt.NDArray, train_rows: npt.NDArray[np.int64]) -> Ids:
    """Returns the ids of one field's values, below 2**32."""
    if values.dtype.kind in "iuf":
        edges = np.quantile(values[train_rows], np.linspace(0, 1, BUCKETS + 1)[1:-1])
        return np.searchsorted(np.unique(edges), values, side="right").astype(np.int64)
    texts, index = np.unique(values, return_inverse=True)
    hashes = np.asarray([zlib.crc32(text.encode()) for text in texts], np.int64)
    if len(np.unique(hashes)) != len(hashes):
        raise ValueError("two values of one field have the same hash")
    return hashes[index]


def category_id(fields: tuple[str, ...], field: str, text: str) -> int:
    """Returns the id of one value of a categorical field."""
    return fields.index(field) << 32 | zlib.crc32(text.encode())


def vocabulary_of(ids: Ids) -> Ids:
    """Returns the distinct ids, sorted; a table of fixed size needs them beforehand."""
    return np.unique(ids)


def row_numbers(ids: Ids, vocabulary: Ids) -> Ids:
    """Maps ids to rows of a table of `len(vocabulary) + 1` rows; unknown ids map to row 0."""
    position = np.searchsorted(vocabulary, ids).clip(max=len(vocabulary) - 1)
    return np.where(vocabulary[position] == ids, position + 1, 0)


def report(measured: dict[str, float], title: str) -> Iterable[str]:
    """Yields the lines of a table with the measured figures below the figures of other models."""
    yield f"{'test set':24}{'AUC':>8}{'accuracy':>10}{'logloss':>9}"
    for name, (auc, accuracy) in PUBLISHED.items():
        yield f"{name + ' (published)':28}{auc:.4f}{accuracy:10.4f}{'-':>9}"
    for name, (auc, accuracy, logloss) in MEASURED.items():
        yield f"{name:28}{auc:.4f}{accuracy:10.4f}{logloss:9.4f}"
    auc, accuracy, logloss = measured["auc"], measured["accuracy"], measured["logloss"]
    yield f"{title:28}{auc:.4f}{accuracy:10.4f}{logloss:9.4f}"
