"""Trains DLRM on Criteo's clicks with OneEmbedding's names: OneFlow's script with another import.

    python examples/oneembedding/dlrm.py                      # small, synthetic clicks
    python examples/oneembedding/dlrm.py --data_dir /data/criteo1t_parquet --store_type cached_ssd \
        --persistent_path /ssd/embedding
    horovodrun -np 8 python examples/oneembedding/dlrm.py --data_dir ... --persistent_path ...

The flags and the model come from RecommenderSystems/dlrm in OneFlow's models. Flags that only
choose kernels of OneFlow (fused MLP, padding for tensor cores, loss scaling) are not there. The
effects of other ranks and another store are in docs/migrating_from_oneembedding.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the modules that all examples share

import clicks
import flags as shared
import keras
import numpy as np
import tensorflow as tf
import tqdm
from clicks import DENSE, SPARSE, Batch
from dlrm_model import WarmUpThenDecay
from scoring import score_of_all

import tf_dynemb as de
import tf_dynemb.oneembedding as one_embedding
from tf_dynemb import communicator

OF_ONEFLOW: dict[str, Any] = {
    "embedding_vec_size": 128,
    "bottom_mlp": [512, 256, 128],
    "top_mlp": [1024, 1024, 512, 256],
    "eval_batches": 1612,
    "eval_batch_size": 55296,
    "eval_interval": 10000,
    "train_batch_size": 55296,
    "learning_rate": 24.0,
    "warmup_batches": 2750,
    "decay_batches": 27772,
    "decay_start": 49315,
    "train_batches": 75000,
    "loss_print_interval": 1000,
    "table_size_array": list(shared.ROWS),
}
SMALL: dict[str, Any] = {
    "embedding_vec_size": 8,
    "bottom_mlp": [32, 8],
    "top_mlp": [64, 32],
    "eval_batches": 4,
    "eval_batch_size": 1024,
    "eval_interval": 60,
    "train_batch_size": 512,
    "learning_rate": 0.5,
    "warmup_batches": 5,
    "decay_batches": 60,
    "decay_start": 60,
    "train_batches": 120,
    "loss_print_interval": 40,
    "table_size_array": [min(rows, 200) for rows in shared.ROWS],
}


def mlp(units: list[int], x: Any, skip_final_activation: bool = False) -> Any:
    """Dense layers; ReLU after each, or after all except the last."""
    for number, width in enumerate(units):
        is_last = number + 1 == len(units)
        x = keras.layers.Dense(
            width,
            None if is_last and skip_final_activation else "relu",
            kernel_initializer=keras.initializers.VarianceScaling(
                1.0, "fan_avg", "untruncated_normal"
            ),
            bias_initializer=keras.initializers.RandomNormal(stddev=width**-0.5),
        )(x)
    return x


def interaction(dense: Any, vectors: Any, with_itself: bool) -> Any:
    """The vector of the dense features, and the products of all pairs of vectors.

    Args:
        dense: [batch, width].
        vectors: [batch, features, width].
        with_itself: whether a vector and itself are a pair.
    """
    together = keras.ops.concatenate([keras.ops.expand_dims(dense, 1), vectors], 1)
    products = keras.ops.matmul(together, keras.ops.transpose(together, (0, 2, 1)))
    count = together.shape[1]
    first, second = np.tril_indices(count, 0 if with_itself else -1)
    flat = keras.ops.reshape(products, (-1, count * count))
    pairs = keras.ops.take(flat, first * count + second, axis=1)
    return keras.ops.concatenate([dense, pairs], 1)


class Dlrm:
    """The embedding, the dense part and the optimizer."""

    def __init__(self, flags: argparse.Namespace) -> None:
        if flags.embedding_vec_size != flags.bottom_mlp[-1]:
            raise ValueError(
                f"--embedding_vec_size={flags.embedding_vec_size} must be the last of "
                f"--bottom_mlp={flags.bottom_mlp}"
            )
        sizes = flags.table_size_array
        self.embedding = one_embedding.MultiTableEmbedding(
            "sparse_embedding",
            embedding_dim=flags.embedding_vec_size,
            dtype=tf.float32,
            key_type=flags.one_embedding_key_type,
            tables=shared.uniform_tables(sizes),
            store_options=shared.store_options(flags, capacity=sum(sizes)),
            seed=flags.seed,
        )
        dense = keras.Input([DENSE], name="dense_fields")
        vectors = keras.Input([SPARSE, flags.embedding_vec_size], name="embedding")
        bottom = mlp(flags.bottom_mlp, keras.ops.log(dense + 1.0))
        features = interaction(bottom, vectors, flags.interaction_itself)
        logits = mlp([*flags.top_mlp, 1], features, skip_final_activation=True)
        self.dense = keras.Model([dense, vectors], logits)
        de.broadcast_variables(self.dense.variables)
        rate = WarmUpThenDecay(
            flags.learning_rate, flags.warmup_batches, flags.decay_start, flags.decay_batches
        )
        self.optimizer = de.OptimizerWrapper(keras.optimizers.SGD(rate))

    @tf.function
    def train(self, labels: Any, dense: Any, sparse: Any) -> Any:
        """Trains on a batch and returns its loss."""
        with tf.GradientTape() as tape:
            logits = self.dense([dense, self.embedding(sparse)], training=True)[:, 0]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        variables = [*self.embedding.trainable_variables, *self.dense.trainable_variables]
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @tf.function
    def predict(self, dense: Any, sparse: Any) -> Any:
        """Returns the probabilities of clicks [batch]. Unknown ids get no row."""
        vectors = self.embedding(sparse, training=False)
        return tf.sigmoid(self.dense([dense, vectors], training=False)[:, 0])

    def save(self, folder: Path, rank: int) -> None:
        """Saves the dense part in a folder, and the embedding as the snapshot of its name."""
        self.embedding.save_snapshot(folder.name)
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self.dense.save_weights(folder / "dense.weights.h5")
            print(f"saved {folder}", flush=True)

    def load(self, folder: Path) -> None:
        """Loads what `save` saved, with the same --persistent_path."""
        self.dense.load_weights(folder / "dense.weights.h5")
        self.embedding.load_snapshot(folder.name, self.optimizer)


def tensors(batch: Batch, key_type: str) -> tuple[Any, Any, Any]:
    """Returns the labels, dense features and ids of a batch as tensors."""
    sparse = batch.sparse.astype(key_type)
    return tf.constant(batch.labels), tf.constant(batch.dense), tf.constant(sparse)


def evaluate(model: Dlrm, batches: list[Batch], flags: argparse.Namespace) -> float:
    """Returns the AUC of all ranks on rank 0, and 0 on the others."""
    comm = communicator.get()
    labels, chances = [], []
    for batch in batches:
        batch_labels, dense, sparse = tensors(batch, flags.one_embedding_key_type)
        labels.append(batch_labels.numpy())
        chances.append(model.predict(dense, sparse).numpy())
    scores = score_of_all(comm, np.concatenate(labels), np.concatenate(chances))
    return 0.0 if scores is None else scores["auc"]


def run(flags: argparse.Namespace) -> None:
    """Trains and evaluates."""
    de.init()
    comm = communicator.get()
    keras.utils.set_random_seed(flags.seed)
    if flags.train_batch_size % comm.size:
        raise ValueError(
            f"--train_batch_size {flags.train_batch_size} is no multiple of {comm.size} ranks"
        )
    train, test = shared.open_data(
        flags,
        flags.train_batch_size,
        flags.train_batches,
        flags.eval_batch_size,
        flags.eval_batches,
    )
    tests = [
        batch.part(comm.rank, comm.size) for batch in itertools.islice(test(), flags.eval_batches)
    ]
    if not tests:
        raise ValueError(
            f"the test has less than --eval_batch_size={flags.eval_batch_size} samples"
        )
    model = Dlrm(flags)
    if flags.model_load_dir:
        model.load(flags.model_load_dir)

    def save(name: str) -> None:
        if flags.model_save_dir:
            model.save(flags.model_save_dir / name, comm.rank)

    def report(step: int) -> None:
        auc = evaluate(model, tests, flags)
        if comm.rank == 0:
            print(f"step {step}: AUC {auc:.5f}", flush=True)
        if flags.save_model_after_each_eval:
            save(f"step_{step}_val_auc_{auc:.5f}" if comm.size == 1 else f"step_{step}")

    if flags.save_initial_model:
        save("initial_checkpoint")
    batches = clicks.endless(train)
    began, since, step = time.perf_counter(), 0, 0
    steps = range(1, flags.train_batches + 1)
    for step in tqdm.tqdm(steps, "train", unit="batch", disable=comm.rank > 0):
        batch = next(batches).part(comm.rank, comm.size)
        loss = model.train(*tensors(batch, flags.one_embedding_key_type))
        if step % flags.loss_print_interval == 0 and comm.rank == 0:
            took = (time.perf_counter() - began) / (step - since)
            rate = flags.train_batch_size / took
            print(f"step {step}: loss {loss:.4f}, {rate:,.0f} samples/s", flush=True)
            began, since = time.perf_counter(), step
        if flags.eval_interval > 0 and step % flags.eval_interval == 0:
            report(step)
            began, since = time.perf_counter(), step
    if flags.eval_interval > 0 and (step % flags.eval_interval or not step):
        report(step)
    rows = comm.gather_objects(sum(len(table) for table in model.embedding.tables), "dlrm/rows")
    if comm.rank == 0:
        print(f"rows of each rank: {', '.join(f'{count:,}' for count in rows)}")


def parse_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shared.add_flags(parser)
    add("--embedding_vec_size", type=int, help="width of the vectors")
    add("--one_embedding_key_type", choices=("int32", "int64"), default="int64", help="of the ids")
    add("--bottom_mlp", type=shared.numbers, help="widths of the bottom MLP, by commas")
    add("--top_mlp", type=shared.numbers, help="widths of the top MLP before its one output")
    add("--interaction_itself", action="store_true", help="multiply vectors with themselves, too")
    add("--save_model_after_each_eval", action="store_true", help="save the model at evaluations")
    add("--eval_batches", type=int, help="number of batches of an evaluation")
    add("--eval_batch_size", type=int, help="samples of these batches")
    add("--eval_interval", type=int, help="steps between evaluations; 0: none")
    add("--train_batch_size", type=int, help="samples of a step, over all ranks")
    add("--learning_rate", type=float, help="the highest learning rate of SGD")
    add("--warmup_batches", type=int, help="steps in which the learning rate rises")
    add("--decay_batches", type=int, help="steps in which it falls to 0")
    add("--decay_start", type=int, help="step at which it begins to fall")
    add("--train_batches", type=int, help="number of steps; 0: only evaluate")
    add("--loss_print_interval", type=int, help="steps between two lines of output")
    add("--table_size_array", type=shared.numbers, help="distinct ids of each sparse feature")
    return shared.with_defaults(parser, arguments, OF_ONEFLOW, SMALL)


if __name__ == "__main__":
    run(parse_flags())
