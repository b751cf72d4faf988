"""OneEmbedding's layers over tables of this package."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.ids.keys import KEY_TYPES
from tf_dynemb.ids.types import TensorLike
from tf_dynemb.layers import multi_table_embedding
from tf_dynemb.oneembedding import places, snapshots
from tf_dynemb.oneembedding.stores import Store
from tf_dynemb.oneembedding.tables import check_tables, initializer_of
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.parallel.ownership import capacity_share
from tf_dynemb.tables.options import check_dimension, to_config
from tf_dynemb.tables.table import VALUE_TYPES


class Embedding(multi_table_embedding.MultiTableEmbedding):
    """The base of OneEmbedding's two layers, which says what they have in common.

    A layer has one table for each item of `tables`. The same id in two tables is two rows. Ids are
    int64, int32 or uint64, and every value is legal.

    Rows are created in training only, as by all layers of this package: with `training=True`, in
    `model.fit`, or under a gradient tape.

    A store in memory has a `capacity`, the number of rows of all tables and ranks together. No row
    is evicted. Each rank has room for its share and six standard deviations more, so that
    `capacity` different ids fit. When no more fit, training fails: with
    `tf.errors.ResourceExhaustedError` where one table alone is full, and with
    `tf.errors.InvalidArgumentError` where the tables of a rank are full together, at the beginning
    of the step after that. `evict_strategy="lru"` makes each table evict rows at the limit instead.

    Attributes:
        embedding_name: the name of the layer.
        embedding_dim: the width of the vectors.
        num_tables: the number of tables.
        tables: the tables, a list of `DynamicVariable`.
    """

    def __init__(
        self,
        name: str,
        embedding_dim: int | Sequence[int],
        dtype: tf.DType | str,
        key_type: tf.DType | str,
        tables: Sequence[Mapping[str, Any]] | None,
        store_options: dict[str, Any],
        default_initializer: dict[str, Any] | None = None,
        padding_idx: int | None = None,
        seed: int = 0,
        *,
        trainable: bool = True,
        **table_options: Any,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"name must be a non-empty string, got {name!r}.")
        if name in (".", "..") or "/" in name or os.sep in name:
            raise ValueError(f"name must be the name of a folder, got {name!r}.")
        columns = embedding_dim if isinstance(embedding_dim, (list, tuple)) else [embedding_dim]
        if not columns:
            raise ValueError("embedding_dim is an empty list: it needs the width of each column.")
        dims = [check_dimension("embedding_dim", dim) for dim in columns]
        if isinstance(seed, bool) or not hasattr(seed, "__index__"):
            raise TypeError(f"seed must be an integer, got {seed!r}.")
        checked = check_tables(tables, dims, default_initializer)
        ranks = communicator.get()
        store = Store.of(store_options, ranks.size)
        store_options_of_table = places.table_options(
            store, name, len(checked), ranks.rank, ranks.size
        )
        super().__init__(
            sum(dims),
            tables=[
                {
                    "initializer": initializer_of(table, dims),
                    "seed": _seed_of_table(int(seed), name, i),
                    **store_options_of_table[i],
                    **table_options,
                }
                for i, table in enumerate(checked)
            ],
            padding_id=_check_padding(padding_idx),
            key_type=_dtype("key_type", key_type, KEY_TYPES),
            name=name,
            dtype=_dtype("dtype", dtype, VALUE_TYPES).name,
            trainable=trainable,
        )
        self.embedding_name = name
        self.embedding_dim = sum(dims)
        self.num_tables = len(checked)
        self.padding_idx = self.padding_id
        self.seed = int(seed)
        self._store = store
        capacity = None if "max_capacity" in table_options else store.capacity
        self._capacity = capacity and capacity_share(capacity, ranks.size)
        self._evicts = table_options.get("evict_strategy", "none") != "none"
        # As text: Keras would wrap a dict, and a user can change the dicts that were passed.
        self._arguments = json.dumps(
            {
                "name": name,
                "embedding_dim": dims if isinstance(embedding_dim, (list, tuple)) else dims[0],
                "dtype": self.variable_dtype,
                "key_type": self.key_type.name,
                "tables": checked,
                "store_options": store_options,
                "padding_idx": self.padding_idx,
                "seed": self.seed,
                **to_config(table_options),
            },
            default=_plain,
        )

    def call(
        self, inputs: tf.Tensor, table_ids: tf.Tensor | None = None, training: bool | None = None
    ) -> tf.Tensor:
        """Looks up ids.

        Args:
            inputs: integers: [batch, tables], column i for table i; or of any shape, with
                `table_ids` or if there is one table.
            table_ids: integers of the same shape: the table of each id.
            training: whether ids without a row get one.

        Returns:
            Vectors: the shape of the ids + [embedding_dim].

        Raises:
            TypeError: the ids are ragged or sparse, or no integers.
            ValueError: the shapes do not fit.
            tf.errors.InvalidArgumentError: a table id is not the number of a table.
        """
        ids = self._ids(inputs)
        if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
            raise TypeError(
                f"Layer {self.name} needs ids as a dense tensor, got a {type(ids).__name__}. Pad "
                "it (padding_idx), or use tf_dynemb.layers.MultiTableEmbedding."
            )
        if table_ids is not None:
            return super().call(ids, table_ids, training)
        if self.num_tables == 1:
            (vectors,) = self._vectors(self._weights, [tf.reshape(ids, [-1])], training)
            output = tf.reshape(vectors, tf.concat([tf.shape(ids), [self.dim]], 0))
            output.set_shape(ids.shape.concatenate([self.dim]))
            return output
        if ids.shape.rank != 2 or ids.shape[1] not in (None, self.num_tables):
            raise ValueError(
                f"Layer {self.name} needs ids of the shape [batch, {self.num_tables}], one column "
                f"for each table, or table_ids, got ids of the shape {ids.shape}."
            )
        return super().call(ids, None, training)

    def forward(self, ids: TensorLike, table_ids: TensorLike | None = None) -> tf.Tensor:
        """Same as calling the layer; ids can be a list, too."""
        if isinstance(ids, (list, tuple)):
            ids = tf.convert_to_tensor(ids, self.key_type)
        if isinstance(table_ids, (list, tuple)):
            table_ids = tf.convert_to_tensor(table_ids, tf.int32)
        return self(ids, table_ids=table_ids)

    def _vectors(
        self, tables: Sequence[keras.Variable], ids: Sequence[tf.Tensor], training: bool | None
    ) -> list[tf.Tensor]:
        # The limit of a table is its own; this is the limit of all tables together.
        if self.num_tables == 1 or self._capacity is None or not self._insert(training):
            return super()._vectors(tables, ids, training)
        if self._evicts:
            return super()._vectors(tables, ids, training)
        rows = tf.add_n([_ops.library().dynemb_size(table.handle) for table in self.tables])
        message = (
            f"Layer {self.name} is full: its tables have more than {self._capacity} rows on this "
            f"rank. Raise the capacity in store_options, which is {self._store.capacity} rows."
        )
        check = tf.debugging.Assert(rows <= self._capacity, [message, rows])
        with tf.control_dependencies([] if check is None else [check]):
            return super()._vectors(tables, [tf.identity(flat) for flat in ids], training)

    def save_snapshot(self, snapshot_name: str, optimizer: OptimizerWrapper | None = None) -> None:
        """Writes all rows of the tables, with optimizer state, as a snapshot.

        It is a dump of all ranks in `<persistent_path>/snapshots/<snapshot_name>/<name>`, which any
        number of ranks can load, and readers of dumps can read; its tables are named "table_0",
        "table_1", and so on. A snapshot of this name is replaced when the new one is complete. With
        a list as `persistent_path`, it is below the first path, which all ranks must share. All
        ranks call this.

        Args:
            snapshot_name: the name of a folder.
            optimizer: the `OptimizerWrapper` whose state is saved. None: the one that trains the
                tables, if there is one.

        Raises:
            TypeError, ValueError: `snapshot_name` is no name of a folder, or several optimizers
                train the tables and none was passed.
            OSError, RuntimeError: as in `tf_dynemb.dump`.
        """
        folder, tables = self._store.snapshots, self._named_tables()
        snapshots.save(folder, snapshot_name, self.embedding_name, tables, optimizer)

    def load_snapshot(self, snapshot_name: str, optimizer: OptimizerWrapper | None = None) -> None:
        """Replaces the rows of the tables by the rows of a snapshot. All ranks call this.

        Args:
            snapshot_name: the name that was passed to `save_snapshot`.
            optimizer: the `OptimizerWrapper` that continues from the snapshot's state, step and
                learning rate, as in `tf_dynemb.load`. None: the one that trains the tables. Before
                its first step none does, and the rows start with fresh state; the layer warns if
                that loses state.

        Raises:
            FileNotFoundError: there is no such snapshot; the message lists the snapshots that are
                there.
            ValueError: the snapshot is of tables of another number, width or type.
            tf_dynemb.storage.DataLossError: a file is damaged.
            TypeError, RuntimeError: as in `tf_dynemb.load`.
        """
        folder, tables = self._store.snapshots, self._named_tables()
        snapshots.load_into(folder, snapshot_name, self.embedding_name, tables, optimizer)

    def _named_tables(self) -> dict[str, Any]:
        return {f"table_{i}": table for i, table in enumerate(self.tables)}

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {**json.loads(self._arguments), "trainable": self.trainable}


@keras.saving.register_keras_serializable(package="tf_dynemb_oneembedding")
class MultiTableEmbedding(Embedding):
    """Tables of vectors of one width, in one layer.

    Example:
    >>> import tf_dynemb.oneembedding as one_embedding
    >>> options = one_embedding.make_cached_host_mem_store_options(64, "embedding", capacity=1000)
    >>> initializer = one_embedding.make_uniform_initializer(low=-0.1, high=0.1)
    >>> tables = [one_embedding.make_table_options(initializer)] * 2
    >>> layer = MultiTableEmbedding("ads", 4, "float32", "int64", tables, options)
    >>> layer(tf.constant([[5, 5], [6, 5]]), training=True).shape
    TensorShape([2, 2, 4])
    >>> [len(table) for table in layer.tables]
    [2, 1]

    Args:
        name: the name of the layer. Embeddings that share a `persistent_path` need different names.
        embedding_dim: the width of the vectors.
        dtype: the type of the vectors: float32, float16 or bfloat16, by name or as a dtype of
            TensorFlow or numpy.
        key_type: the type of the ids: int64, int32 or uint64.
        tables: a list with the options of each table, from `make_table_options`. None: one table.
        store_options: where rows are stored, from a `make_..._store_options` function.
        default_initializer: the initializer of the table if `tables` is None. Default: N(0, 0.05).
        padding_idx: an id that reads as zeros, has no gradient and gets no row, in every table.
        seed: with `name` and the number of the table, it determines the initial vector of each id,
            on any number of ranks and in any order.
        trainable: whether the tables are trained.
        **table_options: the fields of `TableOptions` for all tables, which override the options
            that follow from `store_options`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        dtype: tf.DType | str,
        key_type: tf.DType | str,
        tables: Sequence[Mapping[str, Any]] | None,
        store_options: dict[str, Any],
        default_initializer: dict[str, Any] | None = None,
        padding_idx: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if isinstance(embedding_dim, (list, tuple)):
            raise TypeError(
                f"embedding_dim must be a positive integer, got {embedding_dim!r}; "
                "MultiTableMultiColumnEmbedding takes the widths of several columns."
            )
        super().__init__(
            name,
            embedding_dim,
            dtype,
            key_type,
            tables,
            store_options,
            default_initializer,
            padding_idx,
            seed,
            **options,
        )


