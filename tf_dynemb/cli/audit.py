"""`audit`: finds the copies of a key in dumps, deltas, flushes and SavedModels."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from tf_dynemb.chains import copies
from tf_dynemb.chains.copies import Copy, Query
from tf_dynemb.cli import paths
from tf_dynemb.storage import Snapshot

_SAID = {
    "row": "row",
    "deleted": "in the list of deleted keys",
    "counter": "an admission counter that may be of the key",
    "forgotten": "in the list of keys that a restart leaves out",
    "remains": "in what a killed process has left",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "key",
        metavar="KEY",
        help="an integer or a string; -- before it, if it begins with a dash",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", type=paths.argument)
    parser.add_argument("--table", metavar="T", action="append", help="look in this table only")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Finds all copies of a key below the paths, hard links included; exit code 1 if there are any.

    In tables that hash strings, the key is looked for as a string and as a hash.
    """
    query = Query((os.fsencode(options.key),), None)
    found: list[dict[str, Any]] = []
    unknown: list[dict[str, str]] = []
    first: dict[tuple[int, int], str] = {}
    links: dict[tuple[int, int], set[str]] = {}
    numbers: dict[tuple[int, int], int] = {}
    places = copies.places(options.paths)
    for place in places:
        try:
            for copy in _copies(place, query, options.table):
                stat = copy.file.stat()
                file = (stat.st_dev, stat.st_ino)
                numbers[file] = stat.st_nlink
                links.setdefault(file, set()).add(str(copy.file.resolve()))
                found.append(
                    {
                        "path": str(copy.place),
                        "table": copy.table,
                        "what": copy.what,
                        "file": str(copy.file),
                        "same_file_as": first.get(file),
                    }
                )
                first.setdefault(file, str(copy.file))
        except (ValueError, OSError) as error:
            unknown.append({"path": str(place), "why": str(error)})
    others = [
        {"file": first[file], "links": number - len(links[file])}
        for file, number in numbers.items()
        if number > len(links[file])
    ]
    if options.json:
        result = {"copies": found, "other_links": others, "not_examined": unknown}
        print(json.dumps({"places": len(places), **result}, indent=1))
    else:
        _print(found, others, unknown)
        print(f"places: {len(places)}, copies: {len(found)}, not examined: {len(unknown)}")
    return int(bool(found or unknown))


def _copies(place: pathlib.Path, query: Query, tables: list[str] | None) -> Iterator[Copy]:
    if copies.is_snapshot(place):
        yield from copies.in_snapshot(Snapshot(place), query, tables)
    elif copies.is_running(place):
        raise ValueError("it has files of a running process: use table.contains and table.forget")
    elif copies.is_flush(place):
        if tables is None or copies.table_of_flush(place) in tables:
            if copies.is_unfinished_flush(place):
                raise ValueError("it is an incomplete flush; the next flush, or forget, removes it")
            yield from copies.in_flush(place, query, None)
    else:
        yield from copies.in_unfinished(place, query)
        raise ValueError("it is being written, or left by a killed process, and has other rows")


def _print(found: list[dict[str, Any]], others: list[Any], unknown: list[dict[str, str]]) -> None:
    for copy in found:
        table = "" if copy["table"] is None else f"table {copy['table']!r}: "
        same = "" if copy["same_file_as"] is None else f" (the same file as {copy['same_file_as']})"
        print(f"{copy['path']}: {table}{_SAID[copy['what']]}: {copy['file']}{same}")
    for other in others:
        print(f"{other['file']}: {other['links']} more hard links, which are not below these paths")
    for each in unknown:
        print(f"{each['path']}: not examined: {each['why']}")
