"""Conversion of the keys that a user passes to an array of a table's key type."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb.serving.string_hash import ids_of_strings

Keys = npt.NDArray[np.integer[Any]]


def as_keys(
    keys: npt.ArrayLike, key_type: np.dtype[Any], table: str, string_hash: str | None = None
) -> Keys:
    """Converts keys to an array of `key_type`, in any shape.

    Args:
        keys: integers: an array of any integer type, or numbers in lists.
        key_type: int64, int32 or uint64.
        table: the name of the table, for errors.
        string_hash: the hash that makes a key of a string; None: strings are errors.

    Raises:
        TypeError: the keys are not integers, or are lists without a regular shape.
        OverflowError: a key is out of the range of the key type.
    """
    array = keys if isinstance(keys, (np.ndarray, np.generic)) else _array_of(keys, table)
    array = np.asarray(array)
    if string_hash is not None and _has_strings(array):
        return ids_of_strings(array).astype(key_type, copy=False)
    if _has_strings(array):
        raise TypeError(
            f"keys of table {table!r} must be integers, got strings, which are keys of a layer or "
            "DynamicVariable with hash_strings=True only."
        )
    if array.dtype.kind == "O":
        if not all(isinstance(key, (int, np.integer)) for key in array.flat):
            raise TypeError(f"keys of table {table!r} must be integers, got {keys!r:.80}.")
    elif array.dtype.kind not in "iu":
        raise TypeError(f"keys of table {table!r} must be integers, got {array.dtype}.")
    if array.dtype != key_type and array.size and not np.can_cast(array.dtype, key_type):
        limits = np.iinfo(key_type)
        for key in (int(array.min()), int(array.max())):
            if not limits.min <= key <= limits.max:
                raise OverflowError(
                    f"{key} is not a key of table {table!r}: its keys are {key_type}."
                )
    return array.astype(key_type, copy=False)


def _has_strings(array: npt.NDArray[Any]) -> bool:
    has_objects = array.dtype.kind == "O" and array.size > 0
    return array.dtype.kind in "US" or (has_objects and isinstance(array.flat[0], (str, bytes)))


def _array_of(keys: Any, table: str) -> npt.NDArray[Any]:
    """Converts numbers in lists exactly: np.asarray converts some large integers to floats."""
    try:
        array = np.asarray(keys)
        if array.dtype.kind not in "iub":
            array = np.array(keys, dtype=object)
    except ValueError as error:
        raise TypeError(f"keys of table {table!r} must have a regular shape: {error}.") from error
    return array
