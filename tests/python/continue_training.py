"""Training that continues from a dump: python continue_training.py PATH prints its result."""

from __future__ import annotations

import json
import pathlib
import sys

import keras
import numpy as np
import table_reader
import tensorflow as tf

import tf_dynemb as de

_OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adagrad": lambda: keras.optimizers.Adagrad(0.3),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "scheduled": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 7, 0.5)
    ),
    "nadam": lambda: keras.optimizers.Nadam(0.05),
    "schedulefree": lambda: keras.optimizers.ScheduleFreeAdamW(0.05),
}
_DTYPES = ("float32", "bfloat16")
CASES = [f"{optimizer}-{dtype}" for optimizer in _OPTIMIZERS for dtype in _DTYPES]


class Model:
    """Trains a table; each batch is a function of the number of the step."""

    def __init__(self, case):
        optimizer, dtype = case.split("-")
        self.table = de.DynamicVariable(
            5, "normal", name=case, seed=3, dtype=dtype, stochastic_rounding=True
        )
        self.optimizer = de.OptimizerWrapper(_OPTIMIZERS[optimizer]())
        self.step = 0

    def train(self, steps):
        for _ in range(steps):
            rng = np.random.default_rng(self.step)
            # Later steps use new keys.
            keys = rng.integers(0, 40 + 4 * self.step, 30)
            goals = rng.normal(size=(30, 5)).astype(np.float32)
            with tf.GradientTape() as tape:
                vectors = tf.cast(self.table.lookup(keys), tf.float32)
                loss = tf.reduce_sum((vectors - goals) ** 2)
            self.optimizer.apply_gradients([(tape.gradient(loss, self.table), self.table)])
            self.step += 1

    def bits(self):
        """Returns everything that determines how training continues, for JSON."""
        rows = table_reader.rows_of(self.table)
        variables = [
            np.asarray(variable).tolist()
            for variable in self.optimizer.variables
            if variable.shape == ()
        ]
        return [
            rows.keys.tolist(),
            rows.vectors.tobytes().hex(),
            rows.state.tobytes().hex(),
            rows.updates.tolist(),
            variables,
        ]


def main():
    found = {}
    for case in CASES:
        model = Model(case)
        de.load(pathlib.Path(sys.argv[1]) / case, [model.table], model.optimizer, quiet=True)
        model.step = 10
        model.train(20)
        found[case] = model.bits()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
