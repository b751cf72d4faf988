"""DynamicVariable: an embedding table that is a hash table, and a TensorFlow resource variable."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf
from tensorflow.python.framework import ops, tensor_shape
from tensorflow.python.ops import handle_data_util, resource_variable_ops

from tf_dynemb import _ops, communicator
from tf_dynemb._aliases import one_of
from tf_dynemb._warn import warn
from tf_dynemb.ids import bags, strings
from tf_dynemb.ids.types import TensorLike
from tf_dynemb.parallel import exchange, spread_keys
from tf_dynemb.parallel.distribution import check_one_replica
from tf_dynemb.tables import content, cut, summary
from tf_dynemb.tables.options import Signature, TableArguments
from tf_dynemb.variables import keras_call, served
from tf_dynemb.variables import second_gradient as second_gradient  # registers it
from tf_dynemb.variables.retention import Retention

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The most rows in a histogram of TensorBoard. They are the first ones in the order of the hash
# table, so that the same rows are in it after each epoch, as long as the table does not grow.
_SAMPLE = 1 << 14


class DynamicVariable(served.InSavedModel, Retention, resource_variable_ops.ResourceVariable):  # type: ignore[misc]
    """A table of vectors by integer key that grows as keys are looked up.

    It is a `tf.Variable`: `tf.nn.embedding_lookup` and its sparse forms, `sparse_read`,
    `scatter_add`, `scatter_sub`, `scatter_update`, `tf.function` and `tf.Module` work as with any
    variable. `tape.gradient` returns an `IndexedSlices` over unique keys, with float32 values.
    Operations on the whole dense value do not work, because a table has none. A lookup gives every
    unknown key a row, unless it is called with `insert=False`.

    On several ranks, every rank creates the same table, and each key is held by one of them.
    Methods that take keys (lookups, `upsert`, `scatter_*`, `erase`, `forget`, `contains`) accept
    any keys and are collective: all ranks must call them, even a rank that has no keys to pass.
    `len`, `size`, `stats`, `clear` and `de.export` concern only the rows that this rank holds.

    Example:
    >>> table = DynamicVariable(dimension=4, initializer="ones")
    >>> tf.nn.embedding_lookup(table, [7, -3, 7]).shape
    TensorShape([3, 4])
    >>> len(table)
    2

    Args:
        dimension: width of the vectors, a positive integer.
        initializer: the initializer of new vectors: a Keras initializer or its name, a number, a
            number as text, or a list with one of these for each column. Default: "uniform", as in
            `keras.layers.Embedding`.
        var_type: where rows are stored: "hbm", "hybrid", "host" or "file"; see `TableOptions`. For
            GPU memory, it is the GPU of the current `tf.device`, or otherwise the first GPU that
            TensorFlow sees.
        name: the variable's name. Default: "dynamic_variable_<n>".
        constraint: a function that `OptimizerWrapper` calls with the vectors that a step has
            updated, a tensor [touched rows, dimension]. It returns the vectors to store.
        trainable: whether gradient tapes watch the variable.
        key_type: tf.int64, tf.int32 or tf.uint64. Every value of the type is a legal key.
        dtype: the dtype of the vectors: tf.float32, tf.float16 or tf.bfloat16.
        mode: how keys are assigned to ranks. None or "distributed": a hash of the key determines
            the rank that holds it. "localized:RANK": one rank holds all keys. In one process all
            modes are the same.
        dim: another name of `dimension`.
        hash_strings: whether methods that take keys take strings, too, as tensors, arrays or lists
            of str or bytes. The key of a string is `tf.strings.to_hash_bucket_fast(string,
            2**63 - 1)`; integers are keys all the same. It needs keys of 64 bits. Tables of layers
            with `hash_strings=True` have it.
        **table_options: the fields of `TableOptions`.

    Attributes:
        snapshots: the snapshots that the table was dumped to or loaded from.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it.
        RuntimeError: a `tf.distribute` strategy with several replicas is active.
        NotImplementedError: an option is set that this build does not support.
    """

    __signature__ = Signature(TableArguments)

    # Otherwise tf.Variable's metaclass would take the arguments for its own.
    _variable_call = None

    def __init__(
        self,
        dimension: int | None = None,
        initializer: Any = None,
        var_type: str = "hybrid",
        name: str | None = None,
        constraint: Callable[[tf.Tensor], tf.Tensor] | None = None,
        trainable: bool = True,
        key_type: tf.DType = tf.int64,
        dtype: tf.DType = tf.float32,
        mode: str | None = None,
        dim: int | None = None,
        hash_strings: bool = False,
        **table_options: Unpack[TableArguments],
    ) -> None:
        check_one_replica("DynamicVariable")
        dimension = one_of("dimension", dimension, "dim", dim)
        if dimension is None:
            raise TypeError("DynamicVariable needs dimension, the width of its vectors.")
        if constraint is not None and not callable(constraint):
            raise TypeError(f"constraint must be callable, got {constraint!r}.")
        Retention.__init__(
            self, dimension, initializer, var_type, name, key_type, dtype, mode, table_options
        )
        if hash_strings:
            if self._key_type == tf.int32:
                raise ValueError("hash_strings=True needs keys of 64 bits: key_type=tf.int64.")
            self.string_hash = strings.HASH
        handle, dtype = self._resource, self._attributes["dtype"]
        with tf.init_scope():
            shape = tensor_shape.TensorShape([None, self._dim])
            handle._handle_data = handle_data_util.create_handle_data(shape, dtype)
            # Not ResourceVariable.__init__, which would create a dense variable.
            resource_variable_ops.BaseResourceVariable.__init__(
                self,
                trainable=bool(trainable),
                shape=shape,
                dtype=dtype,
                handle=handle,
                constraint=constraint,
                name=self._name,
                unique_id=f"{self._name}_{self._number}",
                handle_name=self._name,
                in_graph_mode=False,
            )
            self._no_default = tf.zeros([0], dtype)
        if not tf.executing_eagerly():
            graph = weakref.ref(tf.compat.v1.get_default_graph())
            weakref.finalize(self, _warn_of_destroyed, graph, self._name).atexit = False
        # Destroys the table when this object is destroyed, even in a reference cycle.
        self._handle_deleter = resource_variable_ops.EagerResourceDeleter(
            handle=handle, handle_device=handle.device
        )

    @property
    def _unique_id(self) -> NoReturn:
        # Keras optimizers identify variables by this attribute; OptimizerWrapper does not use it.
        raise TypeError(
            f"{self._name} is a DynamicVariable, which only tf_dynemb.OptimizerWrapper can step. "
            "Wrap the optimizer, as the outermost one: tf_dynemb.OptimizerWrapper(optimizer)."
        )

    @_unique_id.setter
    def _unique_id(self, value: Any) -> None:
        pass

    @property
    def handle(self) -> tf.Tensor:
        """The table, as a resource of the operators."""
        return self._resource

    @property
    def _handle(self) -> None:
        # TensorFlow's eager operators read a variable that has a tensor here as a dense one. They
        # would fail as if it had been deleted, without a call of `_dense_var_to_tensor`.
        return None

    @_handle.setter
    def _handle(self, value: Any) -> None:
        pass

    def __tf_tracing_type__(self, context: Any) -> Any:
        alias_id = context.alias_global_id(self._resource._id)
        context.add_placeholder(alias_id, self)
        return resource_variable_ops.VariableSpec(
            self.shape, self.dtype, self.trainable, alias_id=alias_id
        )

    @property
    def trainable(self) -> bool:
        """Whether gradient tapes watch the variable; can be set."""
        return bool(self._trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)

    def lookup(
        self,
        ids: TensorLike,
        insert: bool | None = None,
        default_value: TensorLike | None = None,
        return_exists: bool = False,
        scores: TensorLike | None = None,
    ) -> Any:
        """Reads one vector for each id, and creates a row for each id that has none.

        `peek` creates none.

        Args:
            ids: integers of any shape.
            insert: whether unknown keys get a row. Otherwise they read as `default_value`. None:
                they do; inside the call of a Keras layer, only in training.
            default_value: a vector [dimension]. None: the table's `default_vector`, which is the
                vector that the key would start with unless it is set.
            return_exists: whether to return also which keys had a row before the call.
            scores: the scores that the rows get, as in `set_scores`. None: the strategy sets them.

        Returns:
            A tensor of shape ids.shape + [dimension] and the table's dtype. With `return_exists`, a
            tuple of it and a bool tensor of the shape of the ids.

        Raises:
            TypeError: the ids are not integers, or their type cannot be cast to the key type.
            ValueError: `default_value` has another shape, a number in a list is out of the range of
                the key type, or the table's strategy has no scores.
        """
        if scores is not None:
            keys = self.as_keys(ids, "ids")
            given = self.as_scores(scores, keys)
            result = DynamicVariable.lookup(self, keys, insert, default_value, return_exists)
            with tf.control_dependencies([result[0] if return_exists else result]):
                self._set_scores(keys, given)
            return result
        if return_exists:
            exists = self.contains(ids)
            with tf.control_dependencies([exists]):
                return self._lookup(ids, insert, default_value), exists
        # Serving reads few keys at a time: where nothing needs preparing, call only the operator.
        if (
            default_value is None
            and insert is not False
            and self._are_eager_keys(ids)
            and communicator.get().size == 1
            and not keras_call.is_active()
        ):
            resource_variable_ops.variable_accessed(self)
            table = self._resource
            return _ops.library().dynemb_lookup(table, ids, self._no_default, insert=True)[0]
        return self._lookup(ids, insert, default_value)

    def peek(self, ids: TensorLike, default_value: TensorLike | None = None) -> tf.Tensor:
        """Reads one vector for each id, and changes nothing: `lookup(ids, insert=False)`.

        Args:
            ids: as in `lookup`.
            default_value: the vector of ids without a row, as in `lookup`.

        Returns:
            A tensor of shape ids.shape + [dimension] and the table's dtype.

        Raises:
            TypeError, ValueError: as in `lookup`.
        """
        return self._lookup(ids, False, default_value)

    def _are_eager_keys(self, ids: Any) -> bool:
        return isinstance(ids, ops.EagerTensor) and ids.dtype is self._key_type

    @_ops.not_converted
    def _lookup(
        self, ids: TensorLike, insert: bool | None, default_value: TensorLike | None
    ) -> tf.Tensor:
        check_one_replica("A lookup in a DynamicVariable")
        keras_call.track(self)
        insert = keras_call.inserts(self, insert)
        if default_value is None and not insert:
            default_value = self.default_vector
        keys = self.as_keys(ids, "ids")
        if default_value is None:
            default = self._no_default
        else:
            default = tf.cast(tf.convert_to_tensor(default_value), self.dtype)
            if default.shape.rank != 1 or default.shape[0] not in (None, self._dim):
                raise ValueError(
                    f"default_value must have the shape [{self._dim}], got {default.shape}."
                )
        if communicator.get().size > 1:
            values = self._lookup_spread(keys, insert, None if default_value is None else default)
        else:
            resource_variable_ops.variable_accessed(self)
            with _ops.on(self._placement.device):
                values, _ = _ops.library().dynemb_lookup(self.handle, keys, default, insert=insert)
        values.set_shape(keys.shape.concatenate([self._dim]))
        return values

    def _lookup_spread(
        self, keys: tf.Tensor, insert: bool, default_value: tf.Tensor | None
    ) -> tf.Tensor:
        if insert:
            default_value = None
        flat = bags.single(tf.reshape(keys, [-1]))
        (values,) = exchange.lookup([self.spread], [flat], [0], ["sum"], insert, default_value)
        return tf.reshape(values, tf.concat([tf.shape(keys), [self._dim]], 0))

    def sparse_read(self, indices: TensorLike, name: str | None = None) -> tf.Tensor:
        """Same as `lookup(indices)`. `tf.gather` and `tf.nn.embedding_lookup` call it."""
        if self._are_eager_keys(indices):
            return self.lookup(indices)
        with tf.name_scope(name or "Gather"):
            return self.lookup(indices)

    def gather_nd(self, indices: TensorLike, name: str | None = None) -> tf.Tensor:
        """Same as `sparse_read(indices[..., 0])`; the last dimension of `indices` must be 1."""
        indices = self.as_keys(indices, "indices")
        if indices.shape.rank is None or indices.shape.rank < 1 or indices.shape[-1] != 1:
            raise ValueError(
                "gather_nd reads whole vectors: the last dimension of indices must be 1, "
                f"got the shape {indices.shape}."
            )
        return self.sparse_read(tf.squeeze(indices, -1), name=name)

    @_ops.not_converted
    def upsert(
        self, keys: TensorLike, values: TensorLike, scores: TensorLike | None = None
    ) -> tf.Operation | None:
        """Sets vectors. Unknown keys get a row; if keys repeat, the last one wins.

        Args:
            keys: integers of any shape.
            values: vectors, floating point, of shape keys.shape + [dimension].
            scores: the scores that the rows get, as in `set_scores`. None: the scores of existing
                rows are unchanged.

        Raises:
            TypeError: the keys are not integers, or the values are not floating point.
            ValueError: the values have another shape, or the table's strategy has no scores.
        """
        keys, values = self._keys_and_values(keys, values)
        given = None if scores is None else self.as_scores(scores, keys)
        if communicator.get().size > 1:
            done = spread_keys.upsert(self.spread, *self._flat(keys, values))
        else:
            done = _ops.library().dynemb_upsert(self.handle, keys, values)
        return done if given is None else self._set_scores(keys, given)

    def scatter_update(
        self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> DynamicVariable:
        """Sets the vectors `sparse_delta.values` of the keys `sparse_delta.indices`."""
        _check_slices(sparse_delta)
        self.upsert(sparse_delta.indices, sparse_delta.values)
        return self

    @_ops.not_converted
    def scatter_add(
        self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> DynamicVariable:
        """Adds `sparse_delta.values` to the vectors of `sparse_delta.indices`.

        The values of repeated keys add up. An unknown key starts from its initial vector.
        """
        _check_slices(sparse_delta)
        keys, values = self._keys_and_values(sparse_delta.indices, sparse_delta.values)
        if communicator.get().size > 1:
            spread_keys.accumulate(self.spread, *self._flat(keys, values))
        else:
            _ops.library().dynemb_accumulate(self.handle, keys, values)
        return self

    @_ops.not_converted
    def scatter_sub(
        self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> DynamicVariable:
        """Same as `scatter_add` with the values negated."""
        _check_slices(sparse_delta)
        negative = tf.negative(sparse_delta.values)
        return self.scatter_add(tf.IndexedSlices(negative, sparse_delta.indices))

    @_ops.not_converted
    def erase(self, keys: TensorLike) -> tf.Tensor:
        """Removes the rows of keys.

        Args:
            keys: integers of any shape. Keys without a row are ignored.

        Returns:
            The number of rows that were removed, on all ranks together: an int64 scalar.
        """
        return self._erase(keys, wipe=False)

    @_ops.not_converted
    def forget(self, keys: TensorLike) -> tf.Tensor:
        """Same as `erase`, and removes the data of the rows from memory and from the table's files.

        Rows in memory are overwritten with zeros. With `file_path`, the files that have the rows
        are rewritten without them, which takes time; a copy that a row has left behind when it
        moved stays until its space is given back. A restart from the last `flush` leaves the rows
        out. No later dump contains any of their data. The next delta lists the keys as deleted.
        """
        return self._erase(keys, wipe=True)

    def _erase(self, keys: TensorLike, wipe: bool) -> tf.Tensor:
        keys = self.as_keys(keys, "keys")
        if communicator.get().size > 1:
            return spread_keys.erase(self.spread, tf.reshape(keys, [-1]), wipe)
        return _ops.library().dynemb_erase(self.handle, keys, wipe=wipe)

    @_ops.not_converted
    def contains(self, keys: TensorLike) -> tf.Tensor:
        """Returns which of `keys` have a row, as a bool tensor of the shape of `keys`."""
        keys = self.as_keys(keys, "keys")
        if communicator.get().size > 1:
            (found,) = spread_keys.contains([self.spread], [tf.reshape(keys, [-1])])
            return tf.reshape(found, tf.shape(keys))
        return _ops.library().dynemb_contains(self.handle, keys)

    def clear(self) -> tf.Operation | None:
        """Removes all rows that this rank holds."""
        return _ops.library().dynemb_clear(self.handle)

    def _keys_and_values(self, keys: TensorLike, values: TensorLike) -> tuple[tf.Tensor, tf.Tensor]:
        keys = self.as_keys(keys, "keys")
        values = tf.convert_to_tensor(values)
        if not values.dtype.is_floating:
            raise TypeError(f"values must be floating point, got {values.dtype.name}.")
        values = tf.cast(values, self.dtype)
        if not values.shape.is_compatible_with(keys.shape.concatenate([self._dim])):
            raise ValueError(
                f"values must have the shape of keys + [{self._dim}], got keys {keys.shape}, "
                f"values {values.shape}."
            )
        return keys, values

    def _flat(self, keys: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.reshape(keys, [-1]), tf.reshape(values, [-1, self._dim])

    def __repr__(self) -> str:
        rows = f", rows={len(self)}" if tf.executing_eagerly() else ""
        return (
            f"<DynamicVariable '{self.name}' dimension={self._dim} key_type={self._key_type.name} "
            f"dtype={self.dtype.name}{rows}>"
        )

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: rows, bytes and hits on this rank."""
        name = self.name.removesuffix(":0")
        title = f"{name}: {self._key_type.name} to {self._dim} x {self.dtype.name}"
        state = "" if self.state_spec is None else self.state_spec[0]
        return summary.of_table(title, self.options, state, self.stats())

    def __dir__(self) -> list[str]:
        """Returns the names of attributes, except attributes that can only raise an error."""
        return sorted(set(super().__dir__()) - _ONLY_RAISE)

    # A table has no elements to compare, so it equals only itself, and can be in sets and dicts.

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._no_dense_value("copied")

    def __reduce__(self) -> NoReturn:
        self._no_dense_value("pickled")

    def _no_dense_value(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} is a DynamicVariable, a hash table without a dense value, and cannot be "
            f"{what}. Use de.export(variable) to get its keys and vectors, de.assign(variable, "
            "keys, values) to set them, tf.nn.embedding_lookup or de.lookup_sparse to read some."
        )

    def numpy(self) -> NoReturn:
        """Raises NotImplementedError: use `de.export`."""
        self._no_dense_value("converted to an array")

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        self._no_dense_value("converted to an array")

    def _read_variable_op(self, no_copy: bool = False) -> NoReturn:
        # read_value, value, __getitem__, arithmetic and conversion to a tensor all call this.
        self._no_dense_value("read as a tensor")

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: str | None = None, as_ref: bool = False
    ) -> tf.Tensor:
        stack = inspect.stack(0)
        if any(frame.filename.endswith("custom_gradient.py") for frame in stack):
            raise NotImplementedError(
                f"tf.custom_gradient and tf.recompute_grad cannot capture the table {self._name}: "
                "they pass variables on as dense tensors. Look up the ids before, and pass the "
                "vectors as an argument."
            )
        if not any(_is_tensorboard(frame) for frame in stack):
            self._no_dense_value("converted to a tensor")
        return self._sample()

    def _sample(self) -> tf.Tensor:
        """Some vectors, float32 [n, dimension], with n from 1 to _SAMPLE; zeros without rows."""
        _, values, _, _, _ = _ops.library().dynemb_export(
            self.handle,
            cursor=0,
            limit=_SAMPLE,
            since=tf.constant(-1, tf.int64),
            key_type=self.key_type,
            dtype=self.dtype,
        )
        values = tf.cast(values[:_SAMPLE], tf.float32)
        return values if len(values) else tf.zeros([1, self._dim])

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Returns True: a table needs no initial value."""
        return tf.constant(True)

    def assign(
        self, keys: TensorLike, values: TensorLike | None = None, **kwargs: Any
    ) -> tf.Operation | None:
        """Sets the vectors of the keys that have a row; the name in HierarchicalKV.

        Args:
            keys: integers of any shape. Keys without a row are skipped.
            values: vectors, floating point, of shape keys.shape + [dimension].
            **kwargs: not supported.

        Raises:
            NotImplementedError: it is called with one tensor, as for a dense variable. Use
                `scatter_update` or `de.assign`.
        """
        if values is None or kwargs:
            self._no_dense_value("assigned a tensor")
        return self.assign_rows(keys, values)

    def _no_addition(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._no_dense_value("assigned a tensor")

    assign_add = _no_addition
    assign_sub = _no_addition

    def _scatter_not_supported(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} is a DynamicVariable: it has scatter_add, scatter_sub and "
            "scatter_update with tf.IndexedSlices, and no other scatter operation."
        )

    scatter_max = scatter_min = scatter_mul = scatter_div = _scatter_not_supported
    batch_scatter_update = scatter_nd_add = scatter_nd_sub = _scatter_not_supported
    scatter_nd_update = scatter_nd_max = scatter_nd_min = _scatter_not_supported

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        if _ops.is_saving_model():
            return {}  # the ServedTable has the rows
        # tf.train.Checkpoint writes these tensors. They hold all rows in memory; dump() does not.
        if not tf.executing_eagerly():
            raise NotImplementedError(
                f"{self._name}: a DynamicVariable can only be saved eagerly, not in a graph."
            )
        saved = content.read_content(self)
        tensors = {part: tf.constant(array) for part, array in saved.rows._asdict().items()}
        return {**tensors, "info": tf.constant(saved.info)}

    def _restore_from_tensors(self, tensors: dict[str, tf.Tensor]) -> None:
        with tf.init_scope():
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        info = arrays.pop("info").decode()
        saved = content.Content(cut.Rows(**arrays), info)
        content.write_content(self, saved, adopt_state=True)

    def _copy_trackable_to_cpu(self, object_map: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._name}: asynchronous checkpoints of a DynamicVariable are not supported; "
            "tf_dynemb.dump does not block training either."
        )


# Methods of dense variables, which a hash table cannot have. They say what to use.
_ONLY_RAISE = frozenset(
    {
        *("assign_add", "assign_sub", "batch_scatter_update", "count_up_to", "eval"),
        *("create", "from_proto", "graph", "initial_value", "initialized_value", "load", "numpy"),
        "op",
        *("read_value", "read_value_no_copy", "scatter_div", "scatter_max", "scatter_min"),
        *("scatter_mul", "scatter_nd_add", "scatter_nd_max", "scatter_nd_min", "scatter_nd_sub"),
        *("scatter_nd_update", "set_shape", "to_proto", "value"),
    }
)


def _is_tensorboard(frame: inspect.FrameInfo) -> bool:
    """Whether a frame is of `keras.callbacks.TensorBoard`, which logs weights as histograms."""
    module = frame.frame.f_globals.get("__name__", "")
    return frame.function == "_log_weights" and str(module).endswith(".tensorboard")


def _warn_of_destroyed(graph: Callable[[], tf.Graph | None], name: str) -> None:
    """Called when a table is destroyed that was made while a function was traced."""
    if graph() is tf.compat.v1.get_default_graph():  # still being traced
        warn(
            f"The table {name!r} was made inside a tf.function and is destroyed now, so the "
            "function cannot read it. Make tables outside, or keep them in an attribute."
        )


def _check_slices(sparse_delta: tf.IndexedSlices) -> None:
    if not isinstance(sparse_delta, tf.IndexedSlices):
        raise TypeError(f"sparse_delta must be a tf.IndexedSlices, got {sparse_delta!r}.")
