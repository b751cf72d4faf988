"""Ranks that are threads of one process: their communicator, and functions that run them.

The ranks share TensorFlow, the operator library and its clock. If a rank ends while others wait for
it, the others fail, as with Horovod.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from tf_dynemb import communicator
from tf_dynemb.communicator import Communicator

# In seconds: longer than a rank works between two collective calls. A longer wait fails the test.
PATIENCE = 120


class RankGoneError(Exception):
    """Another rank has ended, or makes another collective call; Horovod also raises an error."""


class _Collective:
    """The collective calls of the ranks: each rank gives a value and gets the values of all."""

    def __init__(self, size):
        self.size = size
        self._changed = threading.Condition()
        self._calls = [0] * size  # the number of calls of each rank
        self._given: list[dict] = []  # the names and values of each call, by rank
        self._ended: set[int] = set()

    def exchange(self, rank, name, value):
        with self._changed:
            number = self._calls[rank]
            self._calls[rank] += 1
            if number == len(self._given):
                self._given.append({})
            given = self._given[number]
            given[rank] = (name, value)
            self._changed.notify_all()
            concluded = self._changed.wait_for(
                lambda: len(given) == self.size or self._ended - given.keys(), PATIENCE
            )
            if not concluded:
                raise RankGoneError(f"only the ranks {sorted(given)} called {name}")
            if len(given) < self.size:
                raise RankGoneError(f"rank {self._ended - given.keys()} has ended")
        names = [given[r][0] for r in range(self.size)]
        if names != [name] * self.size:
            raise RankGoneError(f"the ranks make different calls: {names}")
        return [given[r][1] for r in range(self.size)]

    def end(self, rank):
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()


class ThreadCommunicator(Communicator):
    """The communicator of one rank."""

    def __init__(self, collective, rank):
        self.rank = self.local_rank = rank
        self.size = collective.size
        self._collective = collective
        self.calls: list[str] = []

    def _exchange(self, name, value):
        self.calls.append(name)
        return self._collective.exchange(self.rank, name, value)

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
    """The result of a rank, or its error."""

    def __init__(self):
        self.value = None
        self.error: BaseException | None = None


_here = threading.local()


@contextmanager
def ranks_are_threads(monkeypatch):
    """Lets `communicator.get` return the communicator of the calling thread."""
    with monkeypatch.context() as patch:
        patch.setattr(communicator, "get", lambda: getattr(_here, "comm", communicator.LOCAL))
        yield


def outcomes(size, work) -> list[Outcome]:
    """Runs `work(comm)` on `size` ranks; returns their outcomes."""
    collective = _Collective(size)
    found = [Outcome() for _ in range(size)]

    def run(rank):
        _here.comm = ThreadCommunicator(collective, rank)
        try:
            found[rank].value = work(_here.comm)
        except BaseException as error:
            found[rank].error = error
        finally:
            collective.end(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive(), "a rank does not end"
    return found


def run(size, work) -> list:
    """Runs `work(comm)` on `size` ranks; returns the results, or raises the first error."""
    found = outcomes(size, work)
    errors = [outcome.error for outcome in found if outcome.error is not None]
    # Errors that only follow from another rank's end come last.
    errors.sort(key=lambda error: isinstance(error, RankGoneError))
    if errors:
        raise errors[0]
    return [outcome.value for outcome in found]
