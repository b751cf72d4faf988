"""The operator library: loads it once; gradients of lookups, and the devices of operators.

The library is loaded on first use, or when the package is imported into a process that has
TensorFlow (`_registration.py`). `docs/operators.md` defines the operators that are called here.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

try:
    import tensorflow as tf
except ImportError as error:  # pragma: no cover - needs an environment without TensorFlow
    raise ImportError(
        "tf_dynemb needs TensorFlow, 2.18 to 2.21: install `tensorflow-cpu==2.21.*` (CPU only, "
        "small) or `tensorflow==2.21.*`."
    ) from error

from tensorflow.python.eager import context

from tf_dynemb import _gpu
from tf_dynemb._version import TENSORFLOW_VERSIONS

_Function = TypeVar("_Function", bound=Callable[..., Any])
FOLDER = pathlib.Path(__file__).parent

# The device of the host's memory.
CPU = "/device:CPU:0"


def library_path(version: str) -> pathlib.Path:
    """Returns the operator library for a version of TensorFlow and this machine's driver.

    Raises:
        ImportError: there is none; the message says which versions there are libraries for.
    """
    return chosen_library(version)[0]


def chosen_library(version: str) -> tuple[pathlib.Path, str]:
    """Returns the same, and what decided between the libraries of a version of TensorFlow.

    Raises:
        ImportError: there is none; the message says which versions there are libraries for.
    """
    minor = ".".join(version.split(".")[:2])
    path = FOLDER / f"_dynemb_ops_tf{minor}.so"
    if minor not in TENSORFLOW_VERSIONS:
        raise ImportError(
            f"tf_dynemb supports TensorFlow {', '.join(TENSORFLOW_VERSIONS)}, but version "
            f"{version} is installed: install `tensorflow-cpu=={TENSORFLOW_VERSIONS[-1]}.*` or "
            f"`tensorflow=={TENSORFLOW_VERSIONS[-1]}.*` (one of the two)."
        )
    if not path.exists():
        built = {p.stem.split("_tf")[1].split("_")[0] for p in FOLDER.glob("_dynemb_ops_tf*.so")}
        has = (
            f"has operators for TensorFlow {', '.join(sorted(built))}" if built else "is not built"
        )
        raise ImportError(
            f"TensorFlow {version} is installed, but this tf_dynemb {has}: install the wheel, or "
            "build it in a checkout with `make build`."
        )
    return _gpu.choose(path, _gpu.driver_version())


def not_converted(function: _Function) -> _Function:
    """Excludes a function that a `tf.function` calls from AutoGraph, which would only cost time."""
    return cast(_Function, tf.autograph.experimental.do_not_convert(function))


@functools.cache
def library() -> types.ModuleType:
    """Returns the operator library as TensorFlow's module of functions; loads it at the first call.

    Raises:
        ImportError: there is no library for this version of TensorFlow.
    """
    module: types.ModuleType = tf.load_op_library(str(library_path(tf.__version__)))
    return module


def lookup_sparse_grad(
    op: tf.Operation, grads: Sequence[tf.Tensor | None]
) -> tuple[list[tf.Tensor], ...]:
    """Sums the gradients of a DynembLookupSparse operation (or its eager stand-in) for each key."""
    parts = _SparseParts(op)
    with beside(op):
        keys, sums, rows = library().dynemb_lookup_sparse_grad(
            keys=parts.keys,
            rows=parts.rows,
            bags=parts.bags,
            weights=parts.weights,
            argmax=parts.argmax,
            grads=parts.upstream(grads),
            combiners=parts.combiners,
        )
    return keys, sums, rows


def on(device: str) -> contextlib.AbstractContextManager[object, None]:
    """Returns a context in which operators run on this device; it has no effect without a GPU.

    It is for operators without a handle, which TensorFlow would otherwise run on a GPU if there is
    one, even if their table is elsewhere; and for operators whose gradient is such an operator.

    In the graphs of a model that is exported, operators have no device but the CPU: the process
    that loads the model decides where its tables are.
    """
    if not tf.executing_eagerly() and is_saving_model():
        return tf.device(CPU) if device == CPU else contextlib.nullcontext()
    if not device or not context.num_gpus():
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[object, None] = tf.device(device)
    return scope


def is_saving_model() -> bool:
    """Whether this is called by `tf.saved_model.save`."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "tensorflow.python.saved_model.save":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def on_host() -> contextlib.AbstractContextManager[object, None]:
    """Returns a context for tensors that operators read in the host's memory: bags and hyper.

    If they were on a GPU, copying them back would have to wait for all of the GPU's work.
    """
    return on(CPU)


def one_each() -> tf.Tensor:
    """Returns the `bags` of ids that each form one bag."""
    with on_host():
        return tf.constant(1, tf.int64)


def beside(op: tf.Operation) -> contextlib.AbstractContextManager[object, None]:
    """Same as `on`, with the device of an operation with a table (or its eager stand-in)."""
    return on(op.device if isinstance(op, tf.Operation) else op.inputs[0].device)


def strings_of(op: tf.Operation, name: str) -> list[str]:
    """Returns a list attribute of an operation (or its eager stand-in), strings as `str`.

    A graph has them as bytes.
    """
    return [v.decode() if isinstance(v, bytes) else v for v in op.get_attr(name)]


