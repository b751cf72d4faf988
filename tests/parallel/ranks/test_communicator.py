"""The contract of tf_dynemb.communicator, for every number of ranks, eagerly and in a tf.function.

A rank's data are a function of its number, so every rank knows what the others send.
"""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import tensorflow as tf

from tf_dynemb import communicator

DTYPES = [
    tf.int32,
    tf.int64,
    tf.uint8,
    tf.uint32,
    tf.uint64,
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.bool,
]

pytestmark = pytest.mark.engines

eager_and_graph = pytest.mark.parametrize(
    "wrap", [lambda f: f, tf.function], ids=["eager", "graph"]
)


def part(sender, receiver, step=0):
    """The rows that one rank sends another: none, one or several, different in each step."""
    length = (3 * sender + 2 * receiver + step) % 4
    numbers = 100 * sender + 10 * receiver + step + np.arange(2 * length).reshape(length, 2)
    return numbers % 256


def sent(comm, step=0, dtype=tf.int64):
    parts = [part(comm.rank, receiver, step) for receiver in range(comm.size)]
    splits = tf.constant([len(rows) for rows in parts], tf.int32)
    return tf.cast(np.concatenate(parts), dtype), splits


def check_received(comm, received, splits, step=0):
    parts = [part(sender, comm.rank, step) for sender in range(comm.size)]
    expected = tf.cast(np.concatenate(parts), received.dtype)
    assert splits.dtype == tf.int32
    assert splits.numpy().tolist() == [len(rows) for rows in parts]
    np.testing.assert_array_equal(received, expected)


def test_the_group(comm, ranks):
    assert (comm.size, comm.local_rank) == (ranks, comm.rank)
    assert comm is communicator.get()
    assert (comm is communicator.LOCAL) == (ranks == 1)
    assert comm.gather_objects(comm.rank, "ranks") == list(range(ranks))


@eager_and_graph
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_alltoall(comm, wrap, dtype):
    tensor, splits = sent(comm, dtype=dtype)
    received = wrap(lambda *given: comm.alltoall(*given, name="exchange"))(tensor, splits)
    assert received[0].dtype == dtype
    check_received(comm, *received)


@pytest.mark.parametrize(
    "values",
    [
        tf.constant([2**64 - 1, 2**63, 1], tf.uint64),
        tf.constant([2**32 - 1, 2**31, 1], tf.uint32),
        tf.constant([0.1, -np.inf, 3e38], tf.bfloat16),
        tf.constant([0.1, -np.inf, np.nan], tf.float16),
    ],
    ids=lambda values: values.dtype.name,
)
def test_values_arrive_unchanged(comm, values):
    ones = tf.ones([comm.size], tf.int32)
    received, _ = comm.alltoall(tf.repeat(values[:1], comm.size), ones, "exchange")
    np.testing.assert_array_equal(received, tf.repeat(values[:1], comm.size))
    np.testing.assert_array_equal(comm.allgather(values, "all"), tf.tile(values, [comm.size]))
    np.testing.assert_array_equal(comm.broadcast(values, comm.size - 1, "one"), values)


@eager_and_graph
def test_words_that_are_sent_on_a_gpu_keep_their_bits(comm, wrap, monkeypatch):
    """As floats, these bits would be NaNs, zeros and denormals."""
    monkeypatch.setattr(comm, "alltoall_on_gpu", True)
    words = [-1, 0x7F800001, 0x7FC00000, -(2**31), 1, 12345]
    ones = tf.ones([comm.size], tf.int32)
    for word in words:
        exchange = wrap(lambda *given: comm.alltoall(*given, name="words"))
        received, _ = exchange(tf.fill([comm.size], word), ones)
        assert received.dtype == tf.int32
        np.testing.assert_array_equal(received, np.full(comm.size, word))


@eager_and_graph
def test_alltoall_with_one_or_no_sender(comm, wrap):
    exchange = wrap(lambda *given: comm.alltoall(*given, name="exchange"))
    for sender in (comm.size - 1, None):
        lengths = np.arange(comm.size) * (comm.rank == sender)
        received, splits = exchange(
            tf.fill([lengths.sum(), 3], 1.0 + comm.rank), tf.constant(lengths, tf.int32)
        )
        expected = [comm.rank if rank == sender else 0 for rank in range(comm.size)]
        assert splits.numpy().tolist() == expected
        np.testing.assert_array_equal(received, np.full([sum(expected), 3], comm.size, np.float32))


@eager_and_graph
def test_alltoall_of_different_rows_in_each_step(comm, wrap):
    exchange = wrap(lambda *given: comm.alltoall(*given, name="exchange"))
    for step in range(20):
        check_received(comm, *exchange(*sent(comm, step)), step)


