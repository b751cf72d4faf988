"""Which ids of unknown keys a lookup lets in: SOK's low frequency filter.

Every id of a key without a row is let in with the probability `filter_ratio` of its table, whatever
happened to other ids of the key: a key that comes n times gets a row with the probability
1 - (1 - filter_ratio)^n, so most of those that come once never take one. An id that is not let in
is as if it were not in the batch: it adds nothing to its bag, and does not count in a mean.
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
    """The features with the ids that are let in; `features[i]` is read from `tables[i]`.

    Those of static tables, and of tables with a filter_ratio of 1, are as they were. Collective.
    """
    admitted = list(features)
    places = [
        i
        for i, table in enumerate(tables)
        if isinstance(table, DynamicVariable) and table.options.filter_ratio < 1.0
    ]
    if not places:
        return admitted
    keys = [features[i].keys for i in places]
    # Ranks with one global seed draw the same here: from it each makes draws of its own.
    seed = tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int32)
    known = _have_rows([tables[i] for i in places], keys)
    for number, i in enumerate(places):
        own = tf.add(seed, [number, communicator.get().rank])
        drawn = tf.random.stateless_uniform(tf.shape(keys[number]), own)
        lucky = drawn < tables[i].options.filter_ratio
        admitted[i] = features[i].of_ids(known[number] | lucky)
    return admitted


def _have_rows(tables: Sequence[DynamicVariable], keys: Sequence[Any]) -> list[Any]:
    """Which keys [n] of each feature have a row: bool [n]."""
    if communicator.get().size > 1:
        spread, table_of, _ = exchange.spread_tables(tables)
        return spread_keys.contains(spread, keys, table_of)
    contains = _ops.library().dynemb_contains
    return [contains(table.handle, k) for table, k in zip(tables, keys, strict=True)]
