"""DynamicVariable: an embedding table that is a hash table, and a TensorFlow resource variable."""

from __future__ import annotations

import gc
import itertools
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops, tensor_shape
from tensorflow.python.ops import handle_data_util, resource_variable_ops

from tf_dynemb import _ops, bags, communicator, exchange, initializers, spread_keys
from tf_dynemb.config import EVICT_STRATEGIES, TableOptions, check_dimension
from tf_dynemb.exchange import BY_HASH, Spread, exchange_stats
from tf_dynemb.keys import KEY_TYPES, as_keys
from tf_dynemb.placement import Placement, place
from tf_dynemb.snapshots import Snapshots
from tf_dynemb.static_variable import check_mode, owner_of_mode

# (optimizer, floats per row of each of its states, what each begins with)
StateSpec: TypeAlias = tuple[str, tuple[int, ...], tuple[float, ...]]

VALUE_TYPES = (tf.float32, tf.float16, tf.bfloat16)
_numbers = itertools.count()


class DynamicVariable(resource_variable_ops.ResourceVariable):  # type: ignore[misc]
    """A table of vectors by integer key that grows as keys are looked up.

    It is a `tf.Variable`: `tf.nn.embedding_lookup` and its sparse forms, `sparse_read`,
    `scatter_add`, `scatter_sub`, `scatter_update`, `tape.gradient` (an `IndexedSlices` over unique
    keys, values float32), `tf.function` and `tf.Module` work as with any variable. Operations on
    the whole dense value do not: there is none. A lookup gives every unknown key a row; see
    `lookup_sparse(insert=False)` for the other way.

    On several ranks every rank makes the same table, and each key is held by one of them. What
    takes keys (lookups, `upsert`, `scatter_*`, `erase`, `forget`, `contains`) may be given any, and
    is collective: all ranks call it, if only with no keys. `len`, `size`, `stats`, `clear` and
    `de.export` are about the rows that this rank holds.

    Example:
    >>> table = DynamicVariable(dimension=4, initializer="ones")
    >>> tf.nn.embedding_lookup(table, [7, -3, 7]).shape
    TensorShape([3, 4])
    >>> len(table)
    2

    Args:
        dimension: width of the vectors, a positive integer.
        initializer: of new vectors: a Keras initializer or its name, a number, a number as text, or
            a list with one of these for each column. Default: "uniform", as in
            `keras.layers.Embedding`.
        var_type: where rows live; see `TableOptions`. In GPU memory is on the GPU of the current
            `tf.device`, else on the first that TensorFlow sees.
        name: of the variable. Default: "dynamic_variable_<n>".
        constraint: called by `OptimizerWrapper` with the vectors that a step has updated, a tensor
            [touched rows, dimension]; returns what to store.
        trainable: whether gradient tapes watch it.
        key_type: tf.int64, tf.int32 or tf.uint64. Every value of the type is a legal key.
        dtype: of the vectors: tf.float32, tf.float16 or tf.bfloat16.
        mode: None or "distributed": each key is held by the rank that a hash of it says;
            "localized:RANK": all are held by one. In one process they are the same.
        **table_options: the fields of `TableOptions`.

    Attributes:
        snapshots: which snapshots the table was dumped to or loaded from.

    Raises:
        ValueError, TypeError: an argument is wrong; it is named.
    """

    # Where tf.Variable's metaclass would take the arguments for those of tf.Variable.
    _variable_call = None

    def __init__(
        self,
        dimension: int,
        initializer: Any = None,
        var_type: str = "hybrid",
        name: str | None = None,
        constraint: Any = None,
        trainable: bool = True,
        key_type: Any = tf.int64,
        dtype: Any = tf.float32,
        mode: str | None = None,
        **table_options: Any,
    ) -> None:
        dim = check_dimension("dimension", dimension)
        # SOK's defaults are None, and its scripts pass them on.
        options = TableOptions.create(var_type or "hybrid", table_options)
        key_type = _one_of("key_type", key_type or tf.int64, KEY_TYPES)
        dtype = _one_of("dtype", dtype or tf.float32, VALUE_TYPES)
        check_mode(mode)
        if constraint is not None and not callable(constraint):
            raise TypeError(f"constraint must be callable, got {constraint!r}.")
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name must be a string that is not empty, got {name!r}.")
        number = next(_numbers)
        name = name or f"dynamic_variable_{number}"
        initial = initializers.create(initializer, dim)
        seed = options.seed if options.seed is not None else initial.seed
        if seed is None:
            seed = _default_seed(name)

        with tf.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError("A DynamicVariable cannot be created in a TensorFlow 1 graph.")
            placement = place(options.var_type)
            attributes = {
                "tier": placement.tier,
                "max_hbm_bytes": options.max_hbm_bytes if placement.tier == "hybrid" else 0,
                "key_dtype": key_type,
                "dtype": dtype,
                "dim": dim,
                "init_capacity": options.init_capacity,
                "max_capacity": options.max_capacity or 0,
                "max_load_factor": min(max(options.max_load_factor, 0.05), 0.95),
                "evict_strategy": EVICT_STRATEGIES[options.evict_strategy],
                "seed": seed,
                "stochastic_rounding": options.stochastic_rounding,
                "initializers": list(initial.kinds),
                "initializer_args": list(initial.args),
            }
            handle = _make_table(placement, f"dynemb/{number}/{name}", attributes)
            shape = tensor_shape.TensorShape([None, dim])
            handle._handle_data = handle_data_util.create_handle_data(shape, dtype)
            # Not ResourceVariable.__init__, which would make a dense variable.
            resource_variable_ops.BaseResourceVariable.__init__(
                self,
                trainable=bool(trainable),
                shape=shape,
                dtype=dtype,
                handle=handle,
                constraint=constraint,
                name=name,
                unique_id=f"{name}_{number}",
                handle_name=name,
                in_graph_mode=False,
            )
        # Destroys the table when this object goes, and when it is part of a reference cycle.
        self._handle_deleter = resource_variable_ops.EagerResourceDeleter(
            handle=handle, handle_device=handle.device
        )
        self._name = name
        self._dim = dim
        self._key_type = key_type
        self._mode = mode
        self._options = options
        self._attributes = attributes
        self._placement = placement
        self._exchange_name = f"{name}#{number}"
        self.snapshots = Snapshots()
        # Held while a cut of the table is read: a table can be in one at a time.
        self.cut_lock = threading.RLock()
        with tf.init_scope():
            self._no_default = tf.zeros([0], dtype)
        # Which state the rows have. Who steps it is known to the operators.
        self._state_spec: StateSpec | None = None

    @property
    def _unique_id(self) -> NoReturn:
        # What a Keras optimizer knows a variable by; OptimizerWrapper does not ask.
        raise TypeError(
            f"{self._name} is a DynamicVariable, which only tf_dynemb.OptimizerWrapper can step. "
            "Wrap the optimizer, as the outermost one: tf_dynemb.OptimizerWrapper(optimizer)."
        )

    @_unique_id.setter
    def _unique_id(self, value: Any) -> None:
        pass

    @property
    def dimension(self) -> int:
        """Width of the vectors."""
        return self._dim

    @property
    def key_type(self) -> Any:
        """The dtype of the keys."""
        return self._key_type

    @property
    def mode(self) -> str | None:
        """How the table is spread over ranks, as it was given."""
        return self._mode

    @property
    def spread(self) -> Spread:
        """The table as an exchange between ranks sees it."""
        # Not an attribute, which would be a reference cycle: tables must go with their last user.
        owner = owner_of_mode(self._mode)
        return Spread(
            variable=self,
            key_type=self._key_type,
            dimension=self._dim,
            owner=BY_HASH if owner is None else owner,
            name=self._exchange_name,
            wire=self._options.exchange_dtype or "same",
            is_dynamic=True,
        )

    @property
    def options(self) -> TableOptions:
        """The table's options."""
        return self._options

    @property
    def placement(self) -> Placement:
        """The device that the table is on, and its tier."""
        return self._placement

    @property
    def trainable(self) -> bool:
        """Whether gradient tapes watch the variable; can be set."""
        return bool(self._trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)

    @property
    def size(self) -> Any:
        """An int64 tensor [rows held, dimension]."""
        rows = _ops.library().dynemb_size(self.handle)
        return tf.stack([rows, tf.constant(self._dim, tf.int64)])

    def __len__(self) -> int:
        with tf.init_scope():
            return int(_ops.library().dynemb_size(self.handle))

    def stats(self) -> dict[str, int]:
        """What the table counts: rows, index slots, bytes, inserts, evictions and so on.

        Of a table in GPU memory also the rows that are there (`device_rows`), how many lookups
        found them there (`device_hits`), and rows moved there since they are read often
        (`promotions`).
        Also how many keys and bytes this rank has sent to others for it.
        """
        with tf.init_scope():
            return {**table_stats(self.handle), **exchange_stats(self._exchange_name)}

    def lookup(self, ids: Any, insert: bool = True, default_value: Any = None) -> Any:
        """Reads one vector for each id.

        Args:
            ids: integers of any shape.
            insert: give unknown keys a row. Otherwise they read as `default_value`.
            default_value: a vector [dimension]; None: the vector that the key would start with.

        Returns:
            A tensor ids.shape + [dimension] of the table's dtype.
        """
        # Serving reads few keys at a time: nothing but the operator for what needs no preparing.
        if (
            default_value is None
            and insert is True
            and self._are_eager_keys(ids)
            and communicator.get().size == 1
        ):
            resource_variable_ops.variable_accessed(self)
            return _ops.library().dynemb_lookup(self._handle, ids, self._no_default, insert=True)[0]
        return self._lookup(ids, insert, default_value)

    def _are_eager_keys(self, ids: Any) -> bool:
        return isinstance(ids, ops.EagerTensor) and ids.dtype is self._key_type

    @_ops.not_converted
    def _lookup(self, ids: Any, insert: bool, default_value: Any) -> Any:
        keys = as_keys(ids, self._key_type, "ids")
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
                values, _ = _ops.library().dynemb_lookup(
                    self.handle, keys, default, insert=bool(insert)
                )
        values.set_shape(keys.shape.concatenate([self._dim]))
        return values

    def _lookup_spread(self, keys: Any, insert: bool, default_value: Any) -> Any:
        if insert:
            default_value = None
        flat = bags.single(tf.reshape(keys, [-1]))
        (values,) = exchange.lookup(
            [self.spread], [flat], [0], ["sum"], bool(insert), default_value
        )
        return tf.reshape(values, tf.concat([tf.shape(keys), [self._dim]], 0))

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Reads one vector for each id and gives unknown keys a row: what `tf.gather` calls."""
        if self._are_eager_keys(indices):
            return self.lookup(indices)
        with tf.name_scope(name or "Gather"):
            return self.lookup(indices)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """As `sparse_read` of indices[..., 0]; the last dimension of `indices` must be 1."""
        indices = as_keys(indices, self._key_type, "indices")
        if indices.shape.rank is None or indices.shape.rank < 1 or indices.shape[-1] != 1:
            raise ValueError(
                "gather_nd reads whole vectors: the last dimension of indices must be 1, "
                f"got the shape {indices.shape}."
            )
        return self.sparse_read(tf.squeeze(indices, -1), name=name)

    @_ops.not_converted
    def upsert(self, keys: Any, values: Any) -> Any:
        """Sets vectors; unknown keys get a row, and the last of repeated keys wins.

        Args:
            keys: integers of any shape.
            values: keys.shape + [dimension].
        """
        keys, values = self._keys_and_values(keys, values)
        if communicator.get().size > 1:
            return spread_keys.upsert(self.spread, *self._flat(keys, values))
        return _ops.library().dynemb_upsert(self.handle, keys, values)

    def scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> DynamicVariable:
        """Sets the vectors `sparse_delta.values` of the keys `sparse_delta.indices`."""
        _check_slices(sparse_delta)
        self.upsert(sparse_delta.indices, sparse_delta.values)
        return self

    @_ops.not_converted
    def scatter_add(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> DynamicVariable:
        """Adds `sparse_delta.values` to the vectors of `sparse_delta.indices`; repeats add up.

        An unknown key starts from its initial vector.
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
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> DynamicVariable:
        """As `scatter_add` of the negative values."""
        _check_slices(sparse_delta)
        negative = tf.negative(sparse_delta.values)
        return self.scatter_add(tf.IndexedSlices(negative, sparse_delta.indices))

    @_ops.not_converted
    def erase(self, keys: Any) -> Any:
        """Removes rows; returns how many there were (on all ranks), an int64 tensor."""
        return self._erase(keys, wipe=False)

    @_ops.not_converted
    def forget(self, keys: Any) -> Any:
        """As `erase`, and overwrites what the rows held with zeros in memory.

        No later dump holds anything of them; the next delta tells its followers to forget them too.
        """
        return self._erase(keys, wipe=True)

    def _erase(self, keys: Any, wipe: bool) -> Any:
        keys = as_keys(keys, self._key_type, "keys")
        if communicator.get().size > 1:
            return spread_keys.erase(self.spread, tf.reshape(keys, [-1]), wipe)
        return _ops.library().dynemb_erase(self.handle, keys, wipe=wipe)

    @_ops.not_converted
    def contains(self, keys: Any) -> Any:
        """Which of `keys` have a row: a bool tensor of the shape of `keys`."""
        keys = as_keys(keys, self._key_type, "keys")
        if communicator.get().size > 1:
            (found,) = spread_keys.contains([self.spread], [tf.reshape(keys, [-1])])
            return tf.reshape(found, tf.shape(keys))
        return _ops.library().dynemb_contains(self.handle, keys)

    def clear(self) -> Any:
        """Removes all rows."""
        return _ops.library().dynemb_clear(self.handle)

    def attach_state(
        self, optimizer: str, widths: Sequence[int], inits: Sequence[float], owner: str
    ) -> None:
        """Makes room for an optimizer's state in each row; every row starts fresh.

        With the same arguments as before nothing happens, and state that was restored is the
        owner's from now on. An optimizer without state leaves the rows as they are.

        Args:
            optimizer: its name.
            widths: floats per row of each state.
            inits: what each state of a row starts with.
            owner: who steps the rows, a text that no other optimizer of the process has. State that
                another owner left is not continued, as a model that is compiled anew starts with
                fresh state in Keras; that owner cannot step the table any more.
        """
        spec = (optimizer, tuple(widths), tuple(inits))
        if not spec[1] and self._state_spec is not None:
            return
        with tf.init_scope():
            begins_anew = self._take_state(spec, owner if spec[1] else "")
        if begins_anew and self._state_spec is not None:
            # Every row begins anew, also those that no delta will tell of.
            self.snapshots = Snapshots()
        self._state_spec = spec

    def _take_state(self, spec: StateSpec, owner: str) -> bool:
        optimizer, widths, inits = spec
        return bool(
            _ops.library().dynemb_attach_state(
                self.handle,
                optimizer=optimizer,
                widths=list(widths),
                inits=list(inits),
                owner=owner,
            )
        )

    @property
    def state_spec(self) -> StateSpec | None:
        """(optimizer, widths, inits) of the state in the rows; None if there is none."""
        return self._state_spec

    @property
    def attributes(self) -> dict[str, Any]:
        """What the DynembTable operator was called with, names apart."""
        return dict(self._attributes)

    def make_empty(self, rows: int, state_spec: StateSpec | None) -> Any:
        """Another table like this one, for rows that are to take the place of its own.

        Args:
            rows: how many they will be; room is made at once.
            state_spec: of the state they have.

        Returns:
            the table's handle. The table goes with it.
        """
        most = self._options.max_capacity or 2**32 - 2
        attributes = dict(self._attributes)
        attributes["init_capacity"] = min(max(rows, attributes["init_capacity"]), most)
        handle = _make_table(self._placement, "", attributes)
        if state_spec is not None:
            name, widths, inits = state_spec
            _ops.library().dynemb_attach_state(
                handle, optimizer=name, widths=list(widths), inits=list(inits)
            )
        return handle

    def state_was_restored(self, state_spec: StateSpec | None) -> None:
        """Notes which state the rows have after a restore.

        It belongs to whichever optimizer attaches next, if that keeps the same.
        """
        self._state_spec = state_spec
        if state_spec is not None:
            with tf.init_scope():
                self._take_state(state_spec, owner="")

    def _keys_and_values(self, keys: Any, values: Any) -> tuple[Any, Any]:
        keys = as_keys(keys, self._key_type, "keys")
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

    def _flat(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return tf.reshape(keys, [-1]), tf.reshape(values, [-1, self._dim])

    def __repr__(self) -> str:
        rows = f", rows={len(self)}" if tf.executing_eagerly() else ""
        return (
            f"<DynamicVariable '{self.name}' dimension={self._dim} key_type={self._key_type.name} "
            f"dtype={self.dtype.name}{rows}>"
        )

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
        """Not possible: use `export`."""
        self._no_dense_value("converted to an array")

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        self._no_dense_value("converted to an array")

    def _read_variable_op(self, no_copy: bool = False) -> NoReturn:
        # read_value, value, __getitem__, arithmetic and conversion to a tensor all end here.
        self._no_dense_value("read as a tensor")

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: str | None = None, as_ref: bool = False
    ) -> NoReturn:
        self._no_dense_value("converted to a tensor")

    def is_initialized(self, name: str | None = None) -> Any:
        """True: a table needs no initial value."""
        return tf.constant(True)

    def assign(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not possible: use `scatter_update` or `de.assign`."""
        self._no_dense_value("assigned a tensor")

    assign_add = assign
    assign_sub = assign

    def _scatter_not_supported(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} is a DynamicVariable: it has scatter_add, scatter_sub and "
            "scatter_update with tf.IndexedSlices, and no other scatter operation."
        )

    scatter_max = scatter_min = scatter_mul = scatter_div = _scatter_not_supported
    batch_scatter_update = scatter_nd_add = scatter_nd_sub = _scatter_not_supported
    scatter_nd_update = scatter_nd_max = scatter_nd_min = _scatter_not_supported

    def _serialize_to_tensors(self) -> dict[str, Any]:
        # What tf.train.Checkpoint writes. It holds all rows in memory; dump() does not.
        from tf_dynemb import content  # which needs this module

        if not tf.executing_eagerly():
            raise NotImplementedError(
                f"{self._name}: a DynamicVariable can be saved eagerly only, not in a graph."
            )
        saved = content.read_content(self)
        tensors = {part: tf.constant(array) for part, array in saved.rows._asdict().items()}
        return {**tensors, "info": tf.constant(saved.info)}

    def _restore_from_tensors(self, tensors: dict[str, Any]) -> None:
        from tf_dynemb import content, cut

        with tf.init_scope():
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        info = arrays.pop("info").decode()
        saved = content.Content(cut.Rows(**arrays), info)
        content.write_content(self, saved, adopt_state=True)

    def _copy_trackable_to_cpu(self, object_map: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._name}: asynchronous checkpoints of a DynamicVariable are not supported; "
            "tf_dynemb.dump does not stop training either."
        )

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._name}: SavedModel of a DynamicVariable is not supported yet; serve dumps with "
            "tf_dynemb.serving, or use model.save_weights."
        )


def table_stats(handle: Any) -> dict[str, int]:
    """What the table of a handle counts; see `DynamicVariable.stats`."""
    names, values = _ops.library().dynemb_stats(handle)
    return {
        name.decode(): int(value) for name, value in zip(names.numpy(), values.numpy(), strict=True)
    }


def _make_table(placement: Placement, shared_name: str, attributes: dict[str, Any]) -> Any:
    with tf.device(placement.device):
        make = _ops.library().dynemb_table
        try:
            return make(container="", shared_name=shared_name, **attributes)
        except tf.errors.ResourceExhaustedError:
            gc.collect()  # Models are reference cycles: those of before may hold much.
            return make(container="", shared_name=shared_name, **attributes)


def _one_of(name: str, value: Any, allowed: Sequence[Any]) -> Any:
    try:
        dtype = tf.as_dtype(value)
    except TypeError:
        dtype = None
    if dtype not in allowed:
        names = ", ".join(f"tf.{item.name}" for item in allowed)
        raise TypeError(f"{name} must be one of {names}, got {value!r}.")
    return dtype


def _check_slices(sparse_delta: Any) -> None:
    if not isinstance(sparse_delta, tf.IndexedSlices):
        raise TypeError(f"sparse_delta must be a tf.IndexedSlices, got {sparse_delta!r}.")


def _default_seed(name: str) -> int:
    """A seed that is the same in every process that makes the same tables."""
    return zlib.crc32(name.encode()) ^ ((context.global_seed() or 0) & 0x7FFFFFFF) << 31
