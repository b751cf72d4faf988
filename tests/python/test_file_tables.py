"""Tables with rows in files equal tables in memory, bit for bit: training and single calls."""

import contextlib
import threading
import time

import gpu
import keras
import numpy as np
import pytest
import tensorflow as tf
from file_pairs import DIM, Pair, check_same, draw, in_files
from optimizer_cases import CASES

import tf_dynemb as de
from tf_dynemb.variables.unwrap import unwrap

K = keras.optimizers


@pytest.fixture
def tmp_path(disk_folder):
    return disk_folder


# Muon's matrices consist of the rows that a step touches, in any order.
@pytest.mark.parametrize("name", [name for name in CASES if name != "muon"])
def test_each_optimizer(tmp_path, name):
    pair = Pair(tmp_path, CASES[name].make, states=CASES[name].states)
    pair.train()
    pair.check()


@pytest.mark.parametrize("key_type", [tf.int64, tf.int32, tf.uint64])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_types(tmp_path, key_type, dtype):
    pair = Pair(tmp_path, lambda: K.Adam(0.05), dtype=dtype, key_type=key_type, states=2)
    rng = np.random.default_rng(1)
    info = np.iinfo(key_type.as_numpy_dtype)
    universe = rng.integers(info.min, info.max, 600, key_type.as_numpy_dtype, endpoint=True)
    universe[:3] = info.min, info.max, 0
    for step in range(20):
        pair.step(rng.choice(universe, 50), step)
    pair.check()


@pytest.mark.parametrize("dim", [1, 3, 64, 700])
def test_widths(tmp_path, dim):
    """A row may be smaller than a unit of the files, or larger."""
    pair = Pair(tmp_path, lambda: K.Adagrad(0.1), dim=dim, states=1)
    pair.train(steps=15)
    pair.check()


def test_several_tables_and_two_features_of_one(tmp_path):
    """One lookup of three features, two of them of one table, with combiners and weights."""
    pairs = [Pair(tmp_path, dim=dim, states=1, name=name) for dim, name in ((DIM, "a"), (64, "b"))]
    optimizers = [de.OptimizerWrapper(K.Adagrad(0.1)) for _ in range(2)]
    rng = np.random.default_rng(2)
    for _ in range(20):
        ids = [
            tf.RaggedTensor.from_row_lengths(draw(rng, 30, 600), [0, 10, 5, 15]) for _ in range(3)
        ]
        weights = [tf.constant(rng.random(30), tf.float32) for _ in range(3)]
        results = []
        for i, optimizer in enumerate(optimizers):
            a, b = (pair.tables[i] for pair in pairs)
            with tf.GradientTape() as tape:
                tape.watch(weights)
                id_weights = [x.with_values(w) for x, w in zip(ids, weights, strict=True)]
                pooled = de.lookup_sparse([a, b, a], ids, id_weights, ["sum", "mean", "sqrtn"])
                loss = sum(tf.reduce_sum(x**2) for x in pooled)
            *weight_gradients, gradient_a, gradient_b = tape.gradient(loss, [*weights, a, b])
            optimizer.apply_gradients([(gradient_a, a), (gradient_b, b)])
            results.append([x.numpy() for x in (*pooled, *weight_gradients)])
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)
    for pair in pairs:
        pair.check()


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
def test_combiners(tmp_path, combiner):
    pair = Pair(tmp_path, lambda: K.SGD(0.1))
    rng = np.random.default_rng(3)
    for _ in range(15):
        ids = tf.constant(draw(rng, 40, 600).reshape(10, 4))
        pair.both(lambda t, i=ids: de.lookup_sparse(t, i, combiners=combiner))
        for table, optimizer in zip(pair.tables, pair.optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(de.lookup_sparse(table, ids, combiners=combiner) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    pair.check()


def test_a_step_after_its_rows_have_left_memory(tmp_path):
    """The gradients of three lookups, of more rows than memory holds, then a step of each part."""
    pair = Pair(tmp_path, lambda: K.Adam(0.1), states=2)
    parts = np.arange(240).reshape(4, 60)
    pair.both(lambda t: t.lookup(parts[3]))
    gradients = []
    for table in pair.tables:
        with tf.GradientTape(persistent=True) as tape:
            losses = [tf.reduce_sum(table.lookup(part) ** 2 * 3) for part in parts[:3]]
        gradients.append([tape.gradient(loss, table) for loss in losses])
    pair.both(lambda t: t.lookup(parts[3]))
    for table, optimizer, table_gradients in zip(
        pair.tables, pair.optimizers, gradients, strict=True
    ):
        for gradient in table_gradients:
            optimizer.apply_gradients([(gradient, table)])
        assert table.stats()["dropped_gradients"] == 0
    pair.check()


def test_gradient_of_weights_after_the_rows_have_left_memory(tmp_path):
    pair = Pair(tmp_path)
    pair.both(lambda t: t.lookup(np.arange(80)))
    ids = tf.constant(np.arange(80).reshape(8, 10))
    weights = tf.Variable(np.random.default_rng(0).random((8, 10)).astype(np.float32))

    def gradient(table):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.lookup_sparse(table, ids, weights, "mean") ** 2)
            for first in range(100, 1500, 80):
                table.lookup(np.arange(first, first + 80))
        return tape.gradient(loss, weights)

    pair.both(gradient)
    pair.check()


@pytest.mark.parametrize("name", ["sgd", "adam", "nadam"])
def test_accumulated_gradients(tmp_path, name):
    """Three batches of a step: each fits in memory, and so does their sum."""

    def accumulating():
        optimizer = CASES[name].make()
        return type(optimizer).from_config(
            {**optimizer.get_config(), "gradient_accumulation_steps": 3}
        )

    pair = Pair(tmp_path, accumulating, states=CASES[name].states, rows=110)
    pair.train(steps=36, batch=30)
    pair.check()


def test_averages(tmp_path):
    """use_ema keeps averages in another table, which has its own files."""

    def make():
        return K.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7)

    pair = Pair(tmp_path, make, rows=130)
    pair.train(steps=25)
    pair.check()
    for table, optimizer in zip(pair.tables, pair.optimizers, strict=True):
        optimizer.finalize_variable_values([table])
    pair.check()
    assert len(list(tmp_path.glob("*/[0-9]*"))) == 2


