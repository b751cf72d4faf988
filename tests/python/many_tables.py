"""Creates, trains, dumps and loads many tables in one process; test_many_tables.py sets its limits.

    python many_tables.py FOLDER TABLES

Prints the resident and virtual bytes at the end, as JSON.
"""

from __future__ import annotations

import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_dynemb as de

DIM, IDS, PER_STEP = 64, 200, 100


def memory() -> dict[str, int]:
    fields = (line.split() for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return {f[0][2:-1].lower(): int(f[1]) * 1024 for f in fields if f[0] in ("VmRSS:", "VmSize:")}


def main(folder: str, count: int) -> None:
    tables = [de.DynamicVariable(DIM, name=f"table_{t}", initializer="ones") for t in range(count)]
    ids = [np.arange(t, t + IDS) for t in range(count)]
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(1.0))
    for first in range(0, count, PER_STEP):
        chosen = tables[first : first + PER_STEP]
        with tf.GradientTape() as tape:
            pooled = de.lookup_sparse(
                chosen,
                [tf.RaggedTensor.from_uniform_row_length(i, 1) for i in ids[first:][:PER_STEP]],
                combiners=["sum"] * len(chosen),
            )
            loss = tf.add_n([tf.reduce_sum(x) for x in pooled])
        optimizer.apply_gradients(zip(tape.gradient(loss, chosen), chosen, strict=True))
    trained = [
        np.asarray(tf.nn.embedding_lookup(table, i)) for table, i in zip(tables, ids, strict=True)
    ]
    for vectors in trained:
        assert vectors.shape == (IDS, DIM)
        assert (vectors != 1.0).all()

    de.dump(f"{folder}/dump", tables, optimizer=optimizer)
    for table in tables:
        table.clear()
    de.load(f"{folder}/dump", tables, optimizer=optimizer)
    for table, i, vectors in zip(tables, ids, trained, strict=True):
        stats = table.stats()
        assert (stats["size"], stats["evictions"]) == (IDS, 0)
        np.testing.assert_array_equal(np.asarray(tf.nn.embedding_lookup(table, i)), vectors)
    print(json.dumps({"tables": count, **memory()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
