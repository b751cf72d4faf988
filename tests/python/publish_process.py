"""Trainings with Publish(resume=True), and their interruption by SIGKILL.

    python publish_process.py train PATH OUT          writes the bits of the result to OUT.RANK
    python publish_process.py die PATH OUT TIMES      the same; ranks can kill themselves before
    python publish_process.py kill PATH TIMES SEED [URL]    prints what `interrupt` returns

`kill` imports TensorFlow once, and forks for each training.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import pathlib
import random
import signal
import sys
import threading
import time
import traceback

import keras
import numpy as np
import table_reader

import tf_dynemb as de
from tf_dynemb import communicator
from tf_dynemb.ranks import launchers
from tf_dynemb.storage.places import place_of

BATCH, BATCHES, EPOCHS = 16, 12, 3


def data(rank=0):
    """Returns ids of users and items, and labels; each rank has its own."""
    rng = np.random.default_rng(7 + rank)
    count = BATCH * BATCHES
    users = rng.integers(0, 90, (count, 1))
    items = rng.integers(0, 40, (count, 3))
    return {"users": users, "items": items}, rng.integers(0, 2, (count, 1)).astype(np.float32)


def build(optimizer=None, seed=None):
    """Returns a compiled model with two tables, BatchNormalization and dropout."""
    if seed is not None:
        keras.utils.set_random_seed(seed)
    users = keras.Input((1,), dtype="int64", name="users")
    items = keras.Input((3,), dtype="int64", name="items")
    vectors = [
        keras.layers.Flatten()(de.layers.Embedding(4, name="user_table")(users)),
        de.layers.EmbeddingBag(6, "mean", name="item_table")(items),
    ]
    hidden = keras.layers.Dense(8, activation="relu")(keras.layers.Concatenate()(vectors))
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.3)(hidden)
    out = keras.layers.Dense(1, activation="sigmoid", name="out")(hidden)
    model = keras.Model({"users": users, "items": items}, out)
    model.compile(de.OptimizerWrapper(optimizer or keras.optimizers.Adam(0.02)), "mse")
    return model


def bits(model):
    """Returns all that determines how the training of a model goes on, for JSON."""
    found = {}
    for name, table in de.named_tables(model).items():
        rows = table_reader.rows_of(table)
        found[name] = [
            rows.keys.tolist(),
            rows.vectors.tobytes().hex(),
            hashlib.sha256(rows.state.tobytes()).hexdigest(),
        ]
    _, dense = de.filter_variables([*model.variables, *model.optimizer.variables])
    found["dense"] = [hashlib.sha256(np.asarray(each).tobytes()).hexdigest() for each in dense]
    return found


def fit(model, path, *callbacks, epochs=EPOCHS, **options):
    """Trains a model; returns its callback Publish."""
    inputs, labels = data(communicator.get().rank)
    publish = de.callbacks.Publish(path, **{"every": 3, "resume": True, **options})
    model.fit(
        inputs,
        labels,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks, publish],
    )
    return publish


class Interrupt(keras.callbacks.Callback):
    """Raises KeyboardInterrupt after a number of batches, on all ranks."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Begun(keras.callbacks.Callback):
    """Writes a byte to a pipe when `fit` begins, and after the first batch, which is traced."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe, self.batches = pipe, 0

    def on_train_begin(self, logs=None):
        os.write(self.pipe, b"!")

    def on_train_batch_end(self, batch, logs=None):
        if self.batches == 0:
            os.write(self.pipe, b"!")
        self.batches += 1


def train(path, out, begun=None, kills=0):
    """Trains as far as there is still to train, and then writes the bits of the result."""
    ranks = [] if launchers.find(os.environ) is None else [de.callbacks.SynchronizeRanks()]
    if ranks:
        de.init("gloo")
    rank = communicator.get().rank
    # What is loaded does not depend on the seed.
    is_first = not place_of(path).names()
    model = build(seed=1 + rank if is_first else os.getpid())
    callbacks = [*ranks]
    if begun is not None:
        callbacks.append(Begun(begun))
    if kills:
        callbacks.append(Die(f"{out}.kills", kills))
    fit(model, path, *callbacks, base_every=10)
    target = pathlib.Path(f"{out}.{rank}")
    partial = pathlib.Path(f"{target}.partial")
    partial.write_text(json.dumps(bits(model)))
    partial.rename(target)


class Die(keras.callbacks.Callback):
    """Kills this rank at a random moment of `fit`, in turns with the other ranks.

    Args:
        folder: where a file tells of each kill, also to the processes that are started again.
        times: the most kills.
    """

    def __init__(self, folder, times):
        super().__init__()
        self.folder, self.times, self.timer = pathlib.Path(folder), times, None

    def on_train_begin(self, logs=None):
        self.folder.mkdir(exist_ok=True)
        kills = len(list(self.folder.iterdir()))
        comm = communicator.get()
        comm.barrier()
        if kills < self.times and kills % comm.size == comm.rank:
            # Until the end of the first batch, TensorFlow traces for a second or two.
            delay = random.Random(f"{self.folder.name} {kills}").uniform(0, 3)
            self.timer = threading.Timer(delay, self.kill, (kills,))
            self.timer.start()

    def kill(self, number):
        (self.folder / str(number)).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, logs=None):
        if self.timer is not None:
            self.timer.cancel()


def interrupt(path, times, seed, url=None):
    """Kills trainings at random moments, and resumes them, until they end.

    Args:
        path: a folder for results and, without `url`, for chains.
        times: the least number of kills. There are more until one comes after a delta.
        seed: of the moments.
        url: a URL for chains.

    Returns:
        The numbers of kills, of trainings that ended, and of those that had other bits than one
        without kills; and, of the kills, how often the training had published a delta before.
    """
    rng = random.Random(seed)
    path.mkdir()
    # From the beginning of `fit`, and from the end of the first batch, which takes longest.
    chains = str(url or path)
    whole = [_run(f"{chains}/whole{after}", path / "expected", after, 1000) for after in (1, 2)]
    expected = (path / "expected.0").read_text()
    counts = collections.Counter(kills=0, trainings=0, wrong=0, after_delta=0)
    while counts["kills"] < times or not counts["after_delta"]:
        chain, out = f"{chains}/chain{counts['trainings']}", path / f"bits{counts['trainings']}"
        while True:
            after = rng.choice([1, 2, 2])
            if _run(chain, out, after, rng.uniform(0, whole[after - 1])) is not None:
                break
            counts["kills"] += 1
            names = place_of(chain).names()
            counts["after_delta"] += any(name.kind == "delta" for name in names)
        counts["trainings"] += 1
        counts["wrong"] += pathlib.Path(f"{out}.0").read_text() != expected
    return counts


def _run(path, out, after, limit):
    """Trains in a fork, which is killed some seconds after that many bytes of `Begun`.

    Returns:
        The seconds from then to the end; None if it was killed.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(path, out, write)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    for _ in range(after):
        os.read(read, 1)
    os.close(read)
    begin = time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, status
            return time.monotonic() - begin
        if time.monotonic() - begin > limit:
            break
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main():
    what, path, *others = sys.argv[1:]
    if what == "train":
        train(path, others[0])
    elif what == "die":
        train(path, others[0], kills=int(others[1]))
    else:
        print(json.dumps(interrupt(pathlib.Path(path), *map(int, others[:2]), *others[2:])))


if __name__ == "__main__":
    main()
