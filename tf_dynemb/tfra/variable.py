"""Variable and get_variable: TFRA's table over a DynamicVariable."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb._presence import local_path
from tf_dynemb.ids.keys import KEY_TYPES
from tf_dynemb.ids.types import TensorLike
from tf_dynemb.tables.table import VALUE_TYPES
from tf_dynemb.tfra import kv_files
from tf_dynemb.tfra.creators import KVCreator, table_options_of
from tf_dynemb.tfra.restrict import RestrictPolicy
from tf_dynemb.variables import transfer
from tf_dynemb.variables.dynamic import DynamicVariable

_COLLECTION = "tf_dynemb.tfra variables"


class Variable(DynamicVariable):
    """A `DynamicVariable` with the constructor and the methods of TFRA's Variable.

    Lookups give no key a row: unknown keys read as their initial vector, which depends only on the
    key and the seed. `upsert`, `accum` and the steps of an optimizer create rows. `tape.gradient`,
    `optimizer.minimize` and `apply_gradients` accept the variable itself, in place of TFRA's
    trainable wrappers.

    On several ranks (Horovod) the table is spread over all of them. Methods that take keys are
    collective, and accept any keys; `export`, `size`, `clear` and `restrict` concern this rank's
    rows. In one process there is one table, on one device.

    Args:
        key_dtype: tf.int64, tf.int32 or tf.uint64.
        value_dtype: tf.float32, tf.float16 or tf.bfloat16.
        dim: the width of the vectors.
        devices: a device or a list of one: "/CPU:0" or "/GPU:0". Several CPU devices are one.
            Default: GPU and host memory if there is a GPU, otherwise host memory.
        partitioner: accepted, without effect, like shared_name, bp_v2 and short_file_name: a table
            is not divided within a process, and steps of ranks never overwrite one another.
        shared_name: see partitioner.
        name: the name of the variable.
        initializer: a number, an array of one number or `dim` numbers, an initializer of
            TensorFlow or Keras, or a function that returns one of the first two. None: zeros.
        trainable: whether gradient tapes watch the variable.
        checkpoint: whether `tf.train.Checkpoint` saves the rows.
        init_size: the number of rows to allocate at the start.
        kv_creator: a creator of this package, for the size of the table.
        restrict_policy: a subclass of `RestrictPolicy`, for `restrict`.
        bp_v2: see partitioner.
        short_file_name: see partitioner.
        **table_options: further arguments of `DynamicVariable`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """

    inserts_in_steps = True

    def __init__(
        self,
        key_dtype: tf.DType = tf.int64,
        value_dtype: tf.DType = tf.float32,
        dim: int = 1,
        devices: str | Sequence[str] | None = None,
        partitioner: Any = None,
        shared_name: str | None = None,
        name: str = "DynamicEmbedding_Variable",
        initializer: Any = None,
        trainable: bool = True,
        checkpoint: bool = True,
        init_size: int = 0,
        kv_creator: KVCreator | None = None,
        restrict_policy: type[RestrictPolicy] | None = None,
        bp_v2: bool = False,
        short_file_name: bool = False,
        **table_options: Any,
    ) -> None:
        _check_type("key_dtype", key_dtype, KEY_TYPES, _NO_STRINGS)
        _check_type("value_dtype", value_dtype, VALUE_TYPES, "")
        device, options = _placement(devices)
        if kv_creator is not None:
            options.update(table_options_of(kv_creator))
        if restrict_policy is not None and not (
            isinstance(restrict_policy, type) and issubclass(restrict_policy, RestrictPolicy)
        ):
            raise TypeError(
                "restrict_policy must be a subclass of RestrictPolicy, got "
                f"{restrict_policy!r:.80}."
            )
        if init_size:
            options["init_capacity"] = int(init_size)
        options.update(table_options)
        self._tfra_initializer = initializer
        self._in_checkpoints = bool(checkpoint)
        with contextlib.nullcontext() if device is None else tf.device(device):
            super().__init__(
                dim,
                _initializer(initializer, dim),
                name=name,
                trainable=trainable,
                key_type=key_dtype,
                dtype=value_dtype,
                **options,
            )
        self._devices = _as_list(devices) or [self.placement.device or "/CPU:0"]
        self._restrict_policy = None if restrict_policy is None else restrict_policy(self)

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return self.dimension

    @property
    def key_dtype(self) -> tf.DType:
        """The dtype of the keys."""
        return self.key_type

    @property
    def value_dtype(self) -> tf.DType:
        """The dtype of the vectors."""
        return self.dtype

    @property
    def devices(self) -> list[str]:
        """The devices that the constructor got, or the one it chose."""
        return list(self._devices)

    @property
    def initializer(self) -> Any:
        """The constructor's argument."""
        return self._tfra_initializer

    @property
    def restrict_policy(self) -> RestrictPolicy | None:
        """The policy of `restrict`, an object; None: there is none."""
        return self._restrict_policy

    @property
    def params(self) -> Variable:
        """The variable itself, where TFRA has a wrapper around it."""
        return self

    def get_trainable_by_name(self, name: str) -> Variable:
        """Returns the variable itself: lookups of all names train it."""
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r}.")
        return self

    # The arguments are TFRA's, where they differ from DynamicVariable's.

    def lookup(  # type: ignore[override]
        self,
        keys: TensorLike,
        return_exists: bool = False,
        name: str | None = None,
        *,
        insert: bool = False,
        default_value: TensorLike | None = None,
        scores: TensorLike | None = None,
    ) -> Any:
        """Reads one vector for each key.

        Args:
            keys: integers of any shape.
            return_exists: whether to also return which keys have a row.
            name: unused.
            insert: whether unknown keys get a row.
            default_value: as in `DynamicVariable.lookup`.
            scores: as in `DynamicVariable.lookup`.

        Returns:
            [..., dim]; with `return_exists`, a tuple of it and a bool tensor of the shape of keys.
        """
        return super().lookup(keys, insert, default_value, return_exists, scores)

    def sparse_read(self, indices: TensorLike, name: str | None = None) -> tf.Tensor:
        """Same as `lookup(indices)`. `tf.gather` and `tf.nn.embedding_lookup` call it."""
        return self.lookup(indices)

    def upsert(  # type: ignore[override]
        self,
        keys: TensorLike,
        values: TensorLike,
        name: str | None = None,
        scores: TensorLike | None = None,
    ) -> tf.Operation | None:
        """Sets the vectors of keys [...], float [..., dim]; if keys repeat, the last one wins.

        `scores` are as in `set_scores`.
        """
        return super().upsert(keys, values, scores)

    @_ops.not_converted
    def accum(
        self,
        keys: TensorLike,
        old_values: TensorLike,
        new_values: TensorLike,
        exists: TensorLike,
        name: str | None = None,
    ) -> tf.Operation | None:
        """Adds `new_values - old_values` to rows, and creates rows with `new_values`.

        Args:
            keys: distinct integers [n].
            old_values: [n, dim], the vectors that the caller has read.
            new_values: [n, dim].
            exists: bool [n], whether the key had a row when it was read. A key is skipped if its
                row was created or removed since then.
            name: unused.
        """
        keys = tf.reshape(tf.convert_to_tensor(keys), [-1])
        new_values = tf.reshape(tf.cast(new_values, self.dtype), [-1, self.dim])
        deltas = new_values - tf.reshape(tf.cast(old_values, self.dtype), [-1, self.dim])
        exists = tf.reshape(tf.cast(exists, tf.bool), [-1])
        found = self.contains(keys)
        old, new = found & exists, ~(found | exists)
        with tf.control_dependencies([found]):
            added = tf.IndexedSlices(tf.boolean_mask(deltas, old), tf.boolean_mask(keys, old))
            self.scatter_add(added)
            return self.upsert(tf.boolean_mask(keys, new), tf.boolean_mask(new_values, new))

    def remove(self, keys: TensorLike, name: str | None = None) -> tf.Tensor:
        """Removes the rows of keys; returns the number of rows removed."""
        return self.erase(keys)

    def clear(self, name: str | None = None) -> tf.Operation | None:
        """Removes all rows that this rank holds."""
        return super().clear()

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns all keys [n] and vectors [n, dim] that this rank holds. Eager only."""
        return transfer.export(self)

    def size(self, index: int | None = None, name: str | None = None) -> tf.Tensor:
        """Returns the number of rows that this rank holds, an int64 scalar.

        Args:
            index: the number of a device, as in TFRA: None or 0.
            name: unused.
        """
        if index not in (None, 0):
            raise ValueError(f"index must be None or 0: {self.name} is one table, got {index!r}.")
        return _ops.library().dynemb_size(self.handle)

    def restrict(self, num_reserved: int, **kwargs: Any) -> int:
        """Removes rows until this rank holds at most `num_reserved`, as `restrict_policy` chooses.

        Args:
            num_reserved: the number of rows to keep.
            **kwargs: `trigger`: the number of rows above which rows are removed; default:
                `num_reserved`.

        Returns:
            The number of rows removed.

        Raises:
            ValueError: the variable has no `restrict_policy`.
        """
        if self._restrict_policy is None:
            raise ValueError(
                f"{self.name} has no restrict_policy: pass TimestampRestrictPolicy or "
                "FrequencyRestrictPolicy to its constructor."
            )
        return self._restrict_policy.apply_restriction(num_reserved, **kwargs)

    def save_to_file_system(
        self,
        dirpath: str,
        proc_size: int | None = None,
        proc_rank: int | None = None,
        file_name_list: Sequence[str] | None = None,
        dirpath_env: str = "TFRA_SAVED_KV",
        append_to_file: bool = False,
        buffer_size: int = 4194304,
        name: str | None = None,
    ) -> None:
        """Writes this rank's rows to a pair of TFRA's files; see `tf_dynemb.tfra.kv_files`.

        The files have neither checksums nor optimizer state: `tf_dynemb.dump` does.

        Args:
            dirpath: the folder, created if missing. The environment variable `dirpath_env`
                replaces it.
            proc_size: the number of ranks in the file's name. None: the number in this run.
            proc_rank: the rank in the file's name. None: this one's.
            file_name_list: a list of one file name without "-keys" or "-values", instead of TFRA's.
            dirpath_env: see dirpath.
            append_to_file: whether to append to existing files.
            buffer_size: unused.
            name: unused.
        """
        folder = local_path(os.environ.get(dirpath_env) or dirpath, "dirpath")
        if file_name_list is None:
            file_name = kv_files.file_name(self._plain_name(), proc_rank, proc_size)
        elif len(file_name_list) == 1 and communicator.get().size == 1:
            file_name = file_name_list[0]
        else:
            raise ValueError(
                f"file_name_list={list(file_name_list)!r} must be one name, and None with several "
                "ranks: each rank writes one pair of files."
            )
        keys, values = (part.numpy() for part in self.export())
        kv_files.write(os.path.join(folder, file_name), keys, values, append_to_file)

    def load_from_file_system(
        self,
        dirpath: str,
        proc_size: int | None = None,
        proc_rank: int | None = None,
        file_name_list: Sequence[str] | None = None,
        dirpath_env: str = "TFRA_SAVED_KV",
        load_entire_dir: bool = False,
        buffer_size: int = 4194304,
        name: str | None = None,
    ) -> None:
        """Upserts the rows of TFRA's files. Rows of other keys stay.

        Every rank reads the files of all ranks and keeps the rows that it owns, so that the number
        of ranks can differ from the number at the time of saving.

        Args:
            dirpath: the folder. The environment variable `dirpath_env` replaces it.
            proc_size: only files of this number of ranks are read. None: all.
            proc_rank: unused.
            file_name_list: file names without "-keys" or "-values", instead of TFRA's.
            dirpath_env: see dirpath.
            load_entire_dir: whether to read all files of the variable, also of several saves, in
                the order of their names.
            buffer_size: unused.
            name: unused.

        Raises:
            FileNotFoundError: the folder has no files of the variable.
            ValueError: the sizes of a pair of files do not match; or files are missing, or from
                several saves, unless `load_entire_dir` is true.
        """
        folder = local_path(os.environ.get(dirpath_env) or dirpath, "dirpath")
        if file_name_list is None:
            only = None if load_entire_dir else proc_size
            prefixes = kv_files.find(str(folder), self._plain_name(), only)
            if not load_entire_dir:
                kv_files.check_one_save(prefixes)
        else:
            prefixes = [os.path.join(folder, file_name) for file_name in file_name_list]
        pairs = [
            kv_files.read(prefix, self.key_type.as_numpy_dtype, self.dtype.as_numpy_dtype, self.dim)
            for prefix in prefixes
        ]
        for keys, values in pairs:
            kv_files.upsert_owned(self, keys, values)

    def load_from_file_system_with_restore_function(
        self,
        dirpath: str,
        proc_size: int | None = None,
        proc_rank: int | None = None,
        buffer_size: int = 4194304,
    ) -> None:
        """Same as `load_from_file_system` of all files of the variable."""
        self.load_from_file_system(dirpath, load_entire_dir=True)

    def _plain_name(self) -> str:
        return str(self.name).removesuffix(":0")

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return super()._serialize_to_tensors() if self._in_checkpoints else {}

    def _restore_from_tensors(self, tensors: dict[str, tf.Tensor]) -> None:
        if self._in_checkpoints:
            super()._restore_from_tensors(tensors)


def get_variable(name: str, *args: Any, **kwargs: Any) -> Variable:
    """Creates a `Variable`, or returns the one that has this name.

    It stays in the process, as TensorFlow's own variables of this kind do.

    Args:
        name: the name within the current `tf.compat.v1.variable_scope`.
        *args: further arguments of `Variable`, in TFRA's order: key_dtype, value_dtype, dim,
            devices, partitioner, shared_name, initializer, trainable, checkpoint, init_size,
            kv_creator, restrict_policy, bp_v2, short_file_name.
        **kwargs: the same, by name.

    Raises:
        ValueError: a variable has the name, and another dim or dtype.
    """
    arguments = dict(zip(_AFTER_NAME, args, strict=False))
    if len(args) > len(_AFTER_NAME):
        raise TypeError(f"get_variable takes {len(_AFTER_NAME) + 1} positional arguments.")
    twice = arguments.keys() & kwargs.keys()
    if twice:
        raise TypeError(f"get_variable got {', '.join(sorted(twice))} twice.")
    scope = tf.compat.v1.get_variable_scope()
    full_name = f"{scope.name}/{name}" if scope.name else name
    with tf.init_scope():
        graph = tf.compat.v1.get_default_graph()
        store = graph.get_collection_ref(_COLLECTION)
    if not store:
        store.append({})
    known: dict[str, Variable] = store[0]
    arguments.update(kwargs)
    if full_name not in known:
        known[full_name] = Variable(name=full_name, **arguments)
        return known[full_name]
    found = known[full_name]
    for attribute in ("key_dtype", "value_dtype", "dim"):
        has, wanted = getattr(found, attribute), arguments.get(attribute)
        if wanted is not None and wanted != has:
            raise ValueError(
                f"Variable {full_name} already exists, with {attribute}={has}, got {wanted}. "
                "Another table needs another name."
            )
    return found


_AFTER_NAME = (
    "key_dtype",
    "value_dtype",
    "dim",
    "devices",
    "partitioner",
    "shared_name",
    "initializer",
    "trainable",
    "checkpoint",
    "init_size",
    "kv_creator",
    "restrict_policy",
    "bp_v2",
    "short_file_name",
)
_NO_STRINGS = " Hash strings: tf.strings.to_hash_bucket_fast(strings, 2**63 - 1)."


def _check_type(name: str, value: Any, allowed: Sequence[tf.DType], hint: str) -> None:
    dtype = tf.as_dtype(value)
    if dtype not in allowed:
        names = ", ".join(f"tf.{item.name}" for item in allowed)
        hint = hint if dtype == tf.string else ""
        raise TypeError(f"{name} must be one of {names}, got tf.{dtype.name}.{hint}")


def _as_list(devices: str | Sequence[str] | None) -> list[str]:
    return [devices] if isinstance(devices, str) else list(devices or [])


def _placement(devices: str | Sequence[str] | None) -> tuple[str | None, dict[str, Any]]:
    """Returns the device to create the table under, and table options."""
    specs = [tf.DeviceSpec.from_string(device) for device in _as_list(devices)]
    if not specs:
        return None, {}
    if any(spec.job not in (None, "localhost") for spec in specs):
        raise ValueError(
            f"devices={devices!r}: there are no parameter servers. With several processes, started "
            "by `tf-dynemb run` or another launcher, a table is spread over all of them."
        )
    kinds = {(spec.device_type or "CPU").upper() for spec in specs}
    if kinds == {"CPU"}:
        return None, {"var_type": "host"}
    if kinds != {"GPU"} or len({spec.device_index for spec in specs}) > 1:
        raise ValueError(
            f"devices={devices!r}: a table is on one GPU or in host memory. For several GPUs, "
            "start one process for each, as `tf-dynemb run` does."
        )
    return specs[0].to_string(), {"var_type": "hybrid"}


def _initializer(initializer: Any, dim: int) -> Any:
    """Returns an initializer of `DynamicVariable` for one of TFRA's."""
    if initializer is None:
        return 0.0
    if callable(initializer) and not hasattr(initializer, "get_config"):
        takes_shape = bool(inspect.signature(initializer).parameters)
        initializer = initializer([dim]) if takes_shape else initializer()
    if not isinstance(initializer, (np.ndarray, np.generic, tf.Tensor, list, tuple)):
        return initializer
    numbers = np.asarray(initializer, np.float64).reshape(-1).tolist()
    if len(numbers) not in (1, dim):
        raise ValueError(
            f"initializer must be one number or {dim} numbers, got {len(numbers)} numbers."
        )
    return numbers[0] if len(numbers) == 1 else numbers
