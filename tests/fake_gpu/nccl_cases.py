"""Cases for test_nccl.py, which two or four ranks run; the name keeps pytest from collecting them.

Each rank has another fake GPU, and NCCL is tests/fake_nccl.
"""

import os
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import communicator

GPU, CPU = "/device:GPU:0", "/device:CPU:0"


def rows_for(comm, sender, receiver, number, width=3):
    """What a rank sends to another one in an exchange."""
    random = np.random.default_rng([sender, receiver, number])
    n = 0 if (sender + receiver + number) % 3 == 0 else int(random.integers(1, 5000))
    return random.normal(size=(n, width)).astype(np.float32)


def put(value, dtype, device=GPU):
    """Returns a tensor on a device, by a copy: the fake GPU lacks TensorFlow's own operators."""
    with tf.device(device):
        return tf.constant(value, dtype)


def exchange(comm, number, name, device=GPU):
    """Exchanges tensors on a device; returns what has come, its splits, and what should have."""
    sent = [rows_for(comm, comm.rank, other, number) for other in range(comm.size)]
    expected = [rows_for(comm, other, comm.rank, number) for other in range(comm.size)]
    data = put(np.concatenate(sent), tf.float32, device)
    splits = tf.constant([len(part) for part in sent], tf.int32)
    received, counts = comm.alltoall(data, splits, name)
    return received, counts, expected


def check(received, counts, expected):
    assert counts.numpy().tolist() == [len(part) for part in expected]
    np.testing.assert_array_equal(received.numpy(), np.concatenate(expected))


def test_tensors_on_a_gpu_are_exchanged_there(comm):
    assert comm.alltoall_on_gpu
    for number in range(20):
        received, counts, expected = exchange(comm, number, "exchange")
        assert "GPU" in received.device
        check(received, counts, expected)


def test_tensors_of_the_host_are_exchanged_there(comm):
    received, counts, expected = exchange(comm, 1, "exchange", CPU)
    assert "CPU" in received.device
    check(received, counts, expected)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.bool])
def test_values_arrive_unchanged(comm, dtype):
    data = put((np.arange(comm.size) * 7 + comm.rank).astype(dtype.as_numpy_dtype), dtype)
    received, _ = comm.alltoall(data, tf.ones([comm.size], tf.int32), "exchange")
    assert received.dtype == dtype
    expected = tf.cast(comm.rank * 7 + tf.range(comm.size), dtype)
    assert tf.reduce_all(tf.cast(received, tf.float32) == tf.cast(expected, tf.float32))


def test_in_a_function_with_its_gradient(comm):
    @tf.function
    def step(data, splits):
        with tf.device(GPU):
            given = tf.identity(data)
        with tf.GradientTape() as tape:
            tape.watch(given)
            received, _ = comm.alltoall(given, splits, "exchange")
            loss = tf.reduce_sum(received * float(comm.rank + 1))
        return received, tape.gradient(loss, given)

    splits = tf.fill([comm.size], 2)
    data = tf.fill([2 * comm.size, 3], float(comm.rank))
    for _ in range(3):
        received, gradient = step(data, splits)
    np.testing.assert_array_equal(received[:, 0], np.repeat(np.arange(comm.size), 2))
    np.testing.assert_array_equal(gradient[:, 0], np.repeat(np.arange(comm.size) + 1, 2))
    graph = step.get_concrete_function(data, splits).graph
    nodes = [op for op in graph.get_operations() if op.type == "DynembRanksAlltoall"]
    assert len(nodes) == 2
    assert all("GPU" in op.device for op in nodes)


def test_gathered_rows_with_their_gradient(comm):
    @tf.function
    def step(data):
        with tf.device(GPU):
            given = tf.identity(data)
        with tf.GradientTape() as tape:
            tape.watch(given)
            gathered = comm.allgather(given, "gather")
            loss = tf.reduce_sum(gathered * float(comm.rank + 1))
        return gathered, tape.gradient(loss, given)

    gathered, gradient = step(tf.fill([comm.rank + 1, 2], float(comm.rank)))
    expected = np.concatenate([np.full([rank + 1, 2], rank) for rank in range(comm.size)])
    np.testing.assert_array_equal(gathered, expected)
    total = comm.size * (comm.size + 1) / 2
    np.testing.assert_array_equal(gradient, np.full([comm.rank + 1, 2], total))


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16])
def test_sums_have_the_bits_of_the_host(comm, dtype):
    random = np.random.default_rng(comm.rank)
    shapes = [(5, 7), (), (1,), (0, 3), (11,)]
    given = [random.normal(size=shape) * 10.0 ** random.integers(-3, 4) for shape in shapes]

    def reduced(device, average):
        def sums():
            with tf.device(device):
                tensors = [tf.identity(tf.constant(data, dtype)) for data in given]
            return comm.allreduce(tensors, average, f"sum_{average}")

        function = tf.function(sums).get_concrete_function()
        return function(), {op.type for op in function.graph.get_operations()}

    for average in (False, True):
        sums, types = reduced(GPU, average)
        expected, expected_types = reduced(CPU, average)
        assert ("DynembRanksAllreduce" in types, "DynembRanksAllreduce" in expected_types) == (
            False,
            True,
        )
        for got, want in zip(sums, expected, strict=True):
            assert got.shape == want.shape
            assert got.numpy().tobytes() == want.numpy().tobytes()


