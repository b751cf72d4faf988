"""The memory of large outputs is reused, but never while a reader can access it."""

import gc
import resource
from pathlib import Path

import numpy as np
import tensorflow as tf

import tf_dynemb as de

DIM = 32
ROWS = 4096  # 512 KiB of vectors


def numbered(first):
    """Returns ROWS ids from `first` on, and vectors whose elements are the id."""
    keys = np.arange(first, first + ROWS)
    return tf.constant(keys), np.repeat(keys[:, None], DIM, 1).astype(np.float32)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def make_table():
    table = de.DynamicVariable(dimension=DIM)
    for first in range(0, 16 * ROWS, ROWS):
        de.assign(table, *numbered(first))
    return table


def test_output_keeps_its_value_while_it_is_held():
    table = make_table()
    held = []
    for round_ in range(3):
        for first in range(0, 16 * ROWS, ROWS):
            ids, expected = numbered(first)
            output = table.lookup(ids)
            # As a tensor, as an array that shares its memory, as the output of another operator.
            kept = (output, output.numpy(), tf.identity(output))[(round_ + first // ROWS) % 3]
            held.append((kept, expected))
            del output, kept
            if len(held) > 7:
                del held[:5]
            for value, right in held:
                np.testing.assert_array_equal(value, right)
        gc.collect()


def test_concurrent_steps_do_not_share_outputs():
    table = make_table()
    parts = [numbered(first) for first in range(0, 8 * ROWS, ROWS)]

    @tf.function
    def read_all(*ids):
        return [table.lookup(part) for part in ids]  # independent, so they may run concurrently

    for _ in range(10):
        for value, (_, expected) in zip(read_all(*(i for i, _ in parts)), parts, strict=True):
            np.testing.assert_array_equal(value, expected)


def test_memory_is_reused_and_kept_memory_is_bounded():
    table = make_table()
    ids, _ = numbered(0)
    table.lookup(ids)
    addresses = {table.lookup(ids).numpy().ctypes.data for _ in range(20)}
    assert len(addresses) <= 3
    before = resident_bytes()
    for step in range(30):  # 4 to 122 MiB, each an eighth larger
        table.lookup(tf.tile(ids, [round(8 * 1.125**step)]))
    assert resident_bytes() - before < 800 << 20  # of 1.04 GiB
