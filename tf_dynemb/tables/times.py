"""The conversion of times to ticks, the numbers of batches."""

from __future__ import annotations

import datetime
import time as clocks
from typing import Any

from tf_dynemb import _ops

# By how much another machine's clock can be ahead of this one's.
_SKEW_NS = 60 * 10**9


def tick_before(time: Any, name: str) -> int:
    """Returns the tick of the last batch that was certainly before a moment.

    Args:
        time: an aware datetime.
        name: the name of the argument, for errors.

    Raises:
        TypeError: `time` is not a datetime.
        ValueError: `time` has no time zone; or it is later than now. It then comes from a clock
            that is wrong, or was then, and is not the moment that the caller means.
    """
    nanoseconds = ns_of(time, name)
    if nanoseconds > clocks.time_ns() + _SKEW_NS:
        now = datetime.datetime.now(datetime.timezone.utc)
        raise ValueError(
            f"{name}={time!r} is later than now, {now}: it was taken from a clock that is wrong, "
            "or the system's clock was set back since."
        )
    return int(_ops.library().dynemb_tick_before(nanoseconds))


def ns_of(time: Any, name: str) -> int:
    """Returns a moment in nanoseconds since 1970 UTC.

    Args:
        time: an aware datetime.
        name: the name of the argument, for errors.

    Raises:
        TypeError: `time` is not a datetime.
        ValueError: `time` has no time zone.
    """
    if not isinstance(time, datetime.datetime):
        raise TypeError(f"{name} must be a datetime, got {time!r}.")
    if time.tzinfo is None or time.utcoffset() is None:
        raise ValueError(
            f"{name}={time!r} has no time zone: use datetime.now(timezone.utc), or "
            "pytz.utc.localize."
        )
    since_epoch = time - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    return 1000 * (since_epoch // datetime.timedelta(microseconds=1))
