"""The ranks that train together: what the rest of the package knows of them.

A `Communicator` is a group of ranks: `LOCAL`, a group of one process; the group of an engine that
`init` has joined (tf_dynemb/ranks); or the group that Horovod has been initialized with. `get()`
returns the current one. The rest of the package uses it without knowing its kind. This is the only
module that uses Horovod.

Every operation that involves other ranks is *collective*: all ranks call it, in the same order,
with the same names. If a rank's process ends, the calls of the other ranks fail soon, with
tf.errors.AbortedError. If a rank merely does not call, they fail after the timeout of `init`.
(Horovod: with tf.errors.UnknownError, "Horovod has been shut down"; and if a rank does not call,
only after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, if that is set.)
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import json
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

from tf_dynemb import _ops

# The environment variable with what all ranks of a job know, and others do not. `tf-dynemb run`
# sets it.
SECRET = "TF_DYNEMB_RANKS_SECRET"

INSTALL = (
    "Horovod 0.28.1 must be built from its source for TensorFlow 2.21: in a checkout of tf_dynemb "
    "run `make horovod`, or `tools/horovod.sh install PYTHON` for a Python other than the one in "
    ".venv; docs/scaling.md says more."
)

# The environment variables that name the files for TLS between ranks: the certificate of this rank,
# its key, and the certificate of the authority that has signed those of all ranks.
TLS_VARIABLES = tuple(f"TF_DYNEMB_RANKS_TLS_{file}" for file in ("CERTIFICATE", "KEY", "CA"))


class Communicator(abc.ABC):
    """A group of ranks. Tensors can be symbolic: operations work in a `tf.function`.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of ranks.
        local_rank: the number of this process among the ranks on its machine.
        alltoall_on_gpu: whether an alltoall of tensors on a GPU runs there.
    """

    rank: int
    size: int
    local_rank: int
    alltoall_on_gpu = False

    @abc.abstractmethod
    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends a slice of a tensor to each rank.

        Args:
            tensor: [n, ...]: the slices, in the order of their destination ranks.
            splits: int32 [size]: the length of each slice along the first dimension.
            name: the name of the operation; two operations that run at the same time must have
                different names. In a `tf.function` TensorFlow makes names unique, and adds the
                names of enclosing loops and function calls, which must be the same on all ranks.

        Returns:
            (received, received splits): the slices that the ranks sent here, in their order.
        """

    @_ops.not_converted
    def allreduce(
        self, tensors: Sequence[tf.Tensor | tf.IndexedSlices], average: bool, name: str
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns the sum, or the mean, over all ranks of each dense tensor or IndexedSlices.

        Dense tensors have the same shapes on all ranks. IndexedSlices are gathered: an index that
        several ranks have, or that one has several times, stays repeated.
        """
        reduced = list(tensors)
        groups: dict[tf.DType, list[int]] = {}  # tensors of one type are reduced together
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices):
                values = self.allgather(tensor.values, f"{name}/{i}/values")
                indices = self.allgather(tensor.indices, f"{name}/{i}/indices")
                if average:
                    values /= tf.cast(self.size, values.dtype)
                reduced[i] = tf.IndexedSlices(values, indices, tensor.dense_shape)
            else:
                groups.setdefault(tensor.dtype, []).append(i)
        for dtype, members in groups.items():
            group = self._reduce([tensors[i] for i in members], average, f"{name}/{dtype.name}")
            for i, tensor in zip(members, group, strict=True):
                reduced[i] = tensor
        return reduced

    def _reduce(self, tensors: list[tf.Tensor], average: bool, name: str) -> list[tf.Tensor]:
        """Returns the sum, or the mean, over all ranks of each of some tensors of one type."""
        raise NotImplementedError

    @abc.abstractmethod
    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the tensors of all ranks along the first dimension, which can differ."""

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        """Returns the tensor of the rank `root`."""

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """Returns each rank's value, in rank order. Eager only; values are sent as JSON."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = self.allgather(tf.constant([len(text)], tf.int64), f"{name}/lengths").numpy()
        texts = self.allgather(tf.constant(text), f"{name}/texts").numpy()
        ends = np.cumsum(lengths)
        return [
            json.loads(texts[end - length : end].tobytes())
            for end, length in zip(ends, lengths, strict=True)
        ]

    def barrier(self, name: str = "barrier") -> None:
        """Waits until all ranks have called it. Eager only."""
        self.allgather(tf.zeros([1], tf.uint8), f"dynemb/{name}")


class _Local(Communicator):
    """A group of one process, which receives what it sends."""

    rank = 0
    size = 1
    local_rank = 0

    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        return tensor, splits

    def allreduce(
        self, tensors: Sequence[tf.Tensor | tf.IndexedSlices], average: bool, name: str
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        return list(tensors)

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tensor

    def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        return tensor


class _Horovod(Communicator):
    """The ranks that horovodrun has started."""

    def __init__(self, horovod: types.ModuleType) -> None:
        # Otherwise TensorFlow can run an operation only once, or merge two operations.
        alltoall = op_def_registry.get("HorovodAlltoall")
        if alltoall is not None and not alltoall.is_stateful:
            raise RuntimeError(f"This Horovod was built from other sources. {INSTALL}")
        self._horovod = horovod
        self._functions: dict[tuple[object, ...], Callable[..., Any]] = {}
        self.rank = horovod.rank()
        self.size = horovod.size()
        self.local_rank = horovod.local_rank()
        self.alltoall_on_gpu = any(
            kernel.device_type == "GPU"
            for kernel in kernels.get_registered_kernels_for_op("HorovodAlltoall").kernel
        )

    @_ops.not_converted
    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        tensor = tf.convert_to_tensor(tensor)
        # As an argument of a function, an int32 tensor would be copied from the GPU to the host.
        on_gpu = self.alltoall_on_gpu and tensor.dtype == tf.int32
        carried = _as(tensor, tf.float32) if on_gpu else _carried(tensor)
        carried, splits = self._run(self._horovod.alltoall, name, carried, splits)
        received = _as(carried, tensor.dtype)
        received.set_shape([None, *tensor.shape[1:]])
        splits.set_shape([self.size])
        return received, splits

    def _reduce(self, tensors: list[tf.Tensor], average: bool, name: str) -> list[tf.Tensor]:
        dtype = tensors[0].dtype
        if dtype == tf.bfloat16:
            tensors = [tf.cast(tensor, tf.float32) for tensor in tensors]

        def grouped(*tensors: tf.Tensor, **options: Any) -> Any:
            return self._horovod.grouped_allreduce(list(tensors), **options)

        op = self._horovod.Average if average else self._horovod.Sum
        return [tf.cast(tensor, dtype) for tensor in self._run(grouped, name, *tensors, op=op)]

    @_ops.not_converted
    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        return _as(self._run(self._horovod.allgather, name, _carried(tensor)), tensor.dtype)

    @_ops.not_converted
    def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        carried = self._run(self._horovod.broadcast, name, _carried(tensor), root_rank=root)
        return _as(carried, tensor.dtype)

    def _run(
        self, operation: Callable[..., Any], name: str, *tensors: tf.Tensor, **options: Any
    ) -> Any:
        """Runs an operation of Horovod under a name.

        Horovod matches the operations of ranks by the names of TensorFlow's nodes. All eager nodes
        of a kind have the same name, so an eager call is run as a call of a function.
        """
        name = node_name(name)
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not tf.executing_eagerly():
            # Outside all scopes: layers have other scopes on a rank that created other models.
            with tf.compat.v1.get_default_graph().name_scope(None):
                return operation(*given, name=name, **options)
        # For any shape; otherwise the function would be traced again for each shape.
        signature = [tf.TensorSpec([None] * t.shape.rank, t.dtype) for t in given]
        key = (name, operation.__name__, *options.values(), *signature)
        function = self._functions.get(key)
        if function is None:
            function = tf.function(
                lambda *given: operation(*given, name=name, **options), autograph=False
            ).get_concrete_function(*signature)
            self._functions[key] = function
        return function(*given)


def node_name(name: str) -> str:
    """Returns the name of an operation as one that a node of TensorFlow can have."""
    return re.sub(r"^(?![A-Za-z0-9])", ".", re.sub(r"[^A-Za-z0-9_./-]", "_", name))


# Types that Horovod does not know, and the types that can carry their bits.
_CARRIED_AS = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64}


def _carried(tensor: tf.Tensor) -> tf.Tensor:
    return _as(tensor, _CARRIED_AS.get(tensor.dtype, tensor.dtype))


def _as(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    # A bitcast has no gradient, so it is only used where it is needed.
    return tensor if tensor.dtype == dtype else tf.bitcast(tensor, dtype)


LOCAL = _Local()
_joined: Communicator | None = None
_horovod: _Horovod | None = None
_is_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("_is_alone", default=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, `get` returns `LOCAL` in this thread: for the graphs of a model that is exported."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


def get() -> Communicator:
    """Returns this process's communicator: the one that `init` has set up.

    If a script has initialized Horovod itself, with several ranks, it is Horovod's.
    """
    global _horovod
    if _joined is not None:
        return LOCAL if _is_alone.get() else _joined
    # Horovod can only be initialized if it is imported, so this looks for the module without
    # importing it.
    horovod = sys.modules.get("horovod.tensorflow")
    if horovod is None or not horovod.is_initialized() or horovod.size() == 1:
        return LOCAL
    if _is_alone.get():
        return LOCAL
    if _horovod is None or (_horovod.rank, _horovod.size) != (horovod.rank(), horovod.size()):
        refuse_tls("horovod")
        _horovod = _Horovod(horovod)
    return _horovod


def warn_if_not_joined() -> None:
    """Warns if `tf-dynemb run` has started several ranks, and this one has not called `init`."""
    size = os.environ.get("WORLD_SIZE", "1")
    if SECRET not in os.environ or size == "1" or _is_alone.get() or get() is not LOCAL:
        return
    warnings.warn(
        f"Rank {os.environ.get('RANK')} of {size} creates a table before tf_dynemb.init(), and "
        "trains alone. Call tf_dynemb.init() first.",
        stacklevel=2,
    )


def use(comm: Communicator | None) -> None:
    """Makes `comm` the communicator of this process; None: that of Horovod, if it is used."""
    global _joined
    _joined = comm


def refuse_tls(engine: str) -> None:
    """Ensures that no encryption was asked for, which the ranks of an engine would not have.

    Raises:
        ValueError: one of TLS_VARIABLES is set; the message names it.
    """
    given = [name for name in TLS_VARIABLES if os.environ.get(name)]
    if given:
        raise ValueError(
            f"{', '.join(given)} would have no effect: {engine!r} does not encrypt what ranks send "
            "each other. Call init('gloo'), which does, or unset the variables."
        )


def horovod_ranks() -> None:
    """Imports and initializes Horovod.

    Raises:
        ImportError: it is not installed; the message says how to install it.
        ValueError: TLS was asked for.
    """
    refuse_tls("horovod")
    try:
        import horovod.tensorflow as horovod
    except ImportError as error:
        raise ImportError(
            f"tf_dynemb.init() needs Horovod, which is not installed. {INSTALL}"
        ) from error
    if not horovod.is_initialized():
        horovod.init()
