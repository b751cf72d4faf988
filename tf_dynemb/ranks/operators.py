"""The communicator over the operators of this package: Gloo, or an MPI library."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tf_dynemb import _ops
from tf_dynemb.communicator import Communicator, node_name

# The type in which sums of each type are computed. (Those of uint64 have the same bits as int64.)
_SUMMED_AS = {
    dtype: dtype for dtype in (tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64)
} | dict.fromkeys((tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32, tf.uint64), tf.int64)


class Operators(Communicator):
    """Ranks that a group of `cc/ranks` connects.

    The group is an input of each operation. TensorFlow runs the operations of one function that
    have the same resource as input in the order of the program, which is the same on all ranks.
    Operations of different functions may run at the same time.

    Args:
        group: the resource of the group.
        rank: the number of this process.
        size: the number of ranks.
        local_rank: its number among those on its machine.
    """

    def __init__(self, group: tf.Tensor, rank: int, size: int, local_rank: int = 0) -> None:
        self._group = group
        self._group_on_gpu: tf.Tensor | None = None
        self.rank, self.size, self.local_rank = rank, size, local_rank

    @_ops.not_converted
    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends a slice of a tensor to each rank; on the GPU, if the tensor is there."""
        received, counts = self._move("alltoall", name, tf.convert_to_tensor(tensor), splits)
        counts.set_shape([self.size])
        return received, counts

    @_ops.not_converted
    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the tensors of all ranks; on the GPU, if the tensor is there."""
        return self._move("allgather", name, tf.convert_to_tensor(tensor))

    @_ops.not_converted
    def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        """Returns the tensor of the rank `root`."""
        return self._run("broadcast", name, tf.convert_to_tensor(tensor), root=root)

    def _reduce(self, tensors: list[tf.Tensor], average: bool, name: str) -> list[tf.Tensor]:
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        dtype = given[0].dtype
        if dtype not in _SUMMED_AS:
            raise TypeError(f"{name}: tensors of {dtype.name} cannot be summed.")
        if self.alltoall_on_gpu and dtype.is_floating and not any(map(_is_on_host, given)):
            sums = self._sum_on_gpu(given, name)
        else:
            given = [tf.cast(data, _SUMMED_AS[dtype]) for data in given]
            sums = self._run("allreduce", name, given)
        if dtype == tf.uint64:
            sums = [tf.cast(total, dtype) for total in sums]
        if average and dtype.is_floating:
            sums = [total / tf.cast(self.size, dtype) for total in sums]
        elif average:
            sums = [total // self.size for total in sums]
        return [tf.cast(total, dtype) for total in sums]

    def _sum_on_gpu(self, given: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Returns the sums over all ranks of tensors of one type, on a GPU.

        Each rank sums an equal part of all elements, in the order of ranks. The sums have the same
        bits as those of the operator on the CPU.
        """
        with tf.device("/device:GPU:0"):
            shapes = [tf.shape(data) for data in given]
            flat = [tf.reshape(data, [-1]) for data in given]
            counts = [tf.size(data) for data in flat]
            n = tf.add_n(counts)
            part = (n + self.size - 1) // self.size
            padded = tf.pad(tf.concat(flat, 0), [[0, part * self.size - n]])
            parts = self._move("alltoall", f"{name}/parts", padded, tf.fill([self.size], part))[0]
            wide = tf.float64 if parts.dtype == tf.float64 else tf.float32
            first, *others = tf.unstack(tf.reshape(parts, [self.size, part]), self.size)
            total = tf.cast(first, wide)
            for other in others:
                total += tf.cast(other, wide)
            sums = self._move("allgather", f"{name}/sums", tf.cast(total, parts.dtype))
            split = tf.split(sums[:n], counts, num=len(counts))
            return [tf.reshape(data, shape) for data, shape in zip(split, shapes, strict=True)]

    def load_nccl(self, library: str) -> None:
        """Loads NCCL, for alltoalls of tensors on GPUs.

        Raises:
            tf.errors.FailedPreconditionError: the library is not usable; the message says why.
        """
        (gpu, *_) = [name for name in context.context().devices() if _is_gpu(name)]
        with tf.init_scope(), tf.device(_ops.CPU):
            self._group_on_gpu, _ = _ops.library().dynemb_ranks_use_nccl(self._group, library, gpu)

    def leave(self) -> None:
        """Ends the group on this rank, and so the operations of other ranks that wait for it."""
        with tf.device(_ops.CPU):
            _ops.library().dynemb_ranks_leave(self._group)

    def _move(self, kind: str, name: str, data: tf.Tensor, *inputs: Any) -> Any:
        """Runs an operation that moves rows, on the GPU if they are there and there are means."""
        if self.alltoall_on_gpu and _is_gpu(data.device):
            return _collective(self._group_on_gpu, data.device, kind, name, data, *inputs)
        return _collective(self._group, _ops.CPU, kind, name, data, *inputs)

    def _run(self, kind: str, name: str, *inputs: Any, **attributes: Any) -> Any:
        return _collective(self._group, _ops.CPU, kind, name, *inputs, **attributes)


