"""Watermarks: the last tick of a snapshot."""

from __future__ import annotations

import datetime
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from tf_dynemb import _html, storage


class _Members(NamedTuple):
    id: str
    tick: int
    utc: datetime.datetime


class Watermark(_Members):
    """The last batch whose changes a snapshot contains.

    Attributes:
        id: the id of the snapshot.
        tick: the moment of the snapshot: no batch in it has a greater one.
        utc: the time at which the watermark was taken.
        extra: the dict that `dump` or `incremental_dump` was given for the snapshot; empty if it
            was given none. Watermarks are compared without it.
    """

    extra: Mapping[str, Any] = types.MappingProxyType({})

    def _repr_html_(self) -> str:
        """Returns what a notebook shows, such as below a cell that ends with `dump`."""
        lines = {**_html.watermark(*self), "extra": str(self.extra or "")}
        return _html.table("Watermark", lines)

    @staticmethod
    def of(manifest: storage.Manifest) -> Watermark:
        """Returns the watermark of a snapshot."""
        where = manifest.id, manifest.watermark, manifest.watermark_utc_ns
        return Watermark.at(*where, manifest.extra)

    @staticmethod
    def at(id_: str, tick: int, utc_ns: int, extra: Mapping[str, Any] | None = None) -> Watermark:
        """Creates a watermark from a time in nanoseconds since 1970 UTC."""
        seconds, nanoseconds = divmod(utc_ns, 10**9)
        utc = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
        watermark = Watermark(id_, tick, utc.replace(microsecond=nanoseconds // 1000))
        watermark.extra = dict(extra or {})
        return watermark
