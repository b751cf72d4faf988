"""Agreement between ranks: each stage of a call succeeds on all of them, or fails on all of them.

If a rank raised an error before a collective operation that other ranks had entered, they would
wait forever. The calls that all ranks make (dump, load, ...) are therefore divided into stages.
Within a stage a rank works alone. At its end every rank reports to the others whether it succeeded,
and a value that they need:

    ranks = Ranks("dump")
    with ranks.stage() as stage:
        ...                        # work that can fail
        stage.say({"tick": 7})
    ticks = [said["tick"] for said in stage.said]

The end of a stage is the only collective operation, and a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dynemb import communicator

# One name for all stages of all calls, so that ranks in different calls can detect it.
_NAME = "dynemb/agreement"


class Failure(NamedTuple):
    """The failure of a stage on a rank: the name of the error's class without its module."""

    rank: int
    kind: str
    message: str


class OtherRankError(RuntimeError):
    """A call failed on another rank, and therefore on this one."""


class Ranks:
    """The ranks that make a collective call.

    Args:
        call: the name of the call; the same on all ranks.

    Attributes:
        comm: the communicator.
        rank: the number of this rank.
        size: the number of ranks.
        failures: the failures of the last stage; the same on all ranks.

    Raises:
        RuntimeError: this is inside a `tf.function`.
    """

    def __init__(self, call: str) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError(f"{call} runs eagerly only: call it outside tf.function.")
        self._call = call
        self.comm = communicator.get()
        self.rank = self.comm.rank
        self.size = self.comm.size
        self.failures: tuple[Failure, ...] = ()

    def stage(self) -> Stage:
        """Returns the next stage, for a `with` statement."""
        self.failures = ()
        return Stage(self)

    def conclude(self, error: Exception | None, value: Any) -> list[Any]:
        """Reports the end of a stage on this rank, and receives the reports of the others.

        Returns:
            The value of each rank, in the order of the ranks.

        Raises:
            OtherRankError: the stage failed on another rank, but not on this one.
            RuntimeError: the ranks make different calls.
        """
        failure = None if error is None else [type(error).__name__, str(error)]
        reports = self.comm.gather_objects([self._call, failure, value], _NAME)
        calls = [call for call, _, _ in reports]
        if set(calls) != {self._call}:
            raise RuntimeError(
                f"the ranks must all call the same function, but they call {_list(calls)}."
            )
        self.failures = tuple(
            Failure(rank, *failed) for rank, (_, failed, _) in enumerate(reports) if failed
        )
        if self.failures and error is None:
            rank, kind, message = self.failures[0]
            raise OtherRankError(f"{self._call} failed on rank {rank}: {kind}: {message}")
        return [value for _, _, value in reports]


class Stage:
    """The work of one rank until all ranks know whether all of them have succeeded.

    If the work raises an error on any rank, the stage raises on all ranks when all have reached its
    end: the rank's own error where it failed, and OtherRankError on the other ranks. Exceptions
    that are not an `Exception`, such as KeyboardInterrupt, and errors of the communication itself
    are raised at once.

    Attributes:
        said: after the stage: the value of each rank, in the order of the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.said: list[Any] = []
        self._ranks = ranks
        self._value: Any = None

    def say(self, value: Any) -> None:
        """Sets the value that all ranks get; it must be serializable as JSON."""
        self._value = value

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, Exception):
            self.said = self._ranks.conclude(error, self._value)


def check_alike(values: Sequence[Any], what: str) -> None:
    """Raises ValueError, on all ranks, unless the values of all ranks are the same."""
    if any(value != values[0] for value in values):
        raise ValueError(f"{what} must be the same on all ranks, got {_list(values)}.")


def _list(values: Sequence[Any]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
