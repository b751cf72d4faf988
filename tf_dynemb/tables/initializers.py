"""Initial vectors: translates a Keras initializer, a string or a number to operator attributes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras

# From keras.initializers.VarianceScaling: a normal cut off at two deviations has this deviation.
_TRUNCATED_STDDEV = 0.87962566103423978


@dataclasses.dataclass(frozen=True)
class InitialVector:
    """The distribution of a new row's vector.

    Attributes:
        kinds: "constant", "uniform", "normal" or "truncated_normal"; one for all columns, or one
            for each column.
        args: two floats for each kind: (value, 0), (low, high) or (mean, stddev).
        seed: the Keras initializer's own seed, if it has one.
    """

    kinds: tuple[str, ...]
    args: tuple[float, ...]
    seed: int | None = None


def create(initializer: Any, dim: int) -> InitialVector:
    """Translates an initializer.

    Args:
        initializer: None ("uniform", as in `keras.layers.Embedding`), a number, a number as text, a
            Keras initializer or its name ("random" is "uniform"), or a list of these, one for each
            of the `dim` columns. Initializers of TensorFlow (`tf.random_normal_initializer`) and
            tf_keras are accepted where Keras has the same. Variance scaling (glorot, he, lecun)
            uses `dim` as both fan-in and fan-out, because a table has no fixed number of rows.
        dim: width of the vector.

    Raises:
        ValueError: the initializer is unknown, or does not draw each column independently.
    """
    if isinstance(initializer, (list, tuple)):
        return _per_column(initializer, dim)
    if initializer is None:
        initializer = "uniform"
    if isinstance(initializer, (int, float)) and not isinstance(initializer, bool):
        return _constant(float(initializer), initializer)
    if isinstance(initializer, str):
        number = _parse_number(initializer)
        if number is not None:
            return _constant(number, initializer)
        initializer = _by_name(initializer)
    if isinstance(initializer, dict):
        initializer = keras.initializers.get(initializer)
    if isinstance(initializer, type) and issubclass(initializer, keras.initializers.Initializer):
        initializer = initializer()
    return _from_keras(_as_keras(initializer), dim)


def _per_column(initializers: Sequence[Any], dim: int) -> InitialVector:
    if len(initializers) != dim:
        raise ValueError(
            f"A list of initializers needs one for each of the {dim} columns, "
            f"got {len(initializers)}."
        )
    columns = [create(item, dim) for item in initializers]
    if any(len(column.kinds) != 1 for column in columns):
        raise ValueError(f"initializer lists cannot be nested, got {list(initializers)!r}.")
    seeds = [column.seed for column in columns if column.seed is not None]
    return InitialVector(
        tuple(column.kinds[0] for column in columns),
        tuple(arg for column in columns for arg in column.args),
        seeds[0] if seeds else None,
    )


def _by_name(name: str) -> keras.initializers.Initializer:
    try:
        return keras.initializers.get("uniform" if name == "random" else name)
    except ValueError:
        raise ValueError(f"Unknown initializer {name!r}.") from None


def _as_keras(initializer: keras.initializers.Initializer) -> keras.initializers.Initializer:
    """Converts an initializer of TensorFlow or tf_keras, whose classes have Keras's names."""
    module = type(initializer).__module__.split(".")[0]
    same = getattr(keras.initializers, type(initializer).__name__, None)
    if module not in ("tensorflow", "tf_keras") or same is None:
        return initializer
    config = {name: value for name, value in initializer.get_config().items() if name != "dtype"}
    return same(**config)


def _from_keras(initializer: keras.initializers.Initializer, dim: int) -> InitialVector:
    kinds = keras.initializers
    seed = getattr(initializer, "_init_seed", None)
    seed = seed if isinstance(seed, int) else None
    kind = type(initializer)
    if kind is kinds.Zeros:
        return _constant(0.0, initializer)
    if kind is kinds.Ones:
        return _constant(1.0, initializer)
    if kind is kinds.Constant:
        return _constant(initializer.value, initializer)
    if kind is kinds.RandomUniform:
        return _distribution("uniform", initializer.minval, initializer.maxval, seed)
    if kind is kinds.RandomNormal:
        return _distribution("normal", initializer.mean, initializer.stddev, seed)
    if kind is kinds.TruncatedNormal:
        return _distribution("truncated_normal", initializer.mean, initializer.stddev, seed)
    if kind in _VARIANCE_SCALING:
        variance = initializer.scale / dim
        if initializer.distribution == "uniform":
            limit = math.sqrt(3.0 * variance)
            return _distribution("uniform", -limit, limit, seed)
        if initializer.distribution == "truncated_normal":
            stddev = math.sqrt(variance) / _TRUNCATED_STDDEV
            return _distribution("truncated_normal", 0.0, stddev, seed)
        return _distribution("normal", 0.0, math.sqrt(variance), seed)
    raise ValueError(
        f"initializer {initializer!r} cannot be used: a table draws each column of a new row "
        "independently, from a constant, uniform, normal or truncated normal distribution."
    )


_VARIANCE_SCALING = (
    keras.initializers.VarianceScaling,
    keras.initializers.GlorotUniform,
    keras.initializers.GlorotNormal,
    keras.initializers.HeUniform,
    keras.initializers.HeNormal,
    keras.initializers.LecunUniform,
    keras.initializers.LecunNormal,
)


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _constant(value: Any, initializer: Any) -> InitialVector:
    try:
        number = float(value)
    except (TypeError, ValueError):
        shape = getattr(value, "shape", None)
        hint = "" if not shape else f" Its value has the shape {list(shape)}."
        raise ValueError(
            f"initializer {initializer!r} must be one number for all columns: it initializes rows "
            f"of any id.{hint} A list of numbers or initializers gives each column its own. For "
            "vectors that you have, make the table and then call tf_dynemb.assign(table, ids, "
            "vectors)."
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"initializer {initializer!r} must be a finite number.")
    return InitialVector(("constant",), (number, 0.0))


def _distribution(kind: str, first: Any, second: Any, seed: int | None) -> InitialVector:
    try:
        args = (float(first), float(second))
    except (TypeError, ValueError):
        raise ValueError(
            f"initializer {kind} needs two numbers, got {first!r}, {second!r}."
        ) from None
    if not all(math.isfinite(arg) for arg in args):
        raise ValueError(f"initializer {kind} needs two finite numbers, got {args}.")
    if kind == "uniform" and args[0] > args[1]:
        raise ValueError(f"initializer uniform needs minval <= maxval, got {args}.")
    if kind != "uniform" and args[1] < 0:
        raise ValueError(f"initializer {kind} needs stddev >= 0, got {args[1]}.")
    return InitialVector((kind,), args, seed)
