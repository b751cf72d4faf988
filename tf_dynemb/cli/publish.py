"""`publish`: makes a served copy of a chain, or goes on with one."""

from __future__ import annotations

import argparse

from tf_dynemb.chains.publish import publish
from tf_dynemb.cli import paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("source", metavar="SOURCE", type=paths.argument, help="a chain")
    parser.add_argument("target", metavar="TARGET", type=paths.argument, help="its copy")
    parser.add_argument(
        "--keep",
        type=int,
        default=0,
        metavar="N",
        help="keep the N bases before the last one in the copy, and their deltas; default: 0",
    )


def run(options: argparse.Namespace) -> int:
    """Makes a copy of a chain for serving, without what only training needs, or goes on with it."""
    published = publish(options.target, from_=options.source, keep=options.keep)
    for snapshot in published:
        print(snapshot.directory)
    print(f"published: {len(published)}")
    return 0
