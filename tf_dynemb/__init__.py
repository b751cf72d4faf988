"""Embedding tables that are hash tables, for TensorFlow 2 and Keras 3.

    import tf_dynemb as de

    table = de.DynamicVariable(dimension=16)
    vectors = de.lookup_sparse(table, ids, combiners="mean")

See `de.layers` for Keras layers, `de.OptimizerWrapper` for training, and `de.serving` for looking
up vectors in dumps. Names are imported when they are first used, so serving needs no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tf_dynemb import _registration
from tf_dynemb._version import __version__

if TYPE_CHECKING:
    from tf_dynemb import callbacks, layers, oneembedding, serving, storage, tfra
    from tf_dynemb.chains.publish import publish
    from tf_dynemb.layers.conversion import from_keras, to_keras
    from tf_dynemb.lookup.lookup_sparse import lookup_sparse
    from tf_dynemb.lookup.prefetch import prefetch_lookup
    from tf_dynemb.optimizers.rowwise_adagrad import RowwiseAdagrad
    from tf_dynemb.optimizers.wrapper import OptimizerWrapper
    from tf_dynemb.parallel.placement import GpuInfo, gpu_info
    from tf_dynemb.persistence.apply_delta import apply_delta
    from tf_dynemb.persistence.dump import dump, incremental_dump
    from tf_dynemb.persistence.load import load
    from tf_dynemb.persistence.model_dump import incremental_model_dump
    from tf_dynemb.persistence.naming import named_tables
    from tf_dynemb.persistence.watermark import Watermark
    from tf_dynemb.ranks.start import init
    from tf_dynemb.saved_models.export import export_saved_model
    from tf_dynemb.saved_models.load import load_saved_model
    from tf_dynemb.sok.load import load_sok_dump
    from tf_dynemb.sok.names import SGD, all2all_dense_embedding, sparse_read_and_evict
    from tf_dynemb.tables.admission_options import Frequency, Probability
    from tf_dynemb.tables.options import TableOptions
    from tf_dynemb.variables.dynamic import DynamicVariable
    from tf_dynemb.variables.replicas import broadcast_variables
    from tf_dynemb.variables.static import Variable
    from tf_dynemb.variables.transfer import assign, export
    from tf_dynemb.variables.unwrap import filter_variables

__all__ = [
    "SGD",
    "DynamicVariable",
    "Frequency",
    "GpuInfo",
    "OptimizerWrapper",
    "Probability",
    "RowwiseAdagrad",
    "TableOptions",
    "Variable",
    "Watermark",
    "__version__",
    "all2all_dense_embedding",
    "apply_delta",
    "assign",
    "broadcast_variables",
    "callbacks",
    "dump",
    "export",
    "export_saved_model",
    "filter_variables",
    "from_keras",
    "gpu_info",
    "incremental_dump",
    "incremental_model_dump",
    "init",
    "layers",
    "load",
    "load_saved_model",
    "load_sok_dump",
    "lookup_sparse",
    "named_tables",
    "oneembedding",
    "prefetch_lookup",
    "publish",
    "serving",
    "sparse_read_and_evict",
    "storage",
    "tfra",
    "to_keras",
]

# The module of each name; None: the name is a module itself.
_HOMES = {
    "DynamicVariable": "variables.dynamic",
    "Frequency": "tables.admission_options",
    "GpuInfo": "parallel.placement",
    "OptimizerWrapper": "optimizers.wrapper",
    "Probability": "tables.admission_options",
    "RowwiseAdagrad": "optimizers.rowwise_adagrad",
    "SGD": "sok.names",
    "TableOptions": "tables.options",
    "Variable": "variables.static",
    "Watermark": "persistence.watermark",
    "all2all_dense_embedding": "sok.names",
    "apply_delta": "persistence.apply_delta",
    "assign": "variables.transfer",
    "broadcast_variables": "variables.replicas",
    "callbacks": None,
    "dump": "persistence.dump",
    "export": "variables.transfer",
    "export_saved_model": "saved_models.export",
    "filter_variables": "variables.unwrap",
    "from_keras": "layers.conversion",
    "gpu_info": "parallel.placement",
    "incremental_dump": "persistence.dump",
    "incremental_model_dump": "persistence.model_dump",
    "init": "ranks.start",
    "layers": None,
    "load": "persistence.load",
    "load_saved_model": "saved_models.load",
    "load_sok_dump": "sok.load",
    "lookup_sparse": "lookup.lookup_sparse",
    "named_tables": "persistence.naming",
    "oneembedding": None,
    "prefetch_lookup": "lookup.prefetch",
    "publish": "chains.publish",
    "serving": None,
    "sparse_read_and_evict": "sok.names",
    "storage": None,
    "tfra": None,
    "to_keras": "layers.conversion",
}


def __getattr__(name: str) -> Any:
    if name == "tf_version":  # SOK's: the numbers of TensorFlow's version
        version = importlib.import_module("tensorflow").__version__
        return [int(number) for number in version.split("-")[0].split(".")]
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    try:
        if name not in ("publish", "serving", "storage"):
            _registration.check_keras_backend()
            # First: its import makes _registration import modules that need TensorFlow themselves.
            importlib.import_module("tensorflow")
        module = importlib.import_module(f"{__name__}.{home or name}")
    except ModuleNotFoundError as error:
        if error.name in ("keras", "tensorflow"):
            importlib.import_module(f"{__name__}._ops")  # its error says what to install
        raise
    value = module if home is None else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


_registration.register()