def test_sums_of_sparse_gradients(comm):
    values = put(np.full([comm.rank + 1, 2], comm.rank), tf.float32)
    slices = tf.IndexedSlices(values, tf.range(comm.rank + 1), tf.constant([9, 2]))
    (summed,) = comm.allreduce([slices], False, "sparse")
    expected = np.concatenate([np.full([rank + 1, 2], rank) for rank in range(comm.size)])
    np.testing.assert_array_equal(summed.values, expected)
    assert "GPU" in summed.values.device


def test_exchanges_of_several_threads_in_any_order(comm):
    failures = []

    def lane(name, delays):
        # Not eagerly: docs/gpu.md, "A fault of TensorFlow".
        @tf.function(reduce_retracing=True)
        def run(data, splits):
            with tf.device(GPU):
                return comm.alltoall(tf.identity(data), splits, name)

        for number, delay in enumerate(delays):
            time.sleep(delay / 2000)
            sent = [rows_for(comm, comm.rank, other, number) for other in range(comm.size)]
            expected = [rows_for(comm, other, comm.rank, number) for other in range(comm.size)]
            try:
                splits = tf.constant([len(part) for part in sent], tf.int32)
                check(*run(tf.constant(np.concatenate(sent)), splits), expected)
            except BaseException as error:
                failures.append(error)
                raise

    random = np.random.default_rng(comm.rank)
    lanes = [
        threading.Thread(target=lane, args=(name, random.integers(0, 10, 15))) for name in "abc"
    ]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    assert not failures


def test_ranks_on_a_gpu_and_on_the_host_are_an_error_of_all(comm):
    device = GPU if comm.rank == 0 else CPU
    with pytest.raises(tf.errors.InvalidArgumentError, match="on a GPU"):
        exchange(comm, 1, "mixed", device)
    check(*exchange(comm, 2, "after"))


def test_wrong_splits_are_an_error_of_all(comm):
    data = put(np.ones([3, 2]), tf.float32)
    wrong = tf.fill([comm.size], 5 if comm.rank == 1 else 0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="splits must be"):
        comm.alltoall(data if comm.rank == 1 else put(np.ones([0, 2]), tf.float32), wrong, "wrong")
    check(*exchange(comm, 2, "after"))


def test_a_training_step_exchanges_on_the_gpu(comm):
    tables = [
        de.DynamicVariable(dimension=4, name=f"t{i}", initializer="normal", var_type="hybrid")
        for i in range(2)
    ]
    assert all("GPU" in table.device for table in tables)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            outputs = de.lookup_sparse(tables, [ids, ids], combiners=["sum", "mean"])
            loss = tf.add_n([tf.reduce_sum(tf.square(output)) for output in outputs])
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        return loss

    random = np.random.default_rng(comm.rank)
    losses = [float(step(tf.constant(random.integers(0, 50, (8, 3))))) for _ in range(10)]
    assert losses[-1] < losses[0]
    graph = step.get_concrete_function(tf.zeros([8, 3], tf.int64)).graph
    nodes = [op for op in graph.get_operations() if op.type == "DynembRanksAlltoall"]
    assert len(nodes) >= 3  # keys, vectors, gradients
    assert all("GPU" in op.device for op in nodes), [(op.name, op.device) for op in nodes]


def test_batches_that_are_looked_up_ahead_train_the_same(comm):
    """Exchanges of the step and of what is looked up ahead run at the same time."""
    random = np.random.default_rng(comm.rank)
    batches = [random.integers(0, 40, (16, 3)) for _ in range(12)]

    def losses(name, prefetch):
        tables = [
            de.DynamicVariable(dimension=dim, name=f"{name}{dim}", initializer="normal", seed=dim)
            for dim in (4, 6)
        ]
        optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.5))

        @tf.function(reduce_retracing=True)
        def step(ids):
            with tf.GradientTape() as tape:
                outputs = de.lookup_sparse(tables, ids, combiners=["sum", "mean"])
                loss = tf.add_n([tf.reduce_mean(tf.square(output - 1)) for output in outputs])
            gradients = tape.gradient(loss, tables)
            optimizer.apply_gradients(zip(gradients, tables, strict=True))
            return loss

        def ids(batch):
            return [batch, batch + 1]

        if prefetch:
            return [float(step(ahead)) for _, ahead in de.prefetch_lookup(batches, tables, ids)]
        return [float(step(ids(batch))) for batch in batches]

    assert losses("ahead", prefetch=True) == losses("plain", prefetch=False)


def test_rank_1_ends_while_the_others_wait(comm):
    """The last case: rank 1 ends."""
    check(*exchange(comm, 1, "before"))
    if comm.rank == 1:
        os._exit(0)
    with pytest.raises(tf.errors.AbortedError, match="rank 1"):
        exchange(comm, 1, "after")
    assert communicator.get() is comm
