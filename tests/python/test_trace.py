"""The phases of our operators in TensorFlow's profiler."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest
import tensorflow as tf

import tf_dynemb as de

PREFIX = "dynemb: "


def trace(folder: Path, run) -> dict[str, list[tuple[int, float, float]]]:
    """Runs under the profiler; thread, start and end of the events by name."""
    xplane_pb2 = pytest.importorskip("tensorflow.tsl.profiler.protobuf.xplane_pb2")
    profiler = tf.profiler.experimental
    with profiler.Profile(str(folder), profiler.ProfilerOptions(2, 0, 0)):
        run()
    (path,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    events: dict[str, list[tuple[int, float, float]]] = {}
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                start = line.timestamp_ns + event.offset_ps / 1e3
                name = plane.event_metadata[event.metadata_id].name
                span = (line.id, start, start + event.duration_ps / 1e3)
                events.setdefault(name, []).append(span)
    return events


def test_a_training_step_names_its_phases_inside_its_operators(tmp_path):
    table = de.DynamicVariable(dimension=4)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.lookup_sparse([table], [ids], combiners="sum")[0])
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    step(tf.constant([[1, 2], [3, 3]], tf.int64))
    events = trace(tmp_path, lambda: step(tf.constant([[3, 5], [7, 7]], tf.int64)))

    inside = {
        "DynembLookupSparse": {"wait for locks", "find and pool", "insert", "claim slots"},
        "DynembLookupSparseGrad": {"find unique ids", "sum gradients"},
        "DynembApplyGradients": {"wait for locks", "update rows"},
    }
    for operator, phases in inside.items():
        runs = [span for name in events if name.endswith(f":{operator}") for span in events[name]]
        assert len(runs) == 1, operator
        thread, start, end = runs[0]
        for phase in phases:
            spans = events[PREFIX + phase]
            assert any(t == thread and start <= a <= b <= end for t, a, b in spans), phase


def test_nothing_is_named_without_an_operator_of_ours(tmp_path):
    events = trace(tmp_path, lambda: tf.linalg.matmul(tf.ones([8, 8]), tf.ones([8, 8])))
    assert not [name for name in events if name.startswith(PREFIX)]
