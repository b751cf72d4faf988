"""Forks processes that train a persistent table, and kills them at random moments.

Run by test_persistent_tables.py: python flush_zygote.py PATH TRIALS. Prints a JSON object.

Each process opens the table, continues after the step of its last flush, and flushes every second
step. Steps depend on their number only, so the rows after a step are the same in every process.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
import zlib

import keras
import numpy as np
import table_reader
from file_pairs import in_files

import tf_dynemb as de

DIM, KEYS, BATCH = 128, 1500, 200


class Training:
    def __init__(self, path):
        self.table = in_files(
            path,
            DIM,
            rows=250,
            states=1,
            name="t",
            seed=3,
            persistent=True,
            evict_strategy="lfu",
        )
        self.optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
        self.optimizer.attach([self.table])
        counter = self.table.lookup(
            [-1], insert=False, default_value=np.zeros(DIM, np.float32)
        ).numpy()
        self.step = int(counter[0, 0])

    def train(self):
        self.step += 1
        rng = np.random.default_rng(self.step)
        keys = np.unique(rng.integers(0, KEYS, BATCH))
        self.table.lookup(keys, insert=True)
        gradients = rng.normal(size=(len(keys), DIM)).astype(np.float32)
        self.optimizer.apply_gradients([(_slices(gradients, keys), self.table)])
        self.table.erase(rng.integers(0, KEYS, 5))
        self.table.upsert([-1], np.full((1, DIM), self.step, np.float32))

    def content(self):
        """The step, and a checksum of the keys, vectors, state and counts of all rows."""
        rows = table_reader.rows_of(self.table)
        counts = self.table.scores(rows.keys).numpy()
        data = b"".join(a.tobytes() for a in (rows.keys, rows.vectors, rows.state, counts))
        return self.step, zlib.crc32(data)


def _slices(gradients, keys):
    import tensorflow as tf

    return tf.IndexedSlices(tf.constant(gradients), tf.constant(keys))


def train_for_ever(path, out):
    """Writes lines: "opened step crc", and before and after each flush "begin|end step crc"."""

    def say(word, step, crc):
        os.write(out, f"{word} {step} {crc}\n".encode())

    training = Training(path)
    say("opened", *training.content())
    while True:
        training.train()
        training.train()
        content = training.content()
        say("begin", *content)
        training.table.flush()
        say("end", *content)


def fork(path):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            train_for_ever(path, write)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(write)
    return pid, read


def run(path, wait_for, delay):
    """Kills a process `delay` seconds after it has said `wait_for`; returns its lines."""
    pid, read = fork(path)
    said = b""
    deadline = None if wait_for else time.perf_counter() + delay
    started = time.perf_counter()
    while deadline is None or time.perf_counter() < deadline:
        assert time.perf_counter() - started < 60, said
        left = 1.0 if deadline is None else max(0.0, deadline - time.perf_counter())
        if select.select([read], [], [], left)[0]:
            part = os.read(read, 1 << 16)
            assert part, "the process has ended"
            said += part
        if deadline is None and wait_for.encode() in said:
            deadline = time.perf_counter() + delay
    os.kill(pid, signal.SIGKILL)
    while part := os.read(read, 1 << 16):
        said += part
    os.close(read)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the process ended by itself: {status}"
    lines = [line.split() for line in said.decode().splitlines()]
    return [(word, int(step), int(crc)) for word, step, crc in lines]


def main(path, trials):
    random.seed(1)
    crcs = {0: None}  # after each step
    acknowledged = 0
    counts = {"trials": 0, "opened": 0, "flushes": 0, "unacknowledged": 0, "during a flush": 0}
    span = 0.5  # from the fork to "opened"
    for _ in range(trials):
        before = acknowledged
        kind = random.random()
        started = time.perf_counter()
        if kind < 0.25:  # while the table is opened
            lines = run(path, "", random.random() * span * 1.3)
        else:  # in a step or a flush
            # Most delays are short: a flush takes some milliseconds.
            delay = random.random() ** 4 * 0.25
            lines = run(path, random.choice(["opened", "begin", "begin"]), delay)
            span = min(span, time.perf_counter() - started)
        counts["trials"] += 1
        for word, step, crc in lines:
            if word == "opened":
                counts["opened"] += 1
                assert step >= before, f"flushed step {before} was lost: the table has {step}"
                counts["unacknowledged"] += step > before
                # The rows are the flush's, whichever process made it.
                assert step == 0 or crcs.get(step) == crc, f"the rows of step {step} differ"
            elif word == "begin":
                assert crcs.setdefault(step, crc) == crc, f"step {step} differs"
            else:
                acknowledged = step
                counts["flushes"] += 1
        counts["during a flush"] += bool(lines) and lines[-1][0] == "begin"
    counts["last"] = acknowledged
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
