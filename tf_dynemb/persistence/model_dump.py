"""incremental_model_dump: the changes in tables since a time, as arrays in memory."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb.communicator import Communicator
from tf_dynemb.parallel.agreement import Ranks, check_alike
from tf_dynemb.persistence.naming import described, dynamic_only, named_variables
from tf_dynemb.tables.cut import Cut, Rows
from tf_dynemb.tables.times import tick_before


def incremental_model_dump(
    variables: Any, utc_time: datetime.datetime | Sequence[datetime.datetime]
) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
    """Returns the rows of tables that were updated since a moment, as arrays (SOK's function).

    With several ranks all of them call this, and each gets the rows of all ranks.

    Args:
        variables: as in `incremental_dump`.
        utc_time: an aware datetime; or a list with one datetime for all tables, or one for each.

    Returns:
        (keys, values): for each table, an array [n] and an array [n, dimension], in no particular
        order. They contain every row that was updated by a batch that began after the moment, and
        may also contain rows that were updated shortly before it.

    Raises:
        ValueError: a time has no time zone or is later than now, or the number of times does not
            match the tables; or the ranks name different variables.
        TypeError: a variable is not a `DynamicVariable`, or a time is not a datetime.
        RuntimeError: the function was called inside a `tf.function`, or failed on another rank.
    """
    ranks = Ranks("incremental_model_dump")
    with ranks.stage() as stage:
        tables = list(dynamic_only(named := named_variables(variables)).values())
        stage.say(described(named))
        ticks = [tick_before(time, "utc_time") for time in _times(utc_time, len(tables))]
        batches: list[list[Rows]] = [[] for _ in tables]
        with Cut(tables, ticks, with_deleted=False) as cut:
            for number, rows in cut.blocks():
                batches[number].append(rows)
            empty = [cut.no_rows(number) for number in range(len(tables))]
    check_alike(stage.said, "the variables")
    keys, values = [], []
    for number, (table, blocks, empty_rows) in enumerate(zip(tables, batches, empty, strict=True)):
        columns = (
            np.concatenate([empty_rows.keys, *(rows.keys for rows in blocks)]),
            np.concatenate([empty_rows.vectors, *(rows.vectors for rows in blocks)]),
        )
        blocks.clear()
        keys_of_all, vectors = _of_all_ranks(ranks.comm, columns, f"dynemb/model_dump/{number}")
        keys.append(keys_of_all)
        values.append(vectors.view(table.dtype.as_numpy_dtype))  # bfloat16 from its bits
    return keys, values


def _times(utc_time: Any, tables: int) -> list[datetime.datetime]:
    """Returns a time for each table."""
    times = list(utc_time) if isinstance(utc_time, (list, tuple)) else [utc_time]
    if len(times) not in (1, tables):
        raise ValueError(
            f"utc_time must be one time, or one for each of the {tables} tables, got {len(times)}."
        )
    return times if len(times) == tables else times * tables


def _of_all_ranks(
    comm: Communicator, columns: Sequence[npt.NDArray[Any]], name: str
) -> list[npt.NDArray[Any]]:
    """Returns the rows of all ranks for each column, in the order of the ranks."""
    if comm.size == 1:
        return list(columns)
    # As bytes, side by side, so that one operation gathers columns of all types.
    widths = [column.itemsize * math.prod(column.shape[1:]) for column in columns]
    as_bytes = [
        np.ascontiguousarray(column).reshape(-1).view(np.uint8).reshape(len(column), width)
        for column, width in zip(columns, widths, strict=True)
    ]
    gathered = comm.allgather(tf.constant(np.concatenate(as_bytes, axis=1)), name).numpy()
    found = np.split(gathered, np.cumsum(widths)[:-1], axis=1)
    return [
        np.ascontiguousarray(rows).view(column.dtype).reshape(-1, *column.shape[1:])
        for rows, column in zip(found, columns, strict=True)
    ]
