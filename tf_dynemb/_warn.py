"""Warnings that point to the caller's code, however deep in the package they come from."""

from __future__ import annotations

import os
import sys
import warnings

_PACKAGE = os.path.dirname(__file__) + os.sep


def warn(message: str) -> None:
    """Warns, naming the line outside this package that led here."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)
