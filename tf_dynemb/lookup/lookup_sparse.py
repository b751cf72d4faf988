"""lookup_sparse: vectors of many features from many tables, pooled, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tf_dynemb import _ops, communicator
from tf_dynemb._aliases import one_of
from tf_dynemb.ids.bags import Bags
from tf_dynemb.lookup import prefetch
from tf_dynemb.lookup.admission import admit
from tf_dynemb.lookup.features import as_features, as_list
from tf_dynemb.lookup.pool import clip_norms, pool
from tf_dynemb.lookup.prefetch import Prefetched
from tf_dynemb.parallel import exchange
from tf_dynemb.parallel import exchange_gradient as exchange_gradient  # registers it
from tf_dynemb.parallel.distribution import check_one_replica
from tf_dynemb.parallel.placement import by_placement
from tf_dynemb.variables import keras_call
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable
from tf_dynemb.variables.unwrap import unwrap

COMBINERS = ("sum", "mean", "sqrtn", "max")


@_ops.not_converted
def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    insert: bool | None = None,
    use_low_frequency_filter: bool = False,
    *,
    combiner: Any = None,
    max_norm: Any = None,
) -> Any:
    """Looks up the ids of one or more features and pools the vectors of each sample.

    One operator reads all dynamic tables of a call; there are several if tables are on several
    devices, or have different values of `insert`, and one for each table with `max_norm`. Gradients
    reach the tables (an IndexedSlices over unique keys) and the weights.

    Example:
    >>> users = DynamicVariable(dimension=2, initializer="1")
    >>> ids = tf.ragged.constant([[3, -5], [], [3]], dtype=tf.int64)
    >>> lookup_sparse(users, ids, combiners="sum").numpy().tolist()
    [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]

    Args:
        params: a table, or a list of tables: `DynamicVariable`, `Variable`, `tf.Variable` [rows,
            dim] or Keras variables of these, in any mix of widths and types. A table can be in the
            list several times.
        sp_ids: for each table, a SparseTensor of rank 2 (indices in any order; rows can be empty),
            a RaggedTensor of two dimensions, or a dense tensor [B, H] or [B], of integers. Ids of a
            type other than the table's key type are cast if the cast cannot lose anything. Instead
            of all of these, the `ahead` that `prefetch_lookup` yields is accepted.
        sp_weights: None, or for each table either None or weights of the kind and shape of its ids.
        combiners: "sum", "mean", "sqrtn" or "max", one for all or one for each. Default: "mean".
            For vectors v with weights w: sum(w v), sum(w v) / sum(w), sum(w v) / sqrt(sum(w²)), and
            the greatest w v of each column. Without weights, w is 1.
        insert: whether unknown keys get a row, if the table's `admission` admits them. Otherwise
            they read as the vector that they would start with, or as `admission` says, and no row
            is created. None: they do; inside the call of a Keras layer, only in training.
        use_low_frequency_filter: whether to drop some of the ids whose keys have no row, at random,
            so that rare keys do not fill the table. The table's option `filter_ratio` is the
            probability that such an id is kept. Dropped ids are treated as absent from the batch.
        combiner: another name of `combiners`.
        max_norm: vectors whose L2 norm is larger are scaled to this norm before they are pooled, as
            in `tf.nn.embedding_lookup_sparse`: one number for all tables, or a list with a number
            or None for each. The rows themselves do not change. It is slower than a lookup without.

    Returns:
        [B, dim] of the table's dtype; for a list of tables, a list of such tensors.

    Raises:
        ValueError, TypeError: lists of different lengths, or a wrong dtype, rank or combiner. In
            this case the tables are unchanged.
    """
    single = not isinstance(params, (list, tuple))
    tables = [unwrap(table) for table in as_list(params)]
    combiners = one_of("combiners", combiners, "combiner", combiner)
    names = _combiner_names(combiners, len(tables))
    max_norms = _max_norms(max_norm, len(tables))
    if insert is not None and not isinstance(insert, bool):
        raise TypeError(f"insert must be True, False or None, got {insert!r}.")
    if not isinstance(use_low_frequency_filter, bool):
        raise TypeError(
            f"use_low_frequency_filter must be True or False, got {use_low_frequency_filter!r}."
        )
    inserts = _inserts(tables, insert)
    if isinstance(sp_ids, Prefetched):
        if use_low_frequency_filter:
            raise ValueError("use_low_frequency_filter cannot filter ids that are looked up ahead.")
        if any(norm is not None for norm in max_norms):
            raise ValueError("max_norm cannot be applied to ids that are looked up ahead.")
        outputs = _lookup_prefetched(tables, sp_ids, sp_weights, names, all(inserts))
        return outputs[0] if single else outputs
    features = as_features(tables, single, sp_ids, sp_weights)
    if use_low_frequency_filter:
        _check_filter(tables)
        features = admit(tables, features)
    outputs = [None] * len(tables)
    for group_insert in sorted(set(inserts)):
        group = [i for i, each in enumerate(inserts) if each is group_insert]
        group_outputs = lookup_bags(
            _at(group, tables),
            _at(group, features),
            _at(group, names),
            group_insert,
            _at(group, max_norms),
        )
        for i, output in zip(group, group_outputs, strict=True):
            outputs[i] = output
    return outputs[0] if single else outputs


def _combiner_names(combiners: Any, count: int) -> list[str]:
    if combiners is None:
        return ["mean"] * count
    if isinstance(combiners, str):
        combiners = [combiners] * count
    if not isinstance(combiners, (list, tuple)):
        raise TypeError(f"combiners must be a string or a list of strings, got {combiners!r}.")
    if len(combiners) != count:
        raise ValueError(f"combiners has {len(combiners)} items, but params has {count}.")
    for combiner in combiners:
        if combiner not in COMBINERS:
            raise ValueError(f"combiner must be one of {', '.join(COMBINERS)}, got {combiner!r}.")
    return list(combiners)


def _max_norms(max_norm: Any, count: int) -> list[float | None]:
    norms = list(max_norm) if isinstance(max_norm, (list, tuple)) else [max_norm] * count
    if len(norms) != count:
        raise ValueError(f"max_norm has {len(norms)} items, but params has {count}.")
    return [check_max_norm(norm) for norm in norms]


def check_max_norm(max_norm: Any) -> float | None:
    """Returns a `max_norm` as a float, or raises ValueError unless it is positive or None."""
    if max_norm is None:
        return None
    is_number = isinstance(max_norm, (int, float, np.number)) and not isinstance(max_norm, bool)
    if not is_number or not max_norm > 0:
        raise ValueError(f"max_norm must be a positive number or None, got {max_norm!r}.")
    return float(max_norm)


def _inserts(tables: Sequence[Any], insert: bool | None) -> list[bool]:
    """Returns for each table whether unknown keys get a row; tracks the tables in Keras layers."""
    if not keras_call.is_active():
        return [
            not getattr(table, "inserts_in_steps", False) if insert is None else insert
            for table in tables
        ]
    for table in tables:
        if isinstance(table, (DynamicVariable, Variable)):
            keras_call.track(table)
    dynamic_inserts = [
        keras_call.inserts(table, insert) if isinstance(table, DynamicVariable) else None
        for table in tables
    ]
    # Static tables have no rows to insert: they go with the others.
    static_insert = False not in dynamic_inserts
    return [static_insert if each is None else each for each in dynamic_inserts]


def _check_filter(tables: Sequence[Any]) -> None:
    for table in tables:
        if isinstance(table, DynamicVariable) and table.options.admission is not None:
            raise ValueError(
                f"use_low_frequency_filter=True: {table.name} has admission="
                f"{table.options.admission!r}, which decides already which keys get a row."
            )


def _at(places: Sequence[int], items: Sequence[Any]) -> list[Any]:
    return [items[i] for i in places]


def lookup_bags(
    tables: Sequence[Any],
    features: Sequence[Bags],
    combiners: Sequence[str],
    insert: bool,
    max_norms: Sequence[float | None] | None = None,
) -> list[Any]:
    """Same as `lookup_sparse`, for ids in bags; `features[i]` is read from `tables[i]`."""
    check_one_replica("A lookup in tables")
    norms = max_norms or [None] * len(tables)
    outputs: dict[int, Any] = {}
    for i, table in enumerate(tables):
        if norms[i] is not None or (not insert and _has_default(table)):
            outputs[i] = _read_and_pool(table, features[i], combiners[i], insert, norms[i])
    places = [i for i, table in enumerate(tables) if i not in outputs and _operators_pool(table)]
    pooled = _lookup_pooled(
        _at(places, tables), _at(places, features), _at(places, combiners), insert
    )
    outputs.update(zip(places, pooled, strict=True))
    return _in_order(tables, features, combiners, outputs)


def _has_default(table: Any) -> bool:
    return isinstance(table, DynamicVariable) and table.default_vector is not None


def _read_and_pool(
    table: Any, feature: Bags, combiner: str, insert: bool, max_norm: float | None
) -> Any:
    """Reads the vector of each id, and pools the vectors with TensorFlow's operations."""
    if isinstance(table, DynamicVariable):
        vectors = table.lookup(feature.keys, insert=insert)
        if _skips(table, insert):
            has_row = table.contains(feature.keys)
            vectors = tf.boolean_mask(vectors, has_row)
            feature = feature.of_ids(has_row)
    else:
        vectors = tf.gather(table, feature.keys)
    pooled = pool(clip_norms(vectors, max_norm), feature, combiner)
    pooled.set_shape([feature.static_num_bags, table.shape[1]])
    return pooled


