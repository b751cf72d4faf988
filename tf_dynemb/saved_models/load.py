"""load_saved_model: loads a SavedModel with its tables in the memory of a GPU, or of the host."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tf_dynemb.parallel import placement
from tf_dynemb.variables import served

_HBM_GB = 16.0


def load_saved_model(
    path: str | os.PathLike[str],
    device: str = "CPU",
    max_hbm_for_vectors: float = _HBM_GB,
    **options: Any,
) -> Any:
    """Loads a SavedModel, as `tf.saved_model.load` does, with its tables on a device.

    On a GPU, a lookup of ids in GPU memory neither copies them to the host nor waits for it. The
    keys of a table and its first vectors, as far as `max_hbm_for_vectors` allows, are copied into
    GPU memory; its other vectors into page-locked memory of the host, where kernels read them. All
    blocks of the files are verified. Outputs have the bits that they have on the CPU, as far as
    TensorFlow's own operators do. A snapshot that the model applies is copied before requests use
    it; requests go on meanwhile.

    If memory runs out, the load fails, or the snapshot is not applied. TensorFlow's own allocator
    takes most of the memory of a GPU at first, unless it is told not to (docs/gpu.md, "Memory").

    Args:
        path: the directory of the SavedModel.
        device: "CPU", or a GPU that TensorFlow sees, such as "GPU:0".
        max_hbm_for_vectors: the GB (2^30 bytes) of GPU memory for the vectors of each table, as of
            one snapshot. An eighth is for rows that later snapshots change. Keys and their index
            are in addition: 16 to 24 bytes for each row.
        **options: further arguments of `tf.saved_model.load`.

    Returns:
        What `tf.saved_model.load` returns.

    Raises:
        ValueError: there is no such device, or the operators were built without CUDA; or
            `max_hbm_for_vectors` is not a number of GB in [0, 2^32).
        tf.errors.ResourceExhaustedError: the memory of the GPU is too small, or that of the host
            for the other vectors.
    """
    if isinstance(max_hbm_for_vectors, bool) or not 0 <= max_hbm_for_vectors < 2**32:
        raise ValueError(
            f"max_hbm_for_vectors must be a number of GB in [0, 2^32), got {max_hbm_for_vectors!r}."
        )
    residence = served.Residence(
        placement.existing_device(device), int(max_hbm_for_vectors * 2**30)
    )
    with served.loading(residence):
        return tf.saved_model.load(os.fspath(path), **options)
