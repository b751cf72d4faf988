"""Deltas: their content, chains of deltas, and dumps during training."""

import datetime
import os
import signal
import threading
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from dump_helpers import UTC, make, step, vectors_of
from test_checkpoint import rows_of

import tf_dynemb as de
from tf_dynemb import storage
from tf_dynemb.persistence import columns
from tf_dynemb.tables.cut import Cut


def delta_of(path):
    snapshot = storage.Chain.open(path).last
    keys = snapshot.column(0, "keys").tolist()
    return sorted(keys), sorted(snapshot.column(0, "deleted").tolist())


def test_a_delta_contains_exactly_the_changes(tmp_path):
    table = make()
    table.lookup([1, 2, 3, 4, 5, 6])
    de.dump(tmp_path, table)
    table.lookup([1], insert=True)  # found, so not changed
    table.upsert([2, 10], tf.ones([2, 2]))
    table.erase([3, 4])
    table.forget([5])
    table.lookup([4, 11])  # inserted again, and a new key that is erased at once
    table.erase([11])
    de.incremental_dump(tmp_path, table)
    assert delta_of(tmp_path) == ([2, 4, 10], [3, 5, 11])
    table.clear()
    de.incremental_dump(tmp_path, table)
    assert delta_of(tmp_path) == ([], [1, 2, 4, 6, 10])


def test_since_a_watermark_and_since_a_time(tmp_path):
    table = make()
    table.lookup([1])
    first = de.dump(tmp_path / "chain", table)
    table.lookup([2])
    second = de.incremental_dump(tmp_path / "chain", table)
    time.sleep(0.01)
    now = datetime.datetime.now(UTC)
    time.sleep(0.01)
    table.lookup([3])
    de.incremental_dump(tmp_path / "a", table, since=second)
    assert delta_of(tmp_path / "a") == ([3], [])
    de.incremental_dump(tmp_path / "b", table, since=first)
    assert delta_of(tmp_path / "b") == ([2, 3], [])
    de.incremental_dump(tmp_path / "c", table, since=now)
    assert delta_of(tmp_path / "c") == ([3], [])
    # A time before the chain's end: more rows than needed, and no gap.
    de.incremental_dump(tmp_path / "chain", table, since=now - datetime.timedelta(days=1))
    assert delta_of(tmp_path / "chain") == ([1, 2, 3], [])
    other = make()
    de.load(tmp_path / "chain", other)
    assert rows_of(other) == rows_of(table)
    table.lookup([4])
    time.sleep(0.01)
    with pytest.raises(ValueError, match="after the last snapshot"):
        de.incremental_dump(tmp_path / "chain", table, since=datetime.datetime.now(UTC))


def test_gaps_are_refused(tmp_path):
    table, stranger = make(), make()
    table.lookup([1])
    with pytest.raises(ValueError, match=r"no snapshot at .* to continue"):
        de.incremental_dump(tmp_path, table)
    mark = de.dump(tmp_path, table)
    with pytest.raises(ValueError, match="were never dumped to or loaded from the last"):
        de.incremental_dump(tmp_path, stranger)
    with pytest.raises(
        ValueError, match="is a snapshot that these tables were never dumped to or loaded from: t"
    ):
        de.incremental_dump(tmp_path / "other", stranger, since=mark)
    de.load(tmp_path, stranger)
    stranger.lookup([2])
    de.incremental_dump(tmp_path, stranger)
    with pytest.raises(ValueError, match="were never dumped to or loaded from the last"):
        de.incremental_dump(tmp_path, table)
    de.apply_delta(tmp_path, table)
    assert vectors_of(table) == vectors_of(stranger)
    table.lookup([3])
    de.incremental_dump(tmp_path, table)
    with pytest.raises(ValueError, match="do not continue the content of these tables"):
        de.apply_delta(tmp_path, make())
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]


