"""How snapshots continue each other: where a delta begins, and which deltas come next."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence

from tf_dynemb import storage
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.persistence.watermark import Watermark
from tf_dynemb.tables.lineage import Snapshots
from tf_dynemb.tables.times import tick_before
from tf_dynemb.variables.dynamic import DynamicVariable
from tf_dynemb.variables.static import Variable

_COPY = " of a copy"


def delta_begin(
    since: Watermark | datetime.datetime | None,
    last: storage.Manifest | None,
    tables: Mapping[str, DynamicVariable],
    path: str | os.PathLike[str],
    optimizer: OptimizerWrapper | None,
) -> tuple[str | None, int, list[int]]:
    """Returns where a delta begins.

    Args:
        since: as in `incremental_dump`.
        last: the manifest of the last snapshot at the path, or None; its shards are not used.
        tables: the tables of the delta.
        path: the path, for errors.
        optimizer: the optimizer whose state is written too, or None.

    Returns:
        (parent, since, ticks): the delta's parent and since, and for each table the tick after
        which updated rows belong to the delta. The ticks are of this process's clock.

    Raises:
        ValueError, TypeError: as in `incremental_dump`.
    """
    if last is not None and last.copy is not None:
        raise ValueError(
            f"{path} is a copy for serving, which `publish` writes: dump to another path."
        )
    ids = [table.snapshots for table in tables.values()]
    # A merged base represents all the snapshots that it was merged from.
    known = common_id(last.ids, ids) if last else None
    if last is not None and known is None:
        raise ValueError(
            f"These tables were never dumped to or loaded from the last snapshot at {path}, "
            f"{last.id}: a delta would leave a gap. Load that snapshot, dump the tables there, or "
            "pass another path."
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
    if known and optimizer is not None and not all(table_ids.has_state(known) for table_ids in ids):
        raise ValueError(
            f"The snapshots at {path} have optimizer state that these tables did not take over: "
            "dump the tables again, or leave the optimizer out."
        )
    ends = [table_ids.tick(known) for table_ids in ids] if known else []
    if since is None:
        if last is None:
            raise ValueError(
                f"There is no snapshot at {path} to continue: dump the tables there first, or pass "
                "since."
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
                f"since={since} is a snapshot that these tables were never dumped to or loaded "
                f"from: {', '.join(missing)}."
            )
        begins = [table_ids.tick(since.id) for table_ids in ids]
        parent, since_tick = since.id, since.tick
    else:
        raise TypeError(
            f"since must be a Watermark, a datetime or None, got {since!r}. Pass an optimizer by "
            "name: optimizer=."
        )
    if last is None:
        return parent, since_tick, begins
    if any(begin > end for begin, end in zip(begins, ends, strict=True)):
        raise ValueError(
            f"since={since} is after the last snapshot at {path} ({last.id}): the chain would have "
            "a gap. Leave since out to continue it."
        )
    return last.id, min(since_tick, last.watermark), begins


def is_of_others(
    publication: storage.Publication, tables: Mapping[str, DynamicVariable | Variable]
) -> str:
    """Returns why a base of these tables does not continue the chain at its path; "": it does.

    Args:
        publication: the base, before it is published.
        tables: its variables, by their names on disk.
    """
    where = publication.place
    try:
        superseded = publication.superseded
    except (storage.DataLossError, ValueError) as error:
        return f"{where} has snapshots that cannot be read: {error}"
    if superseded is None:
        return ""
    last = superseded[1]
    if last.copy is not None:
        return f"{where} is a copy for serving, which `publish` writes."
    entries = {entry.name: entry for manifest in superseded for entry in manifest.tables}
    lost = sorted(set(entries) - set(tables))
    if lost:
        return f"{where} has snapshots of the tables {', '.join(lost)}, too."
    # Dense variables do not take a history over from a checkpoint.
    dynamic = [name for name in entries if isinstance(tables[name], DynamicVariable)]
    for name in dynamic or entries:
        variable = tables[name]
        known = variable.snapshots if name in dynamic else ()
        if entries[name].history != variable.history and not any(i in known for i in last.ids):
            return (
                f"{where} has snapshots of another table {name!r}, last of "
                f"{Watermark.of(last).utc:%Y-%m-%d %H:%M} UTC."
            )
    return ""


def check_schema(
    last: storage.Manifest, tables: Mapping[str, DynamicVariable], path: str | os.PathLike[str]
) -> None:
    """Raises ValueError if tables cannot continue the snapshot on disk."""
    for name, table in tables.items():
        _, entry = last.table(name)
        there = (entry.dimension, entry.key_type, entry.dtype)
        here = (table.dimension, table.key_type.name, table.dtype.name)
        if there != here:
            raise ValueError(
                f"table {name!r} has dimension, key_type and dtype {there} at {path}, but "
                f"{table.name!r} has {here}: dump it again, or to another path."
            )


def id_of_copy(id_: str) -> str:
    """Returns the id by which a table knows a snapshot of a served copy.

    It is another one than that of the snapshot of which it is a copy: the copy can have fewer rows,
    and rounded ones, so that a table with them does not continue the training's chain.
    """
    return id_ + _COPY


def ids_of_rows(manifest: storage.Manifest) -> tuple[str, ...]:
    """Returns the ids by which tables know the rows of a snapshot, its own one first."""
    return manifest.ids if manifest.copy is None else tuple(map(id_of_copy, manifest.ids))


def parent_of_rows(manifest: storage.Manifest) -> str | None:
    """Returns the id by which tables know the rows that a delta continues."""
    if manifest.parent is None or manifest.copy is None:
        return manifest.parent
    return id_of_copy(manifest.parent)


def common_id(ids: Sequence[str], known: Sequence[Snapshots]) -> str | None:
    """Returns the first of `ids` that all tables know, or None."""
    return next((id_ for id_ in ids if all(id_ in table_ids for table_ids in known)), None)


def common_ids(known: Sequence[Snapshots]) -> list[str]:
    """Returns the ids that all tables know, in the order in which the first table recorded them.

    Without those of copies.
    """
    first = known[0].items() if known else []
    ids = [id_ for id_, _ in first if all(id_ in table_ids for table_ids in known)]
    return [id_ for id_ in ids if not id_.endswith(_COPY)]


def continuations(
    chain: storage.Chain, tables: Mapping[str, DynamicVariable]
) -> list[storage.Snapshot]:
    """Returns the deltas of a chain that come after the content of all tables.

    Raises:
        ValueError: no snapshot of the chain continues the content of all tables.
    """
    known = [table.snapshots for table in tables.values()]
    snapshots = chain.snapshots
    for place in reversed(range(len(snapshots))):
        manifest = snapshots[place].manifest
        if common_id(ids_of_rows(manifest), known):
            return snapshots[place + 1 :]
        parent = parent_of_rows(manifest)
        if parent is not None and common_id([parent], known):
            return snapshots[place:]
    raise ValueError(
        f"{chain.last} and the snapshots before it do not continue the content of these "
        "tables: load the dump that they continue first."
    )