def test_a_step_in_a_function(tmp_path):
    pair = Pair(tmp_path, lambda: K.Adam(0.1), states=2)
    steps = []
    for table, optimizer in zip(pair.tables, pair.optimizers, strict=True):
        optimizer.attach([table])

        @tf.function
        def step(ids, table=table, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            return loss

        steps.append(step)
    rng = np.random.default_rng(4)
    for _ in range(40):
        ids = tf.constant(draw(rng, 40, 600))
        assert float(steps[0](ids)) == float(steps[1](ids))
    pair.check()


def test_rows_of_reads_move_and_keep_their_bits(tmp_path):
    pair = Pair(tmp_path, lambda: K.Adagrad(0.1), states=1)
    pair.train()
    keys = np.sort(de.export(pair.memory)[0].numpy())
    before = pair.files.stats()
    for first in range(0, len(keys), 50):
        chunk = keys[first : first + 50]
        pair.both(lambda t, k=chunk: t.lookup(k, insert=False))
        pair.both(lambda t, k=chunk: de.lookup_sparse(t, tf.constant(k[:, None]), insert=False))
    after = pair.files.stats()
    assert after["file_hits"] > before["file_hits"]
    assert after["size"] == before["size"]
    pair.check()


def test_single_calls(tmp_path):
    pair = Pair(tmp_path, lambda: K.Adagrad(0.1), states=1)
    pair.train()
    rng = np.random.default_rng(5)
    for n in range(12):
        ids = draw(rng, 40, 700)
        values = rng.normal(size=(40, DIM)).astype(np.float32)
        slices = tf.IndexedSlices(values, ids)
        pair.both(lambda t, i=ids, v=values: t.upsert(i, v) and None)
        pair.both(lambda t, s=slices: t.scatter_add(s) and None)
        pair.both(lambda t, s=slices: t.scatter_sub(s) and None)
        pair.both(lambda t, i=ids: t.contains(i + 1_000_003 * 3))
        pair.both(lambda t, i=ids: t.lookup(i, return_exists=True))
        pair.both(lambda t, i=ids: t.lookup(i[:20] + 7, insert=False, default_value=[0.5] * DIM))
        other = draw(rng, 40, 700)
        slices = tf.IndexedSlices(values, other)
        pair.both(lambda t, s=slices: t.scatter_update(s) and None)
        pair.both(lambda t, i=other, v=values: de.assign(t, i, v))
        gone = draw(rng, 30, 700)
        if n % 2:
            pair.both(lambda t, i=gone: t.forget(i))
        else:
            pair.both(lambda t, i=gone: t.erase(i))
        pair.both(len)
        pair.step(draw(rng, 40, 700), n)
    pair.check()


def test_deferred_keys_of_tfra(tmp_path):
    """accum_or_assign, and rows that steps insert."""
    pair = Pair(tmp_path)
    rng = np.random.default_rng(6)
    for _ in range(40):
        ids = np.unique(draw(rng, 70, 1400))
        values = rng.normal(size=(len(ids), DIM)).astype(np.float32)
        exists = pair.both(lambda t, i=ids: t.contains(i))
        pair.both(lambda t, i=ids, v=values, e=exists: t.accum_or_assign(i, v, e) and None)
    pair.check()


def test_clear_and_a_second_life(tmp_path):
    pair = Pair(tmp_path, lambda: K.Adagrad(0.1), states=1)
    pair.train()
    pair.both(lambda t: t.clear() and None)
    assert len(pair.files) == 0
    stats = pair.files.stats()
    assert stats["file_rows"] == stats["file_row_bytes"] == 0
    pair.train(seed=1)
    pair.check()


def test_new_optimizer_with_other_state(tmp_path):
    """Rows in files get the new state, too."""
    pair = Pair(tmp_path, lambda: K.Adagrad(0.1), states=3)
    pair.train()
    for make in (lambda: K.Adam(0.01, amsgrad=True), lambda: K.SGD(0.1), lambda: K.Adadelta(0.5)):
        pair.optimizers = [de.OptimizerWrapper(make()) for _ in pair.tables]
        pair.train(steps=8, seed=2)
        pair.check(most_in_files=False)
    assert pair.files.stats()["file_rows"] > 0


def test_export_and_selection(tmp_path):
    pair = Pair(tmp_path, lambda: K.Adagrad(0.1), states=1)
    pair.train()

    def exported(rows):
        order = np.argsort(rows[0].numpy())
        return tuple(part.numpy()[order].tobytes() for part in rows[:3])

    pair.both(lambda t: exported(de.export(t)))
    norm = float(np.median(np.linalg.norm(de.export(pair.memory)[1], axis=1)))
    conditions = ({"key_from": 0}, {"l2_below": norm}, {"key_below": 0, "l2_from": norm})
    for condition in conditions:
        assert pair.both(lambda t, c=condition: t.size_if(**c)) > 0
        pair.both(lambda t, c=condition: exported(t.export_if(**c)))
    pair.both(lambda t: t.erase_if(**conditions[2]))
    pair.check()


def test_explain_names_the_place(tmp_path):
    table = in_files(tmp_path)
    table.lookup(range(100))
    table.lookup(range(100, 200))
    tiers = [row.tier for row in table.explain(range(201))]
    in_memory = {"host", "device"} if gpu.ON else {"host"}
    assert set(tiers[:100]) <= {"file", *in_memory}
    assert tiers.count("file") == table.stats()["file_rows"] == 100
    assert set(tiers[100:200]) == in_memory
    assert tiers[200] is None
    table.lookup([0])
    assert table.explain([0])[0].tier in in_memory


def test_hybrid_without_a_gpu(tmp_path):
    with tf.device("CPU"):
        pair = Pair(tmp_path, lambda: K.Adam(0.1), states=2, var_type="hybrid")
        pair.train()
    pair.check()


def test_many_tables_in_one_folder(tmp_path):
    pairs = [Pair(tmp_path, lambda: K.SGD(0.1), name=f"t{i}") for i in range(5)]
    for pair in pairs:
        pair.train(steps=10)
    assert len(list(tmp_path.glob("*/[0-9]*"))) == 5
    for pair in pairs:
        pair.check()
    check_same(*pairs[0].tables)


class TestPrefetchLookup:
    """`prefetch_lookup` reads rows from files ahead; nothing else differs."""

    @staticmethod
    def batches(steps=30):
        rng = np.random.default_rng(4)
        return [tf.constant(draw(rng, 60, 600).reshape(12, 5)) for _ in range(steps)]

    @staticmethod
    def train(tables, params, batches):
        """Steps of a list of tables; `batches` yields pairs as `prefetch_lookup` does."""
        optimizer = de.OptimizerWrapper(K.Adagrad(0.1))
        for _, ids in batches:
            with tf.GradientTape() as tape:
                pooled = de.lookup_sparse(params, ids, combiners=["sum", "mean", "sum"])
                loss = sum(tf.reduce_sum(x**2) for x in pooled)
            gradients = tape.gradient(loss, tables)
            optimizer.apply_gradients(zip(gradients, tables, strict=True))

    def test_the_same_bits(self, tmp_path):
        batches, trained = self.batches(), []
        for how in ("plain", "ahead"):
            large = in_files(tmp_path / how, DIM, 150, states=1, name="large", seed=5)
            other = de.DynamicVariable(8, var_type="host", name="other", seed=6)
            params = [large, other, large]

            def ids(batch):
                return [batch, batch, batch // 3]

            pairs = ((batch, ids(batch)) for batch in batches)
            if how == "ahead":
                pairs = de.prefetch_lookup(batches, params, ids)
            self.train([large, other], params, pairs)
            trained.append((large, other))
        check_same(trained[1][0], trained[0][0])
        check_same(trained[1][1], trained[0][1], most_in_files=False)
        plain, ahead = (tables[0].stats() for tables in trained)
        assert plain["file_hits_ahead"] == 0
        # Not the rows that wait to be written, up to 1 MB of the 2 MB here, nor those that the
        # running step moves out of memory.
        assert ahead["file_hits"] > ahead["file_hits_ahead"] > 0.3 * ahead["file_hits"] > 100
        assert plain["hits"] + plain["misses"] == ahead["hits"] + ahead["misses"]
        assert plain["inserts"] == ahead["inserts"]

    def test_a_layer(self, tmp_path):
        layer = de.layers.EmbeddingBag(
            2 * DIM, "sum", var_type="file", file_path=tmp_path, max_dram_for_vectors=0.0003
        )
        batches = self.batches() * 2
        layer(batches[0])
        (table,) = layer.variables
        for batch, ahead in de.prefetch_lookup(batches, table, lambda batch: batch):
            pooled = de.lookup_sparse(table, ahead, combiners="sum")
            np.testing.assert_array_equal(pooled, layer(batch))
        assert unwrap(table).stats()["file_hits_ahead"] > 0

    @pytest.mark.parametrize("ends", ["break", "error in a batch", "all"])
    def test_rows_that_were_read_are_freed_at_the_end(self, tmp_path, ends):
        table = in_files(tmp_path, 2 * DIM)
        batches = self.batches()
        for batch in batches:
            table.lookup(batch)
        coming = iter([*batches[:3], "no ids"] if ends == "error in a batch" else batches[:6])
        ahead = de.prefetch_lookup(coming, table, lambda batch: batch)
        try:
            for step, _ in enumerate(ahead):
                if ends == "break" and step == 2:
                    break
        except TypeError:
            assert ends == "error in a batch"
        ahead.close()
        before = table.stats()
        assert before["file_hits_ahead"] == 0  # the loop has looked nothing up
        for batch in batches[:6]:
            table.lookup(batch)
        after = table.stats()
        assert after["file_reads"] > before["file_reads"]
        assert after["file_hits_ahead"] == 0

    def test_leaving_the_loop_waits_for_no_batch(self, tmp_path):
        table, goes_on, has_ended = in_files(tmp_path, DIM), threading.Event(), threading.Event()

        def live():
            yield [1, 2, 3]
            goes_on.wait(30)
            has_ended.set()

        for _ in de.prefetch_lookup(live(), table, lambda batch: batch):
            break
        assert not has_ended.is_set()
        goes_on.set()
        assert has_ended.wait(30)

    def test_a_damaged_file_is_an_error_of_the_lookup(self, tmp_path):
        table = in_files(tmp_path, 2 * DIM)
        batches = self.batches()
        for batch in batches:
            table.lookup(batch)
        # A running compaction may have read rows, and would save them from the damage.
        moved = None
        while (now := table.stats()["file_rows_compacted"]) != moved:
            moved = now
            time.sleep(0.1)
        for path in tmp_path.rglob("*.rows"):
            with contextlib.suppress(FileNotFoundError):  # the table deletes files
                path.write_bytes(bytes(path.stat().st_size))
        coming = de.prefetch_lookup(batches, table, lambda batch: batch)
        with pytest.raises(tf.errors.DataLossError, match=r"\.rows"):
            [de.lookup_sparse(table, ahead, combiners="sum") for _, ahead in coming]
        assert table.stats()["file_hits_ahead"] == 0
