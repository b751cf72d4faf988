"""Moving an optimizer's state between Keras's dense variables and the rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from tf_dynemb.optimizers import native
from tf_dynemb.tables import content
from tf_dynemb.variables.dynamic import DynamicVariable

_adam = ("_momentums", "_velocities", "_velocity_hats")
# The attributes with the states of Keras's optimizers, in their order in a row (`optimizer.h`).
# Attributes of states that an optimizer does not have, by its arguments, are empty or missing.
_STATES: dict[type, tuple[str, ...]] = {
    keras.optimizers.SGD: ("momentums",),
    keras.optimizers.Adagrad: ("_accumulators",),
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adamax: ("_m", "_u"),
    keras.optimizers.RMSprop: ("_velocities", "_momentums", "_average_gradients"),
    keras.optimizers.Adadelta: ("_accumulated_grads", "_accumulated_delta_vars"),
    keras.optimizers.Ftrl: ("_accumulators", "_linears"),
    keras.optimizers.Lion: ("_momentums",),
}


def core_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that steps: without loss scaling around it, and without a wrapper."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def fresh(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns an optimizer with the same arguments and no state, also around loss scaling."""
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        config = optimizer.get_config()
        arguments = {k: config[k] for k in ("initial_scale", "dynamic_growth_steps", "name")}
        return keras.optimizers.LossScaleOptimizer(fresh(optimizer.inner_optimizer), **arguments)
    return type(optimizer).from_config(optimizer.get_config())


def moves_rows_without_gradient(core: keras.optimizers.Optimizer) -> bool:
    """Whether a dense step with a gradient of zero changes a row."""
    form = native.native_form(core)
    if form is None or core.weight_decay:
        return True
    return form.name != "adagrad" and not (form.name == "sgd" and not form.inits)


def copy_dense(
    before: keras.optimizers.Optimizer,
    after: keras.optimizers.Optimizer,
    pairs: Sequence[tuple[keras.Variable, keras.Variable]],
) -> None:
    """Copies the learning rate, the number of steps, and the state of dense variables.

    Args:
        before: an optimizer, perhaps around others (`core_of`).
        after: another one with the same arguments.
        pairs: (variable of `before`, variable of `after`); others are reset.
    """
    while True:
        for name, variable in vars(before).items():
            target = vars(after).get(name)
            if isinstance(variable, keras.Variable) and isinstance(target, keras.Variable):
                target.assign(variable)
        if not isinstance(before, keras.optimizers.LossScaleOptimizer):
            break
        before, after = before.inner_optimizer, after.inner_optimizer
    numbers = {id(variable): i for i, variable in enumerate(before._trainable_variables)}
    target_numbers = {id(variable): i for i, variable in enumerate(after._trainable_variables)}
    target_lists = _lists(after)
    for name, states in _lists(before).items():
        for variable, target in pairs:
            i, j = numbers.get(id(variable)), target_numbers.get(id(target))
            if name not in target_lists or i is None or j is None or states[i] is None:
                continue
            target_lists[name][j].assign(states[i])


def dense_states(
    core: keras.optimizers.Optimizer, variable: keras.Variable
) -> list[npt.NDArray[np.float32]] | None:
    """Returns the states of a dense variable, arrays [rows, dim], in their order in a row.

    None: they are unknown, or the optimizer has not been built with the variable.
    """
    names = _STATES.get(type(core))
    known = [v is variable for v in core._trainable_variables]
    if names is None or not any(known):
        return None
    lists = _lists(core)
    number = known.index(True)
    return [np.asarray(lists[name][number], np.float32) for name in names if name in lists]


def set_dense_states(
    core: keras.optimizers.Optimizer,
    variable: keras.Variable,
    states: Sequence[npt.NDArray[np.float32]],
) -> None:
    """The inverse of `dense_states`; does nothing if the optimizer does not step the variable."""
    known = [v is variable for v in core._trainable_variables]
    if not any(known):
        return
    number = known.index(True)
    lists = _lists(core)
    names = [name for name in _STATES[type(core)] if name in lists]
    for name, state in zip(names, states, strict=True):
        lists[name][number].assign(state)


def has_row_states(core: keras.optimizers.Optimizer) -> bool:
    """Whether `row_states` and `set_row_states` know the order of the optimizer's states."""
    return type(core) in _STATES


def row_states(table: DynamicVariable, held: content.Content) -> list[npt.NDArray[np.float32]]:
    """Returns the states of the rows of a table, [rows, dim], without the mark of `catch_up`."""
    if table.state_spec is None:
        return []
    name, widths, _ = table.state_spec
    count = len(widths) - ("catch_up" in name.split())
    return np.split(held.rows.state, np.cumsum(widths), axis=1)[:count]


def set_row_states(
    table: DynamicVariable, keys: npt.NDArray[Any], states: Sequence[npt.NDArray[np.float32]]
) -> None:
    """Sets the states of rows.

    Args:
        table: a table, to which an optimizer has attached that has not stepped it yet.
        keys: the keys [n] of all rows of the table, and perhaps of others.
        states: arrays [n, dim], in their order in a row.
    """
    held = content.read_content(table)
    order = np.argsort(keys, kind="stable")
    position = order[np.searchsorted(keys[order], held.rows.keys)]
    state = np.concatenate([each[position] for each in states], axis=1)
    state = np.concatenate([state, held.rows.state[:, state.shape[1] :]], axis=1)
    held = held._replace(rows=held.rows._replace(state=state.astype(np.float32)))
    content.write_content(table, held, adopt_state=False)


def _lists(core: keras.optimizers.Optimizer) -> dict[str, list[keras.Variable]]:
    """The lists of an optimizer that have one state for each of its variables, by attribute."""
    count = len(core._trainable_variables)
    return {
        name: value
        for name, value in vars(core).items()
        if isinstance(value, list)
        and name not in ("_trainable_variables", "_variables")
        and count == len(value) > 0
        and all(v is None or isinstance(v, keras.Variable) for v in value)
    }
