"""The words of conditions on rows, and the checks of their values.

`DynamicVariable.size_if` explains the words. `tables.selection` evaluates them in a table's memory,
and `chains.selection` in snapshots.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

CONDITIONS = (
    *("key_from", "key_below", "score_from", "score_below"),
    *("updated_since", "updated_before", "accessed_since", "accessed_before"),
    *("l2_from", "l2_below"),
)


def given(conditions: Mapping[str, Any], known: tuple[str, ...] = CONDITIONS) -> dict[str, Any]:
    """Returns the conditions that have a value; raises TypeError if one is not known."""
    for name, value in conditions.items():
        if name not in known:
            raise TypeError(f"Unknown condition {name}={value!r}; known: {', '.join(known)}.")
    return {name: value for name, value in conditions.items() if value is not None}


def check_kind(conditions: Mapping[str, Any], name: str, strategy: str, has_scores: bool) -> None:
    """Raises ValueError if a condition is on scores and a table has times, or the reverse.

    Args:
        conditions: the conditions.
        name: the name of the table.
        strategy: its `evict_strategy`.
        has_scores: whether that has scores that are not times.
    """
    for each in ("score_from", "score_below"):
        if each in conditions and not has_scores:
            raise ValueError(
                f"{each} needs a table with scores, but {name!r} has evict_strategy "
                f"{strategy!r}: use accessed_since and accessed_before."
            )
    for each in ("accessed_since", "accessed_before"):
        if each in conditions and has_scores:
            raise ValueError(
                f"{each} needs the times of last accesses, but {name!r} has evict_strategy "
                f"{strategy!r} and records scores: use score_from and score_below."
            )


def integer(name: str, value: Any) -> int:
    """Returns an integer that a condition has; raises TypeError or ValueError if it is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if not -(2**63) <= value.__index__() <= 2**64:
        raise ValueError(f"{name}={value!r} is out of range.")
    return int(value)


def number(name: str, value: Any) -> float:
    """Returns a number that a condition has; raises TypeError or ValueError if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return float(value)


def ns_of(time: Any, name: str) -> int:
    """Returns a moment in nanoseconds since 1970 UTC.

    Args:
        time: an aware datetime.
        name: the name of the argument, for errors.

    Raises:
        TypeError: `time` is not a datetime.
        ValueError: `time` has no time zone.
    """
    if not isinstance(time, datetime.datetime):
        raise TypeError(f"{name} must be a datetime, got {time!r}.")
    if time.tzinfo is None or time.utcoffset() is None:
        raise ValueError(
            f"{name}={time!r} has no time zone: use datetime.now(timezone.utc), or "
            "pytz.utc.localize."
        )
    since_epoch = time - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    return 1000 * (since_epoch // datetime.timedelta(microseconds=1))
