"""Concurrent operators, from Python threads, tf.functions and tf.data; and determinism.

A deadlock ends the process after TIMEOUT seconds, and all stacks are printed.
"""

import concurrent.futures
import faulthandler
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import op_helpers as h
import pytest
import tensorflow as tf
from op_helpers import ops

HERE = pathlib.Path(__file__).parent
TIMEOUT = 300
THREADS = 4


@pytest.fixture(autouse=True)
def _no_deadlock(capfd):
    with capfd.disabled():
        stderr = os.dup(2)  # pytest's stderr, which shows the stacks
    faulthandler.dump_traceback_later(TIMEOUT, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(stderr)


def together(*jobs):
    """Runs all jobs at once, each in a thread; returns their results."""
    barrier = threading.Barrier(len(jobs))

    def run(job):
        barrier.wait()
        return job()

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        return [future.result() for future in futures]


def test_accumulated_sums_are_exact():
    handle = h.make_table(16, init_capacity=1)
    rng = np.random.default_rng(0)
    batches = rng.integers(0, 3000, [THREADS, 25, 700])

    def job(thread_batches):
        def run():
            for keys in thread_batches:
                ops.dynemb_accumulate(handle, keys, tf.ones([700, 16]))

        return run

    together(*[job(thread_batches) for thread_batches in batches])
    keys, counts = np.unique(batches, return_counts=True)
    assert h.size(handle) == len(keys)
    values = ops.dynemb_read_rows(handle, keys).values
    np.testing.assert_array_equal(values, np.tile(counts[:, None], 16))
    assert sorted(h.export(handle)[0].tolist()) == keys.tolist()


def test_functions_insert_the_same_keys_concurrently():
    handle = h.make_table(8, random=True, seed=1, init_capacity=1)
    keys = np.arange(30_000)
    expected = h.lookup(h.make_table(8, random=True, seed=1), keys).values.numpy()

    def job(seed):
        order = np.random.default_rng(seed).permutation(keys)

        @tf.function
        def look_up(keys):
            return h.lookup(handle, keys)

        def run():
            parts = []
            for part in np.split(order, 30):
                values, rows = look_up(tf.constant(part))
                np.testing.assert_array_equal(values, expected[part])
                parts.append(rows.numpy())
            rows = np.empty(len(keys), np.uint32)
            rows[order] = np.concatenate(parts)
            return rows

        return run

    results = together(*[job(seed) for seed in range(THREADS)])
    for rows in results:
        np.testing.assert_array_equal(rows, results[0])
    assert len(np.unique(results[0])) == len(keys) == h.size(handle)
    assert h.stats(handle)["inserts"] == len(keys)


@pytest.mark.parametrize("insert", [False, True])
def test_lookup_inside_a_parallel_map(insert):
    handle = h.make_table(8, random=True, seed=2)
    known = np.arange(0, 2000, 2)
    h.lookup(handle, known)
    batches = np.random.default_rng(1).integers(0, 2000, [60, 128])
    expected = h.lookup(h.make_table(8, random=True, seed=2), np.arange(2000)).values.numpy()
    data = tf.data.Dataset.from_tensor_slices(batches)
    data = data.map(lambda keys: (keys, *h.lookup(handle, keys, insert)), num_parallel_calls=4)
    seen = 0
    for keys, values, rows in data.prefetch(4):
        np.testing.assert_array_equal(values, expected[keys.numpy()])
        if insert:
            assert (rows.numpy() != h.NO_ROW).all()
        else:
            np.testing.assert_array_equal(rows.numpy() != h.NO_ROW, keys.numpy() % 2 == 0)
        seen += 1
    assert seen == 60
    assert h.size(handle) == (len(np.union1d(known, batches)) if insert else len(known))


def test_sparse_lookup_and_gradients_inside_a_parallel_map():
    """Calls of one operator reuse scratch memory; overlapping calls must not share it."""
    handle = h.make_table(4)
    keys = np.arange(1000)
    ops.dynemb_upsert(handle, keys, np.repeat(keys[:, None], 4, 1).astype(np.float32))
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 1000, [80, 300])
    bag_of = rng.integers(0, 40, [80, 300])  # unordered

    def step(ids, bag_of):
        outputs, rows, argmax = h.lookup_sparse(
            [handle], [ids], [bag_of[:, None]], [40], [4], insert=False
        )
        unique, sums, _ = ops.dynemb_lookup_sparse_grad(
            [ids], rows, [bag_of[:, None]], [h.NO_WEIGHTS], argmax, [tf.ones([40, 4])],
            combiners=["sum"],
        )  # fmt: skip
        return ids, bag_of, outputs[0], unique[0], sums[0]

    data = tf.data.Dataset.from_tensor_slices((ids, bag_of)).map(step, num_parallel_calls=4)
    for some_ids, some_bags, output, unique, sums in data.as_numpy_iterator():
        expected = np.bincount(some_bags, some_ids, 40)
        np.testing.assert_array_equal(output, np.tile(expected[:, None], 4))
        order = np.argsort(unique)
        want, counts = np.unique(some_ids, return_counts=True)
        np.testing.assert_array_equal(unique[order], want)
        np.testing.assert_array_equal(sums[order], np.tile(counts[:, None], 4))


