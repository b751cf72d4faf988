"""Former names of modules, for pickles that contain them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

# Modules with picklable classes, by their former names, and their current names.
MOVED = {
    "config": "tables.options",
    "optimizer": "optimizers.wrapper",
    "rowwise_adagrad": "optimizers.rowwise_adagrad",
    "sok_names": "sok.names",
    "watermark": "snapshots.watermark",
}


class _Moved(ModuleType):
    """A module that imports its replacement when one of its names is used."""

    def __init__(self, name: str, home: str) -> None:
        super().__init__(name, f"Now `{home}`.")
        self._home = home

    def __getattr__(self, name: str) -> Any:
        # Functions that iterate over all modules, such as in `inspect`, read __file__ and so on.
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        importlib.import_module("tensorflow")  # first, as in the package's own __getattr__
        return getattr(importlib.import_module(self._home), name)


def register(package: str) -> None:
    """Makes the modules of the package importable by their former names; imports none of them."""
    for name, home in MOVED.items():
        sys.modules.setdefault(
            f"{package}.{name}", _Moved(f"{package}.{name}", f"{package}.{home}")
        )
