"""All that reads dumps, with one interface: for tests of what each does with damaged files.

A reader is made of the path of the files that it reads, which are sound at this time.

- `read` reads them, or what is new in them.
- `is_right`: the reader has what was dumped.
- `has_kept(place)`: it has what it must have after an error in snapshot `place` of the chain: all
  that it had before, or, if each snapshot becomes visible at once, the snapshots before that one.
- `must_find(file)`: damage of the file may not stay unnoticed.
"""

from __future__ import annotations

import warnings

import keras
import numpy as np
import op_helpers as h
import table_reader
import tensorflow as tf
from op_helpers import ops
from served_helpers import describe, lookup, opened, served_table

import tf_dynemb as de
from tf_dynemb import layers
from tf_dynemb.serving import Reader
from tf_dynemb.storage import Chain, DataLossError

# Keys of the tables below: some were erased, and some never had a row.
KEYS = {
    "user": np.array([1, -5, 2**40, 77, 5, 3]),
    "item": np.array([4, -4, 9, 10, 12, 3], np.int32),
}
CHECKSUMS = "tf_dynemb.checksums.json"


def make_tables():
    """A table with state and one without, and their optimizer."""
    tables = [
        de.DynamicVariable(2, name="user", seed=1),
        de.DynamicVariable(3, name="item", seed=2, key_type=tf.int32, dtype=tf.bfloat16),
    ]
    return tables, de.OptimizerWrapper(keras.optimizers.Adagrad(0.5))


def other_tables():
    """The same with other rows."""
    (user, item), optimizer = make_tables()
    step(optimizer, user, [1, 3, 4])
    optimizer.attach([user, item])
    item.upsert(tf.constant([9, 11], tf.int32), [[7.0, 8.0, 9.0]] * 2)
    return [user, item], optimizer


def step(optimizer, table, keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup(keys) ** 2)
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def in_bits(found):
    """The sizes of tables, whether they contain KEYS, and the vectors of KEYS, to compare."""
    return [(size, np.array(there).tolist(), bits(vectors)) for size, there, vectors in found]


def bits(vectors) -> bytes:
    return np.asarray(vectors, np.float32).tobytes()


class Dumped:
    """A base and two deltas, which change and delete rows, and what is right after each.

    Attributes:
        num_files: the number of its files.
        path: the path of the chain.
        names: the names of its snapshots.
        other: the path of a base of other tables with the same names.
        tables: the tables that were dumped.
        rows: all of their rows at the end, for each column.
        iterations: the steps of their optimizer.
        answers: for each snapshot its id, its watermark, and what is then in the tables.
    """

    num_files = 3 * (1 + 6 + 5)

    def __init__(self, folder):
        self.path, self.other = folder / "chain", folder / "other"
        self.tables, optimizer = make_tables()
        user, item = self.tables
        step(optimizer, user, [1, -5, 2**40])
        item.lookup(tf.constant([4, -4, 9], tf.int32))
        last = de.dump(self.path, self.tables, optimizer, quiet=True)
        self.answers = [self._answers(last)]
        for trained, erased, items, erased_item in (
            ([1, 77], -5, [9, 10], 4),
            ([1, 5], 77, [9, 12], 10),
        ):
            step(optimizer, user, trained)
            user.erase([erased])
            item.upsert(tf.constant(items, tf.int32), [[1.0, 2.0, items[1]]] * 2)
            item.erase(tf.constant([erased_item], tf.int32))
            last = de.incremental_dump(self.path, self.tables, optimizer=optimizer, quiet=True)
            self.answers.append(self._answers(last))
        self.names = Chain.names(self.path)
        self.rows = table_reader.contents(self.tables)
        self.iterations = int(optimizer.core.iterations)
        de.dump(self.other, other_tables()[0], quiet=True)

    def _answers(self, last):
        found = [
            (len(table), table.contains(keys), table.lookup(keys, insert=False))
            for table, keys in zip(self.tables, KEYS.values(), strict=True)
        ]
        return last.id, last.tick, in_bits(found)

    def num_after(self, id_) -> int:
        """Returns the number of snapshots after the one with an id; of all if it is another's."""
        ids = [answer[0] for answer in self.answers]
        return len(ids) - (ids.index(id_) + 1 if id_ in ids else 0)

    def are_right(self, rows, columns=("keys", "vectors", "updates")) -> bool:
        """Returns whether rows are those of the dump; rows without state may have a fresh one."""
        state = rows["user"].same(self.rows["user"], ("state",))
        return state and table_reader.same(rows, self.rows, columns)