@eager_and_graph
def test_alltoall_of_different_splits_of_the_same_number_of_rows(comm, wrap):
    exchange = wrap(lambda *given: comm.alltoall(*given, name="exchange"))
    for step in range(10):
        receiver = (comm.rank + step) % comm.size
        splits = tf.one_hot(receiver, comm.size, 5, 0, dtype=tf.int32)
        received, received_splits = exchange(tf.fill([5], comm.rank), splits)
        sender = (comm.rank - step) % comm.size
        assert received.numpy().tolist() == [sender] * 5
        assert received_splits[sender] == 5


def test_static_shapes(comm):
    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([comm.size], tf.int32)])
    def exchange(tensor, splits):
        received, received_splits = comm.alltoall(tensor, splits, "exchange")
        assert received.shape.as_list() == [None, 2]
        assert received_splits.shape.as_list() == [comm.size]
        assert comm.allgather(tensor, "gather").shape.as_list() == [None, 2]
        assert comm.broadcast(splits, 0, "broadcast").shape.as_list() == [comm.size]
        return received

    exchange.get_concrete_function()


def test_several_operations_in_one_function(comm):
    @tf.function
    def there_and_back(tensor, splits):
        there, received_splits = comm.alltoall(tensor, splits, "exchange")
        back, back_splits = comm.alltoall(there, received_splits, "exchange")
        other, _ = comm.alltoall(tensor + 1, splits, "other")
        return there, received_splits, back, back_splits, other

    for step in range(3):
        tensor, splits = sent(comm, step)
        there, received_splits, back, back_splits, other = there_and_back(tensor, splits)
        check_received(comm, there, received_splits, step)
        check_received(comm, other - 1, received_splits, step)
        np.testing.assert_array_equal(back, tensor)
        np.testing.assert_array_equal(back_splits, splits)


def test_a_function_that_is_called_twice_in_another(comm):
    exchange = tf.function(lambda tensor, splits: comm.alltoall(tensor, splits, "exchange"))

    @tf.function
    def outer(tensor, splits):
        return exchange(tensor, splits), exchange(tensor + 1, splits)

    for step in range(5):
        (first, splits), (second, _) = outer(*sent(comm, step))
        check_received(comm, first, splits, step)
        check_received(comm, second - 1, splits, step)


def test_loops_in_a_function(comm):
    steps = tf.data.Dataset.range(5)

    @tf.function
    def loops():
        total = tf.constant(0, tf.int64)
        for step in steps:
            total += exchange_sum(step)
        for step in tf.range(5, dtype=tf.int64):
            if step < 4:  # both branches of a condition, and a loop's body, are separate graphs
                total += exchange_sum(step)
        return total

    def exchange_sum(step):
        received, _ = comm.alltoall(
            tf.fill([comm.size], step * (comm.rank + 1)), tf.ones([comm.size], tf.int32), "exchange"
        )
        return tf.reduce_sum(received)

    for _ in range(2):
        assert loops() == (10 + 6) * sum(range(1, comm.size + 1))


def test_retracing_on_one_rank_only(comm):
    traces = 0

    @tf.function
    def exchange(tensor, splits):
        nonlocal traces
        traces += 1
        received, received_splits = comm.alltoall(tensor, splits, "exchange")
        everyone = comm.allgather(tensor, "gather")
        return received, received_splits, tf.shape(everyone)[0]

    for step in range(5):
        rows = step if comm.rank == 0 else 3
        splits = np.zeros(comm.size, np.int32)
        splits[-1] = rows
        received, received_splits, total = exchange(tf.fill([rows], comm.rank), tf.constant(splits))
        lengths = [step] + [3] * (comm.size - 1)
        assert total == sum(lengths)
        expected = lengths if comm.rank == comm.size - 1 else [0] * comm.size
        assert received_splits.numpy().tolist() == expected
        np.testing.assert_array_equal(received, np.repeat(np.arange(comm.size), expected))
    assert traces == (5 if comm.rank == 0 else 1)


def test_constants_on_one_rank_are_sent_in_each_step(comm):
    @tf.function
    def exchange(step):
        if comm.rank == 0:
            step = tf.constant([7, 7])
        ones = tf.ones([comm.size], tf.int32)
        received, _ = comm.alltoall(tf.repeat(step[:1], comm.size), ones, "exchange")
        (total,) = comm.allreduce([step], False, "reduce")
        return received, total, comm.allgather(step, "gather"), comm.broadcast(step, 0, "broadcast")

    for step in range(3):
        received, total, gathered, broadcast = exchange(tf.constant([step, step]))
        values = [7] + [step] * (comm.size - 1)
        assert received.numpy().tolist() == values
        assert total.numpy().tolist() == [sum(values)] * 2
        assert gathered.numpy().tolist() == np.repeat(values, 2).tolist()
        assert broadcast.numpy().tolist() == [7, 7]


