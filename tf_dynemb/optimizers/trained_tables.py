"""Which `OptimizerWrapper` trains a table."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import keras

from tf_dynemb.variables.dynamic import DynamicVariable

# The wrapper that attached to a table last.
_last: weakref.WeakKeyDictionary[DynamicVariable, weakref.ref[keras.optimizers.Optimizer]] = (
    weakref.WeakKeyDictionary()
)


def note_optimizer(
    tables: Iterable[DynamicVariable], optimizer: keras.optimizers.Optimizer
) -> None:
    """Records that a wrapper has attached to tables."""
    for table in tables:
        _last[table] = weakref.ref(optimizer)


def optimizer_of(table: DynamicVariable) -> keras.optimizers.Optimizer | None:
    """Returns the `OptimizerWrapper` that attached to a table last; None if there is none.

    For the tables of a MultiOptimizer, it is the wrapper around the MultiOptimizer.
    """
    optimizer = _last.get(table)
    return None if optimizer is None else optimizer()
