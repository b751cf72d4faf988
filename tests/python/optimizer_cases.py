"""The optimizers that tests compare with Keras: a new one is added here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import tf_dynemb as de

K = keras.optimizers


class UserAdam(K.Adam):
    """A user's subclass: the operators do not know its computation."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(2.0 * tf.convert_to_tensor(gradient), variable, learning_rate)


class Signum(K.Optimizer):
    """A user's optimizer, whose settings are not in its config."""

    def __init__(self, decay, **kwargs):
        super().__init__(**kwargs)
        self.decay = decay
        self.averages = []

    def build(self, variables):
        super().build(variables)
        for variable in variables:
            average = self.add_variable_from_reference(variable, "average", "ones")
            self.averages.append(average)

    def update_step(self, gradient, variable, learning_rate):
        average = self.averages[self._get_variable_index(variable)]
        self.assign(average, average * self.decay + gradient)
        self.assign_sub(variable, learning_rate * keras.ops.sign(average))


class Case(NamedTuple):
    """An optimizer.

    Attributes:
        make: returns a new one.
        states: the number of its states in a row, each as wide as the vector or narrower.
        every_row: whether it changes rows without a gradient in Keras, which it does not in tables:
            it is compared on batches that have every row.
        is_generic: whether Keras's own code steps the rows, not an operator.
    """

    make: Callable[[], Any]
    states: int
    every_row: bool = True
    is_generic: bool = False


CASES = {
    "sgd": Case(lambda: K.SGD(0.1), 0, every_row=False),
    "sgd_decay": Case(lambda: K.SGD(0.1, weight_decay=0.01), 0),
    "momentum": Case(lambda: K.SGD(0.05, momentum=0.9), 1),
    "nesterov": Case(lambda: K.SGD(0.05, momentum=0.9, nesterov=True), 1),
    "adagrad": Case(lambda: K.Adagrad(0.1), 1, every_row=False),
    "rowwise": Case(lambda: de.RowwiseAdagrad(0.1), 1, every_row=False),
    "ftrl": Case(
        lambda: K.Ftrl(
            0.1,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
            l2_shrinkage_regularization_strength=0.01,
            beta=0.1,
        ),
        2,
    ),
    "ftrl_power": Case(lambda: K.Ftrl(0.1, learning_rate_power=-0.7), 2),
    "adam": Case(lambda: K.Adam(0.01), 2),
    "amsgrad": Case(lambda: K.Adam(0.01, amsgrad=True), 3),
    "adamw": Case(lambda: K.AdamW(0.01, weight_decay=0.1), 2),
    "adamax": Case(lambda: K.Adamax(0.01), 2),
    "rmsprop": Case(lambda: K.RMSprop(0.01), 1),
    "rmsprop_momentum": Case(lambda: K.RMSprop(0.01, momentum=0.5), 2),
    "rmsprop_centered": Case(lambda: K.RMSprop(0.01, centered=True, momentum=0.5), 3),
    "adadelta": Case(lambda: K.Adadelta(1.0), 2),
    "lion": Case(lambda: K.Lion(0.01), 1),
    "nadam": Case(lambda: K.Nadam(0.01), 2, is_generic=True),
    "adafactor": Case(lambda: K.Adafactor(0.01), 1, is_generic=True),
    "lamb": Case(lambda: K.Lamb(0.01), 2, is_generic=True),
    "muon": Case(lambda: K.Muon(0.01), 3, is_generic=True),
    "schedule_free_adamw": Case(
        lambda: K.ScheduleFreeAdamW(0.01, warmup_steps=5, weight_decay=0.01), 3, is_generic=True
    ),
    "user_adam": Case(lambda: UserAdam(0.01), 2, is_generic=True),
    "user_signum": Case(lambda: Signum(0.7, learning_rate=0.01), 1, is_generic=True),
}
