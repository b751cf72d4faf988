"""TableWeight: a DynamicVariable as a Keras weight of a layer."""

from __future__ import annotations

from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tf_dynemb.tables.content import Content, read_content, write_content
from tf_dynemb.tables.cut import bits, from_bits
from tf_dynemb.variables.dynamic import DynamicVariable


class RowsArray(np.ndarray):
    """The vectors of a table, float32 [rows, dim], together with their keys and state.

    `layer.get_weights()` returns it for a table, and `layer.set_weights()` accepts it. An array
    that is computed from one (a slice, a sum) has no keys or state and cannot be set.
    """

    content: Content | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.content = None


class _TableShape(tf.TensorShape):  # type: ignore[misc]
    """[rows, dim], equal to the shape with any other number of rows: tables hold any number."""

    def __eq__(self, other: Any) -> bool:
        other = tf.TensorShape(other)
        return bool(other.rank == 2 and other[1] == self[1])

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple(self))


class TableWeight(keras.Variable):  # type: ignore[misc]
    """A Keras variable around a `DynamicVariable`.

    Keras only tracks its own variables as weights of a layer. This one represents the table in
    `model.trainable_weights`: `tape.gradient` accepts it, `OptimizerWrapper` unwraps it, and
    `count_params` and `model.summary()` count the rows held at that moment.

    Args:
        table: the table.
        path: the path of the variable in the model.
    """

    def __init__(self, table: DynamicVariable, path: str) -> None:
        # Not keras.Variable.__init__, which would create a dense variable from an initializer.
        self._value = table
        self._name = path.rsplit("/", 1)[-1]
        self._path = path
        self._shape = None
        self._ndim = 2
        self._dtype = table.dtype.name
        self._initializer = None
        self._regularizer = None
        self._constraint = None
        self._trainable = table.trainable
        self._autocast = False
        self._aggregation = "none"
        self._synchronization = "auto"
        self._layout = None
        self._overwrite_with_gradient = False

    @property
    def value(self) -> DynamicVariable:
        """The table."""
        return self._value

    @property
    def shape(self) -> Any:
        """[rows held now, dimension]; equal to this shape with any other number of rows."""
        return _TableShape([len(self._value), self._value.dimension])

    @property
    def trainable(self) -> bool:
        """Whether the table is trained; can be set."""
        return bool(self._trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)
        self._value.trainable = value

    @property
    def constraint(self) -> Any:
        """The table's constraint. `OptimizerWrapper` applies it to the rows that it updates."""
        return self._value.constraint

    def numpy(self) -> RowsArray:
        """Returns all vectors held, with their keys and state: for `set_weights` only."""
        content = read_content(self._value)
        vectors = from_bits(content.rows.vectors, self._value.dtype.name)
        array: RowsArray = tf.cast(vectors, tf.float32).numpy().view(RowsArray)
        array.content = content
        return array

    def assign(self, value: Any) -> Any:
        """Replaces all rows with the rows of a `RowsArray`.

        Raises:
            TypeError: `value` has no keys: it is not a `RowsArray`, or was computed from one.
        """
        if not isinstance(value, RowsArray) or value.content is None:
            raise TypeError(
                f"{self._path} is a table and can only be set to a result of its get_weights(). "
                "Use tf_dynemb.assign(layer.table, keys, values)."
            )
        vectors = bits(tf.cast(np.asarray(value), value.content.dtype))
        rows = value.content.rows._replace(vectors=vectors)
        write_content(self._value, value.content._replace(rows=rows), adopt_state=False)
        return value

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        self._value.numpy()

    def __repr__(self) -> str:
        return f"<TableWeight path={self._path} of {self._value!r}>"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._value.__deepcopy__(memo)

    def __reduce__(self) -> NoReturn:
        self._value.__reduce__()
