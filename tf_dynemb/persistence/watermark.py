"""Watermarks: the last tick of a snapshot."""

from __future__ import annotations

import datetime
from typing import NamedTuple

from tf_dynemb import storage


class Watermark(NamedTuple):
    """The last batch whose changes a snapshot contains.

    Attributes:
        id: the id of the snapshot.
        tick: the moment of the snapshot: no batch in it has a greater one.
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
        seconds, nanoseconds = divmod(utc_ns, 10**9)
        utc = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
        return Watermark(id_, tick, utc.replace(microsecond=nanoseconds // 1000))
