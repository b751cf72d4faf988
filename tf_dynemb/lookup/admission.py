"""Admission of the ids of unknown keys in a lookup: SOK's low frequency filter.

Every id of a key without a row is admitted with probability `filter_ratio` of its table,
independently of the key's other ids. A key that occurs n times therefore gets a row with
probability 1 - (1 - filter_ratio)^n, and most keys that occur once never get one. An id that is not
admitted is treated as absent from the batch: it adds nothing to its bag and does not count in a
mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.ids.bags import Bags
from tf_dynemb.parallel import exchange, spread_keys
from tf_dynemb.variables.dynamic import DynamicVariable


def admit(tables: Sequence[Any], features: Sequence[Bags]) -> list[Bags]:
    """Returns the features with only the admitted ids; `features[i]` is read from `tables[i]`.

    Features of static tables, and of tables with a filter_ratio of 1, are unchanged. Collective.
    """
    admitted = list(features)
    positions = [
        i
        for i, table in enumerate(tables)
        if isinstance(table, DynamicVariable) and table.options.filter_ratio < 1.0
    ]
    if not positions:
        return admitted
    keys = [features[i].keys for i in positions]
    # Ranks with the same global seed draw the same seed here; each rank derives its own from it.
    seed = tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int32)
    known = _have_rows([tables[i] for i in positions], keys)
    for number, i in enumerate(positions):
        rank_seed = tf.add(seed, [number, communicator.get().rank])
        drawn = tf.random.stateless_uniform(tf.shape(keys[number]), rank_seed)
        is_lucky = drawn < tables[i].options.filter_ratio
        admitted[i] = features[i].of_ids(known[number] | is_lucky)
    return admitted


def _have_rows(tables: Sequence[DynamicVariable], keys: Sequence[Any]) -> list[Any]:
    """Returns which keys [n] of each feature have a row: bool [n]."""
    if communicator.get().size > 1:
        spread, table_of, _ = exchange.spread_tables(tables)
        return spread_keys.contains(spread, keys, table_of)
    contains = _ops.library().dynemb_contains
    return [contains(table.handle, k) for table, k in zip(tables, keys, strict=True)]
