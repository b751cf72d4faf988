"""The vectors of keys that a table does not have: the same bits that the model reads.

A key without a row reads as the table's default vector if it has one. Otherwise it reads as the
vector that the row would start with, which is a function of the table's seed, the key and the
column only. The formulas come from `cc/table/philox.h` (Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3", SC 2011) and `cc/table/initializer_formulas.h`: float32 additions,
multiplications, divisions and square roots, which IEEE 754 defines to the bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_dynemb.storage import InitializerEntry, TableEntry

Vectors = npt.NDArray[np.float32]

_F = np.float32
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# Philox's multipliers and the increments of its key.
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
# Rows that are computed at a time: few enough that the intermediate results stay in the cache.
_WORDS = 1 << 15


@dataclasses.dataclass(frozen=True, eq=False)
class UnknownKeys:
    """The rule for the keys of a table that have no row; fields as in the manifest."""

    dimension: int
    seed: int
    initializer: InitializerEntry
    default_vector: tuple[float, ...] | None
    padding_id: int | None

    @classmethod
    def of(cls, entry: TableEntry) -> UnknownKeys:
        """Returns the rule of a table in a manifest."""
        return cls(
            entry.dimension, entry.seed, entry.initializer, entry.default_vector, entry.padding_id
        )

    def vectors(self, keys: npt.NDArray[Any]) -> Vectors:
        """Returns float32 [n, dimension] for keys [n], not yet rounded to the table's dtype."""
        if self.default_vector is not None:
            out = np.tile(np.array(self.default_vector, _F), (keys.size, 1))
        elif set(self.initializer.kinds) == {"constant"}:
            row = np.array(self.initializer.args[::2], _F)
            out = np.tile(np.broadcast_to(row, self.dimension), (keys.size, 1))
        else:
            out = np.empty((keys.size, self.dimension), _F)
            step = max(1, _WORDS // self.dimension)
            for begin in range(0, keys.size, step):
                chunk = keys[begin : begin + step]
                out[begin : begin + step] = self._initial_vectors(chunk)
        if self.padding_id is not None:
            out[keys == keys.dtype.type(self.padding_id)] = 0
        return out

    def _initial_vectors(self, keys: npt.NDArray[Any]) -> Vectors:
        words = _philox_words(self.seed, _key_bits(keys), self.dimension)
        out = np.empty(words.shape, _F)
        kinds, args = self.initializer.kinds, self.initializer.args
        for i, kind in enumerate(kinds):
            columns = slice(i, i + 1) if len(kinds) > 1 else slice(None)
            first, second = _F(args[2 * i]), _F(args[2 * i + 1])
            out[:, columns] = _DRAW[kind](words[:, columns], first, second)
        return out


def _key_bits(keys: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """A key as 64 bits; int32 keys are extended by zeros."""
    return keys.view(np.uint32 if keys.dtype.itemsize == 4 else np.uint64).astype(np.uint64)


def _philox_words(seed: int, ids: npt.NDArray[np.uint64], columns: int) -> npt.NDArray[np.uint32]:
    """The first words of stream 0 for each id: uint32 [n, columns]."""
    blocks = -(-columns // 4)
    shape = (ids.size, blocks)
    c0 = np.broadcast_to((ids & _LOW)[:, None], shape)
    c1 = np.broadcast_to((ids >> _HALF)[:, None], shape)
    c2 = np.broadcast_to(np.arange(blocks, dtype=np.uint64), shape)
    c3 = np.zeros(shape, np.uint64)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> _HALF) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _HALF) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    words = np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)
    return words.reshape(ids.size, blocks * 4)[:, :columns]


def _unit_closed_open(words: npt.NDArray[np.uint32]) -> Vectors:
    """24 bits as a number in [0, 1)."""
    return (words >> np.uint32(8)).astype(_F) * _F(2.0**-24)


def _unit_open(words: npt.NDArray[np.uint32]) -> Vectors:
    """23 bits as a number in (0, 1)."""
    return ((words >> np.uint32(8)) | np.uint32(1)).astype(_F) * _F(2.0**-24)


def _log(x: Vectors) -> Vectors:
    """The natural logarithm of numbers in (0, 1]: the polynomial of Cephes' logf."""
    sqrt_half = np.uint32(0x3F3504F3)
    u = x.view(np.uint32) - sqrt_half
    e = (u.view(np.int32) >> 23).astype(_F)
    m = ((u & np.uint32(0x007FFFFF)) + sqrt_half).view(_F) - _F(1)
    p: Vectors = np.full_like(m, 7.0376836292e-2)
    for c in (
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        p = p * m + _F(c)
    square = m * m
    result: Vectors = p * m * square - _F(2.12194440e-4) * e
    result -= _F(0.5) * square
    result += m
    return result + _F(0.693359375) * e


def _normal_quantile(x: Vectors) -> Vectors:
    """sqrt(2) erfinv(x): M. Giles, "Approximating the erfinv function", GPU Computing Gems."""
    w = -_log((_F(1) - x) * (_F(1) + x))
    centre = w - _F(2.5)
    p = np.full_like(w, 2.81022636e-08)
    for c in (
        3.43273939e-07,
        -3.5233877e-06,
        -4.39150654e-06,
        0.00021858087,
        -0.00125372503,
        -0.00417768164,
        0.246640727,
        1.50140941,
    ):
        p = _F(c) + p * centre
    t = np.sqrt(np.abs(w)) - _F(3)
    q = np.full_like(w, -0.000200214257)
    for c in (
        0.000100950558,
        0.00134934322,
        -0.00367342844,
        0.00573950773,
        -0.0076224613,
        0.00943887047,
        1.00167406,
        2.83297682,
    ):
        q = _F(c) + q * t
    return _F(1.41421356) * (np.where(w < _F(5), p, q) * x)


def _constant(words: npt.NDArray[np.uint32], value: _F, _: _F) -> Vectors:
    return np.full(words.shape, value, _F)


def _uniform(words: npt.NDArray[np.uint32], low: _F, high: _F) -> Vectors:
    largest = np.nextafter(high, low) if high > low else low
    values: Vectors = low + (high - low) * _unit_closed_open(words)
    return values.clip(low, largest)


def _normal(words: npt.NDArray[np.uint32], mean: _F, stddev: _F) -> Vectors:
    return mean + stddev * _normal_quantile(_F(2) * _unit_open(words) - _F(1))


def _truncated_normal(words: npt.NDArray[np.uint32], mean: _F, stddev: _F) -> Vectors:
    # The factor is P(|Z| < 2).
    x = _F(0.954499736) * (_F(2) * _unit_open(words) - _F(1))
    spread = _F(2) * stddev
    values: Vectors = mean + stddev * _normal_quantile(x)
    return values.clip(mean - spread, mean + spread)


_DRAW = {
    "constant": _constant,
    "uniform": _uniform,
    "normal": _normal,
    "truncated_normal": _truncated_normal,
}
