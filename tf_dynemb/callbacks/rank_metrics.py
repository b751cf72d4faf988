"""Results of training, reduced over all ranks: metrics, logs, and statistics of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import communicator
from tf_dynemb.variables.unwrap import filter_variables


def reduce_metrics(model: keras.Model) -> dict[str, Any]:
    """Reduces the states of a model's metrics over ranks, by the `aggregation` of each.

    Returns:
        The results of the metrics after that, by their names in logs.
    """
    variables = [
        variable
        for metric in model.metrics
        for variable in metric.variables
        if variable.aggregation in ("sum", "mean")
    ]
    _reduce(variables, [variable.aggregation == "mean" for variable in variables])
    return {name: _as_number(value) for name, value in model.get_metrics_result().items()}


def average_untrained(model: keras.Model) -> None:
    """Averages the dense weights that no optimizer trains; ranks may have changed them."""
    variables = [
        variable
        for variable in filter_variables(model.non_trainable_weights)[1]
        if tf.as_dtype(variable.dtype).is_floating
    ]
    _reduce(variables, [True] * len(variables))


def replace_logs(logs: dict[str, Any], values: dict[str, Any]) -> None:
    """Replaces the logs of this rank, in place, with the logs of all ranks.

    Args:
        logs: the logs of this rank.
        values: the logs that are already reduced over all ranks. Other numbers are replaced with
            their means over the ranks.

    Raises:
        ValueError: the ranks have logs of different names.
    """
    logs.update((name, value) for name, value in values.items() if name in logs)
    numbers = {}
    for name, value in logs.items():
        array = np.asarray(value)
        if name not in values and array.dtype.kind in "biuf":
            numbers[name] = array.astype(np.float64).tolist()
    gathered = communicator.get().gather_objects(numbers, "dynemb/logs")
    if any(rank_numbers.keys() != numbers.keys() for rank_numbers in gathered):
        each = ", ".join(
            f"{sorted(rank_numbers)} on rank {rank}" for rank, rank_numbers in enumerate(gathered)
        )
        raise ValueError(f"The logs must have the same names on all ranks, got {each}.")
    for name in numbers:
        rank_values = [rank_numbers[name] for rank_numbers in gathered]
        if any(value != rank_values[0] for value in rank_values):
            logs[name] = np.mean(rank_values, axis=0).tolist()


def _reduce(variables: Sequence[keras.Variable], average: Sequence[bool]) -> None:
    """Replaces Keras variables with their sums, or means, over the ranks."""
    if not variables:
        return
    comm = communicator.get()
    # As float64, so that the mean of equal numbers is that number.
    values = [tf.cast(variable.value, tf.float64) for variable in variables]
    sums = comm.allreduce(values, average=False, name="dynemb_metrics")
    for variable, total, mean in zip(variables, sums, average, strict=True):
        variable.assign(tf.cast(total / comm.size if mean else total, variable.dtype))


def _as_number(value: tf.Tensor) -> float | npt.NDArray[Any]:
    array = keras.ops.convert_to_numpy(value)
    return float(array) if array.ndim == 0 else array
