"""Table: the hash table of a DynamicVariable, apart from being a TensorFlow variable."""

from __future__ import annotations

import gc
import itertools
import threading
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.eager import context

from tf_dynemb import _ops
from tf_dynemb.ids.keys import KEY_TYPES
from tf_dynemb.parallel.exchange import BY_HASH, Spread, exchange_stats
from tf_dynemb.parallel.ownership import check_mode, owner_of_mode
from tf_dynemb.parallel.placement import Placement, place
from tf_dynemb.tables import initializers
from tf_dynemb.tables.lineage import Snapshots
from tf_dynemb.tables.options import EVICT_STRATEGIES, TableOptions, check_dimension

# (optimizer, floats per row of each of its states, what each begins with)
StateSpec: TypeAlias = tuple[str, tuple[int, ...], tuple[float, ...]]

VALUE_TYPES = (tf.float32, tf.float16, tf.bfloat16)
_numbers = itertools.count()


class Table:
    """The hash table of a `DynamicVariable`: its options, and the state that its rows have.

    Cuts, snapshots and checkpoints need this much of a variable and no more. The variable adds the
    methods that TensorFlow calls, those for its checkpoint among them.

    Args:
        dimension: as of `DynamicVariable`; so the next six.
        initializer: of new vectors.
        var_type: where rows live.
        name: of the variable.
        key_type: of the keys.
        dtype: of the vectors.
        mode: how the table is spread over ranks.
        table_options: the fields of `TableOptions`.

    Attributes:
        handle: of the resource, a tensor.
        name: as TensorFlow has it.
        dtype: of the vectors.
        snapshots: which snapshots the table was dumped to or loaded from.
        cut_lock: held while a cut of the table is read: a table can be in one at a time.
    """

    # TensorFlow's variable has these.
    handle: Any
    name: Any
    dtype: Any

    def __init__(
        self,
        dimension: int,
        initializer: Any,
        var_type: str | None,
        name: str | None,
        key_type: Any,
        dtype: Any,
        mode: str | None,
        table_options: dict[str, Any],
    ) -> None:
        dim = check_dimension("dimension", dimension)
        # SOK's defaults are None, and its scripts pass them on.
        options = TableOptions.create(var_type or "hybrid", table_options)
        key_type = _one_of("key_type", key_type or tf.int64, KEY_TYPES)
        dtype = _one_of("dtype", dtype or tf.float32, VALUE_TYPES)
        check_mode(mode)
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
            self._handle = _make_table(placement, f"dynemb/{number}/{name}", attributes)
        self._name = name
        self._number = number
        self._dim = dim
        self._key_type = key_type
        self._mode = mode
        self._options = options
        self._attributes = attributes
        self._placement = placement
        self._exchange_name = f"{name}#{number}"
        self.snapshots = Snapshots()
        self.cut_lock = threading.RLock()
        # Which state the rows have. Who steps it is known to the operators.
        self._state_spec: StateSpec | None = None

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


def table_stats(handle: Any) -> dict[str, int]:
    """What the table of a handle counts; see `Table.stats`."""
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


def _default_seed(name: str) -> int:
    """A seed that is the same in every process that makes the same tables."""
    return zlib.crc32(name.encode()) ^ ((context.global_seed() or 0) & 0x7FFFFFFF) << 31
