"""Registers the package's classes with Keras and TensorFlow, without importing TensorFlow for it.

Keras and TensorFlow can load a saved model if its classes and operators are registered; they never
import a module to find them. There are these requirements:

- `import tf_dynemb` is enough for `keras.models.load_model` and `tf.saved_model.load`, in either
  order of the imports.
- A process that only serves vectors does not import TensorFlow, and one that only serves models
  does not import Keras.

The operators are therefore loaded as soon as TensorFlow has been imported, and the modules that
register Keras classes as soon as Keras has been imported, too: at once, or by a finder that stays
in `sys.meta_path` until then.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The registration that SavedModels need. It needs no Keras.
_SAVER = "tf_dynemb.saved_models.saver"
_MODULES = (
    "tf_dynemb.layers",
    "tf_dynemb.optimizers.wrapper",
    "tf_dynemb.optimizers.rowwise_adagrad",
    "tf_dynemb.tfra",
    "tf_dynemb.oneembedding",
)


def check_keras_backend() -> None:
    """Raises RuntimeError if Keras runs, or would run, on another backend than TensorFlow."""
    keras: Any = sys.modules.get("keras")
    if hasattr(keras, "config"):
        backend = keras.config.backend()
    else:
        backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend != "tensorflow":
        raise RuntimeError(
            f"tf_dynemb needs the TensorFlow backend of Keras, but the backend is {backend!r}. Set "
            "the environment variable KERAS_BACKEND=tensorflow before Keras is imported."
        )


def register() -> None:
    """Imports the modules that register classes, now or once Keras and TensorFlow are loaded."""
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        watch = _Watch()
        sys.meta_path.insert(0, watch)
        watch.register_if_loaded()


class _Watch:
    """A finder that delegates to the others, and acts once the modules of `AWAITED` are loaded.

    Each of the two imports the other while it loads, and a module of this package can be the first
    to import them. So only the end of the outermost load counts.
    """

    AWAITED = ("keras", "tensorflow")
    OWN = __package__ + "."

    def __init__(self) -> None:
        self._loading = 0
        self._has_saver = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.AWAITED and not name.startswith(self.OWN):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None
            if finder is not self and find is not None:
                spec = find(name, path, target)
            if spec is not None:
                loader: Any = spec.loader
                if hasattr(loader, "exec_module"):
                    # On the instance, which only this spec uses: the module keeps its own loader.
                    loader.exec_module = functools.partial(self._exec_module, loader)
                return spec
        return None

    def _exec_module(self, loader: Any, module: ModuleType) -> None:
        del loader.exec_module
        self._loading += 1
        try:
            loader.exec_module(module)
        finally:
            self._loading -= 1
        if not self._loading:
            self.register_if_loaded()

    def register_if_loaded(self) -> None:
        keras: Any = sys.modules.get("keras")
        if sys.modules.get("tensorflow") is None:
            return
        if keras is not None and keras.config.backend() != "tensorflow":
            return
        if not self._has_saver:
            self._has_saver = True
            importlib.import_module(_SAVER)
        if keras is None or self not in sys.meta_path:  # an import of the saver may have done it
            return
        sys.meta_path.remove(self)
        for name in _MODULES:
            importlib.import_module(name)
