"""Ways to write a step: functions, traces, tapes, several lookups; compared with one eager rank."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from parallel.ranks.gathered import close, draw, one_rank, whole_matrix, whole_table

ROWS, BATCH, STEPS = 30, 8, 6
K = keras.optimizers


class Model:
    """Two dynamic tables, a static one, a dense variable."""

    def __init__(self, make=lambda: K.SGD(0.05, momentum=0.9), name="model"):
        rng = np.random.default_rng(1)
        matrix = rng.normal(size=(ROWS, 3)).astype(np.float32)
        self.tables = [
            de.DynamicVariable(3, "normal", name=f"{name}_0", seed=1),
            de.DynamicVariable(3, "normal", name=f"{name}_1", seed=2, key_type=tf.int32),
            de.Variable(matrix),
        ]
        self.dense = tf.Variable(rng.normal(size=(3, 1)).astype(np.float32))
        self.optimizer = de.OptimizerWrapper(make())

    @property
    def variables(self):
        return [*self.tables, self.dense]

    def loss_of(self, pooled):
        return tf.reduce_mean(tf.square(tf.matmul(tf.add_n(list(pooled)), self.dense) - 1.0))

    def loss(self, ids):
        cast = [tf.cast(i, t) for i, t in zip(ids, (tf.int64, tf.int32, tf.int64), strict=True)]
        return self.loss_of(de.lookup_sparse(self.tables, cast, combiners=["sum", "max", "mean"]))

    def apply(self, grads):
        self.optimizer.apply_gradients(zip(grads, self.variables, strict=True))

    def step(self, ids):
        with tf.GradientTape() as tape:
            loss = self.loss(ids)
        self.apply(tape.gradient(loss, self.variables))
        return loss

    def values(self, comm):
        tables = [whole_table(comm, table).at(np.arange(ROWS)) for table in self.tables[:2]]
        return [*tables, whole_matrix(comm, self.tables[2]), self.dense.numpy()]


def batches():
    """Yields the bags of each step, for each table; the ids of the first step are spread evenly."""
    rng = np.random.default_rng(2)
    for step in range(STEPS):
        bags = [draw(rng, ROWS, BATCH, 6) for _ in range(3)]
        if step == 0:
            for b in bags:
                b.ids[:] = (np.arange(len(b.ids)) * 7) % ROWS
        yield bags


def alone():
    """Returns the result of one eager rank on the batches of all ranks."""
    with one_rank():
        from tf_dynemb.communicator import LOCAL

        model = Model(name="alone")
        for table in model.tables[:2]:
            table.lookup(np.arange(ROWS).astype(table.key_type.as_numpy_dtype))
        for bags in batches():
            model.step([b.ragged() for b in bags])
        return model.values(LOCAL)


def check(comm, make_step, form=lambda bags, step: bags.ragged(), per_step=True):
    """`make_step(model)` returns a step, or with per_step=False a function of all batches."""
    model = Model(name="spread")
    for table in model.tables[:2]:
        table.lookup(np.arange(ROWS).astype(table.key_type.as_numpy_dtype))
    step = make_step(model)
    ids = [
        [form(b.part(comm.rank, comm.size), i) for b in bags] for i, bags in enumerate(batches())
    ]
    if per_step:
        for batch in ids:
            step(batch)
    else:
        step(ids)
    assert int(model.optimizer.iterations) == STEPS
    for got, want in zip(model.values(comm), alone(), strict=True):
        close(got, want, 1e-4)


def test_eager(comm):
    check(comm, lambda model: model.step)


@pytest.mark.ranks(2)
def test_a_function_that_is_traced_once(comm):
    spec = tf.RaggedTensorSpec([None, None], tf.int64, 1, tf.int64)
    check(comm, lambda model: tf.function(model.step, input_signature=[[spec] * 3]))


def test_a_function_that_is_retraced_on_one_rank_only(comm):
    """That rank traces it in every step; the others only if shapes change."""
    retraces = comm.rank == comm.size - 1
    traces = []

    def make_step(model):
        @tf.function
        def step(ids, number):
            traces.append(number)
            model.step(ids)

        def call(ids):
            step(ids, int(model.optimizer.iterations) if retraces else 0)

        return call

    check(comm, make_step)
    assert set(traces) == (set(range(STEPS)) if retraces else {0})


@pytest.mark.ranks(2)
def test_forms_of_ids_that_differ_between_ranks_and_steps(comm):
    def form(bags, step):
        return [bags.ragged, bags.sparse][(step + comm.rank) % 2]()

    check(comm, lambda model: tf.function(model.step), form)


@pytest.mark.ranks(2)
def test_a_function_in_a_function(comm):
    def make_step(model):
        look_up = tf.function(model.loss)

        @tf.function
        def step(ids):
            with tf.GradientTape() as tape:
                loss = look_up(ids)
            model.apply(tape.gradient(loss, model.variables))

        return step

    check(comm, make_step)


@pytest.mark.ranks(2)
def test_a_gradient_outside_the_function_that_looked_up(comm):
    def make_step(model):
        look_up = tf.function(model.loss)

        def step(ids):
            with tf.GradientTape() as tape:
                loss = look_up(ids)
            model.apply(tape.gradient(loss, model.variables))

        return step

    check(comm, make_step)


@pytest.mark.ranks(2)
def test_a_persistent_tape_and_gradients_in_parts(comm):
    def make_step(model):
        @tf.function
        def step(ids):
            with tf.GradientTape(persistent=True) as tape:
                loss = model.loss(ids)
                part = 0.25 * loss
            whole = tape.gradient(loss, model.variables)
            quarter = tape.gradient(part, model.tables)
            for table, grad, less in zip(model.tables, whole, quarter, strict=False):
                tf.debugging.assert_near(grad.values, 4.0 * less.values)
                tf.debugging.assert_equal(grad.indices, less.indices, table.name)
            model.apply(whole)

        return step

    check(comm, make_step)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("functional", [False, True], ids=["eager", "function"])
def test_several_lookups_in_a_step(comm, functional):
    """One call for each table. One table is read twice, and each result is halved."""

    def make_step(model):
        def step(ids):
            with tf.GradientTape() as tape:
                first = de.lookup_sparse(model.tables[0], ids[0], combiners="sum")
                keys = tf.cast(ids[1], tf.int32)
                second = [de.lookup_sparse([model.tables[1]], [keys], combiners="max")[0] * 0.5]
                second += [0.5 * de.lookup_sparse(model.tables[1], keys, combiners="max")]
                third = de.lookup_sparse(
                    [model.tables[2], model.tables[0]], [ids[2], ids[0]], combiners=["mean", "sum"]
                )
                loss = model.loss_of([first, *second, third[0], 0.0 * third[1]])
            model.apply(tape.gradient(loss, model.variables))

        return tf.function(step) if functional else step

    check(comm, make_step)


@pytest.mark.ranks(2)
def test_a_loop_of_steps_in_a_function(comm):
    spec = tf.RaggedTensorSpec([None, None], tf.int64, 1, tf.int64)

    def make_loop(model):
        stacked = [[], [], []]

        @tf.function(input_signature=[[spec] * 3, tf.TensorSpec([], tf.int32)])
        def steps(ids, count):
            for i in tf.range(count):
                share = BATCH // comm.size
                model.step([t[i * share : (i + 1) * share] for t in ids])

        def run(ids):
            for batch in ids:
                for table_parts, part in zip(stacked, batch, strict=True):
                    table_parts.append(part)
            model.optimizer.build(model.variables)
            steps([tf.concat(parts, 0) for parts in stacked], STEPS)

        return run

    check(comm, make_loop, per_step=False)


@pytest.mark.ranks(2)
def test_a_condition_that_is_the_same_on_all_ranks(comm):
    def make_step(model):
        @tf.function
        def step(ids):
            model.optimizer.build(model.variables)
            if tf.reduce_sum(model.dense) > 1e9:
                model.step([i[:0] for i in ids])
            else:
                model.step(ids)

        return step

    check(comm, make_step)


@pytest.mark.ranks(2)
def test_scopes_whose_names_differ_between_ranks(comm):
    """The scopes of Keras layers differ if one rank has created other models before."""

    def make_step(model):
        @tf.function
        def step(ids):
            with tf.name_scope(f"layer_{comm.rank}"):
                model.step(ids)

        return step

    check(comm, make_step)


@pytest.mark.parametrize("functional", [False, True], ids=["eager", "function"])
def test_variables_that_weights_depend_on_have_gradients_without_ids(comm, functional):
    """Otherwise a rank without ids would omit a dense variable that the others reduce."""
    table, static = de.DynamicVariable(2, "1"), de.Variable(np.ones((8, 2), np.float32))
    factor = tf.Variable(2.0)
    optimizer = de.OptimizerWrapper(K.SGD(1.0), gradient_reduction="sum")
    ids = tf.constant([[1], [2], [3]] if comm.rank == 0 else np.zeros((0, 1)), tf.int64)
    variables = [table, static, factor]

    def step():
        with tf.GradientTape() as tape:
            weights = factor * tf.ones_like(ids, tf.float32)
            pooled = de.lookup_sparse([table, static], [ids] * 2, [weights] * 2, "sum")
            loss = tf.reduce_sum(pooled[0] + pooled[1])
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return grads

    grads = (tf.function(step) if functional else step)()
    assert grads[2] is not None
    assert float(factor) == 2.0 - 3 * 2 * 2
    np.testing.assert_array_equal(whole_table(comm, table).vectors, np.full((3, 2), -1.0))


@pytest.mark.parametrize("make", [K.SGD, K.Nadam])
def test_missing_rows_are_not_stepped(comm, make):
    """Rows that were erased after they were read, evicted, or that never existed."""
    table = de.DynamicVariable(2, "1")
    optimizer = de.OptimizerWrapper(make(1.0), gradient_reduction="sum")
    every = np.arange(20)
    table.lookup(every)
    with tf.GradientTape() as tape:
        pooled = de.lookup_sparse(table, every[:, None], combiners="sum")
        loss = tf.reduce_sum(pooled)
    grad = tape.gradient(loss, table)
    table.erase(every[::2])
    table.lookup(every[::2] + 100)  # these take the free rows
    optimizer.apply_gradients([(grad, table)])
    with tf.GradientTape() as tape:
        pooled = de.lookup_sparse(table, every[::2, None], insert=False)
        loss = tf.reduce_sum(pooled)
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    rows = whole_table(comm, table)
    np.testing.assert_array_equal(rows.keys, [*every[1::2], *(every[::2] + 100)])
    stepped = 1 - comm.size if make is K.SGD else rows.vectors[0, 0]
    assert stepped < 1
    np.testing.assert_allclose(rows.vectors[:10], np.full((10, 2), stepped), rtol=1e-6)
    np.testing.assert_array_equal(rows.vectors[10:], np.ones((10, 2)))


def test_unused_outputs(comm):
    tables = [de.DynamicVariable(2, "1"), de.DynamicVariable(2, "2")]
    tables.append(de.Variable(np.ones((4, 2), np.float32)))
    ids = tf.constant([[1], [2]])
    with tf.GradientTape() as tape:
        pooled = de.lookup_sparse([*tables, tables[0]], [ids] * 4, combiners="sum")
        loss = tf.reduce_sum(pooled[1]) + tf.reduce_sum(pooled[3])
    grads = tape.gradient(loss, tables, unconnected_gradients=tf.UnconnectedGradients.NONE)
    optimizer = de.OptimizerWrapper(K.SGD(1.0), gradient_reduction="sum")
    optimizer.apply_gradients(zip(grads, tables, strict=True))
    for table, start in zip(tables[:2], (1, 2), strict=True):
        np.testing.assert_array_equal(whole_table(comm, table).vectors, start - comm.size)
    np.testing.assert_array_equal(whole_matrix(comm, tables[2]), 1)


def test_untrained_tables(comm):
    table, static = (
        de.DynamicVariable(2, "1", trainable=False),
        de.Variable(np.ones((4, 2), np.float32)),
    )
    with tf.GradientTape() as tape:
        pooled = de.lookup_sparse([table, static], [[[1], [2]]] * 2, combiners="sum")
        loss = tf.reduce_sum(pooled[0] + pooled[1])
    assert [type(g).__name__ for g in tape.gradient(loss, [table, static])] == [
        "NoneType",
        "IndexedSlices",
    ]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(static)
        pooled = de.lookup_sparse([table, static], [[[1], [2]]] * 2, combiners="sum")
        loss = tf.reduce_sum(pooled[0] + pooled[1])
    assert tape.watched_variables() == (static,)
    assert tape.gradient(loss, static) is not None
