"""The index column, which finds each key of a shard: a hash table with linear probing.

`index[s]` is 0, or 1 + a position in keys. A key is in the first slot at or after its home, in
cyclic order, that does not contain another key: every slot from its home to its own is occupied.
Homes depend on a salted hash, because ids may have been sharded by the same hash, and an attacker
can choose keys. If probes pass too many slots with one salt, another is used (cc/io/key_index.h).
Keys are processed in chunks of `_CHUNK`, so that intermediate results stay in the cache, and only
accesses to the index and the keys miss it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tf_dynemb.format import npy
from tf_dynemb.format.errors import DataLossError

Integers: TypeAlias = npt.NDArray[np.integer[Any]]
Index: TypeAlias = npt.NDArray[np.uint32]
Positions: TypeAlias = npt.NDArray[np.int64]

# Keys per iteration.
_CHUNK = 1 << 15

# As in cc/io/key_index.h: the slots that probes may pass per key, and the number of salts tried.
_PASSED = 8
_SALTS = 64


def mix(keys: Integers, salt: int = 0) -> npt.NDArray[np.uint64]:
    """Returns SplitMix64's finalizer of each key, salted; 32-bit keys are zero-extended.

    Args:
        keys: integers of 4 or 8 bytes, of any shape.
        salt: below 2^64.
    """
    if keys.dtype.kind not in "iu" or keys.dtype.itemsize not in (4, 8):
        raise TypeError(f"keys must be integers of 32 or 64 bits, got {keys.dtype}.")
    pattern = keys.view(np.dtype(f"u{keys.dtype.itemsize}"))
    z: npt.NDArray[np.uint64] = np.bitwise_xor(pattern, np.uint64(salt), dtype=np.uint64)
    z += np.uint64(0x9E3779B97F4A7C15)
    shifted = z >> np.uint64(30)
    z ^= shifted
    z *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(z, np.uint64(27), out=shifted)
    z ^= shifted
    z *= np.uint64(0x94D049BB133111EB)
    np.right_shift(z, np.uint64(31), out=shifted)
    z ^= shifted
    return z


def index_size(rows: int) -> int:
    """Returns the number of slots for `rows` keys: a power of 2, at least 4 and twice the rows."""
    return max(4, 1 << max(0, 2 * rows - 1).bit_length())


def salt(number: int) -> int:
    """Returns the salt that is tried at this position."""
    return int(mix(np.array([number]))[0])


def build(keys: Integers, out: Index | None = None) -> tuple[Index, int]:
    """Builds the index of keys; returns it and its salt.

    Args:
        keys: [rows], distinct, fewer than 2^32 - 1.
        out: zeros [index_size(rows)] to build the index in, such as a mapped file.

    Returns:
        `out` or a new array, and the salt.
    """
    index = np.zeros(index_size(keys.size), np.uint32) if out is None else np.asarray(out)
    for number in range(_SALTS):
        chosen = salt(number)
        if _build(keys, index, chosen, _PASSED * keys.size if number + 1 < _SALTS else None):
            break
        index[:] = 0
    return index, chosen


def _build(keys: Integers, index: Index, salt: int, most: int | None) -> bool:
    """Fills `index`, which is all zeros; returns False if probes pass more than `most` slots."""
    passed = 0
    for begin in range(0, keys.size, _CHUNK):
        chunk = keys[begin : begin + _CHUNK]
        entries = np.arange(begin + 1, begin + 1 + chunk.size, dtype=np.uint32)
        slots = _homes(chunk, index.size, salt)
        while entries.size:
            free = index[slots] == 0
            index[slots[free]] = entries[free]  # if several entries have one slot, one remains
            losers = index[slots] != entries
            slots, entries = _following(slots[losers], index.size), entries[losers]
            passed += entries.size
            if most is not None and passed > most:
                return False
    return True


def find(index: Index, keys: Integers, queries: Integers, salt: int) -> Positions:
    """Returns the positions of keys.

    Args:
        index: [index_size(rows)], the index of `keys`.
        keys: [rows].
        queries: [n], of the keys' dtype.
        salt: the salt of the index.

    Returns:
        [n], -1 for a key that is not in `keys`.

    Raises:
        DataLossError: the index is not an index of these keys.
    """
    if queries.dtype != keys.dtype:
        raise TypeError(f"queries must be {keys.dtype}, as the keys are, got {queries.dtype}.")
    if index.size != index_size(keys.size):
        raise DataLossError(
            f"{_name(index)} has {index.size} slots, but {keys.size} keys need "
            f"{index_size(keys.size)}."
        )
    found = np.full(queries.size, -1, np.int64)
    if keys.size:
        for begin in range(0, queries.size, _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            _find_chunk(index, keys, queries[chunk], salt, found[chunk])
    return found


def _find_chunk(
    index: Index, keys: Integers, queries: Integers, salt: int, found: Positions
) -> None:
    """Sets `found` for the queries that are among the keys."""
    slots_by_number, keys_by_position = npy.plain(index), npy.plain(keys)
    slots = _homes(queries, index.size, salt)
    pending = np.arange(queries.size)
    # Each probe of a query finds another key, so more probes than keys mean a damaged index.
    for _ in range(keys.size + 1):
        positions = slots_by_number[slots].astype(np.int64) - 1
        if positions.max() >= keys.size:
            bad = int(slots[positions.argmax()])
            raise DataLossError(
                f"{_name(index)} is damaged: slot {bad} holds position {positions.max()} of "
                f"{keys.size} keys."
            )
        same = keys_by_position[positions] == queries  # an empty slot's -1 reads the last key
        found[pending[same]] = positions[same]
        more = (positions >= 0) & ~same
        if not more.any():
            return
        pending, queries = pending[more], queries[more]
        slots = _following(slots[more], index.size)
    raise DataLossError(f"{_name(index)} is damaged: it has no empty slot where one must be.")


def _homes(keys: Integers, slots: int, salt: int) -> Positions:
    """Returns the home slot of each key."""
    hashes = mix(keys, salt)
    hashes >>= np.uint64(65 - slots.bit_length())
    return hashes.view(np.int64)


def _following(slots: Positions, count: int) -> Positions:
    slots += 1
    slots &= count - 1
    return slots


def _name(index: Index) -> str:
    """Returns the name of the mapped file, for errors."""
    return str(getattr(index, "filename", None) or "the index")
