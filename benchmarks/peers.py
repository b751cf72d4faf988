"""The tables that are compared, behind one interface.

Each table gets the same rows: ours and DenseHashTable by key, the static variable by row number, as
its users do. `lookup` and `upsert` are one graph function call on a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from benchmarks.harness import DENSE, OURS, STATIC, TFRA
from benchmarks.workload import Rows, keys_of

DENSE_LOAD = 0.8  # DenseHashTable grows beyond this load.


class Peer(Protocol):
    """A table of vectors of `dim` floats."""

    lookup: Callable[[tf.Tensor], tf.Tensor]
    upsert: Callable[[tf.Tensor, tf.Tensor], Any]
    eager_lookup: Callable[[tf.Tensor], tf.Tensor]  # the table's own method, not a graph function

    def ids(self, rows: Rows) -> tf.Tensor:
        """Returns the ids of rows in this table."""
        ...


def _functions(
    peer: Any,
    dim: int,
    lookup: Callable[..., Any],
    upsert: Callable[..., Any],
    eager_lookup: Callable[..., Any],
) -> None:
    """Creates the calls of the peer, already traced, so that no measured call traces."""
    ids = tf.TensorSpec([None], tf.int64)
    values = tf.TensorSpec([None, dim], tf.float32)

    @tf.function(autograph=False)
    def upsert_all(ids: tf.Tensor, values: tf.Tensor) -> None:
        upsert(ids, values)

    peer.eager_lookup = eager_lookup
    peer.lookup = tf.function(lookup, autograph=False).get_concrete_function(ids)
    peer.upsert = upsert_all.get_concrete_function(ids, values)


class Ours:
    """A DynamicVariable."""

    def __init__(self, dim: int, sized_for: int | None) -> None:
        import tf_dynemb as de

        options = {} if sized_for is None else {"init_capacity": sized_for}
        self.variable = variable = de.DynamicVariable(dimension=dim, **options)
        _functions(
            self,
            dim,
            lambda ids: tf.nn.embedding_lookup(variable, ids),
            lambda ids, values: de.assign(variable, ids, values),
            variable.lookup,
        )

    def ids(self, rows: Rows) -> tf.Tensor:
        """The rows' keys."""
        return tf.constant(keys_of(rows))


class Dense:
    """TensorFlow's DenseHashTable."""

    def __init__(self, dim: int, sized_for: int | None) -> None:
        options = {}
        if sized_for is not None:
            options = {"initial_num_buckets": 1 << int(sized_for / DENSE_LOAD).bit_length()}
        empty, deleted = keys_of(np.asarray([-1, -2]))
        self.table = table = tf.lookup.experimental.DenseHashTable(
            tf.int64,
            tf.float32,
            default_value=tf.zeros([dim]),
            empty_key=empty,
            deleted_key=deleted,
            checkpoint=False,
            experimental_is_anonymous=True,
            **options,
        )
        self.lookup_keys = table.lookup
        _functions(self, dim, table.lookup, table.insert, table.lookup)

    def ids(self, rows: Rows) -> tf.Tensor:
        """The rows' keys."""
        return tf.constant(keys_of(rows))


class Static:
    """A tf.Variable of fixed size."""

    def __init__(self, dim: int, sized_for: int) -> None:
        self.variable = variable = tf.Variable(tf.zeros([sized_for, dim]))
        _functions(
            self,
            dim,
            lambda ids: tf.nn.embedding_lookup(variable, ids),
            lambda ids, values: tf.raw_ops.ResourceScatterUpdate(
                resource=variable.handle, indices=ids, updates=values
            ),
            variable.sparse_read,
        )

    def ids(self, rows: Rows) -> tf.Tensor:
        """The rows' numbers."""
        return tf.constant(rows)


class Tfra:
    """A table of TensorFlow Recommenders Addons, with its cheapest initializer."""

    _count = 0

    def __init__(self, dim: int, sized_for: int | None) -> None:
        from tensorflow_recommenders_addons import dynamic_embedding as tfra

        Tfra._count += 1
        self.variable = variable = tfra.get_variable(
            f"tfra_{Tfra._count}",
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            dim=dim,
            initializer=0.0,
            devices=["/CPU:0"],
            init_size=sized_for or 0,
        )
        # Optimizers step the rows of the last lookup.
        self.shadow = tfra.shadow_ops.ShadowVariable(variable, name=f"shadow_{Tfra._count}")
        self.lookup_keys = variable.lookup
        self.train_lookup = partial(tfra.shadow_ops.embedding_lookup, self.shadow)
        _functions(self, dim, variable.lookup, variable.upsert, variable.lookup)

    @staticmethod
    def optimizer(name: str, learning_rate: float) -> Any:
        """Wraps a tf.keras optimizer for TFRA; TF_USE_LEGACY_KERAS=1 must be set."""
        from tensorflow_recommenders_addons import dynamic_embedding as tfra

        kind = getattr(tf.keras.optimizers.legacy, name)
        return tfra.DynamicEmbeddingOptimizer(kind(learning_rate))

    def ids(self, rows: Rows) -> tf.Tensor:
        """The rows' keys."""
        return tf.constant(keys_of(rows))


def fill(peers: Iterable[Peer], dim: int, rows: range, batch: int) -> None:
    """Inserts the rows of these numbers into each table, in calls of `batch`."""
    values = tf.random.stateless_uniform([batch, dim], [1, 2])
    for peer in peers:
        for start in range(rows.start, rows.stop, batch):
            ids = np.arange(start, min(start + batch, rows.stop))
            peer.upsert(peer.ids(ids), values[: len(ids)])


def empty_table(name: str, dim: int, rows: int, sized: bool) -> Peer:
    """Creates a table for `rows` rows; `sized` says whether it may be presized."""
    if name == STATIC:
        return Static(dim, rows)
    kind = {OURS: Ours, DENSE: Dense, TFRA: Tfra}[name]
    return kind(dim, rows if sized else None)
