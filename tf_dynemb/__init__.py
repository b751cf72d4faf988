"""Embedding tables that are hash tables, for TensorFlow 2 and Keras 3.

    import tf_dynemb as de

    table = de.DynamicVariable(dimension=16)
    vectors = de.lookup_sparse(table, ids, combiners="mean")

See `de.layers` for Keras layers, `de.OptimizerWrapper` for training, and `de.serving` to look
vectors up in dumps, for which no TensorFlow is needed: names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tf_dynemb import _registration
from tf_dynemb._version import __version__

if TYPE_CHECKING:
    from tf_dynemb import layers, serving, storage
    from tf_dynemb.communicator import init
    from tf_dynemb.dynamic_variable import DynamicVariable
    from tf_dynemb.exchange import assign, export
    from tf_dynemb.loading import apply_delta, load
    from tf_dynemb.lookup import lookup_sparse
    from tf_dynemb.optimizer import OptimizerWrapper
    from tf_dynemb.rowwise_adagrad import RowwiseAdagrad
    from tf_dynemb.snapshot import Watermark, dump, incremental_dump, incremental_model_dump
    from tf_dynemb.sok_load import load_sok_dump
    from tf_dynemb.static_variable import Variable
    from tf_dynemb.unwrap import filter_variables

__all__ = [
    "DynamicVariable",
    "OptimizerWrapper",
    "RowwiseAdagrad",
    "Variable",
    "Watermark",
    "__version__",
    "apply_delta",
    "assign",
    "dump",
    "export",
    "filter_variables",
    "incremental_dump",
    "incremental_model_dump",
    "init",
    "layers",
    "load",
    "load_sok_dump",
    "lookup_sparse",
    "serving",
    "storage",
]

# Where each name is; None: it is a module.
_HOMES = {
    "DynamicVariable": "dynamic_variable",
    "OptimizerWrapper": "optimizer",
    "RowwiseAdagrad": "rowwise_adagrad",
    "Variable": "static_variable",
    "Watermark": "snapshot",
    "apply_delta": "loading",
    "assign": "exchange",
    "dump": "snapshot",
    "export": "exchange",
    "filter_variables": "unwrap",
    "incremental_dump": "snapshot",
    "incremental_model_dump": "snapshot",
    "init": "communicator",
    "layers": None,
    "load": "loading",
    "load_sok_dump": "sok_load",
    "lookup_sparse": "lookup",
    "serving": None,
    "storage": None,
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    try:
        module = importlib.import_module(f"{__name__}.{home or name}")
    except ModuleNotFoundError as error:
        if error.name in ("keras", "tensorflow"):
            importlib.import_module(f"{__name__}._ops")  # whose error says what to install
        raise
    value = module if home is None else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


_registration.register()
