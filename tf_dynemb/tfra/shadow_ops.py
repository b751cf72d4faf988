"""TFRA's shadow variables: here a table is trained itself, so a shadow is the table."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_dynemb.ids.types import TensorLike
from tf_dynemb.tfra import lookups
from tf_dynemb.tfra.variable import Variable


def ShadowVariable(  # noqa: N802 (TFRA's name of a class)
    params: Variable,
    name: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
    **kwargs: Any,
) -> Variable:
    """Returns `params`, which optimizers accept.

    Args:
        params: a `Variable`.
        name: unused.
        max_norm: must be None: pass it to `embedding_lookup`.
        trainable: must equal the variable's `trainable`.
        **kwargs: unused.

    Raises:
        TypeError: `params` is not a `Variable`.
        ValueError: `max_norm` or `trainable` has another value.
    """
    if not isinstance(params, Variable):
        raise TypeError(f"params must be a Variable, got {params!r:.80}.")
    if max_norm is not None:
        raise ValueError(f"max_norm={max_norm!r}: pass it to embedding_lookup.")
    if bool(trainable) != params.trainable:
        raise ValueError(f"trainable={trainable!r}, but {params.name} has {params.trainable}.")
    return params


def embedding_lookup(
    shadow: Variable,
    ids: TensorLike,
    partition_strategy: Any = None,
    name: str | None = None,
    validate_indices: Any = None,
) -> tf.Tensor:
    """Reads one vector for each id; see `tf_dynemb.tfra.embedding_lookup`."""
    return lookups.embedding_lookup(shadow, ids)


def embedding_lookup_unique(
    shadow: Variable,
    ids: Any,
    embedding_size: int | None = None,
    with_unique: bool = True,
    name: str | None = None,
) -> tf.Tensor | tf.RaggedTensor:
    """Same as `embedding_lookup`; accepts a RaggedTensor too."""
    if hasattr(ids, "with_flat_values"):
        return ids.with_flat_values(lookups.embedding_lookup(shadow, ids.flat_values))
    return lookups.embedding_lookup(shadow, ids)
