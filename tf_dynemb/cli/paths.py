"""The paths of the command line: local ones, and SavedModels."""

from __future__ import annotations

import argparse
import pathlib

from tf_dynemb._presence import is_url, local_path
from tf_dynemb.chains.saved_models import is_model, served_tables


def argument(text: str) -> pathlib.Path:
    """Converts an argument of the command line, for argparse."""
    try:
        return local_path(text, "PATH")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def path_or_url(text: str) -> pathlib.Path | str:
    """Converts an argument that can be a URL, for argparse."""
    return text if is_url(text) else argument(text)


def chain_of(path: pathlib.Path | str) -> pathlib.Path | str:
    """Returns the path of a chain: the path itself, or the path of the tables of a SavedModel.

    Raises:
        ValueError: the SavedModel has no tables, or several chains.
    """
    if isinstance(path, str) or not is_model(path):
        return path
    tables = served_tables(path)
    if len(tables) != 1:
        names = ", ".join(str(each.path) for each in tables) or "none"
        raise ValueError(f"{path} is a SavedModel; pass the path of its tables: {names}.")
    return tables[0].path
