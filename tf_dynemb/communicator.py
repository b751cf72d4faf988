"""Who takes part in training: the only place that knows of ranks.

This build runs in one process. The rest of the package asks `get()` for rank and size and needs no
other change when more ranks come.
"""

from __future__ import annotations

import dataclasses
import sys


@dataclasses.dataclass(frozen=True)
class Communicator:
    """A group of ranks; this one is the group of one process."""

    rank: int = 0
    size: int = 1


_LOCAL = Communicator()


def get() -> Communicator:
    """The communicator of this process."""
    _reject_many_ranks()
    return _LOCAL


def init(comm_tool: str = "horovod") -> None:
    """Prepares communication between ranks; optional in one process.

    Args:
        comm_tool: "horovod", the only tool known. Horovod need not be installed to train in one
            process.

    Raises:
        ValueError: another `comm_tool`.
        NotImplementedError: Horovod is initialised with more than one rank, which this build does
            not support.
    """
    if comm_tool != "horovod":
        raise ValueError(f"comm_tool must be 'horovod', got {comm_tool!r}.")
    _reject_many_ranks()


def _reject_many_ranks() -> None:
    # Horovod can only be initialised where it is imported: looking costs nothing and imports
    # nothing.
    horovod = sys.modules.get("horovod.tensorflow")
    if horovod is not None and horovod.is_initialized() and horovod.size() > 1:
        raise NotImplementedError(
            f"Horovod runs {horovod.size()} ranks, but this build of tf_dynemb trains in one "
            "process only."
        )
