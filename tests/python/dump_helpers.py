"""Tables and steps for tests of dumps."""

import datetime
import json
import os
import pathlib

import tensorflow as tf
import warm_python

import tf_dynemb as de

UTC = datetime.timezone.utc


def vectors_of(table):
    keys, values = de.export(table)
    values = tf.cast(values, tf.float32)
    return dict(zip(keys.numpy().tolist(), map(tuple, values.numpy().tolist()), strict=True))


def make(name="t", dim=2, **kwargs):
    return de.DynamicVariable(dim, name=name, initializer="normal", **kwargs)


def step(optimizer, tables, ids):
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(tf.nn.embedding_lookup(t, ids) ** 2) for t in tables)
    optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))


def run_script(name, *arguments, timeout=300):
    """Runs a script of this folder in another process. Returns the JSON of its last line."""
    here = pathlib.Path(__file__).resolve().parent
    root = here.parents[1]
    paths = [str(root)] if (root / "tf_dynemb").is_dir() else []
    done = warm_python.run(
        [str(here / name), *map(str, arguments)],
        timeout=timeout,
        PYTHONPATH=os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        TF_CPP_MIN_LOG_LEVEL="3",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