def test_deltas_shipped_separately(tmp_path):
    table, replica = make(), make()
    table.lookup([1, 2])
    mark = de.dump(tmp_path / "base", table)
    for i in range(3):
        table.upsert([i], [[1.0, i]])
        table.erase([i + 1])
        mark = de.incremental_dump(tmp_path / "deltas", table, since=mark)
    with pytest.raises(ValueError, match="no dump that they continue"):
        de.load(tmp_path / "deltas", replica)
    de.load(tmp_path / "base", replica)
    assert de.apply_delta(tmp_path / "deltas", replica).id == mark.id
    assert vectors_of(replica) == vectors_of(table)
    assert de.apply_delta(tmp_path / "deltas", replica).id == mark.id  # nothing new


def test_forgotten_deletions_are_an_error(tmp_path):
    table = make(init_capacity=8, max_capacity=8)
    for i in range(20):
        table.lookup([1000 + i])  # evicts before the table tracks deletions
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"'.*t'.* its deleted keys"):
        de.incremental_dump(tmp_path, table, since=datetime.datetime(2000, 1, 1, tzinfo=UTC))
    assert not os.listdir(tmp_path) or os.listdir(tmp_path) == ["LOCK"]
    de.dump(tmp_path, table)
    table.lookup([5000])
    de.incremental_dump(tmp_path, table)
    keys, deleted = delta_of(tmp_path)
    assert keys == [5000]
    assert len(deleted) == 1


def test_nested_dumps_are_refused(tmp_path):
    table = make()
    table.lookup([1])
    says = pytest.raises(RuntimeError, match="another process writes")
    with storage.Publication(tmp_path, "base"), says:
        de.dump(tmp_path, table)
    says = pytest.raises(tf.errors.FailedPreconditionError, match="being dumped already")
    with Cut([table], [-1], with_deleted=False), says:
        de.dump(tmp_path, table)
    de.dump(tmp_path, table)


def test_a_dump_waits_for_another_of_the_same_table(tmp_path):
    tables = [make("a"), make("b")]
    for table in tables:
        table.lookup([1])
    began, ended = threading.Event(), []

    def other():
        with Cut(tables, [-1, -1], with_deleted=False):
            began.set()
            time.sleep(0.2)
            ended.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    began.wait()
    path = tf.train.Checkpoint(table=tables[1]).save(tmp_path / "ck")
    assert ended
    thread.join()
    tf.train.Checkpoint(table=tables[1]).restore(path)
    de.dump(tmp_path / "chain", tables[::-1])


def test_training_during_dumps(tmp_path):
    # Every step writes its number into all rows of two tables, so a mixture of steps is detected.
    tables = [make("a", 4), make("b", 8)]
    keys = tf.range(20_000, dtype=tf.int64)
    stop = threading.Event()
    steps = [0]

    def write():
        steps[0] += 1
        for table in tables:
            table.upsert(keys, tf.fill([len(keys), table.dimension], float(steps[0])))

    def train():
        while not stop.is_set():
            write()

    write()
    thread = threading.Thread(target=train)
    thread.start()
    try:
        de.dump(tmp_path, tables)
        for _ in range(10):
            de.incremental_dump(tmp_path, tables)
    finally:
        stop.set()
        thread.join()
    seen = []
    for snapshot in storage.Chain.open(tmp_path).snapshots:
        versions = []
        for number in range(2):
            vectors = snapshot.column(number, "vectors")
            assert len(np.unique(vectors)) <= 1
            if len(vectors):
                assert len(vectors) == len(keys)
                versions.append(float(vectors[0, 0]))
        # The first table is written first.
        if len(versions) == 2:
            assert versions[0] - versions[1] in (0.0, 1.0)
        seen += versions[:1]
    assert len(seen) > 2
    assert seen == sorted(set(seen))


def test_forget_wipes(tmp_path):
    table = make()
    secret = [1234.5, 6789.25]
    table.upsert([7], [secret])
    assert int(table.forget([7, 8])) == 1
    assert len(table) == 0
    de.dump(tmp_path, table)
    for path in tmp_path.rglob("*.npy"):
        assert np.float32(secret[0]).tobytes() not in path.read_bytes()


