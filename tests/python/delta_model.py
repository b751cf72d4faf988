"""A trainer of tables, a model of the changes in its deltas, and followers of its chain."""

from __future__ import annotations

import datetime

import keras
import numpy as np
import table_reader
import tensorflow as tf
from chain_reader import fold, read_snapshot

import tf_dynemb as de
from tf_dynemb import serving, storage

OPTIMIZERS = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.5),
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
}
# The maximum number of rows of "item", which evicts.
CAPACITY = 24


def make_tables(strategy="lru", ttl=None, admits_at=None):
    return [
        de.DynamicVariable(3, "uniform", name="user", seed=1, init_capacity=1),
        de.DynamicVariable(
            2,
            "uniform",
            name="item",
            seed=2,
            key_type=tf.int32,
            dtype=tf.bfloat16,
            init_capacity=1,
            max_capacity=CAPACITY,
            evict_strategy=strategy,
            ttl=ttl,
            ttl_clock=ttl and "data",
            admission=admits_at and de.Frequency(admits_at),
        ),
    ]


def make_optimizer(kind, tables):
    optimizer = de.OptimizerWrapper(OPTIMIZERS[kind]())
    optimizer.attach(tables)
    return optimizer


def spread(table, numbers):
    """Maps numbers to distinct keys over the whole range of the table's type, and 0 to 0."""
    factor = np.uint64(0x9E3779B97F4A7C15)
    keys = np.array(numbers, np.uint64) * factor
    if table.key_type == tf.int32:
        return keys.astype(np.uint32).view(np.int32)
    return keys.view(np.int64)


class History:
    """The times at which each key of a table was last written and last lost, in operations."""

    def __init__(self, table):
        self.table = table
        self.written: dict[int, int] = {}
        self.lost: dict[int, int] = {}
        # The time of the data, and its value when each key was last written.
        self.time = 0
        self.used: dict[int, int] = {}

    def write(self, now, keys, all_of_them=True, is_lookup=False):
        """Records an operation that wrote all keys, or only those that had no row.

        A lookup writes only the keys that the table admits.
        """
        if is_lookup and self.table.options.admission is not None:
            keys = keys[self.table.contains(keys).numpy()]
        for key in keys.tolist():
            if all_of_them or key not in self.written:
                self.written[key] = now
                self.used[key] = self.time
        held = set(table_reader.rows_of(self.table).keys.tolist())
        evicted = set(self.written) - held
        assert not evicted & set(keys.tolist())
        assert not evicted or len(self.table) == self.table.options.max_capacity
        self.lose(now, evicted)
        assert set(self.written) == held

    def lose(self, now, keys):
        for key in keys:
            if self.written.pop(key, None) is not None:
                self.lost[key] = now

    def age(self, now, time, ttl):
        """Records that the time of the data advances."""
        self.time = time
        self.lose(now, [key for key in self.written if time - self.used[key] >= ttl])

    def written_since(self, since):
        return {key for key, time in self.written.items() if time > since}

    def lost_since(self, since):
        return {key for key, time in self.lost.items() if time > since and key not in self.written}


