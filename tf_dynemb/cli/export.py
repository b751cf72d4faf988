"""`export`: writes keys and vectors to files of another format."""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import os
import pathlib
import secrets
import urllib.parse
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb._presence import exists, is_directory, remove_tree
from tf_dynemb.cli import paths
from tf_dynemb.format.table_entry import KEY_TYPES
from tf_dynemb.serving import Reader

FORMATS = ("npz", "csv", "parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("path", metavar="PATH", type=paths.path_or_url)
    parser.add_argument(
        "out",
        metavar="OUT",
        nargs="?",
        type=paths.argument,
        help="the file to write; without an ending, for csv and parquet, a folder with a file for "
        "each table",
    )
    parser.add_argument(
        "--output", metavar="OUT", type=paths.argument, help="another way to pass OUT"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--format", choices=FORMATS, help="default: the ending of OUT")
    parser.add_argument("--table", metavar="T", help="export only this table")


def run(options: argparse.Namespace) -> int:
    """Writes the keys and float32 vectors of a chain's state.

    npz: arrays `<table>/keys` and `<table>/vectors` in one file. csv and parquet: a file for each
    table. csv: the columns `key`, `vector_0`, `vector_1` and so on. parquet: the columns `key` and
    `vector`, which is a list of fixed size.
    """
    if (options.out is None) == (options.output is None):
        raise ValueError("export needs OUT, the file to write, once.")
    output: pathlib.Path = options.out or options.output
    form = options.format or _form_of(output)
    if exists(output) and not (options.force or _is_empty_folder(output)):
        raise ValueError(f"{output} exists; --force replaces it.")
    wanted = None if options.table is None else [options.table]
    reader = Reader(paths.chain_of(options.path), wanted)
    if form == "npz":
        _check_is_no_folder(output)
        with _replaced(output) as path:
            _write_npz(reader, path)
    else:
        write = _write_csv if form == "csv" else _parquet_writer()
        if output.suffix:
            if len(reader.tables) != 1:
                names = ", ".join(map(repr, reader.tables))
                raise ValueError(
                    f"{output} is one file, and a {form} file holds one table: choose it with "
                    f"--table ({names}), or write all of them to a folder: "
                    f"{output.with_suffix('')} --format {form}."
                )
            _check_is_no_folder(output)
            with _replaced(output) as path:
                write(reader, reader.tables[0], path)
        else:
            _check_holds_only(output, form)
            with _replaced(output) as path:
                path.mkdir()
                for table in reader.tables:
                    write(reader, table, path / f"{urllib.parse.quote(table, safe='')}.{form}")
    for table in reader.tables:
        print(f"{table}: {reader.size(table)} keys")
    return 0


def _form_of(output: pathlib.Path) -> str:
    ending = output.suffix[1:].lower()
    if ending not in FORMATS:
        endings = ", ".join(f".{form}" for form in FORMATS)
        what = f"{output.suffix} is none of the endings" if ending else "it has none of the endings"
        raise ValueError(f"{output}: {what} {endings}; pass one of them, or --format.")
    return ending


def _is_empty_folder(path: pathlib.Path) -> bool:
    return is_directory(path) and not os.listdir(path)


def _check_is_no_folder(path: pathlib.Path) -> None:
    if is_directory(path):
        raise ValueError(f"{path} is a folder; pass the name of a file.")


def _check_holds_only(path: pathlib.Path, form: str) -> None:
    """Raises ValueError if a folder that is to be replaced is not one of an earlier export."""
    if not exists(path):
        return
    if not is_directory(path):
        raise ValueError(
            f"{path} has no ending, so it is to be a folder with a file for each table, but a file "
            "is there."
        )
    others = sorted(name for name in os.listdir(path) if not name.endswith(f".{form}"))
    if others:
        raise ValueError(
            f"{path} has files that no export has written, such as {others[0]!r}: pass another "
            "folder."
        )


@contextlib.contextmanager
def _replaced(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path next to another, and renames it to the other if no error occurs."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    before = beside.with_name(f"{beside.name}.old")
    try:
        yield beside
        if is_directory(path):  # a folder cannot replace one that is not empty
            os.rename(path, before)
        os.replace(beside, path)
    except BaseException:
        if exists(before) and not exists(path):
            os.rename(before, path)
        raise
    finally:
        if is_directory(beside):
            remove_tree(beside)
        else:
            beside.unlink(missing_ok=True)
        if is_directory(before):
            remove_tree(before)


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
    chunks: Iterator[npt.NDArray[Any]],
) -> None:
    with archive.open(name, "w", force_zip64=True) as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for chunk in chunks:
            file.write(np.ascontiguousarray(chunk, dtype).data)


def _write_csv(reader: Reader, table: str, path: pathlib.Path) -> None:
    with path.open("x", encoding="ascii", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["key", *(f"vector_{i}" for i in range(reader.dimension(table)))])
        for keys, vectors in reader.items(table):
            # numpy writes the fewest digits that give the same float32 again.
            texts = vectors.astype(str).tolist()
            writer.writerows([key, *text] for key, text in zip(keys.tolist(), texts, strict=True))


def _parquet_writer() -> Callable[[Reader, str, pathlib.Path], None]:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError("--format parquet needs pyarrow: pip install pyarrow") from error

    def write(reader: Reader, table: str, path: pathlib.Path) -> None:
        key_type = pyarrow.from_numpy_dtype(KEY_TYPES[reader.key_type(table)])
        item = pyarrow.field("item", pyarrow.float32())
        vector_type = pyarrow.list_(item, reader.dimension(table))
        schema = pyarrow.schema([("key", key_type), ("vector", vector_type)])
        with parquet.ParquetWriter(path, schema) as writer:
            for keys, vectors in reader.items(table):
                flat = pyarrow.array(vectors.ravel())
                columns = [
                    pyarrow.array(keys, key_type),
                    pyarrow.FixedSizeListArray.from_arrays(flat, type=vector_type),
                ]
                writer.write_batch(pyarrow.record_batch(columns, schema=schema))

    return write
