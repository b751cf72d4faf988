"""Tables to disk: dump and incremental_dump. docs/file_format.md says what the files are."""

from __future__ import annotations

import datetime
import os
from typing import Any

from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.parallel.agreement import Ranks
from tf_dynemb.persistence.continuation import delta_begin
from tf_dynemb.persistence.naming import described, dynamic_only, named_variables
from tf_dynemb.persistence.optimizer_entry import check_optimizer, optimizer_entry
from tf_dynemb.snapshots import columns, static_rows
from tf_dynemb.snapshots.joint_publication import JointPublication
from tf_dynemb.snapshots.watermark import Watermark
from tf_dynemb.tables.cut import Cut
from tf_dynemb.variables.dynamic import DynamicVariable


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

    With several ranks all of them call this, with the same variables in the same order, and each
    writes the rows that it owns; no two threads call this, `load` or the like at a time. Call it
    between steps: then the dump is of that one moment. While other threads train, what each rank
    wrote is of a moment of its own, close to the others'. If it fails on one rank, or a rank dies,
    it fails on all; the others' error names the rank.

    Args:
        path: a directory; made if it is not there. All ranks must share its file system.
        variables: `DynamicVariable`s and `de.Variable`s: one, a sequence (their names are the
            tables' names on disk and must differ), or a dict of names and variables.
        optimizer: also write the state that it keeps in the rows, its settings and its number of
            steps (rank 0's). A step that runs at that very moment in another thread may count or
            not.
        quiet: True: no progress bar; False: one even where stderr is no terminal. Default: a bar on
            a terminal, of what takes more than some seconds. Only rank 0 has one, of its rows.

    Returns:
        The watermark, the same on all ranks: pass it to `incremental_dump` as `since`.

    Raises:
        OSError: from the file system, such as a full disk. The path is as it was, unless it was the
            very last sync that failed.
        RuntimeError: something else writes at the path, or this is called in a `tf.function`, or
            it failed on another rank.
        ValueError: the ranks name different variables, or do not share the file system.
    """
    return _publish(path, "base", variables, None, optimizer, quiet)


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
    whole or not at all, and with several ranks all of them call it.

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
    return _publish(path, "delta", variables, since, optimizer, quiet)


def _publish(
    path: str | os.PathLike[str],
    kind: str,
    variables: Any,
    since: Watermark | datetime.datetime | None,
    optimizer: OptimizerWrapper | None,
    quiet: bool | None,
) -> Watermark:
    """Writes a base or a delta of what the tables hold now."""
    is_delta = kind == "delta"
    ranks = Ranks("incremental_dump" if is_delta else "dump")
    with JointPublication(ranks, path, kind) as publication:
        with publication.beginning():
            tables = named_variables(variables)
            if is_delta:
                dynamic_only(tables)
            check_optimizer(optimizer)
            publication.is_of([*described(tables), f"optimizer: {optimizer is not None}"])
        dynamic = {name: v for name, v in tables.items() if isinstance(v, DynamicVariable)}
        static = {name: v for name, v in tables.items() if not isinstance(v, DynamicVariable)}
        settings = None
        with publication.writing() as part:
            parent, since_tick, ticks = None, 0, [-1] * len(dynamic)
            if is_delta:
                parent, since_tick, ticks = delta_begin(
                    since, publication.last, dynamic, path, optimizer
                )
            with Cut(list(dynamic.values()), ticks, with_deleted=is_delta) as cut:
                known = [table.snapshots for table in dynamic.values()]
                if optimizer is not None and ranks.rank == 0:
                    settings = optimizer_entry(optimizer, dynamic)
                values = {name: variable.read_value() for name, variable in static.items()}
                entries = columns.write_rows(
                    part,
                    dynamic,
                    cut,
                    optimizer is not None,
                    "delta" if is_delta else "dump",
                    quiet if ranks.rank == 0 else True,
                )
            entries += static_rows.write_static(part, static, values, len(entries), cut.tick)
            publication.has(entries, cut, parent, since_tick)
        watermark = publication.publish(settings)
    # Every rank knows the snapshot by the tick of its own clock.
    for snapshots in known:
        snapshots.note(watermark.id, cut.tick)
    return watermark
