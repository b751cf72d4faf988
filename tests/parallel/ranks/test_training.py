"""N ranks on the shares of a batch train the same model as one rank on the whole batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from parallel.ranks.gathered import (
    close,
    draw,
    gather,
    one_rank,
    same_on_all,
    whole_matrix,
    whole_table,
)
from tf_dynemb import _ops, communicator

K = keras.optimizers
USERS, ITEMS, CITIES, BATCH = 80, 50, 64, 16


class Model:
    """Two dynamic tables, a static one, a variable that every rank copies, and a dense network."""

    def __init__(self, make, static="distributed"):
        rng = np.random.default_rng(1)
        self.users = de.DynamicVariable(6, "normal", name="users", seed=1)
        self.items = de.DynamicVariable(4, "normal", name="items", seed=2, key_type=tf.int32)
        cities = rng.normal(size=(CITIES, 3)).astype(np.float32) / 10
        last = f"localized:{communicator.get().size - 1}"
        self.cities = de.Variable(cities, mode=last if static == "localized" else None)
        self.labels = tf.Variable(rng.normal(size=(3, 2)).astype(np.float32))
        self.network = keras.Sequential(
            [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
        )
        self.network.build((None, 15 if static else 10))
        self.network.set_weights(
            [rng.normal(size=w.shape) * 0.3 for w in self.network.get_weights()]
        )
        self.variables = [self.users, self.items, *self.network.trainable_variables]
        self.static = static
        if static:
            self.variables[2:2] = [self.cities, self.labels]
        self.optimizer = de.OptimizerWrapper(make())
        ids = [tf.RaggedTensorSpec([None, None], t, 1, tf.int64) for t in (tf.int64, tf.int32)]
        floats = tf.TensorSpec([None], tf.float32)
        self.step = tf.function(
            self.step,
            input_signature=[*ids, tf.TensorSpec([None], tf.int64), floats, floats],
        )
        self.optimizer.build(self.variables)

    def step(self, users, items, cities, labels, factors):
        tables, ids = [self.users, self.items], [users, items]
        if self.static:
            kinds = tf.stack([cities % 3, cities % 2], 1)
            tables, ids = [*tables, self.cities, self.labels], [*ids, cities, kinds]
        combiners = ["mean", "sqrtn", "sum", "sum"][: len(tables)]
        with tf.GradientTape() as tape:
            pooled = de.lookup_sparse(tables, ids, combiners=combiners)
            output = self.network(tf.concat(pooled, 1))[:, 0]
            loss = tf.reduce_mean(factors * tf.square(output - labels))
            scaled = self.optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, self.variables)
        self.optimizer.apply_gradients(zip(grads, self.variables, strict=True))
        return loss

    def values(self, comm):
        users, items = (whole_table(comm, table) for table in (self.users, self.items))
        dense_values = [self.labels.numpy(), *self.network.get_weights()]
        for value in dense_values:
            same_on_all(comm, value)
        cities = whole_matrix(comm, self.cities)
        return [users.vectors, users.state, items.vectors, items.state, cities, *dense_values]


class Batch:
    def __init__(self, rng, few_users, repeat_cities):
        self.users = draw(rng, USERS, BATCH, 5)
        if few_users is not None:  # one rank owns all of them
            self.users.ids[:] = rng.choice(few_users, len(self.users.ids))
        self.items = draw(rng, ITEMS, BATCH, 4, least=0)
        self.cities = rng.choice(CITIES if not repeat_cities else 3, BATCH, replace=repeat_cities)
        self.labels = rng.normal(size=BATCH).astype(np.float32)
        self.factors = np.ones(BATCH, np.float32)

    def part(self, rank, size):
        share = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        return [
            self.users.part(rank, size).ragged(),
            self.items.part(rank, size).ragged(dtype=tf.int32),
            tf.constant(self.cities[share]),
            tf.constant(self.labels[share]),
            tf.constant(self.factors[share]),
        ]


def train(comm, make, steps, relative, static="distributed", repeat_cities=False, overflows=()):
    """Compares training on all ranks with one. Returns both models, the second only on rank 0."""
    model = Model(make, static)
    alone = None
    if comm.rank == 0:
        with one_rank():
            alone = Model(make, static)
    rng = np.random.default_rng(3)
    owners = np.asarray(
        _ops.library().dynemb_owners(tf.range(USERS, dtype=tf.int64), num_ranks=comm.size)
    )
    losses = []
    for i in range(steps):
        few = np.flatnonzero(owners == i % comm.size) if i % 4 == 3 else None
        batch = Batch(rng, few, repeat_cities)
        if i in overflows:
            batch.factors[overflows[i]] = 1e38
        loss = model.step(*batch.part(comm.rank, comm.size))
        loss = gather(comm, np.array([loss])).mean()
        if alone is not None:
            with one_rank():
                losses.append((loss, alone.step(*batch.part(0, 1)).numpy()))
    values = model.values(comm)
    iterations = int(model.optimizer.iterations)
    same_on_all(comm, iterations)
    if alone is not None:
        with one_rank():
            expected = alone.values(communicator.LOCAL)
        finite = [i for i in range(steps) if i not in overflows]
        close(*np.array(losses)[finite].T, relative)
        for got, want in zip(values, expected, strict=True):
            close(got, want, relative)
        assert iterations == int(alone.optimizer.iterations)
    return model, alone


LONG = {"adam": lambda: K.Adam(0.003, epsilon=1e-3), "adagrad": lambda: K.Adagrad(0.05)}
SHORT = {
    "global_clipnorm": lambda: K.Adagrad(0.1, global_clipnorm=0.1),
    "nadam": lambda: K.Nadam(0.01, epsilon=1e-3),
}
MORE = {
    "clipnorm": lambda: K.Adam(0.01, epsilon=1e-3, clipnorm=0.02),
    "clipvalue": lambda: K.SGD(0.5, momentum=0.9, clipvalue=0.01),
    "schedule": lambda: K.SGD(K.schedules.ExponentialDecay(0.1, 5, 0.5), momentum=0.5),
    "adamw": lambda: K.AdamW(0.01, epsilon=1e-3, weight_decay=0.1),
    "ftrl": lambda: K.Ftrl(0.1, l2_regularization_strength=0.01, beta=0.1),
    "rmsprop": lambda: K.RMSprop(0.01, epsilon=1e-3, momentum=0.5, centered=True),
    "factor": lambda: K.Adagrad(0.1, loss_scale_factor=64.0, clipnorm=0.05),
}


@pytest.mark.parametrize("name", LONG)
def test_long_training(comm, name):
    train(comm, LONG[name], steps=120, relative=1e-5)


@pytest.mark.engines
@pytest.mark.parametrize("name", SHORT)
def test_short_training(comm, name):
    train(comm, SHORT[name], steps=16, relative=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MORE)
def test_short_training_with_other_optimizers(comm, name):
    static = {"clipnorm": "localized", "adamw": "localized"}.get(name, "distributed")
    # Keras itself cannot divide the IndexedSlices of a static table by its loss_scale_factor.
    static = None if name == "factor" else static
    train(comm, MORE[name], steps=16, relative=1e-5, static=static)


@pytest.mark.ranks(2)
def test_repeated_ids_of_a_static_table(comm):
    """Keras treats repeated indices of an IndexedSlices as different rows."""
    train(comm, lambda: K.Adagrad(0.1), steps=8, relative=1e-5, repeat_cities=True)


def test_an_overflow_on_one_rank_only(comm):
    """No rank steps, and all have the same scale afterwards."""

    def make():
        inner = K.Adagrad(0.1, global_clipnorm=0.1)
        return K.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=3)

    # Samples of the first rank, of the last, and in the middle; steps 5 and 6 are consecutive.
    overflows = {2: 0, 5: BATCH - 1, 6: BATCH - 1, 9: BATCH // 2}
    model, alone = train(comm, make, steps=14, relative=1e-5, overflows=overflows)
    scale = float(model.optimizer.inner_optimizer.dynamic_scale)
    same_on_all(comm, scale)
    assert int(model.optimizer.iterations) == 10
    if alone is not None:
        assert scale == float(alone.optimizer.inner_optimizer.dynamic_scale)


@pytest.mark.parametrize("make", [lambda: K.Adam(0.1), lambda: K.Nadam(0.1)], ids=["adam", "nadam"])
def test_ranks_without_rows_step_with_the_others(comm, make):
    """A rank that owns none of a step's rows, and one that has no samples."""
    check_counts(comm, make, [3, 4, 5, 6, 7])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [lambda: K.Adam(0.1), lambda: K.Nadam(0.1)], ids=["adam", "nadam"])
