"""A SavedModel in memory, called with arrays."""

from __future__ import annotations

import itertools
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.util import nest

from tf_dynemb import _ops
from tf_dynemb.serve.inputs import Array, Dense, Input, Ragged, Sparse, Tensor, Value
from tf_dynemb.variables.served import ServedTable

DEFAULT = "serving_default"
# Signatures that are not a model's: they say and change what it serves.
STATE, APPLY = "watermark", "apply_delta"
# How far the scores of a row may be apart in two batches: a product of matrices is rounded
# differently for another number of rows.
_TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}


class Watermark(NamedTuple):
    """The snapshot that a model serves.

    Attributes:
        id: its id; empty: the model has no tables.
        watermark: the tick of the trainer's last batch in it.
        utc_ns: the time of that batch, in nanoseconds since 1970 in UTC.
        error: why the model could not apply the next snapshot; empty: it could.
    """

    id: str = ""
    watermark: int = 0
    utc_ns: int = 0
    error: str = ""

    @staticmethod
    def of(state: Mapping[str, tf.Tensor]) -> Watermark:
        """Returns what the signature `watermark` has returned."""
        return Watermark(
            state["id"].numpy().decode(),
            int(state["watermark"]),
            int(state["watermark_utc_ns"]),
            state["follow_error"].numpy().decode(errors="replace"),
        )


class Signature:
    """A signature of a loaded model, called with values of its inputs.

    Attributes:
        inputs: the inputs by name.
        outputs: the outputs, in the order of their names.
        joins: whether the rows of several requests can be one batch: every input and output has a
            row for each, and a row of an answer depends on no other row.
    """

    def __init__(self, loaded: Any, name: str) -> None:
        function = loaded.signatures[name]
        specs = function.structured_input_signature[1]
        self.inputs = _inputs(function, getattr(loaded, "serve", None))
        self.outputs = tuple(
            _tensor(key, spec) for key, spec in sorted(function.structured_outputs.items())
        )
        self.joins = False
        order = [tensor.name for each in self.inputs.values() for tensor in each.tensors]
        state = loaded.signatures[STATE] if has_state(loaded) else None

        # In one function: the watermark is then the one of the rows that the model reads.
        def answer(*tensors: tf.Tensor) -> Any:
            outputs = function(**dict(zip(order, tensors, strict=True)))
            return outputs, {} if state is None else state()

        given = [specs[each] for each in order]
        traced = tf.function(answer, input_signature=given, autograph=False)
        self._answer = traced.get_concrete_function()

    def __call__(self, values: Mapping[str, Value]) -> tuple[dict[str, Array], Watermark]:
        """Returns the outputs by name, and the snapshot that they were computed from."""
        given = (part for name in self.inputs for part in values[name])
        tensors = [
            tf.constant(part) if part.dtype != object else tf.constant(part, tf.string)
            for part in given
        ]
        outputs, state = self._answer(*tensors)
        found = {name: output.numpy() for name, output in outputs.items()}
        return found, Watermark.of(state) if state else Watermark()

    def example(self, rows: int, seed: int = 0) -> dict[str, Value]:
        """Returns values with small random numbers."""
        random = np.random.default_rng(seed)
        return {name: each.example(rows, random) for name, each in self.inputs.items()}

    def try_joining(self) -> str:
        """Sets `joins` by calls with random rows, alone and together; returns why it is False."""
        if not all(
            isinstance(each, (Ragged, Sparse)) or _has_rows(each) for each in self.inputs.values()
        ):
            return "an input has no free first dimension"
        names = {tensor.name for each in self.inputs.values() for tensor in each.tensors}
        if len(names) == len(self.inputs) and any(f"{name}_1" in names for name in names):
            return "it may have ragged or sparse inputs, which only models with `serve` describe"
        alone = [self.example(rows, seed) for seed, rows in enumerate((1, 3))]
        together = {
            name: each.join([values[name] for values in alone])
            for name, each in self.inputs.items()
        }
        try:
            answers = [self(values)[0] for values in alone]
            joined = self(together)[0]
        except tf.errors.OpError as error:
            return f"it refuses random rows: {error.message}"
        for name, output in joined.items():
            parts = [answer[name] for answer in answers]
            if any(each.ndim == 0 for each in (output, *parts)) or [len(p) for p in parts] != [
                1,
                3,
            ]:
                return f"output {name!r} does not have a row for each row of the inputs"
            expected = np.concatenate(parts)
            if expected.shape != output.shape or not _are_close(output, expected):
                return f"output {name!r} of a row depends on the other rows of its batch"
        self.joins = True
        return ""


def has_state(loaded: Any) -> bool:
    """Returns whether a model has tables, whose snapshot it names."""
    return STATE in loaded.signatures


