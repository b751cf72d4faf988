"""What callbacks put around the steps of `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def before_first_step(model: keras.Model, action: Callable[[], None]) -> None:
    """Builds a model when its first batch is available, and calls `action` before the first step.

    Keras would build it within the first step, which is too late to change weights before it.
    Building needs the shapes of the data, which are only passed to the function that runs a step.
    Several actions are called in the order of these calls.
    """
    step = model.train_function
    actions = getattr(step, "actions_before", None)
    if actions is not None:
        actions.append(action)
        return

    def first_step(iterator: Any) -> Any:
        model.train_function = step
        # Tracing creates the variables, and runs nothing.
        tf.function(model.train_step, autograph=False).get_concrete_function(iterator.element_spec)
        for each in first_step.actions_before:  # type: ignore[attr-defined]
            each()
        return step(iterator)

    first_step.actions_before = [action]  # type: ignore[attr-defined]
    model.train_function = first_step


def skip_batches(model: keras.Model, count: int, read: bool) -> None:
    """Makes the first steps of the next epoch train nothing.

    If the epoch is over before, or `fit` begins again, there is nothing more to skip.

    Args:
        model: a model in `fit`, before the first step.
        count: the number of batches, a multiple of the model's `steps_per_execution`.
        read: whether to read a batch from the data for each of them.
    """
    step = model.train_function
    left = count
    of_epoch = None

    def skip(iterator: Any) -> Any:
        nonlocal left, of_epoch
        of_epoch = of_epoch or iterator
        if left <= 0 or iterator is not of_epoch:
            model.train_function = step
            return step(iterator)
        for _ in range(model.steps_per_execution if read else 0):
            next(iterator)
        left -= model.steps_per_execution
        return {}

    model.train_function = skip
