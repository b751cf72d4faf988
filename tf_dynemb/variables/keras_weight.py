"""Tables and static variables as Keras weights of a layer."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dynemb.tables import content
from tf_dynemb.tables.content import Content, read_content, write_content
from tf_dynemb.tables.cut import bits, from_bits
from tf_dynemb.tables.table import Table
from tf_dynemb.variables.served import ServedTable


class RowsArray(np.ndarray):
    """The vectors of a table, float32 [rows, dim], together with their keys and state.

    `layer.get_weights()` returns it for a table, and `layer.set_weights()` accepts it. An array
    that is computed from one (a slice, a sum) has no keys or state and cannot be set.
    """

    content: Content | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.content = None


class _TableShape(tf.TensorShape):  # type: ignore[misc]
    """[rows, dim]. It equals every shape of a value that `TableWeight.assign` may accept.

    These are [any number of rows, dim], and [n] for the encoding that `np.array` returns.
    """

    def __eq__(self, other: Any) -> bool:
        other = tf.TensorShape(other)
        return bool(other.rank == 1 or (other.rank == 2 and other[1] == self[1]))

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple(self))


class _Weight(keras.Variable):  # type: ignore[misc]
    """A Keras variable around a variable that exists already.

    Keras only tracks its own variables as weights of a layer. A weight represents the variable in
    `model.trainable_weights`: `tape.gradient` accepts it, and `OptimizerWrapper` unwraps it.
    """

    def __init__(self, variable: Any, path: str) -> None:
        # Not keras.Variable.__init__, which would create a dense variable from an initializer.
        self._value = variable
        self._name = path.rsplit("/", 1)[-1]
        self._path = path
        self._shape: tuple[int, ...] | None = None
        self._ndim = 2
        self._dtype = variable.dtype.name
        self._initializer = None
        self._regularizer = None
        self._constraint = None
        self._autocast = False
        self._aggregation = "none"
        self._synchronization = "auto"
        self._layout = None
        self._overwrite_with_gradient = False
        variable._keras_weight = weakref.ref(self)

    @property
    def trainable(self) -> bool:
        """Whether the variable is trained; can be set."""
        return bool(self._value.trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._value._trainable = bool(value)

    @property
    def constraint(self) -> Any:
        """The constraint of the variable."""
        return self._value.constraint


def keras_weight(variable: Any, path: str) -> _Weight:
    """Returns the only Keras weight of a DynamicVariable or Variable; `path` is for a new one."""
    known = getattr(variable, "_keras_weight", None)
    weight = None if known is None else known()
    if weight is None:
        weight = (TableWeight if isinstance(variable, Table) else StaticWeight)(variable, path)
    return weight


class StaticWeight(_Weight):
    """A `Variable` as a Keras weight. Its shape is that of this rank's rows."""

    def __init__(self, variable: Any, path: str) -> None:
        super().__init__(variable, path)
        self._shape = tuple(variable.shape)
        self._ndim = variable.shape.rank


class TableWeight(_Weight):
    """A `DynamicVariable` as a Keras weight.

    `count_params` and `model.summary()` count the rows held at that moment.

    Args:
        table: the table.
        path: the path of the variable in the model.
    """

    @property
    def value(self) -> Any:
        """The table."""
        return self._value

    @property
    def shape(self) -> Any:
        """[rows held now, dimension]; equal to this shape with any other number of rows."""
        return _TableShape([len(self._value), self._value.dimension])

    def numpy(self) -> RowsArray:
        """Returns all vectors held, with their keys and state: for `set_weights` only."""
        held = read_content(self._value)
        vectors = from_bits(held.rows.vectors, self._value.dtype.name)
        array: RowsArray = tf.cast(vectors, tf.float32).numpy().view(RowsArray)
        array.content = held
        return array

    def assign(self, value: Any) -> Any:
        """Replaces all rows.

        Args:
            value: a `RowsArray`, or an array that `np.array(weight)` returned.

        Raises:
            TypeError: `value` has no keys: it is another array, or computed from a `RowsArray`.
        """
        if isinstance(value, RowsArray) and value.content is not None:
            vectors = bits(tf.cast(np.asarray(value), value.content.dtype))
            rows = value.content.rows._replace(vectors=vectors)
            held = value.content._replace(rows=rows)
        elif getattr(value, "dtype", None) == np.uint8 and len(value.shape) == 1:
            held = content.from_bytes(np.asarray(value))
        else:
            raise TypeError(
                f"{self._path} is a table and can only be set to a result of its get_weights(). "
                "Use tf_dynemb.assign(table, keys, values)."
            )
        write_content(self._value, held, adopt_state=False)
        return value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """The rows in an encoding of their own, uint8 [n], which `assign` accepts.

        Keras writes this array to the file when it saves a layer that is not one of this package.
        """
        if dtype not in (None, np.uint8):
            self._value.numpy()
        return content.to_bytes(read_content(self._value))

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        children = dict(super()._trackable_children(save_type, **kwargs))
        if save_type == "savedmodel":
            # The variable itself is no child of a Keras variable.
            children["served"] = ServedTable.of(self._value)
        return children

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []  # the ServedTable takes the place of the handle

    def __repr__(self) -> str:
        return f"<TableWeight path={self._path} of {self._value!r}>"

    def __deepcopy__(self, memo: Any) -> Any:
        return self._value.__deepcopy__(memo)  # raises an error

    def __reduce__(self) -> Any:
        return self._value.__reduce__()  # raises an error
