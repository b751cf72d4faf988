"""Watermarks: the last tick of a snapshot, and the conversion of times to ticks."""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple

from tf_dynemb import _ops, storage


class Watermark(NamedTuple):
    """The last batch whose changes a snapshot contains.

    Attributes:
        id: the id of the snapshot.
        tick: the number of the last batch in the snapshot.
        utc: the time at which the watermark was taken.
    """

    id: str
    tick: int
    utc: datetime.datetime

    @staticmethod
    def of(manifest: storage.Manifest) -> Watermark:
        """Returns the watermark of a snapshot."""
        return Watermark.at(manifest.id, manifest.watermark, manifest.watermark_utc_ns)

    @staticmethod
    def at(id_: str, tick: int, utc_ns: int) -> Watermark:
        """Creates a watermark from a time in nanoseconds since 1970 UTC."""
        seconds, rest = divmod(utc_ns, 10**9)
        utc = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
        return Watermark(id_, tick, utc.replace(microsecond=rest // 1000))


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
