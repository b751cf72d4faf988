"""26 tables at once: pooled lookups, and training steps with Adagrad and Adam.

Static variables use one `embedding_lookup_sparse` per table, as their users do. The peers' hash
tables do the same explicitly (unique, lookup, segment sum), as TFRA's own function does.
DenseHashTable cannot be trained. A training step is a GradientTape and the optimizer in one graph
function. Static variables are updated in the touched rows only, as our tables are, by the fastest
means that TensorFlow has; with `--keras-peer` they use Keras's optimizers, which work on all rows.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.harness import (
    DENSE,
    OURS,
    TFRA,
    Result,
    add_contenders,
    finish,
    parser_for,
    rates,
    use_threads,
    warm_memory,
)
from benchmarks.peers import Ours, Peer, Static, Tfra, empty_table, fill
from benchmarks.workload import Draws, Rows

ZIPF = 1.05
DISTINCT_STEPS = 4  # Batches that a case cycles through.
LEARNING_RATE = 0.01
Ids = list[tf.Tensor]
Step = Callable[[Ids], Any]


def filled(name: str, tables: int, dim: int, rows: int, batch: int) -> list[Peer]:
    """Creates tables of `rows` rows each."""
    peers = [empty_table(name, dim, rows, sized=True) for _ in range(tables)]
    fill(peers, dim, range(rows), batch)
    return peers


def pooled(
    peers: list[Any], ids: Ids, samples: int, hotness: int, train: bool = False
) -> list[tf.Tensor]:
    """Returns the sum of `hotness` vectors for each sample, from every table."""
    sample = tf.repeat(tf.range(samples, dtype=tf.int64), hotness)
    place = tf.tile(tf.range(hotness, dtype=tf.int64), [samples])
    indices = tf.stack([sample, place], axis=1)
    sparse = [tf.SparseTensor(indices, part, [samples, hotness]) for part in ids]
    if isinstance(peers[0], Ours):
        import tf_dynemb as de

        return de.lookup_sparse([peer.variable for peer in peers], sparse, combiners="sum")
    if isinstance(peers[0], Static):
        return [
            tf.nn.embedding_lookup_sparse(peer.variable, part, None, combiner="sum")
            for peer, part in zip(peers, sparse, strict=True)
        ]
    outputs = []
    for peer, part in zip(peers, ids, strict=True):
        keys, position = tf.unique(part)
        vectors = peer.train_lookup(keys) if train else peer.lookup_keys(keys)
        outputs.append(tf.sparse.segment_sum(vectors, position, sample))
    return outputs


class RowsTouchedAdagrad:
    """Adagrad on static variables with TensorFlow's own sparse kernel."""

    def __init__(self, variables: list[tf.Variable]) -> None:
        self._accumulators = [tf.Variable(tf.fill(v.shape, 0.1)) for v in variables]

    def apply_gradients(self, gradients_and_variables: Any) -> None:
        """Updates the rows in each gradient, whose indices are distinct."""
        for (gradient, variable), accumulator in zip(
            gradients_and_variables, self._accumulators, strict=True
        ):
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=variable.handle,
                accum=accumulator.handle,
                lr=LEARNING_RATE,
                epsilon=1e-7,
                grad=gradient.values,
                indices=gradient.indices,
            )


class RowsTouchedAdam:
    """Adam on static variables that changes only the rows that a step touches."""

    BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7

    def __init__(self, variables: list[tf.Variable]) -> None:
        self._first = [tf.Variable(tf.zeros_like(v)) for v in variables]
        self._second = [tf.Variable(tf.zeros_like(v)) for v in variables]
        self._step = tf.Variable(0.0)

    def apply_gradients(self, gradients_and_variables: Any) -> None:
        """Updates the rows in each gradient, whose indices are distinct."""
        step = self._step.assign_add(1.0)
        rate = LEARNING_RATE * tf.sqrt(1 - self.BETA_2**step) / (1 - self.BETA_1**step)
        for (gradient, variable), first, second in zip(
            gradients_and_variables, self._first, self._second, strict=True
        ):
            rows, g = gradient.indices, gradient.values
            m = self.BETA_1 * tf.gather(first, rows) + (1 - self.BETA_1) * g
            v = self.BETA_2 * tf.gather(second, rows) + (1 - self.BETA_2) * g * g
            first.scatter_update(tf.IndexedSlices(m, rows))
            second.scatter_update(tf.IndexedSlices(v, rows))
            delta = rate * m / (tf.sqrt(v) + self.EPSILON)
            variable.scatter_sub(tf.IndexedSlices(delta, rows))


KERAS_OPTIMIZERS = {"adagrad": "Adagrad", "adam": "Adam"}
ROWS_TOUCHED_OPTIMIZERS = {"adagrad": RowsTouchedAdagrad, "adam": RowsTouchedAdam}


def optimizer_for(name: str, peers: list[Any], keras_peer: bool) -> Any:
    """Creates the optimizer of a contender."""
    if isinstance(peers[0], Tfra):
        return Tfra.optimizer(KERAS_OPTIMIZERS[name], LEARNING_RATE)
    if isinstance(peers[0], Static) and not keras_peer:
        return ROWS_TOUCHED_OPTIMIZERS[name]([peer.variable for peer in peers])
    import keras

    optimizer = getattr(keras.optimizers, KERAS_OPTIMIZERS[name])(LEARNING_RATE)
    if isinstance(peers[0], Static):
        return optimizer
    import tf_dynemb as de

    return de.OptimizerWrapper(optimizer)