def test_concurrent_training_export_erase_and_reads():
    """Every read of a row is consistent: its vector and its state each have equal elements."""
    dim, steps = 64, 60
    handle = h.make_table(dim, init_capacity=1)
    ops.dynemb_attach_state(handle, optimizer="adagrad", widths=[dim], inits=[0.0])
    trained, erased = np.arange(800), np.arange(10_000, 11_000)
    running = threading.Event()
    running.set()

    def whole(values):
        np.testing.assert_array_equal(values, np.repeat(values[:, :1], dim, 1))

    def train(keys):
        def run():
            for _ in range(steps):
                rows = h.lookup(handle, keys).rows
                grads = tf.ones([len(keys), dim])
                ops.dynemb_apply_gradients(
                    [handle], [keys], [rows], [grads], h.HYPER, 1,
                    optimizer="adagrad", state="adagrad", inits=[0.0],
                )  # fmt: skip
            running.clear()

        return run

    def churn():
        count = 0
        while running.is_set():
            ops.dynemb_accumulate(handle, erased, tf.ones([1000, dim]))
            assert int(ops.dynemb_erase(handle, erased)) == 1000
            count += 1
        return count

    def watch():
        count = 0
        while running.is_set():
            keys, values, state, _ = h.export(handle, limit=500)
            whole(values)
            whole(state)
            whole(h.lookup(handle, trained, insert=False).values.numpy())
            whole(ops.dynemb_read_rows(handle, trained).values.numpy())
            assert set(keys.tolist()) <= {*trained.tolist(), *erased.tolist()}
            assert h.size(handle) <= len(trained) + len(erased)
            count += 1
        return count

    *_, churned, watched = together(train(trained[:400]), train(trained[400:]), churn, watch)
    assert churned > 0
    assert watched > 0
    assert h.size(handle) == len(trained)
    values, state, found = ops.dynemb_read_rows(handle, trained)
    assert found.numpy().all()
    # Erasing frees rows while other threads train: none of their gradients may be lost.
    np.testing.assert_array_equal(state, np.full([800, dim], steps))
    assert h.stats(handle)["dropped_gradients"] == 0
    np.testing.assert_array_equal(values, np.tile(values[:1], [800, 1]))


