"""Exact scores of predicted probabilities, in one process or over several ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb.communicator import Communicator

Floats = npt.NDArray[np.float32]


def score(labels: Floats, probabilities: Floats) -> dict[str, float]:
    """Exact AUC, accuracy at 0.5 and logloss of predicted probabilities.

    Args:
        labels: 0 or 1, of shape (rows,).
        probabilities: of shape (rows,).
    """
    wanted = labels > 0.5
    p = probabilities.astype(np.float64)
    # AUC is the probability that a random positive ranks above a random negative. Equal scores
    # share the mean of their ranks.
    _, group, counts = np.unique(p, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    positives, negatives = int(wanted.sum()), int((~wanted).sum())
    auc = (mean_rank[group][wanted].sum() - positives * (positives + 1) / 2) / (
        positives * negatives
    )
    q = p.clip(1e-7, 1 - 1e-7)
    return {
        "auc": float(auc),
        "accuracy": float(np.mean((p >= 0.5) == wanted)),
        "logloss": float(-np.mean(np.where(wanted, np.log(q), np.log1p(-q)))),
    }


def score_of_all(
    comm: Communicator, labels: Floats, probabilities: Floats
) -> dict[str, float] | None:
    """Scores the rows of all ranks together; each may have a different number of them.

    Collective. Rank 0 gets the scores, the other ranks None.
    """
    gathered = [
        comm.allgather(tf.constant(part, tf.float32), f"scoring/{name}").numpy()
        for name, part in (("labels", labels), ("probabilities", probabilities))
    ]
    return score(*gathered) if comm.rank == 0 else None
