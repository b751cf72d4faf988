"""An hour of a server: load, a trainer, new versions, and what goes wrong in between.

    unshare --map-root-user --mount python tests/soak/serve_hour.py --seconds 3600

A trainer publishes 1,000 deltas and exports 20 versions; connections send requests all the time,
and every answer is compared with the trainer's scores at its watermark. In between: a delta is
damaged, the disk of the trainer is full, and the server gets SIGTERM and is started again. The
program fails if an answer is wrong or older than one before it, if a request fails other than
while the server is away, or if the server's memory grows. It mounts a small file system, which
ends with the namespace of `unshare`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples/server")]

# ruff: noqa: E402  (modules of the example)
import httpx
import numpy as np
import psutil
from load import TOLERANCE
from model import PROBES, ClickStream, build
from run import free_port

USERS, PROBE, STEPS = 2000, 16, 3
# What a client sees while the server ends, is away, and loads its model.
AWAY = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError)


class Trainer:
    """The training process; `main` of a child runs its commands."""

    def __init__(self, folder: Path) -> None:
        import keras

        import tf_dynemb as de

        self._de, self._folder, self._chain = de, folder, folder / "disk/chain"
        self._clicks, self._model = ClickStream(USERS), build()
        optimizer = de.OptimizerWrapper(keras.optimizers.Adagrad(0.1))
        self._model.compile(optimizer, "binary_crossentropy")
        self._versions = 0
        self._compact_every = int(os.environ.get("COMPACT_EVERY", "100"))
        self._mark: Any = None

    def train(self) -> None:
        for _ in range(STEPS):
            users, items, labels = self._clicks.batch(256)
            self._model.train_on_batch([users[:, None], items[:, None]], labels[:, None])

    def note(self, mark: Any) -> None:
        """Notes how the model of this watermark scores the probe."""
        self._mark = mark
        ids = np.arange(PROBE)[:, None]
        scores = np.ravel(self._model.predict_on_batch([ids, ids])).tolist()
        with (self._folder / PROBES).open("a") as file:
            file.write(json.dumps({"tick": mark.tick, "scores": scores}) + "\n")

    def base(self) -> None:
        self.train()
        self.note(self._de.dump(self._chain, self._model))

    def delta(self) -> None:
        self.train()
        # Merges the deltas into a base now and then.
        compact = {"compact_every": self._compact_every}
        self.note(self._de.incremental_dump(self._chain, self._model, **compact))

    def version(self) -> None:
        self._versions += 1
        path = self._folder / f"models/{self._versions}"
        options = {"follow": self._chain, "follow_seconds": 0.1}
        self._de.export_saved_model(self._model, path, "copy", self._chain, **options)

    def damaged(self) -> None:
        """Publishes a delta with a changed byte."""
        self.train()
        place = self._folder / "disk/damaged"
        self._de.incremental_dump(place, self._model, since=self._mark)
        (delta,) = place.glob("*-delta-*")
        for file in delta.glob("*.vectors.npy"):
            file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
        last = max(int(each.name[:8]) for each in self._chain.iterdir() if each.name[:8].isdigit())
        delta.rename(self._chain / f"{last + 1:08}{delta.name[8:]}")

    def full(self) -> None:
        """Fails to publish on a full disk; then there is space again."""
        ballast = self._folder / "disk/ballast"
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        self.train()
        try:
            self._de.incremental_dump(self._chain, self._model)
        except OSError as error:
            print(f"full: {error}", file=sys.stderr)
        else:
            raise RuntimeError("the disk was not full")
        finally:
            ballast.unlink()


class Load:
    """Requests all the time, and what came of them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[tuple[int, list[int], list[float], str]] = []
        self.refused: dict[str, int] = {}
        self.failed: list[str] = []
        self.older = 0
        self.is_away = False
        self._newest = 0

    async def run(self, connections: int, pause: float) -> None:
        await asyncio.gather(*(self._ask(number, pause) for number in range(connections)))

    async def _ask(self, number: int, pause: float) -> None:
        rng = np.random.default_rng(number)
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            while True:
                await asyncio.sleep(pause)
                pairs = rng.integers(0, PROBE, rng.integers(1, 9)).tolist()
                ids = [[each] for each in pairs]
                newest, was_away = self._newest, self.is_away
                try:
                    body = {"inputs": {"users": ids, "items": ids}}
                    answer = await client.post("/v1/models/ctr:predict", json=body)
                except AWAY as error:
                    self._note_failure(type(error).__name__, was_away)
                    await asyncio.sleep(0.1)
                    continue
                if answer.status_code != 200:
                    self._note_failure(f"{answer.status_code} {answer.text}", was_away)
                    continue
                tick = int(answer.headers["x-watermark"])
                self.older += tick < newest
                self._newest = max(self._newest, tick)
                scores = [row[0] for row in answer.json()["outputs"]]
                version = answer.headers["x-model-version"]
                # Not the id of the snapshot: deltas are merged into a base with another one.
                self.answers.append((tick, pairs, scores, version))

    def _note_failure(self, what: str, was_away: bool) -> None:
        if was_away or self.is_away:
            self.refused[what] = self.refused.get(what, 0) + 1
        else:
            self.failed.append(what)

    def wrong(self, folder: Path) -> tuple[int, int]:
        """Returns the number of wrong answers, and of snapshots in answers."""
        lines = map(json.loads, (folder / PROBES).read_text().splitlines())
        probes = {line["tick"]: np.array(line["scores"], np.float32) for line in lines}
        wrong = sum(
            tick not in probes or not np.allclose(scores, probes[tick][pairs], 0, TOLERANCE)
            for tick, pairs, scores, _ in self.answers
        )
        return wrong, len({tick for tick, _, _, _ in self.answers})


