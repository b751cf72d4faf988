"""The header of a column's `.npy` file, exactly as numpy.save writes it, padded to 128 bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

HEADER_BYTES = 128


def header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Returns the first 128 bytes of a column's file, which precede its data.

    Format version 1.0 of numpy.lib.format: magic, version, length of the text, the text.
    """
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    prefix = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    return prefix + text.encode("latin1").ljust(HEADER_BYTES - 11) + b"\n"