@keras.saving.register_keras_serializable(package="tf_dynemb_oneembedding")
class MultiTableMultiColumnEmbedding(Embedding):
    """Tables of vectors with columns: ranges of elements, each with its own initializer.

    A vector is the columns in their order; for Wide & Deep, a column of width 1 and a wide one.

    Args:
        name: as in `MultiTableEmbedding`, like all arguments except the next.
        embedding_dim: the widths of the columns, a list; or one width.
        *args: the further arguments of `MultiTableEmbedding`. Each table of `tables` has one
            initializer, or one for each column (`make_table_options([make_column_options(...),
            ...])`).
        **options: the same, by name.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """

    def __init__(
        self, name: str, embedding_dim: int | Sequence[int], *args: Any, **options: Any
    ) -> None:
        super().__init__(name, embedding_dim, *args, **options)


def _dtype(name: str, value: Any, allowed: Sequence[tf.DType]) -> tf.DType:
    try:
        dtype = tf.as_dtype(value)
    except TypeError:
        dtype = None
    if dtype not in allowed:
        names = ", ".join(each.name for each in allowed)
        raise TypeError(f"{name} must be one of {names}, got {value!r}.")
    return dtype


def _plain(value: Any) -> Any:
    """Returns a number of numpy, or a path, as JSON can express it."""
    return value.item() if hasattr(value, "item") else os.fspath(value)


def _check_padding(padding_idx: Any) -> int | None:
    if padding_idx is not None and (
        isinstance(padding_idx, bool) or not hasattr(padding_idx, "__index__")
    ):
        raise TypeError(f"padding_idx must be an integer or None, got {padding_idx!r}.")
    return padding_idx


def _seed_of_table(seed: int, name: str, table: int) -> int:
    """Returns a seed that differs between tables, so that one id starts differently in each."""
    digest = hashlib.blake2b(f"{seed} {table} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
