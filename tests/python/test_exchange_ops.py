"""The exchange operators, with ranks in one process; NumPy delivers the messages."""

import numpy as np
import pytest
import tensorflow as tf
from exchange_ops_helpers import NAMES, Ranks, alltoall, ops, pool_rows, route
from hypothesis import given, settings
from hypothesis import strategies as st


def owner_of(keys, owner, ranks):
    if owner == -1:
        return ops.dynemb_owners(keys, num_ranks=ranks).numpy()
    return keys % ranks if owner == -2 else np.full(len(keys), owner)


@settings(max_examples=40)
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
            features = [f for f in range(4) if tables[f] == table]
            asked = np.unique(np.concatenate([batches[rank][f] for f in features]))
            counts = routed[rank].counts[table].numpy()
            by_owner = np.bincount(owner_of(asked, owners[table], ranks), minlength=ranks)
            np.testing.assert_array_equal(counts, by_owner)
            # The request, joined from the keys that the owners received.
            ends = [np.cumsum(held[o].counts[table].numpy()) for o in range(ranks)]
            request = np.concatenate(
                [
                    held[o].keys[table].numpy()[ends[o][rank] - counts[o] : ends[o][rank]]
                    for o in range(ranks)
                ]
            )
            assert len(request) == len(asked)
            for feature in features:
                index = routed[rank].index[feature].numpy()
                np.testing.assert_array_equal(request[index], batches[rank][feature])


@pytest.mark.parametrize("wire", ["same", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_pack_and_unpack_rows(wire, dtype):
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
    messages = alltoall([(p.words, p.splits) for p in packed])
    for rank in range(ranks):
        received = ops.dynemb_unpack_rows(
            messages[rank][0], counts[:, :, rank].T, rows[rank], counts[rank], dims=dims,
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
            got = tf.cast(received[t], tf.float32).numpy()
            # The vectors that a rank sends itself are unchanged.
            begin = counts[:rank, t, rank].sum()
            kept = slice(begin, begin + counts[rank, t, rank])
            np.testing.assert_array_equal(got[kept], expected[kept])
            if wire == "int8":
                error = np.abs(expected).max(axis=1, keepdims=True, initial=0) / 127 * 0.501
                error = error + np.abs(expected) * (0 if dtype == tf.float32 else 2**-7)
                assert np.all(np.abs(got - expected) <= error)
            elif wire == "same" or dtype != tf.float32:
                np.testing.assert_array_equal(got, expected)
            else:
                rounded = tf.cast(tf.cast(expected, wire), tf.float32).numpy()
                rounded[kept] = expected[kept]
                np.testing.assert_array_equal(got, rounded)


def test_pooling_by_index():
    vectors = tf.constant([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    index = tf.constant([2, 0, 0, 1], tf.uint32)
    outputs, _ = pool_rows(vectors, index, tf.constant([0, 1, 1, 4], tf.int64), 3)
    np.testing.assert_array_equal(outputs[0], [[100, 200], [0, 0], [12, 24]])


WIRES = [("same", "same"), ("int8", "same"), ("float16", "bfloat16"), ("same", "int8")]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
@pytest.mark.parametrize("wire", WIRES, ids="-".join)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_operators_on_messages(dtype, wire, combiner):
    """Operators that read and write messages give the same bits as separate packing operators."""
    ranks = Ranks(wire, dtype, combiner)
    no_words = tf.zeros([0], tf.int32)
    sums, packed = [], []
    for rank in range(ranks.size):
        totals = ranks.asked[rank].sum(1, keepdims=True)
        where = (ranks.words[rank], ranks.held[rank], ranks.asked[rank], ranks.served[rank], rank)
        in_order = (no_words, ranks.received[rank], totals, totals, 0)
        pooled, expected = ranks.pool(rank, *where), ranks.pool(rank, *in_order)
        for feature in range(3):
            np.testing.assert_array_equal(pooled.outputs[feature], expected.outputs[feature])
            np.testing.assert_array_equal(pooled.argmax[feature], expected.argmax[feature])
        assert np.any(pooled.outputs[0].numpy() != 0)
        got = ranks.weight_gradients(rank, pooled, *where)
        for gradients, in_order_gradients in zip(
            got, ranks.weight_gradients(rank, pooled, *in_order), strict=True
        ):
            np.testing.assert_array_equal(gradients, in_order_gradients)
        sums.append(ranks.gradient(rank, pooled, totals, ["same"] * 2, 0).own)
        packed.append(ranks.gradient(rank, pooled, ranks.asked[rank], ranks.wire, rank))
        assert packed[rank].splits[rank] == 0

    words = [w for w, _ in alltoall([(p.words, p.splits) for p in packed])]
    expected_words = ranks.send(sums, np.stack(ranks.asked), ranks.wire)
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
