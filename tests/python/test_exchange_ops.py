"""The operators of the exchange: ranks in one process, whose messages numpy carries."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_dynemb import _ops

ops = _ops.library()
NAMES = ["exchange_test/a", "exchange_test/b", "exchange_test/c"]


def alltoall(messages):
    """messages[r] = (words, splits) of rank r -> (words, splits) that each rank receives."""
    parts = [
        np.split(np.asarray(words), np.cumsum(np.asarray(splits))[:-1])
        for words, splits in messages
    ]
    ranks = range(len(messages))
    return [
        (
            np.concatenate([parts[source][rank] for source in ranks]),
            np.array([len(parts[source][rank]) for source in ranks], np.int32),
        )
        for rank in ranks
    ]


def route(keys, tables, owners, ranks, rank):
    return ops.dynemb_route(
        keys=keys, N=len(keys), tables=tables, owners=owners, names=NAMES[: len(owners)],
        num_ranks=ranks, rank=rank,
    )  # fmt: skip


def owner_of(keys, owner, ranks):
    if owner == -1:
        return ops.dynemb_owners(keys, num_ranks=ranks).numpy()
    return keys % ranks if owner == -2 else np.full(len(keys), owner)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([0, 1, 7, 3000]))
def test_every_key_reaches_its_owner_once(seed, ranks, n):
    random = np.random.default_rng(seed)
    key_types = [np.int64, np.int32, np.int64]
    tables = [0, 1, 2, 0]
    owners = [-1, int(random.integers(0, ranks)), -2]

    def ids(feature):
        table = tables[feature]
        low = 0 if owners[table] == -2 else -(2**31)
        many = random.integers(low, 2**31 - 1, 50)
        size = random.integers(0, n + 1)
        return random.choice(many, size).astype(key_types[table])

    batches = [[ids(feature) for feature in range(4)] for _ in range(ranks)]
    routed = [route(batches[r], tables, owners, ranks, r) for r in range(ranks)]
    received = alltoall([(r.words, r.splits) for r in routed])
    held = [ops.dynemb_receive_keys(*one, Tkeys=key_types) for one in received]
    for rank in range(ranks):
        assert int(tf.reduce_sum(routed[rank].splits)) == len(routed[rank].words)
        for table in range(3):
            its = [f for f in range(4) if tables[f] == table]
            asked = np.unique(np.concatenate([batches[rank][f] for f in its]))
            counts = routed[rank].counts[table].numpy()
            by_owner = np.bincount(owner_of(asked, owners[table], ranks), minlength=ranks)
            np.testing.assert_array_equal(counts, by_owner)
            # The request, put together from what its owners received.
            ends = [np.cumsum(held[o].counts[table].numpy()) for o in range(ranks)]
            request = np.concatenate(
                [
                    held[o].keys[table].numpy()[ends[o][rank] - counts[o] : ends[o][rank]]
                    for o in range(ranks)
                ]
            )
            assert len(request) == len(asked)
            for feature in its:
                index = routed[rank].index[feature].numpy()
                np.testing.assert_array_equal(request[index], batches[rank][feature])


@pytest.mark.parametrize("wire", ["same", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_rows_travel(wire, dtype):
    ranks, dims = 3, [5, 16, 1]
    random = np.random.default_rng(1)
    counts = random.integers(0, 9, (ranks, 3, ranks))  # [from, table, to]
    rows = [
        [tf.cast(random.normal(size=(counts[r, t].sum(), dims[t])), dtype) for t in range(3)]
        for r in range(ranks)
    ]
    packed = [
        ops.dynemb_pack_rows(
            rows=rows[r], counts=counts[r], wire=[wire] * 3, what="other", rank=r, names=NAMES
        )
        for r in range(ranks)
    ]
    received = alltoall([(p.words, p.splits) for p in packed])
    for rank in range(ranks):
        came = ops.dynemb_unpack_rows(
            received[rank][0], counts[:, :, rank].T, dtypes=[dtype] * 3, dims=dims, wire=[wire] * 3
        )
        for t in range(3):
            begins = np.cumsum(counts[:, t], axis=1) - counts[:, t]
            expected = np.concatenate(
                [
                    tf.cast(rows[r][t], tf.float32).numpy()[
                        begins[r, rank] : begins[r, rank] + counts[r, t, rank]
                    ]
                    for r in range(ranks)
                ]
            )
            got = tf.cast(came[t], tf.float32).numpy()
            if wire == "int8":
                error = np.abs(expected).max(axis=1, keepdims=True, initial=0) / 127 * 0.501
                error = error + np.abs(expected) * (0 if dtype == tf.float32 else 2**-7)
                assert np.all(np.abs(got - expected) <= error)
            elif wire == "same" or dtype != tf.float32:
                np.testing.assert_array_equal(got, expected)
            else:
                np.testing.assert_array_equal(got, tf.cast(tf.cast(expected, wire), tf.float32))


TABLE = tf.Variable(tf.zeros([1, 1]))


def pool_rows(vectors, index, bags, num_bags, **attributes):
    keys = tf.zeros([0], tf.int64)
    none = tf.zeros([1, 2], tf.int64)
    options = {
        "tables": [0], "names": NAMES[:1], "combiners": ["sum"], "wire": ["same"],
        "dynamic": [False], "in_order": False, **attributes,
    }  # fmt: skip
    return ops.dynemb_pool_rows(
        [TABLE.handle], [vectors], [index], [bags], [tf.zeros([0])],
        [tf.constant(num_bags, tf.int64)], [keys], [tf.zeros([0], tf.uint32)], none, none,
        **options,
    )  # fmt: skip


def test_pooling_by_index():
    vectors = tf.constant([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    index = tf.constant([2, 0, 0, 1], tf.uint32)
    outputs, _ = pool_rows(vectors, index, tf.constant([0, 1, 1, 4], tf.int64), 3)
    np.testing.assert_array_equal(outputs[0], [[100, 200], [0, 0], [12, 24]])


def invalid(function, message):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
        function()


def test_wrong_inputs_are_refused():
    keys = np.arange(5, dtype=np.int64)
    vectors = tf.ones([3, 2])
    index = tf.constant([0, 3], tf.uint32)
    one = tf.constant(1, tf.int64)
    invalid(lambda: pool_rows(vectors, index, one, 2), "index holds 3, but there are 3 rows")
    invalid(lambda: route([keys], [1], [-1], 2, 0), "tables must be in")
    invalid(lambda: route([keys], [0], [2], 2, 0), "owners must be in")
    invalid(lambda: route([keys, keys.astype(np.int32)], [0, 0], [-1], 2, 0), "two types")
    invalid(lambda: route([keys], [0], [-1], 5000, 0), "num_ranks is 5000")
    routed = route([keys], [0], [-1], 2, 0)
    for words, splits in (
        (routed.words[:-1], routed.splits),
        (routed.words, routed.splits - 1),
        (tf.fill([len(routed.words)], -1), routed.splits),
        (tf.fill([len(routed.words)], 2**31 - 1), routed.splits),
        (tf.zeros([0], tf.int32), tf.constant([-1, 1])),
    ):
        invalid(
            lambda words=words, splits=splits: ops.dynemb_receive_keys(
                words, splits, Tkeys=[tf.int64]
            ),
            "is not one of 1 tables",
        )

    def pack(rows=vectors, counts=((1, 2),), wire="same"):
        return ops.dynemb_pack_rows(
            rows=[rows], counts=counts, wire=[wire], what="other", rank=0, names=NAMES[:1]
        )

    assert pack().splits.numpy().tolist() == [2, 4]
    invalid(lambda: pack(counts=[[1, 1]]), "rows has shape")
    invalid(lambda: pack(counts=[[-1, 4]]), "negative")
    invalid(lambda: pack(counts=[[1, 2], [0, 0]]), "[Dd]imension|counts has shape")
    invalid(lambda: pack(rows=tf.ones([3, 2], tf.int32), wire="int8"), "int32 cannot travel")
    invalid(
        lambda: ops.dynemb_unpack_rows(
            tf.zeros([3], tf.int32), [[1, 1]], dtypes=[tf.float32], dims=[2], wire=["same"]
        ),
        "words has shape",
    )


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
        received = ops.dynemb_receive_keys(words, splits, Tkeys=[tf.int64])
        assert received.keys[0].shape == [None]
        assert received.counts.shape == [1, 4]
        (rows,) = ops.dynemb_unpack_rows(
            words, counts, dtypes=[tf.float16], dims=[6], wire=["same"]
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
        (sums,) = ops.dynemb_pool_rows_grad(
            index=[index], bags=[tf.constant(2, tf.int64)], weights=[tf.zeros([0])],
            argmax=[argmax[0]], grads=[outputs[0]], num_rows=[tf.constant(7, tf.int64)],
            tables=[0], dims=[5], combiners=["max"],
        )  # fmt: skip
        assert sums.shape == [7, 5]
        assert ops.dynemb_owners(keys, num_ranks=4).shape == keys.shape

    spec = tf.TensorSpec
    function.get_concrete_function(
        spec([8], tf.int64), spec([None], tf.int32), spec([4], tf.int32),
        spec([None, 5], tf.float32), spec([18], tf.uint32), spec([1, 4], tf.int64),
    )  # fmt: skip
