"""`merge`: merges a base and its deltas into one new base."""

from __future__ import annotations

import argparse

from tf_dynemb.chains.merge import merge
from tf_dynemb.cli import paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("path", metavar="PATH", type=paths.path_or_url)
    parser.add_argument(
        "out",
        metavar="OUT",
        nargs="?",
        type=paths.path_or_url,
        help="a directory without snapshots",
    )
    parser.add_argument(
        "--in-place", action="store_true", help="instead of OUT: replace the chain at PATH"
    )
    parser.add_argument(
        "--keep", type=int, default=0, metavar="N", help="with --in-place: keep N earlier bases"
    )


def run(options: argparse.Namespace) -> int:
    """Merges a base and its deltas into one new base with the same bits."""
    if (options.out is None) != options.in_place:
        raise ValueError(
            "merge needs OUT, the directory of the new base, or --in-place, which replaces the "
            "chain at PATH by the new base."
        )
    snapshot = merge(options.path, options.out, options.keep)
    if snapshot is None:
        print(f"{options.path} has no deltas: there is nothing to merge")
    else:
        print(snapshot)
    return 0