class OfChains:
    """Readers of a copy of a chain.

    Attributes:
        columns: the columns that are read.
        kinds: the kinds of snapshots that are read.
        samples: how many bytes of each file are flipped at random: some readers are slow.
        dump: the class of what is read.
    """

    columns = ("keys", "vectors", "updates", "accesses", "state", "index", "deleted")
    kinds = ("base", "delta")
    samples = 10
    dump: type = Dumped

    def __init__(self, dumped, path):
        self.dumped, self.path = dumped, path
        self.start()

    def start(self):
        """Takes a state before the files are read."""

    @classmethod
    def must_find(cls, file) -> bool:
        kind = file.parent.name.split("-")[1]
        column = file.name.split(".")[-2]
        return kind in cls.kinds and column in ("MANIFEST", *cls.columns)


class Load(OfChains):
    """`load` into tables that have other rows; they change together or not at all."""

    restored = ("keys", "vectors", "updates")
    samples = 40

    def start(self):
        self.tables, self.optimizer = other_tables()
        self.before = self.state()

    def read(self):
        de.load(self.path, self.tables, self.optimizer, quiet=True)

    def state(self):
        rows = table_reader.contents(self.tables)
        counts = [(len(table), dict(table.snapshots.items())) for table in self.tables]
        return rows, counts, int(self.optimizer.core.iterations)

    def is_right(self):
        iterations = int(self.optimizer.core.iterations)
        return (
            self.dumped.are_right(table_reader.contents(self.tables), self.restored)
            and iterations == self.dumped.iterations
            and all(self.dumped.answers[-1][0] in table.snapshots for table in self.tables)
        )

    def has_kept(self, place):
        rows, *others = self.state()
        same = table_reader.same(rows, self.before[0], table_reader.ALL)
        return same and others == list(self.before[1:])


class ApplyDelta(Load):
    """`apply_delta` to tables that have the base: no delta is applied unless all are sound."""

    kinds = ("delta",)
    samples = 10
    restored = ("keys", "vectors")  # its updates are of now

    def start(self):
        self.tables, self.optimizer = make_tables()
        base = self.dumped.path / self.dumped.names[0]
        de.load(base, self.tables, self.optimizer, quiet=True)
        self.before = self.state()

    def read(self):
        de.apply_delta(self.path, self.tables, self.optimizer)


class OpenReader(OfChains):
    """A new `Reader`. If a delta is damaged, it has the state before it, and warns.

    If a delta has a later version, the reader does not open.
    """

    def read(self):
        self.reader, self.must_open = None, True
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                self.reader = Reader(self.path, verify=True)
            except ValueError as error:
                self.must_open = isinstance(error, DataLossError)
                raise
        if said:
            raise DataLossError(str(said[0].message))

    def answers(self):
        reader = self.reader
        found = [
            (reader.size(name), reader.contains(keys, name), reader.lookup(keys, name))
            for name, keys in KEYS.items()
        ]
        return reader.id, reader.watermark, in_bits(found)

    def is_right(self):
        return self.answers() == self.dumped.answers[-1]

    def has_kept(self, place):
        if self.reader is None:
            return place == 0 or not self.must_open
        return self.answers() == self.dumped.answers[place - 1]


class Following:
    """Readers to which each snapshot becomes visible at once, after the state `before`."""

    def has_kept(self, place):
        return self.answers() == [self.before, *self.dumped.answers][place]


class FollowingReader(Following, OpenReader):
    """A `Reader` of the base, which follows the deltas."""

    kinds = ("delta",)

    def start(self):
        self.begin(Reader(self.dumped.path / self.dumped.names[0]), unrelated=False)

    def begin(self, reader, unrelated):
        self.reader, self.unrelated = reader, unrelated
        self.before = self.answers()

    def read(self):
        new = self.dumped.num_after(self.reader.id)
        assert self.reader.follow(self.path, unrelated=self.unrelated) == new


class ReplacedReader(FollowingReader):
    """A `Reader` of other tables, whose rows the chain replaces."""

    kinds = ("base", "delta")

    def start(self):
        self.begin(Reader(self.dumped.other, verify=True), unrelated=True)


