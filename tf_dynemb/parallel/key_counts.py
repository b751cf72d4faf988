"""How often keys are asked for, and which of them are absent, in lookups over ranks.

The functions take the `exchange.Request` of a lookup as `asked`. They are collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_dynemb import _ops
from tf_dynemb.ids.bags import Bags


def count_repeats(asked: Any, table_of: Sequence[int]) -> dict[int, tf.Tensor]:
    """Sends owners the repeats of ids in a lookup that inserts, for tables that count keys.

    Args:
        asked: the request of the lookup.
        table_of: the number of each feature's table.

    Returns:
        By the number of the table, for each of `asked.keys`: how often its rank asks for it, beyond
        once. int32 [n].
    """
    tables = asked.tables
    numbers = [
        t
        for t, table in enumerate(tables)
        if table.is_dynamic and (table.table.options.counts_keys or table.table.options.admission)
    ]
    repeats = []
    for t in numbers:
        with _ops.on(asked.device):
            index = [asked.index[i] for i, table in enumerate(table_of) if table == t]
            index = tf.cast(tf.concat(index, 0), tf.int64)
            ones = tf.ones_like(index, tf.int32)
            counts = tf.math.unsorted_segment_sum(ones, index, asked.num_asked(t))
            repeats.append(counts[:, tf.newaxis] - 1)
    arrived = asked.send_some(numbers, repeats, "dynemb_counts", to_owners=True)
    return {t: counts[:, 0] for t, counts in zip(numbers, arrived, strict=True)}


def add_counts(asked: Any, repeats: Mapping[int, tf.Tensor]) -> None:
    """Adds the result of `count_repeats` to scores, after the lookup has counted each key once."""
    for t, counts in repeats.items():
        table = asked.tables[t].table
        if table.options.counts_keys:
            _ops.library().dynemb_add_counts(table.handle, asked.keys[t], counts)


def find_present(asked: Any, rows: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
    """Reports to askers which keys are in their bags, for tables with `unadmitted="skip"`.

    Args:
        asked: the request.
        rows: for each table, the row ids of `asked.keys` on their owners.

    Returns:
        By the number of the table, for each key of the request: whether its ids are in their bags.
        bool [n].
    """
    numbers = [
        t
        for t, table in enumerate(asked.tables)
        if table.is_dynamic
        and table.table.options.admission
        and table.table.options.admission.unadmitted == "skip"
    ]
    present = [
        tf.cast(tf.not_equal(rows[t], _ops.SKIPPED_ROW), tf.int32)[:, tf.newaxis] for t in numbers
    ]
    arrived = asked.send_some(numbers, present, "dynemb_present", to_owners=False)
    return {t: each[:, 0] != 0 for t, each in zip(numbers, arrived, strict=True)}


def without_absent(
    asked: Any,
    features: Sequence[Bags],
    table_of: Sequence[int],
    is_present: Mapping[int, tf.Tensor],
) -> tuple[Any, list[Bags]]:
    """Removes the ids of absent keys from their bags, given the result of `find_present`."""
    index, kept = list(asked.index), list(features)
    for i, t in enumerate(table_of):
        if t in is_present:
            mask = tf.gather(is_present[t], tf.cast(index[i], tf.int64))
            index[i] = tf.boolean_mask(index[i], mask)
            kept[i] = kept[i].of_ids(mask)
    return dataclasses.replace(asked, index=index), kept
