"""The owner of each row: each key of a table, and each row of a matrix, is on one rank."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.parallel.exchange import BY_HASH, SpreadTable


def check_mode(mode: Any) -> None:
    """Raises ValueError unless `mode` is None, "distributed" or "localized:RANK" of a rank."""
    if mode is None or mode == "distributed":
        return
    match = re.fullmatch(r"localized:(\d+)", mode) if isinstance(mode, str) else None
    if match is None:
        raise ValueError(f"mode must be None, 'distributed' or 'localized:RANK', got {mode!r}.")
    size = communicator.get().size
    if int(match.group(1)) >= size:
        raise ValueError(f"mode={mode!r} names rank {match.group(1)}, but there are {size} ranks.")


def owner_of_mode(mode: str | None) -> int | None:
    """Returns the rank that holds a localized table; None for a distributed one."""
    return int(mode.split(":")[1]) if mode is not None and ":" in mode else None


def owned(
    variable: SpreadTable | tf.Variable, keys: npt.NDArray[Any]
) -> npt.NDArray[np.bool_] | None:
    """Returns which keys this rank holds.

    Args:
        variable: a DynamicVariable, or a Variable, whose keys are row numbers.
        keys: [n], of the variable's key type.

    Returns:
        bool [n]; None if this rank holds all keys.
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


def owners(keys: tf.Tensor, num_ranks: int) -> npt.NDArray[np.int32]:
    """Returns the owner of each key [n] of a table that `num_ranks` ranks share: int32 [n]."""
    with _ops.on_host():
        return np.asarray(_ops.library().dynemb_owners(keys, num_ranks=num_ranks))


def is_elsewhere(variable: SpreadTable | tf.Variable) -> bool:
    """Whether another rank holds the whole variable."""
    comm = communicator.get()
    return comm.size > 1 and _only_rank(variable) not in (None, comm.rank)


def capacity_share(rows: int, ranks: int) -> int:
    """Returns the most rows of one of several ranks, so that `rows` different keys find a place.

    A hash of the key decides which rank holds it. A rank's share of the keys is therefore binomial,
    with about the variance of its mean. It exceeds the mean by more than six standard deviations
    with a probability of 1e-9.
    """
    mean = -(-rows // ranks)
    return rows if ranks == 1 else min(rows, mean + math.ceil(6 * math.sqrt(mean)))


def share_of(variable: SpreadTable | tf.Variable, rows: int) -> int:
    """Returns the approximate number of a variable's rows that this rank holds."""
    comm = communicator.get()
    rank = _only_rank(variable)
    if rank is None:
        return -(-rows // comm.size)
    return rows if rank == comm.rank else 0


def global_rows(variable: tf.Variable) -> npt.NDArray[np.int64]:
    """Returns the numbers in the whole matrix of this rank's rows of a Variable: int64 [rows]."""
    comm = communicator.get()
    local = np.arange(variable.shape[0])
    return local if _only_rank(variable) is not None else local * comm.size + comm.rank


def local_rows(variable: tf.Variable, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Converts numbers of rows of the whole matrix to numbers in this rank's shard."""
    return rows if _only_rank(variable) is not None else rows // communicator.get().size


def _only_rank(variable: SpreadTable | tf.Variable) -> int | None:
    """Returns the rank that holds the whole variable; None if it is spread over several."""
    return 0 if communicator.get().size == 1 else owner_of_mode(variable.mode)
