"""The exchange operators: wrong inputs, counters, and inferred shapes."""

import gpu
import numpy as np
import pytest
import tensorflow as tf
from exchange_ops_helpers import NAMES, Ranks, ops, pool_rows, route


def test_wrong_rows_are_refused():
    ranks = Ranks(["same"] * 2, tf.float32, "sum")
    words, held, received, sent = ranks.words[1], ranks.held[1], ranks.asked[1], ranks.served[1]

    def pool(**changed):
        given = {
            "words": words,
            "held": held,
            "received": received,
            "sent": sent,
            "at": 1,
            **changed,
        }
        return ranks.pool(1, **given)

    pool()
    more = received + np.eye(2, 3, dtype=np.int64)
    invalid(lambda: pool(words=words[1:]), "words has shape")
    invalid(lambda: pool(received=more), "words has shape")
    invalid(lambda: pool(held=[held[0][1:], held[1]]), r"held\[0\] has shape")
    invalid(lambda: pool(held=[held[1], held[0]]), "held|words has shape")
    invalid(lambda: pool(sent=np.add(sent, [-1, 1, 0])), "sends itself|sent holds -1")
    invalid(lambda: pool(sent=-sent), "sent holds -")
    invalid(lambda: pool(sent=sent[:, :2]), "[Dd]imension|sent has shape")
    invalid(lambda: pool(at=3), "this is rank 3")
    invalid(lambda: pool(received=received[:1]), "[Dd]imension|counts has shape")
    pooled = pool()
    invalid(lambda: ranks.gradient(1, pooled, received, ["same"] * 2, 3), "this is rank 3")
    invalid(lambda: ranks.gradient(1, pooled, received[:, :0], ["same"] * 2, 0), "0 ranks")
    packed = ranks.gradient(1, pooled, received, ["same"] * 2, 1)
    arrived = [tf.zeros([n], tf.int64) for n in sent.sum(1)]

    def add(**changed):
        given = {
            "keys": arrived, "rows": [tf.zeros([0], tf.uint32)] * 2,
            "words": tf.zeros([sum((sent[t].sum() - sent[t, 1]) * ranks.dims[t] for t in (0, 1))],
                              tf.int32),
            "own": packed.own, "counts": sent, "wire": ["same"] * 2, "rank": 1, **changed,
        }  # fmt: skip
        return ops.dynemb_sum_received(**given)

    add()
    invalid(lambda: add(keys=[arrived[0][1:], arrived[1]]), "keys has shape")
    invalid(lambda: add(rows=[tf.zeros([1], tf.uint32), tf.zeros([0], tf.uint32)]), "rows")
    invalid(lambda: add(words=tf.zeros([3], tf.int32)), "words has shape")
    invalid(lambda: add(own=[packed.own[0][1:], packed.own[1]]), "own has shape")
    invalid(lambda: add(counts=-sent), "negative")
    invalid(lambda: add(rank=5), "this is rank 5")


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


