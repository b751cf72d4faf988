"""Optimizers that the operators implement: fused updates of all tables, state in the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.optimizers.gradients import TableGradient
from tf_dynemb.optimizers.pooled import PooledGradient
from tf_dynemb.optimizers.rowwise_adagrad import RowwiseAdagrad
from tf_dynemb.parallel.placement import by_placement
from tf_dynemb.tables.table import StateSpec
from tf_dynemb.variables.dynamic import DynamicVariable

_CATCH_UP = "catch_up"
# The order of `Hyper` (cc/table/optimizer.h), the `hyper` input of DynembApplyGradients.
_HYPER = (
    "learning_rate",
    "beta_1",
    "beta_2",
    "epsilon",
    "momentum",
    "l1",
    "l2",
    "l2_shrinkage",
    "ftrl_beta",
    "learning_rate_power",
    "weight_decay",
    "iteration",
)

# A step with a gradient of zero is not a decay for these.
_WITHOUT_CATCH_UP = ("ftrl", "lion")
_BIAS_CORRECTED = ("adam", "adamax")


@dataclasses.dataclass(frozen=True)
class NativeForm:
    """The operators' description of one Keras optimizer.

    Attributes:
        name: the name of the operator's optimizer.
        flags: the names of its OptimizerFlags (`cc/table/optimizer.h`).
        inits: the initial value of each state in a new row.
        hyper: the hyperparameters, by their names in `_HYPER`.
        state_per_row: whether a state is one float per row instead of one per element.
    """

    name: str
    flags: tuple[str, ...]
    inits: tuple[float, ...]
    hyper: dict[str, float]
    state_per_row: bool = False


def native_form(optimizer: keras.optimizers.Optimizer, catch_up: bool = False) -> NativeForm | None:
    """Returns the operators' form of a Keras optimizer; None if they do not implement its class.

    Subclasses get None, because they can compute something different.

    Args:
        optimizer: a Keras optimizer.
        catch_up: whether rows make up for missed steps; see `check_catch_up`.
    """
    describe = _NATIVE.get(type(optimizer))
    if describe is None:
        return None
    form = describe(optimizer)
    if not catch_up or form.name in _WITHOUT_CATCH_UP:
        return form
    return dataclasses.replace(form, flags=(*form.flags, _CATCH_UP), inits=(*form.inits, 0.0))


def check_catch_up(optimizer: keras.optimizers.Optimizer, table: DynamicVariable) -> None:
    """Checks that the rows of a table can make up for missed steps.

    Raises:
        ValueError: they cannot; the message says why.
    """
    form = native_form(optimizer, catch_up=True)
    if form is None or _CATCH_UP not in form.flags:
        raise ValueError(
            f"catch_up=True: rows of {table.name} cannot make up for missed steps of "
            f"{type(optimizer).__name__}. Use SGD, Adagrad, Adam, AdamW, Adamax, RMSprop, Adadelta "
            "or RowwiseAdagrad."
        )
    if optimizer.use_ema:
        raise ValueError(
            f"catch_up=True cannot be combined with use_ema for the table {table.name}: the "
            "average of a row would have to follow its missed steps."
        )
    if table.constraint is not None:
        raise ValueError(
            f"catch_up=True cannot be combined with the constraint of the table {table.name}: a "
            "row would have to satisfy it after each missed step."
        )


def state_spec(table: DynamicVariable, form: NativeForm) -> StateSpec:
    """Returns the state that the optimizer keeps in the table's rows.

    Its name contains the flags that the state depends on: RMSprop's momentum must not be mistaken
    for its mean gradient.
    """
    width = 1 if form.state_per_row else table.dimension
    widths = (width,) * len(form.inits)
    if _CATCH_UP in form.flags:
        widths = (*widths[:-1], 1)
    return _state_name(form), widths, form.inits


def _state_name(form: NativeForm) -> str:
    return " ".join((form.name, *(flag for flag in form.flags if flag != "nesterov")))


def attach(table: DynamicVariable, form: NativeForm, owner: str) -> bool:
    """Adds space for the optimizer's state to the table's rows; see `attach_state`."""
    return table.attach_state(*state_spec(table, form), owner)


def counts_steps(form: NativeForm) -> bool:
    """Whether a step depends on the number of steps before it, apart from the state of rows."""
    return form.name in _BIAS_CORRECTED or _CATCH_UP in form.flags


def update(
    form: NativeForm,
    grads: Sequence[TableGradient],
    learning_rate: tf.Tensor | float,
    weight_decay: float | None,
    step: tf.Tensor | int,
    owner: str,
) -> None:
    """Applies one step to several tables, with one or two operator calls for each place.

    Args:
        form: the form of the optimizer.
        grads: at most one for each table.
        learning_rate: scalar.
        weight_decay: as in Keras: rows first shrink by learning_rate * weight_decay.
        step: scalar, from 1.
        owner: the owner of the state; see `DynamicVariable.attach_state`.
    """
    if not grads:
        return
    numbers = {
        **form.hyper,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay or 0.0,
        "iteration": step,
    }
    with _ops.on_host():
        step = tf.cast(step, tf.int64)  # exact, which hyper's float32 is not
        hyper = tf.stack([tf.cast(numbers.get(name, 0.0), tf.float32) for name in _HYPER])
    common = {
        "hyper": hyper,
        "step": step,
        "optimizer": form.name,
        "flags": list(form.flags),
        "state": _state_name(form),
        "inits": list(form.inits),
        "owner": owner,
    }
    # A constraint needs the distinct keys, which are outputs of the operator that sums.
    sums_are_needed = any(grad.table.constraint is not None for grad in grads)
    for group in by_placement([grad.table for grad in grads]):
        summed: list[TableGradient] = []
        pooled: list[tuple[TableGradient, PooledGradient]] = []
        for grad in (grads[i] for i in group):
            if grad.pooled is None or sums_are_needed or not grad.pooled.is_only_use:
                summed.append(grad)
            else:
                pooled.append((grad, grad.pooled))
        if summed:
            _ops.library().dynemb_apply_gradients(
                handles=[grad.table.handle for grad in summed],
                keys=[grad.keys for grad in summed],
                rows=[grad.rows for grad in summed],
                grads=[grad.sums for grad in summed],
                distinct=True,
                **common,
            )
        if pooled:
            _ops.library().dynemb_apply_pooled_gradients(
                handles=[grad.table.handle for grad, _ in pooled],
                keys=[part.keys for _, part in pooled],
                rows=[part.rows for _, part in pooled],
                bags=[part.bags for _, part in pooled],
                weights=[part.weights for _, part in pooled],
                argmax=[part.argmax for _, part in pooled],
                grads=[part.upstream for _, part in pooled],
                combiners=[part.combiner for _, part in pooled],
                **common,
            )


def _flags(**flags: bool) -> tuple[str, ...]:
    return tuple(name for name, is_set in flags.items() if is_set)


def _sgd(o: keras.optimizers.Optimizer) -> NativeForm:
    with_momentum = o.momentum != 0
    return NativeForm(
        "sgd",
        _flags(momentum=with_momentum, nesterov=with_momentum and o.nesterov),
        (0.0,) if with_momentum else (),
        {"momentum": o.momentum},
    )


def _adagrad(o: keras.optimizers.Optimizer) -> NativeForm:
    return NativeForm("adagrad", (), (o.initial_accumulator_value,), {"epsilon": o.epsilon})


def _adam(o: keras.optimizers.Optimizer) -> NativeForm:
    return NativeForm(
        "adam",
        _flags(amsgrad=bool(o.amsgrad)),
        (0.0,) * (3 if o.amsgrad else 2),
        {"beta_1": o.beta_1, "beta_2": o.beta_2, "epsilon": o.epsilon},
    )


def _adamax(o: keras.optimizers.Optimizer) -> NativeForm:
    return NativeForm(
        "adamax",
        (),
        (0.0, 0.0),
        {"beta_1": o.beta_1, "beta_2": o.beta_2, "epsilon": o.epsilon},
    )


def _rmsprop(o: keras.optimizers.Optimizer) -> NativeForm:
    with_momentum = o.momentum > 0
    return NativeForm(
        "rmsprop",
        _flags(momentum=with_momentum, centered=bool(o.centered)),
        (0.0,) * (1 + with_momentum + bool(o.centered)),
        {"beta_1": o.rho, "momentum": o.momentum, "epsilon": o.epsilon},
    )


def _adadelta(o: keras.optimizers.Optimizer) -> NativeForm:
    return NativeForm("adadelta", (), (0.0, 0.0), {"beta_1": o.rho, "epsilon": o.epsilon})


def _ftrl(o: keras.optimizers.Optimizer) -> NativeForm:
    return NativeForm(
        "ftrl",
        (),
        (o.initial_accumulator_value, 0.0),
        {
            "l1": o.l1_regularization_strength,
            "l2": o.l2_regularization_strength,
            "l2_shrinkage": o.l2_shrinkage_regularization_strength,
            "ftrl_beta": o.beta,
            "learning_rate_power": o.learning_rate_power,
        },
    )


def _lion(o: keras.optimizers.Optimizer) -> NativeForm:
    return NativeForm("lion", (), (0.0,), {"beta_1": o.beta_1, "beta_2": o.beta_2})


def _rowwise_adagrad(o: keras.optimizers.Optimizer) -> NativeForm:
    return NativeForm(
        "rowwise_adagrad",
        (),
        (o.initial_accumulator_value,),
        {"epsilon": o.epsilon},
        state_per_row=True,
    )


_NATIVE: dict[type, Callable[[keras.optimizers.Optimizer], NativeForm]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adamax: _adamax,
    keras.optimizers.RMSprop: _rmsprop,
    keras.optimizers.Adadelta: _adadelta,
    keras.optimizers.Ftrl: _ftrl,
    keras.optimizers.Lion: _lion,
    RowwiseAdagrad: _rowwise_adagrad,
}
