"""Rows on their way into a table: which of them are this rank's, and how many go at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tf_dynemb import communicator
from tf_dynemb._warn import warn
from tf_dynemb.parallel import ownership
from tf_dynemb.tables.table import Table, table_stats

# Of a batch.
_LOAD_BYTES = 16 << 20

NO_STATE = np.empty((0, 0), np.float32)


def own_rows(
    table: Table, rows: int, state_width: int, read_keys: Callable[[slice], Any]
) -> Iterator[tuple[Any, Any]]:
    """Goes through rows that are to be loaded, and picks those that this rank owns.

    Args:
        table: to load into.
        rows: how many there are.
        state_width: floats of state in each.
        read_keys: the keys of a stretch of them, of the table's key type.

    Yields:
        which ones to load at a time, as an index of the columns' arrays; and their keys.
    """
    step = _rows_at_a_time(table, state_width)
    # Of the keys that are looked at together, about `step` are this rank's.
    stretch = step * communicator.get().size
    for begin in range(0, rows, stretch):
        end = min(begin + stretch, rows)
        keys = read_keys(slice(begin, end))
        mine = ownership.owned(table, keys)
        if mine is None or mine.all():
            for start in range(begin, end, step):
                some = slice(start, min(start + step, end))
                yield some, keys[some.start - begin : some.stop - begin]
        else:
            places = np.flatnonzero(mine)
            for start in range(0, len(places), step):
                here = places[start : start + step]
                yield begin + here, keys[here]


def slices(table: Table, rows: int, state_width: int) -> Iterator[slice]:
    """Stretches of rows to load at a time."""
    step = _rows_at_a_time(table, state_width)
    return (slice(begin, begin + step) for begin in range(0, rows, step))


def _rows_at_a_time(table: Table, state_width: int) -> int:
    step = max(1, _LOAD_BYTES // (table.dimension * 4 + state_width * 4 + 16))
    if table.options.max_capacity is not None:
        step = min(step, table.options.max_capacity)  # a batch must fit; what comes last stays
    return step


def warn_of_evictions(handle: Any, table: Table, what: str) -> int:
    """Warns if rows that were loaded evicted others; returns how many."""
    evictions = table_stats(handle)["evictions"]
    if evictions:
        warn(
            f"{evictions} of the rows of {what} had no place in {table.name!r}, whose max_capacity "
            f"is {table.options.max_capacity}."
        )
    return evictions
