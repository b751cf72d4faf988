"""Starts a trainer, a server that follows it and a load test, and prints what the load test finds.

The server is `python -m tf_dynemb.serve`, as in production.

    make serve-example

Requests are sent before the trainer publishes deltas, while it does, and after it. Every answer is
compared with the trainer's own scores at the answer's watermark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load import Answer, Load, figures
from model import MODEL

HERE = Path(__file__).parent
START_SECONDS = 180


class Process:
    """A Python program that runs until the end of the `with`."""

    def __init__(self, *command: object) -> None:
        self._command = [sys.executable, *map(str, command)]

    def __enter__(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def expect(process: subprocess.Popen[str], word: str) -> None:
    """Waits for a line of a process."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != word:
        raise RuntimeError(f"{process.args} wrote {line!r} instead of {word!r}")


def wait_until_ready(url: str, server: subprocess.Popen[str]) -> None:
    """Waits until the server is ready."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError) as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready: {error}") from error
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs everything; returns the figures of the three phases and the result of the check."""
    trained = ["--users", options.users, "--pause", options.pause, "--steps", options.steps]
    with Process(HERE / "trainer.py", folder, *trained, "--warm-up", options.warm_up) as trainer:
        assert trainer.stdin is not None
        expect(trainer, "exported")
        port = options.port or free_port()
        url = f"http://127.0.0.1:{port}"
        served = [f"--model=ctr={folder / MODEL}", f"--http-port={port}", "--grpc-port=-1"]
        with Process("-m", "tf_dynemb.serve", *served, "--drain-seconds=0") as server:
            wait_until_ready(url, server)
            load = Load(url, folder, options.connections)
            answers: list[Answer] = []
            found: dict[str, Any] = {}

            async def publish() -> None:
                trainer.stdin.write(f"{options.deltas}\n")
                trainer.stdin.flush()
                await asyncio.to_thread(expect, trainer, "published")
                await asyncio.sleep(1)  # until the last delta is served

            async def pause() -> None:
                await asyncio.sleep(options.seconds)

            for name, ends in (("before", pause), ("during", publish), ("after", pause)):
                began = time.perf_counter()
                part = load.during(ends)
                found[name] = figures(part, time.perf_counter() - began)
                answers += part
            return {**found, **load.check(answers)}


def lines(found: dict[str, Any]) -> list[str]:
    """Returns the table and the result of the check, as text."""
    text = ["| deltas | answers | per second | p50, ms | p99, ms |", "|---|---|---|---|---|"]
    for name in ("before", "during", "after"):
        row = found[name]
        text.append(
            f"| {name} | {row['answers']} | {row['per_second']:.0f} | {row['p50_ms']:.1f} "
            f"| {row['p99_ms']:.1f} |"
        )
    fresh = sorted(found["fresh"]) or [float("nan")]
    text += [
        f"snapshots in answers: {found['snapshots']}; seconds from publication to first answer: "
        f"median {fresh[len(fresh) // 2]:.2f}, longest {fresh[-1]:.2f}",
        f"answers that differ from the trainer's scores at their watermark: {found['wrong']}; "
        f"older than an earlier answer: {found['older']}",
    ]
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5, help="of requests before and after")
    parser.add_argument("--deltas", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between deltas")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--users", type=int, default=100_000, help="and items")
    parser.add_argument("--warm-up", type=int, default=200, help="steps before the export")
    parser.add_argument("--steps", type=int, default=10, help="steps before a delta")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="serving_") as folder:
        found = run(Path(folder), options)
    print("\n".join(lines(found)))
    if options.json:
        options.json.write_text(json.dumps(found))
    return 1 if found["wrong"] or found["older"] else 0


if __name__ == "__main__":
    sys.exit(main())
