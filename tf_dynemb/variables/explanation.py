"""Explanation: what a table knows about a key."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_dynemb import _ops, communicator
from tf_dynemb.parallel import ownership
from tf_dynemb.tables.admission_options import Frequency
from tf_dynemb.tables.table import Table

# As in cc/table/types.h, Removal.
_LOSSES = ("erased", "forgotten", "evicted", "expired")


class Explanation(NamedTuple):
    """A table's knowledge of a key.

    Attributes:
        key: the key.
        rank: the rank that holds the key's row, or would hold it.
        has_row: whether the key has a row.
        tier: "host" or "device": the memory of the row; "file": it is in a file. None: no row.
        updated: the time of the row's last update. None: no row, or not known.
        accessed: the time of the row's last use, in a table whose strategy records it.
        score: the score of the row, in a table whose scores are not times.
        lost: the time at which the key last lost a row. None: it did not, or it is not known.
        lost_because: "evicted" (by a full table, or `evict`), "expired" (`ttl`), "erased" (`erase`,
            `erase_if`, `clear`) or "forgotten" (`forget`). A row that has expired is lost when it
            is removed, at the latest by the call that explains it.
        admission_count: how often lookups that insert have asked for a key that has no row, as far
            as the table remembers it. None: the key has a row, or the table's `admission` does not
            count keys.
    """

    key: int
    rank: int
    has_row: bool
    tier: str | None
    updated: datetime.datetime | None
    accessed: datetime.datetime | None
    score: int | None
    lost: datetime.datetime | None
    lost_because: str | None
    admission_count: int | None = None

    def __str__(self) -> str:
        parts = [f"key {self.key} (rank {self.rank})"]
        if self.has_row:
            parts.append(f"has a row in {self.tier} memory, last updated {self.updated}")
            parts += [f"last used {self.accessed}"] if self.accessed else []
            parts += [f"with score {self.score}"] if self.score is not None else []
        else:
            parts.append("has no row")
            count = self.admission_count
            parts += [f"was counted {count} times"] if count is not None else []
        if self.lost_because is not None:
            parts.append(f"was {self.lost_because} {self.lost}")
        return ", ".join(parts)


def explain(table: Table, keys: npt.NDArray[np.integer[Any]]) -> list[Explanation]:
    """`DynamicVariable.explain`, for keys [n] as an array of the table's key type. Collective."""
    comm = communicator.get()
    if comm.size == 1:
        return _explain(table, keys, 0)
    asked: Sequence[list[int]] = comm.gather_objects(keys.tolist(), "dynemb/explain/keys")
    every = np.array(sorted({key for rank_keys in asked for key in rank_keys}), keys.dtype)
    is_owned = ownership.owned(table, every)
    held = _explain(table, every if is_owned is None else every[is_owned], comm.rank)
    parts = comm.gather_objects([_to_json(each) for each in held], "dynemb/explain/rows")
    known = {each.key: each for part in parts for each in map(_from_json, part)}
    return [known[key] for key in keys.tolist()]


def _explain(table: Table, keys: npt.NDArray[np.integer[Any]], rank: int) -> list[Explanation]:
    columns = _ops.library().dynemb_explain(table.handle, tf.constant(keys, table.key_type))
    tiers, _, updated, scores, accessed, losses, lost, counts = (
        c.numpy().tolist() for c in columns
    )
    counts_keys = isinstance(table.options.admission, Frequency)
    has_scores = table.options.has_scores
    return [
        Explanation(
            key,
            rank,
            tiers[i] >= 0,
            (None, "host", "device", "file")[tiers[i] + 1],
            _time(updated[i]),
            _time(accessed[i]),
            scores[i] if has_scores and tiers[i] >= 0 else None,
            _time(lost[i]),
            None if losses[i] < 0 else _LOSSES[losses[i]],
            counts[i] if counts_keys and tiers[i] < 0 else None,
        )
        for i, key in enumerate(keys.tolist())
    ]


def _time(utc_ns: int) -> datetime.datetime | None:
    if utc_ns == 0:
        return None
    since = datetime.timedelta(microseconds=utc_ns // 1000)
    return datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc) + since


def _to_json(each: Explanation) -> list[Any]:
    return [v.isoformat() if isinstance(v, datetime.datetime) else v for v in each]


def _from_json(values: list[Any]) -> Explanation:
    for name in ("updated", "accessed", "lost"):
        i = Explanation._fields.index(name)
        if values[i] is not None:
            values[i] = datetime.datetime.fromisoformat(values[i])
    return Explanation(*values)
