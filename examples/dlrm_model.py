"""DLRM (Naumov et al., 2019, arXiv:1906.00091) with dynamic tables.

    dense features ──> bottom MLP ──┬──> products of all pairs ──┬──> top MLP ──> log odds
    26 bags of ids ──> tables ──────┘    of these 27 vectors     │
                       bottom MLP's output ──────────────────────┘

All tables are looked up by one operation. On several ranks their rows are spread over the ranks,
and the MLPs are on every rank.
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

# Operations' names begin with one of these, or with "gradient_tape": so a step can be broken down.
FORWARD, OPTIMIZER = "forward", "optimizer"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    Attributes:
        hotness: ids of each feature in a sample.
        dim: of the vectors that are multiplied; the width of the bottom MLP's output.
        dims: of each table's vectors. Those of another width than `dim` go through a matrix.
        bottom: widths of the bottom MLP before its output.
        top: widths of the top MLP before its output, which is one number.
    """

    hotness: tuple[int, ...]
    dim: int
    dims: tuple[int, ...]
    bottom: tuple[int, ...]
    top: tuple[int, ...]


def _layer(units: int, activation: str | None) -> Any:
    """A dense layer that starts as those of the reference."""
    return keras.layers.Dense(
        units,
        activation,
        kernel_initializer=keras.initializers.GlorotNormal(),
        bias_initializer=keras.initializers.RandomNormal(stddev=units**-0.5),
    )


def dense_part(sizes: Sizes) -> keras.Model:
    """From dense features [B, 13] and a pooled vector of each feature to log odds [B, 1]."""
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
    """The tables, the MLPs and the optimizer, with a step for training and one for prediction.

    Args:
        sizes: of the model.
        optimizer: of Keras, for the tables and the MLPs.
        spread: for each table: its vectors start uniform between `-spread` and `spread`.
        seed: of the vectors that rows start with.
        table_options: of all tables, as in `de.DynamicVariable`.
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
        # The same MLPs on all ranks, whatever the seeds.
        de.broadcast_variables(self.dense.variables)

    def _columns(self, ids: tf.Tensor) -> list[tf.Tensor]:
        """The ids of each feature."""
        return tf.split(ids, self.sizes.hotness, axis=1)

    def look_ahead(self, batches: Iterable[Samples]) -> Iterator[Samples]:
        """The batches; the ids of each are looked up while the one before is trained on."""
        for samples, ahead in de.prefetch_lookup(
            batches, self.tables, ids=lambda samples: self._columns(samples.ids)
        ):
            yield samples._replace(ids=ahead)

    def logits(self, dense: tf.Tensor, ids: Any, training: bool) -> tf.Tensor:
        """Log odds [B]. Without `training` unknown ids get no rows."""
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
        """The predicted chances of a click, [B]."""
        return tf.sigmoid(self.logits(dense, ids, training=False))

    def predict(self, samples: Samples) -> np.ndarray:
        """As `chances`, of samples."""
        return self.chances(samples.dense, samples.ids).numpy()


class WarmUpThenDecay(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate of MLPerf's DLRM: up to `peak` by a line, later down to 0 by a square.

    Args:
        peak: the highest rate.
        warm_up: steps until it is reached.
        decay_start: the step at which it begins to fall.
        decay_steps: how long it falls; 0: it does not.
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