def _skips(table: DynamicVariable, insert: bool) -> bool:
    """Whether the ids of keys without a row are absent from their bags, after the lookup."""
    admission = table.options.admission
    if admission is None or admission.unadmitted != "skip":
        return False
    return insert or table.default_vector is None


def _operators_pool(table: Any) -> bool:
    """Whether an operator of this package looks up and pools at once."""
    if communicator.get().size > 1:
        return isinstance(table, (DynamicVariable, Variable))
    return isinstance(table, DynamicVariable)


def _lookup_pooled(
    tables: Sequence[Any], features: Sequence[Bags], combiners: Sequence[str], insert: bool
) -> list[Any]:
    """Looks up and pools the ids of tables for which `_operators_pool` is true."""
    if communicator.get().size > 1:
        spread, table_of, _ = exchange.spread_tables(tables)
        return exchange.lookup(spread, features, table_of, combiners, insert)
    outputs: list[Any] = [None] * len(tables)
    for table in tables:
        resource_variable_ops.variable_accessed(table)
    for group in by_placement(tables):
        with _ops.on(tables[group[0]].placement.device):
            pooled, _, _ = _ops.library().dynemb_lookup_sparse(
                handles=[tables[i].handle for i in group],
                keys=[features[i].keys for i in group],
                bags=[features[i].bags for i in group],
                weights=[features[i].weights for i in group],
                num_bags=[features[i].num_bags for i in group],
                dtypes=[tables[i].dtype for i in group],
                dims=[tables[i].dimension for i in group],
                combiners=[combiners[i] for i in group],
                insert=insert,
            )
        for i, output in zip(group, pooled, strict=True):
            output.set_shape([features[i].static_num_bags, tables[i].dimension])
            outputs[i] = output
    return outputs


