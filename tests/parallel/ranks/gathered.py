"""Helpers for cases of several ranks: batches, their parts, whole tables, one rank to compare.

All randomness comes from seeded generators, so every rank draws the same batch, and takes its part.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.variables import transfer


@contextmanager
def one_rank():
    """Inside, this rank creates and trains tables as if it were the only one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "get", lambda: communicator.LOCAL)
        yield


@dataclasses.dataclass(frozen=True)
class Bags:
    """Samples with ids: sample i has the next `lengths[i]` of `ids` and `weights`."""

    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, samples: slice) -> Bags:
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        begin, end, _ = samples.indices(len(self))
        part = slice(ends[begin], ends[end])
        return Bags(self.ids[part], self.lengths[begin:end], self.weights[part])

    def part(self, rank, size):
        """Returns the samples of one of `size` ranks; all ranks in order have all samples."""
        share = len(self) // size
        assert share * size == len(self)
        return self[rank * share : (rank + 1) * share]

    def ragged(self, values=None, dtype=None):
        """Returns the ids, or other values in their order, as a RaggedTensor."""
        values = tf.convert_to_tensor(self.ids if values is None else values, dtype)
        splits = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        return tf.RaggedTensor.from_row_splits(values, splits, validate=False)

    def sparse(self, values=None, dtype=None):
        """Same as `ragged`, as a SparseTensor."""
        values = tf.convert_to_tensor(self.ids if values is None else values, dtype)
        rows = np.repeat(np.arange(len(self)), self.lengths)
        columns = np.arange(len(self.ids)) - np.repeat(
            np.cumsum(self.lengths) - self.lengths, self.lengths
        )
        indices = np.stack([rows, columns], 1).astype(np.int64).reshape(-1, 2)
        return tf.SparseTensor(indices, values, [len(self), max([1, *self.lengths])])


def draw(rng, rows, batch, most, least=1):
    """Bags of `least` to `most` ids below `rows`, weights from N(0, 1)."""
    lengths = rng.integers(least, most + 1, batch)
    count = int(lengths.sum())
    return Bags(rng.integers(0, rows, count), lengths, rng.normal(size=count).astype(np.float32))


def gather(comm, array, name="of_all"):
    """Returns, on every rank, the arrays of all ranks, concatenated in their order."""
    array = np.ascontiguousarray(array)
    width = array.itemsize * int(np.prod(array.shape[1:], dtype=int))
    flat = tf.constant(array.reshape(-1).view(np.uint8).reshape(len(array), width))
    found = np.ascontiguousarray(comm.allgather(flat, f"test/{name}").numpy())
    return found.reshape(-1).view(array.dtype).reshape(len(found), *array.shape[1:])


def sum_of_all(comm, array):
    """Returns the sum of the ranks' arrays."""
    return gather(comm, np.asarray(array)[np.newaxis]).sum(0)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a table in the order of their keys; vectors as float32, state as in the row."""

    keys: np.ndarray
    vectors: np.ndarray
    state: np.ndarray

    def bits(self):
        return self.keys.tobytes(), self.vectors.tobytes(), self.state.tobytes()

    def at(self, keys):
        """Returns the vectors of some keys, all of which must have a row."""
        found = np.searchsorted(self.keys, keys)
        np.testing.assert_array_equal(self.keys[found], keys)
        return self.vectors[found]


def rows_here(table):
    keys, vectors, state = transfer.export_rows(table)
    return in_order(keys.numpy(), tf.cast(vectors, tf.float32).numpy(), state.numpy())


def in_order(keys, vectors, state):
    order = np.argsort(keys, kind="stable")
    assert len(np.unique(keys)) == len(keys), "two rows have one key"
    return Rows(keys[order], vectors[order], state[order])


def whole_table(comm, table) -> Rows:
    """Returns the rows of a table on all ranks; each must be on its owner."""
    here = rows_here(table)
    if table.mode is not None and table.mode.startswith("localized") and comm.size > 1:
        assert not len(here.keys) or comm.rank == int(table.mode.split(":")[1])
    elif comm.size > 1:
        owner = _ops.library().dynemb_owners(tf.constant(here.keys), num_ranks=comm.size)
        assert (np.asarray(owner) == comm.rank).all(), "a row is not on the rank that owns its key"
    return in_order(*(gather(comm, part) for part in (here.keys, here.vectors, here.state)))


def whole_matrix(comm, variable):
    """Returns the value of a `Variable` on all ranks, [rows, dimension]."""
    value = tf.cast(variable.value(), tf.float32).numpy()
    rows = np.arange(variable.global_shape[0])
    if variable.mode is None or variable.mode == "distributed":
        rank_rows = rows[comm.rank :: comm.size]
    else:
        rank_rows = (
            rows[:] if comm.rank == int(variable.mode.split(":")[1]) % comm.size else rows[:0]
        )
    assert value.shape == (len(rank_rows), variable.global_shape[1])
    found = np.full(variable.global_shape, np.nan, np.float32)
    found[gather(comm, rank_rows)] = gather(comm, value)
    assert not np.isnan(found).any()
    return found


def same_on_all(comm, value):
    """Raises unless all ranks have the same array."""
    value = np.asarray(value)
    for other in gather(comm, value[np.newaxis]):
        np.testing.assert_array_equal(other, value)


def square_error(got, expected):
    """Returns the relative error that SOK's tests limit."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.square(got - expected).sum() / (np.square(got) + np.square(expected)).sum()


def close(got, expected, relative=1e-5):
    """Compares with a tolerance relative to the largest number of each column."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    scale = np.maximum(np.abs(expected).max(0, initial=0), 1e-30)
    worst = (np.abs(got - expected) / scale).max(initial=0)
    assert worst < relative, f"relative error {worst:.2g}"