def test_wrong_inputs_are_refused():
    keys = np.arange(5, dtype=np.int64)
    vectors = tf.ones([3, 2])
    invalid(lambda: route([keys], [1], [-1], 2, 0), "tables must be in")
    invalid(lambda: route([keys], [0], [2], 2, 0), "owners must be in")
    invalid(lambda: route([keys, keys.astype(np.int32)], [0, 0], [-1], 2, 0), "two types")
    invalid(lambda: route([keys], [0], [-1], 5000, 0), "num_ranks is 5000")
    invalid(lambda: route([keys], [0], [-1], 2, 2), "rank 2 of 2")
    routed = route([keys], [0], [-1], 2, 0)
    for words, splits in (
        (routed.words[:-1], routed.splits),
        (routed.words, routed.splits - 1),
        (tf.fill([len(routed.words)], -1), routed.splits),
        (tf.fill([len(routed.words)], 2**31 - 1), routed.splits),
        (tf.zeros([0], tf.int32), tf.constant([-1, 1])),
        (routed.words, routed.splits[::-1]),
    ):
        invalid(
            lambda words=words, splits=splits: ops.dynemb_receive_keys(
                words, splits, routed.own, Tkeys=[tf.int64], rank=0
            ),
            "is not a request for keys of 1 tables",
        )
    invalid(
        lambda: ops.dynemb_receive_keys(
            routed.words, routed.splits, routed.own[1:], Tkeys=[tf.int64], rank=0
        ),
        "message of rank 0 is not a request for keys of 1 tables",
    )
    invalid(
        lambda: ops.dynemb_receive_keys(
            routed.words, routed.splits, routed.own, Tkeys=[tf.int64], rank=2
        ),
        "rank 2 of 2",
    )

    def pack(rows=vectors, counts=((1, 2),), wire="same"):
        return ops.dynemb_pack_rows(
            rows=[rows], counts=counts, wire=[wire], what="other", rank=0, names=NAMES[:1]
        )

    assert pack().splits.numpy().tolist() == [0, 4]
    invalid(lambda: pack(counts=[[1, 1]]), "rows has shape")
    invalid(lambda: pack(counts=[[-1, 4]]), "negative")
    invalid(lambda: pack(counts=[[1, 2], [0, 0]]), "[Dd]imension|counts has shape")
    invalid(lambda: pack(rows=tf.ones([3, 2], tf.int32), wire="int8"), "int32 cannot be sent")

    def unpack(words, counts=((1, 1),), own=vectors[:, :2], sent=((1, 2),), rank=0):
        (rows,) = ops.dynemb_unpack_rows(
            tf.zeros([words], tf.int32), counts, [own], sent, dims=[2], wire=["same"], rank=rank
        )
        return rows

    np.testing.assert_array_equal(unpack(2), [[1, 1], [0, 0]])
    np.testing.assert_array_equal(unpack(2, sent=[[2, 1]], rank=1), [[0, 0], [1, 1]])
    invalid(lambda: unpack(3), "words has shape")
    invalid(lambda: unpack(2, own=vectors[:1, :2]), r"own\[0\] has shape")
    invalid(lambda: unpack(2, sent=[[2, 1]]), "sends itself 2 rows of table 0, but receives 1")
    invalid(lambda: unpack(2, sent=[[1, 4, -2]]), "[Dd]imension|sent has shape")
    invalid(lambda: unpack(2, sent=[[-1, 4]]), "sent holds -1")
    invalid(lambda: unpack(2, sent=[[4, -1]], rank=1), "sent holds -1")
    invalid(lambda: unpack(2, rank=2), "counts are for 2 ranks, but this is rank 2")


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


def test_shapes_are_inferred():
    @tf.function
    def function(keys, words, splits, vectors, index, counts):
        routed = route([keys], [0], [-1], 4, 0)
        assert routed.words.shape == [None]
        assert routed.splits.shape == [4]
        assert routed.counts.shape == [1, 4]
        assert routed.index[0].shape == keys.shape
        assert routed.own.shape == [None]
        received = ops.dynemb_receive_keys(words, splits, words, Tkeys=[tf.int64], rank=0)
        assert received.keys[0].shape == [None]
        assert received.counts.shape == [1, 4]
        (rows,) = ops.dynemb_unpack_rows(
            words, counts, [tf.cast(vectors, tf.float16)], counts, dims=[6], wire=["same"], rank=0
        )
        assert rows.shape == [None, 6]
        packed = ops.dynemb_pack_rows(
            rows=[vectors], counts=counts, wire=["same"], what="other", rank=0, names=NAMES[:1]
        )
        assert packed.words.shape == [None]
        assert packed.splits.shape == [4]
        outputs, argmax = pool_rows(vectors, index, tf.constant(2, tf.int64), 9, combiners=["max"])
        assert outputs[0].shape == [9, 5]
        assert argmax[0].shape == [9, 5]
        packed = ops.dynemb_pool_rows_grad(
            index=[index], bags=[tf.constant(2, tf.int64)], weights=[tf.zeros([0])],
            argmax=[argmax[0]], grads=[outputs[0]], counts=counts, tables=[0], dims=[5],
            combiners=["max"], wire=["same"], names=NAMES[:1], rank=0, T=1,
        )  # fmt: skip
        assert packed.words.shape == [None]
        assert packed.splits.shape == [4]
        assert packed.own[0].shape == [None, 5]
        summed = ops.dynemb_sum_received(
            keys=[keys], rows=[tf.zeros([8], tf.uint32)], words=words, own=packed.own,
            counts=counts, wire=["same"], rank=0,
        )  # fmt: skip
        assert summed.unique_keys[0].shape == [None]
        assert summed.sums[0].shape == [None, 5]
        assert summed.unique_rows[0].shape == [None]
        assert ops.dynemb_owners(keys, num_ranks=4).shape == keys.shape

    spec = tf.TensorSpec
    function.get_concrete_function(
        spec([8], tf.int64), spec([None], tf.int32), spec([4], tf.int32),
        spec([None, 5], tf.float32), spec([18], tf.uint32), spec([1, 4], tf.int64),
    )  # fmt: skip
