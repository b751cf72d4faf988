"""Trains on the workers of a Ray cluster: the table is spread over them.

    pip install "ray[train]"
    python examples/launchers/ray_train.py --workers 2

Ray's TensorflowTrainer sets TF_CONFIG for each worker, in which `de.init()` finds the ranks. The
workers do not use `tf.distribute`: the optimizer averages gradients, and tables are spread.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

WORKERS = 2


def train(config: dict[str, Any]) -> None:
    """Runs in each worker: trains on this rank's part of the samples."""
    import keras
    import numpy as np
    from ray import train as session

    import tf_dynemb as de
    from tf_dynemb import communicator

    de.init()
    comm = communicator.get()
    random = np.random.default_rng(0)
    ids = random.integers(0, 10_000, (config["samples"], 4))
    labels = (ids.sum(1) % 2).astype(np.float32)
    share = slice(comm.rank, None, comm.size)

    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int64"),
            de.layers.Embedding(8),
            keras.layers.Flatten(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    optimizer = de.OptimizerWrapper(keras.optimizers.Adam(0.01))
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    history = model.fit(
        ids[share],
        labels[share],
        batch_size=256 // comm.size,
        epochs=config["epochs"],
        shuffle=False,
        callbacks=[de.callbacks.SynchronizeRanks()],
        verbose=0,
    )
    table = model.layers[0].table
    rows = comm.gather_objects(len(table), "rows")
    result = {"loss": history.history["loss"][-1], "ranks": comm.size, "rows": sum(rows)}
    session.report(result)
    if comm.rank == 0:
        print(f"trained: {json.dumps(result)}", flush=True)


def main() -> None:
    """Trains; rank 0 prints the result."""
    from ray.train import ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"samples": options.samples, "epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=options.workers),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
