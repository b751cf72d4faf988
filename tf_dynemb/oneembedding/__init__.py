"""OneFlow's OneEmbedding: its names for tables, stores, initializers and layers.

    import tf_dynemb.oneembedding as one_embedding  # was: from oneflow import one_embedding

Scripts keep these calls; docs/migrating_from_oneembedding.md lists the differences.

May import: `_ops`, `_presence`, `_warn`, `communicator`, `ids`, `layers`, `optimizers`,
`parallel`, `persistence`, `storage`, `tables`.
"""

from __future__ import annotations

from typing import Any

from tf_dynemb.oneembedding.embedding import (
    Embedding,
    MultiTableEmbedding,
    MultiTableMultiColumnEmbedding,
)
from tf_dynemb.oneembedding.initializers import (
    make_constant_initializer,
    make_normal_initializer,
    make_trunc_normal_initializer,
    make_uniform_initializer,
)
from tf_dynemb.oneembedding.stores import (
    make_cached_host_mem_store_options,
    make_cached_ssd_store_options,
    make_device_mem_store_options,
)
from tf_dynemb.oneembedding.tables import make_column_options, make_table, make_table_options

__all__ = [
    "Embedding",
    "MultiTableEmbedding",
    "MultiTableMultiColumnEmbedding",
    "make_cached_host_mem_store_options",
    "make_cached_ssd_store_options",
    "make_column_options",
    "make_constant_initializer",
    "make_device_mem_store_options",
    "make_normal_initializer",
    "make_table",
    "make_table_options",
    "make_trunc_normal_initializer",
    "make_uniform_initializer",
]

_MISSING = {
    "Ftrl": "tf_dynemb.OptimizerWrapper(keras.optimizers.Ftrl(...)) steps tables",
    "Optimizer": "tf_dynemb.OptimizerWrapper(optimizer) steps tables and dense variables together",
    "SmartDecayAdam": "tf_dynemb.OptimizerWrapper(keras.optimizers.Adam(...), catch_up=True) makes "
    "rows catch up with the steps that they have missed",
    "make_persistent_table_reader": "tf_dynemb.serving.Reader reads snapshots",
    "make_persistent_table_writer": "tf_dynemb.assign(table, keys, vectors) fills the tables of a "
    "layer, and layer.save_snapshot writes them",
}


def __getattr__(name: str) -> Any:
    if name in _MISSING:
        raise AttributeError(f"tf_dynemb.oneembedding has no {name}: {_MISSING[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
