"""Deltas compared with a model of the changes, and followers with the trained tables."""

import datetime
import json
import pathlib
import shutil
import tempfile
import threading

import hypothesis
import keras
import numpy as np
import pytest
import table_reader
import tensorflow as tf
from chain_reader import fold, read_snapshot
from continue_training import CASES, Model
from delta_model import (
    CAPACITY,
    Follower,
    Trainer,
    check_loaded,
    check_reader,
    make_optimizer,
    make_tables,
)
from dump_helpers import run_script
from hypothesis import stateful
from hypothesis import strategies as st

import tf_dynemb as de
from tf_dynemb import serving, storage
from tf_dynemb.tables import cut

TABLE = st.integers(0, 1)
NUMBERS = st.lists(st.integers(0, 40), min_size=1, max_size=10, unique=True)
MANY = st.lists(st.integers(0, 200), min_size=CAPACITY - 8, max_size=CAPACITY, unique=True)


class DeltaMachine(stateful.RuleBasedStateMachine):
    """Trains, publishes and follows in any order."""

    @stateful.initialize(
        kind=st.sampled_from(["adagrad", "adam"]),
        strategy=st.sampled_from(["lru", "lfu", "epoch_lfu", "score"]),
        ttl=st.sampled_from([None, 3, 8]),
        admits_at=st.sampled_from([None, 2, 3]),
        numbers=NUMBERS,
    )
    def begin(self, kind, strategy, ttl, admits_at, numbers):
        self.place = pathlib.Path(tempfile.mkdtemp(prefix="delta_machine"))
        self.trainer = Trainer(self.place / "chain", kind, strategy, ttl, admits_at)
        self.trainer.step([numbers, numbers])
        self.trainer.publish_base()
        self.follower = Follower(self.trainer.path, kind, strategy, ttl, admits_at)
        self.reader = serving.Reader(self.trainer.path)
        self.is_new_base = False

    def teardown(self):
        if hasattr(self, "place"):
            shutil.rmtree(self.place)

    @stateful.rule(users=NUMBERS, items=NUMBERS)
    def step(self, users, items):
        self.trainer.step([users, items])

    @stateful.rule(table=TABLE, numbers=NUMBERS)
    def upsert(self, table, numbers):
        self.trainer.upsert(table, numbers)

    @stateful.rule(table=TABLE, numbers=NUMBERS)
    def add(self, table, numbers):
        self.trainer.add(table, numbers)

    @stateful.rule(table=TABLE, numbers=NUMBERS, insert=st.booleans(), pooled=st.booleans())
    def read(self, table, numbers, insert, pooled):
        self.trainer.read(table, numbers, insert, pooled)

    @stateful.rule(table=TABLE, numbers=NUMBERS, forget=st.booleans())
    def erase(self, table, numbers, forget):
        self.trainer.erase(table, numbers, forget)

    @stateful.rule(table=TABLE)
    def clear(self, table):
        self.trainer.clear(table)

    @stateful.rule(numbers=MANY, insert_only=st.booleans())
    def evict(self, numbers, insert_only):
        if insert_only:
            self.trainer.read(1, numbers, insert=True, pooled=False)
        else:
            self.trainer.upsert(1, numbers)

    @stateful.rule(to_rows=st.integers(0, CAPACITY))
    def evict_to(self, to_rows):
        self.trainer.evict(to_rows)

    @stateful.rule(key_from=st.integers(-(2**31), 2**31 - 1))
    def erase_if(self, key_from):
        self.trainer.erase_if(key_from)

    @stateful.rule(numbers=NUMBERS)
    def score(self, numbers):
        self.trainer.score(numbers)

    @stateful.rule(by=st.integers(0, 3))
    def age(self, by):
        self.trainer.age(by)

    @stateful.rule()
    def expire(self):
        before = len(self.trainer.tables[1])
        assert int(self.trainer.tables[1].expire()) == before - len(
            self.trainer.histories[1].written
        )

    @stateful.rule()
    def moment(self):
        self.trainer.note_moment()

    @stateful.rule(follows=st.booleans())
    def delta(self, follows):
        self.trainer.publish_delta(None, self.trainer.last_time)
        self.after_delta(follows)

    @stateful.rule(data=st.data(), follows=st.booleans())
    def delta_since_a_watermark(self, data, follows):
        published = self.trainer.published
        place = data.draw(st.integers(1, min(4, len(published))))
        self.trainer.publish_delta(*published[-place])
        self.after_delta(follows)

    @stateful.precondition(
        lambda self: any(time <= self.trainer.last_time for _, time in self.trainer.moments)
    )
    @stateful.rule(data=st.data(), follows=st.booleans())
    def delta_since_a_moment(self, data, follows):
        trainer = self.trainer
        moments = [moment for moment in trainer.moments if moment[1] <= trainer.last_time]
        last = trainer.published[-1][0].utc
        moments = [(min(utc, last), time) for utc, time in moments]
        trainer.publish_delta(*data.draw(st.sampled_from(moments)), exactly=False)
        self.after_delta(follows)

    @stateful.rule()
    def base(self):
        self.trainer.publish_base()
        self.is_new_base = True

    def after_delta(self, follows):
        check_loaded(self.trainer.path, self.trainer, self.place / "again")
        if not follows:
            return
        self.reader.follow()
        check_reader(self.reader, self.trainer.contents())
        if self.is_new_base:
            before = table_reader.contents(self.follower.tables)
            with pytest.raises(ValueError, match="do not continue"):
                self.follower.apply()
            assert table_reader.same(table_reader.contents(self.follower.tables), before)
            self.follower.load()
            self.is_new_base = False
        else:
            watermark = self.follower.apply()
            assert watermark == self.trainer.published[-1][0]
            assert self.follower.apply() == watermark
        self.follower.check(self.trainer)


