"""TFRA's policies for Variable.restrict: which rows are removed from a table that is too large."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.ids.types import TensorLike
from tf_dynemb.tables.cut import Cut
from tf_dynemb.variables.dynamic import DynamicVariable


class RestrictPolicy:
    """The base of policies; subclasses define `apply_update` and `apply_restriction`.

    `DynamicEmbeddingOptimizer` calls `after_step` with the keys of each of its steps.

    Args:
        var: the `Variable` to restrict.

    Attributes:
        var: the variable. The policy does not keep it alive.
    """

    def __init__(self, var: DynamicVariable) -> None:
        self._var = weakref.ref(var)

    @property
    def var(self) -> DynamicVariable:
        """The variable to restrict."""
        return cast(DynamicVariable, self._var())

    @property
    def status(self) -> DynamicVariable | None:
        """The variable in which the policy keeps a number for each key; None: it keeps none."""
        return None

    def apply_update(self, ids: TensorLike) -> Any:
        """Records that keys were used.

        Args:
            ids: integers of any shape.
        """
        raise NotImplementedError

    def after_step(self, keys: tf.Tensor) -> Any:
        """Records that an optimizer has stepped the rows of keys; by default, `apply_update`."""
        return self.apply_update(keys)

    def apply_restriction(self, num_reserved: int, **kwargs: Any) -> int:
        """Removes rows of this rank until at most `num_reserved` are left.

        Args:
            num_reserved: the number of rows to keep.
            **kwargs: `trigger`: the number of rows above which rows are removed; default:
                `num_reserved`.

        Returns:
            The number of rows removed.
        """
        raise NotImplementedError


class TimestampRestrictPolicy(RestrictPolicy):
    """Removes the rows whose last update is the oldest.

    Every row of a table has the time of its last update, so the policy needs no status.
    """

    @_ops.not_converted
    def apply_update(self, ids: TensorLike) -> Any:
        """Sets the time of the last update of the rows to now. Ids without a row are ignored."""
        keys = tf.reshape(self.var.as_keys(ids, "ids"), [-1])
        keys = tf.boolean_mask(keys, self.var.contains(keys))
        zeros = tf.zeros([tf.size(keys), self.var.dimension], self.var.dtype)
        return self.var.scatter_add(tf.IndexedSlices(zeros, keys))

    def after_step(self, keys: tf.Tensor) -> None:
        """Does nothing: the step itself has updated the times."""

    def apply_restriction(self, num_reserved: int, **kwargs: Any) -> int:
        """Removes the rows whose last update is the oldest; see the base class. Eager only."""

        def updates() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
            with Cut([self.var], [-1], with_deleted=False) as cut:
                blocks = [(rows.keys, rows.updates) for _, rows in cut.blocks()]
            keys, times = (np.concatenate(column) for column in zip(*blocks, strict=True))
            return keys, times

        return len(_restrict(self.var, num_reserved, kwargs, updates))


class FrequencyRestrictPolicy(RestrictPolicy):
    """Removes the rows that were used least often.

    A use is a step of the optimizer, or a call of `apply_update`, that has the key; repeated ids of
    one call count once. `status` is a variable of dim 1 with the counts, which are exact up to
    2^24. `tf.train.Checkpoint` saves it with the variable; add it to the variables of
    `tf_dynemb.dump`.
    """

    def __init__(self, var: DynamicVariable) -> None:
        super().__init__(var)
        self._status = DynamicVariable(
            1,
            0.0,
            "host",
            name=f"{str(var.name).removesuffix(':0')}/frequency",
            trainable=False,
            key_type=var.key_type,
            mode=var.mode,
        )
        var._track_trackable(self._status, "frequency")

    @property
    def status(self) -> DynamicVariable:
        """The counts, a `DynamicVariable` of dimension 1."""
        return self._status

    @_ops.not_converted
    def apply_update(self, ids: TensorLike) -> Any:
        """Adds 1 to the count of each distinct id. The call of each rank counts separately."""
        keys = tf.reshape(self.var.as_keys(ids, "ids"), [-1])
        keys = tf.unique(keys)[0]
        return self._status.scatter_add(tf.IndexedSlices(tf.ones([tf.size(keys), 1]), keys))

    def apply_restriction(self, num_reserved: int, **kwargs: Any) -> int:
        """Removes the rows that were used least often; see the base class. Eager only."""

        def counts() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
            keys = self.var.export()[0]
            lookup = _ops.library().dynemb_lookup
            found = lookup(self._status.handle, keys, tf.zeros([1]), insert=False)[0]
            return keys.numpy(), found.numpy()[:, 0]

        removed = _restrict(self.var, num_reserved, kwargs, counts)
        if len(removed):
            _ops.library().dynemb_erase(self._status.handle, removed)
        return len(removed)


# The policies of this package, by name.
POLICIES: dict[str, type[RestrictPolicy]] = {
    policy.__name__: policy for policy in (TimestampRestrictPolicy, FrequencyRestrictPolicy)
}


def _restrict(
    var: DynamicVariable,
    num_reserved: Any,
    kwargs: dict[str, Any],
    order: Callable[[], tuple[npt.NDArray[Any], npt.NDArray[Any]]],
) -> npt.NDArray[Any]:
    """Removes this rank's rows with the lowest numbers; returns their keys.

    Args:
        var: the variable.
        num_reserved: the number of rows to keep.
        kwargs: the arguments of `apply_restriction`.
        order: a function that returns the keys of all rows and a number for each.
    """
    trigger = kwargs.pop("trigger", num_reserved)
    if kwargs:
        raise TypeError(f"restrict has no argument {', '.join(kwargs)}.")
    for name, value in (("num_reserved", num_reserved), ("trigger", trigger)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer, got {value!r}.")
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}.")
    if not tf.executing_eagerly():
        raise RuntimeError("restrict runs eagerly only: call it outside tf.function.")
    rows = len(var)
    excess = rows - int(num_reserved)
    if rows <= trigger or excess <= 0:
        return np.empty([0], var.key_type.as_numpy_dtype)
    keys, numbers = order()
    removed = keys[np.argsort(numbers, kind="stable")[:excess]]
    _ops.library().dynemb_erase(var.handle, removed)
    return removed
