"""TensorFlow Recommenders-Addons (TFRA): its names for tables, lookups, layers and optimizers.

    from tf_dynemb import tfra as de  # was: from tensorflow_recommenders_addons import dynamic_...

Scripts keep their calls; docs/migrating_from_tfra.md lists the differences. As in TFRA, a lookup
gives no key a row: rows are created by `upsert` and by the steps of an optimizer.

May import: `_ops`, `_presence`, `_warn`, `communicator`, `ids`, `layers`, `lookup`,
`optimizers`, `persistence`, `tables`, `variables`.
"""

from __future__ import annotations

import sys
from typing import Any

from tf_dynemb.tfra import keras, shadow_ops
from tf_dynemb.tfra.checkpoint import load_checkpoint
from tf_dynemb.tfra.creators import (
    CuckooHashTableConfig,
    CuckooHashTableCreator,
    FileSystemSaver,
    HkvEvictStrategy,
    HkvHashTableConfig,
    HkvHashTableCreator,
    KVCreator,
)
from tf_dynemb.tfra.lookups import (
    embedding_lookup,
    embedding_lookup_sparse,
    embedding_lookup_unique,
    safe_embedding_lookup_sparse,
)
from tf_dynemb.tfra.modes import (
    ModelMode,
    enable_inference_mode,
    enable_train_mode,
    get_model_mode,
)
from tf_dynemb.tfra.optimizer import DynamicEmbeddingOptimizer
from tf_dynemb.tfra.restrict import (
    FrequencyRestrictPolicy,
    RestrictPolicy,
    TimestampRestrictPolicy,
)
from tf_dynemb.tfra.variable import Variable, get_variable

__all__ = [
    "CuckooHashTableConfig",
    "CuckooHashTableCreator",
    "DynamicEmbeddingOptimizer",
    "FileSystemSaver",
    "FrequencyRestrictPolicy",
    "HkvEvictStrategy",
    "HkvHashTableConfig",
    "HkvHashTableCreator",
    "KVCreator",
    "ModelMode",
    "RestrictPolicy",
    "TimestampRestrictPolicy",
    "Variable",
    "dynamic_embedding",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "embedding_lookup_unique",
    "enable_inference_mode",
    "enable_train_mode",
    "get_model_mode",
    "get_variable",
    "keras",
    "load_checkpoint",
    "safe_embedding_lookup_sparse",
    "shadow_ops",
]

# For scripts that write tfra.dynamic_embedding.get_variable.
dynamic_embedding = sys.modules[__name__]

_MISSING = {
    "RedisTable": "tables are in the memory of the ranks; tf_dynemb.incremental_dump and "
    "tf_dynemb.serving.Reader keep other processes up to date",
    "TrainableWrapper": "embedding_lookup(return_trainable=True) returns the Variable itself",
    "warm_start": "tf_dynemb.load and tfra.load_checkpoint fill tables",
}


def __getattr__(name: str) -> Any:
    for prefix, instead in _MISSING.items():
        if name.startswith(prefix):
            raise AttributeError(f"tf_dynemb.tfra has no {name}: {instead}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