class OpenServed(OfChains):
    """The served tables of an exported model that is loaded."""

    columns = ("keys", "vectors", "index", "deleted")
    samples = 100

    def open(self, path, **options):
        # If the handles were still there, the next ones would be of the same model.
        self.handles = ()
        descriptor = describe(self.path.parent, path, **options)
        self.handles = [opened(table, descriptor) for table in self.dumped.tables]

    def read(self):
        self.open(self.path)

    def vectors(self):
        return [lookup(*table) for table in self.parts()]

    def parts(self):
        """The handle, the keys to look up and the dtype of each table."""
        dtypes = [table.dtype for table in self.dumped.tables]
        return zip(self.handles, KEYS.values(), dtypes, strict=True)

    def answers(self):
        state = ops.dynemb_served_state(self.handles[0])
        found = [
            (h.size(handle), ops.dynemb_contains(handle, keys), vectors)
            for (handle, keys, _), vectors in zip(self.parts(), self.vectors(), strict=True)
        ]
        return state.id.numpy().decode(), int(state.watermark), in_bits(found)

    def is_right(self):
        return self.answers() == self.dumped.answers[-1]

    def has_kept(self, place):
        return len(self.handles) == 0


class LargeServed(OpenServed):
    """The served tables of a base that is so large that each lookup verifies what it reads."""

    def read(self):
        self.open(self.path, verify_bytes=0)
        self.vectors()

    def has_kept(self, place):
        return True


class LargePooled(LargeServed):
    """The same with pooled lookups: each bag has one id here."""

    def vectors(self):
        bags = [np.int64(1)], [6]
        return [
            h.lookup_sparse([handle], [keys], *bags, [dim], dtypes=[dtype], insert=False).outputs[0]
            for (handle, keys, dtype), dim in zip(self.parts(), (2, 3), strict=True)
        ]


class FollowingServed(Following, OpenServed):
    """Served tables of the base, to which the deltas are applied."""

    kinds = ("delta",)

    def start(self):
        self.begin(self.dumped.path / self.dumped.names[0])

    def begin(self, path, **options):
        self.open(path, **options)
        self.before = self.answers()

    def read(self):
        new = self.dumped.num_after(ops.dynemb_served_state(self.handles[0]).id.numpy().decode())
        assert int(ops.dynemb_apply_snapshots(self.handles[0], str(self.path))) == new


class ReplacedServed(FollowingServed):
    """Served tables of other tables, whose rows the chain replaces."""

    kinds = ("base", "delta")

    def start(self):
        self.begin(self.dumped.other, unrelated=True)


def make_model():
    inputs = keras.Input([3], dtype="int64", name="ids")
    vectors = layers.Embedding(4, combiner="sum", name="user")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="out")(vectors))
    model.layers[1].table.upsert(np.arange(40), np.random.default_rng(1).normal(size=[40, 4]))
    return model


class Exported:
    """An exported model; members as in `Dumped`."""

    num_files = 13

    def __init__(self, folder):
        self.model = make_model()
        self.table = self.model.layers[1].table
        self.path = folder / "model"
        de.export_saved_model(self.model, self.path)
        self.names = [manifest.parent.name for manifest in self.path.rglob("MANIFEST.json")]


class SavedModel(OpenServed):
    """The table of an exported model, which its initializer opens: all files are verified."""

    dump = Exported
    samples = 1000

    def read(self):
        self.handles = ()
        handle = served_table(self.dumped.table)
        ops.dynemb_open_served_table(handle, str(self.path / "assets" / "tf_dynemb.json"))
        self.handles = (handle,)

    @classmethod
    def must_find(cls, file):
        return "tf_dynemb" not in file.parts or super().must_find(file)

    def is_right(self):
        keys = np.arange(-3, 60)
        expected = self.dumped.table.lookup(keys, insert=False)
        kernel = self.dumped.model.layers[-1].kernel
        (read,) = ops.dynemb_served_weights(
            self.handles[0], names=["out/kernel"], dtypes=[tf.float32], shapes=[kernel.shape]
        )
        return (bits(lookup(self.handles[0], keys)), bits(read)) == (bits(expected), bits(kernel))


READERS = [
    Load,
    ApplyDelta,
    OpenReader,
    FollowingReader,
    ReplacedReader,
    OpenServed,
    LargeServed,
    LargePooled,
    FollowingServed,
    ReplacedServed,
    SavedModel,
]
