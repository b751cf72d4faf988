"""Serves a model over HTTP, while the model follows what its trainer publishes.

    python server.py FOLDER/model --port 8500

- `POST /score` with `{"users": [...], "items": [...]}` returns a score for each pair of ids, and
  the watermark of the tables that the scores were computed with.
- `GET /live`: the process answers.
- `GET /ready`: 200 with the watermark and its age, after the warm-up; 503 before it, or with the
  error if the last snapshot could not be applied. A model that cannot apply a snapshot goes on
  serving the one before.

The requests that arrive while a batch is scored form the next batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fastapi
import numpy as np
import numpy.typing as npt
import pydantic
import tensorflow as tf
import uvicorn

import tf_dynemb as de  # noqa: F401  the operators, which the model needs

Ids = npt.NDArray[np.int64]

MOST_ROWS = 1024  # of a request, and of a batch


class Watermark(NamedTuple):
    """The snapshot that a model is at.

    Attributes:
        id: the snapshot's id.
        tick: the trainer's number of its last batch.
        utc_ns: the time of that batch, in nanoseconds since 1970.
        error: why the model could not apply the next snapshot; empty: it could.
    """

    id: str
    tick: int
    utc_ns: int
    error: str

    def public(self) -> dict[str, Any]:
        """Returns what answers contain."""
        age = time.time() - self.utc_ns / 1e9
        return {"id": self.id, "tick": self.tick, "age_seconds": round(age, 3)}


class Scorer:
    """A loaded model.

    Args:
        path: the SavedModel.
    """

    def __init__(self, path: Path) -> None:
        loaded = tf.saved_model.load(str(path))
        spec = tf.TensorSpec([None, 1], tf.int64)

        # In one function: the watermark then belongs to the rows that the model reads.
        @tf.function(input_signature=[spec, spec])
        def score(users: Any, items: Any) -> Any:
            return loaded.serve([users, items]), loaded.watermark()

        self._loaded, self._score = loaded, score

    def score(self, users: Ids, items: Ids) -> tuple[npt.NDArray[np.float32], Watermark]:
        """Returns the scores [rows] of pairs of ids, and the watermark of the tables."""
        scores, state = self._score(users[:, None], items[:, None])
        return np.ravel(scores), _watermark(state)

    def watermark(self) -> Watermark:
        """Returns the watermark of the newest tables."""
        return _watermark(self._loaded.watermark())

    def warm_up(self) -> None:
        """Traces, allocates, and touches what every request touches."""
        for rows in (1, 16, MOST_ROWS):
            ids = np.arange(rows)
            for _ in range(3):
                self.score(ids, ids)


def _watermark(state: dict[str, Any]) -> Watermark:
    return Watermark(
        state["id"].numpy().decode(),
        int(state["watermark"]),
        int(state["watermark_utc_ns"]),
        state["follow_error"].numpy().decode(),
    )


class Pairs(pydantic.BaseModel):
    """A request: pairs of a user and an item."""

    users: list[int] = pydantic.Field(min_length=1, max_length=MOST_ROWS)
    items: list[int]

    @pydantic.model_validator(mode="after")
    def _is_valid(self) -> Pairs:
        if len(self.users) != len(self.items):
            raise ValueError(f"{len(self.users)} users, but {len(self.items)} items")
        if not all(-(2**63) <= id_ < 2**63 for id_ in (*self.users, *self.items)):
            raise ValueError("an id is not an int64")
        return self


class _Waiting(NamedTuple):
    pairs: Pairs
    answer: asyncio.Future[dict[str, Any]]


class Batches:
    """Scores the requests that wait together, one batch at a time.

    Args:
        score: of `Scorer`.

    Attributes:
        count: the number of batches so far.
    """

    def __init__(
        self, score: Callable[[Ids, Ids], tuple[npt.NDArray[np.float32], Watermark]]
    ) -> None:
        self.count = 0
        self._score = score
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue()

    async def answer(self, pairs: Pairs) -> dict[str, Any]:
        """Returns the answer to a request."""
        answer = asyncio.get_running_loop().create_future()
        await self._waiting.put(_Waiting(pairs, answer))
        return await answer

    async def run(self) -> None:
        """Scores batches until it is cancelled."""
        held_back: _Waiting | None = None
        while True:
            batch = [held_back or await self._waiting.get()]
            rows, held_back = len(batch[0].pairs.users), None
            while not self._waiting.empty() and held_back is None:
                each = self._waiting.get_nowait()
                rows += len(each.pairs.users)
                if rows > MOST_ROWS:
                    held_back = each
                else:
                    batch.append(each)
            await self._answer(batch)

    async def _answer(self, batch: list[_Waiting]) -> None:
        self.count += 1
        users, items = (
            np.concatenate([np.array(getattr(w.pairs, name), np.int64) for w in batch])
            for name in ("users", "items")
        )
        try:
            # In a thread, so that requests arrive meanwhile.
            scores, watermark = await asyncio.to_thread(self._score, users, items)
        except Exception as error:  # of the model, such as a damaged file: every request gets it
            for each in batch:
                each.answer.set_exception(error)
            return
        public = watermark.public()
        ends = np.cumsum([len(w.pairs.users) for w in batch])
        for each, part in zip(batch, np.split(scores, ends[:-1]), strict=True):
            if not each.answer.done():  # otherwise the client has gone
                each.answer.set_result({"scores": part.tolist(), "watermark": public})


def create_app(path: Path) -> fastapi.FastAPI:
    """Returns the server of a SavedModel; it loads the model when it starts."""
    serving: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        async def start() -> None:
            scorer = await asyncio.to_thread(Scorer, path)
            await asyncio.to_thread(scorer.warm_up)
            serving["batches"] = Batches(scorer.score)
            serving["scorer"] = scorer
            await serving["batches"].run()

        running = asyncio.create_task(start())
        serving["running"] = running
        with _cancelled(running):
            yield

    app = fastapi.FastAPI(lifespan=lifespan)
    app.state.serving = serving

    @app.get("/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/ready")
    async def ready(response: fastapi.Response) -> dict[str, Any]:
        if "scorer" not in serving:
            response.status_code = 503
            running = serving["running"]
            failed = running.done() and not running.cancelled() and running.exception()
            return {"error": str(failed or "the model is being loaded")}
        watermark = serving["scorer"].watermark()
        if watermark.error:
            response.status_code = 503
        return {"watermark": watermark.public(), "error": watermark.error}

    @app.post("/score")
    async def score(pairs: Pairs) -> dict[str, Any]:
        if "batches" not in serving:
            raise fastapi.HTTPException(503, "the model is being loaded")
        answer: dict[str, Any] = await serving["batches"].answer(pairs)
        return answer

    return app


@contextlib.contextmanager
def _cancelled(task: asyncio.Task[None]) -> Iterator[None]:
    try:
        yield
    finally:
        task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8500)
    options = parser.parse_args()
    uvicorn.run(
        create_app(options.model), host=options.host, port=options.port, log_level="warning"
    )


if __name__ == "__main__":
    main()
