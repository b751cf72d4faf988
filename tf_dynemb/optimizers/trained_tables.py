"""TrainedTables: what an `OptimizerWrapper` knows about each of its tables."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import keras
import tensorflow as tf

from tf_dynemb.optimizers.accumulator import Accumulator
from tf_dynemb.optimizers.averages import Averages
from tf_dynemb.optimizers.generic import RowsOptimizer
from tf_dynemb.optimizers.parts import Parts
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


class TrainedTables:
    """The wrapper's data about each table, by `id`; tables are kept alive, so that ids stay valid.

    Keras searches an optimizer's attributes for variables and other optimizers to track and save.
    It does not search inside this class.
    """

    def __init__(self, template: keras.optimizers.Optimizer | None) -> None:
        self.template = template
        self.parts: Parts | None = None
        self.trained_variables: list[tf.Variable | keras.Variable] = []
        self._known: dict[int, DynamicVariable] = {}
        self.generic: dict[int, RowsOptimizer] = {}
        self.accumulators: dict[int, Accumulator] = {}
        self.averages = Averages()
        # The tables with restored state that this optimizer has not stepped yet.
        self.continued: list[DynamicVariable] = []
        self.without_weight_decay: dict[int, DynamicVariable] = {}

    def has(self, table: DynamicVariable) -> bool:
        """Whether the wrapper has attached to a table."""
        return id(table) in self._known

    def add(self, table: DynamicVariable) -> None:
        """Notes that the wrapper has attached to a table."""
        self._known[id(table)] = table
