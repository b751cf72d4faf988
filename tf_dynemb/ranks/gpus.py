"""The GPUs of ranks: which one a rank uses, and NCCL, which moves tensors between them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels

from tf_dynemb.ranks.libraries import find_nccl
from tf_dynemb.ranks.operators import Operators

_log = logging.getLogger("tf_dynemb")


def choose_gpu(local_rank: int) -> None:
    """Makes one of several GPUs the only one that TensorFlow uses in this process.

    Otherwise TensorFlow would take the memory of all GPUs in each rank of a machine. It has no
    effect if the script has chosen GPUs (`tf.config.set_visible_devices`), or has used TensorFlow
    already.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) < 2 or tf.config.get_visible_devices("GPU") != gpus:
        return
    gpu = gpus[local_rank % len(gpus)]
    try:
        tf.config.set_visible_devices(gpu, "GPU")
    except RuntimeError:
        _log.warning(
            "This rank uses all %d GPUs, because TensorFlow was used before init: call init first, "
            "or tf.config.set_visible_devices.",
            len(gpus),
        )
        return
    _log.info("this rank uses %s of %d", gpu.name, len(gpus))


def use_nccl(comm: Operators, is_required: bool) -> None:
    """Lets alltoalls of tensors on GPUs run there, if all ranks can. Collective.

    Raises:
        RuntimeError: NCCL is required, and a rank cannot use it, or two ranks have the same GPU;
            all ranks raise it.
    """
    gpu = _gpu(os.environ)
    problem = "TensorFlow sees no GPU" if gpu is None else _load_nccl(comm)
    said = comm.gather_objects([gpu, problem], "dynemb/ranks/gpus")
    reason = _obstacle(said)
    if reason is None:
        comm.alltoall_on_gpu = True
        _log.info("tensors on GPUs are exchanged by NCCL")
    elif is_required:
        raise RuntimeError(f"init('nccl'): {reason}.")
    elif any(gpu is not None for gpu, _ in said):
        _log.info("tensors on GPUs are exchanged in the memory of hosts: %s", reason)


def _gpu(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the machine and a name of the GPU that this process uses first; None without one."""
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return None
    number = gpus[0].name.rpartition(":")[2]
    names = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if number.isdecimal() and int(number) < len(names) and names[int(number)].strip():
        number = names[int(number)].strip()
    return [os.uname().nodename, number]


def _load_nccl(comm: Operators) -> str | None:
    """Loads NCCL for the group of ranks; returns what prevents it."""
    registered = kernels.get_registered_kernels_for_op("DynembRanksAlltoall").kernel
    if not any(kernel.device_type == "GPU" for kernel in registered):
        return f"the operators for TensorFlow {tf.__version__} have no exchange on GPUs"
    library = find_nccl(os.environ)
    if library is None:
        return (
            "no NCCL library was found: `pip install nvidia-nccl-cu12`, or name one by "
            "TF_DYNEMB_NCCL"
        )
    try:
        comm.load_nccl(library)
    except tf.errors.OpError as error:
        return str(error.message)
    return None


def _obstacle(said: list[Any]) -> str | None:
    """Returns why the ranks cannot use NCCL, from the GPU and the problem of each, or None."""
    ranks_of: dict[tuple[str, str], int] = {}
    for rank, (gpu, problem) in enumerate(said):
        if problem is not None:
            return f"rank {rank}: {problem}"
        other = ranks_of.setdefault(tuple(gpu), rank)
        if other != rank:
            machine, number = gpu
            return f"ranks {other} and {rank} have the same GPU, {number} of {machine}"
    return None
