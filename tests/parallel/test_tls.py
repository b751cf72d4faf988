"""Ranks with TLS, as processes: they train as ranks without it do, and one that is killed is named.

tests/python/test_tls.py has what is encrypted, and whom ranks admit.
"""

from __future__ import annotations

import json
import sys

import certificates
import pytest

from parallel import launch

pytestmark = pytest.mark.slow

LIMIT = 150

# Trains a table and a dense layer, and writes what the rank has then.
TRAIN = """
import json, pathlib, sys

import keras
import numpy as np
import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import communicator

de.init(timeout=60)
comm = communicator.get()
keras.utils.set_random_seed(1)
ids = np.random.default_rng(2).integers(0, 300, (8, 64, 2))
embedding = de.layers.Embedding(16, initializer=keras.initializers.RandomNormal(seed=3), name="e")
inputs = keras.Input((2,), dtype="int64")
model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(embedding(inputs))))
optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))


@tf.function
def step(ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(ids) - tf.cast(ids[:, :1] % 2, tf.float32)) ** 2)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss


de.broadcast_variables(model.trainable_variables)
losses = [float(step(tf.constant(batch[comm.rank :: comm.size]))) for batch in ids]
vectors = model(tf.constant(ids[0])).numpy()
written = {"losses": losses, "outputs": vectors.tolist()}
(pathlib.Path(sys.argv[1]) / f"{comm.rank}.json").write_text(json.dumps(written))
comm.barrier()
"""

# Rank 1 is killed while all exchange numbers; each other one writes its error, and how soon.
KILLED = """
import json, os, pathlib, signal, sys, time

import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import communicator

de.init(timeout=100)
comm = communicator.get()
folder = pathlib.Path(sys.argv[1])
shares = [2**17] * comm.size
rows = tf.fill([sum(shares), 4], 1.0)
for step in range(10**6):
    begin = time.monotonic()
    try:
        comm.alltoall(rows, tf.constant(shares), "numbers")
    except tf.errors.AbortedError as error:
        waited = time.monotonic() - begin
        (folder / f"{comm.rank}.json").write_text(json.dumps([error.message, waited]))
        others = [r for r in range(comm.size) if r != 1]
        while not all((folder / f"{r}.json").exists() for r in others):
            time.sleep(0.01)
        time.sleep(0.2)
        os._exit(3)
    if step == 20 and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run(folder, ranks, script, name, **environment):
    """Runs a script as several ranks; returns the launch, and what each rank has written."""
    results = folder / name
    results.mkdir()
    path = folder / f"{name}.py"
    path.write_text(script)
    command = [sys.executable, str(path), str(results)]
    ended = launch.run("gloo", ranks, command, folder / f"{name}.log", LIMIT, **environment)
    written = {int(path.stem): json.loads(path.read_text()) for path in results.glob("*.json")}
    return ended, written


@pytest.fixture
def variables(tmp_path):
    return certificates.variables(certificates.Authority(tmp_path / "ca").rank())


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_tls_train_as_ranks_without(tmp_path, variables, ranks, request):
    if ranks == 4 and not request.config.getoption("--all-ranks"):
        pytest.skip("needs --all-ranks")
    ended, plain = run(tmp_path, ranks, TRAIN, "plain")
    assert ended.status == 0, ended.tail()
    ended, encrypted = run(tmp_path, ranks, TRAIN, "encrypted", **variables)
    assert ended.status == 0, ended.tail()
    assert encrypted.keys() == set(range(ranks))
    assert encrypted == plain


def test_a_rank_that_is_killed_is_named_at_once(tmp_path, variables):
    # The launcher would end the others, too, which have to report it first.
    ended, written = run(tmp_path, 3, KILLED, "killed", **variables)
    assert ended.status, ended.tail()
    for rank, (text, waited) in written.items():
        assert rank != 1
        assert "rank 1 has ended, or its connection is lost" in text
        assert waited < 10
    assert written, ended.tail()
