"""Selection of rows by conditions on keys, times, scores and norms, evaluated in the operators."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.chains.conditions import check_kind, given, integer, number
from tf_dynemb.tables.table import Table
from tf_dynemb.tables.times import tick_before

# Rows per operator call. It bounds the memory that is held twice while the chunks are joined.
_CHUNK = 1 << 18
_LAST = 2**63 - 1


def select(
    table: Table, conditions: Mapping[str, Any], keys_only: bool
) -> Iterator[list[tf.Tensor]]:
    """Yields the rows of this rank that satisfy all conditions, some at a time.

    Args:
        table: the table.
        conditions: the conditions, as in `DynamicVariable.size_if`.
        keys_only: whether only keys are wanted.

    Yields:
        [keys, vectors, state, updates, scores]: tensors. With `keys_only`, all except the keys are
        empty.

    Raises:
        ValueError, TypeError: a condition is invalid; the message names it.
        RuntimeError: the call is inside a `tf.function`.
    """
    if not tf.executing_eagerly():
        raise RuntimeError("rows are selected eagerly only: call it outside tf.function.")
    ranges, norms = _predicate(table, conditions)
    cursor = 0
    while cursor >= 0:
        *columns, following = _ops.library().dynemb_export_if(
            table.handle,
            cursor=tf.constant(cursor, tf.int64),
            limit=tf.constant(_CHUNK, tf.int64),
            ranges=ranges,
            norms=norms,
            key_type=table.key_type,
            dtype=table.dtype,
            keys_only=keys_only,
        )
        yield columns
        cursor = int(following)


def _predicate(table: Table, conditions: Mapping[str, Any]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the inputs `ranges` and `norms` of DynembExportIf."""
    conditions = given(conditions)
    updated_after = (
        tick_before(conditions["updated_since"], "updated_since")
        if "updated_since" in conditions
        else 0
    )
    updated_until = (
        tick_before(conditions["updated_before"], "updated_before")
        if "updated_before" in conditions
        else _LAST
    )
    score_from, score_to = _scores(table, conditions)
    has_keys = "key_from" in conditions or "key_below" in conditions
    key_from, key_to = _keys(table, conditions)
    ranges = np.array(
        [updated_after, updated_until, score_from, score_to, has_keys, key_from, key_to], np.int64
    )
    low = max(-1.0, number("l2_from", conditions.get("l2_from", -1.0)))
    high = number("l2_below", conditions.get("l2_below", math.inf))
    return tf.constant(ranges), tf.constant([low, high], tf.float64)


def _scores(table: Table, conditions: Mapping[str, Any]) -> tuple[int, int]:
    low, high = -(2**63), _LAST
    check_kind(conditions, table.name, table.options.strategy, has_scores=table.options.has_scores)
    if "score_from" in conditions:
        low = min(integer("score_from", conditions["score_from"]), _LAST)
    if "score_below" in conditions:
        high = min(integer("score_below", conditions["score_below"]) - 1, _LAST - 1)
    if "accessed_since" in conditions:
        low = tick_before(conditions["accessed_since"], "accessed_since") + 1
    if "accessed_before" in conditions:
        high = tick_before(conditions["accessed_before"], "accessed_before")
    return low, high


def _keys(table: Table, conditions: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the first and the last key, as int64 with their bits."""
    limits = np.iinfo(table.key_type.as_numpy_dtype)
    low, high = int(limits.min), int(limits.max)
    if "key_from" in conditions:
        low = max(low, integer("key_from", conditions["key_from"]))
    if "key_below" in conditions:
        high = min(high, integer("key_below", conditions["key_below"]) - 1)
    if low > high:
        low, high = 1, 0  # no key
    return low if low < 2**63 else low - 2**64, high if high < 2**63 else high - 2**64
