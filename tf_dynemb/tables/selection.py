"""Selection of rows by conditions on keys, times, scores and norms, evaluated in the operators."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.tables.table import Table
from tf_dynemb.tables.times import tick_before

CONDITIONS = (
    *("key_from", "key_below", "score_from", "score_below"),
    *("updated_since", "updated_before", "accessed_since", "accessed_before"),
    *("l2_from", "l2_below"),
)
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
    for name, value in conditions.items():
        if name not in CONDITIONS:
            raise TypeError(f"Unknown condition {name}={value!r}; known: {', '.join(CONDITIONS)}.")
    given = {name: value for name, value in conditions.items() if value is not None}
    updated_after = (
        tick_before(given["updated_since"], "updated_since") if "updated_since" in given else 0
    )
    updated_until = (
        tick_before(given["updated_before"], "updated_before")
        if "updated_before" in given
        else _LAST
    )
    score_from, score_to = _scores(table, given)
    has_keys = "key_from" in given or "key_below" in given
    key_from, key_to = _keys(table, given)
    ranges = np.array(
        [updated_after, updated_until, score_from, score_to, has_keys, key_from, key_to], np.int64
    )
    low = max(-1.0, _number("l2_from", given.get("l2_from", -1.0)))
    high = _number("l2_below", given.get("l2_below", math.inf))
    return tf.constant(ranges), tf.constant([low, high], tf.float64)


def _scores(table: Table, given: Mapping[str, Any]) -> tuple[int, int]:
    low, high = -(2**63), _LAST
    scored = table.options.has_scores
    for name in ("score_from", "score_below"):
        if name in given and not scored:
            raise ValueError(
                f"{name} needs a table with scores, but {table.name!r} has evict_strategy "
                f"{table.options.strategy!r}: use accessed_since and accessed_before."
            )
    for name in ("accessed_since", "accessed_before"):
        if name in given and scored:
            raise ValueError(
                f"{name} needs the times of last accesses, but {table.name!r} has evict_strategy "
                f"{table.options.strategy!r} and records scores: use score_from and score_below."
            )
    if "score_from" in given:
        low = min(_integer("score_from", given["score_from"]), _LAST)
    if "score_below" in given:
        high = min(_integer("score_below", given["score_below"]) - 1, _LAST - 1)
    if "accessed_since" in given:
        low = tick_before(given["accessed_since"], "accessed_since") + 1
    if "accessed_before" in given:
        high = tick_before(given["accessed_before"], "accessed_before")
    return low, high


def _keys(table: Table, given: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the first and the last key, as int64 with their bits."""
    limits = np.iinfo(table.key_type.as_numpy_dtype)
    low, high = int(limits.min), int(limits.max)
    if "key_from" in given:
        low = max(low, _integer("key_from", given["key_from"]))
    if "key_below" in given:
        high = min(high, _integer("key_below", given["key_below"]) - 1)
    if low > high:
        low, high = 1, 0  # no key
    return low if low < 2**63 else low - 2**64, high if high < 2**63 else high - 2**64


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if not -(2**63) <= value.__index__() <= 2**64:
        raise ValueError(f"{name}={value!r} is out of range.")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return float(value)