DeltaMachine.TestCase.settings = hypothesis.settings(
    max_examples=8,
    stateful_step_count=40,
    suppress_health_check=list(hypothesis.HealthCheck),
)
TestDeltas = pytest.mark.slow(DeltaMachine.TestCase)


class Steps:
    """Trains in a thread: after step s, `KEYS` rows of both tables are s. Another thread erases."""

    KEYS = 400
    KEPT = 3
    COUNTER = 500
    OTHERS = 1000
    ERASED = 8000

    def __init__(self):
        self.tables = [
            de.DynamicVariable(4, "zeros", name="user"),
            # Not float16: there may be more than 2048 steps, and it skips odd numbers above that.
            de.DynamicVariable(2, "zeros", name="item", key_type=tf.int32),
        ]
        self.optimizer = de.OptimizerWrapper(keras.optimizers.SGD(1.0, momentum=0.5))
        self.optimizer.attach(self.tables)
        self.keys = [tf.range(self.KEYS, dtype=table.key_type) for table in self.tables]
        self.step = 0
        self.erased = 0
        others = tf.range(self.OTHERS, self.OTHERS + self.ERASED + 1)
        self.tables[1].upsert(others, tf.zeros([len(others), 2]))
        self.advance()
        self.erase_one()
        self.stop = threading.Event()
        self.error = None

    def advance(self):
        """Looks up and updates all rows, as in training; then inserts a row and erases one."""
        self.step += 1
        vectors = [t.lookup(k) for t, k in zip(self.tables, self.keys, strict=True)]
        grads = [
            # With momentum, the step is v = 0.5 v - g, x += v.
            tf.IndexedSlices(tf.fill(v.shape, -1.0 if self.step == 1 else -0.5), k)
            for v, k in zip(vectors, self.keys, strict=True)
        ]
        self.optimizer.apply_gradients(zip(grads, self.tables, strict=True))
        user = self.tables[0]
        user.upsert([self.OTHERS + self.step], [[float(self.step)] * 4])
        user.erase([self.OTHERS + self.step - self.KEPT])

    def erase_one(self):
        """Erases a row of "item", after a row of "user" has recorded the number of erasures."""
        self.erased += 1
        user, item = self.tables
        user.upsert([self.COUNTER], [[float(self.erased)] * 4])
        item.erase(tf.constant([self.OTHERS + self.erased - 1], tf.int32))

    def start(self):
        """Steps in one thread, erases in another."""

        def run(work, most):
            try:
                for _ in range(most):
                    if self.stop.is_set():
                        return
                    work()
            except Exception as error:
                self.error = error

        works = [(self.advance, 100_000), (self.erase_one, self.ERASED)]
        self.threads = [threading.Thread(target=run, args=work) for work in works]
        for thread in self.threads:
            thread.start()

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def check(self, contents):
        """Checks that rows are in a state between two operations; returns the step."""
        (user, item) = (contents[name] for name in ("user", "item"))
        assert item.keys[: self.KEYS].tolist() == list(range(self.KEYS))
        assert user.keys[self.KEYS] == self.COUNTER
        left = item.keys[self.KEYS :]
        end = self.OTHERS + self.ERASED + 1
        begin = left[0] if len(left) else end
        assert left.tolist() == list(range(begin, end))
        assert user.vectors[self.KEYS, 0] - (begin - self.OTHERS) in (0, 1)
        assert user.keys[: self.KEYS].tolist() == list(range(self.KEYS))
        vectors = [rows.vectors[: self.KEYS].ravel().tolist() for rows in (user, item)]
        values = {*vectors[0], *vectors[1]}
        assert len(values) == 1, f"a mixture of the steps {sorted(values)}"
        step = int(values.pop())
        extra = user.keys[self.KEYS + 1 :] - self.OTHERS
        # Steps start at 1. The last row may not be inserted yet, or the first not erased yet.
        first = max(1, step - self.KEPT + 1)
        allowed = [
            list(range(max(1, first - 1), step)),
            list(range(max(1, first - 1), step + 1)),
            list(range(first, step + 1)),
        ]
        assert extra.tolist() in allowed
        assert user.vectors[self.KEYS + 1 :, 0].tolist() == extra.tolist()
        if user.state.shape[1]:
            assert set(user.state[: self.KEYS].ravel().tolist()) == {1.0}
        return step


