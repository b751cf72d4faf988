"""Agreement between ranks: each stage of a call succeeds on all of them, or fails on all of them.

A rank that raised before a collective operation that others are in would leave them waiting. So the
calls that all ranks make (dump, load, ...) are cut into stages. In a stage a rank works for itself;
at its end every rank tells the others how it went, and what they need to know:

    ranks = Ranks("dump")
    with ranks.stage() as stage:
        ...                        # what may fail
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

# One name for all stages of all calls: ranks that call different things then learn so.
_NAME = "dynemb/agreement"


class Failure(NamedTuple):
    """How a stage failed on a rank: the class of the error, its name without the module's."""

    rank: int
    kind: str
    message: str


class OtherRankError(RuntimeError):
    """A call failed on another rank, and therefore here."""


class Ranks:
    """The ranks, all of which make one call.

    Args:
        call: what they call; the same on all of them.

    Attributes:
        comm: how they talk.
        rank: this one.
        size: how many there are.
        failures: of the last stage; the same on all ranks.

    Raises:
        RuntimeError: in a `tf.function`.
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
        """The next stage; to be used in a `with`."""
        self.failures = ()
        return Stage(self)

    def conclude(self, error: Exception | None, value: Any) -> list[Any]:
        """Tells the others how a stage went, and gets to know how it went there.

        Returns:
            what each rank has to say, in their order.

        Raises:
            OtherRankError: it failed there, but not here.
            RuntimeError: the ranks call different things.
        """
        failure = None if error is None else [type(error).__name__, str(error)]
        told = self.comm.gather_objects([self._call, failure, value], _NAME)
        calls = [call for call, _, _ in told]
        if set(calls) != {self._call}:
            raise RuntimeError(f"the ranks must all call the same, but they call {_list(calls)}.")
        self.failures = tuple(
            Failure(rank, *failed) for rank, (_, failed, _) in enumerate(told) if failed
        )
        if self.failures and error is None:
            rank, kind, message = self.failures[0]
            raise OtherRankError(f"{self._call} failed on rank {rank}: {kind}: {message}")
        return [value for _, _, value in told]


class Stage:
    """What a rank does for itself until all ranks know that all of them have succeeded.

    If it raises, so it does on all ranks when all have come to its end: where it failed what was
    raised there, elsewhere OtherRankError. What is no `Exception`, such as KeyboardInterrupt, and
    errors of the communication itself are not waited for.

    Attributes:
        said: after the stage: what each rank has said, in their order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.said: list[Any] = []
        self._ranks = ranks
        self._value: Any = None

    def say(self, value: Any) -> None:
        """Leaves something for all ranks; JSON must be able to say it."""
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
    """Raises ValueError, on all ranks, unless what the ranks have said is the same."""
    if any(value != values[0] for value in values):
        raise ValueError(f"{what} must be the same on all ranks, got {_list(values)}.")


def _list(values: Sequence[Any]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
