"""OptimizerWrapper: one Keras optimizer for tables and dense variables together."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.optimizers import pairs
from tf_dynemb.optimizers.one_optimizer import OneOptimizer
from tf_dynemb.optimizers.parts import Parts
from tf_dynemb.optimizers.trained_tables import note_optimizer
from tf_dynemb.parallel.distribution import check_one_replica
from tf_dynemb.tables.table import StateSpec
from tf_dynemb.variables.dynamic import DynamicVariable

# In Keras's files: a JSON array with the name and widths of the state in each table's rows.
_STATES = "states"


@keras.saving.register_keras_serializable(package="tf_dynemb")
class OptimizerWrapper(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc]
    """Makes a Keras optimizer train tables as well as dense variables.

    It replaces the optimizer everywhere: `model.compile(optimizer=...)`, `apply_gradients`,
    `minimize`. The learning rate, schedules and callbacks reach the wrapped optimizer; a
    `MultiOptimizer` has no learning rate. Details of the following are in docs/custom_loops.md,
    "The optimizer".

    - Only the rows of a table that have a gradient are stepped, unless `catch_up` is on.
    - SGD, Adagrad, Adam, AdamW, Adamax, RMSprop, Adadelta, Ftrl, Lion and `RowwiseAdagrad` run
      inside the tables. Any other Keras optimizer runs its own code on these rows, more slowly.
    - Clipping, loss scaling, gradient accumulation and `use_ema` are for tables, too.
    - If an optimizer keeps state in rows, only the last wrapper that attached may step a table.
    - On several ranks `apply_gradients` is collective, and reduces the gradients of the ranks.
    - A `keras.optimizers.MultiOptimizer` gives each table its own optimizer (Wide & Deep).
    - For float16, wrap a `keras.optimizers.LossScaleOptimizer` (not the other way round).

    Example:
    >>> table = DynamicVariable(dimension=2, initializer="1")
    >>> optimizer = OptimizerWrapper(keras.optimizers.SGD(0.5))
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [7]))
    >>> _ = optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    >>> table.lookup([7]).numpy().tolist()
    [[0.5, 0.5]]

    Args:
        keras_optimizer: the optimizer to wrap.
        name: the name of the wrapper.
        gradient_reduction: the reduction of gradients over ranks: "mean", or "sum", which SOK uses
            for tables.
        catch_up: whether rows make up for the steps in which they had no gradient, for SGD,
            Adagrad, Adam, AdamW, Adamax, RMSprop, Adadelta and `RowwiseAdagrad`. It needs one more
            float per row. docs/catch_up.md has the formulas and the limits.

    Raises:
        TypeError: `keras_optimizer` is not a Keras optimizer that can be wrapped.
        ValueError: `gradient_reduction` has another value.
    """

    def __init__(
        self,
        keras_optimizer: Any,
        name: str | None = None,
        gradient_reduction: str = "mean",
        catch_up: bool = False,
    ) -> None:
        if gradient_reduction not in ("mean", "sum"):
            raise ValueError(
                f"gradient_reduction must be 'mean' or 'sum', got {gradient_reduction!r}."
            )
        if isinstance(keras_optimizer, str):
            keras_optimizer = keras.optimizers.get(keras_optimizer)
        core = _checked_core(keras_optimizer)
        # Keras has it from 3.14 on.
        has_parts = isinstance(core, getattr(keras.optimizers, "MultiOptimizer", ()))
        mixed = keras.config.dtype_policy().name == "mixed_float16"
        if has_parts and (mixed or core is not keras_optimizer):
            raise TypeError("A MultiOptimizer cannot be combined with loss scaling (float16).")
        # A LossScaleOptimizer, so that Keras adds none; the rest of its constructor does not fit.
        keras.optimizers.Optimizer.__init__(self, learning_rate=0.0, name=name)
        if mixed and core is keras_optimizer:
            keras_optimizer = keras.optimizers.LossScaleOptimizer(core)
        self.inner_optimizer = keras_optimizer
        self.gradient_reduction = gradient_reduction
        self.catch_up = bool(catch_up)
        self._stepper: OneOptimizer | Parts = Parts(self) if has_parts else OneOptimizer(self)

    def __repr__(self) -> str:
        catch_up = " catch_up" if self.catch_up else ""
        return f"<OptimizerWrapper of {self._stepper.describe()}{catch_up}>"

    @property
    def core(self) -> Any:
        """The Keras optimizer that steps, without a LossScaleOptimizer around it."""
        inner = self.inner_optimizer
        is_scaler = isinstance(inner, keras.optimizers.LossScaleOptimizer)
        return inner.inner_optimizer if is_scaler else inner

    @property
    def variables(self) -> list[Any]:
        """The wrapped optimizer's variables; the state of tables is in the tables."""
        return [*self.inner_optimizer.variables, *self._stepper.shared_variables()]

    def shared_variables(self, table: DynamicVariable) -> list[Any]:
        """For a table that Keras's own code steps: the variables that belong to no row."""
        return self._stepper.shared_variables_of(table)

    def build(self, var_list: Any) -> None:
        """Creates state for dense variables, and adds space for state to the rows of tables."""
        self._stepper.build(list(var_list))
        self.built = True

    def __dir__(self) -> list[str]:
        # Keras saves and loads each optimizer that it finds here, and these as part of this one.
        return sorted(set(super().__dir__()) - {"core", "inner_optimizer"})

    def save_own_variables(self, store: Any) -> None:
        """Writes the variables, and which state the rows of tables have, for Keras's files."""
        super().save_own_variables(store)
        states = self._states()
        if states is not None:
            store[_STATES] = np.frombuffer(json.dumps(states).encode(), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote.

        The step count belongs to the state of the rows, which their layers load. If the rows of
        this optimizer's tables do not have the state that the file has, for example because the
        optimizer is not built, a warning says so, and both start afresh.
        """
        values = {key: store[key] for key in store.keys() if key != _STATES}  # noqa: SIM118
        if _STATES in store.keys():  # noqa: SIM118
            saved = json.loads(np.asarray(store[_STATES]).tobytes())
            if saved != (self._states() or []):
                warnings.warn(_other_states(self, saved), stacklevel=2)
                return
        super().load_own_variables(values)

    def _states(self) -> list[Any] | None:
        """The states in the rows, or None if the optimizer has no tables."""
        trained = self._stepper.variables
        tables, _ = pairs.split(pairs.distinct([None] * len(trained), trained)[1])
        if not tables:
            return None
        specs = (self.state_spec(table) for table in tables)
        return [[name, list(widths)] for name, widths, _ in specs if widths]

    def state_spec(self, table: DynamicVariable) -> StateSpec:
        """The state that this optimizer keeps, or would keep, in the table's rows.

        Raises:
            ValueError: the optimizer cannot step tables.
        """
        return self._stepper.state_spec(table)

    def attach(self, tables: Sequence[DynamicVariable]) -> None:
        """Adds space for state to the rows of tables, as the first step with them would.

        If another wrapper has taken a table over, this wrapper takes it back, with fresh state.
        """
        self._stepper.attach(tables)
        note_optimizer(tables, self)

    @_ops.not_converted
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Applies one step.

        Args:
            grads_and_vars: pairs of a gradient and its variable. The gradients of tables are the
                `tf.IndexedSlices` that `tape.gradient` returns.

        Returns:
            The number of steps so far, a variable.

        Raises:
            ValueError: no variable has a gradient, or the optimizer cannot step tables.
            TypeError: the gradient of a table is not a `tf.IndexedSlices`.
            RuntimeError: a `tf.distribute` strategy with several replicas is active.
            tf.errors.FailedPreconditionError: another wrapper has taken over the state of a table.
        """
        both = list(grads_and_vars)
        if both:
            self.apply([grad for grad, _ in both], [variable for _, variable in both])
        return self.core._iterations

    @_ops.not_converted
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Same as `apply_gradients`, with gradients and variables in two lists."""
        grads = list(grads)
        if trainable_variables is None:
            if not self.built:
                raise ValueError("apply() needs trainable_variables: the optimizer is not built.")
            trainable_variables = self._stepper.variables
        variables = list(trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(f"There are {len(grads)} gradients for {len(variables)} variables.")
        if pairs.split(variables)[0]:
            check_one_replica("OptimizerWrapper")
        if not self.built:
            self.build(variables)
        self._stepper.apply(grads, variables)

    def decays(self, table: DynamicVariable) -> bool:
        """Whether weight decay applies to a table, as in Keras's `_use_weight_decay`."""
        return self._stepper.decays(table)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Same as in Keras; `var_list` can contain tables. Must be called before the first step."""
        if self.built:
            raise ValueError(
                "exclude_from_weight_decay() must be called before the optimizer is built."
            )
        self._stepper.exclude_from_weight_decay(list(var_list or []), var_names)

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss, multiplied by the loss scale of the wrapped optimizer if it has one."""
        return self.inner_optimizer.scale_loss(loss)

    def minimize(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Computes gradients and steps.

        Args:
            loss: a function without arguments, or a tensor computed under `tape`.
            var_list: the variables, or a function that returns them.
            tape: a `tf.GradientTape`, if `loss` is a tensor.

        Returns:
            The number of steps so far, a variable.

        Raises:
            ValueError: `loss` is a tensor and `tape` is None; other errors as in `apply_gradients`.
        """
        if callable(loss):
            with tf.GradientTape() as tape:
                value = self.scale_loss(loss())
        elif tape is None:
            raise ValueError("minimize() needs tape, or a loss that is a function.")
        else:
            with tape:
                value = self.scale_loss(loss)
        variables = list(var_list() if callable(var_list) else var_list)
        return self.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))

    def finalize_variable_values(self, var_list: Any) -> None:
        """With `use_ema`, replaces values by their averages; Keras calls it when `fit` ends."""
        self._stepper.finalize_variable_values(list(var_list))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, with the optimizer serialized."""
        caller = sys._getframe(1)
        if caller.f_code.co_name == "model_metadata":
            # Keras, which writes an .h5 file, has just removed the optimizer from the arguments of
            # `compile` that the model remembers. Copies of the model would be compiled without it.
            caller.f_locals["model"]._compile_config.config["optimizer"] = self
        return {
            "keras_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "name": self.name,
            "gradient_reduction": self.gradient_reduction,
            "catch_up": self.catch_up,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> OptimizerWrapper:
        """Creates a wrapper from the result of `get_config`."""
        inner = keras.saving.deserialize_keras_object(
            config["keras_optimizer"], custom_objects=custom_objects
        )
        return cls(
            inner,
            name=config.get("name"),
            gradient_reduction=config.get("gradient_reduction", "mean"),
            catch_up=config.get("catch_up", False),
        )


def _checked_core(keras_optimizer: Any) -> Any:
    """The optimizer without a LossScaleOptimizer around it; raises TypeError if it is not one."""
    optimizers = keras.optimizers
    core = keras_optimizer
    if type(core) is optimizers.LossScaleOptimizer:
        core = core.inner_optimizer
    if not isinstance(core, optimizers.Optimizer):
        legacy = type(core).__module__.startswith("tf_keras")
        hint = " tf_keras is Keras 2; use keras.optimizers, of Keras 3." if legacy else ""
        raise TypeError(
            f"keras_optimizer must be a Keras optimizer, got {keras_optimizer!r:.100}.{hint}"
        )
    if isinstance(core, optimizers.LossScaleOptimizer):
        raise TypeError(
            f"keras_optimizer cannot be a {type(core).__name__}: wrap the optimizer inside it."
        )
    return core


def _other_states(optimizer: OptimizerWrapper, saved: list[Any]) -> str:
    if not optimizer.built:
        hint = (
            "This optimizer is not built. To load both, call "
            "optimizer.build(model.trainable_variables) before load_weights."
        )
    else:
        hint = f"This optimizer keeps {optimizer._states()}."
    return (
        f"The optimizer {optimizer.name!r} and the rows start with fresh state. The file's step "
        f"count and state of rows are not loaded: the file has the state {saved}. {hint}"
    )
