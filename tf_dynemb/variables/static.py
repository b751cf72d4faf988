"""Variable: a dense embedding matrix, for use alongside dynamic variables."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_dynemb import communicator
from tf_dynemb.ids import bags
from tf_dynemb.ids.keys import as_keys
from tf_dynemb.ids.types import TensorLike
from tf_dynemb.parallel import exchange
from tf_dynemb.parallel.exchange import BY_MODULO, Spread, exchange_stats
from tf_dynemb.parallel.ownership import check_mode, owner_of_mode
from tf_dynemb.tables.lineage import new_history
from tf_dynemb.tables.options import check_exchange_dtype
from tf_dynemb.variables import keras_call

_numbers = itertools.count()
_unnamed = itertools.count()
_NAME = 5  # the position of `name` among the arguments of tf.Variable


def _unused_name() -> str:
    number = next(_unnamed)
    return f"Variable_{number}" if number else "Variable"


class Variable(resource_variable_ops.ResourceVariable):  # type: ignore[misc]
    """A `tf.Variable` [rows, dimension] for `lookup_sparse`, spread over ranks.

    Every rank passes the same arguments and keeps its shard. With `mode=None` or "distributed", row
    r of the matrix is row r // ranks of rank r % ranks. With "localized:RANK", one rank has all
    rows. `shape` is the shape of this rank's shard (0 rows if the rank has none), and
    `global_shape` is the shape of the whole matrix. Lookups take row numbers of the whole matrix.
    In one process the variable holds the whole matrix in every mode.

    Args:
        *args: arguments of `tf.Variable`: the initial value of the whole matrix, `trainable`, ...
        mode: None, "distributed" or "localized:RANK".
        exchange_dtype: the wire type of vectors and gradients between ranks, as in `TableOptions`.
        shape: the shape of the whole matrix; with `initializer` it replaces an initial value, as in
            SOK.
        initializer: a Keras initializer or its name, called with the `shape` and `dtype` of this
            rank's shard.
        **kwargs: arguments of `tf.Variable`. Without a `name`, the variables of a process are named
            "Variable", "Variable_1", and so on: ranks and runs that create them in the same order
            give them the same names, by which dumps know them.

    Attributes:
        has_automatic_name: whether the name is automatic.
        history: the id of the matrix's history (`tables/lineage.py`); a load takes over the history
            of the rows.

    Raises:
        ValueError: `mode` or `exchange_dtype` has another value; or `mode` names a rank that does
            not exist; or there is both an initial value and an initializer, or an initializer
            without a shape; or there are several ranks and the matrix does not have two dimensions.
    """

    def __init__(
        self,
        *args: Any,
        mode: str | None = None,
        exchange_dtype: str | None = None,
        shape: Sequence[int] | None = None,
        initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        check_mode(mode)
        check_exchange_dtype(exchange_dtype)
        comm = communicator.get()
        self._mode = mode
        self._exchange_dtype = exchange_dtype
        self._global_shape: tuple[int, ...] | None = None
        if initializer is not None:
            if args or "initial_value" in kwargs:
                raise ValueError("Pass either an initial value or an initializer, not both.")
            if shape is None or len(shape) != 2:
                raise ValueError(f"initializer needs shape=(rows, dimension), got shape={shape!r}.")
            self._global_shape = tuple(int(n) for n in shape)
            rows = len(self._rows_of(self._global_shape[0]))
            dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
            kwargs["initial_value"] = keras.initializers.get(initializer)(
                (rows, self._global_shape[1]), dtype=dtype.name
            )
        else:
            kwargs["shape"] = shape
            if comm.size > 1:
                args, kwargs = self._shard_of(args, kwargs)
        self.has_automatic_name = len(args) < _NAME and kwargs.get("name") is None
        if self.has_automatic_name:
            kwargs["name"] = _unused_name()
        super().__init__(*args, **kwargs)
        # The matrix that exports have; no child, so no checkpoint has it.
        self._whole: tf.Variable | None = None
        if self._global_shape is None:
            self._global_shape = tuple(self.shape)
        self._exchange_name = f"{self.name}#{next(_numbers)}"
        self.history = new_history()

    def _rows_of(self, rows: int) -> range:
        """Returns the row numbers of the whole matrix that this rank holds."""
        comm = communicator.get()
        owner = owner_of_mode(self._mode)
        if owner is None:
            return range(comm.rank, rows, comm.size)
        return range(rows if owner == comm.rank else 0)

    def _shard_of(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the arguments of tf.Variable for this rank's rows."""
        kwargs = dict(kwargs)
        whole = args[0] if args else kwargs.pop("initial_value")
        whole = tf.convert_to_tensor(whole() if callable(whole) else whole, kwargs.get("dtype"))
        if whole.shape.rank != 2:
            raise ValueError(
                f"A Variable on several ranks is a matrix [rows, dimension], got {whole.shape}."
            )
        self._global_shape = tuple(whole.shape)
        rows = self._rows_of(self._global_shape[0])
        shard = tf.gather(whole, np.array(rows, np.int64))
        kwargs["shape"] = None
        return (shard, *args[1:]), kwargs

    @property
    def mode(self) -> str | None:
        """How the matrix is spread over ranks: the argument of the constructor."""
        return self._mode

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole matrix; `shape` is the shape of this rank's shard."""
        assert self._global_shape is not None
        return self._global_shape

    @property
    def spread(self) -> Spread:
        """The description of the matrix for an exchange between ranks."""
        owner = owner_of_mode(self._mode)
        return Spread(
            variable=self,
            key_type=tf.int64,
            dimension=int(self.shape[1]) if self.shape.rank == 2 else 0,
            owner=BY_MODULO if owner is None else owner,
            name=self._exchange_name,
            wire=self._exchange_dtype or "same",
            is_dynamic=False,
        )

    @property
    def size(self) -> tf.Tensor:
        """The shape of this rank's shard, as an int64 tensor."""
        return tf.shape(self, out_type=tf.int64)

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        keras_call.track(self)
        return super()._read_variable_op(no_copy)

    def whole(self, name: str) -> tf.Tensor:
        """Returns the whole matrix [rows, dimension]. Collective and eager only.

        Args:
            name: the name of the operation. The variable's own name is not one: ranks that have
                created other numbers of variables before number it differently.
        """
        comm = communicator.get()
        shards = comm.allgather(self.read_value(), name)
        if comm.size == 1 or owner_of_mode(self._mode) is not None:
            return shards
        rows = self.global_shape[0]
        order = np.concatenate([np.arange(rank, rows, comm.size) for rank in range(comm.size)])
        return tf.gather(shards, np.argsort(order))

    @contextlib.contextmanager
    def replaced_by(self, whole: tf.Tensor) -> Iterator[None]:
        """Inside, the variable holds this matrix, for a model that is exported by one rank.

        The graphs of functions that are exported refer to it, so that it is the same variable each
        time, empty in between.
        """
        if self._whole is None:
            name = self.name.removesuffix(":0")
            self._whole = tf.Variable(whole, trainable=self.trainable, name=name)
        assign = tf.raw_ops.AssignVariableOp  # of any number of rows
        assign(resource=self._whole.handle, value=whole)
        names = ("_handle", "_shape", "_handle_name", "_graph_element")
        before = {name: getattr(self, name) for name in names}
        try:
            for name in names:
                setattr(self, name, getattr(self._whole, name))
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)
            assign(resource=self._whole.handle, value=tf.zeros([0, *whole.shape[1:]], whole.dtype))

    def stats(self) -> dict[str, int]:
        """The keys and bytes that this rank has sent to others for the matrix."""
        return exchange_stats(self._exchange_name)

    def sparse_read(self, indices: TensorLike, name: str | None = None) -> tf.Tensor:
        """Reads rows of the whole matrix. `tf.gather` and `tf.nn.embedding_lookup` call it."""
        keras_call.track(self)
        if communicator.get().size == 1:
            return super().sparse_read(indices, name=name)
        keys = as_keys(indices, tf.int64, "indices")
        flat = bags.single(tf.reshape(keys, [-1]))
        (rows,) = exchange.lookup([self.spread], [flat], [0], ["sum"], insert=False)
        rows = tf.reshape(rows, tf.concat([tf.shape(keys), [self.shape[1]]], 0))
        rows.set_shape(keys.shape.concatenate([self.shape[1]]))
        return rows

    def gather_nd(self, indices: TensorLike, name: str | None = None) -> tf.Tensor:
        """Same as `tf.gather_nd`; on several ranks it can only read whole rows."""
        keras_call.track(self)
        if communicator.get().size == 1:
            return super().gather_nd(indices, name=name)
        indices = as_keys(indices, tf.int64, "indices")
        if indices.shape.rank is None or indices.shape.rank < 1 or indices.shape[-1] != 1:
            raise ValueError(
                "gather_nd over several ranks reads whole rows: the last dimension of indices must "
                f"be 1, got the shape {indices.shape}."
            )
        return self.sparse_read(tf.squeeze(indices, -1), name=name)
