"""Tables to disk and back: dump, load, deltas. docs/file_format.md says what the files are."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_dynemb import _ops, rows_io, storage
from tf_dynemb.cut import Cut, Rows
from tf_dynemb.dynamic_variable import DynamicVariable, Snapshots
from tf_dynemb.naming import named_variables
from tf_dynemb.optimizer import OptimizerWrapper
from tf_dynemb.optimizer_entry import optimizer_entry


class Watermark(NamedTuple):
    """Up to where a snapshot holds what training did.

    Attributes:
        id: of the snapshot.
        tick: number of the last batch that is in it.
        utc: when it was taken.
    """

    id: str
    tick: int
    utc: datetime.datetime


def dump(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: OptimizerWrapper | None = None,
    *,
    quiet: bool | None = None,
) -> Watermark:
    """Writes all rows of tables, as they are at one moment: a new base of the chain at `path`.

    Training may go on in other threads meanwhile; what it does after that moment is not in the
    dump. (Another dump or checkpoint of the same table waits until this one has ended.) The dump
    appears whole, synced to disk, or not at all, and what was at `path` before stays until then.
    Memory needed beside the tables: some 200 MB at most, and three bits a row.

    Args:
        path: a directory; made if it is not there.
        variables: `DynamicVariable`s and `de.Variable`s: one, a sequence (their names are the
            tables' names on disk and must differ), or a dict of names and variables.
        optimizer: also write the state that it keeps in the rows, its settings and its number of
            steps. A step that runs at that very moment in another thread may count or not.
        quiet: True: no progress bar; False: one even where stderr is no terminal. Default: a bar on
            a terminal, of what takes more than some seconds.

    Returns:
        The watermark: pass it to `incremental_dump` as `since`.

    Raises:
        OSError: from the file system, such as a full disk. The path is as it was, unless it was the
            very last sync that failed.
        RuntimeError: something else writes at the path, or this is called in a `tf.function`.
    """
    tables = named_variables(variables)
    check_optimizer(optimizer)
    dynamic = {name: v for name, v in tables.items() if isinstance(v, DynamicVariable)}
    static = {name: v for name, v in tables.items() if not isinstance(v, DynamicVariable)}
    with storage.Publication(path, "base", checksum=rows_io.checksum) as publication:
        with Cut(list(dynamic.values()), [-1] * len(dynamic), with_deleted=False) as cut:
            known = [table.snapshots for table in dynamic.values()]
            settings = None if optimizer is None else optimizer_entry(optimizer, dynamic)
            values = {name: variable.read_value() for name, variable in static.items()}
            entries = rows_io.write_rows(
                publication, dynamic, cut, optimizer is not None, "dump", quiet
            )
        entries += rows_io.write_static(publication, values, first=len(entries), cut=cut)
        publication.publish(
            entries,
            watermark=cut.tick,
            watermark_utc_ns=cut.utc_ns,
            optimizer=settings,
        )
    return _published(publication.id, known, cut)


def incremental_dump(
    path: str | os.PathLike[str],
    variables: Any,
    since: Watermark | datetime.datetime | None = None,
    optimizer: OptimizerWrapper | None = None,
    *,
    quiet: bool | None = None,
) -> Watermark:
    """Appends to the chain at `path` a delta: rows that were updated, keys that were deleted.

    With a watermark, or with None, the delta holds exactly what changed after it: nothing is missed
    and nothing sent again, also while training goes on in other threads. As `dump`, it appears
    whole or not at all.

    Args:
        path: of a chain that ends with what these tables were dumped to or loaded from; or a
            directory for deltas alone.
        variables: as in `dump`, but `DynamicVariable`s only.
        since: None: the last snapshot at `path`. A watermark: what `dump`, `incremental_dump`,
            `load` or `apply_delta` returned. An aware datetime: at least what changed since then.
        optimizer: as in `dump`.
        quiet: as in `dump`.

    Returns:
        The delta's watermark.

    Raises:
        ValueError: the delta would leave a gap in the chain at `path`; or the tables never were
            what `since` says; or `since` is a datetime without time zone.
        tf.errors.FailedPreconditionError: the table does not remember all deletions since then, as
            it remembers only as many as it has rows, or a million: dump it anew.
        OSError, RuntimeError: as in `dump`.
    """
    tables = dynamic_only(named_variables(variables))
    check_optimizer(optimizer)
    with storage.Publication(path, "delta", checksum=rows_io.checksum) as publication:
        last = publication.last
        parent, since_tick, ticks = _delta_begin(since, last, tables, path, optimizer)
        with Cut(list(tables.values()), ticks, with_deleted=True) as cut:
            known = [table.snapshots for table in tables.values()]
            settings = None if optimizer is None else optimizer_entry(optimizer, tables)
            entries = rows_io.write_rows(
                publication, tables, cut, optimizer is not None, "delta", quiet
            )
        publication.publish(
            entries,
            since=since_tick,
            watermark=cut.tick,
            watermark_utc_ns=cut.utc_ns,
            parent=parent,
            optimizer=settings,
        )
    return _published(publication.id, known, cut)


def incremental_model_dump(
    variables: Any, utc_time: datetime.datetime
) -> tuple[list[Any], list[Any]]:
    """The rows of tables that were updated since a moment, as arrays in memory (SOK's call).

    Args:
        variables: as in `incremental_dump`.
        utc_time: an aware datetime.

    Returns:
        (keys, values): for each table an array [n] and an array [n, dimension]. Rows that were
        updated shortly before the moment may be among them; none is missing that was updated by a
        batch that began after it.

    Raises:
        ValueError: `utc_time` has no time zone.
    """
    tables = dynamic_only(named_variables(variables))
    tick = _tick_before(utc_time, "utc_time")
    parts: list[list[Rows]] = [[] for _ in tables]
    with Cut(list(tables.values()), [tick] * len(tables), with_deleted=False) as cut:
        for number, rows in cut.pieces():
            parts[number].append(rows)
        empty = [cut.no_rows(number) for number in range(len(tables))]
    keys, values = [], []
    for table, some, none in zip(tables.values(), parts, empty, strict=True):
        keys.append(np.concatenate([none.keys, *(rows.keys for rows in some)]))
        vectors = np.concatenate([none.vectors, *(rows.vectors for rows in some)])
        values.append(vectors.view(table.dtype.as_numpy_dtype))  # bfloat16 from its bits
    return keys, values


def _delta_begin(
    since: Watermark | datetime.datetime | None,
    last: storage.Manifest | None,
    tables: Mapping[str, DynamicVariable],
    path: Any,
    optimizer: OptimizerWrapper | None,
) -> tuple[str | None, int, list[int]]:
    """The delta's parent, its `since`, and the tick since which each table's rows belong to it."""
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
        _check_schema(last, tables, path)
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
        tick = _tick_before(since, "since")
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


def _check_schema(last: storage.Manifest, tables: Mapping[str, DynamicVariable], path: Any) -> None:
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


def _published(id_: str, known: Sequence[Snapshots], cut: Cut) -> Watermark:
    """Notes a snapshot for tables as they were when it was cut."""
    for snapshots in known:
        snapshots.note(id_, cut.tick)
    return Watermark(id_, cut.tick, _utc(cut.utc_ns))


def watermark_of(manifest: storage.Manifest) -> Watermark:
    """Up to where a snapshot goes."""
    return Watermark(manifest.id, manifest.watermark, _utc(manifest.watermark_utc_ns))


def _utc(utc_ns: int) -> datetime.datetime:
    seconds, rest = divmod(utc_ns, 10**9)
    utc = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return utc.replace(microsecond=rest // 1000)


def _tick_before(time: Any, name: str) -> int:
    """The last batch that certainly was before a moment."""
    if not isinstance(time, datetime.datetime):
        raise TypeError(f"{name} must be a datetime, got {time!r}.")
    if time.tzinfo is None or time.utcoffset() is None:
        raise ValueError(
            f"{name}={time!r} has no time zone: use datetime.now(timezone.utc), or "
            "pytz.utc.localize."
        )
    since_epoch = time - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    microseconds = since_epoch // datetime.timedelta(microseconds=1)
    return int(_ops.library().dynemb_tick_before(1000 * microseconds))


def dynamic_only(tables: Mapping[str, Any]) -> dict[str, DynamicVariable]:
    """The tables; raises TypeError if one is dense."""
    for name, variable in tables.items():
        if not isinstance(variable, DynamicVariable):
            raise TypeError(
                f"{name!r} is a dense variable, which does not know which of its rows changed: "
                "deltas are of DynamicVariables."
            )
    return dict(tables)


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError unless it is one of ours, or None."""
    if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
        raise TypeError(f"optimizer must be an OptimizerWrapper, got {optimizer!r}.")