def _lookup_prefetched(
    tables: Sequence[Any],
    ahead: Prefetched,
    sp_weights: Any,
    combiners: Sequence[str],
    insert: bool,
) -> list[Any]:
    features = ahead.features
    if len(features) != len(tables):
        raise ValueError(
            f"{len(features)} features were looked up ahead, but params has {len(tables)} items."
        )
    if sp_weights is not None:
        raise ValueError("sp_weights must be passed to prefetch_lookup, which looked up the ids.")
    # For keys without a row, the vectors read ahead are the vectors that an insertion would create.
    has_default = not insert and any(_has_default(table) for table in tables)
    if has_default or not prefetch.reads_ahead(tables):
        return lookup_bags(tables, features, combiners, insert)
    spread, table_of, places = exchange.spread_tables(tables)
    if len(spread) != len(ahead.vectors):
        raise ValueError("params must be the tables that were passed to prefetch_lookup.")
    pooled = prefetch.finish(spread, table_of, places, ahead, _at(places, combiners), insert)
    return _in_order(tables, features, combiners, dict(zip(places, pooled, strict=True)))


def _in_order(
    tables: Sequence[Any],
    features: Sequence[Bags],
    combiners: Sequence[str],
    outputs: Mapping[int, Any],
) -> list[Any]:
    """The outputs of all features: `outputs` has some by place, the others read dense variables."""
    return [
        outputs[i]
        if i in outputs
        else _read_and_pool(tables[i], features[i], combiners[i], False, None)
        for i in range(len(tables))
    ]
