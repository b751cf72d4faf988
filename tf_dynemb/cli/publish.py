"""`publish`: makes a served copy of a chain, or goes on with one."""

from __future__ import annotations

import argparse
import functools
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from tf_dynemb.chains.publish import publish
from tf_dynemb.chains.selection import TIMES
from tf_dynemb.cli import paths
from tf_dynemb.format.vector_format import FORMATS
from tf_dynemb.storage import DataLossError, Snapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "source", metavar="SOURCE", type=paths.path_or_url, help="a chain, or a copy of it"
    )
    parser.add_argument("target", metavar="TARGET", type=paths.path_or_url, help="its copy")
    parser.add_argument(
        "--every",
        type=float,
        metavar="SECONDS",
        help="publish again and again, until SIGINT or SIGTERM (a second one does not wait for the "
        "call that runs); failures are printed",
    )
    parser.add_argument(
        "--keep",
        type=int,
        default=0,
        metavar="N",
        help="keep the N bases before the last one in the copy, and their deltas; default: 0",
    )
    parser.add_argument(
        "--rows",
        action="append",
        metavar="[TABLE=]FORMAT",
        help=f"the format of vectors: {', '.join(FORMATS)}; default: as the copy has them",
    )
    parser.add_argument(
        "--where",
        action="append",
        metavar="[TABLE:]CONDITION=VALUE",
        help="rows that the copy has, such as score_from=5, accessed_since=30d, l2_from=0.001, "
        "key_below=1000 or sample=0.1; may be repeated. 'none': all rows. Default: as before",
    )
    parser.add_argument(
        "--max-rows",
        action="append",
        metavar="[TABLE=]N",
        help="the most rows of a table, those with the best scores; 0: any number. Default: as "
        "before",
    )


def run(options: argparse.Namespace) -> int:
    """Makes a copy of a chain for serving, without what only training needs, or goes on with it."""
    if options.every is not None and not options.every > 0:
        raise ValueError(f"--every must be a number of seconds above 0, got {options.every}.")
    call = functools.partial(
        publish,
        options.target,
        from_=options.source,
        keep=options.keep,
        rows=_by_table("rows", options.rows, str),
        where=_conditions(options.where),
        max_rows=_by_table("max-rows", options.max_rows, int),
    )
    if options.every is not None:
        return _repeat(call, options.every)
    for snapshot in (published := _published(call)):
        print(snapshot)
    print(f"published: {len(published)}")
    return 0


def _published(call: Callable[[], list[Snapshot]]) -> list[Snapshot]:
    try:
        return call()
    except TypeError as error:  # a condition is unknown, or of another type
        raise ValueError(str(error)) from error


def _repeat(call: Callable[[], list[Snapshot]], seconds: float) -> int:
    """Publishes again and again; what can pass, such as a store that does not answer, is printed.

    Arguments that are wrong end it.
    """
    ended = threading.Event()

    def end(number: int, _: object) -> None:
        ended.set()
        signal.signal(number, signal.SIG_DFL)  # the next one does not wait for a store

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    said = ""
    while not ended.is_set():
        try:
            for snapshot in _published(call):
                print(snapshot, flush=True)
            said = ""
        except (DataLossError, OSError, RuntimeError) as error:
            if str(error) != said:
                print(f"error: {error}", file=sys.stderr, flush=True)
            said = str(error)
        ended.wait(seconds)
    return 0


def _by_table(name: str, arguments: list[str] | None, kind: type) -> Any:
    """Returns one value, or values by the names of tables; None if there are none."""
    values: dict[str, Any] = {}
    for argument in arguments or ():
        table, _, text = argument.rpartition("=")
        if table in values or (values and "" in (table, *values)):
            raise ValueError(f"--{name} {argument}: pass one value, or one for each table.")
        try:
            values[table] = kind(text)
        except ValueError:
            raise ValueError(f"--{name} {argument}: {text!r} is not a number.") from None
    return values.get("", values or None)


def _conditions(arguments: list[str] | None) -> dict[str, Any] | None:
    """Returns conditions, or conditions by the names of tables; None if there are none."""
    if not arguments:
        return None
    if arguments == ["none"]:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        left, equals, text = argument.rpartition("=")
        if not equals:
            raise ValueError(f"--where {argument}: pass CONDITION=VALUE.")
        table, _, word = left.rpartition(":")
        if word in found.get(table, {}):
            raise ValueError(f"--where {argument}: the condition is there twice.")
        found.setdefault(table, {})[word] = text if word in TIMES else _number(argument, text)
    if "" not in found:
        return found
    if len(found) > 1:
        raise ValueError("--where: pass conditions for all tables, or conditions of tables.")
    return found[""]


def _number(argument: str, text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ValueError(f"--where {argument}: {text!r} is not a number.")
