"""The ids of embeddings that become tables: indices, or what a lookup in front maps to indices."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb.ids import strings
from tf_dynemb.layers.copying import consumers_of, layers_of, nodes_of

_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.Hashing)


class ConvertedIds(NamedTuple):
    """The ids of an embedding that becomes a table.

    Attributes:
        keys: the keys [n] of rows.
        rows: the rows [n] of Keras's matrix with these keys.
        options: arguments of the layer that depend on what ids are.
    """

    keys: npt.NDArray[Any]
    rows: npt.NDArray[np.int64]
    options: dict[str, Any]


def indices(layer: keras.layers.Embedding) -> ConvertedIds:
    """The rows of the matrix are the keys."""
    rows = np.arange(layer.input_dim)
    return ConvertedIds(rows, rows, {"mask_zero": layer.mask_zero})


class RemovedLookups:
    """The lookups in front of embeddings that are removed.

    Args:
        model: the model.
        embeddings: the embeddings that become tables.

    Raises:
        ValueError: a lookup cannot be removed, or there is none.
    """

    def __init__(self, model: keras.Model, embeddings: list[keras.layers.Embedding]) -> None:
        self._embeddings = {id(layer) for layer in embeddings}
        self._sources: dict[int, list[keras.layers.Layer]] = {}
        lookups = [layer for layer in layers_of(model) if isinstance(layer, _LOOKUPS)]
        self._removed = {id(layer) for layer in lookups if self._feeds_embeddings(model, layer)}
        if not self._removed:
            raise ValueError(
                "remove_lookups=True: no StringLookup or IntegerLookup is directly in front of an "
                "embedding and of nothing else. Leave remove_lookups out: indices are ids."
            )
        for layer in embeddings:
            sources = self._sources.get(id(layer), [])
            if len(sources) > 1 or (sources and self._has_other_ids(model, layer)):
                raise ValueError(
                    f"remove_lookups=True: layer {layer.name!r} is called on the ids of several "
                    "layers, whose keys would be mixed. Leave remove_lookups out."
                )

    def is_removed(self, layer: keras.layers.Layer) -> bool:
        """Whether a layer is a lookup that is removed."""
        return id(layer) in self._removed

    def ids_of(self, layer: keras.layers.Embedding) -> ConvertedIds:
        """Returns the ids of an embedding: from the lookup that was in front, or indices."""
        if id(layer) not in self._sources:
            return indices(layer)
        (lookup,) = self._sources[id(layer)]
        return _ids_of(lookup, layer)

    def _feeds_embeddings(self, model: keras.Model, lookup: keras.layers.Layer) -> bool:
        fed = []
        for output in [x for node in lookup._inbound_nodes for x in node.output_tensors]:
            for one in _models_of(model):
                if any(x is output for x in one.outputs):
                    return False
                fed += [consumer for consumer, _ in consumers_of(one, output)]
        if not fed or any(id(layer) not in self._embeddings for layer in fed):
            return False
        for layer in {id(layer): layer for layer in fed}.values():
            self._sources.setdefault(id(layer), []).append(lookup)
        return True

    def _has_other_ids(self, model: keras.Model, layer: keras.layers.Layer) -> bool:
        sources = {
            id(x._keras_history.operation)
            for one in _models_of(model)
            for node in nodes_of(one)
            if node.operation is layer
            for x in node.input_tensors
        }
        return bool(sources - self._removed)


def _ids_of(lookup: keras.layers.Layer, layer: keras.layers.Embedding) -> ConvertedIds:
    """Returns the ids of an embedding without the lookup in front of it.

    Raises:
        ValueError: no keys have the same meaning.
    """
    refused = f"remove_lookups=True: layer {lookup.name!r}"
    keep = "Leave remove_lookups out: then its indices are ids."
    if isinstance(lookup, keras.layers.Hashing):
        raise ValueError(
            f"{refused} is a Hashing, whose rows are shared by all values of a bin, so that no "
            f"value has its own row. {keep}"
        )
    if lookup.invert or lookup.output_mode != "int":
        raise ValueError(f"{refused} does not return the indices of values. {keep}")
    if lookup.num_oov_indices > 1:
        raise ValueError(
            f"{refused} spreads values outside its vocabulary over num_oov_indices="
            f"{lookup.num_oov_indices} vectors; a table has one default_vector. {keep}"
        )
    matrix = np.asarray(layer.embeddings, np.float64)
    looks_up_strings = isinstance(lookup, keras.layers.StringLookup)
    has_mask = lookup.mask_token is not None
    tokens = list(lookup.get_vocabulary(include_special_tokens=False))
    first = lookup.num_oov_indices + has_mask
    options: dict[str, Any] = {"hash_strings": looks_up_strings, "mask_zero": False}
    if lookup.num_oov_indices:
        options["default_vector"] = matrix[int(has_mask)].tolist()
    rows: Any = list(range(first, first + len(tokens)))
    if has_mask:
        tokens, rows = [lookup.mask_token, *tokens], [0, *rows]
    if layer.mask_zero and has_mask:
        if not looks_up_strings and int(lookup.mask_token) == 0:
            options["mask_zero"] = True
        elif not np.any(matrix[0]):
            options["padding_id"] = lookup.mask_token
            tokens, rows = tokens[1:], rows[1:]
        else:
            raise ValueError(
                f"{refused} maps its mask_token {lookup.mask_token!r} to index 0, and the vector "
                f"of index 0 in layer {layer.name!r} is not zero. The table would mask the token "
                f"as padding_id, which reads as zeros. {keep}"
            )
    elif layer.mask_zero:
        raise ValueError(
            f"{refused} has no mask_token, and layer {layer.name!r} masks its index 0. {keep}"
        )
    if looks_up_strings:
        keys = strings.ids_of_strings(tf.constant(tokens, tf.string)).numpy()
    else:
        keys = np.array([int(token) for token in tokens], np.int64)
    if len(np.unique(keys)) < len(keys):
        raise ValueError(f"{refused}: two of its values have the same hash. {keep}")
    rows = np.array(rows, np.int64)
    return ConvertedIds(keys[rows < len(matrix)], rows[rows < len(matrix)], options)


def _models_of(model: keras.Model) -> list[keras.Model]:
    """Returns a model and all models inside it."""
    found = [model]
    for layer in model.layers:
        if isinstance(layer, keras.Model) and hasattr(layer, "layers"):
            found += _models_of(layer)
    return found
