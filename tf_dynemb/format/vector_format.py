"""How vectors are stored: as a table trains them, or in fewer bytes for serving.

docs/file_format.md specifies the formats; cc/table/vector_format.h reads them. The dtype of an
array of stored vectors tells its format: no two formats have the same.

int8 is symmetric, so that a row of dimension 16 takes 18 bytes: the float16 bias of an asymmetric
format would add 2, for an error that is smaller by a seventh only.
int4 is the row-wise format of FBGEMM (4 bits, float16 scale and bias): with 16 values for a row,
the bias pays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
Rows = npt.NDArray[Any]

# The largest finite float16.
_LARGEST = np.float32(65504)
_SMALLEST_NORMAL = np.float16(2.0**-14)


@dataclasses.dataclass(frozen=True)
class VectorFormat:
    """A format of stored vectors.

    Attributes:
        name: its name in manifests and options.
        dtype: the dtype of a column of stored vectors.
        bits: the bits of one element of a vector.
        extra: the elements of `dtype` that each row has besides those of its vector.
    """

    name: str
    dtype: np.dtype[Any]
    bits: int
    extra: int = 0

    def width(self, dimension: int) -> int:
        """Returns the elements of `dtype` in a row."""
        return -(-dimension * self.bits // (8 * self.dtype.itemsize)) + self.extra


FORMATS = {
    each.name: each
    for each in (
        VectorFormat("float32", np.dtype(np.float32), 32),
        VectorFormat("float16", np.dtype(np.float16), 16),
        VectorFormat("bfloat16", np.dtype(np.uint16), 16),  # its bits; numpy has no bfloat16
        VectorFormat("int8", np.dtype(np.int8), 8, extra=2),  # a scale
        VectorFormat("int4", np.dtype(np.uint8), 4, extra=4),  # a scale and a bias
    )
}
_BY_DTYPE = {each.dtype: each.name for each in FORMATS.values()}


def smaller(vector_format: str, dtype: str) -> str:
    """Returns a format, or the one that a table of a dtype has, whichever has fewer bits."""
    return vector_format if FORMATS[vector_format].bits < FORMATS[dtype].bits else dtype


def decode(rows: Rows, dimension: int) -> Vectors:
    """Returns stored vectors [n, width] as float32 [n, dimension]; exact, except for int4's sum."""
    name = _BY_DTYPE[rows.dtype]
    if name == "bfloat16":
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "int8":
        return rows[:, :dimension] * _numbers(rows[:, dimension:])
    if name == "int4":
        packed = -(-dimension // 2)
        scale, bias = _numbers(rows[:, packed : packed + 2]), _numbers(rows[:, packed + 2 :])
        halves = np.stack([rows[:, :packed] & 15, rows[:, :packed] >> 4], axis=2)
        return halves.reshape(len(rows), 2 * packed)[:, :dimension] * scale + bias
    return rows.astype(np.float32, copy=False)


def encode(vectors: Vectors, vector_format: str) -> Rows:
    """Returns float32 [n, dimension] in a format, [n, width]; the inverse of `decode`.

    16-bit formats round to nearest even. The scale of int8 is the largest magnitude / 127, rounded
    to nearest, and a number has an error of at most 0.57 scales. The scale of int4 is (the largest
    number - the bias) / 15, rounded up, and the bias the least number, rounded down; the error is
    at most half a scale. A row that has a number that is not finite becomes NaN as a whole. Numbers
    beyond what float16 reaches (8.3e6 in int8, 65504 in int4) become the nearest that it reaches.
    """
    if vector_format == "bfloat16":
        return _to_bfloat16(vectors)
    if vector_format == "int8":
        return _to_int8(vectors)
    if vector_format == "int4":
        return _to_int4(vectors)
    with np.errstate(over="ignore"):
        return vectors.astype(FORMATS[vector_format].dtype, copy=False)


def convert(rows: Rows, dimension: int, vector_format: str) -> Rows:
    """Returns stored vectors in another format; themselves, if they have that one.

    Numbers beyond what float16 reaches become the nearest that it reaches, as in int8 and int4.
    """
    if rows.dtype == FORMATS[vector_format].dtype:
        return rows
    vectors = decode(rows, dimension)
    if vector_format == "float16":
        reached = np.clip(vectors, -_LARGEST, _LARGEST)
        vectors = np.where(np.isfinite(vectors), reached, vectors)
    return encode(vectors, vector_format)


def join(parts: list[Rows], dimension: int) -> Rows:
    """Concatenates stored vectors; as float32 if their formats differ."""
    if len({part.dtype for part in parts}) > 1:
        parts = [decode(part, dimension) for part in parts]
    return np.concatenate(parts)


def _to_bfloat16(vectors: Vectors) -> Rows:
    bits = vectors.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    # Rounding could make an infinity of a NaN.
    quiet = (bits >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return np.where(np.isnan(vectors), quiet, rounded)


def _to_int8(vectors: Vectors) -> Rows:
    # 0.0 is added because the scale of zeros must not be -0.0.
    largest = np.maximum(vectors.max(axis=1), -vectors.min(axis=1)) + np.float32(0)
    exact = largest / np.float32(127)
    nearest = np.minimum(exact, _LARGEST).astype(np.float16)
    # A subnormal scale could be too small by far.
    is_near = np.isfinite(exact) & (nearest >= _SMALLEST_NORMAL)
    scale = np.where(is_near, nearest, _float16(exact, up=True))
    quotients = _quotients(vectors, scale)
    rows = np.empty((len(vectors), vectors.shape[1] + 2), np.int8)
    rows[:, :-2] = np.clip(quotients, -127, 127, out=quotients)
    rows[:, -2:] = scale[:, np.newaxis].view(np.int8)
    return rows


def _to_int4(vectors: Vectors) -> Rows:
    dimension = vectors.shape[1]
    bias = _float16(vectors.min(axis=1), up=False)
    low = bias.astype(np.float32)
    scale = _float16((vectors.max(axis=1) - low) / np.float32(15), up=True)
    quotients = _quotients(vectors - low[:, np.newaxis], scale)
    halves = np.zeros((len(vectors), dimension + dimension % 2), np.uint8)
    halves[:, :dimension] = np.clip(quotients, 0, 15, out=quotients)
    scales = np.stack([scale, bias], axis=1).view(np.uint8)
    return np.concatenate([halves[:, ::2] | halves[:, 1::2] << 4, scales], axis=1)


def _quotients(vectors: Vectors, scale: npt.NDArray[np.float16]) -> Vectors:
    """Returns vectors in units of their scales, rounded; 0 where a scale is 0 or NaN."""
    divisors = scale.astype(np.float32)
    usable = divisors > 0
    quotients = vectors / np.where(usable, divisors, 1)[:, np.newaxis]
    quotients[~usable] = 0
    return np.rint(quotients, out=quotients)


def _float16(numbers: npt.NDArray[np.float32], up: bool) -> npt.NDArray[np.float16]:
    """Rounds up or down, to a finite number; what is not finite becomes NaN."""
    finite = np.isfinite(numbers)
    numbers = np.clip(np.where(finite, numbers, 0), -_LARGEST, _LARGEST)
    nearest = numbers.astype(np.float16)
    exact = nearest.astype(np.float32)
    beyond = exact < numbers if up else exact > numbers
    limit = np.float16(np.inf if up else -np.inf)
    with np.errstate(over="ignore"):
        rounded = np.where(beyond, np.nextafter(nearest, limit), nearest)
    return np.where(finite, rounded, np.float16(np.nan))


def _numbers(halves: Rows) -> Vectors:
    """Returns the float16 [n, 1] that bytes [n, 2] are, as float32."""
    return np.ascontiguousarray(halves).view(np.float16).astype(np.float32)
