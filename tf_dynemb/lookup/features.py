"""The ids that `lookup_sparse` and `prefetch_lookup` accept: checks and conversion to bags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_dynemb.ids import bags
from tf_dynemb.ids.bags import Bags
from tf_dynemb.variables.dynamic import DynamicVariable


def as_features(tables: Sequence[Any], single: bool, sp_ids: Any, sp_weights: Any) -> list[Bags]:
    """Checks the arguments of `lookup_sparse`; returns the bags of each feature.

    Args:
        tables: the unwrapped tables of `params`.
        single: whether `params` is one table, not a list.
        sp_ids: the ids, as the caller passed them.
        sp_weights: the weights, as the caller passed them.
    """
    if not tables:
        raise ValueError("params is empty: at least one table is needed.")
    for table in tables:
        _check_table(table)
    ids = _one_each("sp_ids", [sp_ids] if single else sp_ids, len(tables))
    weights = _one_each("sp_weights", [sp_weights] if single else sp_weights, len(tables), True)
    return [
        _bags_of(table, i, w, "sp_ids" if single else f"sp_ids[{n}]")
        for n, (table, i, w) in enumerate(zip(tables, ids, weights, strict=True))
    ]


def _bags_of(table: Any, ids: Any, weights: Any, name: str) -> Bags:
    """Returns the ids and weights of a feature of a dynamic or static table."""
    if not isinstance(table, DynamicVariable):
        return bags.create(ids, weights, tf.int64, name)
    return bags.create(ids, weights, table.key_type, name, table.string_hash)


def as_list(value: Any) -> list[Any]:
    """Returns the items of a list or tuple; any other value as the only item."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_table(table: Any) -> None:
    if not resource_variable_ops.is_resource_variable(table):
        raise TypeError(
            f"params must be DynamicVariable, Variable or tf.Variable, got {table!r:.120}."
        )
    if table.shape.rank != 2 or not table.dtype.is_floating:
        raise ValueError(
            "params must be floating point [rows, dim], got a variable of the shape "
            f"{table.shape} and {table.dtype.name}."
        )


def _one_each(name: str, values: Any, count: int, may_be_none: bool = False) -> list[Any]:
    if may_be_none and values is None:
        return [None] * count
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} must be a list, as params is, got a {type(values).__name__}.")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} items, but params has {count}.")
    for i, value in enumerate(values):
        if value is None and not may_be_none:
            raise TypeError(f"{name}[{i}] is None.")
    return list(values)
