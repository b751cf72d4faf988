"""The operators of the exchange: ranks in one process, whose messages numpy delivers."""

import numpy as np
import pytest
import simulated
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
    held = [
        ops.dynemb_receive_keys(*received[r], routed[r].own, Tkeys=key_types, rank=r)
        for r in range(ranks)
    ]
    for rank in range(ranks):
        assert int(tf.reduce_sum(routed[rank].splits)) == len(routed[rank].words)
        assert routed[rank].splits[rank] == 0
        for table in range(3):
            its = [f for f in range(4) if tables[f] == table]
            asked = np.unique(np.concatenate([batches[rank][f] for f in its]))
            counts = routed[rank].counts[table].numpy()
            by_owner = np.bincount(owner_of(asked, owners[table], ranks), minlength=ranks)
            np.testing.assert_array_equal(counts, by_owner)
            # The request, assembled from the keys that its owners received.
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
            received[rank][0], counts[:, :, rank].T, rows[rank], counts[rank], dims=dims,
            wire=[wire] * 3, rank=rank,
        )  # fmt: skip
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
            # The vectors that a rank sends itself are unchanged.
            begin = counts[:rank, t, rank].sum()
            own = slice(begin, begin + counts[rank, t, rank])
            np.testing.assert_array_equal(got[own], expected[own])
            if wire == "int8":
                error = np.abs(expected).max(axis=1, keepdims=True, initial=0) / 127 * 0.501
                error = error + np.abs(expected) * (0 if dtype == tf.float32 else 2**-7)
                assert np.all(np.abs(got - expected) <= error)
            elif wire == "same" or dtype != tf.float32:
                np.testing.assert_array_equal(got, expected)
            else:
                rounded = tf.cast(tf.cast(expected, wire), tf.float32).numpy()
                rounded[own] = expected[own]
                np.testing.assert_array_equal(got, rounded)


TABLE = tf.Variable(tf.zeros([1, 1]))


def pool_rows(vectors, index, bags, num_bags, words=(), came=None, sent=None, **attributes):
    keys = tf.zeros([0], tf.int64)
    none = tf.zeros([1, 2], tf.int64)
    # All in order, as if there were one rank.
    all_own = tf.shape(vectors, tf.int64)[tf.newaxis, :1]
    options = {
        "dtypes": [vectors.dtype], "tables": [0], "names": NAMES[:1], "combiners": ["sum"],
        "wire": ["same"], "rank": 0, "dynamic": [False], "in_order": False, **attributes,
    }  # fmt: skip
    return ops.dynemb_pool_rows(
        [TABLE.handle], tf.constant(words, tf.int32), [vectors], [index], [bags], [tf.zeros([0])],
        [tf.constant(num_bags, tf.int64)], [keys], [tf.zeros([0], tf.uint32)],
        all_own if came is None else came, all_own if sent is None else sent, none, none,
        **options,
    )  # fmt: skip


