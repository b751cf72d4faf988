"""Dumps and loads on ranks that are threads."""

import numpy as np
import tensorflow as tf
from rank_model import Rank
from rank_threads import run

KEYS = np.arange(300)


def dump(path, size, steps=2):
    """Returns ranks that wrote rows and dumped them, and their watermarks."""

    def train(comm):
        rank = Rank(comm, path)
        for step in range(steps):
            rank.write(KEYS[50 * step :], step)
        rank.erase(KEYS[:10])
        rank.optimizer.core.iterations.assign(steps)
        return rank, rank.dump()

    return zip(*run(size, train), strict=True)


def dump_and_change(path, size, end=lambda rank: None):
    """Returns ranks that dumped rows and then changed some. `end(rank)` is called last."""

    def train(comm):
        rank = Rank(comm, path)
        rank.write(KEYS[:120], 1)
        rank.dump()
        rank.write(KEYS[60:120] + 40, 2)
        rank.erase(KEYS[:20])
        end(rank)
        return rank

    return run(size, train)


def load(path, size):
    """Returns ranks that had other rows and then loaded, and their watermarks."""

    def follow(comm):
        rank = Rank(comm, path)
        rank.write(KEYS[:5] + 1000, 9)
        rank.erase([1000])
        for matrix in rank.matrices:
            matrix.assign(tf.zeros_like(matrix))
        return rank, rank.load()

    return zip(*run(size, follow), strict=True)
