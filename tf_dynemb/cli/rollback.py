"""`rollback`: makes an earlier state of a chain the newest one."""

from __future__ import annotations

import argparse

from tf_dynemb.chains.merge import rollback
from tf_dynemb.cli import paths
from tf_dynemb.cli.inspect import aligned, utc
from tf_dynemb.storage import DataLossError
from tf_dynemb.storage.places import place_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("path", metavar="PATH", type=paths.path_or_url)
    parser.add_argument(
        "--to", metavar="ID", help="the snapshot, by the first digits of its id; default: list them"
    )


def run(options: argparse.Namespace) -> int:
    """Publishes the state of an earlier snapshot as a new base, which readers then follow.

    All snapshots stay at PATH, so that a rollback can be rolled back; `prune` removes those that
    are superseded. A trainer loads the new base before it goes on.
    """
    if options.to is not None:
        print(rollback(options.path, options.to))
        return 0
    place = place_of(options.path)
    lines = []
    for name in place.names():
        try:
            manifest = place.open([str(name)])[0].manifest
        except (DataLossError, ValueError):
            lines.append([name.number, name.kind, name.id, "cannot be read"])
            continue
        lines.append([name.number, name.kind, name.id, utc(manifest)])
    if not lines:
        raise place.absent()
    print(aligned([["number", "kind", "id", "time"], *lines]))
    print("Choose one with --to ID.")
    return 0