def _collective(
    group: tf.Tensor, device: str, kind: str, name: str, *inputs: Any, **attributes: Any
) -> Any:
    """Runs an operation of a group, which is matched by its attribute; profiles show its node."""
    operator = getattr(_ops.library(), f"dynemb_ranks_{kind}")
    with tf.device(device):
        return operator(group, *inputs, operation=name, name=node_name(name), **attributes)


def _is_gpu(device: str) -> bool:
    return "device:gpu:" in device.lower()


def _is_on_host(tensor: tf.Tensor) -> bool:
    # TensorFlow puts operations of graphs that have no device on the GPU.
    return "device:cpu:" in tensor.device.lower()


def _like(operation: tf.Operation, kind: str, *inputs: Any) -> Any:
    """Runs an operation in the group of another one, of which it is the gradient, on its device."""
    name = operation.get_attr("operation").decode()
    device = operation.outputs[0].device
    device = device if _is_gpu(device) else _ops.CPU
    return _collective(operation.inputs[0], device, kind, f"{name}/gradient", *inputs)


# A loss is the sum of those of all ranks: what a rank has sent has a part in the losses of others.


@tf.RegisterGradient("DynembRanksAlltoall")  # type: ignore[untyped-decorator]
def _gradient_of_alltoall(
    operation: tf.Operation, gradient: tf.Tensor, _: tf.Tensor
) -> list[tf.Tensor | None]:
    back, _ = _like(operation, "alltoall", gradient, operation.outputs[1])
    return [None, back, None]


@tf.RegisterGradient("DynembRanksAllgather")  # type: ignore[untyped-decorator]
def _gradient_of_allgather(operation: tf.Operation, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    data = operation.inputs[1]
    rows = _like(operation, "allgather", tf.shape(data)[:1])
    parts, _ = _like(operation, "alltoall", gradient, rows)
    shape = tf.concat([tf.shape(rows), tf.shape(data)], 0)
    return [None, tf.reduce_sum(tf.reshape(parts, shape), 0)]


@tf.RegisterGradient("DynembRanksBroadcast")  # type: ignore[untyped-decorator]
def _gradient_of_broadcast(operation: tf.Operation, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    (total,) = _like(operation, "allreduce", [gradient])
    ranks = tf.size(_like(operation, "allgather", tf.zeros([1], tf.int32)))
    # Each rank sends rank r the number r.
    own, _ = _like(operation, "alltoall", tf.range(ranks), tf.ones([ranks], tf.int32))
    is_root = tf.equal(own[0], operation.get_attr("root"))
    return [None, tf.where(is_root, total, tf.zeros_like(total))]


@tf.RegisterGradient("DynembRanksAllreduce")  # type: ignore[untyped-decorator]
def _gradient_of_allreduce(
    operation: tf.Operation, *gradients: tf.Tensor
) -> list[tf.Tensor | None]:
    given = [
        tf.zeros_like(data) if gradient is None else gradient
        for gradient, data in zip(gradients, operation.inputs[1:], strict=True)
    ]
    return [None, *_like(operation, "allreduce", given)]
