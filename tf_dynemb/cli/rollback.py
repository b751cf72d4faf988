"""`rollback`: makes an earlier state of a chain the newest one."""

from __future__ import annotations

import argparse

from tf_dynemb._presence import is_directory
from tf_dynemb.chains.merge import rollback
from tf_dynemb.cli import paths
from tf_dynemb.cli.inspect import aligned, utc
from tf_dynemb.storage import DataLossError, Snapshot
from tf_dynemb.storage.chain import list_snapshots, no_snapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("path", metavar="PATH", type=paths.argument)
    parser.add_argument(
        "--to", metavar="ID", help="the snapshot, by the first digits of its id; default: list them"
    )


def run(options: argparse.Namespace) -> int:
    """Publishes the state of an earlier snapshot as a new base, which readers then follow.

    All snapshots stay at PATH, so that a rollback can be rolled back; `prune` removes those that
    are superseded. A trainer loads the new base before it goes on.
    """
    if options.to is not None:
        print(rollback(options.path, options.to).directory)
        return 0
    path = options.path
    lines = []
    for name in list_snapshots(path) if is_directory(path) else []:
        try:
            manifest = Snapshot(path / str(name)).manifest
        except (DataLossError, ValueError):
            lines.append([name.number, name.kind, name.id, "cannot be read"])
            continue
        lines.append([name.number, name.kind, name.id, utc(manifest.watermark_utc_ns)])
    if not lines:
        raise no_snapshot(path)
    print(aligned([["number", "kind", "id", "time"], *lines]))
    print("Choose one with --to ID.")
    return 0
