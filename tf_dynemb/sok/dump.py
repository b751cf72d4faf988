"""Reads what NVIDIA SOK (sparse_operation_kit, version 2) writes with `sok.dump`.

A dump is a folder with, for each table, `<table>-key`, `<table>-weight` and, if an optimizer was
dumped too, `<table>-<optimizer>-<state>`. <table> is the variable's name with every punctuation
mark replaced by "_" (`file_name_of`). Each file is a header of 296 bytes and then raw values:

    offset  bytes  field
         0    256  the table's name, padded with spaces on the left; SOK itself leaves it blank
       256      4  0 keys, 1 vectors, 2 optimizer state                    big-endian
       260     32  the state's name, padded as above; blank for keys and vectors
       292      4  the type of the values: the position in `DTYPES`        big-endian
       296         the values, little-endian, row after row

The files contain neither the number of rows nor their width. The number of rows is the number of
keys, and the width is the number of values in the file of vectors, divided by it. If a file of keys
is cut short and its number of keys still divides the number of values, the rows seem fewer and
wider; if a file of vectors is cut short in this way, they seem narrower. A caller that knows the
width must therefore compare it. All files of a table contain its rows in the same order. Tables of
fixed size are written in the same way, with row numbers as keys: 0, 1, 2, ... from one GPU; from
several GPUs, the rows of one GPU after the rows of another.
"""

from __future__ import annotations

import string
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb._presence import local_path

Array = npt.NDArray[Any]

DTYPES = tuple(np.dtype(name) for name in ("<i4", "<i8", "<u4", "<u8", "<f2", "<f4", "<f8"))
KINDS = ("keys", "vectors", "optimizer state")
KEYS, VECTORS, STATE = range(3)

_HEADER = struct.Struct(">256sI32sI")
_UNDERSCORES = str.maketrans(dict.fromkeys(string.punctuation, "_"))


@dataclass(frozen=True, eq=False)
class SokTable:
    """One table of a dump; the arrays are read-only maps of the files.

    Attributes:
        name: the name in the file names.
        keys: [n], int32, int64, uint32 or uint64.
        vectors: [n, dim], float16, float32 or float64.
        states: for each state of the optimizer, by SOK's name for it ("m", "accumulator", ...), an
            array [n, dim].
        optimizer: the name in the file names; None without states. SOK also calls Adamax "Adam".
    """

    name: str
    keys: Array
    vectors: Array
    states: dict[str, Array]
    optimizer: str | None


def file_name_of(variable_name: str) -> str:
    """Returns the prefix of a variable's file names."""
    return variable_name.translate(_UNDERSCORES)


def read_sok_dump(
    directory: str | Path, tables: Iterable[str] | None = None
) -> dict[str, SokTable]:
    """Maps the tables of a dump into memory.

    Args:
        directory: the folder that was passed to `sok.dump`.
        tables: names of variables, or of tables as in the file names. None: all tables.

    Returns:
        The tables, by their names in the file names.

    Raises:
        ValueError: there is no table; or a file is missing or cut short, or its header does not
            match its name. The message names the file.
        OSError: the folder or a file cannot be read.
    """
    folder = local_path(directory, "directory")
    files = sorted(path.name for path in folder.iterdir())
    names = _tables_among(files) if tables is None else [file_name_of(name) for name in tables]
    if not names:
        raise ValueError(f"{folder} holds no dump of SOK: no file is named <table>-key.")
    return {name: _read_table(folder, name, files) for name in names}


def _tables_among(files: Iterable[str]) -> list[str]:
    ends = ("-key", "-weight")
    names = {file.removesuffix(end) for file in files for end in ends if file.endswith(end)}
    return sorted(names)


def _read_table(folder: Path, name: str, files: Iterable[str]) -> SokTable:
    keys = _values(folder / f"{name}-key", name, KEYS)
    path = folder / f"{name}-weight"
    vectors = _values(path, name, VECTORS)
    if vectors.size % keys.size:
        raise ValueError(
            f"{path} holds {vectors.size} values, which is not a multiple of the {keys.size} keys "
            f"in {name}-key."
        )
    vectors = vectors.reshape(keys.size, -1)
    states: dict[str, Array] = {}
    optimizers = set()
    for file in files:
        optimizer, dash, state = file.removeprefix(f"{name}-").partition("-")
        if not file.startswith(f"{name}-") or not dash:
            continue
        optimizers.add(optimizer)
        if len(optimizers) > 1:
            raise ValueError(
                f"{folder / file}: the folder contains the state of several optimizers of the "
                f"table {name}: {', '.join(sorted(optimizers))}."
            )
        values = _values(folder / file, name, STATE, state)
        if values.size != vectors.size:
            raise ValueError(
                f"{folder / file} holds {values.size} values, but the {keys.size} vectors of "
                f"{vectors.shape[1]} have {vectors.size}."
            )
        states[state] = values.reshape(vectors.shape)
    return SokTable(name, keys, vectors, states, optimizers.pop() if optimizers else None)


def _values(path: Path, table: str, kind: int, state: str = "") -> Array:
    """Returns the values of a file, [count], if its header matches its name."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: it should hold {KINDS[kind]} of {table}.") from None
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError(f"{path} is cut short: {size} bytes; a header has {_HEADER.size}.")
    table_field, file_kind, state_field, type_number = _HEADER.unpack(header)
    table_says, state_says = _text(path, table_field), _text(path, state_field)
    if table_says and file_name_of(table_says) != table:
        raise ValueError(f"{path} is of the table {table_says!r} according to its header.")
    if file_kind != kind:
        holds = KINDS[file_kind] if file_kind < len(KINDS) else f"unknown kind {file_kind}"
        raise ValueError(f"{path} should hold {KINDS[kind]}; according to its header: {holds}.")
    if state_says != state:
        raise ValueError(
            f"{path} should hold the state {state!r}; according to its header: {state_says!r}."
        )
    if type_number >= len(DTYPES):
        raise ValueError(f"{path} holds values of the unknown type {type_number}.")
    dtype = DTYPES[type_number]
    if (dtype.kind == "f") != (kind != KEYS):
        raise ValueError(f"{path} should hold {KINDS[kind]}, but its type is {dtype.name}.")
    count, left_over = divmod(size - _HEADER.size, dtype.itemsize)
    if left_over:
        raise ValueError(
            f"{path} is cut short: its values have {size - _HEADER.size} bytes, which is not a "
            f"multiple of the {dtype.itemsize} bytes of a {dtype.name}."
        )
    if count == 0:
        raise ValueError(f"{path} is cut short: no values follow its header.")
    return np.memmap(path, dtype, mode="r", offset=_HEADER.size, shape=(count,))


def _text(path: Path, field: bytes) -> str:
    try:
        return field.decode().strip()
    except UnicodeDecodeError:
        raise ValueError(f"{path} does not begin with a header of SOK: {field!r:.80}.") from None
