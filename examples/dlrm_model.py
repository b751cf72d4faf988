"""DLRM (Naumov et al., 2019, arXiv:1906.00091) with dynamic tables.

    dense features ──> bottom MLP ──┬──> products of all pairs ──┬──> top MLP ──> log odds
    26 bags of ids ──> tables ──────┘    of these 27 vectors     │
                       bottom MLP's output ──────────────────────┘

One operation looks up all tables. With several ranks, the rows of the tables are spread over the
ranks, and every rank has a copy of the MLPs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from criteo import DENSE, Samples

import tf_dynemb as de

# The name of every operation begins with one of these, or with "gradient_tape" (step_phases.py).
FORWARD, OPTIMIZER = "forward", "optimizer"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    Attributes:
        hotness: ids per sample of each feature.
        dim: width of the vectors that are multiplied, and of the bottom MLP's output.
        dims: width of the vectors of each table. Widths other than `dim` are projected to it.
        bottom: widths of the bottom MLP before its output.
        top: widths of the top MLP before its output, which is one number.
    """

    hotness: tuple[int, ...]
    dim: int
    dims: tuple[int, ...]
    bottom: tuple[int, ...]
    top: tuple[int, ...]


def _layer(units: int, activation: str | None) -> Any:
    """A dense layer with the initial weights of the reference implementation."""
    return keras.layers.Dense(
        units,
        activation,
        kernel_initializer=keras.initializers.GlorotNormal(),
        bias_initializer=keras.initializers.RandomNormal(stddev=units**-0.5),
    )


def dense_part(sizes: Sizes) -> keras.Model:
    """Maps dense features [B, 13] and a pooled vector per feature to log odds [B, 1]."""
    features = keras.Input((DENSE,), name="features")
    pooled = [keras.Input((dim,), name=f"pooled_{i}") for i, dim in enumerate(sizes.dims)]
    x: Any = features
    for units in (*sizes.bottom, sizes.dim):
        x = _layer(units, "relu")(x)
    vectors = [x] + [
        v if v.shape[1] == sizes.dim else keras.layers.Dense(sizes.dim, use_bias=False)(v)
        for v in pooled
    ]
    stacked = keras.ops.stack(vectors, axis=1)
    products = keras.ops.matmul(stacked, keras.ops.transpose(stacked, (0, 2, 1)))
    first, second = np.tril_indices(len(vectors), k=-1)
    flat = keras.ops.reshape(products, (-1, len(vectors) ** 2))
    pairs = keras.ops.take(flat, first * len(vectors) + second, axis=1)
    x = keras.ops.concatenate([x, pairs], axis=1)
    for units in sizes.top:
        x = _layer(units, "relu")(x)
    return keras.Model([features, *pooled], _layer(1, None)(x))


class Dlrm:
    """The tables, the MLPs and the optimizer, with methods to train and predict.

    Args:
        sizes: the sizes of the model.
        optimizer: a Keras optimizer, for the tables and the MLPs.
        spread: for each table, the bound of the uniform distribution of its initial vectors.
        seed: seed of the initial vectors.
        table_options: options of all tables, as in `de.DynamicVariable`.
    """

    def __init__(
        self,
        sizes: Sizes,
        optimizer: keras.optimizers.Optimizer,
        spread: Sequence[float],
        seed: int,
        **table_options: Any,
    ) -> None:
        self.sizes = sizes
        self.tables = [
            de.DynamicVariable(
                dimension=dim,
                initializer=keras.initializers.RandomUniform(-limit, limit, seed=seed + i),
                name=f"feature_{i}",
                **table_options,
            )
            for i, (dim, limit) in enumerate(zip(sizes.dims, spread, strict=True))
        ]
        self.dense = dense_part(sizes)
        self.optimizer = de.OptimizerWrapper(optimizer)
        # All ranks start with the same MLPs, even if their seeds differ.
        de.broadcast_variables(self.dense.variables)

    def _columns(self, ids: tf.Tensor) -> list[tf.Tensor]:
        """Splits ids by feature."""
        return tf.split(ids, self.sizes.hotness, axis=1)

    def look_ahead(self, batches: Iterable[Samples]) -> Iterator[Samples]:
        """Yields the batches; looks up the next ids while a batch is trained on."""
        for samples, ahead in de.prefetch_lookup(
            batches, self.tables, ids=lambda samples: self._columns(samples.ids)
        ):
            yield samples._replace(ids=ahead)

    def logits(self, dense: tf.Tensor, ids: Any, training: bool) -> tf.Tensor:
        """Returns log odds [B]. Unknown ids get rows only if `training`."""
        with tf.name_scope(FORWARD):
            columns = self._columns(ids) if tf.is_tensor(ids) else ids
            pooled = de.lookup_sparse(self.tables, columns, combiners="sum", insert=training)
            return self.dense([dense, *pooled], training=training)[:, 0]

    @tf.function(reduce_retracing=True)
    def step(self, dense: tf.Tensor, ids: Any, labels: tf.Tensor) -> tf.Tensor:
        """Trains on this rank's part of a batch and returns its loss."""
        with tf.GradientTape() as tape:
            logits = self.logits(dense, ids, training=True)
            with tf.name_scope(FORWARD):
                losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
                loss = tf.reduce_mean(losses)
        variables = [*self.tables, *self.dense.trainable_variables]
        gradients = tape.gradient(loss, variables)
        with tf.name_scope(OPTIMIZER):
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @tf.function(reduce_retracing=True)
    def chances(self, dense: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """Returns the predicted probabilities of a click, [B]."""
        return tf.sigmoid(self.logits(dense, ids, training=False))

    def predict(self, samples: Samples) -> np.ndarray:
        """Returns `chances` of samples as an array."""
        return self.chances(samples.dense, samples.ids).numpy()


class WarmUpThenDecay(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate of MLPerf's DLRM: a linear rise to `peak`, later a quadratic decay to 0.

    Args:
        peak: the highest rate.
        warm_up: steps until the peak is reached.
        decay_start: the step at which the rate begins to fall.
        decay_steps: the number of steps in which it falls; 0: it does not fall.
    """

    def __init__(self, peak: float, warm_up: int, decay_start: int, decay_steps: int) -> None:
        self.peak, self.warm_up = peak, warm_up
        self.decay_start, self.decay_steps = decay_start, decay_steps

    def __call__(self, step: Any) -> Any:
        step = tf.cast(step, tf.float32)
        rate = self.peak * tf.minimum(1.0, (step + 1.0) / max(self.warm_up, 1))
        if self.decay_steps:
            left = 1.0 - (step - self.decay_start) / self.decay_steps
            rate *= tf.square(tf.clip_by_value(left, 0.0, 1.0))
        return rate

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            "peak": self.peak,
            "warm_up": self.warm_up,
            "decay_start": self.decay_start,
            "decay_steps": self.decay_steps,
        }
