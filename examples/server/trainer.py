"""Trains a model, exports it, and publishes a delta of it every few seconds.

    python trainer.py FOLDER

A delta has the rows that have changed, and the dense weights. For each line on standard input, a
number, the trainer publishes this number of deltas; it ends with the input. Lines on standard
output say what it has done.

After each snapshot, the trainer writes to `probes.jsonl` how it scores a fixed request, so that
`load.py` can compare the server's answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from model import MODEL, PUBLISHED, ClickStream, build, scores_of

import tf_dynemb as de

PROBE = 16  # rows of the request
BATCH = 512


class Trainer:
    """The training process.

    Args:
        folder: where everything is published.
        users: the number of users, and of items.
        steps: the training steps before each snapshot.
    """

    def __init__(self, folder: Path, users: int, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._clicks = ClickStream(users)
        self._model = build()
        # The most frequent ids, whose vectors every delta has.
        self._probe = np.arange(PROBE), np.arange(PROBE)

    def export(self, warm_up: int, follow_seconds: float) -> None:
        """Trains, publishes a base, and exports the model over it."""
        published = self._folder / PUBLISHED
        optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
        self._model.compile(optimizer, "binary_crossentropy")
        self._train(warm_up)
        self._note(de.dump(published, self._model))
        de.export_saved_model(
            self._model,
            self._folder / MODEL,
            "link",
            published,
            follow=published,
            follow_seconds=follow_seconds,
        )

    def publish(self) -> None:
        """Trains, and publishes what has changed."""
        self._train(self._steps)
        self._note(de.incremental_dump(self._folder / PUBLISHED, self._model))

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            users, items, labels = self._clicks.batch(BATCH)
            self._model.train_on_batch([users[:, None], items[:, None]], labels[:, None])

    def _note(self, watermark: de.Watermark) -> None:
        """Records how the model of this watermark scores the probe."""
        published = time.time()
        users, items = self._probe
        scores = self._model.predict_on_batch([users[:, None], items[:, None]])
        noted: dict[str, Any] = {
            "id": watermark.id,
            "published": published,
            "users": users.tolist(),
            "items": items.tolist(),
            "scores": np.ravel(scores).tolist(),
        }
        with scores_of(self._folder).open("a") as file:
            file.write(json.dumps(noted) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--warm-up", type=int, default=200, help="training steps before the export")
    parser.add_argument("--steps", type=int, default=10, help="training steps before a delta")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds after a delta")
    parser.add_argument("--follow-seconds", type=float, default=0.1, help="between polls")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options.folder, options.users, options.steps)
    trainer.export(options.warm_up, options.follow_seconds)
    print("exported", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            trainer.publish()
            time.sleep(options.pause)
        print("published", flush=True)


if __name__ == "__main__":
    main()
