"""Which rank holds which rows: each key of a table, each row of a matrix, is on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.dynamic_variable import DynamicVariable
from tf_dynemb.static_variable import owner_of_mode


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
    if isinstance(variable, DynamicVariable):
        ranks = owners(tf.constant(keys, variable.key_type), comm.size)
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
