"""Conversion of the ids that a user passes to a tensor of a table's key type."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb.ids.strings import ids_of_strings
from tf_dynemb.ids.types import Ids, TensorLike

KEY_TYPES = (tf.int64, tf.int32, tf.uint64)


def as_keys(
    ids: TensorLike, key_type: tf.DType, name: str, string_hash: str | None = None
) -> tf.Tensor:
    """Converts ids to a dense tensor of `key_type`, if that loses nothing.

    Args:
        ids: a tensor, an array, or numbers in lists. Ids of an integer type other than `key_type`
            are cast if every value of their type is also a value of `key_type`. With `string_hash`,
            also strings, as tensors, arrays or lists of str or bytes.
        key_type: tf.int64, tf.int32 or tf.uint64.
        name: the name of the argument, for errors.
        string_hash: the hash that makes a key of a string; None: strings are errors.

    Raises:
        TypeError: the ids are not integers, or `key_type` cannot represent their type.
        ValueError: a number in a list is not a value of `key_type`.
    """
    ids = without_strings(ids, key_type, name, string_hash)
    if isinstance(ids, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)):
        raise TypeError(f"{name} must be a dense tensor, got a {type(ids).__name__}.")
    if not tf.is_tensor(ids):
        if not isinstance(ids, (np.ndarray, np.generic)) and not _holds_tensors(ids):
            array = _array_of_integers(ids, key_type, name)
            return tf.constant(array, dtype=key_type)
        ids = tf.convert_to_tensor(ids)
    return cast_keys(ids, key_type, name)


def without_strings(
    ids: Ids | TensorLike, key_type: tf.DType, name: str, string_hash: str | None
) -> Any:
    """Returns ids with the keys of strings in place of strings; the arguments are as in `as_keys`.

    Args:
        ids: as in `as_keys`, or a SparseTensor or RaggedTensor. Integers are returned as they are.
        key_type: tf.int64 or tf.uint64.
        name: the name of the argument, for errors.
        string_hash: the hash that makes a key of a string; None: strings are errors.

    Raises:
        TypeError: there are strings although the table has none, or strings and other values.
    """
    if isinstance(ids, tf.SparseTensor):
        values = without_strings(ids.values, key_type, name, string_hash)
        return ids if values is ids.values else ids.with_values(values)
    if isinstance(ids, tf.RaggedTensor):
        values = without_strings(ids.flat_values, key_type, name, string_hash)
        return ids if values is ids.flat_values else ids.with_flat_values(values)
    strings = _strings_in(ids, name)
    if strings is None:
        return ids
    if string_hash is None:
        raise TypeError(
            f"{name} must be integers, got strings, which are keys of a layer or DynamicVariable "
            "with hash_strings=True only. Otherwise hash them: "
            "tf.strings.to_hash_bucket_fast(strings, 2**63 - 1)."
        )
    return tf.cast(ids_of_strings(strings), key_type)


def _strings_in(ids: Any, name: str) -> tf.Tensor | None:
    """Returns ids as a tensor of strings; None if there are none among them."""
    if isinstance(ids, (list, tuple)) and _holds_tensors(ids):
        ids = tf.convert_to_tensor(ids)
    if tf.is_tensor(ids):
        return ids if ids.dtype == tf.string else None
    if isinstance(ids, (tf.IndexedSlices, int)):
        return None
    if isinstance(ids, (np.ndarray, np.generic)) and ids.dtype.kind not in "OSU":
        return None
    array = np.array(ids, dtype=object)
    if not array.size or not isinstance(array.flat[0], (str, bytes)):
        return None
    for each in array.flat:
        if not isinstance(each, (str, bytes)):
            raise TypeError(f"{name} must be strings or integers, got {each!r:.80} among strings.")
    return tf.constant(array, tf.string)


def cast_keys(ids: tf.Tensor, key_type: tf.DType, name: str) -> tf.Tensor:
    """Casts a tensor of ids to `key_type`, or raises TypeError if that could lose bits."""
    dtype = ids.dtype
    if dtype == key_type:
        return ids
    if not dtype.is_integer:
        raise TypeError(f"{name} must be integers, got {dtype.name}.")
    if dtype.min < key_type.min or dtype.max > key_type.max:
        raise TypeError(
            f"{name} are {dtype.name}, but the table's keys are {key_type.name}, which cannot hold "
            f"every {dtype.name}. Cast them yourself if they all fit, or create the table with "
            f"key_type=tf.{dtype.name}."
        )
    return tf.cast(ids, key_type)


def _holds_tensors(ids: Any) -> bool:
    return any(tf.is_tensor(item) for item in tf.nest.flatten(ids))


def _array_of_integers(ids: Any, key_type: tf.DType, name: str) -> npt.NDArray[Any]:
    """Returns Python numbers as an array of `key_type`: exact, so that 2**63 works for uint64."""
    array = np.array(ids, dtype=object)
    if not all(isinstance(i, (int, np.integer)) for i in array.flat):
        raise TypeError(f"{name} must be integers in a regular shape, got {ids!r:.80}.")
    for number in (array.min(), array.max()) if array.size else ():
        if not key_type.min <= number <= key_type.max:
            raise ValueError(f"{name} contain {number}, which is not a {key_type.name}.")
    return array.astype(key_type.as_numpy_dtype)
