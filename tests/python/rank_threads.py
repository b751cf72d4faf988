"""Ranks that are threads of one process: their communication, and functions to run them.

They share TensorFlow, the operator library and its clock. If a rank ends while others wait for it,
they fail, as with Horovod.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from tf_dynemb import communicator
from tf_dynemb.communicator import Communicator

# Longer than any rank works between two collective operations; exceeding it fails a test.
PATIENCE = 120


class RankGoneError(Exception):
    """Another rank has ended, or is in another operation; Horovod has an error for this too."""


class _Meeting:
    """A barrier of all ranks, used repeatedly: each leaves a value and gets the values of all."""

    def __init__(self, size):
        self.size = size
        self._changed = threading.Condition()
        self._met = [0] * size  # the number of times that each rank has come
        self._left: list[dict] = []  # the values of each meeting, by rank
        self._gone: set[int] = set()

    def exchange(self, rank, name, value):
        with self._changed:
            number = self._met[rank]
            self._met[rank] += 1
            if number == len(self._left):
                self._left.append({})
            left = self._left[number]
            left[rank] = (name, value)
            self._changed.notify_all()
            come = self._changed.wait_for(
                lambda: len(left) == self.size or self._gone - left.keys(), PATIENCE
            )
            if not come:
                raise RankGoneError(f"of the ranks only {sorted(left)} came to {name}")
            if len(left) < self.size:
                raise RankGoneError(f"rank {self._gone - left.keys()} has ended")
        names = [left[r][0] for r in range(self.size)]
        if names != [name] * self.size:
            raise RankGoneError(f"the ranks are at {names}")
        return [left[r][1] for r in range(self.size)]

    def leave(self, rank):
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


class ThreadCommunicator(Communicator):
    """The communicator of one rank."""

    def __init__(self, meeting, rank):
        self.rank = self.local_rank = rank
        self.size = meeting.size
        self._meeting = meeting
        self.calls: list[str] = []

    def _exchange(self, name, value):
        self.calls.append(name)
        return self._meeting.exchange(self.rank, name, value)

    def alltoall(self, tensor, splits, name):
        ends = np.cumsum(splits)
        parts = [tensor[end - n : end] for end, n in zip(ends, splits, strict=True)]
        received = [parts[self.rank] for parts in self._exchange(name, parts)]
        lengths = tf.constant([len(part) for part in received], tf.int32)
        return tf.concat(received, 0), lengths

    def allreduce(self, tensors, average, name):
        sums = [tf.add_n(parts) for parts in zip(*self._exchange(name, list(tensors)), strict=True)]
        return [total / self.size for total in sums] if average else sums

    def allgather(self, tensor, name):
        return tf.concat(self._exchange(name, tensor), 0)

    def broadcast(self, tensor, root, name):
        return self._exchange(name, tensor)[root]


class Outcome:
    """The result of a rank, or the error that it ended with."""

    def __init__(self):
        self.value = None
        self.error: BaseException | None = None


_here = threading.local()


@contextmanager
def ranks_are_threads(monkeypatch):
    """Inside, `communicator.get` returns the communicator of the calling thread."""
    with monkeypatch.context() as patch:
        patch.setattr(communicator, "get", lambda: getattr(_here, "comm", communicator.LOCAL))
        yield


def outcomes(size, work) -> list[Outcome]:
    """Runs `work(comm)` on this number of ranks; returns how it ended on each."""
    meeting = _Meeting(size)
    found = [Outcome() for _ in range(size)]

    def run(rank):
        _here.comm = ThreadCommunicator(meeting, rank)
        try:
            found[rank].value = work(_here.comm)
        except BaseException as error:
            found[rank].error = error
        finally:
            meeting.leave(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive(), "a rank waits for ever"
    return found


def run(size, work) -> list:
    """Returns the results of `work(comm)` on the ranks; raises the first error of a rank."""
    found = outcomes(size, work)
    errors = [outcome.error for outcome in found if outcome.error is not None]
    # An error that is not merely a consequence of another rank's end.
    errors.sort(key=lambda error: isinstance(error, RankGoneError))
    if errors:
        raise errors[0]
    return [outcome.value for outcome in found]