class Trainer:
    def __init__(self, path, kind, strategy="lru", ttl=None, admits_at=None):
        self.path = path
        self.kind = kind
        self.strategy = strategy
        self.ttl = ttl
        self.admits_at = admits_at
        self.tables = make_tables(strategy, ttl, admits_at)
        if ttl:
            self.tables[1].set_data_time(0)
        self.optimizer = make_optimizer(kind, self.tables)
        self.histories = [History(table) for table in self.tables]
        self.now = 0
        # The published snapshots, and moments between operations, with their times.
        self.published: list[tuple[de.Watermark, int]] = []
        self.moments: list[tuple[datetime.datetime, int]] = []

    def contents(self):
        return table_reader.contents(self.tables)

    def step(self, numbers):
        """One step of training, on both tables."""
        self.now += 1
        keys = [
            spread(table, table_numbers)
            for table, table_numbers in zip(self.tables, numbers, strict=True)
        ]
        with tf.GradientTape() as tape:
            vectors = [table.lookup(k) for table, k in zip(self.tables, keys, strict=True)]
            loss = sum(tf.reduce_sum(tf.cast(v, tf.float32) ** 2 + self.now) for v in vectors)
        grads = tape.gradient(loss, self.tables)
        self.optimizer.apply_gradients(zip(grads, self.tables, strict=True))
        for history, k in zip(self.histories, keys, strict=True):
            history.write(self.now, k, is_lookup=True)

    def each(self, number):
        self.now += 1
        return self.tables[number], self.histories[number]

    def upsert(self, number, numbers):
        table, history = self.each(number)
        keys = spread(table, numbers)
        table.upsert(keys, tf.fill([len(keys), table.dimension], float(self.now)))
        history.write(self.now, keys)

    def add(self, number, numbers):
        table, history = self.each(number)
        keys = spread(table, numbers)
        ones = tf.ones([len(keys), table.dimension], table.dtype)
        table.scatter_add(tf.IndexedSlices(ones, keys))
        history.write(self.now, keys)

    def read(self, number, numbers, insert, pooled):
        table, history = self.each(number)
        keys = spread(table, numbers)
        if pooled:
            de.lookup_sparse(table, tf.constant(keys[:, None]), combiners="sum", insert=insert)
        else:
            table.lookup(keys, insert=insert)
        if insert:
            history.write(self.now, keys, all_of_them=False, is_lookup=True)

    def erase(self, number, numbers, forget):
        table, history = self.each(number)
        keys = spread(table, numbers)
        (table.forget if forget else table.erase)(keys)
        history.lose(self.now, keys.tolist())

    def clear(self, number):
        table, history = self.each(number)
        table.clear()
        history.lose(self.now, list(history.written))

    def evict(self, to_rows):
        table, history = self.each(1)
        before = dict(zip(*self._scores(), strict=True))
        evicted = int(table.evict(to_rows))
        assert evicted == max(0, len(before) - to_rows)
        kept = dict(zip(*self._scores(), strict=True))
        gone = before.keys() - kept.keys()
        assert max((before[key] for key in gone), default=-1) <= min(kept.values(), default=2**63)
        history.lose(self.now, gone)

    def erase_if(self, key_from):
        table, history = self.each(1)
        gone = [key for key in history.written if key >= key_from]
        assert table.erase_if(key_from=key_from) == len(gone)
        history.lose(self.now, gone)

    def score(self, numbers):
        """Sets scores, or begins an epoch, where the strategy has that."""
        table, _ = self.each(1)
        if self.strategy == "epoch_lfu":
            table.advance_epoch()
        elif self.strategy != "lru":
            table.set_scores(spread(table, numbers), np.array(numbers) % 7)

    def age(self, by):
        """Advances the time of the data, if "item" has one."""
        table, history = self.each(1)
        if self.ttl:
            table.set_data_time(history.time + by)
            history.age(self.now, history.time + by, self.ttl)

    def _scores(self):
        keys = table_reader.rows_of(self.tables[1]).keys
        return keys.tolist(), self.tables[1].scores(keys).numpy().tolist()

    def note_moment(self):
        self.moments.append((datetime.datetime.now(datetime.timezone.utc), self.now))

    def publish_base(self):
        watermark = de.dump(self.path, self.tables, self.optimizer, quiet=True)
        self.published.append((watermark, self.now))
        chain = storage.Chain.open(self.path)
        assert (chain.base.manifest.id, chain.deltas) == (watermark.id, [])
        assert table_reader.same(fold(chain), self.contents(), table_reader.ALL)

    def publish_delta(self, since, time, exactly=True):
        """Publishes the changes since `since`, which is `time` in the model, and compares both."""
        last, last_time = self.published[-1] if self.published else (None, -1)
        watermark = de.incremental_dump(self.path, self.tables, since, self.optimizer, quiet=True)
        if watermark == last:  # nothing had changed
            assert since in (None, last)
            for history in self.histories:
                assert not history.written_since(last_time)
                assert not history.lost_since(last_time)
            return
        self.published.append((watermark, self.now))
        snapshot = storage.Chain.open(self.path).last
        assert snapshot.manifest.id == watermark.id
        assert snapshot.manifest.watermark == watermark.tick
        contents = self.contents()
        for name, history in zip(contents, self.histories, strict=True):
            rows, deleted = read_snapshot(snapshot, name)
            found = set(rows.keys.tolist())
            gone = set(deleted.tolist())
            assert len(gone) == len(deleted)
            if exactly:
                assert found == history.written_since(time)
                assert gone == history.lost_since(time)
            else:
                assert history.written_since(time) <= found <= set(history.written)
                assert history.lost_since(time) <= gone <= history.lost_since(-1)
            kept = np.isin(contents[name].keys, rows.keys)
            held = type(rows)(*(column[kept] for column in contents[name]))
            assert rows.same(held, table_reader.ALL)
            scored = name == "item" and self.strategy != "lru"
            assert scored or (rows.accesses <= watermark.tick).all()

    @property
    def last_time(self):
        return self.published[-1][1]


class Follower:
    """Tables that are loaded once and then apply deltas."""

    def __init__(self, path, kind, strategy="lru", ttl=None, admits_at=None):
        self.path = path
        self.tables = make_tables(strategy, ttl, admits_at)
        self.optimizer = make_optimizer(kind, self.tables)
        self.load()

    def load(self):
        return de.load(self.path, self.tables, self.optimizer, quiet=True)

    def apply(self):
        return de.apply_delta(self.path, self.tables, self.optimizer)

    def check(self, trainer, columns=("keys", "vectors", "state")):
        assert table_reader.same(table_reader.contents(self.tables), trainer.contents(), columns)
        steps = [int(o.core.iterations) for o in (self.optimizer, trainer.optimizer)]
        assert steps[0] == steps[1]


def reader_contents(reader):
    """Returns the keys and float32 vectors of a serving.Reader, by table, in the order of keys."""
    found = {}
    for name in reader.tables:
        parts = list(reader.items(name, chunk=7))
        keys = np.concatenate([np.empty(0, reader.key_type(name)), *(k for k, _ in parts)])
        none = np.empty((0, reader.dimension(name)), np.float32)
        vectors = np.concatenate([none, *(v for _, v in parts)])
        order = np.argsort(keys)
        found[name] = keys[order], vectors[order]
        assert reader.size(name) == len(keys)
    return found


def check_reader(reader: serving.Reader, contents):
    found = reader_contents(reader)
    assert found.keys() == contents.keys()
    for name, rows in contents.items():
        keys, vectors = found[name]
        wide = rows.vectors
        if wide.dtype == np.uint16:
            wide = (wide.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(keys, rows.keys)
        assert vectors.tobytes() == wide.tobytes()
        assert reader.lookup(keys, name).tobytes() == wide.tobytes()


def check_loaded(path, trainer, scratch=None):
    """Loads a whole chain into fresh tables, and compares their rows with the trainer's."""
    follower = Follower(path, trainer.kind, trainer.strategy, trainer.ttl, trainer.admits_at)
    follower.check(trainer, table_reader.ALL)
    if scratch is not None:
        # The chain's times of last access and scores may differ from the trainer's.
        de.dump(scratch, follower.tables, follower.optimizer, quiet=True)
        both = [fold(storage.Chain.open(place)) for place in (path, scratch)]
        assert table_reader.same(*both, (*table_reader.ALL, "accesses"))
