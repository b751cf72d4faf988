"""Limits of the memory of tables, in GB of 2^30 bytes, from the number of rows that are to fit."""

from __future__ import annotations

import tensorflow as tf


def _multiple(size, unit):
    return -(-size // unit) * unit


def host_memory(rows, dim, states=0, dtype=tf.float32, key_size=8):
    """`max_dram_for_vectors` of a number of rows on the host.

    A row has a key, a time of 4 bytes, a vector and some states of the vector's width. The vector
    begins at a multiple of 4 bytes, and the row at a multiple of 8.
    """
    vector = _multiple(dim * dtype.size, 4)
    return rows * _multiple(key_size + 4 + vector + 4 * states * dim, 8) / 2**30


def device_memory(rows, dim, states=0, dtype=tf.float32):
    """`max_hbm_for_vectors` of a number of rows on a device, and the same on the host beside it.

    Each part of a row begins at a multiple of 16 bytes.
    """
    return rows * (16 + _multiple(dim * dtype.size, 16) + _multiple(4 * states * dim, 16)) / 2**30
