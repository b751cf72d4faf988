"""Writing tables to disk: dump and incremental_dump. docs/file_format.md describes the files."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from tf_dynemb import storage
from tf_dynemb._warn import warn
from tf_dynemb.chains.merge import merge
from tf_dynemb.dense import weights as dense_weights
from tf_dynemb.dense.optimizer_entry import check_optimizer, optimizer_entry
from tf_dynemb.optimizers.wrapper import OptimizerWrapper
from tf_dynemb.parallel.agreement import Ranks
from tf_dynemb.persistence import columns, static_rows
from tf_dynemb.persistence.continuation import common_ids, delta_begin, is_of_others
from tf_dynemb.persistence.entry_check import form_of
from tf_dynemb.persistence.joint_publication import JointPublication
from tf_dynemb.persistence.naming import (
    described,
    dynamic_only,
    named_variables,
    warn_of_automatic_names,
    with_automatic_names,
)
from tf_dynemb.persistence.watermark import Watermark
from tf_dynemb.tables.cut import Cut
from tf_dynemb.variables.dynamic import DynamicVariable


def dump(
    path: str | os.PathLike[str],
    variables: Any,
    optimizer: OptimizerWrapper | None = None,
    *,
    overwrite: bool = False,
    keep: int | None = None,
    dense: str | None = "all",
    extra: Mapping[str, Any] | None = None,
    quiet: bool | None = None,
) -> Watermark:
    """Writes tables and dense weights, as they are at one moment, as a new base at `path`.

    If other tables have written the chain at `path`, this raises, so that their rows are not
    replaced by mistake. Tables are the same after `load`, a checkpoint or a flush, also in another
    process.

    - Training can continue in other threads meanwhile. Its changes after that moment are not in the
      dump. Another dump or checkpoint of the same table waits until this one has ended.
    - The dump becomes visible when it is complete and synced to disk, or not at all. Until then,
      the contents of `path` remain.
    - Memory needed in addition to the tables: at most about 200 MB, and three bits per row.

    With several ranks, all of them call this, with the same variables in the same order, and each
    writes the rows that it owns. Only one thread per rank may call this, `load` and similar
    functions at a time. Call it between steps, so that the dump is of one moment on all ranks. If
    other threads train meanwhile, each rank writes its rows as they are at a slightly different
    moment. If the dump fails on one rank, or a rank dies, it fails on all; the error of the other
    ranks names the rank.

    Args:
        path: a directory, created if it does not exist, whose file system all ranks share; or the
            URL of a store, such as `s3://bucket/chain` (docs/stores.md).
        variables: one `DynamicVariable` or `tf_dynemb.Variable`, a sequence of them (their names
            are the tables' names on disk and must differ), or a dict of names and variables, such
            as `named_tables(model)`. A Keras model or layer, or a `tf.Module`, means all of its
            tables and, by `dense`, its dense weights; so does a dict that also has variables of
            TensorFlow or Keras.
        optimizer: if given, the dump includes the state that it keeps in the rows, its settings and
            its number of steps (rank 0's). A step that runs in another thread at that moment may or
            may not be counted.
        overwrite: whether the dump may replace a chain of other tables. Served models and readers
            that follow the path do not take the new base unless they are told to.
        keep: the number of bases before this one that stay at the path, with their deltas, for
            `load(until=...)` and `tf-dynemb rollback`. None: none; but a chain of other tables,
            which `overwrite` replaces, stays until the next base.
        dense: what to write of a model besides its tables. If another thread trains meanwhile, a
            step may be in some of the weights and not in others, or not in the rows.

            - "all": the weights, trainable or not, but not the state of metrics; the states of
              random seeds; the variables of the optimizer, if it is given. After `load` with the
              same arguments, the training goes on as it would have without the interruption. An
              optimizer that is not built is built for this.
            - "weights": the weights, which is what serving needs.
            - None: nothing.

            A weight is named by its place in the model, such as `layers/7/kernel`, or
            `score/kernel` if its layer was named `score`.
        extra: a dict that `load` returns, such as the hour of the data, as JSON has it. Only rank
            0's is written.
        quiet: True: no progress bar. False: a progress bar even if stderr is not a terminal.
            Default: a bar on a terminal, if the work takes more than a few seconds. Only rank 0 has
            a bar, for its own rows.

    Returns:
        The watermark, the same on all ranks. Pass it to `incremental_dump` as `since`.

    Raises:
        OSError: an error of the file system, such as a full disk. The contents of the path are
            unchanged, unless it was the very last sync that failed.
        RuntimeError: another writer uses the path; or the function was called inside a
            `tf.function`, or failed on another rank.
        TypeError: an element of `variables`, or `optimizer`, has another type; or `extra` is not a
            dict that JSON can express; or a dense weight is of texts or complex numbers.
        ValueError: the chain at `path` is of other tables, or has tables that are not in
            `variables`, and `overwrite` is False; or two variables have one name; or the ranks name
            different variables, or do not share the file system, or a trainable dense weight is not
            the same on all ranks; or `keep` is negative, or `dense` has another value.
    """
    if keep is not None and not _is_number(keep, 0):
        raise ValueError(f"keep must be None or a number of bases, got {keep!r}.")
    contents = _Contents(variables, optimizer, dense, extra)
    return _publish(path, "base", contents, None, quiet, overwrite, keep)


def incremental_dump(
    path: str | os.PathLike[str],
    variables: Any,
    since: Watermark | datetime.datetime | None = None,
    optimizer: OptimizerWrapper | None = None,
    *,
    used: bool = False,
    compact_every: int | None = None,
    keep: int = 0,
    dense: str | None = "all",
    extra: Mapping[str, Any] | None = None,
    quiet: bool | None = None,
) -> Watermark:
    """Appends a delta to the chain at `path`: the updated rows, the deleted keys, dense weights.

    With a watermark or None as `since`, the delta contains exactly the changes after that snapshot,
    even while training continues in other threads: none is missed, and none is repeated. (After an
    `apply_delta` to a table that was also trained, the next delta can repeat the applied changes.)
    As with `dump`, the delta appears as a whole or not at all, and with several ranks all of them
    call this. If nothing has changed since the last snapshot at `path`, no delta is written.

    Args:
        path: a chain that ends with a snapshot that these tables were dumped to or loaded from; or
            a directory that contains only deltas.
        variables: as in `dump`, but the tables can only be `DynamicVariable`s. Dense weights are
            written whole.
        since: where the delta begins. None: at the last snapshot at `path`. A watermark that
            `dump`, `incremental_dump`, `load` or `apply_delta` returned: at the snapshot of that
            watermark. An aware datetime: the delta contains at least the changes since then.
        optimizer: as in `dump`.
        used: whether the delta also contains the rows that were used since then but not updated,
            for example by evaluation or `set_scores`, so that a table that loads the chain evicts
            the same rows as this one, and knows when rows were last used (`ttl_since="access"`).
            All rows are examined for this. Tables whose `evict_strategy` is "lfu", "epoch_lfu" or
            "score" do not record when a row was used: all of their rows are in the delta.
        compact_every: the number of deltas at `path` at which they are merged with their base into
            a new one, after this delta; None: never. Rank 0 reads and writes all rows on disk for
            this, while the others wait; the keys of the deltas are in memory meanwhile. Readers
            that have applied the deltas need not do anything. If it fails, for example because the
            disk is full, the deltas stay, with a warning.
        keep: the number of bases that `compact_every` replaces and that stay at `path`, as in
            `dump`.
        dense: as in `dump`. A chain can have the weights in each snapshot, or only in some.
        extra: as in `dump`.
        quiet: as in `dump`.

    Returns:
        The watermark of the delta, or of the last snapshot at `path` if nothing has changed since.

    Raises:
        ValueError: the delta would leave a gap in the chain at `path`; or the tables were never
            dumped to or loaded from the snapshot of `since`; or `since` is a datetime without time
            zone, or later than now; or `compact_every` is not positive; or as in `dump`.
        TypeError: a variable is not a `DynamicVariable`, or `since` or `optimizer` has another
            type.
        tf.errors.FailedPreconditionError: a table does not remember all deletions since then. The
            limit is the number of its rows, or a million if that is more. Write a new base with
            `dump`.
        OSError, RuntimeError: as in `dump`.
    """
    if compact_every is not None and not _is_number(compact_every, 1):
        raise ValueError(
            f"compact_every must be None or a number of deltas, got {compact_every!r}."
        )
    if not _is_number(keep, 0):
        raise ValueError(f"keep must be a number of bases, got {keep!r}.")
    contents = _Contents(variables, optimizer, dense, extra)
    watermark = _publish(path, "delta", contents, since, quiet, used=used)
    if compact_every is not None:
        _compact(path, compact_every, keep)
    return watermark


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _compact(path: str | os.PathLike[str], most: int, keep: int) -> None:
    """Merges the chain at a path into a new base if it has at least `most` deltas."""
    ranks = Ranks("incremental_dump")
    with ranks.stage():
        if ranks.rank == 0:
            try:
                chain = storage.Chain.open(path)
                if chain.base is not None and len(chain.deltas) >= most:
                    merge(path, keep=keep)
            except (OSError, RuntimeError, ValueError) as error:
                warn(f"compact_every={most}: the deltas at {path} were not merged: {error}")


class _Contents(NamedTuple):
    """What a snapshot is of: arguments of `dump` and `incremental_dump`."""

    variables: Any
    optimizer: OptimizerWrapper | None
    dense: str | None
    extra: Mapping[str, Any] | None


def _publish(
    path: str | os.PathLike[str],
    kind: str,
    contents: _Contents,
    since: Watermark | datetime.datetime | None,
    quiet: bool | None,
    overwrite: bool = False,
    keep: int | None = None,
    used: bool = False,
) -> Watermark:
    """Writes a base or a delta of the current content of the tables."""
    variables, optimizer, dense, extra = contents
    is_delta = kind == "delta"
    ranks = Ranks("incremental_dump" if is_delta else "dump")
    with JointPublication(ranks, path, kind) as publication:
        with publication.beginning():
            tables = named_variables(variables)
            if is_delta:
                dynamic_only(tables)
            else:
                automatic = with_automatic_names(tables, variables)
                forms = {name: form_of(tables[name]) for name in automatic}
                warn_of_automatic_names("dump", automatic, forms)
            check_optimizer(optimizer)
            dense_weights.check_extra(extra)
            weights = dense_weights.chosen(dense, variables)
            publication.is_of(
                [
                    *described(tables),
                    f"optimizer: {optimizer is not None}",
                    *dense_weights.described(weights),
                ],
                [variable.history for variable in tables.values()],
            )
        for variable, history in zip(tables.values(), publication.histories, strict=True):
            variable.history = history
        dynamic = {name: v for name, v in tables.items() if isinstance(v, DynamicVariable)}
        static = {name: v for name, v in tables.items() if not isinstance(v, DynamicVariable)}
        settings = None
        dense_values = dense_weights.values_of(ranks, weights, variables, optimizer, tables)
        with publication.writing() as part:
            if not is_delta and publication.publication is not None:
                others = is_of_others(publication.publication, tables)
                if others and not overwrite:
                    raise ValueError(
                        f"{others} The dump would replace them. Load them first, dump to another "
                        "path, or pass overwrite=True."
                    )
                keep = int(bool(others)) if keep is None else keep
            parent, since_tick, ticks, continues_last = None, 0, [-1] * len(dynamic), False
            if is_delta:
                last = publication.last
                parent, since_tick, ticks = delta_begin(since, last, dynamic, path, optimizer)
                if last is not None:
                    continues_last = since is None or (
                        isinstance(since, Watermark) and since.id in last.ids
                    )
            with Cut(list(dynamic.values()), ticks, with_deleted=is_delta, with_used=used) as cut:
                known = [table.snapshots for table in dynamic.values()]
                after = [] if is_delta else common_ids(known)
                if optimizer is not None and ranks.rank == 0:
                    settings = optimizer_entry(optimizer, dynamic, "training" in dense_values)
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
            for name, arrays in dense_values.items():
                part.write_dense(name, arrays)
            publication.has(entries, cut, parent, since_tick)
        watermark = publication.publish(settings, after, keep or 0, continues_last, extra)
    # Each rank records the snapshot with the tick of the rank's clock.
    for snapshots in known:
        if watermark.id not in snapshots:  # otherwise nothing has changed since
            snapshots.note(watermark.id, cut.tick)
    return watermark
