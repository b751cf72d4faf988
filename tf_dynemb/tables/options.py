"""The options of a table: names, meanings, checks."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import os
from collections.abc import Mapping
from typing import Any, TypedDict

from tf_dynemb._presence import local_path
from tf_dynemb.format.strategies import STRATEGIES
from tf_dynemb.tables import admission_options
from tf_dynemb.tables.expiry import Lifetime

VAR_TYPES = ("hbm", "hybrid", "host", "file")
# Our names, and HierarchicalKV's.
EVICT_STRATEGIES = {name: name for name in STRATEGIES} | {
    strategy.hkv_name: name for name, strategy in STRATEGIES.items() if strategy.hkv_name
}
EXCHANGE_DTYPES = ("float16", "bfloat16", "int8")
_HBM_GB = 16  # max_hbm_for_vectors, unless it is given
_DRAM_GB = 1  # max_dram_for_vectors, unless it is given


class TableArguments(TypedDict, total=False):
    """The fields of `TableOptions` except `var_type`, as keyword arguments that editors know."""

    init_capacity: int
    max_capacity: int | None
    max_load_factor: float
    evict_strategy: str
    epoch_steps: int | None
    seed: int | None
    stochastic_rounding: bool
    exchange_dtype: str | None
    filter_ratio: float
    max_hbm_for_vectors: float | None
    max_dram_for_vectors: float | None
    file_path: str | os.PathLike[str] | None
    persistent: bool
    ttl: datetime.timedelta | int | None
    ttl_clock: str | None
    ttl_since: str
    ttl_min_rows: int
    admission: admission_options.Admission | None


class LayerArguments(TableArguments, total=False):
    """The keyword arguments of a layer for its tables, and of `keras.layers.Layer`."""

    var_type: str
    name: str | None
    dtype: Any
    trainable: bool
    activity_regularizer: Any


class Signature:
    """The `__signature__` of classes whose constructors take options of tables by keyword.

    `help`, `inspect.signature` and notebooks then show each option with its default.

    Args:
        arguments: the type of the last argument, `**table_options`.
    """

    def __init__(self, arguments: type) -> None:
        self._arguments = arguments

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        """Returns the signature of the constructor of the class, which may be a user's own."""
        if instance is not None:  # it would be the signature of its calls
            raise AttributeError("__signature__")
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        defaults = {field.name: field.default for field in dataclasses.fields(TableOptions)}
        defaults |= {"name": None, "dtype": None, "trainable": True, "activity_regularizer": None}
        parameters = list(signature.parameters.values())[1:]
        if parameters and parameters[-1].name == "table_options":
            del parameters[-1]
            known = {parameter.name for parameter in parameters}
            parameters += [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name])
                for name in self._arguments.__annotations__
                if name not in known
            ]
        return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


