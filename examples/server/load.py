"""Sends requests to a server from several connections, and checks every answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from model import scores_of

MOST_PAIRS = 8  # of a request
# Scores are float32; the rounding of a matrix product depends on the number of its rows.
TOLERANCE = 1e-6


class Answer(NamedTuple):
    """An answer: when it came, how long it took, the pairs that were asked for, what it was."""

    time: float
    seconds: float
    pairs: list[int]  # their numbers in the probe
    scores: list[float]
    watermark: str  # the id of its snapshot
    is_older: bool  # than an answer that came before the request was sent


class Probe(NamedTuple):
    """A snapshot: when it was published, and the trainer's scores of the probe."""

    published: float
    scores: np.ndarray[Any, Any]


class Load:
    """Requests from several connections.

    Args:
        url: of the server.
        folder: of the trainer.
        connections: the number of connections; each has one request at a time.
    """

    def __init__(self, url: str, folder: Path, connections: int) -> None:
        self._url, self._folder, self._connections = url, folder, connections
        first = json.loads(scores_of(folder).read_text().splitlines()[0])
        self._users, self._items = first["users"], first["items"]
        self._newest = 0  # the tick of the newest answer

    def during(self, ends: Callable[[], Awaitable[Any]]) -> list[Answer]:
        """Sends requests until the end."""
        return asyncio.run(self._during(ends))

    async def _during(self, ends: Callable[[], Awaitable[Any]]) -> list[Answer]:
        answers: list[Answer] = []
        limits = httpx.Limits(max_connections=self._connections)
        async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=30) as client:
            tasks = [
                asyncio.create_task(self._ask(client, number, answers))
                for number in range(self._connections)
            ]
            ended = asyncio.create_task(_as_coroutine(ends))
            await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # an error
                task.cancel()
            await ended
        return answers

    async def _ask(self, client: httpx.AsyncClient, number: int, answers: list[Answer]) -> None:
        rng = np.random.default_rng(number)
        while True:
            pairs = rng.integers(0, len(self._users), rng.integers(1, MOST_PAIRS + 1)).tolist()
            request = {
                "users": [[self._users[i]] for i in pairs],
                "items": [[self._items[i]] for i in pairs],
            }
            newest, began = self._newest, time.perf_counter()
            response = await client.post("/v1/models/ctr:predict", json={"inputs": request})
            seconds = time.perf_counter() - began
            response.raise_for_status()
            scores = [row[0] for row in response.json()["outputs"]]
            tick = int(response.headers["x-watermark"])
            self._newest = max(self._newest, tick)
            answers.append(
                Answer(
                    time.time(),
                    seconds,
                    pairs,
                    scores,
                    response.headers["x-watermark-id"],
                    tick < newest,
                )
            )

    def check(self, answers: list[Answer]) -> dict[str, Any]:
        """Compares answers with the trainer's scores, and finds how soon snapshots were served.

        Returns:
            `wrong`, `older`: the number of answers that differ from the scores at their watermark,
            or are older than an earlier answer; `snapshots`: the number of watermarks in answers;
            `fresh`: for each snapshot, the seconds from its publication to the first answer with it
            or a later one; `change`: the largest difference between snapshots in a score.
        """
        lines = map(json.loads, scores_of(self._folder).read_text().splitlines())
        probes = {
            line["id"]: Probe(line["published"], np.array(line["scores"], np.float32))
            for line in lines
        }
        wrong = sum(
            each.watermark not in probes
            or not np.allclose(each.scores, probes[each.watermark].scores[each.pairs], 0, TOLERANCE)
            for each in answers
        )
        order = {id_: number for number, id_ in enumerate(probes)}
        fresh = []
        for id_, probe in list(probes.items())[1:]:
            seen = [each.time for each in answers if order.get(each.watermark, -1) >= order[id_]]
            if seen:
                fresh.append(max(0.0, min(seen) - probe.published))
        scores = np.stack([probe.scores for probe in probes.values()])
        return {
            "wrong": wrong,
            "older": sum(each.is_older for each in answers),
            "snapshots": len({each.watermark for each in answers}),
            "fresh": fresh,
            "change": float(np.abs(np.diff(scores, axis=0)).max(1).min()) if len(scores) > 1 else 0,
        }


async def _as_coroutine(ends: Callable[[], Awaitable[Any]]) -> None:
    await ends()


def figures(answers: list[Answer], seconds: float) -> dict[str, float]:
    """Returns the number of answers, answers per second, and percentiles of milliseconds."""
    times = np.array([each.seconds for each in answers]) * 1000
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "answers": len(answers),
        "per_second": len(answers) / seconds,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
    }
