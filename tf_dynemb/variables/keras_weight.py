"""Tables and static variables as Keras weights of a layer."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb.tables import content
from tf_dynemb.tables.content import Content, read_content, write_content
from tf_dynemb.tables.cut import Rows, bits, from_bits
from tf_dynemb.tables.table import Table
from tf_dynemb.variables.served import ServedTable


class RowsArray(np.ndarray):
    """The vectors of a table, float32 [rows, dim] by ascending key, with their keys and state.

    `layer.get_weights()` returns it for a table, and `layer.set_weights()` accepts it, and its
    copies: `copy`, `astype`, `copy.deepcopy` and `pickle` keep keys and state, and `np.save` and
    `np.savez` write all of it as bytes, which `set_weights` accepts too. Sums, products and other
    element-wise results have the keys and the state of the first operand, whose keys all others
    must have. Any other result, such as a slice, has no keys and cannot be set.
    """

    content: Content | None = None

    @staticmethod
    def of(vectors: npt.ArrayLike, content: Content | None) -> RowsArray:
        """Returns vectors with the content that they belong to."""
        array: RowsArray = np.asarray(vectors).view(RowsArray)
        array.content = content
        return array

    @property
    def keys(self) -> Any:
        """The keys of the rows, integers [rows]; None if the array has none."""
        return None if self.content is None else self.content.rows.keys

    def __array_finalize__(self, source: Any) -> None:
        self.content = None

    def copy(self, order: Any = "C") -> RowsArray:
        """Returns a copy with keys and state."""
        return RowsArray.of(np.array(self, order=order), self.content)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a copy of another dtype with keys and state."""
        return RowsArray.of(np.asarray(self).astype(dtype, *args, **kwargs), self.content)

    def __copy__(self) -> RowsArray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> RowsArray:
        return self.copy()

    def __reduce__(self) -> Any:
        content = self.content
        return _rows_array, (np.asarray(self), content and (tuple(content.rows), content.info))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        arrays = [each for each in inputs if isinstance(each, RowsArray)]
        arrays = [each for each in arrays if each.content is not None]
        plain = [np.asarray(i) if isinstance(i, RowsArray) else i for i in inputs]
        out = kwargs.pop("out", ())
        if out:
            kwargs["out"] = tuple(np.asarray(o) if isinstance(o, RowsArray) else o for o in out)
        if method == "__call__" and len({id(each.content) for each in arrays}) > 1:
            first = arrays[0]
            if not all(np.array_equal(first.keys, each.keys) for each in arrays[1:]):
                raise ValueError(
                    f"np.{ufunc.__name__} of the rows of two tables whose keys differ: "
                    f"{[len(each) for each in arrays]} rows. They have no common order. Use "
                    "weights[i].keys, or de.export(table), and combine the vectors by key."
                )
        result = getattr(ufunc, method)(*plain, **kwargs)
        if out:
            return out[0] if len(out) == 1 else out
        whole = method == "__call__" and arrays and isinstance(result, np.ndarray)
        if whole and result.shape == arrays[0].shape and result.dtype.kind == "f":
            return RowsArray.of(result, arrays[0].content)
        return result

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function in (np.save, np.savez, np.savez_compressed):
            # They would write the vectors alone.
            args = tuple(map(_as_bytes, args))
            return function(*args, **{name: _as_bytes(each) for name, each in kwargs.items()})
        if function is np.copy:
            return args[0].copy()
        result = super().__array_function__(function, types, args, kwargs)
        if isinstance(result, RowsArray):
            result.content = None  # np.sort, for example, changes a copy
        return result


def _as_bytes(value: Any) -> Any:
    if isinstance(value, RowsArray) and value.content is not None:
        return content.to_bytes(_content_of(value, value.content))
    return value


def _rows_array(vectors: npt.NDArray[Any], saved: Any) -> RowsArray:
    """The inverse of `RowsArray.__reduce__`."""
    return RowsArray.of(vectors, saved and Content(Rows(*saved[0]), saved[1]))


def _content_of(vectors: npt.NDArray[Any], held: Content) -> Content:
    """Returns a content with other vectors."""
    vectors = bits(tf.cast(np.asarray(vectors), held.dtype))
    return held._replace(rows=held.rows._replace(vectors=vectors))


class _TableShape(tf.TensorShape):  # type: ignore[misc]
    """[rows, dim]. It equals every shape of a value that `TableWeight.assign` can accept.

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

    def __init__(self, variable: tf.Variable, path: str) -> None:
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


def keras_weight(variable: tf.Variable, path: str) -> _Weight:
    """Returns the only Keras weight of a DynamicVariable or Variable; `path` is for a new one."""
    known = getattr(variable, "_keras_weight", None)
    weight = None if known is None else known()
    if weight is None:
        weight = (TableWeight if isinstance(variable, Table) else StaticWeight)(variable, path)
    return weight


class StaticWeight(_Weight):
    """A `Variable` as a Keras weight. Its shape covers this rank's rows only."""

    def __init__(self, variable: tf.Variable, path: str) -> None:
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
    def value(self) -> tf.Variable:
        """The table."""
        return self._value

    @property
    def shape(self) -> tf.TensorShape:
        """[rows held now, dimension]; equal to this shape with any other number of rows."""
        return _TableShape([len(self._value), self._value.dimension])

    def numpy(self) -> RowsArray:
        """Returns all vectors held by this rank, with their keys and state."""
        held = read_content(self._value)
        order = np.argsort(held.rows.keys)
        held = held._replace(rows=Rows(*(column[order] for column in held.rows)))
        vectors = from_bits(held.rows.vectors, self._value.dtype.name)
        return RowsArray.of(tf.cast(vectors, tf.float32).numpy(), held)

    def assign(self, value: RowsArray | npt.NDArray[np.uint8]) -> RowsArray | npt.NDArray[np.uint8]:
        """Replaces all rows.

        Args:
            value: a `RowsArray`, or the bytes that `np.savez` writes for it.

        Raises:
            TypeError: `value` has no keys.
        """
        if isinstance(value, RowsArray) and value.content is not None:
            held = _content_of(value, value.content)
        elif getattr(value, "dtype", None) == np.uint8 and len(value.shape) == 1:
            held = content.from_bytes(np.asarray(value))
        else:
            raise TypeError(
                f"{self._path} is a table: an array of vectors without keys cannot be set. What "
                "get_weights() returns has keys, and keeps them in copies, pickles, np.savez, sums "
                "and products. np.asarray, np.mean of a list, slices and other results lose them. "
                "Use tf_dynemb.assign(table, keys, values)."
            )
        write_content(self._value, held, adopt_state=False)
        return value

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[np.uint8]:
        """The rows in a special encoding, uint8 [n], which `assign` accepts.

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
