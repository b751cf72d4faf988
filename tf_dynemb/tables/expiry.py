"""The time to live of rows: its options, its clocks, and the ages of rows in files."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb._warn import warn
from tf_dynemb.chains.conditions import ns_of

CLOCKS = ("steps", "wall", "data")
SINCE = ("update", "access")
_MOST = 2**62
# The last second of the year 2199. Milliseconds, by mistake, are later.
_LAST_SECOND = 7_258_118_399
_MICROSECOND = datetime.timedelta(microseconds=1)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """How long rows live.

    Attributes:
        ttl: the age at which a row expires, in steps, in nanoseconds or, with integers as the times
            of the data, in the user's unit. 0: rows do not expire.
        clock: "steps", "wall" or "data".
        since: "update" or "access".
        min_rows: nothing expires in a table of at most this number of rows.
        in_ns: whether `ttl` is in nanoseconds.
    """

    ttl: int = 0
    clock: str = "steps"
    since: str = "update"
    min_rows: int = 0
    in_ns: bool = False

    @staticmethod
    def of(ttl: Any, clock: Any, since: Any, min_rows: Any, has_scores: bool) -> Lifetime:
        """Checks the options of a table, which have these names after `ttl_`.

        Args:
            ttl: a positive timedelta or integer; None: rows do not expire.
            clock: one of CLOCKS; None: "wall" for a timedelta, otherwise "steps".
            since: one of SINCE.
            min_rows: a number of rows.
            has_scores: whether the table records scores instead of the times of last accesses.

        Raises:
            ValueError: an option is invalid, or contradicts another; the message names both.
        """
        if since not in SINCE:
            raise ValueError(f"ttl_since must be 'update' or 'access', got {since!r}.")
        if clock is not None and clock not in CLOCKS:
            raise ValueError(f"ttl_clock must be one of {', '.join(CLOCKS)}, got {clock!r}.")
        if isinstance(min_rows, bool) or not hasattr(min_rows, "__index__"):
            raise ValueError(f"ttl_min_rows must be an integer, got {min_rows!r}.")
        if not 0 <= min_rows < 2**63:
            raise ValueError(f"ttl_min_rows must be 0 or more (63 bits), got {min_rows!r}.")
        if ttl is None:
            for name, value in (("clock", clock), ("since", since), ("min_rows", min_rows)):
                if value not in (None, "update", 0):
                    raise ValueError(f"ttl_{name}={value!r} needs a ttl.")
            return Lifetime()
        in_ns = isinstance(ttl, datetime.timedelta)
        if not in_ns and (isinstance(ttl, bool) or not hasattr(ttl, "__index__")):
            raise ValueError(
                f"ttl must be a datetime.timedelta or an integer of steps, got {ttl!r}."
            )
        value = ttl // _MICROSECOND * 1000 if in_ns else int(ttl)
        if not 0 < value <= _MOST:
            raise ValueError(f"ttl must be positive, and at most 2^62 steps or ns, got {ttl!r}.")
        clock = clock or ("wall" if in_ns else "steps")
        if in_ns and clock == "steps":
            raise ValueError(f"ttl={ttl!r} is a time, but ttl_clock='steps' counts steps.")
        if not in_ns and clock == "wall":
            raise ValueError(
                f"ttl={ttl!r} is a number of steps, but ttl_clock='wall' needs a timedelta."
            )
        if since == "access" and has_scores:
            raise ValueError(
                "ttl_since='access' needs an evict_strategy that records the times of last "
                "accesses: 'lru', 'epoch_lru' or 'none'."
            )
        return Lifetime(value, clock, since, int(min_rows), in_ns)

    def attributes(self, ranks: int) -> dict[str, Any]:
        """Returns the attributes of the DynembTable operator, for one of the ranks of a table."""
        return {
            "ttl": self.ttl,
            "ttl_clock": self.clock,
            "ttl_since": self.since,
            "ttl_min_rows": -(-self.min_rows // ranks),
        }

    def data_time(self, time: Any) -> tf.Tensor:
        """Returns a time of the data as an int64 tensor, in the unit of the ttl.

        Args:
            time: for a ttl that is a timedelta, an aware datetime, or a number or tensor of seconds
                since 1970 UTC, int or float64; otherwise an integer or a tensor of integers.

        Raises:
            ValueError: the table has another clock; or the time has no time zone, is negative, or
                is too large, such as milliseconds.
            TypeError: the time is not a time.
        """
        if self.clock != "data" or not self.ttl:
            raise ValueError("set_data_time needs a table with a ttl and ttl_clock='data'.")
        if isinstance(time, datetime.datetime):
            if not self.in_ns:
                raise TypeError(f"the ttl is an integer, so times must be integers, got {time!r}.")
            ticks = ns_of(time, "time")
            if not 0 <= ticks <= _LAST_SECOND * 10**9:
                raise ValueError(f"time={time!r} is before 1970 or after 2199.")
            return tf.constant(ticks, tf.int64)
        value = _as_number(time)
        if value.shape.rank not in (0, None):
            raise ValueError(f"time must be a scalar, got shape {value.shape}.")
        if not self.in_ns and not value.dtype.is_integer:
            raise TypeError(f"the ttl is an integer, so times must be integers, got {time!r}.")
        most = _LAST_SECOND if self.in_ns else 2**63 - 1
        if tf.executing_eagerly():
            if not 0 <= value.numpy() <= most:
                raise ValueError(
                    f"time={time!r} is negative, or too large"
                    + (": it must be in seconds since 1970." if self.in_ns else ".")
                )
        else:
            message = "time is negative, or not in seconds since 1970"
            most = tf.cast(min(most, value.dtype.max), value.dtype)
            checks = [
                tf.debugging.assert_non_negative(value, message),
                tf.debugging.assert_less_equal(value, most, message),
            ]
            with tf.control_dependencies([check for check in checks if check is not None]):
                value = tf.identity(value)
        if not self.in_ns:
            return tf.cast(value, tf.int64)
        if value.dtype.is_integer:
            return tf.cast(value, tf.int64) * 10**9
        return tf.cast(tf.round(value * 1e9), tf.int64)


def _as_number(time: Any) -> tf.Tensor:
    """Returns a time as a tensor of integers or of float64; raises TypeError if it is no number."""
    if isinstance(time, float):
        time = np.float64(time)
    try:
        value = tf.convert_to_tensor(time)
    except (TypeError, ValueError) as error:
        raise TypeError(f"time must be a datetime or a number, got {time!r}.") from error
    if value.dtype == tf.float64 or value.dtype.is_integer:
        return value
    if value.dtype.is_floating:
        raise TypeError(
            f"time has dtype {value.dtype.name}, which cannot represent seconds since 1970: cast "
            "it to float64 or int64."
        )
    raise TypeError(f"time must be a datetime or a number, got {time!r}.")


def take_ages(
    handle: tf.Tensor, lifetime: Lifetime, clock: str | None, marks: Sequence[int], what: str
) -> None:
    """Gives the rows of a table, which were loaded with their times, the ages that they had.

    Without marks, rows are as old as their load. Rows whose time to live has run out since they
    were written are removed, with a warning.

    Args:
        handle: the table's handle.
        lifetime: the table's options.
        clock: the clock of the table that wrote the rows; None: its rows did not expire.
        marks: its marks.
        what: the source of the rows, for a warning.
    """
    if not lifetime.ttl or not clock or not marks:
        return
    if clock != lifetime.clock:
        warn(
            f"{what} was written with ttl_clock={clock!r}, not {lifetime.clock!r}: the ages of its "
            "rows are reset."
        )
        return
    library = _ops.library()
    library.dynemb_set_expiry_marks(handle, tf.constant(list(marks), tf.int64))
    rows = int(library.dynemb_size(handle))
    expired = int(library.dynemb_expire(handle))
    if expired:
        last = ""
        if clock == "wall":
            utc = _EPOCH + datetime.timedelta(microseconds=marks[-1] // 1000)
            last = f" {what} was written at {utc:%Y-%m-%d %H:%M} UTC."
        warn(
            f"{expired} of {rows} rows of {what} are not loaded: their ttl has run out since they "
            f"were last used.{last}"
        )


def keep_alive(
    accesses: npt.NDArray[np.uint32], marks: Sequence[int], base: int
) -> npt.NDArray[np.uint32]:
    """Returns last accesses, uint32 [n] since `base`, with no row older than its writer allows.

    A delta does not contain rows that were only read since the snapshot before it, so that their
    last accesses in that snapshot are too early. The writer had these rows nevertheless.
    """
    least = max(0, marks[0] + 1 - base) if marks else 0
    return np.maximum(accesses, np.uint32(min(least, 2**32 - 1)))
