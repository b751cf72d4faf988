"""The inputs of a signature: their values from JSON or arrays, and values joined into a batch.

A signature of a SavedModel has tensors only. An input of a Keras model that is ragged or sparse is
several of them, its components, as `tf.nest.flatten(..., expand_composites=True)` orders them: the
values and then the row splits, the outermost first; or indices, values and dense shape.

A *value* of an input is a tuple of arrays, one for each component. Values come from requests, so
everything is checked here that TensorFlow's operators take for granted.
"""

from __future__ import annotations

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tf_dynemb.serve.nested import Nested

Array = npt.NDArray[Any]
Value = tuple[Array, ...]

_NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# The types of Python in which JSON has the elements of arrays of a kind.
_TYPES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
_JSON_NAMES = {str: "strings", type(None): "null", dict: "objects"}
_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf", "O": "OSU"}


class Tensor(NamedTuple):
    """A tensor of a signature.

    Attributes:
        name: its name in the signature.
        dtype: its type; object for strings.
        shape: its dimensions, None where they are free; None: of any rank.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] | None

    @property
    def type_name(self) -> str:
        """TensorFlow's name of the type, such as "DT_INT64"."""
        names = {"object": "STRING", "float32": "FLOAT", "float64": "DOUBLE", "float16": "HALF"}
        return f"DT_{names.get(self.dtype.name, self.dtype.name.upper())}"

    def check(self, array: Array) -> Array:
        """Returns an array as one of the tensor's type; raises ValueError if it does not fit."""
        if self.shape is not None and (
            array.ndim != len(self.shape)
            or any(has not in (None, got) for has, got in zip(self.shape, array.shape, strict=True))
        ):
            raise ValueError(f"{self!r}: got the shape {list(array.shape)}.")
        # numpy has extension types, such as bfloat16, which are of the kind "V" and not of "f".
        kind = "f" if self.dtype.kind == "V" else self.dtype.kind
        if array.size and array.dtype != self.dtype and array.dtype.kind not in _KINDS[kind]:
            raise ValueError(f"{self!r}: got {_named(array.dtype)}.")
        if kind in "iu" and array.size and array.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            if int(array.min()) < limits.min or int(array.max()) > limits.max:
                raise ValueError(f"{self!r}: a number is out of range.")
        return array.astype(self.dtype, copy=False)

    def parse(self, data: Any) -> Array:
        """Returns nested lists as an array."""
        elements, lengths = Nested.of(data)
        is_array = isinstance(elements, np.ndarray)
        types = {type(elements[0].item())} if is_array else set(map(type, elements))
        if list in types or any(len(set(level)) > 1 for level in lengths):
            raise ValueError(f"{self!r}: its rows are of different shapes.")
        shape = [level[0] for level in lengths]
        kind = "f" if self.dtype.kind == "V" else self.dtype.kind
        if kind == "O":
            array = np.empty(len(elements), object)
            listed = elements.tolist() if isinstance(elements, np.ndarray) else elements
            array[:] = [_decoded(each, self.name) for each in listed]
            return self.check(array.reshape(shape))
        for given in types - _TYPES[kind]:
            raise ValueError(f"{self!r}: got {_JSON_NAMES.get(given, given.__name__)}.")
        try:
            with np.errstate(over="ignore"):
                # `check` converts integers of an array, and says which are out of range.
                array = np.array(elements, None if is_array and kind != "f" else self.dtype)
        except OverflowError:
            raise ValueError(f"{self!r}: a number is out of range.") from None
        if kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{self!r}: a number is out of range.")
        return self.check(array.reshape(shape))

    def __repr__(self) -> str:
        shape = "any shape" if self.shape is None else [d if d else "?" for d in self.shape]
        shown = str(shape).replace("'", "")
        return f"input {self.name!r} is {_named(self.dtype)} of {shown}"


