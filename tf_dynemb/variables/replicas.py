"""Dense variables, of which every rank has a copy: making the copies equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_dynemb.parallel.agreement import Ranks
from tf_dynemb.variables.unwrap import filter_variables, unwrap

# Variables are sent together up to this many bytes; a larger variable is sent alone.
_GROUP_BYTES = 64 << 20


def broadcast_variables(
    variables: Iterable[tf.Variable | keras.Variable], root_rank: int = 0
) -> None:
    """Gives dense variables the values that they have on one rank.

    The gradients of dense variables are reduced over the ranks, so variables that differ at the
    start remain different. Call this before the first step, unless all ranks start from the same
    seed or file. For `model.fit`, `tf_dynemb.callbacks.SynchronizeRanks` calls it. In one process
    this function only checks its arguments.

    Example:
    >>> bias = tf.Variable(tf.random.normal([3]))
    >>> broadcast_variables([bias])

    Args:
        variables: TensorFlow or Keras variables of any dtype that numpy knows, in the same order on
            all ranks. Tables and `tf_dynemb.Variable`s are skipped: each rank has a shard of them.
        root_rank: the rank whose values all ranks get.

    Raises:
        ValueError: `root_rank` is not one of the ranks; or the ranks have different numbers, types
            or shapes of variables.
        TypeError: an element is not a variable, or has no value yet.
        RuntimeError: the function was called inside a `tf.function`, or failed on another rank.
    """
    ranks = Ranks("broadcast_variables")
    with ranks.stage() as stage:
        if isinstance(root_rank, bool) or root_rank not in range(ranks.size):
            raise ValueError(f"root_rank must be in [0, {ranks.size}), got {root_rank!r}.")
        dense = [_resource(variable) for variable in filter_variables(variables)[1]]
        stage.say([root_rank, [_describe(variable) for variable in dense]])
    if ranks.size == 1:
        return
    _check_alike(stage.said)
    for group in _groups(dense):
        values = [np.asarray(variable.numpy(), order="C") for variable in group]
        joined = np.concatenate([value.reshape(-1).view(np.uint8) for value in values])
        joined = ranks.comm.broadcast(tf.constant(joined), root_rank, "dynemb/variables").numpy()
        if ranks.rank == root_rank:
            continue
        begin = 0
        for variable, value in zip(group, values, strict=True):
            part = joined[begin : begin + value.nbytes]
            begin += value.nbytes
            # Keras variables are unwrapped too: no constraint is applied, and no type is changed.
            variable.assign(part.view(value.dtype).reshape(value.shape))


def _resource(variable: tf.Variable) -> tf.Variable:
    resource = unwrap(variable)
    if not resource_variable_ops.is_resource_variable(resource):
        raise TypeError(f"variables must be variables that have a value, got {variable!r:.120}.")
    return resource


def _describe(variable: tf.Variable) -> str:
    return f"{variable.dtype.name} {list(variable.shape)}"


def _groups(variables: Sequence[tf.Variable]) -> Iterator[list[tf.Variable]]:
    """The variables that have elements, in groups that are sent together."""
    group: list[tf.Variable] = []
    held = 0
    for variable in variables:
        size = int(np.prod(variable.shape)) * variable.dtype.size
        if group and held + size > _GROUP_BYTES:
            yield group
            group, held = [], 0
        if size:
            group.append(variable)
            held += size
    if group:
        yield group


def _check_alike(said: Sequence[Any]) -> None:
    root, variables = said[0]
    for rank, (rank_root, rank_variables) in enumerate(said[1:], start=1):
        if rank_root != root:
            raise ValueError(f"root_rank is {root} on rank 0, but {rank_root} on rank {rank}.")
        if len(rank_variables) != len(variables):
            raise ValueError(
                f"There are {len(variables)} dense variables on rank 0, but {len(rank_variables)} "
                f"on rank {rank}."
            )
        for i, (here, there) in enumerate(zip(variables, rank_variables, strict=True)):
            if here != there:
                raise ValueError(
                    f"Dense variable {i} is {here} on rank 0, but {there} on rank {rank}."
                )
