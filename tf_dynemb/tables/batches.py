"""Loading of rows into a table: the selection of this rank's rows, and the size of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb._warn import warn
from tf_dynemb.format.strategies import STRATEGIES
from tf_dynemb.parallel import ownership
from tf_dynemb.tables.admission_options import ENTRIES, Frequency
from tf_dynemb.tables.table import Table, table_stats

# The bytes of a batch.
_LOAD_BYTES = 16 << 20

NO_STATE = np.empty((0, 0), np.float32)
# In place of scores, for rows that get the scores of new rows.
NEW_SCORES = np.empty([0], np.uint32)


def owned_rows(
    table: Table, rows: int, state_width: int, read_keys: Callable[[slice], npt.NDArray[Any]]
) -> Iterator[tuple[slice | npt.NDArray[np.int64], npt.NDArray[Any]]]:
    """Selects the rows that this rank owns from rows that are to be loaded.

    Args:
        table: the table to load into.
        rows: the number of rows.
        state_width: the floats of state in each row.
        read_keys: returns the keys of a range of rows, of the table's key type.

    Yields:
        The rows to load at a time, as an index into the columns' arrays, and their keys.
    """
    step = _rows_at_a_time(table, state_width)
    # About `step` of the keys that are examined together are this rank's.
    range_size = step * communicator.get().size
    for begin in range(0, rows, range_size):
        end = min(begin + range_size, rows)
        keys = read_keys(slice(begin, end))
        is_owned = ownership.owned(table, keys)
        if is_owned is None or is_owned.all():
            for start in range(begin, end, step):
                selected = slice(start, min(start + step, end))
                yield selected, keys[selected.start - begin : selected.stop - begin]
        else:
            positions = np.flatnonzero(is_owned)
            for start in range(0, len(positions), step):
                here = positions[start : start + step]
                yield begin + here, keys[here]


def slices(table: Table, rows: int, state_width: int) -> Iterator[slice]:
    """Returns the ranges of rows to load at a time."""
    step = _rows_at_a_time(table, state_width)
    return (slice(begin, begin + step) for begin in range(0, rows, step))


def _rows_at_a_time(table: Table, state_width: int) -> int:
    step = max(1, _LOAD_BYTES // (table.dimension * 4 + state_width * 4 + 16))
    if most := table.attributes["max_capacity"]:
        # A batch must fit into the table; if not all rows fit, the last ones remain.
        step = min(step, most)
    return step


def takes_scores(strategy: str | None, table: Table, what: str) -> bool:
    """Whether rows that a table with another strategy wrote keep their scores; warns if not.

    Last accesses are kept only by tables whose strategy uses them, like scores of other kinds.

    Args:
        strategy: the strategy of the table that wrote the rows; None: "lru".
        table: the table to load into.
        what: the source of the rows, for the warning.
    """
    there, here = strategy or "lru", table.options.strategy
    if there == here or not (STRATEGIES[there].has_scores or table.options.has_scores):
        return True
    warn(
        f"{what} was written with evict_strategy={there!r}, but {table.name!r} has {here!r}: the "
        "scores of its rows are reset."
    )
    return False


def counter_lines(table: Table) -> int | None:
    """Returns the lines of admission counters of all ranks; None if the table counts no keys."""
    admission = table.options.admission
    return admission.lines if isinstance(admission, Frequency) else None


def takes_counters(lines: int | None, table: Table, what: str) -> bool:
    """Whether a table takes admission counters that were saved; warns if they do not fit.

    Args:
        lines: the number of lines of counters that all ranks saved; None: there are none.
        table: the table to load into.
        what: the source of the counters, for the warning.
    """
    here = counter_lines(table)
    if lines is None or here is None or lines == here:
        return lines is not None and here is not None
    warn(
        f"{what} has {lines * ENTRIES} admission counters, but {table.name!r} has "
        f"{here * ENTRIES}: counting starts again from 0."
    )
    return False


def load_steps(handle: tf.Tensor, steps: Sequence[float], tick: int) -> None:
    """Gives a table the steps that rows which are about to be loaded can lack.

    Args:
        handle: the table's handle; its rows have the state for which the steps were saved.
        steps: as in `CutInfo`.
        tick: the moment of the cut.
    """
    if steps:
        _ops.library().dynemb_load_steps(handle, tf.constant(list(steps), tf.float64), tick)


def warn_of_evictions(handle: tf.Tensor, table: Table, what: str) -> int:
    """Warns if loaded rows evicted others; returns the number of evictions."""
    evictions = table_stats(handle)["evictions"]
    if evictions:
        warn(
            f"{evictions} of the rows of {what} did not fit into {table.name!r}, whose "
            f"max_capacity is {table.options.max_capacity}: pass a greater one."
        )
    return evictions
