"""Files of arrays by name, in the format of the safetensors library, which can read them.

A file is: the number of bytes of the header, as a little-endian uint64; the header, a JSON object
that has `{"dtype", "shape", "data_offsets"}` for each name, padded with spaces; the arrays, one
after the other, little-endian and in C order. `data_offsets` are relative to the end of the header,
which is padded to a multiple of 64 bytes. The arrays of a multiple of 64 bytes come first, so that
each of them is aligned as vector instructions need it, and then the others, those with the largest
items first, so that each item is aligned. https://github.com/huggingface/safetensors has the
specification.

bfloat16, which numpy lacks, is the uint16 of its bits in this module.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tf_dynemb.format.errors import DataLossError, naming, write_all
from tf_dynemb.format.fields import Fields

_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
}
_NAMES = {code: name for name, code in _CODES.items()}
# The dtypes of the arrays in memory, by name.
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<") for name in _CODES
}

# The member of the header with texts, which is no array.
_METADATA = "__metadata__"
_ALIGNMENT = 64
# The limit of the library.
_MOST_HEADER_BYTES = 100_000_000


class Array(NamedTuple):
    """An array and its dtype, "bfloat16" or the name of a numpy dtype."""

    dtype: str
    values: npt.NDArray[Any]


def is_name(name: str) -> bool:
    """Whether an array can have a name: any text of Unicode, except one."""
    return name != _METADATA and not any("\ud800" <= letter <= "\udfff" for letter in name)


def write(path: pathlib.Path, arrays: Mapping[str, Array]) -> int:
    """Writes a file that does not exist; returns its size. It is not synced.

    The bytes depend only on the arrays, not on their order.

    Raises:
        ValueError: `is_name` is False of a name.
        OSError: an error of the file system.
    """
    for name in arrays:
        if not is_name(name):
            raise ValueError(f"an array cannot have the name {name!r}.")

    def place(name: str) -> tuple[bool, int, str]:
        item = DTYPES[arrays[name].dtype].itemsize
        return arrays[name].values.size * item % _ALIGNMENT != 0, -item, name

    names = sorted(arrays, key=place)
    header, end = {}, 0
    for name in names:
        dtype, values = arrays[name]
        begin, end = end, end + values.size * DTYPES[dtype].itemsize
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(values.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with naming(path), path.open("xb", 0) as file:
        write_all(file.fileno(), len(text).to_bytes(8, "little") + text)
        for name in names:
            dtype, values = arrays[name]
            values = np.ascontiguousarray(values, DTYPES[dtype])
            if values.size:
                write_all(file.fileno(), values.reshape(-1).view(np.uint8).data)
    return 8 + len(text) + end


def read(path: pathlib.Path, file_bytes: int) -> dict[str, Array]:
    """Maps the arrays of a file, read-only.

    Args:
        path: the file.
        file_bytes: the size that it must have.

    Raises:
        DataLossError: the file is missing, or is not such a file, or has another size.
    """
    try:
        with path.open("rb", 0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != file_bytes:
                raise DataLossError(f"{path} has {size} bytes, expected {file_bytes}.")
            mapped = np.memmap(file, np.uint8, "r") if size else np.empty(0, np.uint8)
    except FileNotFoundError as error:
        raise DataLossError(f"{path} is missing.") from error
    return parse(mapped, str(path))


def parse(data: npt.NDArray[np.uint8], where: str) -> dict[str, Array]:
    """Returns the arrays in the content of a file, which they share.

    Args:
        data: the content, read-only.
        where: the place of the file, for errors.

    Raises:
        DataLossError: it is not the content of such a file.
    """
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    begin = 8 + header_bytes
    if begin > min(data.size, _MOST_HEADER_BYTES):
        raise DataLossError(f"{where} is damaged: its header has {header_bytes} bytes.")
    try:
        parsed = json.loads(data[8:begin].tobytes(), object_pairs_hook=_with_distinct_names)
    except (ValueError, RecursionError) as error:
        raise DataLossError(f"{where} is damaged: its header is not JSON ({error}).") from error
    header = Fields.of(parsed, f"{where}: its header")
    header.members.pop(_METADATA, None)
    arrays = {name: _array(header, name, data[begin:]) for name in header.members}
    size = sum(array.values.nbytes for array in arrays.values())
    header.require(size == data.size - begin, "data_offsets", f"are of {size} bytes in all")
    return arrays


def _with_distinct_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs) or not all(map(is_name, set(members) - {_METADATA})):
        raise ValueError("a name is there twice, or is not Unicode")
    return members


def _array(header: Fields, name: str, data: npt.NDArray[np.uint8]) -> Array:
    members = header.object(name)
    dtype = _NAMES[members.choice("dtype", _NAMES)]
    shape = members.integers("shape", 0, 2**48)
    offsets = members.integers("data_offsets", 0, data.size)
    size = DTYPES[dtype].itemsize * math.prod(shape)
    fits = len(offsets) == 2 and offsets[1] - offsets[0] == size
    members.require(fits, "data_offsets", f"must have {size} bytes")
    values = data[offsets[0] : offsets[1]].view(np.ndarray)
    if offsets[0] % DTYPES[dtype].itemsize:  # another writer may not align
        values = values.copy()
    try:
        return Array(dtype, values.view(DTYPES[dtype]).reshape(shape))
    except ValueError as error:  # too many dimensions, or too large ones beside a 0
        raise DataLossError(f"{header.where}: {name!r} has the shape {list(shape)}.") from error
