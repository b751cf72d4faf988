"""The conversion of times to ticks, the numbers of batches."""

from __future__ import annotations

import datetime
import time as clocks
from typing import Any

from tf_dynemb import _ops
from tf_dynemb.chains.conditions import ns_of

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
