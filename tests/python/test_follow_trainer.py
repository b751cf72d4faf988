"""A served model while a trainer in another process publishes deltas."""

import contextlib
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from delta_publisher import KEYS, MISSING, erased

import tf_dynemb as de  # noqa: F401  the operators

SNAPSHOTS = 200


def pause():
    time.sleep(0.003)
    return np.int64(0)


def as_of(keys, values):
    """Returns the number of the snapshot that answers have, and the values that are not its."""
    number = int(values.max())
    missing = erased(keys, number) if number else np.zeros(len(keys), bool)
    expected = np.where(missing, MISSING, number)[:, np.newaxis]
    return number, values[values != expected].tolist()


@pytest.mark.slow
def test_each_answer_belongs_to_a_watermark(tmp_path):
    """Whole, in all tables, with its watermark, and never older than an answer before."""
    script = pathlib.Path(__file__).with_name("delta_publisher.py")
    command = [sys.executable, str(script), str(tmp_path), str(SNAPSHOTS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    answers, stop = [[], []], threading.Event()
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(subprocess.Popen(command, **pipes))
        stack.callback(trainer.terminate)
        assert trainer.stdout.readline() == "exported\n"
        loaded = tf.saved_model.load(str(tmp_path / "model"))

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def serve(ids):
            vectors = loaded.serve(ids)
            with tf.control_dependencies(vectors):  # snapshots are published meanwhile
                paused = tf.numpy_function(pause, [], tf.int64)
            with tf.control_dependencies([paused]):
                return vectors, loaded.signatures["watermark"]()

        def ask(number):
            rng = np.random.default_rng(number)
            while not stop.is_set():
                keys = rng.choice(KEYS, 50)
                vectors, state = serve(keys)
                values = np.stack([part.numpy() for part in vectors])
                answers[number].append((*as_of(keys, values), state["id"].numpy().decode()))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(stop.set)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert trainer.wait(120) == 0
        end = time.monotonic() + 20
        while any(given[-1][0] != SNAPSHOTS for given in answers):
            state = loaded.signatures["watermark"]()
            assert time.monotonic() < end, state["follow_error"].numpy().decode()
            time.sleep(0.01)
    ids = (tmp_path / "ids").read_text().split()
    for given in answers:
        assert [wrong for _, wrong, _ in given if wrong] == []
        numbers = [number for number, _, _ in given]
        assert [id_ for _, _, id_ in given] == [ids[number] for number in numbers]
        assert numbers == sorted(numbers)
        assert len(set(numbers)) > SNAPSHOTS / 10
