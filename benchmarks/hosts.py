"""Exchanges of ranks on several hosts: by TCP, with memory inside a host, and with forwarding.

    bazel build //benchmarks/cc:hosts_exchange //benchmarks/cc:delayed_link
    python -m benchmarks.hosts [--hosts 2] [--ranks 4] [--delay 50] [--rounds 7] [BYTES ...]
    python -m benchmarks.hosts --model

Hosts are network namespaces of this machine (which needs root), joined by a link that delays each
packet by `--delay` microseconds (`benchmarks/cc/delayed_link.cc`). With one host there is no link.
Each row is a number of bytes that every rank sends to every other one. The microseconds are the
median over rounds of the slowest rank's time of an exchange, and of the processor time of all
ranks together, which depends less on what else the machine does. Messages and bytes are what a rank
sends to other hosts, as it counts them and as the model has them.

`--model` prints what the model expects of many ranks. docs/scaling.md has its formulas and limits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PROGRAMS = pathlib.Path(__file__).parent.parent / "bazel-bin" / "benchmarks" / "cc"
BYTES = (64, 1024, 8192, 16384, 32768, 131072, 1048576)


class Costs(NamedTuple):
    """What the model's times are made of, in microseconds.

    Attributes:
        message: the processor's time of a message over the network, on both sides together.
        byte: that of a byte.
        shared: the time of a message by memory.
        copied: that of the copies of a byte that is forwarded, beyond those of a flat exchange.
        delay: the delay of the network.
    """

    message: float
    byte: float
    shared: float
    copied: float
    delay: float


def sent(hosts: int, ranks: int, slice_bytes: int, forwarded: bool) -> tuple[int, int]:
    """Returns the messages and bytes that a rank sends to other hosts, with `ranks` on each."""
    if forwarded:
        return hosts - 1, (hosts - 1) * ranks * (slice_bytes + 4)
    return (hosts - 1) * ranks, (hosts - 1) * ranks * slice_bytes


def microseconds(hosts: int, ranks: int, slice_bytes: int, forwarded: bool, costs: Costs) -> float:
    """Returns the time of an exchange, if each rank has a core."""
    messages, far_bytes = sent(hosts, ranks, slice_bytes, forwarded)
    near = (ranks - 1) * costs.shared
    copies = far_bytes * costs.copied if forwarded else 0
    return near + copies + messages * costs.message + far_bytes * costs.byte + costs.delay


@contextlib.contextmanager
def network(hosts: int, delay: int) -> Iterator[list[str]]:
    """Makes a network namespace for each host; yields their names. Host n has 10.98.6.n."""
    spaces = [f"dynemb{os.getpid()}-{number}" for number in range(1, hosts + 1)]
    with contextlib.ExitStack() as stack:
        for space in spaces:
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "del", space)
        link = stack.enter_context(
            subprocess.Popen(
                [PROGRAMS / "delayed_link", str(delay), *spaces], stdout=subprocess.PIPE, text=True
            )
        )
        stack.callback(link.kill)
        if link.stdout is None or link.stdout.readline() != "ready\n":
            raise RuntimeError("the link between the namespaces has not started")
        for number, space in enumerate(spaces, 1):
            _ip("-n", space, "address", "add", f"10.98.6.{number}/24", "dev", "link")
            _ip(
                "-n",
                space,
                "link",
                "set",
                "dev",
                "link",
                "mtu",
                "9000",
                "txqueuelen",
                "10000",
                "up",
            )
            _ip("-n", space, "link", "set", "lo", "up")
        yield spaces


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def exchange(hosts: int, ranks: int, delay: int, rounds: int, sizes: Sequence[int]) -> list[str]:
    """Runs the ranks; returns the lines of rank 0."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        spaces = stack.enter_context(network(hosts, delay)) if hosts > 1 else []
        processes: list[subprocess.Popen[str]] = []
        for rank in range(hosts * ranks):
            host = rank // ranks
            inside = ["ip", "netns", "exec", spaces[host]] if spaces else []
            address = f"10.98.6.{host + 1}" if spaces else "127.0.0.1"
            place = map(str, (rank, hosts * ranks, host, address, folder, rounds, *sizes))
            processes.append(
                subprocess.Popen(
                    [*inside, PROGRAMS / "hosts_exchange", *place],
                    stdout=subprocess.PIPE if rank == 0 else None,
                    text=True,
                )
            )
            stack.callback(processes[-1].kill)
        output, _ = processes[0].communicate()
        for rank, process in enumerate(processes):
            if process.wait() != 0:
                raise RuntimeError(f"rank {rank} has failed")
    return output.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="of each host")
    parser.add_argument("--delay", type=int, default=50, help="microseconds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", action="store_true")
    parser.add_argument("sizes", nargs="*", type=int, metavar="BYTES")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes namespaces first
    if options.model:
        model(options.sizes or (80, 208, 1024, 4096))
        return
    hosts, ranks = options.hosts, options.ranks
    sizes = options.sizes or BYTES
    print(f"{hosts} hosts of {ranks} ranks, {options.delay} us between hosts; microseconds")
    print(
        "| bytes | time: TCP | memory | forwarded | work: TCP | memory | forwarded "
        "| messages: flat, forwarded (model) | bytes (model) |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for line in exchange(hosts, ranks, options.delay, options.rounds, sizes):
        size, *columns = line.split()
        times, counted = columns[:6], columns[6:]
        expected = [sent(hosts, ranks, int(size), way) for way in (False, True)]
        counts = [
            f"{counted[i]}, {counted[2 + i]} ({expected[0][i]}, {expected[1][i]})" for i in (0, 1)
        ]
        print(f"| {' | '.join([size, *times, *counts])} |", flush=True)


# From benchmarks/results/2026-11-28_cpu_hosts.txt: see docs/scaling.md.
COSTS = Costs(message=40, byte=0.005, shared=5, copied=0.0016, delay=50)


def model(sizes: Sequence[int]) -> None:
    print("| ranks | bytes | messages: flat | forwarded | ms: flat | forwarded |")
    print("|---|---|---|---|---|---|")
    for hosts in (64, 512):
        for size in sizes:
            flat, forwarded = (sent(hosts, 8, size, way)[0] for way in (False, True))
            times = [microseconds(hosts, 8, size, way, COSTS) / 1000 for way in (False, True)]
            print(
                f"| {hosts * 8} | {size} | {flat} | {forwarded} | {times[0]:.1f} | {times[1]:.1f} |"
            )


if __name__ == "__main__":
    main()