def test_deltas_while_a_thread_trains(tmp_path, monkeypatch):
    # Small blocks, so that steps run between them.
    monkeypatch.setattr(cut, "_BLOCK_BYTES", 2048)
    trainer = Steps()
    path = tmp_path / "chain"
    trainer.start()
    steps = []
    try:
        de.dump(path, trainer.tables, trainer.optimizer, quiet=True)
        follower = Steps()
        de.load(path, follower.tables, follower.optimizer, quiet=True)
        reader = serving.Reader(path)
        for number in range(25):
            before = trainer.step
            if number % 8 == 7:
                de.dump(path, trainer.tables, trainer.optimizer, quiet=True)
                de.load(path, follower.tables, follower.optimizer, quiet=True)
            else:
                de.incremental_dump(path, trainer.tables, optimizer=trainer.optimizer, quiet=True)
                de.apply_delta(path, follower.tables, follower.optimizer)
            contents = fold(storage.Chain.open(path))
            steps.append(trainer.check(contents))
            assert before - 1 <= steps[-1] <= trainer.step
            assert table_reader.same(table_reader.contents(follower.tables), contents)
            reader.follow()
            vectors = reader.lookup(np.arange(Steps.KEYS), "user")
            assert set(vectors.ravel().tolist()) == {float(steps[-1])}
            vectors = reader.lookup(np.arange(Steps.KEYS), "item")
            assert set(vectors.ravel().tolist()) == {float(steps[-1])}
    finally:
        trainer.end()
    assert trainer.error is None
    assert len(set(steps)) > 15
    assert trainer.erased > 200
    de.incremental_dump(path, trainer.tables, optimizer=trainer.optimizer, quiet=True)
    contents = fold(storage.Chain.open(path))
    assert trainer.check(contents) == trainer.step
    assert table_reader.same(contents, trainer_contents := table_reader.contents(trainer.tables))
    de.apply_delta(path, follower.tables, follower.optimizer)
    assert table_reader.same(table_reader.contents(follower.tables), trainer_contents)


