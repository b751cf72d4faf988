"""Timing, the printed table and its JSON form; shared by all benchmarks.

A benchmark measures the same case for several contenders in one process. Repeats are interleaved:
each repeat runs every contender once, in a rotating order, so that a disturbance of the machine
affects all of them. Figures are medians; the spread is (highest - lowest) / median.
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
TFRA = "TFRA"  # in a separate venv, because it needs another TensorFlow: make bench-peers
RATIO_NAMES = {DENSE: "Dense"}


def process_bytes(name: str) -> int:
    """Returns a size in /proc/self/status, such as VmHWM, in bytes."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


@dataclass(frozen=True)
class Result:
    """The figures of one case.

    Attributes:
        case: the name of the case.
        unit: the unit of the figures.
        values: by contender, one figure per repeat.
        less_is_better: inverts the ratios, so that a ratio above 1 always means that we are ahead.
    """

    case: str
    unit: str
    values: Mapping[str, list[float]]
    less_is_better: bool = False

    def median(self, contender: str) -> float | None:
        """Returns the contender's median, or None if it does not take part."""
        values = self.values.get(contender)
        return statistics.median(values) if values else None

    def spread(self, contender: str) -> float:
        """Returns the spread of the contender's repeats, as a fraction of the median."""
        values = self.values[contender]
        middle = statistics.median(values)
        return (max(values) - min(values)) / middle if middle else 0.0

    def ratio(self, peer: str) -> float | None:
        """Returns how many times better than the peer we are; None if either is missing or zero."""
        dynemb_median, peer_median = self.median(OURS), self.median(peer)
        if not dynemb_median or not peer_median:
            return None
        return peer_median / dynemb_median if self.less_is_better else dynemb_median / peer_median


def seconds_of(action: Callable[[], object]) -> float:
    """Runs the action once and returns the seconds that it took."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def interleave(
    actions: Mapping[str, Callable[[], float]], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Runs every action `repeats` times, taking turns.

    Args:
        actions: by contender; each runs the case once and returns its figure.
        repeats: how many times each runs.
        warm_up: how many times each runs beforehand, uncounted.

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
    """Like `interleave`, for actions that do `work` units each: figures are units per second."""

    def rate_of(action: Callable[[], object]) -> Callable[[], float]:
        return lambda: work / seconds_of(action)

    return interleave({name: rate_of(action) for name, action in actions.items()}, repeats, warm_up)


def resident_bytes() -> int:
    """Returns the memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def warm_memory() -> None:
    """Touches the free memory, up to 32 GiB or a container's limit, and releases it.

    On a virtual machine whose host takes free memory back (free page reporting), the first touch
    costs about two seconds per GiB. Without this call, chance would decide which contender pays.
    For some seconds after it, none does. It touches all free memory, because the system may hand
    out any free page first.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    free = kib << 10
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"  # the group of this process, only inside a container
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
    """Sets TensorFlow's thread pools; must be called before TensorFlow is used."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(count)
    tf.config.threading.set_inter_op_parallelism_threads(count)


def describe_machine() -> str:
    """Describes the machine in one line: processor, cores, load, versions."""
    from importlib.metadata import PackageNotFoundError, version

    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    packages = []
    for package in ("tensorflow", "tensorflow-cpu", "keras", "numpy", "torch", "fbgemm-gpu-cpu"):
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


def _ratio_width(title: str) -> int:
    return max(9, len(title) + 1)


def contenders_of(results: Iterable[Result]) -> list[str]:
    """Returns the contenders that took part: the usual ones first."""
    present = {name for result in results for name in result.values}
    usual = [name for name in CONTENDERS if name in present]
    return [*usual, *sorted(present.difference(CONTENDERS))]


def merge(results: Iterable[Result]) -> list[Result]:
    """Merges results of several processes into one result per case.

    If several results have figures of one contender, the first are kept.
    """
    merged: dict[str, Result] = {}
    for result in results:
        values = dict(result.values)
        if result.case in merged:
            values |= merged[result.case].values
        merged[result.case] = replace(result, values=values)
    return list(merged.values())


def table_lines(results: Iterable[Result]) -> Iterable[str]:
    """Formats the results as a table of fixed width."""
    results = list(results)
    columns = contenders_of(results)
    peers = [name for name in columns if name != OURS] if OURS in columns else []
    width = max([58, *(len(result.case) + 1 for result in results)])
    head = f"{'case':{width}}{'unit':>12}"
    for name in columns:
        head += f"{name:>16}{'±':>5}"
    ratios = {peer: f"x {RATIO_NAMES.get(peer, peer)}" for peer in peers}
    for title in ratios.values():
        head += f"{title:>{_ratio_width(title)}}"
    yield head
    yield "-" * len(head)
    for result in results:
        line = f"{result.case:{width}}{result.unit:>12}"
        for name in columns:
            median = result.median(name)
            spread = "" if median is None else f"{result.spread(name):.0%}"
            line += f"{_figure(median):>16}{spread:>5}"
        for peer, title in ratios.items():
            ratio = result.ratio(peer)
            text = "-" if ratio is None else format(ratio, ".2f")
            line += f"{text:>{_ratio_width(title)}}"
        yield line


def write_json(path: Path, results: Iterable[Result]) -> None:
    """Writes results for `read_json`."""
    content = {"machine": describe_machine(), "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> list[Result]:
    """Reads the results that `write_json` wrote."""
    return [Result(**result) for result in json.loads(path.read_text())["results"]]


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """Creates a parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each case")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of TensorFlow, intra and inter op"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser


def add_contenders(parser: argparse.ArgumentParser) -> None:
    """Adds the option to choose the contenders."""
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=(*CONTENDERS, TFRA),
        default=list(CONTENDERS),
        help="contenders",
    )


def finish(results: list[Result], json_path: Path | None) -> None:
    """Prints the table, and writes the JSON file if there is one."""
    print(describe_machine())
    print("\n".join(table_lines(results)), flush=True)
    if json_path is not None:
        write_json(json_path, results)
