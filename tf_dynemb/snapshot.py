"""Tables to disk and back: dump, load, deltas. docs/file_format.md says what the files are."""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dynemb import _ops, rows_io, storage
from tf_dynemb.cut import Cut, Rows, last_tick
from tf_dynemb.dynamic_variable import DynamicVariable, StateSpec
from tf_dynemb.naming import named_variables
from tf_dynemb.optimizer import OptimizerWrapper
from tf_dynemb.optimizer_entry import optimizer_entry, restore_optimizer


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
    dump. The dump appears whole, synced to disk, or not at all, and what was at `path` before stays
    until then. Memory needed beside the tables: some 200 MB at most, whatever their size.

    Args:
        path: a directory; made if it is not there.
        variables: `DynamicVariable`s and `de.Variable`s: one, a sequence (their names are the
            tables' names on disk and must differ), or a dict of names and variables.
        optimizer: also write the state that it keeps in the rows, its settings and its number of
            steps.
        quiet: True: no progress bar; False: one even where stderr is no terminal. Default: a bar on
            a terminal, of what takes more than some seconds.

    Returns:
        The watermark: pass it to `incremental_dump` as `since`.

    Raises:
        OSError: from the file system, such as a full disk. The path is as it was.
        RuntimeError: something else writes at the path, or this is called in a `tf.function`.
    """
    tables = named_variables(variables)
    _check_optimizer(optimizer)
    dynamic = {name: v for name, v in tables.items() if isinstance(v, DynamicVariable)}
    static = {name: v for name, v in tables.items() if not isinstance(v, DynamicVariable)}
    with storage.Publication(path, "base", checksum=rows_io.checksum) as publication:
        with Cut(list(dynamic.values()), [-1] * len(dynamic), with_deleted=False) as cut:
            entries = rows_io.write_rows(
                publication, dynamic, cut, optimizer is not None, "dump", quiet
            )
        entries += rows_io.write_static(publication, static, first=len(entries), cut=cut)
        for number in range(len(entries)):
            publication.write_index(number, build=rows_io.build_index)
        publication.publish(
            entries,
            watermark=cut.tick,
            watermark_utc_ns=cut.utc_ns,
            optimizer=None if optimizer is None else optimizer_entry(optimizer),
        )
    return _published(publication.id, dynamic, cut)


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
    tables = _dynamic_only(named_variables(variables))
    _check_optimizer(optimizer)
    with storage.Publication(path, "delta", checksum=rows_io.checksum) as publication:
        last = publication.last
        parent, since_tick, ticks = _delta_begin(since, last, tables, path)
        with Cut(list(tables.values()), ticks, with_deleted=True) as cut:
            entries = rows_io.write_rows(
                publication, tables, cut, optimizer is not None, "delta", quiet
            )
        publication.publish(
            entries,
            since=since_tick,
            watermark=cut.tick,
            watermark_utc_ns=cut.utc_ns,
            parent=parent,
            optimizer=None if optimizer is None else optimizer_entry(optimizer),
        )
    return _published(publication.id, tables, cut)


def incremental_model_dump(
    variables: Any, utc_time: datetime.datetime
) -> tuple[list[Any], list[Any]]:
    """The rows of tables that were updated since a moment, as arrays in memory (SOK's call).

    Args:
        variables: as in `incremental_dump`.
        utc_time: an aware datetime.

    Returns:
        (keys, values): for each table an array [n] and an array [n, dimension]. Rows that were
        updated shortly before the moment may be among them; none that was updated after is missing.

    Raises:
        ValueError: `utc_time` has no time zone.
    """
    tables = _dynamic_only(named_variables(variables))
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


def load(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: OptimizerWrapper | None = None,
    *,
    cast: bool = False,
    quiet: bool | None = None,
) -> Watermark:
    """Makes tables what the chain at `path` says: its base and every delta after it.

    Everything is checked and loaded beside the tables first; then all of them change at once. What
    was in them before is gone. A load that fails changes nothing.

    Args:
        path: of the chain, or of one snapshot in it.
        variables: the tables to load, as in `dump`; a dict says under which names they are on disk.
            Other tables there are left alone.
        optimizer: also load the state in the rows, the settings and the number of steps. State of
            another optimizer is dropped, with a warning; rows then begin with fresh state.
        cast: whether vectors may be of another dtype on disk; they are rounded to nearest.
        quiet: as in `dump`.

    Returns:
        The watermark that the tables are at.

    Raises:
        FileNotFoundError: there is no dump.
        tf_dynemb.storage.DataLossError: a file is missing or damaged; it is named.
        ValueError: a table is not there, or differs in dimension, key type or (without `cast`)
            dtype.
        tf.errors.ResourceExhaustedError: a table cannot take the rows.
    """
    tables = named_variables(variables)
    _check_optimizer(optimizer)
    if not tf.executing_eagerly():
        raise RuntimeError("tables are loaded eagerly only: call load outside tf.function.")
    return storage.Chain.load(path, lambda chain: _load(chain, tables, optimizer, cast, quiet))


def apply_delta(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: OptimizerWrapper | None = None,
    *,
    cast: bool = False,
) -> Watermark:
    """Brings tables forward by the deltas at `path` that continue what they hold.

    Rows that a delta has are set, keys that it deleted are erased; other rows stay, also those that
    were trained here. All deltas are verified before the first is applied.

    Args:
        path: of a chain, of a directory of deltas, or of one delta.
        variables: as in `load`.
        optimizer: also take over the state of rows, if it is this optimizer's.
        cast: as in `load`.

    Returns:
        The watermark of the last delta applied, or of the last one there if none was new.

    Raises:
        ValueError: no delta there continues what the tables hold.
        tf_dynemb.storage.DataLossError: as in `load`.
    """
    tables = _dynamic_only(named_variables(variables))
    _check_optimizer(optimizer)
    return storage.Chain.load(path, lambda chain: _apply(chain, tables, optimizer, cast))


def _apply(
    chain: storage.Chain,
    tables: Mapping[str, DynamicVariable],
    optimizer: OptimizerWrapper | None,
    cast: bool,
) -> Watermark:
    fresh = _continuations(chain, tables)
    for snapshot in fresh:
        snapshot.verify(checksum=rows_io.checksum)
        for name, table in tables.items():
            _check_entry(snapshot, name, table, cast)
    if optimizer is not None:
        optimizer.attach(list(tables.values()))
    for snapshot in fresh:
        manifest = snapshot.manifest
        _ops.library().dynemb_advance_clock(manifest.watermark, manifest.watermark_utc_ns)
        for name, table in tables.items():
            has_state = optimizer is not None and _takes_state(
                snapshot, name, table, table.state_spec
            )
            rows_io.erase(snapshot, name, table.handle, table.key_type)
            rows_io.load_rows(snapshot, name, table, table.handle, has_state, at_tick=-1)
            table.note_snapshot(manifest.id, last_tick())
    if fresh and optimizer is not None:
        restore_optimizer(optimizer, chain.last.manifest.optimizer)
    return _watermark(chain.last.manifest)


def _load(
    chain: storage.Chain,
    tables: Mapping[str, Any],
    optimizer: OptimizerWrapper | None,
    cast: bool,
    quiet: bool | None,
) -> Watermark:
    if chain.base is None:
        raise ValueError(
            f"{chain.last.directory.parent} holds deltas but no dump that they continue: load "
            "that, then apply them with apply_delta."
        )
    dynamic = {name: v for name, v in tables.items() if isinstance(v, DynamicVariable)}
    for name, variable in tables.items():
        for snapshot in chain.snapshots if name in dynamic else [chain.base]:
            _check_entry(snapshot, name, variable, cast)
    for snapshot in chain.snapshots:
        with rows_io.progress(0, "verify", "B", quiet) as bar:

            def show(done: int, total: int, bar: Any = bar) -> None:
                bar.total = total
                bar.update(done - bar.n)

            snapshot.verify(checksum=rows_io.checksum, progress=show)

    last = chain.last.manifest
    specs = [_state_spec(table, optimizer) for table in dynamic.values()]
    handles = [
        _stage(chain, name, table, spec, optimizer is not None, quiet)
        for (name, table), spec in zip(dynamic.items(), specs, strict=True)
    ]
    values = {
        name: rows_io.read_static(chain.base, name, variable)
        for name, variable in tables.items()
        if name not in dynamic
    }
    if dynamic:
        _ops.library().dynemb_adopt(
            [table.handle for table in dynamic.values()],
            handles,
            last.watermark,
            last.watermark_utc_ns,
        )
    for name, value in values.items():
        tables[name].assign(value)
    for table, spec in zip(dynamic.values(), specs, strict=True):
        table.snapshots = dict.fromkeys(last.ids, last.watermark)
        if optimizer is not None:
            table.state_was_restored(spec)
    if optimizer is not None:
        optimizer.attach(list(dynamic.values()))
        restore_optimizer(optimizer, last.optimizer or chain.base.manifest.optimizer)
    return _watermark(last)


def _stage(
    chain: storage.Chain,
    name: str,
    table: DynamicVariable,
    state_spec: StateSpec | None,
    with_state: bool,
    quiet: bool | None,
) -> Any:
    """A table with the rows of a chain, apart from the variable; its handle."""
    assert chain.base is not None
    _, entry = chain.base.manifest.table(name)
    rows = sum(shard.rows for shard in entry.shards)
    handle = table.make_empty(rows, state_spec)
    tick = chain.last.manifest.watermark + 1
    try:
        for snapshot in chain.snapshots:
            has_state = with_state and _takes_state(snapshot, name, table, state_spec)
            rows_io.erase(snapshot, name, handle, table.key_type)
            rows_io.load_rows(snapshot, name, table, handle, has_state, tick, quiet)
    except tf.errors.ResourceExhaustedError as error:
        raise tf.errors.ResourceExhaustedError(
            None, None, f"table {table.name!r} cannot take the rows of {name!r}: {error.message}"
        ) from error
    names, values = _ops.library().dynemb_stats(handle)
    stats = dict(zip(names.numpy().tolist(), values.numpy().tolist(), strict=True))
    if stats[b"evictions"]:
        warnings.warn(
            f"{stats[b'evictions']} of the rows of table {name!r} had no place in "
            f"{table.name!r}, whose max_capacity is {table.options.max_capacity}; those not used "
            "for longest were left out.",
            stacklevel=5,
        )
    return handle


def _check_entry(snapshot: storage.Snapshot, name: str, variable: Any, cast: bool) -> None:
    """Raises ValueError unless a snapshot's table can be loaded into the variable."""
    manifest = snapshot.manifest
    names = [entry.name for entry in manifest.tables]
    if name not in names:
        raise ValueError(
            f"{snapshot.directory} has no table {name!r}; its tables are {', '.join(names)}. "
            "A dict of names and variables loads tables under other names."
        )
    _, entry = manifest.table(name)
    if isinstance(variable, DynamicVariable):
        have = {
            "dimension": variable.dimension,
            "key_type": variable.key_type.name,
            "dtype": variable.dtype.name,
        }
    else:
        have = {"dimension": variable.shape[1], "key_type": "int64", "dtype": variable.dtype.name}
        rows = sum(shard.rows for shard in entry.shards)
        if rows != variable.shape[0]:
            raise ValueError(
                f"table {name!r} has {rows} rows on disk, but {variable.name!r} has "
                f"{variable.shape[0]}."
            )
    for what, here in have.items():
        there = getattr(entry, what)
        if there != here and not (what == "dtype" and cast):
            hint = " Pass cast=True to convert the vectors." if what == "dtype" else ""
            raise ValueError(
                f"table {name!r} has {what} {there} on disk, but {variable.name!r} has {here}."
                + hint
            )


def _state_spec(table: DynamicVariable, optimizer: OptimizerWrapper | None) -> StateSpec | None:
    """The state that rows are loaded for: the optimizer's, or what the table has."""
    return table.state_spec if optimizer is None else optimizer.state_spec(table)


def _takes_state(
    snapshot: storage.Snapshot, name: str, table: DynamicVariable, spec: StateSpec | None
) -> bool:
    """Whether a snapshot's state goes into rows with this state; warns of what is dropped."""
    _, entry = snapshot.manifest.table(name)
    ours = spec[0] if spec else "no optimizer"
    if entry.state and spec and spec[:2] == (entry.state.optimizer, tuple(entry.state.widths)):
        return entry.state_width > 0
    if entry.state and entry.state_width:
        warnings.warn(
            f"the state of {entry.state.optimizer!r} that table {name!r} has in "
            f"{snapshot.directory} is dropped: {table.name!r} is trained with {ours!r}. Its rows "
            "begin with fresh state.",
            stacklevel=6,
        )
    elif spec and sum(spec[1]) and any(shard.rows for shard in entry.shards):
        warnings.warn(
            f"table {name!r} has no optimizer state in {snapshot.directory}: rows that are in it "
            f"begin with fresh state of {ours!r}.",
            stacklevel=6,
        )
    return False


def _delta_begin(
    since: Watermark | datetime.datetime | None,
    last: storage.Manifest | None,
    tables: Mapping[str, DynamicVariable],
    path: Any,
) -> tuple[str | None, int, list[int]]:
    """The delta's parent, its `since`, and the tick since which each table's rows belong to it."""
    ids = [table.snapshots for table in tables.values()]
    # A merged base stands for what it was merged from.
    known = _common(last.ids, ids) if last else None
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
    ends = [of_table[known] for of_table in ids] if known else []
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
        begins = [of_table[since.id] for of_table in ids]
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


def _common(ids: Sequence[str], known: Sequence[Mapping[str, int]]) -> str | None:
    """The first id that all tables know."""
    return next((id_ for id_ in ids if all(id_ in of_table for of_table in known)), None)


def _continuations(
    chain: storage.Chain, tables: Mapping[str, DynamicVariable]
) -> list[storage.Snapshot]:
    """The deltas of a chain that come after what all tables hold."""
    known = [table.snapshots for table in tables.values()]
    snapshots = chain.snapshots
    for place in reversed(range(len(snapshots))):
        manifest = snapshots[place].manifest
        if _common(manifest.ids, known):
            return snapshots[place + 1 :]
        if manifest.parent is not None and _common([manifest.parent], known):
            return snapshots[place:]
    raise ValueError(
        f"{chain.last.directory} and what is before it do not continue what these tables hold: "
        "load the dump that they continue first."
    )


def _published(id_: str, tables: Mapping[str, DynamicVariable], cut: Cut) -> Watermark:
    for table in tables.values():
        table.note_snapshot(id_, cut.tick)
    return Watermark(id_, cut.tick, _utc(cut.utc_ns))


def _watermark(manifest: storage.Manifest) -> Watermark:
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


def _dynamic_only(tables: Mapping[str, Any]) -> dict[str, DynamicVariable]:
    for name, variable in tables.items():
        if not isinstance(variable, DynamicVariable):
            raise TypeError(
                f"{name!r} is a dense variable, which does not know which of its rows changed: "
                "deltas are of DynamicVariables."
            )
    return dict(tables)


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
        raise TypeError(f"optimizer must be an OptimizerWrapper, got {optimizer!r}.")
