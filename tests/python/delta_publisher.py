"""A trainer in a separate process: exports a model that follows it, and publishes snapshots.

    python delta_publisher.py FOLDER SNAPSHOTS

Exports FOLDER/model, which follows FOLDER/published, and prints "exported". At the first line on
standard input it publishes SNAPSHOTS snapshots, one of them a base. In snapshot n, all vectors of
both tables are n, and the keys of `erased(KEYS, n)` are missing, which read as MISSING. FOLDER/ids
has the ids of the snapshots, in their order.
"""

import pathlib
import sys

import numpy as np
import tensorflow as tf

import tf_dynemb as de

KEYS = np.arange(500)
NAMES = "ab"
MISSING = -1.0


def erased(keys, number):
    """Which keys a snapshot lacks: one in seven, others after every three snapshots."""
    return (keys + number // 3) % 7 == 0


class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.tables = [
            de.DynamicVariable(2, MISSING, "host", name=name, dtype=dtype)
            for name, dtype in zip(NAMES, (tf.float32, tf.float16), strict=True)
        ]

    def set(self, number):
        for table in self.tables:
            table.upsert(KEYS, np.full([len(KEYS), 2], float(number)))

    def erase(self, number):
        for table in self.tables:
            table.erase(KEYS[erased(KEYS, number)])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def serve(self, ids):
        """Reads both tables, one after the other, and then both again."""
        first = self.tables[0].lookup(ids, insert=False)
        with tf.control_dependencies([first]):
            second = self.tables[1].lookup(ids, insert=False)
        with tf.control_dependencies([second]):
            bags = tf.reshape(ids, [-1, 1])
            pooled = de.lookup_sparse(self.tables, [bags, bags], combiners="sum", insert=False)
        return [tf.cast(each, tf.float32) for each in (first, second, *pooled)]


def main():
    folder, snapshots = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    model, published = Model(), folder / "published"
    model.set(0)
    ids = [de.dump(published, model.tables).id]
    de.export_saved_model(
        model, folder / "model", "link", published, follow=published, follow_seconds=0.002
    )
    print("exported", flush=True)
    sys.stdin.readline()
    for number in range(1, snapshots + 1):
        model.set(number)
        model.erase(number)
        publish = de.dump if number == snapshots // 2 else de.incremental_dump
        ids.append(publish(published, model.tables).id)
    (folder / "ids").write_text("\n".join(ids))


if __name__ == "__main__":
    main()
