"""`inspect`: shows the content of a chain of snapshots."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from tf_dynemb.chains.saved_models import is_model, served_tables
from tf_dynemb.cli import paths
from tf_dynemb.format.manifest import DENSE_PARTS
from tf_dynemb.storage import Chain, Manifest, Snapshot, TableEntry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("path", metavar="PATH", type=paths.path_or_url)
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Prints the snapshots of a chain, or of a SavedModel, and their tables."""
    if is_model(options.path):
        return _show_model(options.path, options.json)
    snapshots = _snapshots(options.path)
    if options.json:
        print(json.dumps({"path": str(options.path), "snapshots": snapshots}, indent=1))
    else:
        _show(snapshots)
    return 0


def _show_model(model: pathlib.Path, as_json: bool) -> int:
    found: list[dict[str, Any]] = [
        {
            "tables": str(each.path),
            "inside": each.is_inside,
            "follow": each.follow,
            "snapshots": _snapshots(each.path),
        }
        for each in served_tables(model)
    ]
    if as_json:
        print(json.dumps({"path": str(model), "saved_model": found}, indent=1))
        return 0
    if not found:
        print(f"{model} is a SavedModel without tables of tf_dynemb")
    else:
        print(f"{model} is a SavedModel: import tf_dynemb before tf.saved_model.load")
    for each in found:
        where = "in the SavedModel" if each["inside"] else "outside of the SavedModel"
        print(f"tables {where}: {each['tables']}")
        print(f"follows: {each['follow'] or 'nothing'}\n")
        _show(each["snapshots"])
    return 0


def _snapshots(path: pathlib.Path | str) -> list[dict[str, Any]]:
    return [_snapshot(snapshot) for snapshot in Chain.open(path).snapshots]


def _show(snapshots: list[dict[str, Any]]) -> None:
    columns = ("kind", "id", "since", "watermark", "time", "bytes")
    print(aligned([columns, *([s[column] for column in columns] for s in snapshots)]))
    members = ("name", "rows", "deleted", "dim", "keys", "vector_format", "state", "ranks")
    for snapshot in snapshots:
        print(f"\n{snapshot['directory']}")
        tables = ([_short(table[member]) for member in members] for table in snapshot["tables"])
        print(aligned([members, *tables]))
        dense = ", ".join(f"{len(names)} for {part}" for part, names in snapshot["dense"].items())
        if dense:
            print(f"dense variables: {dense}")
        if snapshot["copy"] is not None:
            arguments = {k: v for k, v in snapshot["copy"].items() if k != "clock"}
            print(f"a copy for serving: {json.dumps(arguments)}")
        if snapshot["extra"] is not None:
            print(f"extra: {json.dumps(snapshot['extra'])}")


def aligned(lines: list[Sequence[object]]) -> str:
    """Returns a table as text. The first line is its head; numbers are right-aligned."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*lines, strict=True)]
    numeric = [
        all(isinstance(cell, int) for cell in column[1:]) for column in zip(*lines, strict=True)
    ]
    return "\n".join(
        "  ".join(
            str(cell).rjust(width) if right else str(cell).ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def utc(manifest: Manifest) -> str:
    """Returns the time of a snapshot as ISO 8601, to the second."""
    return manifest.watermark_utc.isoformat(timespec="seconds").replace("+00:00", "Z")


def _snapshot(snapshot: Snapshot) -> dict[str, Any]:
    manifest = snapshot.manifest
    return {
        "directory": str(snapshot),
        "kind": manifest.kind,
        "id": manifest.id,
        "parent": manifest.parent,
        "since": manifest.since,
        "watermark": manifest.watermark,
        "time": utc(manifest),
        "bytes": sum(file.bytes for file in snapshot.files),
        "writer": manifest.writer,
        "world_size": manifest.world_size,
        "optimizer": manifest.optimizer,
        "extra": manifest.extra,
        "copy": manifest.copy,
        "dense": _dense(snapshot),
        "tables": [_table(table) for table in manifest.tables],
    }


def _dense(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Returns the dtypes and shapes of dense variables by name, by the parts that there are."""
    found = {part: snapshot.dense(part) for part in DENSE_PARTS}
    return {
        part: {name: [each.dtype, list(each.values.shape)] for name, each in arrays.items()}
        for part, arrays in found.items()
        if arrays is not None
    }


def _table(table: TableEntry) -> dict[str, Any]:
    state = None
    if table.state is not None:
        state = {"optimizer": table.state.optimizer, "widths": list(table.state.widths)}
    return {
        "name": table.name,
        "rows": sum(shard.rows for shard in table.shards),
        "deleted": sum(shard.deleted for shard in table.shards),
        "dim": table.dimension,
        "keys": table.key_type,
        "dtype": table.dtype,
        "vector_format": table.stored_as,
        "state": state,
        "ranks": len(table.shards),
        "bytes": _bytes(table),
    }


def _bytes(table: TableEntry) -> int:
    return sum(file.bytes for shard in table.shards for file in shard.files.values())


def _short(cell: object) -> object:
    if isinstance(cell, dict):
        return f"{cell['optimizer']} {'+'.join(map(str, cell['widths'])) or 0}"
    return "none" if cell is None else cell