def test_equal_tensors_on_one_rank_are_sent_twice(comm):
    @tf.function
    def gather(first, second):
        second = first if comm.rank == 0 else second
        return comm.allgather(first, "first"), comm.allgather(second, "second")

    for _ in range(2):
        first, second = gather(tf.constant([1]), tf.constant([2]))
        assert first.numpy().tolist() == [1] * comm.size
        assert second.numpy().tolist() == [1] + [2] * (comm.size - 1)


@eager_and_graph
@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
def test_allreduce(comm, wrap, average):
    slices = tf.IndexedSlices(
        tf.fill([comm.rank + 1, 2], 4.0 * comm.rank),
        tf.constant([5, *range(comm.rank)], tf.int64),  # all have 5; all except rank 0 have 0
        tf.constant([9, 2], tf.int64),
    )
    dense = [
        tf.fill([2, 3], 8.0 * comm.rank),
        tf.fill([4], tf.cast(8 * comm.rank, tf.float16)),
        slices,
        tf.fill([], tf.cast(8 * comm.rank, tf.bfloat16)),
        tf.fill([3], -8.0 * comm.rank),
    ]
    reduce = wrap(lambda *given: comm.allreduce(given, average, "reduce"))
    for _ in range(2):
        reduced = reduce(*dense)
        total = 8 * sum(range(comm.size)) / (comm.size if average else 1)
        for given, got, sign in zip(dense, reduced, [1, 1, None, 1, -1], strict=True):
            if sign is not None:
                assert (got.dtype, got.shape) == (given.dtype, given.shape)
                expected = sign * np.full(got.shape, total)
                np.testing.assert_array_equal(tf.cast(got, tf.float32), expected)
        got = reduced[2]
        assert got.indices.dtype == tf.int64
        expected = [[5, *range(rank)] for rank in range(comm.size)]
        assert got.indices.numpy().tolist() == list(itertools.chain(*expected))
        sender = np.repeat(np.arange(comm.size), [len(rows) for rows in expected])
        scale = 4.0 / (comm.size if average else 1)
        np.testing.assert_array_equal(got.values, scale * np.stack([sender] * 2, axis=1))
        assert got.dense_shape.numpy().tolist() == [9, 2]


@eager_and_graph
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.float32], ids=lambda dtype: dtype.name)
def test_sums_of_numbers(comm, wrap, dtype):
    count = wrap(lambda number: comm.allreduce([number], False, "count"))
    (total,) = count(tf.cast(comm.rank + 1, dtype))
    assert total.dtype == dtype
    assert total == comm.size * (comm.size + 1) // 2


def test_allreduce_of_no_tensors(comm):
    assert comm.allreduce([], True, "nothing") == []


@eager_and_graph
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_allgather_of_different_lengths(comm, wrap, dtype):
    gather = wrap(lambda tensor: comm.allgather(tensor, "gather"))
    for step in range(4):
        lengths = [(rank + step) % 3 for rank in range(comm.size)]
        gathered = gather(tf.cast(tf.fill([lengths[comm.rank], 2], comm.rank), dtype))
        assert gathered.dtype == dtype
        expected = np.repeat(np.arange(comm.size), lengths)[:, None] * np.ones([1, 2], np.int64)
        np.testing.assert_array_equal(gathered, tf.cast(expected, dtype))


@eager_and_graph
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_broadcast(comm, wrap, dtype):
    for root in range(comm.size):
        broadcast = wrap(lambda tensor, root=root: comm.broadcast(tensor, root, "broadcast"))
        got = broadcast(tf.cast(tf.fill([2, 2], comm.rank), dtype))
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, tf.cast(tf.fill([2, 2], root), dtype))


def test_gather_objects(comm):
    def of(rank):
        return {"rank": rank, "name": "ü" * 50 * rank, "list": [1.5, None, True], "in": {"x": []}}

    for _ in range(3):
        assert comm.gather_objects(of(comm.rank), "objects") == [of(r) for r in range(comm.size)]


def test_objects_that_json_cannot_represent_are_an_error(comm):
    with pytest.raises(TypeError):
        comm.gather_objects({1, 2}, "objects")


def test_names_that_are_invalid_for_nodes(comm):
    for name in ("my table: 0", "_x", "ünï"):
        assert comm.gather_objects(1, name) == [1] * comm.size


def test_barrier(comm, shared_path):
    for round in range(3):
        (shared_path / f"{round}.{comm.rank}").touch()
        comm.barrier()
        assert len(list(shared_path.glob(f"{round}.*"))) == comm.size
        comm.barrier("second")


