"""Requests that wait together are answered together, by one call of a model."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import functools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from grpc_interceptor import exceptions

from tf_dynemb.serve.inputs import Array, Value
from tf_dynemb.serve.loaded_model import Signature, Watermark, message_of
from tf_dynemb.serve.traces import Stages

# The answers to joined requests are compared with that to one of them alone: in the first batches
# of a version, and in few after them.
_CHECKED, _CHECKED_EACH = 32, 256
LOG = logging.getLogger("tf_dynemb.serve")


class Answer(NamedTuple):
    """The answer to a request.

    Attributes:
        outputs: the outputs by name.
        watermark: the snapshot that they were computed from.
        stages: what the request has waited for.
    """

    outputs: dict[str, Array]
    watermark: Watermark
    stages: Stages = Stages(0.0, 0.0)


class Timing(NamedTuple):
    """How a batch was answered.

    Attributes:
        began: when the call began, by `time.perf_counter`.
        queued: the seconds that each of its requests waited before it.
        called: the seconds of the model's call.
        rows: its rows.
    """

    began: float
    queued: list[float]
    called: float
    rows: int


class _Waiting(NamedTuple):
    values: dict[str, Value]
    rows: int
    answer: asyncio.Future[Answer]
    since: float


class Batches:
    """The requests to one signature of a model, and the calls that answer them.

    A thread that is free takes the requests that wait, up to `max_rows` rows of them. So a request
    waits only while all threads call the model. All methods are for the thread of the event loop.

    Args:
        signature: what is called; requests are joined if it `joins`.
        pool: the threads.
        threads: the most calls at a time.
        max_rows: the most rows of a batch of several requests.
        timed: is told of each batch.
    """

    def __init__(
        self,
        signature: Signature,
        pool: concurrent.futures.Executor,
        threads: int,
        max_rows: int,
        timed: Callable[[Timing], None],
    ) -> None:
        self._signature, self._pool, self._timed = signature, pool, timed
        self._threads, self._max_rows = threads, max_rows
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._running = 0
        self._joined_batches = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is answered."""
        return not self._running and not self._waiting

    async def answer(self, values: dict[str, Value], rows: int, seconds: float) -> Answer:
        """Returns the answer to a request.

        Args:
            values: the values of the signature's inputs.
            rows: their number of rows.
            seconds: the longest wait for the answer.

        Raises:
            exceptions.DeadlineExceeded: there was no answer in that time.
            exceptions.InvalidArgument: the model refuses the values.
            exceptions.Internal: the model failed, such as because of a damaged file.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(values, rows, loop.create_future(), time.perf_counter())
        timer = loop.call_later(seconds, _expire, waiting.answer, seconds)
        self._waiting.append(waiting)
        self._start()
        try:
            return await waiting.answer
        finally:
            timer.cancel()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and self._running < self._threads:
            batch = self._take()
            if batch:
                self._running += 1
                called = loop.run_in_executor(self._pool, self._call, batch)
                called.add_done_callback(functools.partial(self._end, batch))

    def _take(self) -> list[_Waiting]:
        """Removes the next batch from the queue, and requests that nobody waits for any more."""
        batch: list[_Waiting] = []
        rows = 0
        while self._waiting:
            each = self._waiting[0]
            if not each.answer.done():
                if batch and (not self._signature.joins or rows + each.rows > self._max_rows):
                    break
                rows += each.rows
                batch.append(each)
            self._waiting.popleft()
        return batch

    def _end(
        self, batch: list[_Waiting], done: asyncio.Future[tuple[list[Answer | Exception], Timing]]
    ) -> None:
        self._running -= 1
        self._start()
        answers, timing = done.result()
        for each, answer in zip(batch, answers, strict=True):
            if each.answer.done():  # its client has gone, or its time was over
                continue
            if isinstance(answer, Exception):
                each.answer.set_exception(answer)
            else:
                stages = Stages(timing.began - each.since, timing.called)
                each.answer.set_result(answer._replace(stages=stages))
        # After the answers are sent, which wake up first.
        asyncio.get_running_loop().call_soon(self._timed, timing)

    def _call(self, batch: list[_Waiting]) -> tuple[list[Answer | Exception], Timing]:
        """Answers a batch, in a thread of the pool."""
        began = time.perf_counter()
        rows = [each.rows for each in batch]
        answers: list[Answer | Exception]
        try:
            answers = self._joined(batch, rows)
        except Exception as error:
            # One request may be the cause: the others get their answers.
            alone = batch if len(batch) > 1 else []
            answers = [self._alone(each) for each in alone] or [_as_status(error)]
        queued = [began - each.since for each in batch]
        timing = Timing(began, queued, time.perf_counter() - began, sum(rows))
        return answers, timing

    def _joined(self, batch: list[_Waiting], rows: list[int]) -> list[Answer | Exception]:
        if len(batch) == 1:
            return [Answer(*self._signature(batch[0].values))]
        outputs, watermark = self._signature(self._signature.join([one.values for one in batch]))
        ends = np.cumsum(rows)
        if any(len(output) != ends[-1] for output in outputs.values()):
            raise ValueError("an output does not have a row for each row of the inputs")
        self._check(batch[0], outputs, watermark)
        return [
            Answer({name: output[end - n : end] for name, output in outputs.items()}, watermark)
            for n, end in zip(rows, ends, strict=True)
        ]

    def _check(self, each: _Waiting, outputs: dict[str, Array], watermark: Watermark) -> None:
        """Stops to join requests, and raises, if a request has another answer alone."""
        self._joined_batches += 1
        if self._joined_batches > _CHECKED and self._joined_batches % _CHECKED_EACH:
            return
        alone, mark = self._signature(each.values)
        why = self._signature.differ(outputs, [alone], [each.rows])
        if why and mark.id == watermark.id:
            self._signature.joins = False
            LOG.error("requests are not joined any more: %s", why)
            raise ValueError(why)

    def _alone(self, each: _Waiting) -> Answer | Exception:
        try:
            return Answer(*self._signature(each.values))
        except Exception as error:
            return _as_status(error)


def _expire(answer: asyncio.Future[Answer], seconds: float) -> None:
    if not answer.done():
        answer.set_exception(exceptions.DeadlineExceeded(f"there was no answer in {seconds:g} s."))


def _as_status(error: Exception) -> Exception:
    """Returns an error of a model as what its client is told."""
    if isinstance(error, (tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError)):
        return exceptions.InvalidArgument(message_of(error))
    if isinstance(error, tf.errors.OpError):
        return exceptions.Internal(message_of(error))
    return exceptions.Internal(f"{type(error).__name__}: {error}")
