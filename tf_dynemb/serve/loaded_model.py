"""A SavedModel in memory, called with arrays."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.util import nest

from tf_dynemb import _ops
from tf_dynemb.saved_models.load import load_saved_model
from tf_dynemb.serve.inputs import (
    Array,
    Dense,
    Draw,
    Input,
    Ragged,
    Sparse,
    Tensor,
    Value,
    rows_of,
)
from tf_dynemb.storage import Chain, DataLossError
from tf_dynemb.variables.served import ServedTable

DEFAULT = "serving_default"
# Two loads at once, while deltas are published, could get each other's tables (docs/serving.md).
_LOADING = threading.Lock()
_OTHER_TYPES = (tf.bool, tf.string)
_KNOWN_KEYS = 256  # of a shard of a table
# Signatures that are not a model's: they say and change what it serves.
STATE, APPLY = "watermark", "apply_delta"
# How often answers are asked for again because a snapshot was applied between them.
_SAME_SNAPSHOT = 10
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
        """Raises ValueError: a tensor has a type that no protocol has."""
        function = loaded.signatures[name]
        specs = function.structured_input_signature[1]
        self.inputs = _inputs(function, getattr(loaded, "serve", None))
        self.outputs = tuple(
            _tensor(key, spec) for key, spec in sorted(function.structured_outputs.items())
        )
        self.joins = False
        self._draw = Draw(0, [0, 1])
        names = {tensor.name for each in self.inputs.values() for tensor in each.tensors}
        # A signature that `serve` does not describe may have components of ragged inputs.
        apart = len(names) == len(self.inputs) and any(f"{name}_1" in names for name in names)
        self._has_rows = not apart and all(
            isinstance(each, (Ragged, Sparse)) or _has_rows(each) for each in self.inputs.values()
        )
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
        # Eagerly on a GPU, TensorFlow could mix up the tensors of several threads (docs/gpu.md).
        with tf.device("CPU"):
            tensors = [
                tf.constant(part) if part.dtype != object else tf.constant(part, tf.string)
                for part in given
            ]
        outputs, state = self._answer(*tensors)
        found = {name: output.numpy() for name, output in outputs.items()}
        return found, Watermark.of(state) if state else Watermark()

    def example(self, rows: int, width: int = 4) -> dict[str, Value]:
        """Returns values with random elements, such as `try_joining` has found that it takes."""
        return {name: each.example(rows, width, self._draw) for name, each in self.inputs.items()}

    def rows(self, values: Mapping[str, Value]) -> int | None:
        """Returns the number of rows of a request; None: the inputs have none.

        Raises:
            ValueError: the inputs differ in it.
        """
        return rows_of(self.inputs, values) if self._has_rows else None

    def join(self, requests: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
        """Returns the values with the rows of several requests."""
        return {n: each.join([r[n] for r in requests]) for n, each in self.inputs.items()}

    def try_joining(self, known: Sequence[int] | Array = ()) -> str:
        """Sets `joins` by calls with random rows, alone and together; returns why it is False.

        Args:
            known: keys that have rows. Without them, rows of unknown keys could all be alike.
        """
        if not self._has_rows:
            return "an input has no free first dimension, or may be a part of a ragged one"
        wide = np.random.default_rng(0).integers(2, 2**31, 64)
        refused, varies = "", False
        for ids in ([0, 1], wide, known):
            if not len(ids):
                continue
            before, self._draw = self._draw, Draw(0, ids)
            alone = [self.example(rows, width) for rows, width in ((1, 2), (3, 9), (2, 5))]
            try:
                answers, joined = self._alone_and_joined(alone)
            except tf.errors.OpError as error:  # such as an id outside of a vocabulary
                refused, self._draw = error.message, before
                continue
            why = self.differ(joined, answers, [1, 3, 2])
            if why:
                return why
            varies |= any((output != output[:1]).any() for output in joined.values())
        if not varies:
            return f"it refuses random rows: {refused}" if refused else "it answers all rows alike"
        self.joins = True
        return ""

    def _alone_and_joined(
        self, requests: Sequence[Mapping[str, Value]]
    ) -> tuple[list[dict[str, Array]], dict[str, Array]]:
        """Returns the answers to requests, alone and together, from one snapshot if possible."""
        for _ in range(_SAME_SNAPSHOT):
            called = [self(values) for values in [*requests, self.join(requests)]]
            if len({mark.id for _, mark in called}) == 1:
                break
        *answers, joined = (outputs for outputs, _ in called)
        return answers, joined

    @staticmethod
    def differ(
        joined: Mapping[str, Array], answers: Sequence[Mapping[str, Array]], rows: Sequence[int]
    ) -> str:
        """Returns how the answer to a batch differs from those to its requests; empty: it does not.

        Args:
            joined: the outputs of the batch.
            answers: the outputs of its first requests.
            rows: their numbers of rows.
        """
        for name, output in joined.items():
            parts = [answer[name] for answer in answers]
            if any(each.ndim == 0 for each in (output, *parts)) or [*map(len, parts)] != [*rows]:
                return f"output {name!r} does not have a row for each row of the inputs"
            expected = np.concatenate(parts)
            found = output[: len(expected)]
            if expected.shape != found.shape or not _are_close(found, expected):
                return f"output {name!r} of a row depends on the other rows of its batch"
        return ""


def has_state(loaded: Any) -> bool:
    """Returns whether a model has tables, whose snapshot it names."""
    return STATE in loaded.signatures


class LoadedModel:
    """A SavedModel in memory.

    Args:
        path: the directory of the SavedModel.
        **residence: the device of its tables; arguments of `load_saved_model`.

    Attributes:
        path: where it was loaded from.
        signatures: the signatures of the model by name; not `watermark` and `apply_delta`.
    """

    def __init__(self, path: str | os.PathLike[str], **residence: Any) -> None:
        self.path = pathlib.Path(path)
        with _LOADING:
            self._loaded = load_saved_model(path, **residence)
        self.signatures: dict[str, Signature] = {}
        why = ""
        names = [name for name in self._loaded.signatures if name not in (STATE, APPLY, "serve")]
        for name in names or ["serve"]:
            try:
                self.signatures[name] = Signature(self._loaded, name)
            except (KeyError, ValueError) as error:  # types that no protocol has
                why = str(error)
        if not self.signatures:
            raise ValueError(f"{path} has no signature to answer requests with: {why}.")
        self._tables = _tables(self._loaded)
        self._applying = threading.Lock()
        self._applied: set[str] = set()

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
            self._applied.add(str(path))
            return int(self._loaded.signatures[APPLY](path=tf.constant(str(path)))["applied"])

    def known_keys(self) -> Array:
        """Returns some keys that have rows; none if the files cannot be read."""
        found: list[Array] = [np.empty(0, np.int64)]
        for folder in {table.loaded_from for table in self._tables.values()}:
            if folder is None:
                continue
            with contextlib.suppress(DataLossError, OSError, ValueError, KeyError):
                base = Chain.open(folder).snapshots[0]
                for table in base.manifest.tables:
                    for shard in table.shards:
                        keys = base.column(table.name, "keys", shard.rank)
                        found.append(np.asarray(keys[:_KNOWN_KEYS]).astype(np.int64))
        return np.concatenate(found)

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
        found = {str(self.path), *self._applied}
        for table in self._tables.values():
            found |= {str(each) for each in (table.loaded_from, table.follows) if each is not None}
        return {os.path.realpath(each) for each in found}


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
    """Returns a tensor of a signature; raises ValueError for a type that no protocol has."""
    if not (spec.dtype in _OTHER_TYPES or spec.dtype.is_integer or spec.dtype.is_floating):
        raise ValueError(f"tensor {name!r} is {spec.dtype.name}")
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


_LOCATION = re.compile(r"Graph execution error|Detected at node|<stack traces|\s*\[\[")
_NODE = re.compile(r"\{\{[^}]*\}\} ?| \[Op:\w+\]")


def message_of(error: Exception) -> str:
    """Returns what an error says, without the places in the graph that TensorFlow adds."""
    if not isinstance(error, tf.errors.OpError):
        return str(error)
    lines = (error.message or "").splitlines()
    texts = [_NODE.sub("", line) for line in lines if line.strip() and not _LOCATION.match(line)]
    return texts[0] if texts else type(error).__name__
