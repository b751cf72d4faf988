"""A server in another process, and a model for it.

A module that imports this skips without KServe: before it imports what comes with KServe, such as
gRPC.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de

if importlib.util.find_spec("kserve") is None:
    pytest.skip("needs the extra `serve`", allow_module_level=True)

USERS = np.array([[1], [2], [2**40]])
TAGS = [[1, 2, 3], [], [7]]
ROWS = [{"users": u, "tags": t} for u, t in zip(USERS.tolist(), TAGS, strict=True)]


class Server:
    """`python -m tf_dynemb.serve` as a context.

    Attributes:
        url, address: where it answers REST and gRPC.
        lines: what it has logged.
    """

    def __init__(self, *arguments, environment=None, program=None):
        ports = ["--http-port=0", "--grpc-port=0", "--drain-seconds=0", "--poll-seconds=0.1"]
        module = ["-m", "tf_dynemb.serve"] if program is None else ["-c", program]
        self._command = [sys.executable, *module, *ports, *map(str, arguments)]
        self._environment = {**os.environ, **(environment or {})}
        self.lines = []
        self.url = self.address = None

    def __enter__(self):
        self.process = subprocess.Popen(
            self._command, stderr=subprocess.PIPE, text=True, env=self._environment
        )
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"REST on (\S+), gRPC on (\S+)", line):
                self.url, self.address = found.groups()
                break
        else:
            self.process.wait()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)

    def __exit__(self, *_):
        self.end()

    def end(self):
        """Ends the server; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join()
        self.process.stderr.close()
        return code


def build(factor=1.0):
    """A model of a user and a bag of tags, with two outputs."""
    users = keras.Input([1], dtype="int64", name="users")
    tags = keras.Input([None], dtype="int64", name="tags", ragged=True)
    embed = de.layers.Embedding(4, combiner="sum", initializer="normal", name="table")
    both = keras.layers.Concatenate()([embed(users), embed(tags)])
    dense = keras.layers.Dense(1, name="score")
    outputs = {"score": dense(both), "double": keras.layers.Rescaling(2.0)(dense(both))}
    model = keras.Model({"users": users, "tags": tags}, outputs)
    change(model, 0)
    dense.kernel.assign(dense.kernel * factor)
    return model


def inputs(users=USERS, tags=TAGS):
    return {"users": tf.constant(users), "tags": tf.ragged.constant(tags, dtype=tf.int64)}


def change(model, seed):
    """Gives a model other rows."""
    rng = np.random.default_rng(seed)
    for table in de.named_tables(model).values():
        table.upsert(np.arange(9), rng.normal(size=[9, table.dimension]))


def export(model, folder, version="1", **options):
    """Exports a model that follows a chain beside it."""
    chain = folder / "chain"
    if not chain.exists():
        de.dump(chain, model)
    path = folder / "models" / version if version else folder / "models"
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"follow": chain, "follow_seconds": 0.02, **options}
    de.export_saved_model(model, path, "link", chain, **options)
    return folder / "models"


def scores(model, users=USERS, tags=TAGS):
    return model(inputs(users, tags))["score"].numpy()


def client_of(server, **options):
    import httpx

    return httpx.Client(base_url=server.url, timeout=30, **options)


def v1(client, body, model="ctr", **options):
    return client.post(f"/v1/models/{model}:predict", json=body, **options)


def eventually(condition, seconds=30):
    """Waits until a condition is true; returns its value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it is never true"
        time.sleep(0.02)
    return found


def metric(client, name, **labels):
    """The value of a metric; 0 if it is not there."""
    from prometheus_client.parser import text_string_to_metric_families as families

    for family in families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return 0


def v2_inputs():
    lengths = [len(each) for each in TAGS]
    arrays = {
        "users": USERS,
        "tags.values": np.array([tag for tags in TAGS for tag in tags]),
        "tags.row_splits": np.cumsum([0, *lengths]),
    }
    return {name: array.astype(np.int64) for name, array in arrays.items()}


def triton_grpc(server, *arguments, scores=None):
    """Runs NVIDIA's gRPC client."""
    program = pathlib.Path(__file__).with_name("triton_grpc_client.py")
    given = None if scores is None else json.dumps(scores.tolist())
    command = [sys.executable, str(program), server.address, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
