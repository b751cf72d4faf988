"""`lookup`: prints the vectors of some keys."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from tf_dynemb.cli import keys, paths
from tf_dynemb.cli.inspect import aligned
from tf_dynemb.serving import Reader
from tf_dynemb.storage import Chain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("path", metavar="PATH", type=paths.path_or_url)
    parser.add_argument(
        "keys",
        metavar="KEY",
        nargs="*",
        help="keys; strings, if the table has them; -- before all, if one begins with a dash",
    )
    keys.add_arguments(parser)
    parser.add_argument("--table", metavar="T", help="the table; needed if there are several")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Prints the vectors of keys, as a reader of the chain or SavedModel returns them.

    A key without a row has the vector that the model reads for it outside training.
    """
    texts = keys.of(options, options.keys)
    path = paths.chain_of(options.path)
    reader = Reader(path, None if options.table is None else [options.table])
    reader.dimension(options.table)  # raises unless the table is known
    (name,) = reader.tables
    # A table has one kind of keys in all snapshots of a chain.
    entry = Chain.open(path).last.manifest.table(name)[1]
    ids = keys.parse(texts, entry, options.integer_keys)
    found, vectors = reader.contains(ids, name), reader.lookup(ids, name)
    shown: list[Any] = ids.tolist()
    if keys.is_of_strings(entry, options.integer_keys):
        shown = [text.decode(errors="backslashreplace") for text in texts]
    if options.json:
        rows = [
            {
                "key": key,
                "row": bool(has_row),
                # JSON has no numbers that are not finite.
                "vector": [value if math.isfinite(value) else None for value in vector.tolist()],
            }
            for key, has_row, vector in zip(shown, found, vectors, strict=True)
        ]
        print(json.dumps({"table": name, "id": reader.id, "rows": rows}, indent=1))
        return 0
    lines = [
        (key, "yes" if has_row else "no", " ".join(map(str, vector)))
        for key, has_row, vector in zip(shown, found, vectors, strict=True)
    ]
    print(aligned([("key", "row", "vector"), *lines]))
    return 0
