"""The files of TFRA's `save_to_file_system` and `FileSystemSaver`: a pair for each shard.

    <name>_mht_<i>of<n>_rank<r>_size<s>-keys      the keys, little-endian, without a header
    <name>_mht_<i>of<n>_rank<r>_size<s>-values    the vectors in the same order, row after row

<name> is the variable's name with "_" for every "/". Shard i of n is on device i of rank r of s; i
counts from 1, r from 0. The files do not contain the types or the width, so a reader must know
them: a file of int64 keys can be read as twice as many int32 keys. A reader can only check that
both files contain the same number of whole rows.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.tables.batches import owned_rows
from tf_dynemb.tables.table import Table

_SHARD = re.compile(r"_mht_(\d+)of(\d+)_rank(\d+)_size(\d+)$")
# TFRA's own name of a shard, without ranks, as in file_name_list or an older version.
_PLAIN_SHARD = re.compile(r"_mht_\d+of\d+$")


def file_name(name: str, rank: int | None = None, size: int | None = None) -> str:
    """Returns the common beginning of this rank's pair of files.

    Args:
        name: the variable's name.
        rank: the rank. None: this process's.
        size: the number of ranks. None: the number in this run.
    """
    ranks = communicator.get()
    rank = ranks.rank if rank is None else rank
    size = ranks.size if size is None else size
    return f"{_flat(name)}_mht_1of1_rank{rank}_size{size}"


def find(folder: str, name: str, size: int | None = None) -> list[str]:
    """Returns the paths of a variable's shards, without "-keys".

    Args:
        folder: the folder.
        name: the variable's name.
        size: the number of ranks that wrote them. None: any.

    Raises:
        FileNotFoundError: there are none; the message lists the names that there are.
    """
    found = []
    beginning = os.path.join(folder, _flat(name))
    for file in _key_files(folder):
        if not file.startswith(f"{_flat(name)}_mht_"):
            continue
        end = file.removeprefix(_flat(name)).removesuffix("-keys")
        shard = _SHARD.match(end)
        if (shard and size in (None, int(shard[4]))) or (size is None and _PLAIN_SHARD.match(end)):
            found.append(beginning + end)
    if not found:
        raise FileNotFoundError(
            f"{folder} has no files of the variable {name!r}"
            + ("" if size is None else f" from {size} ranks")
            + f"; its variables: {', '.join(names_in(folder)) or 'none'}."
        )
    return found


def check_one_save(paths: Iterable[str]) -> None:
    """Raises ValueError unless shards, as `find` returns them, are all shards of one save.

    Names without ranks, as in older versions, are not checked.
    """
    saves: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for path in paths:
        shard = _SHARD.search(path)
        if shard:
            number, count, rank, size = map(int, shard.groups())
            saves.setdefault((count, size), set()).add((number, rank))
    if len(saves) > 1:
        sizes = " and from ".join(str(size) for _, size in sorted(saves))
        raise ValueError(
            f"{path} and the files beside it are from {sizes} ranks or other devices, and so from "
            "several saves: move all except one save away."
        )
    for (count, size), there in saves.items():
        missing = {(i + 1, r) for i in range(count) for r in range(size)} - there
        if missing:
            number, rank = min(missing)
            raise ValueError(
                f"the files beside {path} are incomplete: {number}of{count} of rank {rank} of "
                f"{size} is missing."
            )


def names_in(folder: str) -> list[str]:
    """Returns the names of the variables that a folder has files of, with "_" for "/"."""
    return sorted({file.rpartition("_mht_")[0] for file in _key_files(folder)})


def read(
    path: str, key_dtype: npt.DTypeLike, value_dtype: npt.DTypeLike, dim: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Maps a shard into memory.

    Args:
        path: the common beginning of the two files' paths.
        key_dtype: the numpy type of the keys.
        value_dtype: the numpy type of the vectors.
        dim: the width of the vectors.

    Returns:
        (keys, vectors): arrays [n] and [n, dim].

    Raises:
        OSError: a file cannot be read.
        ValueError: the files do not contain the same number of whole rows.
    """
    keys = _map(f"{path}-keys", key_dtype, 1)
    values = _map(f"{path}-values", value_dtype, dim)
    if len(keys) != len(values):
        raise ValueError(
            f"{path}-keys has {len(keys)} keys of {np.dtype(key_dtype)}, but {path}-values has "
            f"{len(values)} vectors of {dim} x {np.dtype(value_dtype)}: types or dim differ, or a "
            "file is incomplete."
        )
    return keys[:, 0], values


def write(
    path: str, keys: npt.NDArray[Any], values: npt.NDArray[Any], append: bool = False
) -> None:
    """Writes a shard; the folder is created. Existing files are replaced, or appended to.

    Args:
        path: the common beginning of the two files' paths.
        keys: an array [n].
        values: an array [n, dim].
        append: whether to append to existing files.
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    ends = {"-keys": keys, "-values": values}
    for end, array in ends.items():
        with open(
            f"{path}{end}" if append else f"{path}{end}.tmp", "ab" if append else "wb"
        ) as file:
            file.write(np.ascontiguousarray(array).tobytes())
            file.flush()
            os.fsync(file.fileno())
    if append:
        return
    # Without its keys, a pair is an error: new values never come with old keys.
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{path}-keys")
    for end in ("-values", "-keys"):
        os.replace(f"{path}{end}.tmp", path + end)


def upsert_owned(table: Table, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    """Upserts the rows that this rank owns, without communication.

    Args:
        table: the table.
        keys: an array [n] of the table's key type.
        values: an array [n, dim] of the table's dtype.
    """
    for selected, owned_keys in owned_rows(table, len(keys), 0, lambda part: np.array(keys[part])):
        vectors = tf.constant(values[selected])
        _ops.library().dynemb_upsert(table.handle, tf.constant(owned_keys), vectors)


def _key_files(folder: str) -> list[str]:
    """Returns the files of keys in a folder, sorted; none if it is absent."""
    try:
        files = os.listdir(folder or ".")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(file for file in files if "_mht_" in file and file.endswith("-keys"))


def _flat(name: str) -> str:
    return name.replace("/", "_")


def _map(path: str, dtype: npt.DTypeLike, width: int) -> npt.NDArray[Any]:
    row_bytes = np.dtype(dtype).itemsize * width
    size = os.stat(path).st_size
    if size % row_bytes:
        raise ValueError(
            f"{path} has {size} bytes, which is not a multiple of the {row_bytes} bytes of "
            f"{width} x {np.dtype(dtype)}."
        )
    if size == 0:  # an empty file cannot be mapped
        return np.empty((0, width), dtype)
    return np.memmap(path, dtype, mode="r", shape=(size // row_bytes, width))
