"""Columns: the header of their `.npy` files, exactly as numpy.save writes it, and their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 128


def header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Returns the first 128 bytes of a column's file, which precede its data.

    Format version 1.0 of numpy.lib.format: magic, version, length of the text, the text.
    """
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    prefix = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    return prefix + text.encode("latin1").ljust(HEADER_BYTES - 11) + b"\n"


def plain(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns a column as a plain array, which is faster than a mapped one.

    A column in a store, which reads the rows that it is indexed with, stays what it is.
    """
    return np.asarray(column) if isinstance(column, np.ndarray) else column


def take(column: npt.NDArray[Any], positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Returns rows of a column; for a position below 0, any row."""
    if isinstance(column, np.ndarray):
        return np.take(column, positions, axis=0, mode="clip")
    return column[np.maximum(positions, 0)]
