"""Writes the golden files of format version 1: `python tests/python/golden/make_v1.py DIRECTORY`.

The tf_dynemb of that version wrote them once, and they are never written again; this file shows
how. One path holds a base of two ranks and a delta, the other path only a delta.
"""

import pathlib
import sys
from unittest import mock

import numpy as np

from tf_dynemb.storage import (
    InitializerEntry,
    Publication,
    Shard,
    StateEntry,
    TableEntry,
)

UTC_NS = 1_800_000_000_123_456_789


def user(*shards):
    return TableEntry(
        name="user",
        dimension=2,
        key_type="int64",
        dtype="float32",
        seed=42,
        initializer=InitializerEntry(("uniform",), (-0.05, 0.05)),
        state=StateEntry("adam", (2, 2, 1), (0.0, 0.0, 0.0)),
        shards=shards,
    )


def item(*shards):
    return TableEntry(
        name="item/ü",
        dimension=3,
        key_type="int32",
        dtype="bfloat16",
        seed=-7,
        initializer=InitializerEntry(("constant", "normal", "uniform"), (0.5, 0, 0, 1, -1, 1)),
        state=None,
        shards=shards,
    )


def page(*shards):
    return TableEntry(
        name="page",
        dimension=1,
        key_type="uint64",
        dtype="float16",
        seed=2**64 - 1,
        initializer=InitializerEntry(("truncated_normal",), (0.0, 0.01)),
        state=StateEntry("sgd", (), ()),
        shards=shards,
    )


def write(publication, number, rank, index, **columns):
    for name, values in columns.items():
        writer = publication.part.column(number, name, values.dtype, values.shape[1:], rank)
        writer.append(values)
    if index:
        publication.part.write_index(number, rank)


def uint32(*values):
    return np.array(values, np.uint32)


def write_base(path):
    with Publication(path, "base", block_bytes=256) as base:
        keys = np.array([5, -1, 2**62, 0, -(2**63)])
        write(
            base,
            0,
            0,
            True,
            keys=keys,
            vectors=np.arange(10, dtype=np.float32).reshape(5, 2) / 4,
            state=np.arange(25, dtype=np.float32).reshape(5, 5) * 2,
            updates=uint32(0, 1, 2, 3, 4),
            accesses=uint32(4, 4, 4, 4, 90),
        )
        write(
            base,
            0,
            1,
            True,
            keys=np.empty(0, np.int64),
            vectors=np.empty((0, 2), np.float32),
            state=np.empty((0, 5), np.float32),
            updates=uint32(),
            accesses=uint32(),
        )
        write(
            base,
            1,
            0,
            True,
            keys=np.array([-3, 2**31 - 1], np.int32),
            vectors=np.array([[0x3F80, 0xBF80, 0], [0x4000, 0x7F80, 1]], np.uint16),
            updates=uint32(7, 8),
            accesses=uint32(9, 2**32 - 1),
        )
        write(
            base,
            2,
            1,
            True,
            keys=np.array([9, 2**64 - 1, 2**63], np.uint64),
            vectors=np.array([[0.25], [65504], [-0.0]], np.float16),
            updates=uint32(1, 2, 3),
            accesses=uint32(1, 2, 3),
        )
        return base.publish(
            [
                user(Shard(0, 5, 0, 100), Shard(1, 0, 0, 100)),
                item(Shard(0, 2, 0, 2**40)),
                page(Shard(1, 3, 0, 0)),
            ],
            watermark=2**41,
            watermark_utc_ns=UTC_NS,
            optimizer={"name": "Adam", "config": {"amsgrad": False}, "iterations": 77},
            world_size=2,
            continues=["e" * 32],
        )


def write_delta(path, parent, since):
    with Publication(path, "delta", block_bytes=128) as delta:
        write(
            delta,
            0,
            0,
            False,
            keys=np.array([0, 6]),
            vectors=np.array([[-1, -2], [0.1, 1e-40]], np.float32),
            state=np.arange(10, dtype=np.float32).reshape(2, 5),
            updates=uint32(3, 2),
            accesses=uint32(3, 4),
            deleted=np.array([2**62]),
        )
        write(
            delta,
            1,
            0,
            False,
            keys=np.empty(0, np.int32),
            vectors=np.empty((0, 3), np.uint16),
            updates=uint32(),
            accesses=uint32(),
            deleted=np.empty(0, np.int32),
        )
        write(
            delta,
            2,
            0,
            False,
            keys=np.array([2**64 - 1, 1], np.uint64),
            vectors=np.array([[1.5], [-2]], np.float16),
            updates=uint32(1, 0),
            accesses=uint32(1, 3),
            deleted=np.array([2**63, 8, 9], np.uint64),
        )
        return delta.publish(
            [
                user(Shard(0, 2, 1, 2**41)),
                item(Shard(0, 0, 0, 2**41)),
                page(Shard(0, 2, 3, 2**41)),
            ],
            parent=parent,
            since=since,
            watermark=2**41 + 5,
            watermark_utc_ns=UTC_NS + 1,
        )


def main(directory):
    ids = [f"{i:032x}" for i in (0xA0, 0xA1, 0xA2)]
    with mock.patch("secrets.token_hex", side_effect=ids):
        base = write_base(directory / "chain")
        write_delta(directory / "chain", base.manifest.id, 2**41)
        write_delta(directory / "deltas", "f" * 32, 0)
    for lock in directory.glob("*/LOCK"):
        lock.unlink()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