class _SparseParts:
    """The inputs and outputs of a DynembLookupSparse operation, by name."""

    def __init__(self, op: tf.Operation) -> None:
        inputs, outputs = list(op.inputs), list(op.outputs)
        n = len(inputs) // 5
        self.count = n
        self.handles, self.keys, self.bags, self.weights, self.num_bags = (
            inputs[i * n : (i + 1) * n] for i in range(5)
        )
        self.outputs, self.rows, self.argmax = (outputs[i * n : (i + 1) * n] for i in range(3))
        self.combiners = strings_of(op, "combiners")

    def upstream(self, grads: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
        """Returns the gradients of `outputs`; zeros for outputs that have none."""
        return [
            tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
            for output, grad in zip(self.outputs, grads[: self.count], strict=True)
        ]


# The row ids of keys that have none because admission refused them, as in cc/table/types.h. Ids of
# skipped keys are absent from their bags.
UNADMITTED_ROW, SKIPPED_ROW = 2**32 - 2, 2**32 - 3


def row_gradient(keys: tf.Tensor, sums: tf.Tensor, rows: tf.Tensor) -> tf.IndexedSlices:
    """Returns the gradient of a table: IndexedSlices over unique keys, float32 values.

    The row ids of the keys are attached to the indices as the attribute `_dynemb_rows`. If
    TensorFlow creates other indices (it adds two gradients, or the gradient leaves a
    `tf.function`), the attribute is lost, and the optimizer finds the rows by their keys.
    """
    keys._dynemb_rows = rows
    return tf.IndexedSlices(values=sums, indices=keys, dense_shape=None)


def rows_of_gradient(grad: tf.IndexedSlices) -> tf.Tensor | None:
    """Returns the row ids of a gradient's keys; None if they were lost, and keys can repeat."""
    return getattr(grad.indices, "_dynemb_rows", None)


def check_gradient_graph() -> None:
    """Raises NotImplementedError inside the gradient of a loop or a condition.

    TensorFlow adds up the gradients of iterations as dense tensors, and replaces the gradients of a
    branch that did not run by dense tensors. A table has none.
    """
    kind = type(tf.compat.v1.get_default_graph()).__name__
    if kind in ("_WhileBodyGradFuncGraph", "_CondGradFuncGraph"):
        raise NotImplementedError(
            "A gradient cannot reach a table through tf.while_loop, tf.map_fn, tf.scan or tf.cond. "
            "Look up the ids before it, and use the vectors inside it."
        )


@tf.RegisterGradient("DynembLookup")  # type: ignore[untyped-decorator]
def _dynemb_lookup_gradient(
    op: tf.Operation, grad: tf.Tensor | None, _rows_grad: tf.Tensor | None
) -> list[tf.IndexedSlices | None]:
    check_gradient_graph()
    handle_grad = None
    if grad is not None:
        keys = tf.reshape(op.inputs[1], [-1])
        grad = tf.convert_to_tensor(grad)
        with beside(op):
            unique_keys, sums, rows = library().dynemb_lookup_sparse_grad(
                keys=[keys],
                rows=[tf.reshape(op.outputs[1], [-1])],
                bags=[one_each()],
                weights=[tf.zeros([0], tf.float32)],
                argmax=[tf.zeros([0, op.outputs[0].shape[-1]], tf.int32)],
                grads=[tf.reshape(grad, [-1, op.outputs[0].shape[-1]])],
                combiners=["sum"],
            )
        handle_grad = row_gradient(unique_keys[0], sums[0], rows[0])
    return [handle_grad, None, None]


@tf.RegisterGradient("DynembLookupSparse")  # type: ignore[untyped-decorator]
def _dynemb_lookup_sparse_gradient(
    op: tf.Operation, *grads: tf.Tensor | None
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    check_gradient_graph()
    parts = _SparseParts(op)
    n = parts.count
    keys, sums, rows = lookup_sparse_grad(op, grads)
    handle_grads = [row_gradient(*triple) for triple in zip(keys, sums, rows, strict=True)]

    weight_grads: list[tf.Tensor | None] = [None] * n
    skipped = getattr(op, "skip_input_indices", None) or ()
    wanted = [
        i
        for i in range(n)
        if parts.weights[i].shape.dims is None or parts.weights[i].shape[0] != 0
        if 3 * n + i not in skipped
    ]
    if wanted:

        def pick(values: list[tf.Tensor]) -> list[tf.Tensor]:
            return [values[i] for i in wanted]

        computed = library().dynemb_lookup_sparse_weight_grad(
            handles=pick(parts.handles),
            keys=pick(parts.keys),
            rows=pick(parts.rows),
            bags=pick(parts.bags),
            weights=pick(parts.weights),
            argmax=pick(parts.argmax),
            outputs=pick(parts.outputs),
            grads=pick(parts.upstream(grads)),
            combiners=pick(parts.combiners),
        )
        for i, weight_grad in zip(wanted, computed, strict=True):
            weight_grads[i] = weight_grad
    return handle_grads + [None] * n + [None] * n + weight_grads + [None] * n