class Server:
    """The server's process, and its memory."""

    def __init__(self, folder: Path, port: int) -> None:
        self._command = [sys.executable, "-m", "tf_dynemb.serve", f"--model=ctr={folder}/models"]
        self._command += [f"--http-port={port}", "--grpc-port=-1", "--drain-seconds=1"]
        self._url = f"http://127.0.0.1:{port}"
        self._log = (folder / "server.log").open("a")
        self.memory: list[float] = []
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self.process = subprocess.Popen(self._command, stderr=self._log, cwd=ROOT)
        async with httpx.AsyncClient(base_url=self._url) as client:
            while True:
                assert self.process.poll() is None, "the server has ended"
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/v2/health/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.1)

    async def end(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.process.wait, 60)
        assert code == 0, f"the server has ended with {code}"

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(psutil.Error):
                assert self.process is not None
                info = psutil.Process(self.process.pid).memory_info()
                self.memory.append((info.rss - info.shared) / 2**20)
            await asyncio.sleep(2)


async def command(trainer: asyncio.subprocess.Process, word: str) -> None:
    """Lets the trainer do something, and waits for it."""
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    trainer.stdin.write(f"{word}\n".encode())
    await trainer.stdin.drain()
    line = (await trainer.stdout.readline()).decode().strip()
    assert line == word, f"the trainer has answered {line!r} to {word!r}"


async def error_is(url: str, expected: bool) -> None:
    """Waits until the server reports that it cannot follow, or that it can."""
    async with httpx.AsyncClient(base_url=url) as client:
        end = time.monotonic() + 60
        while bool((await client.get("/v1/models/ctr")).json()["follow_error"]) != expected:
            assert time.monotonic() < end, f"follow_error stays {not expected}"
            await asyncio.sleep(0.1)


async def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    (folder / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "x", folder / "disk"], check=True)
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--trainer", folder,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    tasks: list[asyncio.Task[None]] = []
    port = free_port()
    server, load = Server(folder, port), Load(f"http://127.0.0.1:{port}")
    try:
        for word in ("base", "version"):
            await command(trainer, word)
        await server.start()
        tasks = [
            asyncio.create_task(load.run(options.connections, options.pause)),
            asyncio.create_task(server.watch()),
        ]
        began, restarted_at = time.monotonic(), 0
        for number in range(1, options.deltas + 1):
            share = number / options.deltas
            await asyncio.sleep(max(0, began + share * options.seconds - time.monotonic()))
            for task in tasks:
                if task.done():
                    task.result()
            await command(trainer, "delta")
            if number % (options.deltas // options.versions) == 0 and number < options.deltas:
                await command(trainer, "version")
            if number == options.deltas // 4:
                await command(trainer, "damaged")
                await error_is(load.url, True)
                await asyncio.sleep(2)
                await command(trainer, "base")
                await error_is(load.url, False)
            if number == options.deltas // 2:
                await command(trainer, "full")
            if number == 5 * options.deltas // 8:
                load.is_away = True
                await server.end()
                restarted_at = len(server.memory)
                await server.start()
                load.is_away = False
        await asyncio.sleep(2)
        for task in tasks:
            task.cancel()
        await server.end()
    finally:
        if server.process is not None and server.process.poll() is None:
            server.process.kill()
        with contextlib.suppress(ProcessLookupError):
            trainer.kill()
        await trainer.wait()
        subprocess.run(["umount", folder / "disk"], check=True)
        shutil.copy(folder / "server.log", options.log)
    wrong, snapshots = load.wrong(folder)
    return {
        "seconds": round(time.monotonic() - began),
        "answers": len(load.answers),
        "wrong": wrong,
        "older": load.older,
        "failed": load.failed[:5],
        "refused while the server was away": load.refused,
        "snapshots in answers": snapshots,
        "versions in answers": len({version for _, _, _, version in load.answers}),
        "MiB, first process": growth(server.memory[:restarted_at]),
        "MiB, second process": growth(server.memory[restarted_at:]),
    }


def growth(memory: list[float]) -> list[float]:
    """Returns medians of the tenths of a process's memory."""
    parts = np.array_split(np.array(memory), 10)
    return [round(statistics.median(part)) for part in parts if len(part)]


def train(folder: Path) -> None:
    trainer = Trainer(folder)
    for line in sys.stdin:
        getattr(trainer, line.strip())()
        print(line.strip(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--deltas", type=int, default=1000)
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.05, help="of a connection, in seconds")
    parser.add_argument("--log", default=os.devnull, help="a file for the server's log")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer is not None:
        train(options.trainer)
        return 0
    with tempfile.TemporaryDirectory(prefix="serve_hour_") as folder:
        found = asyncio.run(run(Path(folder), options))
    print(json.dumps(found, indent=2))
    memory = [each for each in (found["MiB, first process"], found["MiB, second process"]) if each]
    grows = any(each[-1] > 1.1 * each[len(each) // 2] + 16 for each in memory)
    is_good = not (found["wrong"] or found["older"] or found["failed"] or grows)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
