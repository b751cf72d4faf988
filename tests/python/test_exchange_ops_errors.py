"""The exchange operators: wrong inputs, beside those of operator_calls.py, and counters."""

import gpu
import numpy as np
import pytest
import tensorflow as tf
from exchange_ops_helpers import NAMES, Ranks, ops, pool_rows, route


def invalid(function, message):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
        function()


@pytest.mark.skipif(gpu.ON, reason="a device raises no error; see the next test")
def test_index_past_the_rows_is_refused():
    one = tf.constant(1, tf.int64)
    index = tf.constant([0, 3], tf.uint32)
    invalid(lambda: pool_rows(tf.ones([3, 2]), index, one, 2), "holds 3, but there are 3 rows")
    ranks = Ranks(["same"] * 2, tf.float32, "sum")
    none = np.zeros_like(ranks.asked[1])
    invalid(lambda: ranks.gradient(1, ranks.pool_received(1), none, ["same"] * 2, 1), "0 rows")


@pytest.mark.skipif(not gpu.ON, reason="the host raises an error; see the test before")
def test_index_past_the_rows_gives_zeros():
    one = tf.constant(1, tf.int64)
    index = tf.constant([0, 3], tf.uint32)
    outputs, _ = pool_rows(tf.ones([3, 2]), index, one, 2)
    np.testing.assert_array_equal(outputs[0], [[1, 1], [0, 0]])
    ranks = Ranks(["same"] * 2, tf.float32, "sum")
    none = np.zeros_like(ranks.asked[1])
    gradient = ranks.gradient(1, ranks.pool_received(1), none, ["same"] * 2, 1)
    assert len(gradient.words) == 0
    assert [len(table_sums) for table_sums in gradient.own] == [0, 0]


def test_features_of_a_table_have_keys_of_one_type():
    keys = np.arange(5, dtype=np.int64)
    invalid(lambda: route([keys, keys.astype(np.int32)], [0, 0], [-1], 2, 0), "two types")


def test_integers_are_sent_as_they_are():
    def pack(rows, wire):
        return ops.dynemb_pack_rows(
            rows=[rows], counts=[[1, 2]], wire=[wire], what="other", rank=0, names=NAMES[:1]
        )

    assert pack(tf.ones([3, 2], tf.int32), "same").splits.numpy().tolist() == [0, 4]
    invalid(lambda: pack(tf.ones([3, 2], tf.int32), "int8"), "int32 cannot be sent")


def test_rows_of_the_rank_itself_are_in_no_message():
    def unpack(sent, rank):
        (rows,) = ops.dynemb_unpack_rows(
            tf.zeros([2], tf.int32), [[1, 1]], [tf.ones([3, 2])], sent, dims=[2], wire=["same"],
            rank=rank,
        )  # fmt: skip
        return rows

    np.testing.assert_array_equal(unpack([[1, 2]], 0), [[1, 1], [0, 0]])
    np.testing.assert_array_equal(unpack([[2, 1]], 1), [[0, 0], [1, 1]])


def counters(name):
    names, values = (part.numpy().tolist() for part in ops.dynemb_exchange_stats(table=name))
    return dict(zip([n.decode() for n in names], values, strict=True))


def test_bytes_to_other_ranks_are_counted():
    name = "exchange_test/counted"

    keys = np.arange(100, dtype=np.int64)
    before = counters(name)
    routed = ops.dynemb_route(
        keys=[keys, keys], N=2, tables=[0, 0], owners=[-1], names=[name], num_ranks=3, rank=1
    )
    others = int(tf.reduce_sum(routed.counts)) - int(routed.counts[0, 1])
    ops.dynemb_pack_rows(
        rows=[tf.ones([100, 4])], counts=routed.counts, wire=["same"], what="gradients", rank=1,
        names=[name],
    )  # fmt: skip
    grown = {counter: value - before[counter] for counter, value in counters(name).items()}
    assert grown == {
        "keys_asked_of_other_ranks": others,
        "key_bytes_sent": 8 * others + 2 * 4,
        "vector_bytes_sent": 0,
        "gradient_bytes_sent": 16 * others,
        "other_bytes_sent": 0,
    }


def test_constant_ids_are_routed_every_time():
    @tf.function
    def function():
        return route([tf.constant([1, 2, 3], tf.int64)], [0], [-1], 2, 0).words

    function()
    graph = function.get_concrete_function().graph
    assert [op.type for op in graph.get_operations()].count("DynembRoute") == 1
    before = counters(NAMES[0])["key_bytes_sent"]
    function()
    assert counters(NAMES[0])["key_bytes_sent"] > before
