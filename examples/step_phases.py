"""Where the time of a training step goes, from TensorFlow's profiler, on every rank.

Each operator belongs to a phase, by its type and name. The time of an exchange between ranks
belongs to no operator: the exchange is in flight from the moment when it is handed to its engine
until TensorFlow learns that it is done. Other operators may run in between. Each phase therefore
has two figures:

- *alone*: these times add up to the step. An instant is divided equally among the phases whose
  operators run. If none runs, it belongs to the exchanges in flight; if none is in flight, to the
  input if a step waits for it; otherwise to TensorFlow's executor; otherwise to Python.
- *in all*: how long the phase ran or was in flight, whatever ran at the same time. The time beyond
  *alone* is hidden behind other phases.

An exchange lasts until the slowest rank has sent its part, so its time includes waiting for others.
Work on a GPU is not visible: there the dense phases show the time to launch it.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from dlrm_model import FORWARD, OPTIMIZER

from tf_dynemb.communicator import Communicator

INPUT = "input"
REST = "Python, and dispatch of the step"
EXECUTOR = "executor, between operators"
DENSE_FORWARD, DENSE_BACKWARD = "dense forward", "dense backward"

# In the order of the table.
OF_OPERATORS = {
    "route keys": ("DynembRoute", "DynembReceiveKeys"),
    "look up rows": ("DynembLookup", "DynembLookupSparse", "DynembReadAgain"),
    "pack and unpack rows": ("DynembPackRows", "DynembUnpackRows"),
    "pool vectors": ("DynembPoolRows",),
    "sum gradients": (
        "DynembPoolRowsGrad",
        "DynembSumReceived",
        "DynembLookupSparseGrad",
        "DynembDedupSum",
    ),
    "update rows": ("DynembApplyGradients",),
    "sum gradients and update rows": ("DynembApplyPooledGradients",),
}
EXCHANGES = {
    "exchange keys": ("dynemb_keys", "dynemb_ahead_keys"),
    "exchange vectors": ("dynemb_vectors", "dynemb_ahead_vectors"),
    "exchange what changed since": ("dynemb_changed", "dynemb_again"),
    "exchange gradients": ("dynemb_gradients", "dynemb_counts", "dynemb_other"),
}
ALLREDUCE = "allreduce of dense gradients"
PHASES = (
    INPUT,
    *OF_OPERATORS,
    *EXCHANGES,
    DENSE_FORWARD,
    DENSE_BACKWARD,
    ALLREDUCE,
    "dense optimizer",
    "other operators",
    EXECUTOR,
    REST,
)

# The levels of spans: an instant goes to the spans of the highest level that cover it.
_EXECUTES, _AWAITED, _FLIES, _RUNS = range(4)
_STEPS = "all steps"
_STARTED, _DONE = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"


class Event(NamedTuple):
    """An event of a thread; times in nanoseconds."""

    name: str
    thread: int
    start: float
    end: float
    facts: dict[str, Any]


class Span(NamedTuple):
    """An interval in which a phase runs or is in flight; times in nanoseconds."""

    phase: str
    level: int
    start: float
    end: float


class Shares(NamedTuple):
    """Milliseconds per step, by phase."""

    alone: dict[str, float]
    in_all: dict[str, float]


def phase_of(name: str, kind: str) -> str:
    """Returns the phase of an operator, by its node's name and its type."""
    if kind in ("HorovodAlltoall", "DynembRanksAlltoall"):
        last = re.sub(r"_\d+$", "", name.rsplit("/", 1)[-1])
        return next((p for p, names in EXCHANGES.items() if last in names), "other operators")
    if kind.startswith(("Horovod", "DynembRanks")):
        return ALLREDUCE
    for phase, kinds in OF_OPERATORS.items():
        if kind in kinds:
            return phase
    first = name.split("/")[0]
    if first.startswith("gradient_tape"):
        return DENSE_BACKWARD
    return {FORWARD: DENSE_FORWARD, OPTIMIZER: "dense optimizer"}.get(first, "other operators")


