"""Timing, the printed table and its JSON form; shared by all benchmarks.

A benchmark measures the same case for several contenders in one process. Repeats are interleaved:
each repeat runs every contender once, in an order that rotates, so that a disturbance of the
machine meets all of them. Figures are medians; the spread is (highest - lowest) / median.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

OURS, DENSE, STATIC = "tf_dynemb", "DenseHashTable", "static"
CONTENDERS = (OURS, DENSE, STATIC)
TFRA = "TFRA"  # in a venv of its own, as it needs another TensorFlow: make bench-peers
RATIO_NAMES = {DENSE: "Dense"}


@dataclass(frozen=True)
class Result:
    """What one case measured.

    Attributes:
        case: what was done.
        unit: of the figures.
        values: one figure for each repeat, by contender.
        less_is_better: turns the ratios around, so that above 1 always means that we are ahead.
    """

    case: str
    unit: str
    values: Mapping[str, list[float]]
    less_is_better: bool = False

    def median(self, contender: str) -> float | None:
        """The contender's figure, None if it does not take part."""
        values = self.values.get(contender)
        return statistics.median(values) if values else None

    def spread(self, contender: str) -> float:
        """How far apart the contender's repeats are, as a part of the median."""
        values = self.values[contender]
        middle = statistics.median(values)
        return (max(values) - min(values)) / middle if middle else 0.0

    def ratio(self, peer: str) -> float | None:
        """How many times better than the peer we are; None if one of them is missing or zero."""
        ours, theirs = self.median(OURS), self.median(peer)
        if not ours or not theirs:
            return None
        return theirs / ours if self.less_is_better else ours / theirs


def seconds_of(action: Callable[[], object]) -> float:
    """Runs the action once and returns how long it took."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def interleave(
    actions: Mapping[str, Callable[[], float]], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Runs every action `repeats` times, taking turns.

    Args:
        actions: by contender; each runs the case once and returns its figure.
        repeats: how often each runs.
        warm_up: how often each runs before, without being counted.

    Returns:
        The figures by contender.
    """
    values: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for repeat in range(-warm_up, repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            figure = actions[name]()
            if repeat >= 0:
                values[name].append(figure)
    return values


def rates(
    actions: Mapping[str, Callable[[], object]], work: float, repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Like `interleave`, for actions that do an amount `work`: figures are work per second."""

    def rate_of(action: Callable[[], object]) -> Callable[[], float]:
        return lambda: work / seconds_of(action)

    return interleave({name: rate_of(action) for name, action in actions.items()}, repeats, warm_up)


def resident_bytes() -> int:
    """The memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def warm_memory() -> None:
    """Touches the free memory, up to 32 GiB or a container's limit, and gives it back.

    A virtual machine whose host takes free memory back (free page reporting) pays some two seconds
    for each GiB that a process is the first to touch again. Who touches it first would be a matter
    of chance; for some seconds after this, nobody does. All of it, as nothing says which free
    pages the system hands out first.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    free = kib << 10
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"  # the process's own group only inside a container
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int((group / "memory.current").read_text()))
    size = min(free - (2 << 30), 32 << 30) >> 21 << 21
    if size <= 0:
        return
    with mmap.mmap(-1, size) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, size, mmap.PAGESIZE):
            memory[offset] = 1


def use_threads(count: int) -> None:
    """Sets TensorFlow's thread pools; call it before TensorFlow does anything."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(count)
    tf.config.threading.set_inter_op_parallelism_threads(count)


def describe_machine() -> str:
    """One line: processor, cores, load, versions."""
    from importlib.metadata import PackageNotFoundError, version

    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    packages = []
    for package in ("tensorflow", "tensorflow-cpu", "keras", "numpy"):
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return (
        f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {', '.join(packages)}"
    )


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def contenders_of(results: Iterable[Result]) -> list[str]:
    """The usual contenders, and the others that took part."""
    present = {name for result in results for name in result.values}
    return [*CONTENDERS, *sorted(present.difference(CONTENDERS))]


def merge(results: Iterable[Result]) -> list[Result]:
    """One result for each case: the figures of contenders that ran in other processes side by side.

    Where two have figures of one contender, the first stay.
    """
    merged: dict[str, Result] = {}
    for result in results:
        values = dict(result.values)
        if result.case in merged:
            values |= merged[result.case].values
        merged[result.case] = replace(result, values=values)
    return list(merged.values())


def table_lines(results: Iterable[Result]) -> Iterable[str]:
    """The results as a table of fixed width."""
    results = list(results)
    columns = contenders_of(results)
    peers = [name for name in columns if name != OURS]
    width = max([58, *(len(result.case) + 1 for result in results)])
    head = f"{'case':{width}}{'unit':>12}"
    for name in columns:
        head += f"{name:>16}{'±':>5}"
    for peer in peers:
        head += f"{'x ' + RATIO_NAMES.get(peer, peer):>9}"
    yield head
    yield "-" * len(head)
    for result in results:
        line = f"{result.case:{width}}{result.unit:>12}"
        for name in columns:
            median = result.median(name)
            spread = "" if median is None else f"{result.spread(name):.0%}"
            line += f"{_figure(median):>16}{spread:>5}"
        for peer in peers:
            ratio = result.ratio(peer)
            line += f"{'-' if ratio is None else format(ratio, '.2f'):>9}"
        yield line


def write_json(path: Path, results: Iterable[Result]) -> None:
    """Writes results so that `read_json` gives them back."""
    content = {"machine": describe_machine(), "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> list[Result]:
    """Reads what `write_json` wrote."""
    return [Result(**result) for result in json.loads(path.read_text())["results"]]


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="times each case is measured")
    parser.add_argument("--threads", type=int, default=2, help="of TensorFlow, intra and inter op")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    return parser


def add_contenders(parser: argparse.ArgumentParser) -> None:
    """Adds the option of the benchmarks that any of the tables can take part in."""
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=(*CONTENDERS, TFRA),
        default=list(CONTENDERS),
        help="who takes part",
    )


def finish(results: list[Result], json_path: Path | None) -> None:
    """Prints the table and writes the file that was asked for."""
    print(describe_machine())
    print("\n".join(table_lines(results)), flush=True)
    if json_path is not None:
        write_json(json_path, results)
