"""`prune`: removes snapshots that a later base has superseded."""

from __future__ import annotations

import argparse

from tf_dynemb.cli import paths
from tf_dynemb.storage.publication import prune


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("path", metavar="PATH", type=paths.path_or_url)
    parser.add_argument(
        "--keep",
        type=int,
        default=0,
        metavar="N",
        help="keep the N bases before the last one, and their deltas; default: 0",
    )


def run(options: argparse.Namespace) -> int:
    """Removes snapshots that a later base has superseded; the chain itself stays."""
    if options.keep < 0:
        raise ValueError(f"--keep must be 0 or more, got {options.keep}.")
    removed = prune(options.path, options.keep)
    for name in removed:
        print(f"removed {name}")
    print(f"removed: {len(removed)}")
    return 0