@dataclasses.dataclass(frozen=True)
class TableOptions:
    """The layout and growth of one table.

    Attributes:
        var_type: where rows are stored.
            "hbm": in GPU memory. Without a GPU, creating the table raises ValueError.
            "hybrid": the first rows, as far as max_hbm_for_vectors allows, in GPU memory, and later
            those that lookups read; all others in host memory, or, with `file_path`, as far as
            max_dram_for_vectors allows, and the rest in files. Without a GPU, or under
            `tf.device("CPU")`, it is the same as "host", or "file" with `file_path`.
            "host": in host memory.
            "file": in host memory, as far as max_dram_for_vectors allows, and the others in files
            in the folder `file_path`. Rows that are used move to memory, and the rows that have not
            been used for longest leave it. See docs/larger_than_memory.md.
        init_capacity: the number of rows for which index and memory are allocated at the start; any
            positive integer. With several ranks, this and all other numbers of rows count the rows
            of all ranks together, and each rank has its share.
        max_capacity: the maximum number of rows; None: no limit. `evict_strategy` determines the
            behavior of a table that is full. With several ranks, a rank has room for its share and
            six standard deviations, so that `max_capacity` different ids find a place wherever they
            belong.
        max_load_factor: the share of the index slots in use at which a segment splits, in
            [0.05, 0.95].
        evict_strategy: which row a full table evicts to insert a key, of about 28 rows that it
            compares. Rows of the running batch are never evicted. docs/choosing_what_stays.md
            compares the strategies.
            "lru" (also "kLru"): the least recently used one, on average one of the oldest 9% of the
            table.
            "lfu" ("kLfu"): the one whose key lookups that insert have asked for least often. A
            repeated id counts each time; evaluation and serving do not count.
            "epoch_lru" ("kEpochLru"): the same as "lru", because epochs are in the order of time.
            "epoch_lfu" ("kEpochLfu"): the row with the lowest count, among the rows that were not
            looked up for most epochs. See `epoch_steps`.
            "score" ("kCustomized"): the one with the lowest score. The caller sets the scores
            (`set_scores`); a new row has the score 0.
            "none": none; the call raises tf.errors.ResourceExhaustedError.
        epoch_steps: the number of steps in an epoch of "epoch_lru" or "epoch_lfu". A step is a
            lookup that can insert; the tables of one `lookup_sparse` have one step each. None:
            epochs begin with `advance_epoch()` only.
        seed: the seed of the initial vectors. None: the initializer's own seed, or otherwise one
            derived from the table's name and the global seed (`keras.utils.set_random_seed`), which
            several ranks take from rank 0. With a global seed, tables without a name are numbered
            from the call that has set it. A load takes over the seed of the rows.
        stochastic_rounding: whether float16 and bfloat16 rows are rounded stochastically when they
            are updated. The random bits depend on the seed, the key and the optimizer's step, so
            training is reproducible, regardless of reads in between.
        exchange_dtype: the wire type of vectors and gradients between ranks: "float16" or
            "bfloat16" (rounded to nearest), "int8" (with a scale for each vector; the error is at
            most 1/254 of its largest element), or None (unchanged). Tables of 16-bit vectors use
            their own type unless it is "int8".
        filter_ratio: the probability, in [0, 1], that a lookup with `use_low_frequency_filter`
            admits an id whose key has no row.
        max_hbm_for_vectors: the GB (2^30 bytes) of GPU memory that the rows of a "hybrid" table may
            occupy, vectors and optimizer state, allocated as needed. 0: all rows are in host
            memory, but their index, keys and times are in GPU memory. None: 16. Other types ignore
            it.
        max_dram_for_vectors: the GB (2^30 bytes) of host memory that the rows of a table with
            `file_path` may occupy: keys, vectors and optimizer state. The rows of one step must fit
            in it, together with max_hbm_for_vectors if a GPU is used. The index of the rows in
            files takes 16 to 24 bytes a row besides. 0, for "hybrid" only: all rows in memory are
            in GPU memory. None: 1.
        file_path: the folder for rows that are not in memory, on a fast local disk. It is created
            if it is missing, and several tables may share it. With several ranks, each has its own
            folder in it, "<rank>-<ranks>", unless the path names that. The files are deleted with
            the table, except with `persistent`. var_type "file" needs it, and "hybrid" accepts it.
        persistent: whether rows in `file_path` survive the process. `flush()` makes all rows
            durable; a table that is then created with the same name, `file_path` and number of
            ranks begins with the rows of the last flush, even if the process was killed. The table
            needs a name. With several ranks, its creation is a collective call.
        ttl: the age at which a row expires: a `datetime.timedelta`, or a number of steps. A step is
            a call on this table that can insert rows. An expired row reads as if it had never been
            there. Batches reclaim its memory bit by bit, and `expire()` at once; until then `size`
            counts it. Dumps leave it out, and deltas carry its deletion. A row never expires early,
            and at most ttl / 1024 late. None: rows do not expire.
        ttl_clock: what ages rows: "wall", the time that passes (the default for a timedelta);
            "steps" (the default for an integer); or "data", the time that `set_data_time` sets.
            With "data" and an integer ttl, times are integers in a unit of your choice.
        ttl_since: "update": a row's age counts from its last update: its insertion, a step of an
            optimizer, `upsert`, ... "access": from its last use, lookups included. The table must
            record it: "lru", "epoch_lru" or "none" as evict_strategy.
        ttl_min_rows: nothing expires while the table has at most this number of rows, unreclaimed
            ones included.
        admission: which keys get a row: `Frequency`, `Probability`, or None: every key that a
            lookup that inserts asks for. A key that is not admitted has no row and gets no
            gradient, and is not an error.
    """

    var_type: str = "hybrid"
    init_capacity: int = 1024
    max_capacity: int | None = None
    max_load_factor: float = 0.88
    evict_strategy: str = "lru"
    epoch_steps: int | None = None
    seed: int | None = None
    stochastic_rounding: bool = True
    exchange_dtype: str | None = None
    filter_ratio: float = 1.0
    max_hbm_for_vectors: float | None = None
    max_dram_for_vectors: float | None = None
    file_path: str | None = None
    persistent: bool = False
    ttl: datetime.timedelta | int | None = None
    ttl_clock: str | None = None
    ttl_since: str = "update"
    ttl_min_rows: int = 0
    admission: admission_options.Admission | None = None

    @classmethod
    def create(cls, var_type: str, options: Mapping[str, Any]) -> TableOptions:
        """Checks `options` and returns them as one object.

        Raises:
            ValueError: an option is unknown, or a value is out of range; the message names both.
            NotImplementedError: an option is set that this build does not support.
        """
        known = {field.name for field in dataclasses.fields(cls)} - {"var_type"}
        for name, value in options.items():
            if name not in known:
                raise ValueError(
                    f"Unknown table option {name}={value!r}; known: {', '.join(sorted(known))}."
                )
        return cls(var_type=var_type, **options)

    def __post_init__(self) -> None:
        if self.var_type not in VAR_TYPES:
            raise ValueError(
                f"var_type must be one of {', '.join(VAR_TYPES)}, got {self.var_type!r}."
            )
        self._check_files()
        _check_integer("init_capacity", self.init_capacity, 1)
        if self.max_capacity is not None:
            _check_integer("max_capacity", self.max_capacity, 1)
            if self.init_capacity > self.max_capacity:
                if self.init_capacity != type(self).init_capacity:
                    raise ValueError(
                        f"init_capacity={self.init_capacity} is above "
                        f"max_capacity={self.max_capacity}."
                    )
                object.__setattr__(self, "init_capacity", self.max_capacity)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63))
        if not _is_number(self.max_load_factor) or not 0.05 <= self.max_load_factor <= 0.95:
            raise ValueError(
                f"max_load_factor must be in [0.05, 0.95], got {self.max_load_factor!r}."
            )
        if self.evict_strategy not in EVICT_STRATEGIES:
            raise ValueError(
                f"evict_strategy must be one of {', '.join(EVICT_STRATEGIES)}, "
                f"got {self.evict_strategy!r}."
            )
        if self.epoch_steps is not None:
            _check_integer("epoch_steps", self.epoch_steps, 1)
            if not self.has_epochs:
                raise ValueError(
                    f"epoch_steps={self.epoch_steps} needs evict_strategy 'epoch_lru' or "
                    f"'epoch_lfu', got {self.evict_strategy!r}."
                )
        if isinstance(self.ttl, Mapping):  # from `to_config`
            object.__setattr__(self, "ttl", datetime.timedelta(**self.ttl))
        _ = self.lifetime  # checks the options of expiry
        if not isinstance(self.stochastic_rounding, bool):
            raise ValueError(
                f"stochastic_rounding must be True or False, got {self.stochastic_rounding!r}."
            )
        check_exchange_dtype(self.exchange_dtype)
        if not _is_number(self.filter_ratio) or not 0 <= self.filter_ratio <= 1:
            raise ValueError(f"filter_ratio must be in [0, 1], got {self.filter_ratio!r}.")
        object.__setattr__(self, "admission", admission_options.as_admission(self.admission))
        if self.admission is not None and self.filter_ratio != 1:
            raise ValueError(
                f"admission={self.admission!r} and filter_ratio={self.filter_ratio!r} both decide "
                "which keys get a row: use one of them."
            )
        limit = self.max_hbm_for_vectors
        if limit is not None and (not _is_number(limit) or not 0 <= limit < 2**32):
            raise ValueError(
                f"max_hbm_for_vectors must be a number of GB in [0, 2^32), got {limit!r}."
            )

    def _check_files(self) -> None:
        path, limit = self.file_path, self.max_dram_for_vectors
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"file_path must be the name of a folder, got {path!r}.")
        if path is not None:
            text = os.fspath(path)
            if not text or "\0" in text:
                raise ValueError(f"file_path must be the name of a folder, got {path!r}.")
            object.__setattr__(self, "file_path", str(local_path(path, "file_path")))
        if self.var_type == "file" and path is None:
            raise ValueError(
                "var_type='file' needs file_path, the folder for rows that are not in memory."
            )
        if path is not None and self.var_type not in ("file", "hybrid"):
            raise ValueError(
                f"file_path={path!r} needs var_type 'file' or 'hybrid', got {self.var_type!r}."
            )
        if not isinstance(self.persistent, bool):
            raise TypeError(f"persistent must be True or False, got {self.persistent!r}.")
        if self.persistent and path is None:
            raise ValueError("persistent=True needs file_path, the folder for the rows.")
        if limit is None:
            return
        if not _is_number(limit) or not 0 <= limit < 2**32:
            raise ValueError(
                f"max_dram_for_vectors must be a number of GB in [0, 2^32), got {limit!r}."
            )
        if limit == 0 and self.var_type != "hybrid":
            raise ValueError(
                "max_dram_for_vectors=0 needs var_type 'hybrid', whose rows in memory are then all "
                f"in GPU memory, got {self.var_type!r}."
            )
        if path is None:
            raise ValueError(
                f"max_dram_for_vectors={limit!r} needs file_path, the folder for the other rows. "
                "max_capacity limits the number of rows of a table without files."
            )

    @property
    def strategy(self) -> str:
        """`evict_strategy`, by our name."""
        return EVICT_STRATEGIES[self.evict_strategy]

    @property
    def has_scores(self) -> bool:
        """Whether a row has a score other than the time of its last access."""
        return STRATEGIES[self.strategy].has_scores

    @property
    def counts_keys(self) -> bool:
        """Whether the table counts how often lookups that insert have asked for a key."""
        return STRATEGIES[self.strategy].counts_keys

    @property
    def has_epochs(self) -> bool:
        """Whether the table has epochs, which `advance_epoch` or `epoch_steps` begins."""
        return STRATEGIES[self.strategy].has_epochs

    @property
    def lifetime(self) -> Lifetime:
        """How long rows live: `ttl` and the options that begin with `ttl_`."""
        return Lifetime.of(
            self.ttl, self.ttl_clock, self.ttl_since, self.ttl_min_rows, self.has_scores
        )

    @property
    def max_hbm_bytes(self) -> int:
        """`max_hbm_for_vectors` in bytes."""
        limit = self.max_hbm_for_vectors
        return int((_HBM_GB if limit is None else limit) * 2**30)

    @property
    def max_dram_bytes(self) -> int:
        """`max_dram_for_vectors` in bytes."""
        limit = self.max_dram_for_vectors
        return int((_DRAM_GB if limit is None else limit) * 2**30)


def to_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options in a form that JSON can express, and that `TableOptions` accepts."""
    config = admission_options.to_config(options)
    if isinstance(config.get("ttl"), datetime.timedelta):
        config["ttl"] = {"microseconds": config["ttl"] // datetime.timedelta(microseconds=1)}
    if isinstance(config.get("file_path"), os.PathLike):
        config["file_path"] = os.fspath(config["file_path"])
    return config


def check_dimension(name: str, value: Any) -> int:
    """Returns the width of vectors as an int; raises unless it is a positive integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a positive integer, got {value!r}.")
    _check_integer(name, value.__index__(), 1)
    return int(value)


def check_exchange_dtype(value: Any) -> None:
    """Raises ValueError unless `value` is None or one of EXCHANGE_DTYPES."""
    if value not in (None, *EXCHANGE_DTYPES):
        raise ValueError(
            f"exchange_dtype must be None or one of {', '.join(EXCHANGE_DTYPES)}, got {value!r}."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_integer(name: str, value: Any, smallest: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    if not smallest <= value.__index__() < 2**63:
        raise ValueError(
            f"{name} must be an integer of {smallest} or more (63 bits), got {value!r}."
        )
