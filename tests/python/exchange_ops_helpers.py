"""Helpers for the tests of the exchange operators."""

import numpy as np
import tensorflow as tf

from tf_dynemb import _ops

ops = _ops.library()


NAMES = ["exchange_test/a", "exchange_test/b", "exchange_test/c"]


def alltoall(messages):
    """Delivers messages[r] = (words, splits) of rank r; returns (words, splits) by receiver."""
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


TABLE = tf.Variable(tf.zeros([1, 1]))


def pool_rows(vectors, index, bags, num_bags):
    keys = tf.zeros([0], tf.int64)
    none = tf.zeros([1, 2], tf.int64)
    # The rows are in order, as with one rank.
    row_count = tf.shape(vectors, tf.int64)[tf.newaxis, :1]
    return ops.dynemb_pool_rows(
        [TABLE.handle], tf.zeros([0], tf.int32), [vectors], [index], [bags], [tf.zeros([0])],
        [tf.constant(num_bags, tf.int64)], [keys], [tf.zeros([0], tf.uint32)],
        row_count, row_count, none, none, dtypes=[vectors.dtype], tables=[0], names=NAMES[:1],
        combiners=["sum"], wire=["same"], rank=0, dynamic=[False], in_order=False,
    )  # fmt: skip


class Ranks:
    """Three ranks that send each other random rows of two tables, for three features."""

    dims = (5, 8)
    table_of = (0, 1, 0)
    num_bags = 6

    def __init__(self, wire, dtype, combiner):
        random = np.random.default_rng(1)
        self.size = 3
        self.wire, self.dtype, self.combiners = list(wire), dtype, [combiner] * 3
        # [owner, table, rank]: the number of rows that a rank asked an owner, perhaps itself, for.
        self.served = random.integers(0, 9, (3, 2, 3))
        self.held = [
            [
                tf.cast(random.normal(size=(self.served[r, t].sum(), dim)), dtype)
                for t, dim in enumerate(self.dims)
            ]
            for r in range(3)
        ]
        self.asked = [self.served[:, :, r].T for r in range(3)]
        self.words = self.send(self.held, self.served, self.wire)
        self.received = [
            ops.dynemb_unpack_rows(
                self.words[r], self.asked[r], self.held[r], self.served[r], dims=self.dims,
                wire=self.wire, rank=r,
            )
            for r in range(3)
        ]  # fmt: skip
        self.features = [
            [self.feature(random, rank, t) for t in self.table_of] for rank in range(3)
        ]

    def send(self, rows, counts, wire):
        """Sends rows between the ranks; returns the words that each rank receives."""
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

    def pool(self, rank, words, held, received, sent, at):
        """Returns pooled vectors and argmax; `at` is the rank's column of `received` and `sent`."""
        index, bags, weights, _ = zip(*self.features[rank], strict=True)
        none = tf.zeros([2, 3], tf.int64)
        return ops.dynemb_pool_rows(
            [TABLE.handle] * 3, words, held, index, bags, weights,
            [tf.constant(self.num_bags, tf.int64)] * 3, [tf.zeros([0], tf.int64)] * 2,
            [tf.zeros([0], tf.uint32)] * 2, received, sent, none, none, dtypes=[self.dtype] * 3,
            tables=self.table_of, names=NAMES[:2], combiners=self.combiners, wire=self.wire,
            rank=at, dynamic=[False] * 2, in_order=False,
        )  # fmt: skip

    def pool_received(self, rank):
        """Pools the vectors that `rank` received."""
        return self.pool(
            rank, self.words[rank], self.held[rank], self.asked[rank], self.served[rank], rank
        )

    def weight_gradients(self, rank, pooled, words, held, received, sent, at):
        index, bags, weights, upstream = zip(*self.features[rank], strict=True)
        return ops.dynemb_pool_rows_weight_grad(
            words, held, index, bags, weights, pooled.argmax, pooled.outputs, upstream,
            received, sent, tables=self.table_of, combiners=self.combiners, wire=self.wire, rank=at,
        )  # fmt: skip

    def gradient(self, rank, pooled, counts, wire, at):
        index, bags, weights, upstream = zip(*self.features[rank], strict=True)
        return ops.dynemb_pool_rows_grad(
            index, bags, weights, pooled.argmax, upstream, counts, tables=self.table_of,
            dims=self.dims, combiners=self.combiners, wire=wire, names=NAMES[:2], rank=at, T=2,
        )  # fmt: skip