class Input(ABC):
    """An input of a signature.

    Attributes:
        name: its name in requests.
        tensors: its components, with their names in the signature.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self.name = name
        self.tensors = tuple(tensors)

    def check(self, arrays: Sequence[Array]) -> Value:
        """Returns a value of these components; raises ValueError if they do not make one."""
        value = tuple(t.check(array) for t, array in zip(self.tensors, arrays, strict=True))
        self._check(value)
        return value

    @property
    def parts(self) -> dict[str, Tensor]:
        """The components by their names in requests."""
        return dict(zip(self._part_names(), self.tensors, strict=True))

    def _part_names(self) -> list[str]:
        return [self.name]

    @abstractmethod
    def parse(self, data: Any) -> Value:
        """Returns the value that nested lists, one for each row, describe."""

    @abstractmethod
    def rows(self, value: Value) -> int:
        """Returns the number of rows of a value."""

    @abstractmethod
    def join(self, values: Sequence[Value]) -> Value:
        """Returns the value with the rows of several values."""

    @abstractmethod
    def example(self, rows: int, width: int, draw: Draw) -> Value:
        """Returns a value with random elements.

        Args:
            rows: its number of rows.
            width: the most elements of a row, where it is free.
            draw: draws the elements of a tensor.
        """

    @abstractmethod
    def _check(self, value: Value) -> None:
        """Checks what components have to do with each other."""


class Dense(Input):
    """A tensor whose first dimension is the number of rows."""

    def parse(self, data: Any) -> Value:
        """Reads nested lists."""
        return (self.tensors[0].parse(data),)

    def rows(self, value: Value) -> int:
        """Counts rows."""
        return len(value[0])

    def join(self, values: Sequence[Value]) -> Value:
        """Joins rows."""
        return (np.concatenate([value[0] for value in values]),)

    def example(self, rows: int, width: int, draw: Draw) -> Value:
        """Makes rows."""
        (tensor,) = self.tensors
        assert tensor.shape is not None
        return (draw(tensor, [rows, *(each or width for each in tensor.shape[1:])]),)

    def _check(self, value: Value) -> None:
        pass


class Ragged(Input):
    """Rows of different lengths: values, and the row splits of each level."""

    def _part_names(self) -> list[str]:
        inner = (f"{self.name}.row_splits_{level}" for level in range(1, len(self.tensors) - 1))
        return [f"{self.name}.values", f"{self.name}.row_splits", *inner]

    def parse(self, data: Any) -> Value:
        """Reads nested lists."""
        elements, lengths = Nested.of(data)
        levels = len(self.tensors)
        if not lengths or (len(elements) and len(lengths) < levels):
            raise ValueError(f"input {self.name!r} is a list for each row.")
        lengths = [*lengths, *[[]] * (levels - len(lengths))]  # of lists that have no lists
        splits = [
            np.cumsum([0, *level]).astype(tensor.dtype)
            for level, tensor in zip(lengths[1:levels], self.tensors[1:], strict=True)
        ]
        values = self.tensors[0]
        rows = int(sum(lengths[levels - 1]))
        if not rows:
            return (np.empty([d or 0 for d in values.shape or (None,)], values.dtype), *splits)
        return (values.parse(Nested(elements, [[rows], *lengths[levels:]])), *splits)

    def rows(self, value: Value) -> int:
        """Counts rows."""
        return len(value[1]) - 1

    def join(self, values: Sequence[Value]) -> Value:
        """Joins rows."""
        joined = [np.concatenate([value[0] for value in values])]
        for level in range(1, len(self.tensors)):
            begins = np.cumsum([0, *(value[level][-1] for value in values[:-1])])
            parts = [value[level][1:] + begin for value, begin in zip(values, begins, strict=True)]
            joined.append(np.concatenate([values[0][level][:1], *parts]))
        return tuple(each.astype(t.dtype) for each, t in zip(joined, self.tensors, strict=True))

    def example(self, rows: int, width: int, draw: Draw) -> Value:
        """Makes rows."""
        splits: list[Array] = []
        for tensor in self.tensors[1:]:
            # The first row is the longest.
            lengths = np.arange(width, width - rows, -1) % (width + 1)
            splits.append(np.cumsum([0, *lengths]).astype(tensor.dtype))
            rows = int(splits[-1][-1])
        tensor = self.tensors[0]
        inner = (each or 2 for each in (tensor.shape or ())[1:])
        return (draw(tensor, [rows, *inner]), *splits)

    def _check(self, value: Value) -> None:
        for splits, inner in zip(
            value[1:], [*(each[:-1] for each in value[2:]), value[0]], strict=True
        ):
            falls = (splits[1:] < splits[:-1]).any()  # a difference could overflow
            if not len(splits) or splits[0] != 0 or splits[-1] != len(inner) or falls:
                raise ValueError(
                    f"input {self.name!r}: its row splits do not divide {len(inner)} values."
                )


class Sparse(Input):
    """A sparse tensor of rows and columns: indices, values, and the dense shape."""

    def __init__(self, name: str, tensors: Sequence[Tensor], shape: tuple[int | None, ...]) -> None:
        super().__init__(name, tensors)
        self._shape = shape

    def _part_names(self) -> list[str]:
        return [f"{self.name}.{each}" for each in ("indices", "values", "dense_shape")]

    def parse(self, data: Any) -> Value:
        """Puts the elements of each list into the first columns of its row."""
        if len(self._shape) != 2:
            raise ValueError(f"input {self.name!r} is sparse: pass its components in columns.")
        splits = Tensor("", np.dtype(np.int64), (None,))
        values, bounds = Ragged(self.name, [self.tensors[1], splits]).parse(data)
        lengths = np.diff(bounds)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        columns = np.arange(len(values)) - np.repeat(bounds[:-1], lengths)
        width = self._shape[1] or int(lengths.max(initial=0))
        value = (np.stack([rows, columns], 1), values, np.array([len(lengths), width]))
        return self.check(value)

    def rows(self, value: Value) -> int:
        """Counts rows."""
        return int(value[2][0])

    def join(self, values: Sequence[Value]) -> Value:
        """Joins rows."""
        begins = np.cumsum([0, *(self.rows(value) for value in values)])
        indices = []
        for (index, _, _), begin in zip(values, begins, strict=False):
            index = index.copy()
            index[:, 0] += begin
            indices.append(index)
        shape = np.max([value[2] for value in values], axis=0)
        shape[0] = begins[-1]
        return np.concatenate(indices), np.concatenate([value[1] for value in values]), shape

    def example(self, rows: int, width: int, draw: Draw) -> Value:
        """Makes rows."""
        shape = np.array([rows, *(each or width for each in self._shape[1:])], np.int64)
        index = np.stack(np.nonzero(np.arange(np.prod(shape)).reshape(shape) % 3 != 1), 1)
        return index, draw(self.tensors[1], [len(index)]), shape

    def _check(self, value: Value) -> None:
        index, values, shape = value
        problem = ""
        if len(index) != len(values):
            problem = f"{len(index)} indices, but {len(values)} values"
        elif (shape < 0).any() or any(
            has not in (None, got) for has, got in zip(self._shape, shape, strict=True)
        ):
            problem = f"a dense shape {shape.tolist()}"
        elif len(index) and ((index < 0).any() or (index >= shape).any()):
            problem = "an index outside of the dense shape"
        elif len(index) > 1:
            order = np.lexsort(index.T[::-1])
            repeated = (index[1:] == index[:-1]).all(1)
            if (order != np.arange(len(index))).any() or repeated.any():
                problem = "indices that are not in row-major order, each once"
        if problem:
            raise ValueError(f"input {self.name!r} is sparse, and has {problem}.")


def collect(
    inputs: Mapping[str, Input],
    given: Mapping[str, Any],
    part: Callable[[Tensor, Any], Array],
    whole: Callable[[Input, Any], Value] | None = None,
) -> dict[str, Value]:
    """Returns the values of all inputs of a request.

    Args:
        inputs: the inputs of the signature.
        given: what the request has, by the names of inputs or of components; a component has the
            name of its tensor in the signature, too.
        part: reads a component.
        whole: reads an input of any kind; None: such inputs are given by components.

    Raises:
        ValueError: an input or a component is missing, unknown, there twice, or wrong.
    """
    places = {}
    for each in inputs.values():
        for index, (name, tensor) in enumerate(each.parts.items()):
            places[name] = places[tensor.name] = each, index
    values: dict[str, Value] = {}
    arrays: dict[str, dict[int, Array]] = {}
    for name, data in given.items():
        if whole is not None and name in inputs:
            values[name] = whole(inputs[name], data)
        elif name in places:
            each, index = places[name]
            there = arrays.setdefault(each.name, {})
            if index in there:
                raise ValueError(f"input {each.name!r} is there twice.")
            there[index] = part(each.tensors[index], data)
        else:
            names = ", ".join(part for each in inputs.values() for part in each.parts)
            raise ValueError(f"there is no input {name!r}; the inputs are {names}.")
    for name, there in arrays.items():
        each = inputs[name]
        if name in values:
            raise ValueError(f"input {name!r} is there twice.")
        for index, missing in enumerate(each.parts):
            if index not in there:
                raise ValueError(f"input {missing!r} is missing.")
        values[name] = each.check([there[index] for index in range(len(each.tensors))])
    for name in inputs.keys() - values.keys():
        raise ValueError(f"input {name!r} is missing.")
    return values


def rows_of(inputs: Mapping[str, Input], values: Mapping[str, Value]) -> int:
    """Returns the number of rows of a request; raises ValueError if its inputs differ in it."""
    counts = {name: inputs[name].rows(value) for name, value in values.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name!r} has {count}" for name, count in counts.items())
        raise ValueError(f"the inputs have different numbers of rows: {shown}.")
    return max(counts.values(), default=0)


class Draw:
    """Draws elements of tensors.

    Args:
        seed: of the random numbers.
        ids: the integers, and the strings of their digits.
    """

    def __init__(self, seed: int, ids: Sequence[int] | npt.NDArray[Any]) -> None:
        self._random = np.random.default_rng(seed)
        self._ids = np.asarray(ids)

    def __call__(self, tensor: Tensor, shape: Sequence[int]) -> Array:
        """Returns elements of a tensor."""
        kind = tensor.dtype.kind
        if kind == "b":
            return self._random.integers(0, 2, shape).astype(tensor.dtype)
        if kind in "fV":
            return self._random.random(shape).astype(tensor.dtype)
        drawn = self._random.choice(self._ids, shape)
        if kind == "O":
            return np.array([str(each).encode() for each in drawn.ravel()], object).reshape(shape)
        return drawn.astype(tensor.dtype)


def widened(array: Array) -> Array:
    """Returns an array of 16-bit floats, which JSON and V2 do not have, as float32."""
    return array.astype(np.float32) if array.dtype in _NARROW else array


def _named(dtype: np.dtype[Any]) -> str:
    return "strings" if dtype.kind in "OSU" else dtype.name


def _decoded(data: Any, name: str) -> bytes:
    """Returns a string as bytes; {"b64": ...} is one in base64."""
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytes):
        return data
    if isinstance(data, dict) and data.keys() == {"b64"} and isinstance(data["b64"], str):
        try:
            return base64.b64decode(data["b64"], validate=True)
        except binascii.Error:
            raise ValueError(f"input {name!r} has invalid base64.") from None
    raise ValueError(f"input {name!r} has {type(data).__name__} where a string has to be.")
