"""`export`: writes keys and vectors to a file of another format."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pathlib
import secrets
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from tf_dynemb._presence import exists
from tf_dynemb.serving import Reader
from tf_dynemb.storage.manifest import KEY_TYPES

FORMATS = ("npz", "parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("path", metavar="PATH")
    parser.add_argument("out", metavar="OUT", nargs="?", help="the file to write")
    parser.add_argument("--output", metavar="OUT", help="another way to pass OUT")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--format", choices=FORMATS, help="default: the extension of OUT, or npz")
    parser.add_argument("--table", metavar="T", help="export only this table")


def run(options: argparse.Namespace) -> int:
    """Writes the keys and float32 vectors of a chain's state to one file.

    npz: arrays `<table>/keys` and `<table>/vectors`. parquet: one table, with the columns `key` and
    `vector`, which is a list of fixed size.
    """
    if (options.out is None) == (options.output is None):
        raise ValueError("export needs OUT, the file to write, once.")
    output = pathlib.Path(options.out or options.output)
    if exists(output) and not options.force:
        raise ValueError(f"{output} exists; --force replaces it.")
    ending = output.suffix[1:]
    form = options.format or (ending if ending in FORMATS else "npz")
    reader = Reader(options.path, None if options.table is None else [options.table])
    if form == "parquet" and len(reader.tables) != 1:
        names = ", ".join(map(repr, reader.tables))
        raise ValueError(f"a parquet file holds one table; choose it with --table: {names}.")
    with _replaced(output) as path:
        if form == "npz":
            _write_npz(reader, path)
        else:
            _write_parquet(reader, path)
    for table in reader.tables:
        print(f"{table}: {reader.size(table)} keys")
    return 0


@contextlib.contextmanager
def _replaced(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path next to another, and renames it to the other if no error occurs."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _write_npz(reader: Reader, path: pathlib.Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for table in reader.tables:
            keys = (keys for keys, _ in reader.items(table))
            key_type = KEY_TYPES[reader.key_type(table)]
            shape: tuple[int, ...] = (reader.size(table),)
            _write_npy(archive, f"{table}/keys.npy", key_type, shape, keys)
            vectors = (vectors for _, vectors in reader.items(table))
            shape = (*shape, reader.dimension(table))
            _write_npy(archive, f"{table}/vectors.npy", np.dtype(np.float32), shape, vectors)


def _write_npy(
    archive: zipfile.ZipFile,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    chunks: Iterator[Any],
) -> None:
    with archive.open(name, "w", force_zip64=True) as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for chunk in chunks:
            file.write(np.ascontiguousarray(chunk, dtype).data)


def _write_parquet(reader: Reader, path: pathlib.Path) -> None:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError("--format parquet needs pyarrow: pip install pyarrow") from error
    (table,) = reader.tables
    key_type = pyarrow.from_numpy_dtype(KEY_TYPES[reader.key_type(table)])
    vector_type = pyarrow.list_(pyarrow.field("item", pyarrow.float32()), reader.dimension(table))
    schema = pyarrow.schema([("key", key_type), ("vector", vector_type)])
    with parquet.ParquetWriter(path, schema) as writer:
        for keys, vectors in reader.items(table):
            flat = pyarrow.array(vectors.ravel())
            columns = [
                pyarrow.array(keys, key_type),
                pyarrow.FixedSizeListArray.from_arrays(flat, type=vector_type),
            ]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
