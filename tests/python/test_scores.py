"""Eviction strategies: what counts, which rows stay, how scores are read, set, saved and loaded."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
import warm_python
from score_helpers import held, make, scores

import tf_dynemb as de
from tf_dynemb import cli

STRATEGIES = ["lru", "lfu", "epoch_lru", "epoch_lfu", "score"]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("kLru", "lru"),
        ("kLfu", "lfu"),
        ("kEpochLru", "epoch_lru"),
        ("kEpochLfu", "epoch_lfu"),
        ("kCustomized", "score"),
    ],
)
def test_names_of_hierarchical_kv(name, strategy):
    table = make(name, 10)
    assert table.options.strategy == strategy
    assert table.attributes["evict_strategy"] == strategy


def test_lfu_keeps_what_is_asked_for_most_often():
    table = make("lfu", 3)
    table.lookup([1, 1, 1, 2, 2, 3])
    assert scores(table, [1, 2, 3, 4]) == [3, 2, 1, -1]
    table.lookup([4])  # evicts 3
    assert held(table, [1, 2, 3, 4]) == [1, 2, 4]
    table.lookup([5, 5, 5, 5])  # evicts 4, which was asked for once
    assert held(table, [1, 2, 3, 4, 5]) == [1, 2, 5]


def test_lru_keeps_what_was_used_last():
    table = make("lru", 3)
    for key in [1, 1, 1, 2, 3, 4]:
        table.lookup([key])
    assert held(table, [1, 2, 3, 4]) == [2, 3, 4]
    ticks = scores(table, [2, 3, 4])
    assert ticks == sorted(ticks)
    assert len(set(ticks)) == 3


def test_evaluation_and_writing_do_not_count():
    table = make("lfu", 10)
    table.lookup([1, 2])
    table.lookup([1, 1, 1], insert=False)
    table.upsert([1], [[1.0, 2.0]])
    table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1], tf.int64)))
    table.contains([1])
    de.export(table)
    assert scores(table, [1, 2]) == [1, 1]


def test_a_training_step_counts_each_id_once():
    table = make("lfu", 100)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.1))
    with tf.GradientTape() as tape:
        features = [tf.constant([[1, 2], [1, 3]]), tf.constant([[1, 9], [9, 9]])]
        pooled = de.lookup_sparse([table, table], features, combiners=["sum", "mean"])
        loss = tf.add_n([tf.reduce_sum(p) for p in pooled])
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    assert scores(table, [1, 2, 3, 9]) == [3, 1, 1, 3]


def test_features_of_one_lookup_protect_each_others_rows():
    # Each batch has one key for each row: both features must keep all of their rows.
    table = make("lfu", 40)
    table.lookup(np.repeat(np.arange(1000, 1040), 5))
    for step in range(20):
        first = np.arange(20) + 20 * step
        second = np.arange(20) + 20 * step + 5000
        ids = [tf.constant(first[:, None]), tf.constant(second[:, None])]
        pooled = de.lookup_sparse([table, table], ids, combiners=["sum", "sum"])
        wanted = [*first, *second]
        assert held(table, wanted) == wanted
        read = table.lookup(wanted, insert=False)
        np.testing.assert_array_equal(tf.concat(pooled, 0), read)


def test_epochs_are_stronger_than_counts():
    table = make("epoch_lfu", 3)
    table.lookup([1] * 50 + [2] * 40)
    table.advance_epoch()
    table.lookup([3])
    assert scores(table, [1, 2, 3]) == [50, 40, 1 << 20 | 1]
    table.lookup([2])
    assert scores(table, [2]) == [1 << 20 | 41]
    table.lookup([4])
    assert held(table, [1, 2, 3, 4]) == [2, 3, 4]


def test_epoch_steps_count_lookups_that_insert():
    table = make("epoch_lfu", 10, epoch_steps=3)
    epochs = []
    for step in range(8):
        table.lookup([step])
        table.lookup([step], insert=False)
        table.upsert([100], [[0.0, 0.0]])
        epochs.append(scores(table, [step])[0] >> 20)
    assert epochs == [0, 0, 0, 1, 1, 1, 2, 2]
    # The features of one lookup_sparse are one step of their table.
    table = make("epoch_lfu", 10, epoch_steps=1)
    for step in range(3):
        de.lookup_sparse([table, table], [tf.constant([[1]]), tf.constant([[2]])], combiners="sum")
        assert scores(table, [1, 2]) == [step << 20 | (step + 1)] * 2


def test_the_caller_sets_scores():
    table = make("score", 4)
    table.lookup([1, 2, 3, 4], scores=[10, 40, 30, 20])
    assert scores(table, [1, 2, 3, 4]) == [10, 40, 30, 20]
    table.upsert([5], tf.ones([1, 2]), scores=25)
    assert held(table, range(1, 6)) == [2, 3, 4, 5]
    table.set_scores([2, 2, 77], [3, 5, 9])  # the last one wins; unknown keys are skipped
    assert scores(table, [2, 77]) == [5, -1]
    table.lookup([6])
    assert held(table, range(1, 7)) == [3, 4, 5, 6]
    assert scores(table, [6]) == [0]
    table.lookup([7], scores=tf.constant([2**32 - 1], tf.int64))
    assert scores(table, [7]) == [2**32 - 1]
    assert held(table, [6]) == []


def test_insert_and_evict_returns_what_left():
    table = make("score", 3)
    optimizer = de.OptimizerWrapper(keras.optimizers.SGD(0.1, momentum=0.9))
    table.upsert([1, 2, 3], [[1.0, 1], [2, 2], [3, 3]], scores=[7, 5, 6])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup([2]))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    gone = table.insert_and_evict([4, 5], [[4.0, 4], [5, 5]], scores=[8, 9])
    assert gone.keys.numpy().tolist() == [2, 3]
    np.testing.assert_allclose(gone.vectors, [[1.9, 1.9], [3, 3]])
    np.testing.assert_allclose(gone.state, [[-0.1, -0.1], [0, 0]])
    assert gone.scores.numpy().tolist() == [5, 6]
    assert held(table, range(6)) == [1, 4, 5]
    assert scores(table, [1, 4, 5]) == [7, 8, 9]
    np.testing.assert_array_equal(table.lookup([4, 5]), [[4, 4], [5, 5]])
    assert table.insert_and_evict([4]).keys.shape == (0,)


def test_calls_of_hierarchical_kv():
    table = make("lfu", 100)
    initial = table.find_or_insert([1, 2])
    table.insert_or_assign([3], [[3.0, 3.0]], scores=[9])
    assert scores(table, [1, 2, 3]) == [1, 1, 9]
    table.assign([1, 77], [[5.0, 5.0], [7.0, 7.0]])
    assert held(table, [1, 2, 3, 77]) == [1, 2, 3]
    np.testing.assert_array_equal(table.lookup([1], insert=False), [[5, 5]])
    # 2 and 3 are there, 4 and 5 are not; the caller is wrong about 3 and 5.
    deltas = [[1.0, 1.0]] * 4
    table.accum_or_assign([2, 3, 4, 5], deltas, accum=[True, False, False, True])
    assert held(table, range(6)) == [1, 2, 3, 4]
    read = table.lookup([2, 3, 4], insert=False)
    np.testing.assert_allclose(read, [initial[1] + 1, [3.0, 3.0], [1.0, 1.0]])
    with pytest.raises(NotImplementedError, match="dense"):
        table.assign(tf.ones([2, 2]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dumps_checkpoints_and_deltas_keep_scores(tmp_path, strategy):
    def new():
        return make(strategy, 50, seed=1)

    table = new()
    table.lookup([1, 1, 1, 2, 2, 3])
    if strategy == "epoch_lfu":
        table.advance_epoch()
    table.lookup([3, 4])
    if strategy == "score":
        table.set_scores([1, 2, 3, 4], [9, 2**32 - 1, 7, 8])
    keys = [1, 2, 3, 4, 5]
    wanted = scores(table, keys)
    chain, checkpoint = tmp_path / "chain", str(tmp_path / "checkpoint")
    since = de.dump(chain, table)

    copy = new()
    de.load(chain, copy)
    assert scores(copy, keys) == wanted
    tf.train.Checkpoint(table=table).write(checkpoint)
    copy = new()
    tf.train.Checkpoint(table=copy).read(checkpoint).assert_consumed()
    assert scores(copy, keys) == wanted
    if strategy == "epoch_lfu":  # the epoch continues, too
        copy.lookup([9])
        assert scores(copy, [9]) == [1 << 20 | 1]

    follower = new()
    de.load(chain, follower)
    table.lookup([5, 5, 1])
    table.upsert([1, 5], tf.ones([2, 2]))
    if strategy == "score":
        table.set_scores([1, 5], [11, 12])
    de.incremental_dump(chain, table, since=since)
    de.apply_delta(chain, follower)
    if strategy not in ("lru", "epoch_lru"):
        assert scores(follower, keys) == scores(table, keys)
    merged = new()
    de.load(chain, merged)
    assert scores(merged, keys) == scores(table, keys)
    assert cli.main(["merge", str(chain), str(tmp_path / "merged")]) == 0
    merged = new()
    de.load(tmp_path / "merged", merged)
    assert scores(merged, keys) == scores(table, keys)


def test_a_strategy_that_changed_is_said(tmp_path):
    table = make("lfu", 50)
    table.lookup([1, 1, 1, 2])
    chain, checkpoint = tmp_path / "chain", str(tmp_path / "checkpoint")
    de.dump(chain, table)
    tf.train.Checkpoint(table=table).write(checkpoint)
    for strategy, fresh in [("score", 0), ("epoch_lfu", 1)]:
        other = make(strategy, 50)
        with pytest.warns(UserWarning, match=f"'lfu'.*'{strategy}'.*are reset"):
            de.load(chain, other)
        assert scores(other, [1, 2]) == [fresh, fresh]
        with pytest.warns(UserWarning, match="are reset"):
            tf.train.Checkpoint(table=other).read(checkpoint)
        assert scores(other, [1, 2]) == [fresh, fresh]
    other = make("lru", 50)
    with pytest.warns(UserWarning, match="are reset"):
        de.load(chain, other)
    other.lookup([7])
    assert scores(other, [1])[0] < scores(other, [7])[0]
    copy = make("kLfu", 50)
    de.load(chain, copy)
    assert scores(copy, [1, 2]) == [3, 1]


def test_layers_take_the_options():
    layer = de.layers.Embedding(4, max_capacity=8, evict_strategy="lfu")
    model = keras.Sequential([keras.Input([3], dtype="int64"), layer, keras.layers.Flatten()])
    model.compile(de.OptimizerWrapper("sgd"), "mse")
    ids = np.array([[1, 1, 2], [1, 3, 3]])
    model.fit(ids, np.zeros([2, 12]), batch_size=2, epochs=3, verbose=0)
    model.predict(ids, verbose=0)
    assert scores(layer.table, [1, 2, 3]) == [9, 3, 6]


def test_bad_options_and_scores():
    with pytest.raises(ValueError, match=r"evict_strategy must be one of.*kCustomized.*'fifo'"):
        make("fifo")
    with pytest.raises(ValueError, match=r"epoch_steps=5.*'lfu'"):
        make("lfu", epoch_steps=5)
    with pytest.raises(ValueError, match="epoch_steps must be an integer of 1"):
        make("epoch_lfu", epoch_steps=0)
    for strategy in ["lru", "epoch_lru", "none"]:
        table = make(strategy, 10)
        table.lookup([1])
        for call in [
            lambda t: t.set_scores([1], [1]),
            lambda t: t.upsert([1], [[1.0, 1.0]], scores=[1]),
            lambda t: t.lookup([1], scores=[1]),
            lambda t: t.insert_and_evict([1], scores=[1]),
        ]:
            with pytest.raises(ValueError, match=f"evict_strategy 'score'.*{strategy!r}"):
                call(table)
    with pytest.raises(ValueError, match=r"advance_epoch.*'lru'"):
        make("lru").advance_epoch()
    table = make("score", 10)
    table.lookup([1, 2])
    for bad in [[-1, 1], [2**32, 1]]:
        with pytest.raises(ValueError, match=r"\[0, 2\^32\)"):
            table.set_scores([1, 2], bad)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[0, 2\^32\)"):
            tf.function(lambda b: table.set_scores([1, 2], b) and None)(tf.constant(bad, tf.int64))
    with pytest.raises(ValueError, match="shape of the keys"):
        table.set_scores([1, 2], [1, 2, 3])
    with pytest.raises(TypeError, match="integers"):
        table.set_scores([1, 2], [0.5, 1.0])
    table = make("epoch_lfu", 10)
    table.lookup([1])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"epoch 1.*in epoch 0"):
        table.set_scores([1], [1 << 20])
    assert scores(table, [1]) == [1]


def test_bad_arguments_change_nothing():
    table = make("score", 3)
    table.lookup([1, 2, 3], scores=[1, 2, 3])
    values = tf.ones([3, 2])
    for call in [
        lambda: table.insert_and_evict([4, 5, 6], values, scores=[1, 2]),
        lambda: table.insert_and_evict([4, 5, 6], values, scores=[1, 2, -1]),
        lambda: table.insert_and_evict([4, 5, 6], tf.ones([3, 5])),
        lambda: table.insert_and_evict([4, 5, 6], [1, 2, 3]),
        lambda: table.lookup([4, 5, 6], scores=[1, 2]),
        lambda: table.lookup([4, 5, 6], scores=[1, 2, 2**32]),
        lambda: table.upsert([4, 5, 6], values, scores=[1.5, 2.0, 3.0]),
    ]:
        with pytest.raises((ValueError, TypeError)):
            call()
        assert scores(table, range(1, 7)) == [1, 2, 3, -1, -1, -1]


def test_scores_that_start_anew_do_not_pin_rows(tmp_path):
    # In another process, whose next batch has the tick at which the rows were loaded.
    table = make("lfu", 50)
    table.lookup(np.arange(50))
    de.dump(tmp_path / "chain", table)
    larger = make("lfu", 200)
    larger.lookup(np.arange(200))
    de.dump(tmp_path / "larger", larger)
    script = f"""
