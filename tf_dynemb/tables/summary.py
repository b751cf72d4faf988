"""What a notebook shows of a table."""

from __future__ import annotations

import html
from collections.abc import Mapping

from tf_dynemb.tables.options import TableOptions

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def of_table(title: str, options: TableOptions, state: str, stats: Mapping[str, int]) -> str:
    """Returns a small table of HTML.

    Args:
        title: what table it is.
        options: its options.
        state: the optimizer whose state its rows have; empty: none.
        stats: the numbers of `Table.stats`.
    """
    in_memory = stats["size"] - stats["file_rows"]
    in_device = min(stats["device_rows"], in_memory)
    lines = {
        "rows": _of(stats["size"], options.max_capacity),
        "rows in GPU memory": f"{in_device:,}" if in_device else "",
        "rows in files": f"{stats['file_rows']:,}" if stats["file_bytes"] else "",
        "bytes of rows": _size(stats["row_bytes"]),
        "bytes of the index": _size(stats["index_bytes"]),
        "bytes of files": _size(stats["file_bytes"]) if stats["file_bytes"] else "",
        "load of the index": _share(stats["size"], stats["slots"]),
        "ids that had a row": _share(stats["hits"], stats["hits"] + stats["misses"]),
        "rows evicted": f"{stats['evictions']:,}" if stats["evictions"] else "",
        "rows expired": f"{stats['expired']:,}" if stats["expired"] else "",
        "a full table evicts by": options.evict_strategy if options.max_capacity else "",
        "optimizer state": state,
    }
    rows = "".join(
        f"<tr><th style='text-align:left'>{name}</th><td style='text-align:left'>{text}</td></tr>"
        for name, text in ((n, html.escape(text)) for n, text in lines.items())
        if text
    )
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def _of(size: int, most: int | None) -> str:
    return f"{size:,}" if most is None else f"{size:,} of at most {most:,}"


def _size(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""