def test_tables_in_opposite_order_do_not_deadlock():
    tables = [h.make_table(4, init_capacity=1) for _ in range(3)]
    orders = [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 2]]
    calls, batch = 60, 200

    def job(order, seed):
        rng = np.random.default_rng(seed)
        handles = [tables[i] for i in order]

        def run():
            for _ in range(calls):
                keys = [rng.integers(0, 5000, batch) for _ in handles]
                outputs, rows, argmax = h.lookup_sparse(
                    handles, keys, [np.int64(2)] * 3, [batch // 2] * 3, [4] * 3,
                )  # fmt: skip
                unique, sums, unique_rows = ops.dynemb_lookup_sparse_grad(
                    keys, rows, [np.int64(2)] * 3, [h.NO_WEIGHTS] * 3, argmax,
                    [tf.ones_like(o) for o in outputs], combiners=["sum"] * 3,
                )  # fmt: skip
                h.apply_sgd(handles, unique, sums, unique_rows)

        return run

    together(*[job(order, seed) for seed, order in enumerate(orders)])
    # Every id has subtracted 0.5 once, and sums over a table are exact.
    for i, handle in enumerate(tables):
        ids = sum(order.count(i) for order in orders) * calls * batch
        values = h.export(handle)[1]
        assert values.astype(np.float64).sum() == -0.5 * 4 * ids


def test_tables_are_created_and_dropped_concurrently():
    def job(seed):
        def run():
            for i in range(40):
                handle = h.make_table(8, shared_name="created_concurrently" if i % 2 else "")
                h.lookup(handle, np.arange(seed * 1000 + i * 10, seed * 1000 + i * 10 + 10))
                if not i % 2:
                    assert h.size(handle) == 10
            return True

        return run

    assert together(*[job(seed) for seed in range(THREADS)]) == [True] * THREADS
    assert h.size(h.make_table(8, shared_name="created_concurrently")) == THREADS * 20 * 10


TRAINING = """
import hashlib, sys
import numpy as np, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
tf.config.threading.set_inter_op_parallelism_threads(1)
import op_helpers as h
from op_helpers import ops
rng = np.random.default_rng(0)
digest = hashlib.sha256()
types = [tf.float32, tf.bfloat16, tf.float16]
tables = [
    h.make_table(16, dtype=t, random=True, seed=9, init_capacity=1, max_capacity=c,
                 stochastic_rounding=True)
    for t, c in zip(types, [0, 0, 40_000])
]
for table in tables:
    ops.dynemb_attach_state(table, optimizer="adam", widths=[16, 16], inits=[0.0, 0.0])
hyper = h.HYPER.copy()
for step in range(6):
    hyper[-1] = step + 1
    nnz, bags = 30_000, 10_000
    keys = [rng.zipf(1.1, nnz).astype(np.int64) % 100_000 for _ in tables]
    forms = [np.int64(3), np.sort(rng.integers(0, bags, nnz))[:, None],
             rng.integers(0, bags, [nnz, 1])]
    weights = [h.NO_WEIGHTS, rng.uniform(0.5, 2, nnz).astype(np.float32), h.NO_WEIGHTS]
    combiners = ["sum", "mean", "max"]
    outputs, rows, argmax = h.lookup_sparse(
        tables, keys, forms, [bags] * 3, [16] * 3, weights, combiners=combiners, dtypes=types)
    unique, sums, unique_rows = ops.dynemb_lookup_sparse_grad(
        keys, rows, forms, weights, argmax, outputs, combiners=combiners)
    ops.dynemb_apply_gradients(tables, unique, unique_rows, sums, hyper, step + 1,
                               optimizer="adam", state="adam", inits=[0.0, 0.0])
    for t in tf.nest.flatten([outputs, rows, argmax, unique, sums]):
        digest.update(t.numpy().tobytes())
for table, dtype in zip(tables, types):
    for part in h.export(table, dtype=dtype):
        digest.update(part.tobytes())
print([h.size(t) for t in tables], digest.hexdigest())
"""


def test_bits_do_not_depend_on_the_number_of_threads():
    path = [str(HERE), str(HERE.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINING, threads], stdout=subprocess.PIPE, env=env, text=True
        )
        for threads in ("1", "2")
    ]
    results = [run.communicate(timeout=TIMEOUT - 20)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert results[0]
    assert results[1] == results[0]
