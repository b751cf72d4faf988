"""How snapshots continue each other: where a delta begins, which deltas come next for tables."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from tf_dynemb import storage
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.snapshots.watermark import Watermark, tick_before
from tf_dynemb.tables.lineage import Snapshots
from tf_dynemb.variables.dynamic import DynamicVariable


def delta_begin(
    since: Watermark | datetime.datetime | None,
    last: storage.Manifest | None,
    tables: Mapping[str, DynamicVariable],
    path: Any,
    optimizer: OptimizerWrapper | None,
) -> tuple[str | None, int, list[int]]:
    """Where a delta begins.

    Args:
        since: as in `incremental_dump`.
        last: the last snapshot at the path; its shards do not matter.
        tables: that the delta is of.
        path: for errors.
        optimizer: whether its state is written too.

    Returns:
        (parent, since, ticks): of the delta; and the tick since which each table's rows belong to
        it, which this process's clock has given.

    Raises:
        ValueError, TypeError: as `incremental_dump`.
    """
    ids = [table.snapshots for table in tables.values()]
    # A merged base stands for what it was merged from.
    known = common_id(last.ids, ids) if last else None
    if last is not None and known is None:
        raise ValueError(
            f"The last snapshot at {path} is {last.id}, which these tables never were: a delta "
            "would leave a gap. Load it, or dump them there, or give another path."
        )
    if last is not None:
        names = {entry.name for entry in last.tables}
        unknown = sorted(set(tables) - names)
        if unknown or (last.kind == "delta" and set(tables) != names):
            raise ValueError(
                f"The deltas at {path} are of the tables {', '.join(sorted(names))}, not of "
                f"{', '.join(sorted(tables))}."
            )
        check_schema(last, tables, path)
    if known and optimizer is not None and not all(of.has_state(known) for of in ids):
        raise ValueError(
            f"The snapshots at {path} have optimizer state that these tables did not take over: "
            "dump the tables anew, or leave the optimizer out."
        )
    ends = [of_table.tick(known) for of_table in ids] if known else []
    if since is None:
        if last is None:
            raise ValueError(
                f"There is no snapshot at {path} to continue: dump the tables there first, or say "
                "since when."
            )
        return last.id, last.watermark, ends
    if isinstance(since, datetime.datetime):
        tick = tick_before(since, "since")
        begins = [tick] * len(ids)
        parent, since_tick = None, tick
    elif isinstance(since, Watermark):
        missing = [name for name, t in tables.items() if since.id not in t.snapshots]
        if missing:
            raise ValueError(
                f"since={since} is no snapshot that these tables were: {', '.join(missing)}."
            )
        begins = [of_table.tick(since.id) for of_table in ids]
        parent, since_tick = since.id, since.tick
    else:
        raise TypeError(f"since must be a Watermark, a datetime or None, got {since!r}.")
    if last is None:
        return parent, since_tick, begins
    if any(begin > end for begin, end in zip(begins, ends, strict=True)):
        raise ValueError(
            f"since={since} is after the last snapshot at {path} ({last.id}): the chain would have "
            "a gap. Leave since out to continue it."
        )
    return last.id, min(since_tick, last.watermark), begins


def check_schema(last: storage.Manifest, tables: Mapping[str, DynamicVariable], path: Any) -> None:
    """Raises ValueError if tables cannot continue what is on disk."""
    for name, table in tables.items():
        _, entry = last.table(name)
        there = (entry.dimension, entry.key_type, entry.dtype)
        here = (table.dimension, table.key_type.name, table.dtype.name)
        if there != here:
            raise ValueError(
                f"table {name!r} has dimension, key_type and dtype {there} at {path}, but "
                f"{table.name!r} has {here}: dump it anew, or elsewhere."
            )


def common_id(ids: Sequence[str], known: Sequence[Snapshots]) -> str | None:
    """The first id that all tables know."""
    return next((id_ for id_ in ids if all(id_ in of_table for of_table in known)), None)


def continuations(
    chain: storage.Chain, tables: Mapping[str, DynamicVariable]
) -> list[storage.Snapshot]:
    """The deltas of a chain that come after what all tables hold."""
    known = [table.snapshots for table in tables.values()]
    snapshots = chain.snapshots
    for place in reversed(range(len(snapshots))):
        manifest = snapshots[place].manifest
        if common_id(manifest.ids, known):
            return snapshots[place + 1 :]
        if manifest.parent is not None and common_id([manifest.parent], known):
            return snapshots[place:]
    raise ValueError(
        f"{chain.last.directory} and what is before it do not continue what these tables hold: "
        "load the dump that they continue first."
    )