def test_steps_without_rows_on_any_rank(comm, make):
    check_counts(comm, make, [3, 0, 5, 0, 0, 6])


def check_counts(comm, make, counts):
    """In each step, one rank requests a number of rows (`counts`) that one rank owns."""
    keys = np.arange(200, dtype=np.int64)
    owners = np.asarray(_ops.library().dynemb_owners(tf.constant(keys), num_ranks=comm.size))
    tables = [de.DynamicVariable(2, "1"), de.DynamicVariable(2, "1", mode="localized:0")]
    optimizer = de.OptimizerWrapper(make(), gradient_reduction="sum")
    with one_rank():
        lone = [de.DynamicVariable(2, "1"), de.DynamicVariable(2, "1")]
        lone_optimizer = de.OptimizerWrapper(make())

    def step(tables, optimizer, ids):
        with tf.GradientTape() as tape:
            pooled = de.lookup_sparse(tables, [ids] * 2, combiners="sum")
            loss = tf.add_n([tf.reduce_sum(tf.square(p)) for p in pooled])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

    for i, count in enumerate(counts):
        owner, requester = i % comm.size, (i // 2) % comm.size
        ids = keys[owners == owner][:count, None]
        step(tables, optimizer, ids if comm.rank == requester else ids[:0])
        with one_rank():
            step(lone, lone_optimizer, ids)
    for table, alone in zip(tables, lone, strict=True):
        got = whole_table(comm, table)
        with one_rank():
            want = whole_table(communicator.LOCAL, alone)
        np.testing.assert_array_equal(got.keys, want.keys)
        close(got.vectors, want.vectors)
        close(got.state, want.state)
    assert [v.numpy().tolist() for v in optimizer.variables] == [
        v.numpy().tolist() for v in lone_optimizer.variables
    ]
