"""OneEmbedding's initializers: dicts that describe a distribution, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras

# The initializer of a vector for which none is given.
DEFAULT = {"type": "normal", "mean": 0.0, "std": 0.05}

# The numbers of each type of initializer.
_NUMBERS = {
    "uniform": ("low", "high"),
    "normal": ("mean", "std"),
    "trunc_normal": ("mean", "std", "a", "b"),
    "constant": ("value",),
}
# The cuts that tables can draw: at 2 deviations, and at bounds that no draw reaches. docs/design.md
# says which distributions tables have.
_CUT, _NO_DRAW = 2.0, 6.0


def make_uniform_initializer(low: float = 0.0, high: float = 1.0) -> dict[str, Any]:
    """Returns an initializer that draws uniformly from [low, high).

    Args:
        low: the lower bound.
        high: the upper bound; if it equals `low`, all values are `low`.

    Raises:
        TypeError, ValueError: an argument is no finite number, or `low` is above `high`.
    """
    return check_initializer({"type": "uniform", "low": low, "high": high})


def make_normal_initializer(mean: float = 0.0, std: float = 1.0) -> dict[str, Any]:
    """Returns an initializer that draws from a normal distribution.

    Args:
        mean: the mean.
        std: the standard deviation.

    Raises:
        TypeError, ValueError: an argument is no finite number, or `std` is negative.
    """
    return check_initializer({"type": "normal", "mean": mean, "std": std})


def make_trunc_normal_initializer(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> dict[str, Any]:
    """Returns an initializer that draws from a normal distribution without its tails.

    Args:
        mean: the mean, before the tails are cut off.
        std: the standard deviation, before the tails are cut off.
        a: the lowest value: `mean - 2 * std`, or `mean - 6 * std` and less. (No draw is farther
            than 6 deviations from the mean, so such a bound cuts nothing off.)
        b: the highest value: `mean + 2 * std`, or `mean + 6 * std` and more. Both bounds cut, or
            neither does.

    Raises:
        TypeError, ValueError: an argument is no finite number, `std` is negative, or the bounds are
            others.
    """
    return check_initializer({"type": "trunc_normal", "mean": mean, "std": std, "a": a, "b": b})


def make_constant_initializer(value: float) -> dict[str, Any]:
    """Returns an initializer that sets every element to a number.

    Args:
        value: the number.

    Raises:
        TypeError, ValueError: `value` is no finite number.
    """
    return check_initializer({"type": "constant", "value": value})


def check_initializer(initializer: Any, what: str = "initializer") -> dict[str, Any]:
    """Returns a copy of an initializer, with Python's floats.

    Args:
        initializer: a dict as the functions above return, or written by hand.
        what: its name in messages.

    Raises:
        TypeError: it is no dict, or one of its numbers is no number.
        ValueError: its type is unknown, it lacks a number or has one too many, or a number is out
            of range.
    """
    if not isinstance(initializer, Mapping):
        raise TypeError(
            f"{what} must be the result of a make_..._initializer function, got {initializer!r}."
        )
    kind = initializer.get("type")
    if kind not in _NUMBERS:
        raise ValueError(f"the type of {what} must be one of {', '.join(_NUMBERS)}, got {kind!r}.")
    names = _NUMBERS[kind]
    if set(initializer) != {"type", *names}:
        raise ValueError(
            f"{what} of the type {kind!r} needs {', '.join(names)}, got {dict(initializer)!r}."
        )
    numbers = {name: _number(name, initializer[name], what) for name in names}
    if kind == "uniform" and numbers["low"] > numbers["high"]:
        raise ValueError(
            f"low={numbers['low']} is above high={numbers['high']} in {what}, the bounds of a "
            "uniform distribution."
        )
    if numbers.get("std", 0.0) < 0:
        raise ValueError(f"std={numbers['std']} of {what} must not be negative.")
    if kind == "trunc_normal":
        _is_cut(numbers, what)
    return {"type": kind, **numbers}


def keras_initializer(initializer: Mapping[str, Any]) -> keras.initializers.Initializer:
    """Translates a checked initializer to one that tables accept."""
    kind = initializer["type"]
    if kind == "constant":
        return keras.initializers.Constant(initializer["value"])
    if kind == "uniform":
        return keras.initializers.RandomUniform(initializer["low"], initializer["high"])
    cut = kind == "trunc_normal" and _is_cut(initializer, "initializer")
    make = keras.initializers.TruncatedNormal if cut else keras.initializers.RandomNormal
    return make(initializer["mean"], initializer["std"])


def _is_cut(numbers: Mapping[str, float], what: str) -> bool:
    """Whether the bounds of a "trunc_normal" cut at two deviations; False: they cut nothing."""
    mean, std, a, b = (numbers[name] for name in _NUMBERS["trunc_normal"])
    if all(math.isclose(bound, _CUT * std, rel_tol=1e-6) for bound in (mean - a, b - mean)):
        return True
    if min(mean - a, b - mean) >= _NO_DRAW * std:
        return False
    raise ValueError(
        f"a={a}, b={b} of {what} must be {mean - _CUT * std:g}, {mean + _CUT * std:g} (tables cut "
        f"a normal distribution at two deviations), or at most {mean - _NO_DRAW * std:g} and at "
        f"least {mean + _NO_DRAW * std:g} (where they cut nothing)."
    )


def _number(name: str, value: Any, what: str) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} of {what} must be a number, got {value!r}.")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} of {what} must be a finite number, got {value!r}.")
    return number
