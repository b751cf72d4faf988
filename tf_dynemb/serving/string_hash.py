"""Ids of strings: the 64-bit fingerprint of FarmHash, as TensorFlow computes it, in numpy.

Layers with `hash_strings=True` turn a string into the id

    fingerprint64(UTF-8 bytes) mod (2^63 - 1)

which is `tf.strings.to_hash_bucket_fast(string, 2**63 - 1)`. The fingerprint is Fingerprint64 of
FarmHash 1.1 (github.com/google/farmhash), which never changes. All arithmetic is modulo 2^64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

BUCKETS = 2**63 - 1

_K0, _K1, _K2 = (np.uint64(k) for k in (0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F))


def ids_of_strings(strings: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Returns the ids of an array of str or bytes, int64 in its shape.

    Raises:
        TypeError: an element is neither str nor bytes.
    """
    texts = []
    for text in strings.ravel().tolist():
        if not isinstance(text, (str, bytes)):
            raise TypeError(f"keys must be strings, got {text!r:.80} among them.")
        texts.append(text.encode() if isinstance(text, str) else text)
    ids = fingerprint64(texts) % np.uint64(BUCKETS)
    return ids.astype(np.int64).reshape(strings.shape)


def fingerprint64(texts: list[bytes]) -> Words:
    """Returns FarmHash's Fingerprint64 of each text."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    reader = _Reader(texts, lengths)
    result = np.empty(len(texts), np.uint64)
    for least, most, hash_of in _HASHES:
        group = np.flatnonzero((lengths >= least) & (lengths <= most))
        if len(group):
            result[group] = hash_of(reader.only(group))
    return result


class _Reader:
    """Words of several texts at the same place.

    Attributes:
        lengths: the lengths of the texts, int64 [n].
    """

    def __init__(self, texts: list[bytes], lengths: npt.NDArray[np.int64]) -> None:
        joined = b"".join(texts) + bytes(8)
        count = len(joined) - 7
        # Overlapping words: word i begins at byte i.
        self._words = np.ndarray([count], "<u8", joined, strides=(1,))
        self._starts = np.cumsum(lengths) - lengths
        self.lengths = lengths

    def only(self, group: npt.NDArray[np.int64]) -> _Reader:
        """Returns a reader of some of the texts."""
        other = object.__new__(_Reader)
        other._words, other._starts = self._words, self._starts[group]
        other.lengths = self.lengths[group]
        return other

    def word(self, place: int | npt.NDArray[np.int64]) -> Words:
        """The 8 bytes of each text from `place`; below 0, from the end."""
        place = np.asarray(place)
        from_start = np.where(place < 0, self.lengths + place, place)
        words: Words = self._words[self._starts + from_start].astype(np.uint64)
        return words

    def half(self, place: int | npt.NDArray[np.int64]) -> Words:
        """As `word`, 4 bytes."""
        return self.word(place) & np.uint64(0xFFFFFFFF)

    def byte(self, place: int | npt.NDArray[np.int64]) -> Words:
        """As `word`, one byte."""
        return self.word(place) & np.uint64(0xFF)


def _rotate(words: Words, bits: int) -> Words:
    return (words >> np.uint64(bits)) | (words << np.uint64(64 - bits))


def _shift_mix(words: Words) -> Words:
    return words ^ (words >> np.uint64(47))


def _mix(first: Words, second: Words, factor: Words) -> Words:
    once = _shift_mix((first ^ second) * factor)
    return _shift_mix((second ^ once) * factor) * factor


def _factor(reader: _Reader) -> Words:
    return _K2 + reader.lengths.astype(np.uint64) * np.uint64(2)


def _hash_of_0(reader: _Reader) -> Words:
    return np.full(len(reader.lengths), _K2)


def _hash_of_1_to_3(reader: _Reader) -> Words:
    lengths = reader.lengths.astype(np.uint64)
    low = reader.byte(0) + (reader.byte(reader.lengths // 2) << np.uint64(8))
    high = lengths + (reader.byte(-1) << np.uint64(2))
    return _shift_mix(low * _K2 ^ high * _K0) * _K2


def _hash_of_4_to_7(reader: _Reader) -> Words:
    first = reader.lengths.astype(np.uint64) + (reader.half(0) << np.uint64(3))
    return _mix(first, reader.half(-4), _factor(reader))


def _hash_of_8_to_16(reader: _Reader) -> Words:
    factor = _factor(reader)
    a, b = reader.word(0) + _K2, reader.word(-8)
    return _mix(_rotate(b, 37) * factor + a, (_rotate(a, 25) + b) * factor, factor)


def _hash_of_17_to_32(reader: _Reader) -> Words:
    factor = _factor(reader)
    a, b = reader.word(0) * _K1, reader.word(8)
    c, d = reader.word(-8) * factor, reader.word(-16) * _K2
    first = _rotate(a + b, 43) + _rotate(c, 30) + d
    return _mix(first, a + _rotate(b + _K2, 18) + c, factor)


def _hash_of_33_to_64(reader: _Reader) -> Words:
    factor = _factor(reader)
    a, b = reader.word(0) * _K2, reader.word(8)
    c, d = reader.word(-8) * factor, reader.word(-16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _mix(y, a + _rotate(b + _K2, 18) + c, factor)
    e, f = reader.word(16) * factor, reader.word(24)
    g, h = (y + reader.word(-32)) * factor, (z + reader.word(-24)) * factor
    first = _rotate(e + f, 43) + _rotate(g, 30) + h
    return _mix(first, e + _rotate(f + a, 18) + g, factor)


def _hash_of_65_and_more(reader: _Reader) -> Words:
    """Blocks of 64 bytes, and then the last 64 bytes again, which can overlap the block before."""
    blocks = (reader.lengths - 1) // 64
    last_bytes = ((reader.lengths - 1) & 63).astype(np.uint64)
    seed = np.full(len(blocks), 81, np.uint64)
    y = seed * _K1 + np.uint64(113)
    zero = np.zeros_like(seed)
    x = seed * _K2 + reader.word(0)
    z = _shift_mix(y * _K2 + np.uint64(113)) * _K2
    state: tuple[Words, ...] = (x, y, z, zero, zero, zero, zero)
    k1 = np.full_like(seed, _K1)
    for block in range(int(blocks.max())):
        # Texts that have ended read their last block again; the result is not used.
        place = np.minimum(block, blocks - 1) * 64
        after = _mix_block(reader, place, state, k1, np.uint64(1))
        goes_on = block < blocks
        state = tuple(np.where(goes_on, *both) for both in zip(after, state, strict=True))
    x, y, z, v0, v1, w0, w1 = state
    factor = _K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    w0 = w0 + last_bytes
    v0 = v0 + w0
    w0 = w0 + v0
    last = (x, y, z, v0, v1, w0, w1)
    x, y, z, v0, v1, w0, w1 = _mix_block(reader, reader.lengths - 64, last, factor, np.uint64(9))
    first = _mix(v0, w0, factor) + _shift_mix(y) * _K0 + z
    return _mix(first, _mix(v1, w1, factor) + x, factor)


def _mix_block(
    reader: _Reader,
    place: npt.NDArray[np.int64],
    state: tuple[Words, ...],
    factor: Words,
    weight: np.uint64,
) -> tuple[Words, ...]:
    """Mixes the 64 bytes at `place` into (x, y, z, v0, v1, w0, w1)."""
    x, y, z, v0, v1, w0, w1 = state
    x = _rotate(x + y + v0 + reader.word(place + 8), 37) * factor
    y = _rotate(y + v1 + reader.word(place + 48), 42) * factor
    x = x ^ (w1 * weight)
    y = y + v0 * weight + reader.word(place + 40)
    z = _rotate(z + w0, 33) * factor
    v = _mix_half_block(reader, place, v1 * factor, x + w0)
    w = _mix_half_block(reader, place + 32, z + w1, y + reader.word(place + 16))
    return (z, y, x, *v, *w)


def _mix_half_block(
    reader: _Reader, place: npt.NDArray[np.int64], a: Words, b: Words
) -> tuple[Words, Words]:
    words = [reader.word(place + offset) for offset in (0, 8, 16, 24)]
    a = a + words[0]
    b = _rotate(b + a + words[3], 21)
    before = a
    a = a + words[1] + words[2]
    return a + words[3], b + _rotate(a, 44) + before


# The hashes by length: the least and the greatest length of each.
_HASHES = (
    (0, 0, _hash_of_0),
    (1, 3, _hash_of_1_to_3),
    (4, 7, _hash_of_4_to_7),
    (8, 16, _hash_of_8_to_16),
    (17, 32, _hash_of_17_to_32),
    (33, 64, _hash_of_33_to_64),
    (65, 2**62, _hash_of_65_and_more),
)
