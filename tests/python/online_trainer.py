"""A trainer that exports a model, and then publishes what it learns, rows and dense weights.

    python online_trainer.py FOLDER COUNT [URL]

It writes FOLDER/model, which follows FOLDER/published, and prints "exported". With a URL, the chain
is there, and another process publishes it to FOLDER/published again and again. After a line on its
standard input, it publishes COUNT deltas. FOLDER/predictions has a line for each snapshot: its
id, and in hexadecimal the bytes of what the model then predicts for `PROBE`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np

import tf_dynemb as de

USERS, ITEMS, BATCH = 60, 30, 32
PROBE = {"user": np.arange(12)[:, None] * 5, "item": np.arange(36).reshape(12, 3) % ITEMS}


def build():
    """Returns a compiled model with two tables, BatchNormalization and dropout."""
    keras.utils.set_random_seed(4)
    user = keras.Input((1,), dtype="int64", name="user")
    item = keras.Input((3,), dtype="int64", name="item")
    vectors = [
        keras.layers.Flatten()(de.layers.Embedding(4, name="users")(user)),
        de.layers.EmbeddingBag(6, "mean", name="items")(item),
    ]
    hidden = keras.layers.Dense(8, "relu", name="hidden")(keras.layers.Concatenate()(vectors))
    hidden = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization(name="norm")(hidden))
    out = keras.layers.Dense(1, "sigmoid", name="out")(hidden)
    model = keras.Model({"user": user, "item": item}, out)
    model.compile(de.OptimizerWrapper(keras.optimizers.Adam(0.02)), "binary_crossentropy")
    return model


def batch(rng):
    """Returns a random batch: inputs, and labels."""
    inputs = {
        "user": rng.integers(0, USERS, (BATCH, 1)),
        "item": rng.integers(0, ITEMS, (BATCH, 3)),
    }
    return inputs, rng.integers(0, 2, (BATCH, 1)).astype(np.float32)


def count_of(url):
    """Returns how many deltas a test publishes to a place: 200, and fewer to a store in CI."""
    return int(os.environ.get("STORE_SNAPSHOTS", "40")) if url else 200


@contextlib.contextmanager
def trainer(folder, url=None):
    """Runs this program up to its export; yields the process, which must end without an error."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, __file__, folder, str(count_of(url)), *([url] if url else [])]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, **pipes))
        stack.callback(process.kill)
        assert process.stdout.readline() == "exported\n"
        if url:
            publish = [sys.executable, "-m", "tf_dynemb", "publish", url, folder / "published"]
            copying = stack.enter_context(subprocess.Popen([*publish, "--every", "0.05"]))
            stack.callback(copying.kill)
        yield process
        assert process.wait(300) == 0
        if url:
            copying.terminate()
            assert copying.wait(20) == 0


def predictions(folder):
    """Returns the predictions that a trainer has noted, in bytes, by the ids of snapshots."""
    lines = [line.split() for line in (folder / "predictions").read_text().splitlines()]
    noted = {id_: bytes.fromhex(bits) for id_, bits in lines}
    assert len(noted) == len(set(noted.values()))
    return noted


def main():
    folder = pathlib.Path(sys.argv[1])
    count, chain = int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else folder / "published"
    model, rng = build(), np.random.default_rng(5)
    with (folder / "predictions").open("w") as file:

        def note(watermark):
            bits = model.predict_on_batch(PROBE).tobytes().hex()
            file.write(f"{watermark.id} {bits}\n")

        model.train_on_batch(*batch(rng))
        note(de.dump(chain, model))
        de.export_saved_model(
            model,
            folder / "model",
            "copy",
            chain,
            follow=folder / "published",
            follow_seconds=0.01,
        )
        print("exported", flush=True)
        sys.stdin.readline()
        for _ in range(count):
            model.train_on_batch(*batch(rng))
            note(de.incremental_dump(chain, model))


if __name__ == "__main__":
    main()