def read_events(folder: Path) -> list[Event]:
    """Reads the CPU events of the trace in a folder."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (path,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    events = []
    for plane in space.planes:
        if plane.name != "/host:CPU":
            continue
        known = plane.stat_metadata

        def value_of(stat: Any, known: Any = known) -> Any:
            kind = stat.WhichOneof("value")
            value = getattr(stat, kind)
            return known[value].name if kind == "ref_value" else value

        for line in plane.lines:
            for event in line.events:
                start = line.timestamp_ns + event.offset_ps / 1e3
                end = start + event.duration_ps / 1e3
                name = plane.event_metadata[event.metadata_id].name
                facts = {known[stat.metadata_id].name: value_of(stat) for stat in event.stats}
                events.append(Event(name, line.id, start, end, facts))
    return events


def spans_of(events: Iterable[Event]) -> Iterator[Span]:
    """Yields the spans of the phases of a trace."""
    flying: dict[tuple[Any, ...], float] = {}
    operators: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        node, colon, kind = event.name.rpartition(":")
        if event.name in (_STARTED, _DONE):
            key = (event.facts["step_id"], event.facts["name"])
            if event.name == _STARTED:
                flying[key] = event.start
            elif key in flying:
                phase = phase_of(event.facts["name"], event.facts["kernel_type"])
                yield Span(phase, _FLIES, flying.pop(key), event.start)
        elif event.name == INPUT:
            yield Span(INPUT, _AWAITED, event.start, event.end)
        elif event.name.startswith("ExecutorState::Process"):
            yield Span(EXECUTOR, _EXECUTES, event.start, event.end)
        elif colon and node and node[-1] != ":" and kind.isidentifier() and "Eager" not in node:
            operators[event.thread].append(event)
    for thread_spans in operators.values():
        yield from _innermost(thread_spans)


def _innermost(events: list[Event]) -> Iterator[Span]:
    """Yields the spans of one thread's operators, without the time of nested operators."""
    open_: list[Event] = []
    at = 0.0

    def until(time: float) -> Iterator[Span]:
        nonlocal at
        while open_ and at < time:
            event = open_[-1]
            end = min(event.end, time)
            if end > at:
                yield Span(phase_of(*event.name.rsplit(":", 1)), _RUNS, at, end)
                at = end
            if event.end <= time:
                open_.pop()

    for event in events:
        yield from until(event.start)
        open_.append(event)
        at = event.start
    yield from until(float("inf"))


def shares(spans: Iterable[Span], start: float, end: float) -> Shares:
    """Divides the time from `start` to `end` (in ns) among phases; returns milliseconds."""
    edges: list[tuple[float, int, int, str]] = []
    for phase, level, begin, finish in spans:
        if finish > start and begin < end:
            edges += [(max(begin, start), 1, level, phase), (min(finish, end), -1, level, phase)]
    edges.sort()
    alone: dict[str, float] = defaultdict(float)
    in_all: dict[str, float] = defaultdict(float)
    covering: dict[tuple[int, str], int] = defaultdict(int)
    at = start
    for time, change, level, phase in [*edges, (end, 0, 0, "")]:
        if time > at:
            here = [key for key, count in covering.items() if count]
            highest = max((level for level, _ in here), default=None)
            owners = [phase for level, phase in here if level == highest] or [REST]
            for owner in owners:
                alone[owner] += (time - at) / len(owners) / 1e6
            for owner in {phase for level, phase in here if level != _EXECUTES} | set(owners):
                in_all[owner] += (time - at) / 1e6
            at = time
        covering[level, phase] += change
    return Shares(dict(alone), dict(in_all))


def trace(step: Callable[[], object], steps: int) -> Shares:
    """Runs steps under the profiler and returns the mean shares of a step."""
    profiler = tf.profiler.experimental
    with tempfile.TemporaryDirectory() as folder:
        with profiler.Profile(folder, profiler.ProfilerOptions(2, 0, 0)):
            step()
            with profiler.Trace(_STEPS):
                for _ in range(steps):
                    step()
        events = read_events(Path(folder))
    (whole,) = (event for event in events if event.name == _STEPS)
    total = shares(spans_of(events), whole.start, whole.end)
    return Shares(*({phase: ms / steps for phase, ms in part.items()} for part in total))


def mean_over_ranks(rank_shares: Shares, comm: Communicator) -> Shares:
    """Returns the mean of the shares over the ranks. Collective."""
    each = comm.gather_objects(list(rank_shares), "step_phases/shares")
    return Shares(
        *(
            {phase: sum(rank[i].get(phase, 0.0) for rank in each) / len(each) for phase in PHASES}
            for i in range(len(rank_shares))
        )
    )


def table(step: Shares, untraced_ms: float) -> Iterator[str]:
    """Yields the lines of a table with the shares of a step."""
    total = sum(step.alone.values())
    yield f"{'phase of a step':34}{'ms alone':>9}{'':>6}{'ms in all':>11}{'hidden':>9}"
    for phase in PHASES:
        alone, in_all = step.alone.get(phase, 0.0), step.in_all.get(phase, 0.0)
        if in_all < 0.0005 * total:
            continue
        hidden = f"{1 - alone / in_all:.0%}" if in_all > alone * 1.005 else "-"
        yield f"{phase:34}{alone:9.2f}{alone / total:6.0%}{in_all:11.2f}{hidden:>9}"
    yield f"{'the step, traced':34}{total:9.2f}{1:6.0%}   ({untraced_ms:.2f} ms untraced)"


def awaited(batches: Iterable[Any]) -> Iterator[Any]:
    """Yields the batches, and records in the trace how long a step waits for one."""
    coming = iter(batches)
    while True:
        with tf.profiler.experimental.Trace(INPUT):
            batch = next(coming, None)
        if batch is None:
            return
        yield batch