import tensorflow as tf
import tf_dynemb as de
table = de.DynamicVariable(2, name="items", max_capacity=50)
de.load({str(tmp_path / "chain")!r}, table)
table.lookup([1000])
assert table.contains([1000]).numpy().all() and len(table) == 50
de.load({str(tmp_path / "larger")!r}, table)
assert len(table) == 50
table.lookup(tf.range(2000, 2050, dtype=tf.int64))
assert len(table) == 50
"""
    done = warm_python.run(["-c", script])
    assert done.returncode == 0, done.stderr


def test_merge_refuses_scores_of_two_kinds(tmp_path, capsys):
    table = make("lru", 50)
    table.lookup([1, 2])
    de.dump(tmp_path / "chain", table)
    other = make("lfu", 50)
    with pytest.warns(UserWarning, match="are reset"):
        de.load(tmp_path / "chain", other)
    other.lookup([3])
    de.incremental_dump(tmp_path / "chain", other)
    assert cli.main(["merge", str(tmp_path / "chain"), str(tmp_path / "merged")]) != 0
    assert "evict_strategy 'lfu'" in capsys.readouterr().err


def test_in_a_graph():
    table = make("score", 4)

    @tf.function
    def step(ids, values):
        vectors = table.lookup(ids, scores=values)
        gone = table.insert_and_evict(ids + 100, scores=values + 1)
        return vectors, gone.keys, table.scores(ids + 100)

    _, gone, read = step(tf.constant([1, 2], tf.int64), tf.constant([5, 6], tf.int64))
    assert gone.shape == (0,)
    assert read.numpy().tolist() == [6, 7]
    _, gone, read = step(tf.constant([3, 4], tf.int64), tf.constant([8, 9], tf.int64))
    assert sorted(gone.numpy().tolist()) == [3, 4] or len(gone) == 2
    assert read.numpy().tolist() == [9, 10]


@pytest.mark.parametrize("strategy", ["lru", "lfu"])
def test_hit_rate_equals_an_exact_cache(strategy):
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 20_001) ** 1.05
    ids = rng.choice(20_000, 120_000, p=weights / weights.sum())
    capacity, batch = 2000, 100
    table = make(strategy, capacity, dimension=1)
    before = table.stats()["misses"]
    exact, misses = collections.OrderedDict(), 0
    for start in range(0, len(ids), batch):
        batch_ids = ids[start : start + batch]
        table.lookup(batch_ids)
        # The exact cache: a batch first counts what it finds, then evicts for its new keys.
        misses += sum(key not in exact for key in batch_ids.tolist())
        for key in batch_ids.tolist():
            exact[key] = exact.get(key, 0) + 1
            exact.move_to_end(key)
        order = iter(list(exact) if strategy == "lru" else sorted(exact, key=exact.get))
        fresh = set(batch_ids.tolist())
        while len(exact) > capacity:
            key = next(order)
            if key not in fresh:
                del exact[key]
    miss_rate = (table.stats()["misses"] - before) / len(ids)
    assert abs(miss_rate - misses / len(ids)) < 0.01
