"""A table as a matrix of Keras, perhaps with a lookup in front."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb.layers.base import TableLayer
from tf_dynemb.layers.embedding import Embedding
from tf_dynemb.optimizers import moments
from tf_dynemb.tables import content
from tf_dynemb.tables.cut import from_bits
from tf_dynemb.variables.dynamic import DynamicVariable

# A matrix can have this many times the rows of the table, and these more.
_MATRIX_FACTOR, _MATRIX_ROWS = 2, 1000


class Matrix:
    """A table as a matrix: `layers` of Keras, perhaps with a lookup in front.

    Args:
        layer: the layer with the table.
    """

    def __init__(self, layer: Embedding) -> None:
        self._table = table = layer.table
        self._held = held = content.read_content(table)
        keys = held.rows.keys
        vectors = tf.cast(from_bits(held.rows.vectors, held.dtype), tf.float32).numpy()
        masked = 0 if layer.mask_zero else layer.padding_id
        most = int(keys.max()) + 1 if len(keys) else 1
        is_small = most <= _MATRIX_FACTOR * len(keys) + _MATRIX_ROWS
        lookup = None
        if is_small and (not len(keys) or keys.min() >= 0) and masked in (None, 0):
            self._rows, count = keys.astype(np.int64), most
            matrix = table.peek(np.arange(count).astype(keys.dtype)).numpy().astype(np.float32)
            matrix[self._rows] = vectors
        else:
            known = np.sort(keys[keys != masked]) if masked is not None else np.sort(keys)
            if not len(known):  # Keras's lookups need a value
                assert masked is not None
                known = np.array([masked + 1], keys.dtype)
            first = 1 + (masked is not None)
            self._rows = np.where(keys == masked, 0, first + np.searchsorted(known, keys))
            count = first + len(known)
            matrix = np.empty((count, table.dimension), np.float32)
            matrix[:] = _vector_of_unknown(table)
            if masked is not None:
                matrix[0] = table.peek(np.array([masked], keys.dtype)).numpy()[0]
            matrix[self._rows] = vectors
            reserved = -1
            while np.any(known == reserved) or reserved == masked:
                reserved -= 1
            lookup = keras.layers.IntegerLookup(
                vocabulary=known.astype(np.int64),
                mask_token=masked,
                oov_token=reserved,
                name=f"{layer.name}_lookup",
            )
        if layer.padding_id is not None:
            matrix[0] = 0.0
        self.embedding = keras.layers.Embedding(
            count,
            layer.dim,
            embeddings_initializer=_keras_initializer(layer.initializer),
            embeddings_regularizer=layer.embeddings_regularizer,
            embeddings_constraint=layer.embeddings_constraint,
            activity_regularizer=layer.activity_regularizer,
            mask_zero=masked is not None,
            weights=[matrix],
            name=layer.name,
            dtype=layer.dtype_policy,
            trainable=layer.trainable,
        )
        self.layers = [self.embedding] if lookup is None else [lookup, self.embedding]

    def states(self) -> list[npt.NDArray[np.float32]]:
        """Returns the states of the matrix; rows that the table has not are as new ones."""
        found = []
        inits = (self._table.state_spec or ("", (), ()))[2]
        for state, init in zip(moments.row_states(self._table, self._held), inits, strict=False):
            whole = np.full((self.embedding.input_dim, state.shape[1]), init, np.float32)
            whole[self._rows] = state
            found.append(whole)
        return found


def check_to_keras(layer: TableLayer) -> None:
    """Raises a ValueError if a layer with tables has no counterpart in Keras."""
    if type(layer) is not Embedding:
        raise ValueError(
            f"Layer {layer.name!r}, a {type(layer).__name__}, has no counterpart in Keras. Make "
            "its tables keras.layers.Embedding by hand: tf_dynemb.export(table) has their rows."
        )
    if layer.combiner is not None:
        raise ValueError(
            f"Layer {layer.name!r} pools with combiner={layer.combiner!r}, which "
            "keras.layers.Embedding cannot do. Use an Embedding without a combiner, and a layer "
            "after it that pools."
        )
    if layer.hash_strings:
        raise ValueError(
            f"Layer {layer.name!r} has hash_strings=True: its keys are hashes, but a StringLookup "
            "needs the words. If you have the words, create "
            "keras.layers.StringLookup(vocabulary=words) and weights=[table.peek(words)] by hand."
        )
    if layer.key_type == tf.uint64:
        raise ValueError(
            f"Layer {layer.name!r} has key_type='uint64', which Keras's lookups do not take. Use "
            "ids of int64."
        )
    if layer.mask_zero and layer.padding_id not in (None, 0):
        raise ValueError(
            f"Layer {layer.name!r} masks two ids, 0 and padding_id={layer.padding_id}; "
            "keras.layers.Embedding masks one."
        )


def _vector_of_unknown(table: DynamicVariable) -> npt.NDArray[np.float32]:
    """The vector of all ids without a row."""
    if table.default_vector is not None:
        return np.array(table.default_vector, np.float32)
    kinds, args = (table.attributes[name] for name in ("initializers", "initializer_args"))
    if set(kinds) == {"constant"}:
        return np.broadcast_to(np.array(args[::2], np.float32), (table.dimension,))
    return np.zeros(table.dimension, np.float32)


def _keras_initializer(initializer: Any) -> Any:
    """Returns an initializer of Keras for the matrix, whose rows have vectors already."""
    try:
        if isinstance(initializer, (int, float, str)):
            return keras.initializers.Constant(float(initializer))
    except ValueError:
        initializer = "uniform" if initializer == "random" else initializer
    return "uniform" if initializer is None or isinstance(initializer, list) else initializer
