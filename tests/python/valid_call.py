"""A valid call of an operator: its inputs, its outputs, and small changes that make it wrong."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from op_helpers import ops

i32, i64, u32, u64 = tf.int32, tf.int64, tf.uint32, tf.uint64
f32, f64, text = tf.float32, tf.float64, tf.string


class Spec(NamedTuple):
    """The type, the static shape and the value of an input.

    None in place of a shape or a dimension says that it is unknown. The value is a number, which
    fills the shape, or the name of a value in `operator_values.py`.
    """

    dtype: tf.DType
    shape: Sequence[int | None] | None
    value: Any = 0
    is_table: bool = False  # of width operator_values.DIM, which a handle in the graph carries

    def of(self, values, index):
        """Returns the value, of entry `index` if the input is a list."""
        if isinstance(self.value, str):
            value = getattr(values, self.value)
            value = tf.convert_to_tensor(value[index] if isinstance(value, list) else value)
            return tf.stack([value]) if self.dtype == tf.resource and self.shape == [1] else value
        filler = "" if self.dtype == text else self.value
        return tf.cast(tf.fill(self.shape, filler), self.dtype)

    def changed(self, change):
        """Returns the spec with another shape, and zeros; any other change replaces it."""
        if change is None or isinstance(change, list):
            return Spec(self.dtype, change, self.value if self.dtype == tf.resource else 0)
        return change


Shapes = Sequence[Sequence[int | None] | None]


@dataclasses.dataclass(frozen=True)
class Call:
    """A valid call of an operator, and calls that differ in a few arguments.

    A change of an attribute is another value. A change of an input is another shape, or a NumPy
    array, which is then the input, or a function that makes the wrong value from the right one.
    """

    name: str
    inputs: dict[str, Spec | list[Spec]]
    # The static shapes of the outputs.
    outputs: Shapes
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The static shapes of the outputs if no input has one; None: they are the same.
    unknown: Shapes | None = None
    # Changes after which the call is valid, and the static shapes of the outputs.
    also: Sequence[tuple[dict[str, Any], Shapes]] = ()
    # (argument, change) or (argument, change, error): after the change, the call cannot be traced.
    # Nor can it run: the operator's error matches `error`, by default the argument's name or
    # "shape". If `error` is None, the operator does not look at the argument.
    # All scalars have such an entry, except the inputs `any_rank`: a change to a vector.
    wrong_shapes: Sequence[tuple[Any, ...]] = ()
    any_rank: Sequence[str] = ()
    # (argument, change, error): after the change, the call cannot run.
    wrong_values: Sequence[tuple[str, Any, str]] = ()
    # The error of a call that cannot succeed in a test.
    error: str = ""

    def __str__(self):
        return self.name

    @property
    def operator(self):
        return getattr(ops, f"dynemb_{self.name}")

    def all_wrong_shapes(self):
        """Yields arguments, their changes, and the operator's errors."""
        for name, spec in self.inputs.items():
            first = spec[0] if isinstance(spec, list) else spec
            if first.shape == [] and name not in self.any_rank:
                yield name, [1], f"{name.removesuffix('s')}|shape"
        for name, change, *error in self.wrong_shapes:
            yield name, change, *(error or [f"{name}|shape"])

    def changed(self, changes, everywhere=False):
        """Returns inputs, as specs or arrays, and attributes.

        The change of a list of inputs is one of its first entry or, if `everywhere`, of all.
        """
        inputs, attributes = dict(self.inputs), dict(self.attributes)
        for name, change in changes.items():
            if name in attributes:
                attributes[name] = change
            elif isinstance(inputs[name], list):
                inputs[name] = [
                    spec.changed(change) if everywhere or i == 0 else spec
                    for i, spec in enumerate(inputs[name])
                ]
            else:
                inputs[name] = inputs[name].changed(change)
        return inputs, attributes

    def arguments(self, values, changes=None):
        """Returns inputs, as tensors, and attributes."""
        inputs, attributes = self.changed(changes or {})

        def tensor(spec, right, index=0):
            if isinstance(spec, Spec):
                return spec.of(values, index)
            return spec(right.of(values, index)) if callable(spec) else tf.constant(spec)

        for name, right in self.inputs.items():
            if isinstance(right, list):
                entries = enumerate(zip(inputs[name], right, strict=True))
                inputs[name] = [tensor(*pair, i) for i, pair in entries]
            else:
                inputs[name] = tensor(inputs[name], right)
        for name, choice in (("combiners", values.combiner), ("wire", values.wire)):
            if choice and name in attributes:
                attributes[name] = [choice] * len(attributes[name])
        return inputs, attributes


def label(value):
    """Returns the id of a parameter, the same in all processes of pytest-xdist."""
    text = re.sub(r"<function .*? at 0x\w+>", "function", str(value))
    return " ".join(text.split())[:80]


def run_eagerly(operator, inputs, attributes):
    return operator(**inputs, **attributes)


def run_in_graph(operator, inputs, attributes):
    """Calls the operator in a tf.function, and so also its shape inference."""

    @tf.function
    def traced():
        result = operator(**tf.nest.map_structure(tf.identity, inputs), **attributes)
        return None if isinstance(result, tf.Operation) else result

    return traced()


def scalar(value=0, dtype=i64):
    return Spec(dtype, [], value)


def table(name):
    return Spec(tf.resource, [], name, is_table=True)