def test_reset_state_is_loaded(tmp_path):
    trainer = Trainer(tmp_path, "adagrad")
    trainer.step([[1, 2, 3], [1, 2]])
    trainer.publish_base()
    # As when a model is recompiled: every row gets fresh state.
    trainer.optimizer = make_optimizer("adagrad", trainer.tables)
    trainer.step([[1], [1]])
    try:
        de.incremental_dump(tmp_path, trainer.tables, optimizer=trainer.optimizer, quiet=True)
    except ValueError:  # rows of which only the state changed are in no delta: a dump is required
        trainer.publish_base()
    follower = Follower(tmp_path, "adagrad")
    follower.check(trainer)


def test_a_delta_without_state_after_a_base_with_it(tmp_path):
    trainer = Trainer(tmp_path, "adagrad")
    trainer.step([[1, 2, 3], [1, 2]])
    trainer.publish_base()
    trainer.step([[1, 2], [1]])
    de.incremental_dump(tmp_path, trainer.tables, quiet=True)
    follower = Follower(tmp_path, "adagrad")
    found, expected = (table_reader.contents(t.tables) for t in (follower, trainer))
    assert table_reader.same(found, expected, ("keys", "vectors", "updates"))
    assert found["user"].state.shape == expected["user"].state.shape


def test_a_base_without_state_before_deltas_with_it(tmp_path):
    tables = make_tables()
    tables[0].lookup([1, 2, 3])
    tables[1].lookup(tf.constant([1], tf.int32))
    de.dump(tmp_path, tables, quiet=True)
    trainer = Trainer(tmp_path, "adam")
    trainer.tables = tables
    trainer.optimizer = make_optimizer("adam", tables)
    trainer.histories = []
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tables[0].lookup([2, 9]))
    trainer.optimizer.apply_gradients([(tape.gradient(loss, tables[0]), tables[0])])
    de.incremental_dump(tmp_path, tables, optimizer=trainer.optimizer, quiet=True)
    Follower(tmp_path, "adam").check(trainer)


def test_loaded_tables_continue_the_chain(tmp_path):
    trainer = Trainer(tmp_path, "adam")
    trainer.step([[1, 2, 3], [1, 2]])
    trainer.publish_base()
    trainer.step([[3, 4], [2, 5]])
    trainer.publish_delta(None, trainer.last_time)
    heir = Trainer(tmp_path, "adam")
    de.load(tmp_path, heir.tables, heir.optimizer, quiet=True)
    for trained, heirs in zip(trainer.histories, heir.histories, strict=True):
        heirs.written = dict.fromkeys(trained.written, 0)
    heir.step([[3, 6], [1]])
    heir.erase(0, [1], forget=False)
    heir.publish_delta(None, 0)
    with pytest.raises(ValueError, match="would leave a gap"):
        de.incremental_dump(tmp_path, trainer.tables, quiet=True)
    check_loaded(tmp_path, heir, tmp_path / "again")
    # Snapshots from before the load are no longer known.
    first = trainer.published[0][0]
    with pytest.raises(ValueError, match="is a snapshot that these tables were never dumped to"):
        de.incremental_dump(tmp_path, heir.tables, first, quiet=True)
    aware = datetime.datetime(2001, 1, 1, tzinfo=datetime.timezone.utc)
    with pytest.raises(tf.errors.FailedPreconditionError, match="its deleted keys since tick"):
        de.incremental_dump(tmp_path, heir.tables, aware, quiet=True)
    assert len(storage.Chain.open(tmp_path).deltas) == 2
    check_loaded(tmp_path, heir)


