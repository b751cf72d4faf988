"""TFRA's Keras layers over tables of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dynemb.ids.bags import Bags, no_weights
from tf_dynemb.ids.types import Ids
from tf_dynemb.layers.base import TableLayer
from tf_dynemb.layers.input_dtype import check_input_dtype
from tf_dynemb.lookup.lookup_sparse import check_max_norm, lookup_bags
from tf_dynemb.lookup.pool import clip_norms
from tf_dynemb.tfra.creators import table_options_of
from tf_dynemb.tfra.modes import is_inference
from tf_dynemb.tfra.restrict import POLICIES
from tf_dynemb.tfra.variable import Variable

# The pooling that a table's lookup does itself, by TFRA's names.
_FIELD_COMBINERS = {"sum": "sum", "mean": "mean", "sqrt_n": "sqrtn", "sqrtn": "sqrtn"}


@keras.saving.register_keras_serializable(package="tf_dynemb_tfra")
class Embedding(TableLayer):
    """Turns ids into vectors. A layer call gives no id a row; the optimizer's step does.

    `layer.params` is the `Variable`.

    Args:
        embedding_size: the width of the vectors.
        key_dtype: tf.int64, tf.int32 or tf.uint64; or tf.string, for strings that are hashed to
            int64 keys by `tf.strings.to_hash_bucket_fast(ids, 2**63 - 1)`.
        value_dtype: the dtype of the vectors and of the output. None: the layer's dtype.
        combiner: how `SquashedEmbedding` and `FieldWiseEmbedding` pool vectors.
        initializer: see `Variable`. None: `keras.initializers.RandomNormal()`.
        devices: see `Variable`.
        name: the name of the layer; the table's is name + "-parameter".
        with_unique: unused: repeated ids are always looked up once.
        short_file_name: unused.
        **kwargs: trainable, restrict_policy (or its name), init_capacity, kv_creator, checkpoint,
            for the table; max_norm, as in `tfra.embedding_lookup`; the fields of `TableOptions`;
            bp_v2, partitioner, distribute_strategy and keep_distribution, which are unused.

    Input: integers of any shape, dense or ragged. Output: ids.shape + [embedding_size].
    """

    def __init__(
        self,
        embedding_size: int,
        key_dtype: tf.DType | str = tf.int64,
        value_dtype: tf.DType | str | None = None,
        combiner: str = "sum",
        initializer: Any = None,
        devices: str | Sequence[str] | None = None,
        name: str | None = None,
        with_unique: bool = True,
        short_file_name: bool = False,
        **kwargs: Any,
    ) -> None:
        for unused in ("bp_v2", "partitioner", "distribute_strategy", "keep_distribution"):
            kwargs.pop(unused, None)
        policy = kwargs.pop("restrict_policy", None)
        if isinstance(policy, str):
            if policy not in POLICIES:
                raise ValueError(
                    f"restrict_policy must be a class or one of {', '.join(POLICIES)}, got "
                    f"{policy!r}."
                )
            policy = POLICIES[policy]
        self._variable_options: dict[str, Any] = {
            "restrict_policy": policy,
            "checkpoint": kwargs.pop("checkpoint", True),
            "devices": devices,
        }
        creator = kwargs.pop("kv_creator", None)
        if creator is not None:
            kwargs = {**table_options_of(creator), **kwargs}
        if kwargs.get("init_capacity", 1) == 0:  # TFRA's default
            del kwargs["init_capacity"]
        max_norm = check_max_norm(kwargs.pop("max_norm", None))
        has_strings = tf.as_dtype(key_dtype) == tf.string
        if value_dtype is not None:
            kwargs["dtype"] = tf.as_dtype(value_dtype).name
        super().__init__(
            embedding_size,
            initializer=keras.initializers.RandomNormal() if initializer is None else initializer,
            key_type=tf.int64 if has_strings else key_dtype,
            hash_strings=has_strings,
            padding_id=None,
            default_vector=None,
            embeddings_regularizer=None,
            embeddings_constraint=None,
            table_options=kwargs,
            **({} if name is None else {"name": name}),
        )
        self.embedding_size = self.dim
        self.combiner = combiner
        self.max_norm = max_norm
        self._weight = self._add_table("parameter")

    @property
    def params(self) -> Variable:
        """The table."""
        variable: Variable = self._weight.value
        return variable

    def _make_table(self, name: str, dim: int, options: dict[str, Any]) -> Variable:
        return Variable(
            self.key_type,
            self.table_dtype,
            dim,
            name=f"{self.name}-parameter",
            **self._variable_options,
            **options,
        )

    def _insert(self, training: bool | None) -> bool:
        return False

    def call(self, inputs: Ids) -> tf.Tensor | tf.RaggedTensor:
        """Looks up ids; see the class for shapes."""
        ids = self._ids(inputs)
        if isinstance(ids, tf.SparseTensor):
            raise TypeError(f"Layer {self.name} needs dense or ragged ids, got a SparseTensor.")
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self._lookup(ids.flat_values))
        return self._lookup(ids)

    def _lookup(self, ids: tf.Tensor) -> tf.Tensor:
        vectors = clip_norms(self.params.lookup(ids), self.max_norm)
        return self._output(vectors)

    def _output(self, vectors: tf.Tensor) -> tf.Tensor:
        vectors = tf.cast(vectors, self.compute_dtype)
        return tf.stop_gradient(vectors) if is_inference() else vectors

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Returns the shape of the output."""
        return (*input_shape, self.embedding_size)

    def compute_output_spec(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Returns the shape and dtype of the output."""
        check_input_dtype(self, inputs)
        shape = self.compute_output_shape(inputs.shape)
        ragged = bool(getattr(inputs, "ragged", False)) and len(shape) > len(inputs.shape)
        return keras.KerasTensor(shape, dtype=self.compute_dtype, ragged=ragged)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor; kv_creator as table options, no devices."""
        config = super().get_config()
        base_arguments = ("dim", "padding_id", "default_vector", "hash_strings", "key_type")
        for name in (*base_arguments, "embeddings_regularizer", "embeddings_constraint"):
            del config[name]
        config["key_dtype"] = "string" if self.hash_strings else self.key_type.name
        policy = self._variable_options["restrict_policy"]
        if policy is not None:
            is_known = POLICIES.get(policy.__name__) is policy
            config["restrict_policy"] = policy.__name__ if is_known else policy
        config["checkpoint"] = self._variable_options["checkpoint"]
        return {
            **config,
            "embedding_size": self.embedding_size,
            "combiner": self.combiner,
            "max_norm": self.max_norm,
        }


BasicEmbedding = Embedding


@keras.saving.register_keras_serializable(package="tf_dynemb_tfra")
class SquashedEmbedding(Embedding):
    """Looks up ids and pools the vectors of each sample into one.

    The arguments are the same as for `Embedding`. `combiner` is the end of the name of a function
    `tf.math.reduce_<combiner>`, such as "sum", "mean", "min", "max", "prod" and "std".

    Input: integers [batch, ...]. Output: [batch, embedding_size]; for ids [n], [embedding_size].
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reduce: Any = getattr(tf.math, f"reduce_{self.combiner}", None)
        if self._reduce is None:
            raise ValueError(
                f"combiner must be the end of a name tf.math.reduce_..., got {self.combiner!r}."
            )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Looks up ids; see the class for shapes."""
        vectors = super().call(inputs)
        if vectors.shape.rank < 2:
            raise ValueError(f"Layer {self.name} needs ids of rank 1 or more.")
        if vectors.shape.rank == 2:
            return self._reduce(vectors, 0)
        while vectors.shape.rank > 2:
            vectors = self._reduce(vectors, 1)
        return vectors

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Returns the shape of the output."""
        return (*input_shape[:1], self.embedding_size)[-2 if len(input_shape) > 1 else -1 :]


@keras.saving.register_keras_serializable(package="tf_dynemb_tfra")
class FieldWiseEmbedding(Embedding):
    """Looks up ids and pools the vectors of each field of a sample into one.

    Args:
        embedding_size: the width of the vectors.
        nslots: the number of fields.
        slot_map_fn: a function of a tensor of ids, which returns the field of each: integers in
            [0, nslots), of the shape of the ids.
        *args: the further arguments of `Embedding`; its combiner is "sum", "mean" or "sqrt_n".
        **kwargs: the same, by name.

    Input: integers [batch, ids]. Output: [batch, nslots, embedding_size], zeros for a field without
    ids.

    Raises:
        ValueError: `slot_map_fn` is not callable, or the combiner is another.
    """

    def __init__(
        self,
        embedding_size: int,
        nslots: int,
        slot_map_fn: Callable[[tf.Tensor], tf.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not callable(slot_map_fn):
            raise ValueError(f"slot_map_fn must be callable, got {slot_map_fn!r}.")
        super().__init__(embedding_size, *args, **kwargs)
        if self.combiner not in _FIELD_COMBINERS:
            raise ValueError(f"combiner must be sum, mean or sqrt_n, got {self.combiner!r}.")
        self.nslots = int(nslots)
        self.slot_map_fn = slot_map_fn

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Looks up ids; see the class for shapes."""
        ids = self._ids(inputs)
        if not tf.is_tensor(ids) or isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
            raise TypeError(f"Layer {self.name} needs dense ids, got a {type(ids).__name__}.")
        if ids.shape.rank != 2:
            raise ValueError(f"Layer {self.name} needs ids [batch, ids], got {ids.shape}.")
        batch = tf.shape(ids, tf.int64)[0]
        slots = tf.cast(self.slot_map_fn(ids), tf.int64)
        in_range = tf.reduce_all((slots >= 0) & (slots < self.nslots))
        message = f"slot_map_fn of layer {self.name} must return numbers in [0, {self.nslots})"
        check = tf.debugging.Assert(in_range, [message])
        with tf.control_dependencies([] if check is None else [check]):
            slots = tf.range(batch)[:, tf.newaxis] * self.nslots + slots
        static = None if ids.shape[0] is None else ids.shape[0] * self.nslots
        feature = Bags(
            tf.reshape(ids, [-1]),
            tf.reshape(slots, [-1, 1]),
            no_weights(),
            batch * self.nslots,
            static,
        )
        combiner = _FIELD_COMBINERS[self.combiner]
        (pooled,) = lookup_bags([self.params], [feature], [combiner], False, [self.max_norm])
        pooled = tf.reshape(pooled, tf.stack([batch, self.nslots, self.embedding_size]))
        pooled.set_shape([ids.shape[0], self.nslots, self.embedding_size])
        return self._output(pooled)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Returns the shape of the output."""
        return (input_shape[0], self.nslots, self.embedding_size)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, as `Embedding` does."""
        return {**super().get_config(), "nslots": self.nslots, "slot_map_fn": self.slot_map_fn}


@keras.saving.register_keras_serializable(package="tf_dynemb_tfra")
class HvdAllToAllEmbedding(Embedding):
    """Same as `Embedding`: with several ranks, every table here is spread over all of them.

    Args:
        with_unique: unused, like the next three.
        with_secondary_unique: unused.
        mpi_size: unused: `init` finds the number of ranks.
        batch_size: unused.
        *args: the arguments of `Embedding`.
        **kwargs: the arguments of `Embedding`, by name.
    """

    def __init__(
        self,
        with_unique: bool = True,
        with_secondary_unique: bool = True,
        mpi_size: int | None = None,
        batch_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
