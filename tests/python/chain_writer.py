"""Writes chains of snapshots for tests, from tables that are dicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from unittest import mock

import numpy as np

from tf_dynemb.format.safetensors import Array
from tf_dynemb.format.table_entry import (
    KEY_TYPES,
    InitializerEntry,
    Shard,
    StateEntry,
    TableEntry,
)
from tf_dynemb.format.vector_format import FORMATS
from tf_dynemb.storage import Publication


@dataclasses.dataclass(frozen=True)
class Row:
    """One row; `vector` in the bits of the table's dtype, times in ticks."""

    vector: np.ndarray
    state: tuple[float, ...] = ()
    update: int = 0
    access: int = 0


@dataclasses.dataclass(frozen=True)
class Change:
    """The changes of one table in a snapshot: rows, and deleted keys."""

    rows: Mapping[int, Row]
    deleted: Iterable[int] = ()


@dataclasses.dataclass(frozen=True)
class Form:
    """The properties of a table."""

    dimension: int = 3
    key_type: str = "int64"
    dtype: str = "float32"
    state_width: int = 0
    history: str | None = None
    evict_strategy: str | None = None
    vector_format: str | None = None  # of the vectors of rows, which are then in it


def publish(
    path,
    kind: str,
    changes: Mapping[str, Change],
    *,
    forms: Mapping[str, Form] | None = None,
    ranks: int = 1,
    base_tick: int = 0,
    block_bytes: int = 1 << 12,
    dense: Mapping[str, np.ndarray] | None = None,
    **times,
):
    """Publishes a snapshot and returns it; key k goes to the shard of rank k % ranks."""
    forms = forms or {}
    entries = []
    # Tests need not survive a power failure, and syncing is most of the cost of a small snapshot.
    with mock.patch("os.fsync"), Publication(path, kind, block_bytes=block_bytes) as publication:
        for number, (name, change) in enumerate(changes.items()):
            form = forms.get(name, Form())
            shards = []
            for rank in range(ranks):
                keys = [key for key in change.rows if key % ranks == rank]
                deleted = [key for key in change.deleted if key % ranks == rank]
                rows = [change.rows[key] for key in keys]
                key_type = KEY_TYPES[form.key_type]

                def column(column, values, dtype, shape=(), number=number, rank=rank):
                    writer = publication.part.column(number, column, dtype, shape, rank)
                    writer.append(np.array(values, dtype).reshape(-1, *shape))

                column("keys", keys, key_type)
                vectors = [row.vector for row in rows]
                stored = FORMATS[form.vector_format or form.dtype]
                column("vectors", vectors, stored.dtype, (stored.width(form.dimension),))
                if form.state_width:
                    states = [row.state for row in rows]
                    column("state", states, np.float32, (form.state_width,))
                column("updates", [row.update - base_tick for row in rows], np.uint32)
                column("accesses", [row.access - base_tick for row in rows], np.uint32)
                if kind == "delta":
                    column("deleted", deleted, key_type)
                else:
                    publication.part.write_index(number, rank)
                shards.append(Shard(rank, len(keys), len(deleted), base_tick))
            entries.append(_entry(name, form, shards))
        if dense is not None:
            arrays = {name: Array(each.dtype.name, each) for name, each in dense.items()}
            publication.part.write_dense("weights", arrays)
            times["dense"] = publication.part.dense
        times.setdefault("watermark_utc_ns", 1_700_000_000_000_000_000 + times["watermark"])
        return publication.publish(entries, world_size=ranks, **times)


def _entry(name: str, form: Form, shards: list[Shard]) -> TableEntry:
    state = None
    if form.state_width:
        state = StateEntry("adagrad", (form.state_width,), (0.1,))
    initializer = InitializerEntry(("uniform",), (-0.05, 0.05))
    return TableEntry(
        name,
        form.dimension,
        form.key_type,
        form.dtype,
        7,
        initializer,
        state,
        tuple(shards),
        history=form.history,
        evict_strategy=form.evict_strategy,
        vector_format=form.vector_format,
    )
