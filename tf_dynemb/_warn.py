"""Warnings that point to the caller's code, from any depth of the package."""

from __future__ import annotations

import os
import sys
import warnings

_PACKAGE = os.path.dirname(__file__) + os.sep


def warn(message: str) -> None:
    """Warns, and names the last line outside this package in the call stack."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)
