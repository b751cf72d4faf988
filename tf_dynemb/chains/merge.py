"""Merging of a base and its deltas into one new base, also of an earlier state."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import numpy.typing as npt

from tf_dynemb.chains.rows import Block, Source, TableRows, tables_of
from tf_dynemb.format.steps import without_steps
from tf_dynemb.storage import Chain, Publication, Shard, Snapshot, TableEntry
from tf_dynemb.storage.places import place_of

_ALL = 2**31  # bases to keep


def merge(
    path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, keep: int = 0
) -> Snapshot | None:
    """Publishes the state of the chain at `path` as a base.

    Deltas that continue the last snapshot continue the new base too. The keys of the deltas are
    kept in memory.

    Args:
        path: the path or URL of the chain; all of it is verified first.
        out: the path or URL of the new base, without snapshots. None: `path` itself, whose
            snapshots the new base then supersedes.
        keep: in place, the number of superseded bases that stay, with their deltas.

    Returns:
        The new base; None if `out` is None and there are no deltas.

    Raises:
        DataLossError: the chain is damaged.
        FileNotFoundError: `path` is not a directory, or there is no snapshot.
        ValueError: there is no base, or `out` contains other snapshots or is itself a snapshot; or
            a delta has a table in another form than the base.
        RuntimeError: another process is writing at `out`.
    """
    in_place = out is None
    source = place_of(path)
    target = source if out is None else place_of(out, "out")
    if target.is_snapshot:
        raise ValueError(f"{target} is a snapshot, and cannot contain another one: pass OUT.")
    if not source.names() and not source.is_snapshot:
        raise source.absent()
    if not in_place and target.names():
        raise ValueError(
            f"{target} already contains snapshots, and the new base would supersede them: pass "
            "another path."
        )
    if not in_place:
        tables_of(Chain.open(source))  # before anything is created at OUT
    # In place, no other process can publish while the lock is held.
    with Publication(target, "base") as publication:
        chain = Chain.open(source)
        if in_place and not chain.deltas:
            return None
        *before, last = chain.snapshots
        older = [id_ for each in before for id_ in each.manifest.ids]
        return _publish(publication, chain, older, last.manifest.ids, keep)


def rollback(path: str | os.PathLike[str], id_: str) -> Snapshot:
    """Publishes the state of a snapshot at `path`, which can be superseded, as the newest base.

    Readers that follow the path take it, as the latest state of their tables. All snapshots stay:
    `prune` removes the superseded ones.

    Args:
        path: the path of the chain.
        id_: the id of the snapshot, or its first digits.

    Returns:
        The new base.

    Raises:
        DataLossError: the snapshot, or one that it continues, is damaged.
        FileNotFoundError: there is no such snapshot.
        ValueError: several snapshots have these first digits; or it is the last one; or there is no
            base before it.
        RuntimeError: another process is writing at the path.
    """
    with Publication(path, "base") as publication:
        place = publication.place
        names = Chain.names_until(place, id_)
        everything = place.names()
        if str(everything[-1]) == names[-1]:
            raise ValueError(f"{names[-1]} is the last snapshot at {place} already.")
        # The snapshots that followed are older than the new base, too: readers that have applied
        # them go on.
        known = place.open([str(name) for name in everything])
        older = [id_ for one in known for id_ in (*one.manifest.after, *one.manifest.ids)]
        return _publish(publication, Chain.of(place, names), older, (), _ALL)


def _publish(
    publication: Publication,
    chain: Chain,
    older: list[str],
    continues: tuple[str, ...],
    keep: int,
) -> Snapshot:
    """Publishes the state of a chain.

    Args:
        publication: the base.
        chain: the chain.
        older: the ids of snapshots that the base is a later state of, besides the snapshots of its
            base.
        continues: the ids of snapshots with the same state.
        keep: as in `Publication.publish`.
    """
    names = tables_of(chain)
    for snapshot in chain.snapshots:
        snapshot.verify()
    entries = [
        _write(publication, number, TableRows(chain, name), chain)
        for number, name in enumerate(names)
    ]
    manifests = [snapshot.manifest for snapshot in chain.snapshots]
    holder = chain.dense_source
    if holder is not None:
        publication.part.copy_dense(holder)
    optimizers = [each.optimizer for each in manifests if each.optimizer]
    return publication.publish(
        entries,
        watermark=manifests[-1].watermark,
        watermark_utc_ns=manifests[-1].watermark_utc_ns,
        continues=continues,
        after=list(dict.fromkeys([*manifests[0].after, *older])),
        optimizer=optimizers[-1] if optimizers else None,
        world_size=max(each.world_size for each in manifests),
        keep=keep,
        extra=manifests[-1].extra,
        copy=manifests[-1].copy,
    )


def _write(publication: Publication, number: int, rows: TableRows, chain: Chain) -> TableEntry:
    """Writes a table's columns; each row stays in the shard that it was last written to.

    The ages of rows and the admission counters come from the last snapshot, which has all of them.
    """
    entry = rows.entry
    # Dense variables are in bases only.
    last = chain.last
    newer = next((each for each in last.manifest.tables if each.name == entry.name), entry)
    ranks = sorted({source.shard.rank for source in rows.sources})
    steps = without_steps(newer.steps)
    newest = {source.shard.rank: source for source in rows.sources if source.snapshot is last}
    shards = []
    for rank in ranks:
        shard = _write_shard(publication, number, rows, rank)
        shard = dataclasses.replace(shard, expiry_marks=newer.expiry_marks, steps=steps)
        shards.append(_with_counters(publication, number, shard, newest.get(rank)))
    return dataclasses.replace(
        entry,
        shards=tuple(shards),
        ttl_clock=newer.ttl_clock,
        admission_lines=newer.admission_lines,
    )


def _with_counters(
    publication: Publication, number: int, shard: Shard, source: Source | None
) -> Shard:
    if source is None or not source.shard.admission_lines:
        return shard
    lines = source.column("admission")
    publication.part.column(number, "admission", lines.dtype, lines.shape[1:], shard.rank).append(
        lines
    )
    first, count = source.shard.first_admission_line, source.shard.admission_lines
    return dataclasses.replace(shard, first_admission_line=first, admission_lines=count)


def _write_shard(publication: Publication, number: int, rows: TableRows, rank: int) -> Shard:
    sources = [source for source in rows.sources if source.shard.rank == rank]
    # A shard without rows has no times.
    base_tick = min((source.shard.base_tick for source in sources if source.shard.rows), default=0)
    model = sources[0]
    names = [
        name
        for name in model.table.columns("base", model.shard)
        if name not in ("index", "admission")
    ]
    writers = {}
    for name in names:
        dtype, shape = rows.entry.column_type(name, model.shard)
        writers[name] = publication.part.column(number, name, dtype, shape[1:], rank)
    count = 0
    for block in rows.blocks(rank):
        count += block.keys.size
        for name, writer in writers.items():
            values = block.column(name)
            if name == "updates" or (name == "accesses" and rows.entry.accesses_are_times):
                values = _ticks(block, values, base_tick)
            writer.append(values)
    publication.part.write_index(number, rank)
    return Shard(rank, count, 0, base_tick)


def _ticks(block: Block, ticks: npt.NDArray[np.uint32], base_tick: int) -> npt.NDArray[np.uint32]:
    """Returns the same times relative to another tick."""
    shift = block.source.shard.base_tick - base_tick
    if shift + int(ticks.max()) >= 2**32:
        raise ValueError(
            f"{block.source.snapshot} has times 2**32 ticks or more after the oldest "
            "times of its base: one shard cannot contain both."
        )
    return ticks + np.uint32(shift)
