"""Gradients and their variables: separation into tables and dense variables."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tf_dynemb.optimizers import gradients
from tf_dynemb.optimizers.gradients import Gradient, TableGradient
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable
from tf_dynemb.variables.unwrap import unwrap


def distinct(
    grads: Sequence[Gradient | None], variables: Sequence[tf.Variable | keras.Variable]
) -> tuple[list[Gradient | None], list[tf.Variable | keras.Variable]]:
    """Unwraps variables of this package, and drops variables that come twice with one gradient.

    `[*model.trainable_variables, model.table]` has the table twice: as a weight of Keras and as
    itself. `tape.gradient` returns the same object for both.
    """
    seen: dict[tuple[int, int], tf.Variable | keras.Variable] = {}
    distinct = []
    for grad, variable in zip(grads, variables, strict=True):
        unwrapped = unwrap(variable)
        if isinstance(unwrapped, (DynamicVariable, Variable)):
            if seen.setdefault((id(unwrapped), id(grad)), variable) is not variable:
                continue
            variable = unwrapped
        distinct.append((grad, variable))
    return [grad for grad, _ in distinct], [variable for _, variable in distinct]


def split(
    variables: Iterable[tf.Variable | keras.Variable],
) -> tuple[list[DynamicVariable], list[tf.Variable | keras.Variable]]:
    """Returns the tables among the variables, and the others."""
    tables, dense = [], []
    for variable in variables:
        table = unwrap(variable)
        if isinstance(table, DynamicVariable):
            tables.append(table)
        else:
            dense.append(variable)
    return tables, dense


def by_kind(
    grads: Sequence[Gradient], variables: Sequence[tf.Variable | keras.Variable]
) -> tuple[list[TableGradient], list[Gradient], list[tf.Variable | keras.Variable]]:
    """Returns gradients of tables (added up for each table), dense gradients, dense variables."""
    slices_of: dict[DynamicVariable, list[tf.IndexedSlices]] = {}
    dense_grads, dense = [], []
    for grad, variable in zip(grads, variables, strict=True):
        table = unwrap(variable)
        if isinstance(table, DynamicVariable):
            slices_of.setdefault(table, []).append(grad)
        else:
            dense_grads.append(grad)
            dense.append(variable)
    table_grads = [gradients.from_slices(table, slices) for table, slices in slices_of.items()]
    return table_grads, dense_grads, dense


def drop_missing(
    grads: list[Gradient | None], variables: list[tf.Variable | keras.Variable]
) -> tuple[list[Gradient], list[tf.Variable | keras.Variable]]:
    """Drops variables without a gradient, with a warning; if none has one, raises ValueError."""
    missing = [v.name for g, v in zip(grads, variables, strict=True) if g is None]
    if len(missing) == len(grads):
        raise ValueError(f"No gradients provided for any variable: {missing}.")
    if missing:
        warnings.warn(f"There are no gradients for the variables {missing}.", stacklevel=5)
    present = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
    return [g for g, _ in present], [v for _, v in present]
