"""OptimizerWrapper on tables against the same Keras optimizer on dense variables."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_cases import CASES

import tf_dynemb as de

K = keras.optimizers
DIM, ROWS, STEPS = 4, 12, 200


def make_pair(dtype=tf.float32, rows=ROWS, seed=0):
    vectors = np.random.default_rng(seed).normal(size=(rows, DIM)).astype(np.float32)
    table = de.DynamicVariable(DIM, "zeros", dtype=dtype)
    de.assign(table, np.arange(rows), vectors)
    return table, keras.Variable(vectors, name="embeddings")


def values_of(table, rows=ROWS):
    return tf.cast(table.lookup(np.arange(rows), insert=False), tf.float32).numpy()


def close(got, expected, tolerance=1e-5):
    """The tolerance is relative to at least the mean: errors do not scale with the element."""
    scale = np.maximum(np.abs(expected), np.abs(expected).mean())
    np.testing.assert_array_less(np.abs(got - expected), tolerance * scale)


def ids_of_steps(every_row, seed=1):
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        ids = rng.integers(0, ROWS, rng.integers(1, 20))
        ids = np.concatenate([np.arange(ROWS), ids]) if every_row else ids
        yield rng.permutation(ids), rng.normal(size=(len(ids), DIM)).astype(np.float32)


def dense_sum(ids, grads):
    total = np.zeros((ROWS, DIM), np.float32)
    np.add.at(total, ids, grads)
    return total


def run_pair(make, every_row, dtype=tf.float32, in_function=True):
    table, dense = make_pair(dtype)
    wrapped, plain = de.OptimizerWrapper(make()), make()

    def table_step(ids, upstream):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(tf.nn.embedding_lookup(table, ids), tf.float32) * upstream)
        wrapped.apply_gradients([(tape.gradient(loss, table), table)])

    def dense_step(grad):
        plain.apply_gradients([(grad, dense)])

    wrapped.build([table])
    plain.build([dense])
    if in_function:
        table_step = tf.function(table_step, reduce_retracing=True)
        dense_step = tf.function(dense_step)
    for ids, upstream in ids_of_steps(every_row):
        table_step(tf.constant(ids), tf.constant(upstream))
        dense_step(tf.constant(dense_sum(ids, upstream)))
    assert int(wrapped.iterations) == int(plain.iterations) == STEPS
    return values_of(table), dense.numpy()


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_keras(name):
    """On random ids with repeats, if Keras changes only the rows that have gradients."""
    close(*run_pair(CASES[name].make, every_row=CASES[name].every_row))


@pytest.mark.parametrize("name", ["adam", "sgd_decay", "nadam", "schedule_free_adamw", "adafactor"])
def test_agrees_with_keras_eagerly(name, monkeypatch):
    monkeypatch.setattr("test_optimizer.STEPS", 20)
    close(*run_pair(CASES[name].make, every_row=True, in_function=False))


@pytest.mark.parametrize(
    "name",
    [
        "momentum",
        "adam",
        "adamw",
        "rmsprop_centered",
        "lion",
        "nadam",
        "user_signum",
        "schedule_free_adamw",
    ],
)
def test_row_without_gradient_does_not_decay(name):
    """A row with gradients in only some steps gets the result of Keras after only these steps.

    Bias corrections count all steps, so the reference also takes the other steps, but its row and
    state are then restored.
    """
    make = CASES[name].make
    table, _ = make_pair()
    wrapped = de.OptimizerWrapper(make())
    grad = np.random.default_rng(4).normal(size=(6, 1, DIM)).astype(np.float32)
    before = values_of(table)
    reference = keras.Variable(before[3:4], name="embeddings")
    plain = make()
    for step in range(6):
        if step % 2:
            wrapped.apply_gradients([(tf.IndexedSlices(grad[step], [5]), table)])
            state = [v.numpy() for v in plain.variables if len(v.shape) == 2] if plain.built else []
            value = reference.numpy()
            if plain.built:
                plain.apply_gradients([(tf.zeros([1, DIM]), reference)])
                for v, s in zip(
                    [v for v in plain.variables if len(v.shape) == 2], state, strict=True
                ):
                    v.assign(s)
                reference.assign(value)
        else:
            wrapped.apply_gradients([(tf.IndexedSlices(grad[step], [3]), table)])
            plain.apply_gradients([(tf.constant(grad[step]), reference)])
    after = values_of(table)
    close(after[3:4], reference.numpy())
    untouched = [i for i in range(ROWS) if i not in (3, 5)]
    np.testing.assert_array_equal(after[untouched], before[untouched])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize("name", ["sgd", "adam", "nadam"])
def test_16_bit_rows_agree_within_their_rounding(name, dtype):
    got, expected = run_pair(CASES[name].make, every_row=True, dtype=dtype)
    unit = 2.0 ** -(10 if dtype == tf.float16 else 7)
    # Stochastic rounding: the errors of 200 steps are independent and unbiased.
    error = np.abs(got - expected) / np.maximum(np.abs(expected), 1.0)
    assert error.max() < unit * np.sqrt(STEPS) * 2
    assert abs(((got - expected) / np.maximum(np.abs(expected), 1.0)).mean()) < unit * 2


def test_optimizers_with_generic_steps():
    from tf_dynemb.optimizers.native import native_form

    for name, case in CASES.items():
        assert (native_form(case.make()) is None) == case.is_generic, name
    public = {c for c in vars(K).values() if isinstance(c, type) and issubclass(c, K.Optimizer)}
    tested = {type(case.make()) for case in CASES.values()}
    not_for_tables = {K.Optimizer, K.LossScaleOptimizer, K.MultiOptimizer}
    assert public - not_for_tables <= tested


@pytest.mark.parametrize(
    "clip",
    [{}, {"clipnorm": 0.5}, {"global_clipnorm": 0.7}, {"global_clipnorm": 1e4}, {"clipvalue": 0.2}],
)
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("make", [K.SGD, K.Nadam])
def test_clipping_and_loss_scale_of_tables_and_dense_variables(clip, scale, make):
    table, dense = make_pair()
    weight, plain_weight = keras.Variable(np.ones(3)), keras.Variable(np.ones(3))
    wrapped = de.OptimizerWrapper(make(0.1, loss_scale_factor=scale, **clip))
    plain = make(0.1, loss_scale_factor=scale, **clip)
    rng = np.random.default_rng(0)
    for _ in range(10):
        ids = np.concatenate([np.arange(ROWS), rng.integers(0, ROWS, 5)])
        grad = rng.normal(size=(len(ids), DIM)).astype(np.float32)
        other = tf.constant(rng.normal(size=3), tf.float32)
        assert float(wrapped.scale_loss(1.0)) == float(plain.scale_loss(1.0))
        wrapped.apply_gradients([(tf.IndexedSlices(grad, ids), table), (other, weight)])
        plain.apply_gradients([(tf.constant(dense_sum(ids, grad)), dense), (other, plain_weight)])
    close(values_of(table), dense.numpy())
    close(weight.numpy(), plain_weight.numpy())


def test_learning_rate_schedules_and_assignment():
    schedule = lambda: K.schedules.PiecewiseConstantDecay([2, 5], [0.5, 0.1, 0.01])  # noqa: E731
    table, dense = make_pair()
    wrapped, plain = de.OptimizerWrapper(K.SGD(schedule())), K.SGD(schedule())
    grad = np.ones((ROWS, DIM), np.float32)
    for _ in range(8):
        wrapped.apply_gradients([(tf.IndexedSlices(grad, np.arange(ROWS)), table)])
        plain.apply_gradients([(tf.constant(grad), dense)])
    close(values_of(table), dense.numpy())

    for make in (K.SGD, K.Nadam):
        table, dense = make_pair()
        wrapped, plain = de.OptimizerWrapper(make(0.5)), make(0.5)
        step = tf.function(
            lambda w, t: w.apply_gradients(
                [(tf.IndexedSlices(tf.constant(grad), np.arange(ROWS)), t)]
            )
        )
        for rate in (0.5, 0.1, 0.001):
            wrapped.learning_rate = rate
            plain.learning_rate = rate
            assert float(wrapped.learning_rate) == pytest.approx(rate)
            step(wrapped, table)
            plain.apply_gradients([(tf.constant(grad), dense)])
        close(values_of(table), dense.numpy())


@pytest.mark.parametrize("how", ["variable", "name"])
@pytest.mark.parametrize("make", [K.AdamW, lambda rate: K.Lamb(rate, weight_decay=0.1)])
def test_exclude_from_weight_decay(how, make):
    (decayed, _), (spared, dense) = make_pair(), make_pair()
    other = de.DynamicVariable(DIM, name="spare_me")
    plain = make(0.1)
    plain.exclude_from_weight_decay([dense])
    wrapped = de.OptimizerWrapper(make(0.1))
    if how == "name":
        de.assign(other, np.arange(ROWS), values_of(spared))
        spared = other
        wrapped.exclude_from_weight_decay(var_names=["spare"])
    else:
        wrapped.exclude_from_weight_decay([spared])
    grad = np.ones((ROWS, DIM), np.float32)
    slices = lambda: tf.IndexedSlices(tf.constant(grad), np.arange(ROWS))  # noqa: E731
    for _ in range(5):
        wrapped.apply_gradients([(slices(), decayed), (slices(), spared)])
        plain.apply_gradients([(tf.constant(grad), dense)])
    close(values_of(spared), dense.numpy())
    assert np.abs(values_of(decayed) - dense.numpy()).max() > 1e-4


def test_repeated_keys_and_two_gradients_of_one_table_are_summed():
    table, _ = make_pair()
    before = values_of(table)
    wrapped = de.OptimizerWrapper(K.SGD(1.0))
    one = tf.IndexedSlices(tf.ones([3, DIM]), [2, 2, 5])
    wrapped.apply_gradients([(one, table), (one, table)])
    change = (before - values_of(table))[:, 0]
    np.testing.assert_allclose(change[[2, 5]], [4, 2], rtol=1e-6)
    assert np.count_nonzero(change) == 2


@pytest.mark.parametrize("make", [K.SGD, K.Nadam])
def test_unknown_and_erased_keys_get_no_row(make):
    table, _ = make_pair()
    wrapped = de.OptimizerWrapper(make(1.0))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup([1, 99], insert=False))
    grad = tape.gradient(loss, table)
    wrapped.apply_gradients([(grad, table)])
    assert len(table) == ROWS
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup([1, 2]))
    grad = tape.gradient(loss, table)
    table.erase([1])
    table.lookup([77])  # takes the free row
    fresh = table.lookup([77]).numpy()
    wrapped.apply_gradients([(grad, table)])
    np.testing.assert_array_equal(table.lookup([77]), fresh)
    assert not table.contains([1]).numpy().any()


def test_a_new_row_starts_with_fresh_state():
    for make in (lambda: K.Adagrad(0.1, initial_accumulator_value=0.3), lambda: K.Nadam(0.1)):
        table, _ = make_pair()
        wrapped, plain = de.OptimizerWrapper(make()), make()
        grad = tf.IndexedSlices(tf.ones([1, DIM]), [50])
        table.lookup([50])
        wrapped.apply_gradients([(grad, table)])
        table.erase([50])
        de.assign(table, [50], np.zeros((1, DIM)))
        expected = keras.Variable(np.zeros((1, DIM)))
        plain.build([expected])
        plain.iterations.assign(1)
        wrapped.apply_gradients([(grad, table)])
        if isinstance(plain, K.Nadam):
            plain._u_product.assign(0.9 * (1 - 0.5 * 0.96))
        plain.apply_gradients([(tf.ones([1, DIM]), expected)])
        close(table.lookup([50]).numpy(), expected.numpy())


@pytest.mark.parametrize("make", [K.Adam, K.Nadam])
def test_a_new_optimizer_starts_with_fresh_state(make):
    table, dense = make_pair()
    rng = np.random.default_rng(0)
    for _ in range(2):  # as in two calls of model.compile
        wrapped, plain = de.OptimizerWrapper(make(0.1)), make(0.1)
        for _ in range(3):
            grad = tf.constant(rng.normal(size=(ROWS, DIM)), tf.float32)
            wrapped.apply_gradients([(tf.IndexedSlices(grad, np.arange(ROWS)), table)])
            plain.apply_gradients([(grad, dense)])
    close(values_of(table), dense.numpy())


def test_gradients_of_many_tables_and_dense_variables_in_one_call():
    tables = [
        de.DynamicVariable(2 + i, "ones", key_type=t, dtype=d)
        for i, (t, d) in enumerate(
            [(tf.int64, tf.float32), (tf.int32, tf.float16), (tf.uint64, tf.bfloat16)]
        )
    ]
    dense = tf.Variable([1.0])
    wrapped = de.OptimizerWrapper(K.SGD(0.5))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            outputs = de.lookup_sparse(tables, [np.array([[1, 2]], np.uint8)] * 3, combiners="sum")
            loss = tf.add_n([tf.reduce_sum(tf.cast(o, tf.float32)) for o in outputs]) * dense[0]
        variables = [*tables, dense]
        return wrapped.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    assert int(step()) == 1
    for table in tables:
        np.testing.assert_array_equal(
            tf.cast(table.lookup([1, 2]), tf.float32), np.full((2, table.dimension), 0.5)
        )
    assert float(dense[0]) == 1 - 0.5 * 2 * (2 + 3 + 4)


def test_minimize():
    table, _ = make_pair()
    wrapped = de.OptimizerWrapper(K.SGD(1.0))
    before = values_of(table)
    wrapped.minimize(lambda: tf.reduce_sum(table.lookup([3])), [table])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table.lookup([3]))
    wrapped.minimize(loss, [table], tape=tape)
    np.testing.assert_allclose(values_of(table)[3], before[3] - 2, rtol=1e-5)


def test_constraint_applies_to_stepped_rows():
    table = de.DynamicVariable(DIM, "1", constraint=keras.constraints.UnitNorm(axis=1))
    wrapped = de.OptimizerWrapper(K.Adam(0.1))
    table.lookup([1, 2])
    for _ in range(3):
        wrapped.apply_gradients([(tf.IndexedSlices(tf.ones([1, DIM]), [1]), table)])
    got = table.lookup([1, 2]).numpy()
    assert np.linalg.norm(got[0]) == pytest.approx(1.0, rel=1e-4)
    np.testing.assert_array_equal(got[1], np.ones(DIM))


@pytest.mark.parametrize("in_function", [False, True])
def test_dynamic_loss_scale(in_function):
    table, _ = make_pair()
    wrapped = de.OptimizerWrapper(
        K.LossScaleOptimizer(K.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=2)
    )
    weight = keras.Variable(np.ones(2))
    wrapped.build([table, weight])
    step = lambda grad, other: wrapped.apply_gradients(  # noqa: E731
        [(tf.IndexedSlices(grad, np.arange(ROWS)), table), (other, weight)]
    )
    if in_function:
        step = tf.function(step)
    assert float(wrapped.scale_loss(1.0)) == 4.0
    before = values_of(table)
    step(tf.fill([ROWS, DIM], 4.0), tf.fill([2], 4.0))
    np.testing.assert_allclose(values_of(table), before - 0.1, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight.numpy(), 0.9, rtol=1e-6)
    step(tf.fill([ROWS, DIM], np.inf), tf.fill([2], 4.0))
    np.testing.assert_allclose(values_of(table), before - 0.1, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight.numpy(), 0.9, rtol=1e-6)
    assert float(wrapped.scale_loss(1.0)) == 2.0
    assert int(wrapped.iterations) == 1
    for _ in range(2):
        step(tf.fill([ROWS, DIM], 2.0), tf.fill([2], 2.0))
    assert float(wrapped.scale_loss(1.0)) == 4.0
    assert int(wrapped.iterations) == 3


def test_config_round_trip():
    wrapped = de.OptimizerWrapper(K.Adam(0.25, beta_1=0.5), name="wrapper")
    config = keras.optimizers.serialize(wrapped)
    copy = keras.optimizers.deserialize(config)
    assert type(copy) is de.OptimizerWrapper
    assert copy.name == "wrapper"
    assert type(copy.inner_optimizer) is K.Adam
    assert (float(copy.learning_rate), copy.inner_optimizer.beta_1) == (0.25, 0.5)


def test_plain_keras_optimizers_are_refused():
    table, _ = make_pair()
    grad = tf.IndexedSlices(tf.ones([1, DIM]), [1])
    for optimizer in (
        K.SGD(0.1),
        K.Adam(0.1),
        K.LossScaleOptimizer(de.OptimizerWrapper(K.SGD(0.1))),
    ):
        with pytest.raises(TypeError, match="OptimizerWrapper"):
            optimizer.apply_gradients([(grad, table)])


def test_rowwise_adagrad_on_dense_variables_and_slices():
    rng = np.random.default_rng(0)
    start = rng.normal(size=(5, 3)).astype(np.float32)
    by_slices, by_matrix = keras.Variable(start), keras.Variable(start)
    bias = keras.Variable(np.ones(2))
    a, b = de.RowwiseAdagrad(0.1), de.RowwiseAdagrad(0.1)
    expected, accumulator = start.copy(), np.zeros((5, 1))
    for _ in range(5):
        ids, grad = [1, 4, 1], rng.normal(size=(3, 3)).astype(np.float32)
        total = np.zeros((5, 3))
        np.add.at(total, ids, grad)
        a.apply_gradients([(tf.IndexedSlices(tf.constant(grad), ids), by_slices)])
        b.apply_gradients([(tf.constant(total, tf.float32), by_matrix), (tf.ones([2]), bias)])
        accumulator += (total**2).mean(1, keepdims=True)
        expected -= 0.1 * total / (np.sqrt(accumulator) + 1e-7)
    close(by_slices.numpy(), expected)
    close(by_matrix.numpy(), expected)
