"""The model that `trainer.py` trains and a server serves, and the clicks that it learns from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import numpy.typing as npt

import tf_dynemb as de

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

DIM = 16

# The files that the trainer writes into its folder.
MODEL = "model"  # the SavedModel
PUBLISHED = "published"  # the chain of a base and deltas
PROBES = "probes.jsonl"  # for each snapshot: its watermark, and the scores of the probe


def scores_of(folder: Path) -> Path:
    """The file of the scores by which `load.py` checks answers."""
    return folder / PROBES


class Clicks(NamedTuple):
    """Ids of shape [rows], and 1 for each click."""

    users: Ids
    items: Ids
    labels: Floats


class ClickStream:
    """Clicks whose users and items come by a power law; what users like changes slowly.

    Args:
        users: the number of users, and of items.
        seed: of the ids and of the tastes.
    """

    def __init__(self, users: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._users = users
        self._taste = self._rng.normal(size=[users, 4]).astype(np.float32)

    def ids(self, rows: int) -> tuple[Ids, Ids]:
        """Draws users and items."""
        users, items = (self._users * self._rng.random([2, rows]) ** 3).astype(np.int64)
        return users, items

    def batch(self, rows: int) -> Clicks:
        """Draws clicks, after a small change of all tastes."""
        self._taste += 0.05 * self._rng.normal(size=self._taste.shape).astype(np.float32)
        users, items = self.ids(rows)
        odds = (self._taste[users] * self._taste[-1 - items]).sum(1)
        labels = self._rng.random(rows) < 1 / (1 + np.exp(-odds))
        return Clicks(users, items, labels.astype(np.float32))


def build() -> keras.Model:
    """Embeddings of a user and an item, and a small network over both."""
    inputs = [keras.Input([1], dtype="int64", name=name) for name in ("users", "items")]
    vectors = [
        de.layers.Embedding(DIM, combiner="sum", initializer="normal", name=f"{each.name}_table")(
            each
        )
        for each in inputs
    ]
    hidden = keras.layers.Dense(32, "relu")(keras.layers.Concatenate()(vectors))
    return keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
