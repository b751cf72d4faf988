"""Wrote golden/dense: a base with dense variables of two ranks, and a delta with other values.

The script was run once, with tests/python in PYTHONPATH, and is never run again.
"""

import pathlib

import numpy as np

from tf_dynemb.format.safetensors import Array
from tf_dynemb.storage import InitializerEntry, Part, Publication, Shard, TableEntry
from tf_dynemb.storage.local_place import unpublished

VALUES = {
    "tower/0/kernel": Array("float32", np.arange(6, dtype=np.float32).reshape(2, 3)),
    "tower/0/bias": Array("bfloat16", np.array([16256, 49024, 0], np.uint16)),
    "steps": Array("int64", np.array(2**40)),
    "ä": Array("bool", np.array([True, False])),
    "empty": Array("float16", np.zeros([0, 2], np.float16)),
}
SEEDS = {"seeds/dropout": Array("uint32", np.array([7, 2**32 - 1], np.uint32))}


def write_table(part, kind):
    part.column(0, "keys", np.int64).append(np.array([5]))
    part.column(0, "vectors", np.float32, (2,)).append(np.ones([1, 2], np.float32))
    for column in ("updates", "accesses"):
        part.column(0, column, np.uint32).append(np.zeros(1, np.uint32))
    if kind == "base":
        part.write_index(0)
    else:
        part.column(0, "deleted", np.int64).append(np.zeros(0, np.int64))
    initializer = InitializerEntry(("constant",), (0.0, 0.0))
    shard = Shard(0, 1, 0, 0)
    return TableEntry("user", 2, "int64", "float32", 0, initializer, None, (shard,))


def main():
    path = pathlib.Path(__file__).parent / "dense"
    parent = None
    for number, kind in enumerate(("base", "delta")):
        with Publication(path, kind) as publication:
            table = write_table(publication, kind)
            publication.part.write_dense(
                "weights",
                VALUES if kind == "base" else {**VALUES, "steps": Array("int64", np.array(-1))},
            )
            publication.part.write_dense("training", SEEDS)
            other = Part(unpublished(path, publication.id), 1)
            if kind == "base":
                other.write_dense(
                    "training", {"seeds/dropout": Array("uint32", np.array([1, 2], np.uint32))}
                )
            parent = publication.publish(
                [table],
                since=0,
                watermark=10 + number,
                watermark_utc_ns=1_800_000_000_123_456_789,
                parent=parent,
                world_size=2,
                dense=[*publication.part.dense, *other.dense],
                extra={"hour": number, "text": "ü", "list": [1.5, None, {"a": True}]},
            ).manifest.id


if __name__ == "__main__":
    main()
