"""Arguments that have two names."""

from __future__ import annotations

from typing import Any


def one_of(name: str, value: Any, alias: str, alias_value: Any) -> Any:
    """Returns the value of an argument that may be given by either of two names.

    Raises:
        TypeError: both are given; the message names them.
    """
    if value is not None and alias_value is not None:
        raise TypeError(
            f"{name}={value!r} and {alias}={alias_value!r} set the same argument: pass one of them."
        )
    return value if alias_value is None else alias_value
