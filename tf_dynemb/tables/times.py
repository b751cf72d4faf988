"""The conversion of times to ticks, the numbers of batches."""

from __future__ import annotations

import datetime
from typing import Any

from tf_dynemb import _ops


def tick_before(time: Any, name: str) -> int:
    """Returns the tick of the last batch that was certainly before a moment.

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
    microseconds = since_epoch // datetime.timedelta(microseconds=1)
    return int(_ops.library().dynemb_tick_before(1000 * microseconds))
