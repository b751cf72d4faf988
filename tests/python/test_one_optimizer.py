"""Only one optimizer steps a table's state: the last that attached to the table."""

import keras
import numpy as np
import op_helpers as h
import pytest
import table_reader
import tensorflow as tf

import tf_dynemb as de

K = keras.optimizers
DIM, ROWS = 4, 6
Refused = tf.errors.FailedPreconditionError


class UserSGD(K.SGD):
    """A user's subclass, which takes generic steps."""


MAKERS = {
    "adagrad": lambda: K.Adagrad(0.1),
    "adagrad_from_0.5": lambda: K.Adagrad(0.1, initial_accumulator_value=0.5),
    "lion": lambda: K.Lion(0.1),
    "rmsprop": lambda: K.RMSprop(0.1),
    "rmsprop_momentum": lambda: K.RMSprop(0.1, momentum=0.5),
    "rmsprop_centered": lambda: K.RMSprop(0.1, centered=True),
    "nadam": lambda: K.Nadam(0.1),
    "user_momentum": lambda: UserSGD(0.1, momentum=0.9),
}
PAIRS = [
    ("adagrad", "adagrad"),
    ("adagrad", "adagrad_from_0.5"),
    ("adagrad", "lion"),
    ("lion", "rmsprop"),
    ("rmsprop_momentum", "rmsprop_centered"),
    ("nadam", "nadam"),
    ("nadam", "user_momentum"),
    ("adagrad", "user_momentum"),
    ("user_momentum", "adagrad"),
]


def make_table(**options):
    table = de.DynamicVariable(DIM, "normal", seed=3, **options)
    table.lookup(np.arange(ROWS))
    return table


def wrap(name, wrapper_name):
    make = MAKERS[name] if isinstance(name, str) else name
    return de.OptimizerWrapper(make(), name=wrapper_name)


class Stepper:
    """Steps a table with one optimizer, eagerly or in a function that is traced once."""

    def __init__(self, table, optimizer, in_function):
        self.table, self.optimizer, self.traces = table, optimizer, 0

        def step(gradients):
            self.traces += 1
            slices = tf.IndexedSlices(gradients, tf.range(ROWS, dtype=tf.int64))
            optimizer.apply_gradients([(slices, table)])

        self._step = tf.function(step) if in_function else step

    def __call__(self, value=1.0):
        self._step(tf.fill([ROWS, DIM], value))


def content(table):
    rows = table_reader.rows_of(table)
    return rows.vectors, rows.state


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_older_of_two_wrappers_is_refused(first, second, in_function):
    table, alone = make_table(), make_table()
    old = Stepper(table, wrap(first, "the_old"), in_function)
    new = Stepper(table, wrap(second, "the_new"), in_function)
    old()
    new()
    before = content(table)
    traces = old.traces
    with pytest.raises(Refused) as caught:
        old()
    assert_same(content(table), before)
    for text in (
        table.name.removesuffix(":0"),
        "'the_old'",
        "'the_new'",
        "step it with one wrapper for all of them",
    ):
        assert text in caught.value.message
    for stepper in (old, new):
        assert type(stepper.optimizer.core).__name__ in caught.value.message
    # The operator raised the error: a function was not traced again.
    assert old.traces == (traces if in_function else traces + 1)
    # The newer wrapper continues from its state, as if the older wrapper had not been called.
    new()
    for stepper in (
        Stepper(alone, wrap(first, "a"), False),
        Stepper(alone, wrap(second, "b"), False),
    ):
        stepper()
    stepper()
    assert_same(content(table), content(alone))


def test_wrappers_with_the_same_name_are_distinct():
    table = make_table()
    old, new = (Stepper(table, wrap("adagrad", "same"), False) for _ in range(2))
    old()
    new()
    with pytest.raises(Refused, match=r"'same' of Adagrad.*'same' of Adagrad"):
        old()


@pytest.mark.parametrize("name", ["adagrad", "nadam"])
def test_attaching_again_resets_the_state(name):
    table = make_table()
    old, new = (Stepper(table, wrap(name, n), True) for n in ("old", "new"))
    old(2.0)
    new()
    old.optimizer.attach([table])
    fresh = content(make_table_with(table, MAKERS[name]))[1]
    np.testing.assert_array_equal(content(table)[1], fresh)
    old()
    with pytest.raises(Refused):
        new()


def make_table_with(like, make):
    table = make_table()
    assert len(table) == len(like)
    de.OptimizerWrapper(make()).attach([table])
    return table


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("stateless", [K.SGD, UserSGD])
@pytest.mark.parametrize("name", ["adagrad", "nadam"])
def test_optimizers_without_state_step_any_table(name, stateless, in_function):
    table, alone = make_table(), make_table()
    trained = Stepper(table, wrap(name, "trained"), in_function)
    plain = Stepper(table, wrap(lambda: stateless(0.5), "plain"), in_function)
    other = Stepper(alone, wrap(name, "alone"), in_function)
    plain()  # a step before the rows have state
    alone.scatter_sub(tf.IndexedSlices(tf.fill([ROWS, DIM], 0.5), tf.range(ROWS, dtype=tf.int64)))
    for _ in range(2):
        trained()
        other()
        state, spec = content(table)[1], table.state_spec
        plain()
        alone.scatter_sub(
            tf.IndexedSlices(tf.fill([ROWS, DIM], 0.5), tf.range(ROWS, dtype=tf.int64))
        )
        np.testing.assert_array_equal(content(table)[1], state)
        assert table.state_spec == spec
    assert_same(content(table), content(alone))
    assert spec[0] != "sgd"


