"""Finds and removes the admission counters of keys in snapshots (docs/file_format.md)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tf_dynemb.format.key_index import mix
from tf_dynemb.serving.keys import Keys

_LINE_SALT = 0x5851F42D4C957F2D
_FINGERPRINT_SALT = 0xA24BAED4963EE407
_ENTRIES = 23
_ENTRY_BITS = 22
_COUNT_BITS = 8

Lines = npt.NDArray[np.uint64]


def counted(lines: Lines, keys: Keys, first: int, all_lines: int) -> int:
    """Returns the number of keys that may be counted: a counter has their fingerprint.

    Args:
        lines: [n, 8], the lines of a shard.
        keys: the keys.
        first: the number of the first of these lines.
        all_lines: the number of lines of all shards.
    """
    return sum(
        _place_of(fingerprint, _number(lines[line])) is not None
        for line, fingerprint in _places(keys, first, len(lines), all_lines)
    )


def without(lines: Lines, keys: Keys, first: int, all_lines: int) -> Lines:
    """Returns lines without the counters of keys; the arguments are as in `counted`."""
    kept = np.array(lines)
    for line, fingerprint in _places(keys, first, len(lines), all_lines):
        number = _number(kept[line])
        place = _place_of(fingerprint, number)
        if place is None:
            continue
        at = place * _ENTRY_BITS
        below = number & ((1 << at) - 1)
        number = below | number >> (at + _ENTRY_BITS) << at
        kept[line] = np.frombuffer(number.to_bytes(64, "little"), "<u8")
    return kept


def _places(keys: Keys, first: int, count: int, all_lines: int) -> Iterator[tuple[int, int]]:
    """Returns the lines of the keys that are among these, and the fingerprints there."""
    hashes = zip(mix(keys, _LINE_SALT).tolist(), mix(keys, _FINGERPRINT_SALT).tolist(), strict=True)
    for line_hash, fingerprint_hash in hashes:
        line = (line_hash * all_lines >> 64) - first
        if 0 <= line < count:
            yield line, fingerprint_hash >> 50


def _number(line: npt.NDArray[np.uint64]) -> int:
    return int.from_bytes(np.ascontiguousarray(line, "<u8").tobytes(), "little")


def _place_of(fingerprint: int, line: int) -> int | None:
    for place in range(_ENTRIES):
        entry = line >> place * _ENTRY_BITS & ((1 << _ENTRY_BITS) - 1)
        if entry and entry >> _COUNT_BITS == fingerprint:
            return place
    return None