def test_threads_with_different_names(comm):
    """Eager operations are matched by their given names, not by their kind."""
    wrong = []

    def gather(name, value):
        for step in range(20):
            got = comm.allgather(tf.constant([value, comm.rank, step]), name).numpy()
            expected = [[value, rank, step] for rank in range(comm.size)]
            if got.reshape(-1, 3).tolist() != expected:
                wrong.append((name, got))

    threads = [threading.Thread(target=gather, args=(f"thread{i}", i)) for i in range(3)]
    for thread in threads[:: 1 if comm.rank == 0 else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_gradients_are_sent_back(comm):
    @tf.function
    def gradient(tensor, splits):
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            received, _ = comm.alltoall(tensor, splits, "exchange")
            loss = tf.reduce_sum(received * (comm.rank + 1.0))
        return tape.gradient(loss, tensor)

    tensor, splits = sent(comm, dtype=tf.float32)
    expected = np.repeat(np.arange(comm.size) + 1.0, splits)
    np.testing.assert_array_equal(gradient(tensor, splits)[:, 0], expected)


@eager_and_graph
@pytest.mark.ranks(2)
def test_data_that_do_not_fit_are_refused_on_all_ranks(comm, wrap):
    """Of the same number of bytes: they would be taken for each other."""
    if not hasattr(comm, "leave"):
        pytest.skip("Horovod has its own errors")
    both = [tf.ones([4], tf.float32), tf.ones([4], tf.int32)]
    rows = [tf.ones([2, 2], tf.float32), tf.ones([4, 1], tf.float32)]
    for given, call in (
        (both, lambda data: comm.allgather(data, name="unfit")),
        (rows, lambda data: comm.allgather(data, name="unfit")),
        (both, lambda data: comm.broadcast(data, 0, name="unfit")),
        (rows, lambda data: comm.allreduce([data], False, name="unfit")),
        (both, lambda data: comm.alltoall(data, tf.constant([2, 2]), name="unfit")),
    ):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"rank \d has .*, and rank \d has"
        ):
            wrap(call)(given[comm.rank])
    # The group goes on.
    assert comm.gather_objects(comm.rank, "ranks") == [0, 1]


@eager_and_graph
@pytest.mark.ranks(2)
def test_a_wrong_argument_of_one_rank_is_an_error_of_all(comm, wrap):
    if not hasattr(comm, "leave"):
        pytest.skip("Horovod has its own errors")
    splits = tf.constant([2, 2] if comm.rank == 0 else [2, 3])
    call = wrap(lambda splits: comm.alltoall(tf.ones([4, 2]), splits, "wrong")[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"splits must be .* got \[?2 3"):
        call(splits)
    np.testing.assert_array_equal(call(tf.constant([2, 2])), tf.ones([4, 2]))


@eager_and_graph
def test_gradients(comm, wrap):
    """The loss of all ranks together is L = sum_r (r + 1) * sum(y_r ** 2), y_r what rank r has."""
    if not hasattr(comm, "leave"):
        pytest.skip("this is what our own operators do")
    weights = [rank + 1.0 for rank in range(comm.size)]
    x = tf.constant([[1.0, 2.0], [3.0, -1.0]]) + comm.rank

    def gradient(operation):
        def of(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = weights[comm.rank] * tf.reduce_sum(operation(x) ** 2)
            return tape.gradient(loss, x)

        return wrap(of)(x)

    every = sum(weights)
    got = gradient(lambda x: comm.allgather(x, name="g/allgather"))
    np.testing.assert_allclose(got, 2 * every * x, rtol=1e-6)

    root = comm.size - 1
    got = gradient(lambda x: comm.broadcast(x, root, name="g/broadcast"))
    np.testing.assert_allclose(got, 2 * every * x if comm.rank == root else 0 * x, rtol=1e-6)

    total = sum(x - comm.rank + rank for rank in range(comm.size))
    got = gradient(lambda x: comm.allreduce([x], False, name="g/allreduce")[0])
    np.testing.assert_allclose(got, 2 * every * total, rtol=1e-6)

    splits = tf.constant([0] * (comm.size - 1) + [2])  # all to the last rank
    got = gradient(lambda x: comm.alltoall(x, splits, name="g/alltoall")[0])
    np.testing.assert_allclose(got, 2 * weights[-1] * x, rtol=1e-6)


def test_sums_of_unsigned_numbers(comm):
    if not hasattr(comm, "leave"):
        pytest.skip("this is what our own operators do")
    large = tf.constant([2**64 // comm.size - 1], tf.uint64)  # the sum just fits
    (mean,) = comm.allreduce([large], True, "mean")
    np.testing.assert_array_equal(mean, large)
    (small,) = comm.allreduce([tf.constant([200], tf.uint8)], True, "small")
    np.testing.assert_array_equal(small, [200])