def test_progress_without_a_terminal_is_quiet_by_default(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(columns, "_PATIENCE", 0)
    table = make()
    table.lookup(tf.range(1000))
    de.dump(tmp_path, table)
    assert capfd.readouterr().err == ""
    de.dump(tmp_path, table, quiet=False)
    assert "dump: 100%" in capfd.readouterr().err
    de.load(tmp_path, table, quiet=False)
    assert "load t" in capfd.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        de.dump(tmp_path, table, quiet=True)
    assert capfd.readouterr().err == ""


def fold(path):
    """Returns the vectors of a table that loads the chain."""
    table = make()
    de.load(path, table)
    return vectors_of(table)


def test_changes_before_apply_delta_are_in_the_next_delta(tmp_path):
    table, replica = make(), make()
    table.lookup([1, 2, 3])
    de.dump(tmp_path, table)
    de.load(tmp_path, replica)
    replica.upsert([9], [[1.0, 2.0]])
    replica.erase([3])
    table.lookup([4])
    de.incremental_dump(tmp_path, table)
    de.apply_delta(tmp_path, replica)
    de.incremental_dump(tmp_path, replica)
    assert set(fold(tmp_path)) == {1, 2, 4, 9}
    assert fold(tmp_path) == vectors_of(replica)


def test_evictions_by_apply_delta_are_in_the_next_delta(tmp_path):
    table, small = make(), make(init_capacity=4, max_capacity=4)
    table.lookup([1, 2, 3, 4])
    de.dump(tmp_path, table)
    de.load(tmp_path, small)
    table.lookup([5, 6])
    de.incremental_dump(tmp_path, table)
    de.apply_delta(tmp_path, small)
    de.incremental_dump(tmp_path, small)
    assert len(small) == 4
    assert fold(tmp_path) == vectors_of(small)


def test_a_table_that_lacks_rows_of_the_chain_cannot_continue_it(tmp_path):
    table, small = make(), make(init_capacity=4, max_capacity=4)
    table.lookup(tf.range(8))
    de.dump(tmp_path, table)
    with pytest.warns(UserWarning, match="4 of the rows of table 't' did not fit"):
        de.load(tmp_path, small)
    with pytest.raises(ValueError, match="were never dumped to or loaded from the last"):
        de.incremental_dump(tmp_path, small)


def test_only_the_new_end_of_a_chain_is_read(tmp_path):
    table, follower = make(), make()
    table.lookup([1])
    de.dump(tmp_path, table)
    de.load(tmp_path, follower)
    for key in (2, 3):
        table.lookup([key])
        de.incremental_dump(tmp_path, table)
        de.apply_delta(tmp_path, follower)
    table.lookup([4])
    de.incremental_dump(tmp_path, table)
    for directory in sorted(tmp_path.glob("0*"))[:2]:
        (directory / "MANIFEST.json").write_text("damaged")
    assert de.apply_delta(tmp_path, follower).id == sorted(tmp_path.glob("0*"))[-1].name[-32:]
    assert sorted(rows_of(follower)) == sorted(rows_of(table))
    with pytest.raises(storage.DataLossError):
        de.apply_delta(tmp_path, make())


def test_a_delta_of_another_dtype_is_refused(tmp_path):
    table, half = make(), make(dtype=tf.bfloat16)
    table.lookup([1])
    de.dump(tmp_path, table)
    de.load(tmp_path, half, cast=True)
    half.lookup([2])
    with pytest.raises(ValueError, match=r"'float32'\) at .* but .* has .*'bfloat16'"):
        de.incremental_dump(tmp_path, half)


def test_state_that_was_not_loaded_is_not_continued(tmp_path):
    table, other = make(), make()
    optimizers = [de.OptimizerWrapper(keras.optimizers.Adam(0.1)) for _ in range(2)]
    step(optimizers[0], [table], [1, 2])
    de.dump(tmp_path, table, optimizers[0])
    de.load(tmp_path, other)
    step(optimizers[1], [other], [1])
    with pytest.raises(ValueError, match="state that these tables did not take over"):
        de.incremental_dump(tmp_path, other, optimizer=optimizers[1])
    de.incremental_dump(tmp_path, other)
    assert fold(tmp_path) == vectors_of(other)


def test_state_that_was_reset_during_a_dump_is_not_continued(tmp_path, monkeypatch):
    table = make()
    first, second = (de.OptimizerWrapper(keras.optimizers.Adam(0.1)) for _ in range(2))
    step(first, [table], [1, 2])
    write = columns.write_rows

    def slow(*args):
        written = write(*args)
        step(second, [table], [1])
        return written

    monkeypatch.setattr(columns, "write_rows", slow)
    de.dump(tmp_path, table, first)
    with pytest.raises(ValueError, match="were never dumped to"):
        de.incremental_dump(tmp_path, table, optimizer=second)


def test_an_optimizer_that_cannot_step_tables_changes_nothing(tmp_path):
    table = make()
    table.lookup([1])
    de.dump(tmp_path, table)
    table.lookup([2])
    cannot = keras.optimizers.Adam(0.1, gradient_accumulation_steps=2, global_clipnorm=1.0)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        de.load(tmp_path, table, de.OptimizerWrapper(cannot))
    assert set(vectors_of(table)) == {1, 2}


def test_states_of_different_options_are_distinguished(tmp_path):
    table, other = make(), make()
    momentum, centered = (
        de.OptimizerWrapper(keras.optimizers.RMSprop(0.1, **kwargs))
        for kwargs in ({"momentum": 0.9}, {"centered": True})
    )
    step(momentum, [table], [1])
    de.dump(tmp_path, table, momentum)
    with pytest.warns(UserWarning, match="state of 'rmsprop momentum' .* 'rmsprop centered'"):
        de.load(tmp_path, other, centered)


def test_shared_state_is_matched_by_the_name_of_the_table(tmp_path):
    tables = [make("a"), make("b")]
    nadam, other = (de.OptimizerWrapper(keras.optimizers.Nadam(0.1)) for _ in range(2))
    step(nadam, tables, [1])
    step(nadam, tables[1:], [1])
    de.dump(tmp_path, tables, nadam)
    loaded = make("b")
    de.load(tmp_path, loaded, other)
    products = [
        [float(v) for v in o.shared_variables(t)] for o, t in ((nadam, tables[1]), (other, loaded))
    ]
    assert products[0] == products[1] != [float(v) for v in nadam.shared_variables(tables[0])]


def test_the_last_saved_optimizer_is_loaded(tmp_path):
    table, other = make(), make()
    optimizer, fresh = (de.OptimizerWrapper(keras.optimizers.SGD(0.1)) for _ in range(2))
    step(optimizer, [table], [1])
    de.dump(tmp_path, table, optimizer)
    step(optimizer, [table], [1])
    de.incremental_dump(tmp_path, table, optimizer=optimizer)
    de.incremental_dump(tmp_path, table)
    de.load(tmp_path, other, fresh)
    assert int(fresh.iterations) == 2


def test_static_variables_are_read_at_the_cut(tmp_path, monkeypatch):
    table, static = make(), de.Variable(tf.zeros([2, 2]), name="s")
    table.lookup([1])
    write = columns.write_rows

    def slow(*args):
        static.assign(tf.ones([2, 2]))
        return write(*args)

    monkeypatch.setattr(columns, "write_rows", slow)
    de.dump(tmp_path, [table, static])
    assert not storage.Chain.open(tmp_path).last.column("s", "vectors").any()


def test_a_priority_that_cannot_be_lowered_is_ignored(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    table = make()
    table.lookup([1])
    de.dump(tmp_path, table)


def test_forked_processes_do_not_hold_the_lock(tmp_path):
    table = make()
    table.lookup([1])
    with storage.Publication(tmp_path, "base"):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        de.dump(tmp_path, table)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_state_that_was_not_loaded_is_still_missing_after_deltas(tmp_path):
    table, other = make(), make()
    optimizers = [de.OptimizerWrapper(keras.optimizers.Adam(0.1)) for _ in range(2)]
    step(optimizers[0], [table], [1, 2])
    de.dump(tmp_path, table, optimizers[0])
    de.load(tmp_path, other)
    step(optimizers[0], [table], [2])
    de.incremental_dump(tmp_path, table, optimizer=optimizers[0])
    de.apply_delta(tmp_path, other, optimizers[1])
    with pytest.raises(ValueError, match="state that these tables did not take over"):
        de.incremental_dump(tmp_path, other, optimizer=optimizers[1])
