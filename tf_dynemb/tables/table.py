"""Table: the hash table of a DynamicVariable, without the interface of a TensorFlow variable."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tf_dynemb import _ops, communicator
from tf_dynemb.ids.keys import KEY_TYPES, as_keys
from tf_dynemb.ids.types import TensorLike
from tf_dynemb.parallel.agreement import Ranks
from tf_dynemb.parallel.exchange import BY_HASH, Spread, exchange_stats
from tf_dynemb.parallel.ownership import capacity_share, check_mode, owner_of_mode
from tf_dynemb.parallel.placement import Placement, place
from tf_dynemb.tables import admission_options, initializers
from tf_dynemb.tables.flushes import Flushes, make_durable_folder
from tf_dynemb.tables.lineage import Snapshots, new_history
from tf_dynemb.tables.options import TableOptions, check_dimension

# (optimizer, floats per row of each of its states, initial value of each state)
StateSpec: TypeAlias = tuple[str, tuple[int, ...], tuple[float, ...]]

VALUE_TYPES = (tf.float32, tf.float16, tf.bfloat16)
_numbers = itertools.count()


class AutomaticName(str):
    """A name that the user did not choose: it depends on what the process has created before."""


class Table:
    """The hash table of a `DynamicVariable`: its options, and the state in its rows.

    Cuts, snapshots and checkpoints only need this class. The variable adds the methods that
    TensorFlow calls, including the methods for its checkpoints.

    Args:
        dimension: as in `DynamicVariable`, like the next six.
        initializer: the initializer of new vectors.
        var_type: where rows are stored.
        name: the name of the variable.
        key_type: the dtype of the keys.
        dtype: the dtype of the vectors.
        mode: how the table is spread over ranks.
        table_options: the fields of `TableOptions`.

    Attributes:
        handle: the handle of the resource, a tensor.
        name: the name in TensorFlow.
        has_automatic_name: whether the name is automatic.
        dtype: the dtype of the vectors.
        history: the id of the table's history (`lineage.py`); a load takes over the history of the
            rows.
        snapshots: the snapshots that the table was dumped to or loaded from.
        cut_lock: held while a cut of the table is read, because a table can be in one at a time.
    """

    # Whether steps of optimizers give the keys of their gradients rows, so that lookups need not do
    # it. Otherwise a step skips keys without a row: they were evicted after the lookup.
    inserts_in_steps = False

    # Set by TensorFlow's variable.
    handle: tf.Tensor
    name: str
    dtype: tf.DType

    def __init__(
        self,
        dimension: int,
        initializer: Any,
        var_type: str | None,
        name: str | None,
        key_type: tf.DType | str | None,
        dtype: tf.DType | str | None,
        mode: str | None,
        table_options: Mapping[str, Any],
    ) -> None:
        dim = check_dimension("dimension", dimension)
        # SOK's defaults are None, and its scripts pass them on.
        options = TableOptions.create(var_type or "hybrid", table_options)
        key_type = _one_of("key_type", key_type or tf.int64, KEY_TYPES)
        if dtype in (tf.float64, "float64"):
            raise TypeError(
                "dtype='float64': rows are of float32, float16 or bfloat16. Use float32, and cast "
                "what a lookup returns, as layers with dtype='float64' do."
            )
        dtype = _one_of("dtype", dtype or tf.float32, VALUE_TYPES)
        check_mode(mode)
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name must be a non-empty string, got {name!r}.")
        if options.persistent and name is None:
            raise ValueError("persistent=True needs a name, by which the table is found again.")
        number = next(_numbers)
        name = name or AutomaticName(f"dynamic_variable_{number}")
        initial = initializers.create(initializer, dim)
        seed = options.seed if options.seed is not None else initial.seed

        with tf.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError("A DynamicVariable cannot be created in a TensorFlow 1 graph.")
            placement = place(options.var_type)
            if options.max_dram_for_vectors == 0 and placement.tier == "host":
                raise ValueError(
                    "max_dram_for_vectors=0 keeps all rows in memory on a GPU, and no GPU is used."
                )
            self._check_admission(options)
            communicator.warn_if_not_joined()
            comm = communicator.get()
            ranks = _ranks_of(mode)
            if seed is None:
                seed = _default_seed(name)
                if comm.size > 1 and context.global_seed() is not None:
                    # Scripts can give each rank another one, for the order of its data.
                    with Ranks("DynamicVariable").stage() as stage:
                        stage.say(seed)
                    seed = stage.said[0]
            attributes = {
                "tier": placement.tier,
                "max_hbm_bytes": options.max_hbm_bytes if placement.tier == "hybrid" else 0,
                **_file_attributes(options, comm.rank, comm.size),
                "key_dtype": key_type,
                "dtype": dtype,
                "dim": dim,
                "init_capacity": -(-options.init_capacity // ranks),
                "max_capacity": capacity_share(options.max_capacity or 0, ranks),
                "max_load_factor": options.max_load_factor,
                "evict_strategy": options.strategy,
                "epoch_steps": options.epoch_steps or 0,
                **options.lifetime.attributes(ranks),
                "seed": seed,
                "stochastic_rounding": options.stochastic_rounding,
                "initializers": list(initial.kinds),
                "initializer_args": list(initial.args),
                **admission_options.attributes(
                    options.admission, comm.rank, comm.size, owner_of_mode(mode)
                ),
            }
            self._resource = _make_table(placement, f"dynemb/{number}/{name}", attributes)
            # The state that the rows have. The operators know the owner that may step it.
            self._state_spec: StateSpec | None = None
            self._flushes: Flushes | None = None
            if options.persistent:
                self._flushes, restored = Flushes.open(
                    os.path.abspath(options.file_path or ""),
                    attributes["file_path"],
                    name,
                    self._resource,
                )
                self._state_spec = None if restored is None else _state_spec(*restored)
        self.has_automatic_name = isinstance(name, AutomaticName)
        self._name = name
        self._number = number
        self._dim = dim
        self._key_type: tf.DType = key_type
        self._mode = mode
        self._options = options
        self._attributes = attributes
        self._placement = placement
        self._exchange_name = f"{name}#{number}"
        self._default_vector: tuple[float, ...] | None = None
        self.padding_id: int | None = None
        # The hash that makes a key of a string; None: keys are integers.
        self.string_hash: str | None = None
        self.history = (self._flushes and self._flushes.history) or new_history()
        self.snapshots = Snapshots()
        self.cut_lock = threading.RLock()

    def _check_admission(self, options: TableOptions) -> None:
        if options.admission is not None and self.inserts_in_steps:
            raise ValueError(
                f"admission={options.admission!r} needs lookups that insert; the steps of "
                "optimizers insert into this table."
            )

    def as_keys(self, ids: TensorLike, name: str) -> tf.Tensor:
        """Returns ids, or strings if the table hashes them, as a dense tensor of keys.

        Args:
            ids: as a user passes them.
            name: the name of the argument, for errors.

        Raises:
            TypeError, ValueError: as in `ids.keys.as_keys`.
        """
        return as_keys(ids, self._key_type, name, self.string_hash)

    @property
    def dimension(self) -> int:
        """Width of the vectors."""
        return self._dim

    @property
    def key_type(self) -> tf.DType:
        """The dtype of the keys."""
        return self._key_type

    @property
    def mode(self) -> str | None:
        """How the table is spread over ranks: the argument of the constructor."""
        return self._mode

    @property
    def default_vector(self) -> tuple[float, ...] | None:
        """The vector of keys without a row, in lookups that do not insert; can be set.

        None: the vector that the key would start with. It can be set to a number or a vector
        [dimension]. Dumps record it, and readers of the dumps use it too.
        """
        return self._default_vector

    @default_vector.setter
    def default_vector(self, value: Any) -> None:
        if value is None:
            self._default_vector = None
            return
        vector = np.asarray(value, np.float64)
        if vector.shape not in ((), (self._dim,)) or not np.isfinite(vector).all():
            raise ValueError(
                f"default_vector must be a finite number or {self._dim} finite numbers, got "
                f"{value!r:.80}."
            )
        self._default_vector = tuple(np.broadcast_to(vector, self._dim).tolist())

    @property
    def spread(self) -> Spread:
        """The description of the table for an exchange between ranks."""
        # Not an attribute: that would be a reference cycle, and tables must be destroyed with their
        # last reference.
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
    def size(self) -> tf.Tensor:
        """An int64 tensor with two elements: the number of rows, and the dimension."""
        rows = _ops.library().dynemb_size(self.handle)
        return tf.stack([rows, tf.constant(self._dim, tf.int64)])

    def __len__(self) -> int:
        with tf.init_scope():
            return int(_ops.library().dynemb_size(self.handle))

    def stats(self) -> dict[str, int]:
        """Returns numbers about the table on this rank, by name.

        The state now:

        - `size`: rows held.
        - `slots`: places for rows in the index; size / slots is the load.
        - `row_bytes`: bytes of all rows: keys, times, vectors and optimizer state.
        - `index_bytes`: bytes of the index.
        - `metadata_bytes`: bytes of index, keys, times and admission counters: all except vectors
          and state.
        - `device_rows`: row places in use in GPU memory.
        - `file_rows`: rows in files, not in memory.
        - `file_bytes`, `file_row_bytes`: bytes of the files, and the bytes of rows in them that are
          in use.
        - `file_index_bytes`, `file_buffer_bytes`: bytes of memory for the index of these rows (a
          part of index_bytes), and for rows that wait to be written.

        Counts since the table was created:

        - `hits`, `misses`: ids that were looked up and had a row, or had none. Repeated ids count
          each time; with several ranks, a rank asks for each distinct id of its batch once.
        - `device_hits`: hits whose row was in GPU memory when the lookup began.
        - `promotions`: rows that were moved to GPU memory because they were read.
        - `file_hits`: rows that were moved from files to memory. `hits` counts their ids, too.
        - `file_hits_ahead`: reads of rows in files that waited for no file, because
          `prefetch_lookup` had read them.
        - `file_rows_written`: rows that were moved from memory to files.
        - `file_rows_compacted`: rows that were copied in files to give space back.
        - `file_bytes_read`, `file_bytes_written`, `file_reads`, `file_writes`: bytes and calls of
          the file system. The reads that give space back are not counted.
        - `file_errors`: errors of files in work that no call waits for, such as giving space back.
          Each of them is in TensorFlow's log, as a warning.
        - `inserts`, `evictions`, `erased`, `expired`: rows that were created, evicted by a full
          table, removed by `erase` and `forget`, and removed because they had expired.
        - `refused`: keys that a full table did not take.
        - `unadmitted`: ids that `admission` refused. Repeated ids count each time.
        - `dropped_gradients`: gradients of keys that had no row when the optimizer stepped. A
          table with `admission` does not count them.
        - `nonfinite_gradients`: rows whose gradient had a NaN or an infinity.
        - `clock_jumps`: by how many jumps the process, not the table, has seen the system's clock
          to be wrong (docs/expiry_and_admission.md).

        What this rank has sent to others for the table:

        - `keys_asked_of_other_ranks`: keys that were looked up and belong to another rank.
        - `key_bytes_sent`, `vector_bytes_sent`, `gradient_bytes_sent`, `other_bytes_sent`: bytes.
        """
        with tf.init_scope():
            return {**table_stats(self.handle), **exchange_stats(self._exchange_name)}

    def attach_state(
        self, optimizer: str, widths: Sequence[int], inits: Sequence[float], owner: str
    ) -> bool:
        """Adds space for an optimizer's state to each row; every row starts with fresh state.

        If the arguments are the same as before, nothing changes, except that restored state belongs
        to the owner from now on. An optimizer without state leaves the rows unchanged.

        Args:
            optimizer: the name of the optimizer.
            widths: floats per row of each state.
            inits: the initial value of each state.
            owner: the optimizer that steps the rows, as a text that no other optimizer of the
                process has. State that another owner left is not continued, just as a recompiled
                model in Keras starts with fresh state; that owner can no longer step the table.

        Returns:
            Whether the rows keep state that they had before: restored state, or the owner's.
        """
        spec = (optimizer, tuple(widths), tuple(inits))
        if not spec[1] and self._state_spec is not None:
            return False
        with tf.init_scope():
            is_fresh = self._take_state(spec, owner if spec[1] else "")
        had_state = self._state_spec is not None
        if is_fresh and had_state:
            # Every row has fresh state, including rows that no delta would contain.
            self.snapshots = Snapshots()
        self._state_spec = spec
        return had_state and not is_fresh and bool(spec[1])

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
        """The arguments of the DynembTable operator, without names."""
        return dict(self._attributes)

    @property
    def persistent(self) -> bool:
        """Whether the table's files survive the process: the option `persistent`."""
        return self._flushes is not None

    def flush(self) -> None:
        """Makes all rows durable, with their state, scores and times.

        A table with `persistent=True` that is created with the same name and `file_path` has the
        rows of the last flush, whenever and however the process ended. Only rows in memory and
        16 to 24 bytes for each row in files are written; the files themselves are linked. Other
        calls on the table wait meanwhile.

        The flush before is removed; until then, rows that have changed since it take space twice.
        With several ranks, all call `flush`, and all restart from the same flush.

        Raises:
            ValueError: the table was created without `persistent=True`.
            tf.errors.OpError: a file could not be written. The last flush is unchanged.
            OSError: a folder could not be created.
            RuntimeError: this is inside a `tf.function`.
        """
        flushes = self._flushes
        if flushes is None:
            raise ValueError(
                f"flush: table {self._name!r} was created without persistent=True. `dump` keeps "
                "the rows of any table."
            )
        with self.cut_lock:
            flushes.flush(self.history)

    @property
    def rows_at_a_time(self) -> int:
        """A number of rows that one call can use: if there are files, half of what memory holds."""
        if self._options.file_path is None:
            return 2**32
        state = 0 if self._state_spec is None else sum(self._state_spec[1])
        row_bytes = 16 + 4 * (self._dim + state)
        memory = self._options.max_dram_bytes
        if self._placement.tier == "hybrid":
            # In the memory of a GPU, key, vector and state begin at multiples of 16 bytes.
            row_bytes += 32
            memory += self._options.max_hbm_bytes
        return max(1, memory // (2 * row_bytes))

    def make_empty(
        self, rows: int, state_spec: StateSpec | None, seed: int | None = None
    ) -> tf.Tensor:
        """Creates another table like this one, for rows that are to replace its own.

        Args:
            rows: the expected number of rows; space for them is allocated at once.
            state_spec: the state of the rows.
            seed: the seed of the table that the rows come from, so that keys without a row get the
                initial vectors that they would have got there; None: the seed of this table. After
                the rows have been swapped, `took_over` records it.

        Returns:
            The table's handle. The table is destroyed with it.
        """
        attributes = dict(self._attributes)
        most = attributes["max_capacity"] or 2**32 - 3
        if seed is not None:
            attributes["seed"] = seed
        attributes["init_capacity"] = min(max(rows, attributes["init_capacity"]), most)
        handle = _make_table(self._placement, "", attributes)
        if state_spec is not None:
            name, widths, inits = state_spec
            _ops.library().dynemb_attach_state(
                handle, optimizer=name, widths=list(widths), inits=list(inits)
            )
        return handle

    def took_over(self, history: str | None, seed: int | None) -> None:
        """Records that the table has rows of another history, or of an unknown one, and their seed.

        Args:
            history: the history; None: unknown.
            seed: the argument of `make_empty`.
        """
        self.snapshots = Snapshots()
        self.history = history or new_history()
        if seed is not None:
            self._attributes["seed"] = seed

    def state_was_restored(self, state_spec: StateSpec | None) -> None:
        """Records which state the rows have after a restore.

        The state belongs to the next optimizer that attaches, if that optimizer keeps the same
        state.
        """
        self._state_spec = state_spec
        if state_spec is not None:
            with tf.init_scope():
                self._take_state(state_spec, owner="")


def table_stats(handle: tf.Tensor) -> dict[str, int]:
    """Returns the counters of the table with this handle; see `Table.stats`."""
    names, values = _ops.library().dynemb_stats(handle)
    return {
        name.decode(): int(value) for name, value in zip(names.numpy(), values.numpy(), strict=True)
    }


def _state_spec(optimizer: tf.Tensor, widths: tf.Tensor, inits: tf.Tensor) -> StateSpec | None:
    """The state of restored rows, of the outputs of DynembRestore."""
    name = optimizer.numpy().decode()
    return (name, tuple(widths.numpy().tolist()), tuple(inits.numpy().tolist())) if name else None


def _file_attributes(options: TableOptions, rank: int, ranks: int) -> dict[str, Any]:
    if options.file_path is None:
        return {}
    folder = os.path.abspath(options.file_path)
    rank_folder = f"{rank}-{ranks}"
    if ranks > 1 and rank_folder not in folder.split(os.sep):
        folder = os.path.join(folder, rank_folder)
    try:
        if options.persistent:
            make_durable_folder(folder)
        else:
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        text = f"file_path={options.file_path!r}: {error.strerror}"
        raise OSError(error.errno, text, folder) from error
    return {"file_path": folder, "max_dram_bytes": options.max_dram_bytes}


def _make_table(placement: Placement, shared_name: str, attributes: dict[str, Any]) -> tf.Tensor:
    with tf.device(placement.device):
        make = _ops.library().dynemb_table
        try:
            return make(container="", shared_name=shared_name, **attributes)
        except tf.errors.ResourceExhaustedError:
            gc.collect()  # Models are reference cycles: unused ones can still hold memory.
            return make(container="", shared_name=shared_name, **attributes)


def _ranks_of(mode: str | None) -> int:
    """Returns the number of ranks that hold the rows of a table."""
    return communicator.get().size if owner_of_mode(mode) is None else 1


def _one_of(name: str, value: Any, allowed: Sequence[tf.DType]) -> tf.DType:
    try:
        dtype = tf.as_dtype(value)
    except TypeError:
        dtype = None
    if dtype not in allowed:
        names = ", ".join(f"tf.{item.name}" for item in allowed)
        raise TypeError(f"{name} must be one of {names}, got {value!r}.")
    return dtype


class _Automatic:
    """The number of tables with automatic names since the global seed was set."""

    generator: Any = None  # of TensorFlow; another one whenever the seed is set
    numbers = itertools.count()


def _default_seed(name: str) -> int:
    """Returns a seed that is the same in every process that creates the same tables.

    It depends on the name, and on the global seed if there is one (`keras.utils.set_random_seed`,
    `tf.random.set_seed`). Tables with automatic names, which differ if a model is made twice in one
    process, are then numbered from the call that has set the seed.
    """
    global_seed = context.global_seed()
    if global_seed is not None and isinstance(name, AutomaticName):
        generator = getattr(context.context(), "_rng", None)
        if generator is not _Automatic.generator:
            _Automatic.generator, _Automatic.numbers = generator, itertools.count()
        name = f"automatic/{next(_Automatic.numbers)}"
    return zlib.crc32(name.encode()) ^ ((global_seed or 0) & 0x7FFFFFFF) << 31
