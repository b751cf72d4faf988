"""Small tables of HTML, which notebooks show for an object (`_repr_html_`)."""

from __future__ import annotations

import datetime
import html
from collections.abc import Mapping

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def table(title: str, lines: Mapping[str, str]) -> str:
    """Returns a table of names and texts; lines without a text are left out."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in lines.items()
        if text
    )
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def watermark(id_: str, tick: int, utc: datetime.datetime) -> dict[str, str]:
    """Returns the lines that say which snapshot something is of."""
    return {
        "snapshot": id_[:8],
        "watermark": str(tick),
        "time": f"{utc:%Y-%m-%d %H:%M:%S} UTC",
    }


def size(count: float) -> str:
    """Returns a number of bytes in the largest unit of which there is one."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"
