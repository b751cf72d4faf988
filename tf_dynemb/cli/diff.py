"""`diff`: the differences between the states of two chains."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb.chains.rows import TableRows, tables_of
from tf_dynemb.cli import paths
from tf_dynemb.format.vector_format import decode
from tf_dynemb.serving.table import Schema
from tf_dynemb.storage import Chain

# The number of keys that are named for each kind of difference.
_NAMED = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("a", metavar="A", type=paths.path_or_url)
    parser.add_argument("b", metavar="B", type=paths.path_or_url)
    parser.add_argument("--table", metavar="T", help="compare only this table")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Compares the states of two paths: keys, and the bits of vectors and optimizer state."""
    a, b = (Chain.open(paths.chain_of(path)) for path in (options.a, options.b))
    names_a, names_b = tables_of(a), tables_of(b)
    if options.table is not None:
        if options.table not in (*names_a, *names_b):
            raise KeyError(f"neither path has table {options.table!r}.")
        names_a = tuple(name for name in names_a if name == options.table)
        names_b = tuple(name for name in names_b if name == options.table)
    tables = []
    for name in dict.fromkeys((*names_a, *names_b)):
        if name in names_a and name in names_b:
            tables.append({"name": name, **_compare(TableRows(a, name), TableRows(b, name))})
        else:
            only = "only in A" if name in names_a else "only in B"
            tables.append({"name": name, "form": only})
    differs = any(_differs(table) for table in tables)
    if options.json:
        print(json.dumps({"same": not differs, "tables": tables}, indent=1))
    else:
        print("\n".join(_text(table) for table in tables) or "no tables")
    return int(differs)


class _Found:
    """The keys with one kind of difference: their number, and the first few."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[int] = []

    def add(self, keys: npt.NDArray[np.integer[Any]]) -> None:
        self.count += keys.size
        self.first += keys[: _NAMED - len(self.first)].tolist()


def _compare(a: TableRows, b: TableRows) -> dict[str, Any]:
    if Schema.of(a.entry) != Schema.of(b.entry):
        return {"form": f"A has {Schema.of(a.entry)}, B has {Schema.of(b.entry)}"}
    only_a, only_b, vectors, states = _Found(), _Found(), _Found(), _Found()
    columns = {"vectors": vectors}
    result: dict[str, Any] = {"form": None}
    if a.entry.state != b.entry.state:
        result["form"] = f"A has state {a.entry.state}, B has state {b.entry.state}"
    elif a.entry.state_width:
        columns["state"] = states
    for block in a.blocks():
        shared = b.contains(block.keys)
        only_a.add(block.keys[~shared])
        keys = block.keys[shared]
        for column, found in columns.items():
            values_a = np.ascontiguousarray(block.column(column)[shared])
            values_b = b.gather(keys, column)
            if column == "vectors" and a.entry.stored_as != b.entry.stored_as:
                values_a, values_b = (decode(v, a.entry.dimension) for v in (values_a, values_b))
            # As bits: a NaN equals itself, and 0.0 does not equal -0.0.
            bits = f"u{values_a.dtype.itemsize}"
            found.add(keys[(values_a.view(bits) != values_b.view(bits)).any(axis=1)])
    for block in b.blocks():
        only_b.add(block.keys[~a.contains(block.keys)])
    kinds = {"only_a": only_a, "only_b": only_b, "vectors": vectors, "state": states}
    for kind, found in kinds.items():
        result[kind] = {"count": found.count, "first": found.first}
    return result


def _differs(table: dict[str, Any]) -> bool:
    return any(found["count"] if isinstance(found, dict) else found for _, found in _kinds(table))


def _kinds(table: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(kind, found) for kind, found in table.items() if kind != "name"]


def _text(table: dict[str, Any]) -> str:
    said = {
        "only_a": "only in A",
        "only_b": "only in B",
        "vectors": "different vectors",
        "state": "different state",
    }
    lines = []
    for kind, found in _kinds(table):
        if kind == "form":
            lines += [found] if found else []
        elif found["count"]:
            more = ", ..." if found["count"] > len(found["first"]) else ""
            first = ", ".join(map(str, found["first"]))
            lines.append(f"{said[kind]}: {found['count']} keys: {first}{more}")
    return "\n".join(f"{table['name']}: {line}" for line in lines or ["same"])