def test_dump_after_sgd_has_the_attached_state(tmp_path):
    table = make_table(name="after_sgd")
    trained = Stepper(table, wrap("adagrad", "trained"), False)
    trained()
    Stepper(table, wrap(K.SGD, "plain"), False)()
    de.dump(tmp_path, [table], trained.optimizer, quiet=True)
    before = content(table)
    again = make_table(name="after_sgd")
    optimizer = wrap("adagrad", "again")
    de.load(tmp_path, [again], optimizer, quiet=True)
    assert again.state_spec[0] == "adagrad"
    assert_same(content(again), before)


def test_recompiled_model_continues_with_fresh_state():
    ids, labels = np.arange(32)[:, None] % ROWS, np.arange(32) % 2
    layer = de.layers.Embedding(DIM)
    model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    steps = []
    for number in range(3):
        optimizer = wrap("adagrad", f"compiled_{number}")
        model.compile(optimizer, "mse")
        model.fit(ids, labels, verbose=0, batch_size=8)
        steps.append(int(optimizer.iterations))
    assert steps == [4, 4, 4]
    assert layer.table.state_spec[0] == "adagrad"
    # A generic optimizer may follow.
    model.compile(wrap("nadam", "compiled_again"), "mse")
    model.fit(ids, labels, verbose=0, batch_size=8)
    assert layer.table.state_spec[0].startswith("keras:")


@pytest.mark.parametrize("name", ["adagrad", "nadam"])
def test_first_optimizer_to_step_continues_restored_state(tmp_path, name):
    table = make_table()
    old = Stepper(table, wrap(name, "old"), True)
    old()
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "checkpoint"))
    saved = content(table)
    old()
    tf.train.Checkpoint(table=table).read(path).assert_consumed()
    assert_same(content(table), saved)
    # An optimizer that attaches continues with the state, and the older one is then refused.
    new = Stepper(table, wrap(name, "new"), True)
    new.optimizer.attach([table])
    assert_same(content(table), saved)
    with pytest.raises(Refused, match=r"'new'.*'old'"):
        old()
    assert_same(content(table), saved)
    # An optimizer that attached earlier also continues, if it steps first.
    tf.train.Checkpoint(table=table).read(path)
    old()
    with pytest.raises(Refused, match=r"'old'.*'new'"):
        new()


@pytest.mark.parametrize("name", ["adagrad", "nadam"])
def test_load_attaches_its_optimizer(tmp_path, name):
    table = make_table(name="loaded")
    old, new = (Stepper(table, wrap(name, n), True) for n in ("old", "new"))
    old()
    de.dump(tmp_path, [table], old.optimizer, quiet=True)
    saved = content(table)
    new()
    de.load(tmp_path, [table], old.optimizer, quiet=True)
    assert_same(content(table), saved)
    with pytest.raises(Refused, match=r"'old'.*'new'"):
        new()
    old()
    # A load without an optimizer keeps the optimizer of the table.
    de.load(tmp_path, [table], quiet=True)
    with pytest.raises(Refused):
        new()
    old()


STATES = {
    # optimizer and flags of the operator, name of the state, inits
    "adagrad": ("adagrad", [], "adagrad", [0.1]),
    "lion": ("lion", [], "lion", [0.1]),
    "rmsprop": ("rmsprop", [], "rmsprop", [0.1]),
    "adagrad_from_0.5": ("adagrad", [], "adagrad", [0.5]),
    "rmsprop_momentum": ("rmsprop", ["momentum"], "rmsprop momentum", [0.0, 0.0]),
    "rmsprop_centered": ("rmsprop", ["centered"], "rmsprop centered", [0.0, 0.0]),
    "adam": ("adam", [], "adam", [0.0, 0.0]),
}


@pytest.mark.parametrize("tries", STATES)
@pytest.mark.parametrize("has", STATES)
def test_operators_refuse_another_state(has, tries):
    handle = h.make()
    keys = np.arange(3)
    h.lookup(handle, keys)
    ones = np.ones([3, h.DIM], np.float32)
    _, _, name, inits = STATES[has]
    h.ops.dynemb_attach_state(handle, optimizer=name, widths=[h.DIM] * len(inits), inits=inits)
    optimizer, flags, state, inits = STATES[tries]

    def step():
        h.ops.dynemb_apply_gradients(
            [handle], [keys], [np.zeros(0, np.uint32)], [ones], h.HYPER, 1, optimizer=optimizer,
            flags=flags, state=state, inits=inits,
        )  # fmt: skip

    if has == tries:
        step()
        return
    before = h.export(handle)
    with pytest.raises(Refused, match=f"have the state of '{name}'.* which '{state}'"):
        step()
    assert_same(h.export(handle), before)


@pytest.mark.parametrize("operator", ["read", "write"])
def test_rows_of_another_state_or_owner_are_refused(operator):
    handle = h.make()
    keys = np.arange(3)
    h.lookup(handle, keys)
    attributes = {"optimizer": "keras:own", "widths": [2], "inits": [0.5], "owner": "the owner"}
    assert bool(h.ops.dynemb_attach_state(handle, **attributes))
    assert not bool(h.ops.dynemb_attach_state(handle, **attributes))
    vectors, states = np.ones([3, h.DIM], np.float32), np.ones([3, 2], np.float32)

    def call(**spec):
        if operator == "read":
            h.ops.dynemb_read_rows(handle, keys, **spec)
        else:
            h.ops.dynemb_write_rows(handle, keys, vectors, states, 1, insert=False, **spec)

    before = h.export(handle)
    for other in ({"optimizer": "keras:other"}, {"widths": [1, 1], "inits": [0.5, 0.5]},
                  {"inits": [0.25]}, {"owner": "another"}):  # fmt: skip
        with pytest.raises(Refused):
            call(**{**attributes, **other})
    assert_same(h.export(handle), before)
    call(**attributes)
    call()