class LoadedModel:
    """A SavedModel in memory.

    Attributes:
        path: where it was loaded from.
        signatures: the signatures of the model by name; not `watermark` and `apply_delta`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self._loaded = tf.saved_model.load(str(path))
        self.signatures: dict[str, Signature] = {}
        for name in self._loaded.signatures:
            if name not in (STATE, APPLY) and name != "serve":
                self.signatures[name] = Signature(self._loaded, name)
        if not self.signatures and "serve" in self._loaded.signatures:
            self.signatures[DEFAULT] = Signature(self._loaded, "serve")
        if not self.signatures:
            raise ValueError(f"{path} has no signature to answer requests with.")
        self._tables = _tables(self._loaded)
        self._applying = threading.Lock()

    @property
    def default(self) -> str:
        """The name of the signature for requests that name none."""
        return DEFAULT if DEFAULT in self.signatures else min(self.signatures)

    def watermark(self) -> Watermark:
        """Returns the snapshot that the model serves now."""
        if not has_state(self._loaded):
            return Watermark()
        return Watermark.of(self._loaded.signatures[STATE]())

    def apply(self, path: str | os.PathLike[str]) -> int:
        """Applies the snapshots at a path that the model does not have; returns their number.

        Raises:
            tf.errors.OpError: the next snapshot is damaged, or of other tables or weights.
            ValueError: the model has no tables.
        """
        if APPLY not in self._loaded.signatures:
            raise ValueError(f"{self.path} has no tables that could follow {path}.")
        with self._applying:
            return int(self._loaded.signatures[APPLY](path=tf.constant(str(path)))["applied"])

    def catch_up(self) -> None:
        """Applies what is at the path that the model polls, if there is one, without waiting."""
        follows = {table.follows for table in self._tables.values()} - {None}
        for path in follows:
            self.apply(str(path))

    def stats(self) -> dict[str, dict[str, int]]:
        """Returns the counters of each table, by the tables' names.

        They are those of `DynamicVariable.stats`, and those of the operator DynembServedStats.
        """
        counters: dict[str, dict[str, int]] = {}
        for name, table in self._tables.items():
            found = counters[name] = {}
            library = _ops.library()
            for read in (library.dynemb_stats, library.dynemb_served_stats):
                names, values = read(table.handle)
                keys = (each.decode() for each in names.numpy())
                found.update(zip(keys, values.numpy().tolist(), strict=True))
        return counters

    def folders(self) -> set[str]:
        """Returns the directories of the files that the model maps."""
        return {os.path.realpath(self.path), *(str(t.loaded_from) for t in self._tables.values())}


def _inputs(function: Any, serve: Any) -> dict[str, Input]:
    """Returns the inputs of a signature, from its tensors.

    Args:
        function: the signature.
        serve: the function of a model that Keras has exported, which has the same inputs, and says
            which tensors are the components of one of them; or None.
    """
    specs = function.structured_input_signature[1]
    made: list[Input] = []
    names = iter(_in_order(function))
    for path, leaf in _leaves(serve):
        parts = tf.nest.flatten(leaf, expand_composites=True)
        tensors = [_tensor(each, specs[each]) for each in itertools.islice(names, len(parts))]
        if [t.dtype for t in tensors] != [_tensor("", part).dtype for part in parts]:
            break
        keys = [each for each in path if isinstance(each, str)]
        name = tensors[0].name if len(tensors) == 1 or not keys else keys[-1]
        if isinstance(leaf, tf.RaggedTensorSpec):
            made.append(Ragged(name, tensors))
        elif isinstance(leaf, tf.SparseTensorSpec):
            made.append(Sparse(name, tensors, tuple(leaf.shape)))
        else:
            made.append(Dense(name, tensors))
    found = {each.name: each for each in made}
    if sum(len(each.tensors) for each in found.values()) == len(specs):
        return found
    return {name: Dense(name, [_tensor(name, spec)]) for name, spec in specs.items()}


def _leaves(serve: Any) -> list[tuple[Any, tf.TypeSpec]]:
    """Returns the inputs of a function, with their places in its arguments."""
    functions: Sequence[Any] = getattr(serve, "concrete_functions", ())
    if len(functions) != 1:
        return []
    found = nest.flatten_with_tuple_paths(functions[0].structured_input_signature)
    return [(path, leaf) for path, leaf in found if isinstance(leaf, tf.TypeSpec)]


def _in_order(function: Any) -> list[str]:
    """Returns the names of a signature's inputs, in the order of the function that it calls."""
    names = {each.op.name for each in function.inputs} & set(function.structured_input_signature[1])
    for operation in function.graph.get_operations():
        order = [each.op.name for each in operation.inputs if each.op.name in names]
        if operation.type in ("PartitionedCall", "StatefulPartitionedCall") and len(order) == len(
            names
        ):
            return order
    return []


def _tensor(name: str, spec: tf.TensorSpec) -> Tensor:
    dtype = np.dtype(object) if spec.dtype == tf.string else np.dtype(spec.dtype.as_numpy_dtype)
    return Tensor(name, dtype, None if spec.shape.rank is None else tuple(spec.shape))


def _has_rows(each: Input) -> bool:
    shape = each.tensors[0].shape
    return shape is not None and len(shape) > 0 and shape[0] is None


def _are_close(one: Array, other: Array) -> bool:
    if one.dtype.kind in "fV":
        one, other = one.astype(np.float64), other.astype(np.float64)
        return np.allclose(one, other, equal_nan=True, **_TOLERANCE)
    return bool((one == other).all())


def _tables(loaded: Any) -> dict[str, ServedTable]:
    found = [
        each
        for each in tf.train.TrackableView(loaded).descendants()
        if isinstance(each, ServedTable)
    ]
    return {each._name: each for each in found}