def forward_step(peers: list[Any], samples: int, hotness: int) -> Step:
    """Returns a graph function that pools."""
    return tf.function(lambda ids: pooled(peers, ids, samples, hotness), autograph=False)


def training_step(peers: list[Any], samples: int, hotness: int, optimizer: Any) -> Step:
    """Returns a graph function that pools, differentiates and updates."""
    variables = [getattr(peer, "shadow", peer.variable) for peer in peers]

    @tf.function(autograph=False)
    def step(ids: Ids) -> tf.Tensor:
        with tf.GradientTape() as tape:
            vectors = pooled(peers, ids, samples, hotness, train=True)
            loss = tf.add_n([tf.reduce_sum(part) for part in vectors])
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
        return loss

    return step


def step_for(options: argparse.Namespace, peers: list[Any], hotness: int) -> Step:
    """Returns the step of options.optimizer, or the forward pass alone."""
    if options.optimizer == "none":
        return forward_step(peers, options.samples, hotness)
    keras_peer = getattr(options, "keras_peer", False)
    optimizer = optimizer_for(options.optimizer, peers, keras_peer)
    return training_step(peers, options.samples, hotness, optimizer)


def draw_steps(draws: Draws, tables: int, count: int) -> list[list[Rows]]:
    """Draws the row numbers of the steps of a case: `count` per table."""
    return [[draws.take(count) for _ in range(tables)] for _ in range(DISTINCT_STEPS)]


def run_steps(step: Step, batches: list[Ids], count: int) -> None:
    """Runs `count` steps, and waits for the last."""
    for number in range(count):
        step(batches[number % len(batches)])
    tf.test.experimental.sync_devices()  # a GPU works on when the call of a step has returned


def present_cases(options: Any, peers: dict[str, list[Peer]]) -> Iterator[Result]:
    """Measures ids that are in the tables, drawn uniformly and by Zipf's law."""
    what = "forward" if options.optimizer == "none" else f"train {options.optimizer}"
    if options.keras_peer:
        what += " (static: Keras)"
    for exponent, hotness in ((e, h) for e in (None, ZIPF) for h in options.hotness):
        draws = Draws(options.rows, exponent, seed=4)
        numbers = draw_steps(draws, options.tables, options.samples * hotness)
        steps = max(2, options.steps // hotness)
        actions = {}
        for name, tables in peers.items():
            batches = [[tables[0].ids(part) for part in batch] for batch in numbers]
            step = step_for(options, tables, hotness)
            actions[name] = partial(run_steps, step, batches, steps)
        label = "uniform" if exponent is None else f"zipf {exponent}"
        yield Result(
            f"sparse {what}, {label}, hotness {hotness}",
            "steps/s",
            rates(actions, steps, options.repeats),
        )


def new_ids_case(options: argparse.Namespace, names: list[str]) -> Result:
    """Measures training steps with only new ids, for tables that grow while they train."""

    def measure(name: str) -> list[float]:
        warm_memory()
        peers = [empty_table(name, options.dim, 0, sized=False) for _ in range(options.tables)]
        step = step_for(options, peers, 1)
        seen = 0

        def new_batch() -> Ids:
            nonlocal seen
            ids = peers[0].ids(np.arange(seen, seen + options.samples))
            seen += options.samples
            return [ids] * options.tables

        values = []
        for _ in range(options.repeats + 1):
            batches = [new_batch() for _ in range(options.steps)]
            action = partial(run_steps, step, batches, options.steps)
            values += rates({name: action}, options.steps, repeats=1, warm_up=0)[name]
        return values[1:]

    return Result(
        f"sparse train {options.optimizer}, all ids new, hotness 1",
        "steps/s",
        {name: measure(name) for name in names},
    )


def main() -> None:
    """Runs the cases for one optimizer, or none, and prints them."""
    parser = parser_for(__doc__)
    add_contenders(parser)
    add = parser.add_argument
    add(
        "--optimizer",
        choices=("none", "adagrad", "adam"),
        default="none",
        help="none: forward pass only",
    )
    add("--keras-peer", action="store_true", help="train static variables with Keras's optimizers")
    add("--tables", type=int, default=26, help="tables per step")
    add("--rows", type=int, default=1_000_000, help="rows per table")
    add("--dim", type=int, default=16, help="floats per vector")
    add("--samples", type=int, default=8_192, help="samples per step")
    add("--hotness", type=int, nargs="+", default=[1, 10], help="ids per sample and table")
    add("--steps", type=int, default=20, help="steps per repeat; divided by the hotness")
    options = parser.parse_args()
    use_threads(options.threads)

    # Only variables can be trained.
    names = [name for name in options.contenders if options.optimizer == "none" or name != DENSE]
    peers = {
        name: filled(name, options.tables, options.dim, options.rows, 1 << 17) for name in names
    }
    results = list(present_cases(options, peers))
    growing = [name for name in names if name in (OURS, TFRA)]
    if options.optimizer != "none" and growing:
        peers.clear()
        gc.collect()
        results.append(new_ids_case(options, growing))
    finish(results, options.json)


if __name__ == "__main__":
    main()
