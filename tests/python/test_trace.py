"""The phases of the operators in TensorFlow's profiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dynemb as de
from benchmarks.phases import OURS_KIND, OURS_PREFIX, Event, operator_of, read_events

EAGER = "EagerLocalExecute: "  # around an operator that runs outside a tf.function


def trace(folder: Path, run: Callable[[], object]) -> list[Event]:
    """Returns the profiler's events of `run`."""
    pytest.importorskip("tensorflow.tsl.profiler.protobuf.xplane_pb2")
    profiler = tf.profiler.experimental
    with profiler.Profile(str(folder), profiler.ProfilerOptions(2, 0, 0)):
        run()
    return read_events(folder)


def is_run_of_library(event: Event) -> bool:
    """Whether the event is the run of an operator of this library."""
    kind = operator_of(event) or event.name.removeprefix(EAGER)
    return kind.startswith(OURS_KIND)


def is_inside(event: Event, outer: Event) -> bool:
    """Whether `event` is entirely inside `outer`, on the same thread."""
    return event.thread == outer.thread and outer.start <= event.start <= event.end <= outer.end


def outside_our_operators(events: Iterable[Event]) -> list[Event]:
    """Returns the phases that no run of this library's operators contains on their thread."""
    events = list(events)
    runs = [event for event in events if is_run_of_library(event)]
    return [
        event
        for event in events
        if event.name.startswith(OURS_PREFIX) and not any(is_inside(event, run) for run in runs)
    ]


AT_ONCE = {
    "DynembApplyPooledGradients": {
        "wait for locks",
        "find unique ids",
        "sum gradients and update rows",
    }
}
SEPARATELY = {
    "DynembLookupSparseGrad": {"find unique ids", "sum gradients"},
    "DynembApplyGradients": {"wait for locks", "update rows"},
}


@pytest.mark.parametrize(("clipnorm", "gradient"), [(None, AT_ONCE), (1.0, SEPARATELY)])
def test_phases_of_a_training_step_are_inside_its_operators(tmp_path, clipnorm, gradient):
    table = de.DynamicVariable(dimension=4)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1, clipnorm=clipnorm))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.lookup_sparse([table], [ids], combiners="sum")[0])
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    step(tf.constant([[1, 2], [3, 3]], tf.int64))
    events = trace(tmp_path, lambda: step(tf.constant([[3, 5], [7, 7]], tf.int64)))

    inside = {
        "DynembLookupSparse": {"wait for locks", "find and pool", "insert", "claim slots"},
        **gradient,
    }
    for operator, phases in inside.items():
        (run,) = [event for event in events if operator_of(event) == operator]
        found = {event.name for event in events if is_inside(event, run)}
        assert {OURS_PREFIX + phase for phase in phases} <= found, operator


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: there are no helpers")
def test_helper_threads_open_no_phases(tmp_path):
    table = de.DynamicVariable(dimension=16)
    optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
    rng = np.random.default_rng(0)

    def draw():
        return tf.constant(rng.integers(0, 2**40, (65_536, 2)))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.lookup_sparse([table], [ids], combiners="sum")[0])
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    def run():
        step(draw())
        table.lookup(draw())

    run()
    for attempt in range(8):
        events = trace(tmp_path / str(attempt), run)
        phases = [event for event in events if event.name.startswith(OURS_PREFIX)]
        assert len(phases) > 20  # the phases of a step and of a lookup
        assert outside_our_operators(events) == []
        # While a lookup outside a function runs, TensorFlow's thread pools do no other work.
        (lookup,) = [event for event in events if event.name == f"{EAGER}DynembLookup"]
        if any(
            event.thread != lookup.thread and lookup.start < event.start < lookup.end
            for event in events
            if event.name.startswith("ThreadpoolListener::StartRegion")
        ):
            return
    pytest.skip("no helper got a core, so the test did not cover helpers")


def test_phase_outside_the_operators_is_found():
    """The check of the previous test can fail."""
    graph = Event("model/embed:DynembLookupSparse", 1, 10, 50)
    eager = Event("EagerLocalExecute: DynembLookup", 2, 20, 30)
    other = Event("dense/MatMul:MatMul", 3, 0, 100)
    good = [
        Event("dynemb: insert", 1, 10, 40),
        Event("dynemb: evict", 1, 20, 30),
        Event("dynemb: find", 2, 20, 30),
    ]
    bad = [
        Event("dynemb: insert", 2, 10, 40),  # of a helper: the operator's thread is 1
        Event("dynemb: find", 1, 45, 55),  # ends after the operator
        Event("dynemb: find", 1, 5, 15),  # begins before it
        Event("dynemb: find", 3, 10, 20),  # in another operator
        Event("dynemb: find", 4, 10, 20),
    ]
    assert outside_our_operators([graph, eager, other, *good]) == []
    assert outside_our_operators([graph, *good, *bad, eager, other]) == bad
