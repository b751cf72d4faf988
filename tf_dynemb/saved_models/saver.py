"""The saver that TensorFlow calls for the tables of a model that it saves.

It is registered for `ServedTable`s, which only SavedModels have; checkpoints are not affected. A
process without this package can load the model, because there is nothing to restore: the tables are
opened when they are initialized.

The import of this module also loads the operators, which a SavedModel needs when it is loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.python.saved_model import registration

from tf_dynemb import _ops
from tf_dynemb._presence import local_path
from tf_dynemb.variables.served import Export, ServedTable


def save_tables(trackables: Mapping[str, ServedTable], file_prefix: tf.Tensor) -> list[tf.Tensor]:
    """Writes the snapshots of a SavedModel.

    Args:
        trackables: all tables of the model.
        file_prefix: a path in the folder `variables` of the SavedModel, a string tensor.

    Returns:
        No files that belong to the checkpoint of the model's variables.
    """
    if not tf.executing_eagerly():
        return []  # this is the graph by which the loaded model could save its variables
    # Here, because it needs Keras.
    from tf_dynemb.saved_models import checksums, writing

    prefix = file_prefix.numpy().decode()
    folder = local_path(os.path.dirname(os.path.dirname(prefix)), "export_dir")
    checksums.remove(folder)  # of a model that this save replaces
    exports: list[Export] = []
    for served in trackables.values():
        if served.export is not None and served.export not in exports:
            exports.append(served.export)
    for export in exports:
        for source in export.sources.values():
            writing.write(source, folder / source.directory)
    writing.check_states(list(trackables.values()))
    return []


def restore_tables(
    trackables: Mapping[str, ServedTable], merged_prefix: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Does nothing: `ServedTable` opens the rows when it is initialized."""
    return {}


registration.register_checkpoint_saver(
    package="tf_dynemb",
    name="ServedTable",
    predicate=lambda obj: isinstance(obj, ServedTable),
    save_fn=save_tables,
    restore_fn=restore_tables,
)

# If they do not fit this TensorFlow, the first call of one says what to install.
with contextlib.suppress(ImportError, tf.errors.NotFoundError):
    _ops.library()
