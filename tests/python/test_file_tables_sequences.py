"""Random sequences of operations on tables with rows in files, and the same ones in memory."""

import tempfile

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import tensorflow as tf
from file_pairs import DIM, Pair, as_numpy

import tf_dynemb as de

K = keras.optimizers
IDS = 300


def exported(rows):
    keys, vectors, state = (part.numpy() for part in rows[:3])
    order = np.argsort(keys)
    return tuple(part[order].tobytes() for part in (keys, vectors, state))


def values_of(ids):
    return np.sin(ids[:, None] + np.arange(DIM)).astype(np.float32)


class Machine:
    """A pair of tables, and the operations that hypothesis chooses from."""

    def __init__(self, folder, dtype):
        self.folder = folder
        self.pair = Pair(folder + "/rows", lambda: K.Adagrad(0.1), states=1, rows=64, dtype=dtype)
        for table, optimizer in zip(self.pair.tables, self.pair.optimizers, strict=True):
            optimizer.attach([table])
        self.pending = None
        self.dumped = False

    def lookup(self, ids):
        self.pair.both(lambda t: t.lookup(ids))

    def read(self, ids):
        self.pair.both(lambda t: t.lookup(ids, insert=False, return_exists=True))

    def pool(self, ids):
        bags = tf.RaggedTensor.from_row_lengths(ids, [0, len(ids) // 2, len(ids) - len(ids) // 2])
        self.pair.both(lambda t: de.lookup_sparse([t, t], [bags, bags[::-1]], combiners="mean"))

    def step(self, ids):
        self.pair.step(ids, seed=len(ids))

    def begin_step(self, ids):
        """A gradient that is applied later, when rows may have left memory.

        If a row was erased and created again meanwhile, a table in memory drops its gradient, and a
        table with files applies it.
        """
        self.pending = []
        for table in self.pair.tables:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.cast(table.lookup(ids), tf.float32) * 3)
            self.pending.append(tape.gradient(loss, table))

    def end_step(self, ids):
        gradients, self.pending = self.pending, None
        for i, gradient in enumerate(gradients or ()):
            table = self.pair.tables[i]
            self.pair.optimizers[i].apply_gradients([(gradient, table)])

    def upsert(self, ids):
        values = tf.cast(values_of(ids), self.pair.files.dtype)
        self.pair.both(lambda t: t.upsert(ids, values) and None)

    def add(self, ids):
        slices = tf.IndexedSlices(tf.cast(values_of(ids), self.pair.files.dtype), ids)
        self.pair.both(lambda t: t.scatter_add(slices) and None)

    def erase(self, ids):
        self.pending = None
        self.pair.both(lambda t: t.erase(ids))

    def forget(self, ids):
        self.pending = None
        self.pair.both(lambda t: t.forget(ids))

    def contains(self, ids):
        self.pair.both(lambda t: t.contains(ids))

    def clear(self, ids):
        self.pending = None
        self.pair.both(lambda t: t.clear() and None)

    def export_if(self, ids):
        self.pair.both(lambda t: exported(t.export_if(key_from=min(ids), l2_from=0.95)))

    def erase_if(self, ids):
        self.pending = None
        self.pair.both(lambda t: t.erase_if(key_from=min(ids), key_below=max(ids), l2_from=1.0))

    def dump(self, ids):
        for name, table in zip("ab", self.pair.tables, strict=True):
            (de.incremental_dump if self.dumped else de.dump)(f"{self.folder}/{name}", table)
        self.dumped = True
        readers = [de.serving.Reader(f"{self.folder}/{name}") for name in "ab"]
        vectors = [reader.lookup(np.arange(IDS)) for reader in readers]
        np.testing.assert_array_equal(*vectors)

    def reload(self, ids):
        """Each table takes the rows of the other one's dump."""
        self.pending = None
        if not self.dumped:
            return
        for name, table in zip("ba", self.pair.tables, strict=True):
            de.load(f"{self.folder}/{name}", table)
        self.folder += "/next"
        self.dumped = False

    def size(self, ids):
        self.pair.both(len)


OPERATIONS = sorted(name for name in vars(Machine) if not name.startswith("_"))
COMMON = ("lookup", "step", "step", "read", "pool", "upsert")
OPERATION = st.sampled_from([*OPERATIONS, *COMMON * 2])


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    st.sampled_from([tf.float32, tf.bfloat16]),
    st.lists(st.tuples(OPERATION, st.integers(0, 2**32 - 1)), min_size=30, max_size=60),
)
def test_any_sequence_gives_the_same_rows(dtype, operations):
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(folder, dtype)
        for name, seed in operations:
            rng = np.random.default_rng(seed)
            ids = rng.integers(0, IDS, rng.integers(1, 60))
            getattr(machine, name)(ids)
        machine.pair.check(most_in_files=False)
        assert as_numpy(machine.pair.files.size) == as_numpy(machine.pair.memory.size)
        del machine
