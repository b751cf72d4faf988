"""The strategies of eviction: their names in options, operators and dumps, and their scores."""

from __future__ import annotations

from typing import NamedTuple


class Strategy(NamedTuple):
    """How a full table chooses the row that it evicts.

    Attributes:
        hkv_name: the name in HierarchicalKV, which SOK scripts pass; None if it has none.
        has_scores: whether the column `accesses` of a dump has scores that are not times.
        counts_keys: whether scores count how often lookups that insert have asked for a key.
        has_epochs: whether there are epochs, which `advance_epoch` begins.
    """

    hkv_name: str | None = None
    has_scores: bool = False
    counts_keys: bool = False
    has_epochs: bool = False


# `TableOptions` says what each evicts.
STRATEGIES = {
    "lru": Strategy("kLru"),
    "lfu": Strategy("kLfu", has_scores=True, counts_keys=True),
    "epoch_lru": Strategy("kEpochLru", has_epochs=True),
    "epoch_lfu": Strategy("kEpochLfu", has_scores=True, counts_keys=True, has_epochs=True),
    "score": Strategy("kCustomized", has_scores=True),
    "none": Strategy(),
}