def test_pooling_by_index():
    vectors = tf.constant([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    index = tf.constant([2, 0, 0, 1], tf.uint32)
    outputs, _ = pool_rows(vectors, index, tf.constant([0, 1, 1, 4], tf.int64), 3)
    np.testing.assert_array_equal(outputs[0], [[100, 200], [0, 0], [12, 24]])


class Ranks:
    """Three ranks with random rows of two tables for each other, and three features of these."""

    dims = (5, 8)
    table_of = (0, 1, 0)
    num_bags = 6

    def __init__(self, wire, dtype, combiner):
        random = np.random.default_rng(1)
        self.size = 3
        self.wire, self.dtype, self.combiners = list(wire), dtype, [combiner] * 3
        # [from, table, to]: rows that one rank holds and others, or the rank itself, asked for.
        self.served = random.integers(0, 9, (3, 2, 3))
        self.held = [
            [
                tf.cast(random.normal(size=(self.served[r, t].sum(), dim)), dtype)
                for t, dim in enumerate(self.dims)
            ]
            for r in range(3)
        ]
        self.asked = [self.served[:, :, r].T for r in range(3)]
        self.words = self.travel(self.held, self.served, self.wire)
        self.came = [
            ops.dynemb_unpack_rows(
                self.words[r], self.asked[r], self.held[r], self.served[r], dims=self.dims,
                wire=self.wire, rank=r,
            )
            for r in range(3)
        ]  # fmt: skip
        self.features = [
            [self.feature(random, rank, t) for t in self.table_of] for rank in range(3)
        ]

    def travel(self, rows, counts, wire):
        """Returns the words that each rank receives."""
        packed = [
            ops.dynemb_pack_rows(
                rows=rows[r], counts=counts[r], wire=wire, what="other", rank=r, names=NAMES[:2]
            )
            for r in range(3)
        ]
        return [words for words, _ in alltoall([(p.words, p.splits) for p in packed])]

    def feature(self, random, rank, table):
        """Returns (index, bags, weights, upstream) of a feature."""
        n = self.asked[rank][table].sum()
        index = random.integers(0, n, 20).astype(np.uint32)
        lengths = np.bincount(random.integers(0, self.num_bags, 20), minlength=self.num_bags)
        splits = np.concatenate([[0], np.cumsum(lengths)])
        upstream = tf.cast(random.normal(size=(self.num_bags, self.dims[table])), self.dtype)
        return index, splits, random.normal(size=20).astype(np.float32), upstream

    def pool(self, rank, words, held, came, sent, at):
        """Returns pooled vectors and argmax; `at` is the rank in came and sent."""
        index, bags, weights, _ = zip(*self.features[rank], strict=True)
        none = tf.zeros([2, 3], tf.int64)
        return ops.dynemb_pool_rows(
            [TABLE.handle] * 3, words, held, index, bags, weights,
            [tf.constant(self.num_bags, tf.int64)] * 3, [tf.zeros([0], tf.int64)] * 2,
            [tf.zeros([0], tf.uint32)] * 2, came, sent, none, none, dtypes=[self.dtype] * 3,
            tables=self.table_of, names=NAMES[:2], combiners=self.combiners, wire=self.wire,
            rank=at, dynamic=[False] * 2, in_order=False,
        )  # fmt: skip

    def pool_here(self, rank):
        """Returns the result of `rank` pooling the vectors that it received."""
        return self.pool(
            rank, self.words[rank], self.held[rank], self.asked[rank], self.served[rank], rank
        )

    def weight_gradients(self, rank, pooled, words, held, came, sent, at):
        index, bags, weights, upstream = zip(*self.features[rank], strict=True)
        return ops.dynemb_pool_rows_weight_grad(
            words, held, index, bags, weights, pooled.argmax, pooled.outputs, upstream, came, sent,
            tables=self.table_of, combiners=self.combiners, wire=self.wire, rank=at,
        )  # fmt: skip

    def gradient(self, rank, pooled, counts, wire, at):
        index, bags, weights, upstream = zip(*self.features[rank], strict=True)
        return ops.dynemb_pool_rows_grad(
            index, bags, weights, pooled.argmax, upstream, counts, tables=self.table_of,
            dims=self.dims, combiners=self.combiners, wire=wire, names=NAMES[:2], rank=at, T=2,
        )  # fmt: skip


WIRES = [("same", "same"), ("int8", "same"), ("float16", "bfloat16"), ("same", "int8")]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("wire", WIRES, ids="-".join)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_rows_are_used_where_they_came_to_lie(dtype, wire, combiner):
    """The same bits as with rows that are unpacked first, and gradients of sums that are packed."""
    ranks = Ranks(wire, dtype, combiner)
    no_words = tf.zeros([0], tf.int32)
    sums, packed = [], []
    for rank in range(ranks.size):
        totals = ranks.asked[rank].sum(1, keepdims=True)
        where = (ranks.words[rank], ranks.held[rank], ranks.asked[rank], ranks.served[rank], rank)
        in_order = (no_words, ranks.came[rank], totals, totals, 0)
        pooled, expected = ranks.pool(rank, *where), ranks.pool(rank, *in_order)
        for feature in range(3):
            np.testing.assert_array_equal(pooled.outputs[feature], expected.outputs[feature])
            np.testing.assert_array_equal(pooled.argmax[feature], expected.argmax[feature])
        assert np.any(pooled.outputs[0].numpy() != 0)
        got = ranks.weight_gradients(rank, pooled, *where)
        for one, its in zip(got, ranks.weight_gradients(rank, pooled, *in_order), strict=True):
            np.testing.assert_array_equal(one, its)
        sums.append(ranks.gradient(rank, pooled, totals, ["same"] * 2, 0).own)
        packed.append(ranks.gradient(rank, pooled, ranks.asked[rank], ranks.wire, rank))
        assert packed[rank].splits[rank] == 0

    words = [w for w, _ in alltoall([(p.words, p.splits) for p in packed])]
    expected_words = ranks.travel(sums, np.stack(ranks.asked), ranks.wire)
    for rank in range(ranks.size):
        np.testing.assert_array_equal(words[rank], expected_words[rank])
        arrived = ops.dynemb_unpack_rows(
            words[rank], ranks.served[rank], sums[rank], ranks.asked[rank], dims=ranks.dims,
            wire=ranks.wire, rank=rank,
        )  # fmt: skip
        random = np.random.default_rng(rank)
        keys = [tf.constant(random.integers(0, 9, len(a)), tf.int64) for a in arrived]
        rows = [tf.cast(k + 100, tf.uint32) for k in keys]
        expected = ops.dynemb_lookup_sparse_grad(
            keys=keys, rows=rows, bags=[tf.constant(1, tf.int64)] * 2,
            weights=[tf.zeros([0])] * 2, argmax=[tf.zeros([0, d], tf.int32) for d in ranks.dims],
            grads=arrived, combiners=["sum"] * 2,
        )  # fmt: skip
        got = ops.dynemb_sum_received(
            keys, [rows[0], tf.zeros([0], tf.uint32)], words[rank], packed[rank].own,
            ranks.served[rank], wire=ranks.wire, rank=rank,
        )  # fmt: skip
        for table in range(2):
            np.testing.assert_array_equal(got.unique_keys[table], expected.unique_keys[table])
            np.testing.assert_array_equal(got.sums[table], expected.sums[table])
        np.testing.assert_array_equal(got.unique_rows[0], expected.unique_rows[0])
        assert len(got.unique_rows[1]) == 0


def test_wrong_rows_are_refused():
    ranks = Ranks(["same"] * 2, tf.float32, "sum")
    words, held, came, sent = ranks.words[1], ranks.held[1], ranks.asked[1], ranks.served[1]

    def pool(**changed):
        given = {"words": words, "held": held, "came": came, "sent": sent, "at": 1, **changed}
        return ranks.pool(1, **given)

    pool()
    more = came + np.eye(2, 3, dtype=np.int64)
    invalid(lambda: pool(words=words[1:]), "words has shape")
    invalid(lambda: pool(came=more), "words has shape")
    invalid(lambda: pool(held=[held[0][1:], held[1]]), r"held\[0\] has shape")
    invalid(lambda: pool(held=[held[1], held[0]]), "held|words has shape")
    invalid(lambda: pool(sent=np.add(sent, [-1, 1, 0])), "sends itself|sent holds -1")
    invalid(lambda: pool(sent=-sent), "sent holds -")
    invalid(lambda: pool(sent=sent[:, :2]), "[Dd]imension|sent has shape")
    invalid(lambda: pool(at=3), "on rank 3")
    invalid(lambda: pool(came=came[:1]), "[Dd]imension|counts has shape")
    pooled = pool()
    invalid(lambda: ranks.gradient(1, pooled, came, ["same"] * 2, 3), "on rank 3")
    invalid(lambda: ranks.gradient(1, pooled, came[:, :0], ["same"] * 2, 0), "0 ranks")
    packed = ranks.gradient(1, pooled, came, ["same"] * 2, 1)
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
    invalid(lambda: add(rank=5), "on rank 5")


def invalid(function, message):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
        function()


@pytest.mark.skipif(simulated.ON_DEVICE, reason="a device does not say so: the next test")
def test_an_index_past_the_rows_is_refused():
    one = tf.constant(1, tf.int64)
    index = tf.constant([0, 3], tf.uint32)
    invalid(lambda: pool_rows(tf.ones([3, 2]), index, one, 2), "holds 3, but there are 3 rows")
    ranks = Ranks(["same"] * 2, tf.float32, "sum")
    none = np.zeros_like(ranks.asked[1])
    invalid(lambda: ranks.gradient(1, ranks.pool_here(1), none, ["same"] * 2, 1), "0 rows")


@pytest.mark.skipif(not simulated.ON_DEVICE, reason="the host refuses it: the test before")
def test_an_index_past_the_rows_means_zeros():
    one = tf.constant(1, tf.int64)
    index = tf.constant([0, 3], tf.uint32)
    outputs, _ = pool_rows(tf.ones([3, 2]), index, one, 2)
    np.testing.assert_array_equal(outputs[0], [[1, 1], [0, 0]])
    ranks = Ranks(["same"] * 2, tf.float32, "sum")
    none = np.zeros_like(ranks.asked[1])
    gradient = ranks.gradient(1, ranks.pool_here(1), none, ["same"] * 2, 1)
    assert len(gradient.words) == 0
    assert [len(own) for own in gradient.own] == [0, 0]


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
