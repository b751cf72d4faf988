"""Which rank holds which rows: each key of a table, each row of a matrix, is on one rank."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.parallel.exchange import BY_HASH


def check_mode(mode: Any) -> None:
    """Raises ValueError unless `mode` is None, "distributed" or "localized:RANK"."""
    if mode is None or mode == "distributed":
        return
    match = re.fullmatch(r"localized:(\d+)", mode) if isinstance(mode, str) else None
    if match is None:
        raise ValueError(f"mode must be None, 'distributed' or 'localized:RANK', got {mode!r}.")
    size = communicator.get().size
    if int(match.group(1)) >= size:
        raise ValueError(f"mode={mode!r} names rank {match.group(1)}, but there are {size} ranks.")


def owner_of_mode(mode: str | None) -> int | None:
    """The rank that a localized table is on; None for a distributed one."""
    return int(mode.split(":")[1]) if mode is not None and ":" in mode else None


def owned(variable: Any, keys: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
    """Which keys this rank holds.

    Args:
        variable: a DynamicVariable, or a Variable, whose keys are row numbers.
        keys: [n], of its key type.

    Returns:
        bool [n]; None if this rank holds all there are.
    """
    comm = communicator.get()
    if comm.size == 1:
        return None
    rank = _only_rank(variable)
    if rank is not None:
        return None if rank == comm.rank else np.zeros(len(keys), np.bool_)
    spread = variable.spread
    if spread.owner == BY_HASH:
        ranks = owners(tf.constant(keys, spread.key_type), comm.size)
    else:
        ranks = keys % comm.size
    return np.asarray(ranks == comm.rank, np.bool_)


def owners(keys: Any, num_ranks: int) -> npt.NDArray[np.int32]:
    """The rank of each key [n] of a table that is spread over so many ranks: int32 [n]."""
    with _ops.on_host():
        return np.asarray(_ops.library().dynemb_owners(keys, num_ranks=num_ranks))


def is_elsewhere(variable: Any) -> bool:
    """Whether another rank holds all of a variable."""
    comm = communicator.get()
    return comm.size > 1 and _only_rank(variable) not in (None, comm.rank)


def share_of(variable: Any, rows: int) -> int:
    """How many of a variable's rows this rank is likely to hold."""
    comm = communicator.get()
    rank = _only_rank(variable)
    if rank is None:
        return -(-rows // comm.size)
    return rows if rank == comm.rank else 0


def global_rows(variable: Any) -> npt.NDArray[np.int64]:
    """Where the rows of a Variable that this rank has are in the whole matrix: int64 [rows]."""
    comm = communicator.get()
    local = np.arange(variable.shape[0])
    return local if _only_rank(variable) is not None else local * comm.size + comm.rank


def local_rows(variable: Any, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where rows of the whole matrix that this rank has are in its part of it."""
    return rows if _only_rank(variable) is not None else rows // communicator.get().size


def _only_rank(variable: Any) -> int | None:
    """The rank that holds all of a variable; None: it is spread over several."""
    return 0 if communicator.get().size == 1 else owner_of_mode(variable.mode)