def test_tables_that_applied_deltas_continue_the_chain(tmp_path):
    trainer = Trainer(tmp_path, "adagrad")
    trainer.step([[1, 2, 3], [1, 2]])
    trainer.publish_base()
    heir = Follower(tmp_path, "adagrad")
    trainer.step([[2, 5], [1]])
    trainer.erase(0, [1], forget=False)
    trainer.publish_delta(None, trainer.last_time)
    heir.apply()
    heir.tables[0].upsert([7], tf.ones([1, 3]))
    de.incremental_dump(tmp_path, heir.tables, optimizer=heir.optimizer, quiet=True)
    rows, deleted = read_snapshot(storage.Chain.open(tmp_path).last, "user")
    assert (rows.keys.tolist(), deleted.tolist()) == ([7], [])
    again = Follower(tmp_path, "adagrad")
    found, expected = (table_reader.contents(each.tables) for each in (again, heir))
    assert table_reader.same(found, expected)


def test_a_relay_publishes_the_deltas_that_it_applied(tmp_path):
    trainer = Trainer(tmp_path / "chain", "adagrad")
    trainer.step([[1, 2, 3], [1, 2]])
    trainer.publish_base()
    relay = Follower(trainer.path, "adagrad")
    de.dump(tmp_path / "relayed", relay.tables, relay.optimizer, quiet=True)
    reader = serving.Reader(tmp_path / "relayed")
    for number in range(4):
        trainer.step([[1, 10 + number], [20 + number]])
        trainer.erase(0, [2 + number], forget=False)
        trainer.publish_delta(None, trainer.last_time)
        relay.apply()
        de.incremental_dump(
            tmp_path / "relayed", relay.tables, optimizer=relay.optimizer, quiet=True
        )
        rows, deleted = read_snapshot(storage.Chain.open(tmp_path / "relayed").last, "user")
        assert len(rows.keys) == 2
        assert len(deleted) == (number < 2)
        assert reader.follow() == 1
        check_reader(reader, trainer.contents())
    again = Follower(tmp_path / "relayed", "adagrad")
    again.check(trainer)


def test_deltas_at_a_separate_path(tmp_path):
    trainer = Trainer(tmp_path / "chain", "adagrad")
    trainer.step([[1, 2, 3], [1, 2]])
    trainer.publish_base()
    base = trainer.published[-1][0]
    follower = Follower(trainer.path, "adagrad")
    reader = serving.Reader(trainer.path)
    trainer.step([[3, 4], [5]])
    trainer.erase(0, [1], forget=True)
    deltas = tmp_path / "deltas"
    de.incremental_dump(deltas, trainer.tables, base, trainer.optimizer, quiet=True)
    trainer.step([[4, 5], [5]])
    de.incremental_dump(deltas, trainer.tables, None, trainer.optimizer, quiet=True)
    de.apply_delta(deltas, follower.tables, follower.optimizer)
    follower.check(trainer)
    assert reader.follow(deltas) == 2
    check_reader(reader, trainer.contents())
    follower.path = deltas
    with pytest.raises(ValueError, match="contains deltas, but no dump"):
        follower.load()
    follower.check(trainer)


@pytest.mark.slow
def test_training_continues_with_the_same_bits_in_another_process(tmp_path):
    expected = {}
    for case in CASES:
        model = Model(case)
        model.train(10)
        de.dump(tmp_path / case, [model.table], model.optimizer, quiet=True)
        model.train(20)
        expected[case] = model.bits()
    found = run_script("continue_training.py", tmp_path)
    assert found.keys() == expected.keys()
    assert [case for case in CASES if found[case] != expected[case]] == []
    # The bits of all cases differ, and so do the bits of a load without state.
    assert len({json.dumps(bits) for bits in expected.values()}) == len(CASES)
    other = Model("adam-bfloat16")
    de.load(tmp_path / "adam-bfloat16", [other.table], quiet=True)
    other.step = 10
    other.train(20)
    assert other.bits() != expected["adam-bfloat16"]
