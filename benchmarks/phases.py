"""Where a training step's time goes: named phases that add up to the step.

The step of `benchmarks.sparse` runs under TensorFlow's profiler, to which the operators report
their phases ("dynemb: ...") beside TensorFlow's own events. Each instant of a step belongs to one
phase: our innermost open phase, or otherwise the running operator, the executor or Python. The sum
is compared with the time of untraced steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tensorflow as tf

from benchmarks.harness import OURS, Result, finish, parser_for, seconds_of, use_threads
from benchmarks.sparse import DISTINCT_STEPS, ZIPF, draw_steps, filled, run_steps, step_for
from benchmarks.workload import Draws

STEPS = "benchmark steps"
OURS_PREFIX = "dynemb: "
OURS_KIND = "Dynemb"
EXECUTOR = ("ExecutorState::Process", "FunctionRun")
# Phases that belong to no operator of ours.
BETWEEN, PYTHON = "executor, between operators", "Python, and dispatch of the function"
OTHERS = "other operators"


@dataclass(frozen=True)
class Event:
    """An event of a thread, from `start` to `end`, in nanoseconds."""

    name: str
    thread: int
    start: float
    end: float


def read_events(folder: Path) -> list[Event]:
    """Reads the host's events from the profile."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (path,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    events = []
    for plane in space.planes:
        if plane.name != "/host:CPU":
            continue
        for line in plane.lines:
            for event in line.events:
                start = line.timestamp_ns + event.offset_ps / 1e3
                name = plane.event_metadata[event.metadata_id].name
                events.append(Event(name, line.id, start, start + event.duration_ps / 1e3))
    return events


def operator_of(event: Event) -> str | None:
    """Returns the type of the operator that the event is a run of."""
    node, colon, kind = event.name.rpartition(":")
    is_operator = colon and node and not node.endswith(":") and kind.isidentifier()
    return kind if is_operator and "Eager" not in node else None


def short(kind: str) -> str:
    """Returns an operator's type without our prefix."""
    return kind.removeprefix(OURS_KIND)


def labelled(events: Iterable[Event]) -> Iterator[tuple[int, str, Event]]:
    """Yields the events that name a phase, with their specificity and the phase's name."""
    operators: dict[int, list[Event]] = defaultdict(list)
    events = list(events)
    for event in events:
        if operator_of(event):
            operators[event.thread].append(event)
    for event in events:
        if event.name.startswith(OURS_PREFIX):
            around = [
                operator_of(operator)
                for operator in operators[event.thread]
                if operator.start <= event.start and event.end <= operator.end
            ]
            phase = event.name.removeprefix(OURS_PREFIX)
            yield 3, f"{short(around[0]) if around else 'ours'}: {phase}", event
        elif kind := operator_of(event):
            yield 2, f"{short(kind)}: the rest" if kind.startswith(OURS_KIND) else OTHERS, event
        elif event.name.startswith(EXECUTOR):
            yield 1, BETWEEN, event


def attribute(events: list[Event], start: float, end: float) -> dict[str, float]:
    """Assigns every instant of [start, end] to one phase; returns nanoseconds by phase."""
    candidates = [item for item in labelled(events) if item[2].end > start and item[2].start < end]
    edges = {start, end}
    for _, _, event in candidates:
        edges |= {max(event.start, start), min(event.end, end)}
    points = sorted(edges)
    owner: list[tuple[int, float, str]] = [(0, 0.0, PYTHON)] * (len(points) - 1)
    place = {point: number for number, point in enumerate(points)}
    for rank, name, event in candidates:
        for number in range(place[max(event.start, start)], place[min(event.end, end)]):
            # If two events are equally specific, the one that began later is the inner one.
            owner[number] = max(owner[number], (rank, event.start, name))
    totals: dict[str, float] = defaultdict(float)
    for number, (_, _, name) in enumerate(owner):
        totals[name] += points[number + 1] - points[number]
    return totals


def measure(options: argparse.Namespace, hotness: int, exponent: float | None) -> list[Result]:
    """Times steps, then traces steps."""
    peers = filled(OURS, options.tables, options.dim, options.rows, 1 << 17)
    draws = Draws(options.rows, exponent, seed=4)
    numbers = draw_steps(draws, options.tables, options.samples * hotness)
    batches = [[peers[0].ids(part) for part in batch] for batch in numbers]
    step = step_for(options, peers, hotness)
    run_steps(step, batches, DISTINCT_STEPS)

    def run_traced() -> dict[str, float]:
        """Returns the mean nanoseconds per step of each phase in a trace."""
        profiler = tf.profiler.experimental
        with tempfile.TemporaryDirectory() as folder:
            with profiler.Profile(folder, profiler.ProfilerOptions(2, 0, 0)):
                run_steps(step, batches, DISTINCT_STEPS)
                with profiler.Trace(STEPS):
                    run_steps(step, batches, options.steps)
            events = read_events(Path(folder))
        (whole,) = (event for event in events if event.name == STEPS)
        totals = attribute(events, whole.start, whole.end)
        return {name: total / options.steps for name, total in totals.items()}

    untraced, traced = [], []
    for _ in range(options.repeats):
        run_steps(step, batches, DISTINCT_STEPS)  # reading the trace evicted the caches
        action = partial(run_steps, step, batches, options.steps)
        untraced.append(seconds_of(action) / options.steps * 1e3)
        traced.append(run_traced())
    names = {name for part in traced for name in part}
    phases = {name: [part.get(name, 0.0) / 1e6 for part in traced] for name in names}
    label = "uniform" if exponent is None else f"zipf {exponent}"
    what = "forward" if options.optimizer == "none" else options.optimizer
    case = f"{what}, {label}, hotness {hotness}"
    whole = statistics.median(untraced)
    total = statistics.median(sum(part.values()) for part in traced) / 1e6
    ordered = sorted(phases.items(), key=lambda item: -statistics.median(item[1]))
    print(f"\nstep, {case}: {whole:.2f} ms untraced, {total:.2f} ms traced")
    for name, values in ordered:
        print(f"  {statistics.median(values):8.3f} ms  {name}")
    results = [
        Result(f"step, {case}: {name}", "ms", {OURS: values}, less_is_better=True)
        for name, values in ordered
        if statistics.median(values) > 0.005 * total
    ]
    ratio = [sum(t.values()) / 1e6 / alone for t, alone in zip(traced, untraced, strict=True)]
    return [*results, Result(f"step, {case}: all phases / untraced step", "part", {OURS: ratio})]


def main() -> None:
    """Traces the steps of one optimizer."""
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--optimizer", choices=("none", "adagrad", "adam"), default="adagrad")
    add("--tables", type=int, default=26, help="tables per step")
    add("--rows", type=int, default=1_000_000, help="rows per table")
    add("--dim", type=int, default=16, help="floats per vector")
    add("--samples", type=int, default=8_192, help="samples per step")
    add("--hotness", type=int, nargs="+", default=[1, 10], help="ids per sample and table")
    add("--zipf", action="store_true", help="draw ids by Zipf's law")
    add("--steps", type=int, default=12, help="steps per trace")
    parser.set_defaults(repeats=11)  # of a few seconds; steps differ by 10 to 20%
    options = parser.parse_args()
    use_threads(options.threads)
    results: list[Result] = []
    for hotness in options.hotness:
        results += measure(options, hotness, ZIPF if options.zipf else None)
    finish(results, options.json)


if __name__ == "__main__":
    main()
