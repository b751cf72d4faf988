"""What a notebook shows of a table."""

from __future__ import annotations

from collections.abc import Mapping

from tf_dynemb import _html
from tf_dynemb.tables.options import TableOptions


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
        "bytes of rows": _html.size(stats["row_bytes"]),
        "bytes of the index": _html.size(stats["index_bytes"]),
        "bytes of files": _html.size(stats["file_bytes"]) if stats["file_bytes"] else "",
        "load of the index": _share(stats["size"], stats["slots"]),
        "ids that had a row": _share(stats["hits"], stats["hits"] + stats["misses"]),
        "rows evicted": f"{stats['evictions']:,}" if stats["evictions"] else "",
        "rows expired": f"{stats['expired']:,}" if stats["expired"] else "",
        "a full table evicts by": options.evict_strategy if options.max_capacity else "",
        "optimizer state": state,
    }
    return _html.table(title, lines)


def _of(size: int, most: int | None) -> str:
    return f"{size:,}" if most is None else f"{size:,} of at most {most:,}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""
