"""Dumps and loads on ranks that are threads."""

import numpy as np
import tensorflow as tf
from rank_model import Rank
from rank_threads import run

KEYS = np.arange(300)


def dump(path, size, steps=2):
    """Ranks that were trained and dumped, with their watermarks."""

    def train(comm):
        rank = Rank(comm, path)
        for step in range(steps):
            rank.write(KEYS[50 * step :], step)
        rank.erase(KEYS[:10])
        rank.optimizer.core.iterations.assign(steps)
        return rank, rank.dump()

    return zip(*run(size, train), strict=True)


def load(path, size):
    """Ranks that had other rows before they loaded."""

    def follow(comm):
        rank = Rank(comm, path)
        rank.write(KEYS[:5] + 1000, 9)
        rank.erase([1000])
        for matrix in rank.matrices:
            matrix.assign(tf.zeros_like(matrix))
        return rank, rank.load()

    return zip(*run(size, follow), strict=True)
