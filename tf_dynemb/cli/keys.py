"""The keys of a command line: integers, or strings of tables that hash strings."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

import numpy as np

from tf_dynemb.cli import paths
from tf_dynemb.format.table_entry import KEY_TYPES, TableEntry
from tf_dynemb.serving.keys import Keys
from tf_dynemb.serving.string_hash import ids_of_strings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say where keys are, and how they are written."""
    parser.add_argument(
        "--key-file", metavar="FILE", type=paths.argument, help="one key a line; -: standard input"
    )
    parser.add_argument(
        "--integer-keys",
        action="store_true",
        help="the keys of tables that hash strings are given as hashes, not as strings",
    )


def of(options: argparse.Namespace, given: list[str] | None) -> list[bytes]:
    """Returns the keys of a command line and of its file, as they are written.

    Raises:
        ValueError: there are none.
    """
    texts = [os.fsencode(text) for text in given or ()]
    if options.key_file is not None:
        texts += _lines(options.key_file)
    if not texts:
        raise ValueError("there are no keys: pass some, or --key-file.")
    return texts


def _lines(file: pathlib.Path) -> list[bytes]:
    content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    # Not `splitlines`, which also splits at characters that a string can have.
    lines = [line.removesuffix(b"\r") for line in content.split(b"\n")]
    return [line for line in lines if line]


def is_of_strings(entry: TableEntry, integer_keys: bool) -> bool:
    """Whether the keys of a table are given as strings."""
    return entry.string_hash is not None and not integer_keys


def parse(texts: list[bytes], entry: TableEntry, integer_keys: bool) -> Keys:
    """Returns the keys of a table.

    Args:
        texts: the keys as they are written.
        entry: the table.
        integer_keys: whether the keys of a table that hashes strings are written as integers.

    Raises:
        ValueError: a text is no key of the table.
    """
    key_type = KEY_TYPES[entry.key_type]
    if is_of_strings(entry, integer_keys):
        strings = np.empty(len(texts), object)
        strings[:] = texts
        return ids_of_strings(strings).astype(key_type)
    limits = np.iinfo(key_type)
    numbers = []
    for text in texts:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(
                f"key {text.decode(errors='replace')!r} is not an integer, but table "
                f"{entry.name!r} has integers as keys."
            ) from None
        if not limits.min <= number <= limits.max:
            raise ValueError(
                f"{number} is not a key of table {entry.name!r}: its keys are {entry.key_type}."
            )
        numbers.append(number)
    return np.array(numbers, key_type)
