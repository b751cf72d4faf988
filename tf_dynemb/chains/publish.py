"""Served copies of chains, which go on with the chain that they are of."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tf_dynemb._presence import exists, local_path, remove_tree
from tf_dynemb.chains.snapshot_copy import without_training, write_manifest
from tf_dynemb.chains.thinning import ThinCopies, Thinning
from tf_dynemb.storage import Chain, Snapshot
from tf_dynemb.storage.chain import MANIFEST, Name, list_snapshots
from tf_dynemb.storage.manifest import Manifest
from tf_dynemb.storage.publication import (
    locked,
    make_directory,
    prune_locked,
    remove_unpublished,
    sync_directory,
    unpublished,
)


def publish(
    path: str | os.PathLike[str],
    *,
    from_: str | os.PathLike[str],
    keep: int = 0,
    rows: str | Mapping[str, str] | None = None,
    where: Mapping[str, Any] | None = None,
    max_rows: int | Mapping[str, int] | None = None,
) -> list[Snapshot]:
    """Makes a served copy of a chain, or goes on with one.

    The copy has what lookups need: rows, deleted keys and dense weights. It lacks the state of
    optimizers, which is two thirds of the rows of Adam, and admission counters. Readers and
    exported models follow it as they follow the chain: snapshots keep their ids and watermarks.
    `load` reads it as a dump without an optimizer (with a model, pass `dense="weights"`). Training
    that continues from there is another one: its dumps do not continue the chain.

    Each call copies the snapshots of the chain that the copy does not have yet, one after the
    other. If it is killed, the copy has some of them, and the next call goes on. A snapshot that
    the chain has merged into a base before a call is not copied; the base is. `tf-dynemb forget`
    removes keys from the path that it is given: run it on copies, too.

    The copy can have smaller rows (`rows`), and fewer of them (`where`, `max_rows`). A row that a
    delta of the chain changes and that falls out is a deletion in the copy. A row that the chain
    does not change stays in the copy, with the score and the times that it had, until the chain has
    another base. The copy remembers these three arguments: a call that does not pass one has the
    one of the call before. Others hold for the snapshots that are published from then on.

    Each of the three can be a dict from the names of tables, for these tables. Dense variables
    (`tf_dynemb.Variable`) keep all of their rows. Lookups of keys that fell out are lookups of keys
    that the table does not have.

    Args:
        path: the copy, a directory that is created if it does not exist.
        from_: the chain.
        keep: the number of bases before the last one that stay in the copy, with their deltas.
        rows: the format of vectors: "float32", "float16", "bfloat16", "int8" (a scale for each row:
            dimension + 2 bytes), "int4" (a scale and a bias: dimension / 2 + 4 bytes). Lookups of
            models return the table's dtype; `Reader` returns float32, which is not rounded to it.
            Vectors that are as small already stay as they are.
        where: conditions that rows have to satisfy, all of them; {}: none.

            - `key_from`, `key_below`: keys, as integers.
            - `score_from`, `score_below`: scores, in a table that has scores that are not times
              (`evict_strategy`).
            - `updated_since`, `updated_before`, `accessed_since`, `accessed_before`: an aware
              datetime, or a timedelta or text such as "30d" before the watermark of the snapshot.
              Times are known as precisely as snapshots were published: those of the chain, and all
              that the copy has had. Rows of a time before these are "since" any time.
            - `l2_from`, `l2_below`: Euclidean norms of vectors.
            - `sample`: a fraction of the keys, the same keys in each call.
        max_rows: the most rows of a table in the copy; 0: any number. Those with the highest scores
            stay, or, in a table without scores, those that were accessed last. A delta with which
            there are more reads the scores of all rows of the copy.

    Returns:
        The snapshots that the call has published in the copy.

    Raises:
        DataLossError: the chain is damaged. The copy has the snapshots before the damage.
        FileNotFoundError: there is no snapshot at `from_`.
        RuntimeError: another process writes at `path`.
        TypeError: `where` has an unknown condition, or one with a value of another type.
        ValueError: `path` has snapshots of another chain, or later ones, or ones that `publish` has
            not made, or is the chain, a snapshot or a SavedModel; or `keep` is negative; or `rows`,
            `where` or `max_rows` has a wrong value, or names a table that the chain does not have,
            or has a condition that does not go with a table.
        OSError: an error of the file system.
    """
    target, source = local_path(path, "path"), local_path(from_, "from_")
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"keep must be a number of bases, got {keep!r}.")
    if exists(target / MANIFEST) or exists(target / "saved_model.pb"):
        what = "a snapshot" if exists(target / MANIFEST) else "a SavedModel"
        raise ValueError(f"{target} is {what}, so none can be published in it.")
    if exists(target) and os.path.samefile(target, source):
        raise ValueError(f"{target} is the chain itself: publish to another path.")
    # Before anything is created:
    first = Chain.load(source, lambda chain: chain.snapshots[0])
    Thinning.of(rows, where, max_rows, None).check_tables(first.manifest)
    if first.manifest.kind == "delta" and not exists(target):
        _check_continues(target, None, first)
    make_directory(target)
    published: list[Snapshot] = []
    with locked(target) as is_locked:
        if is_locked:
            remove_unpublished(target)
        names = list_snapshots(target)
        last = Snapshot(target / str(names[-1])).manifest if names else None
        if last is not None and last.copy is None:
            raise ValueError(
                f"{target} has snapshots that publish has not made: publish to another path."
            )
        thinning = Thinning.of(rows, where, max_rows, None if last is None else last.copy)
        Chain.load(source, lambda chain: _go_on(target, chain, keep, thinning, published))
        if last is not None and not published:
            _remember(target / str(names[-1]), thinning)
    # A base may have replaced some of them.
    return [snapshot for snapshot in published if exists(snapshot.directory)]


def _go_on(
    target: pathlib.Path, chain: Chain, keep: int, thinning: Thinning, published: list[Snapshot]
) -> None:
    """Copies the snapshots of a chain that the target, whose lock is held, does not have."""
    names = list_snapshots(target)
    last = Snapshot(target / str(names[-1])).manifest if names else None
    thinning.check_tables(chain.snapshots[0].manifest)
    copies = ThinCopies(target, thinning)
    copies.note_times(chain)
    # The last one may have been merged from others.
    there = {name.id for name in names}.union(() if last is None else last.ids)
    copied = [place for place, each in enumerate(chain.snapshots) if each.manifest.id in there]
    missing = chain.snapshots[copied[-1] + 1 if copied else 0 :]
    if missing:
        _check_continues(target, last, missing[0])
    for number, snapshot in enumerate(missing, names[-1].number + 1 if names else 1):
        manifest = snapshot.manifest
        snapshot.verify(files=[file for file, _ in without_training(manifest).files_of_ranks])
        directory = target / str(Name(number, manifest.kind, manifest.id))
        unfinished = unpublished(target, manifest.id)
        unfinished.mkdir()
        try:
            copies.write(snapshot, unfinished)
            os.rename(unfinished, directory)
        finally:
            remove_tree(unfinished)
        sync_directory(target)
        published.append(Snapshot(directory))
        copies.published(published[-1])
        if manifest.kind == "base":
            prune_locked(target, keep)


def _remember(directory: pathlib.Path, thinning: Thinning) -> None:
    """Makes the last snapshot of a copy remember arguments, if they are others."""
    manifest = Snapshot(directory).manifest
    before = {name: value for name, value in (manifest.copy or {}).items() if name != "clock"}
    if before == thinning.arguments:
        return
    new = directory / f"{MANIFEST}.new"
    new.unlink(missing_ok=True)  # of a call that was killed
    try:
        write_manifest(new, dataclasses.replace(manifest, copy=thinning.options))
        os.replace(new, directory / MANIFEST)
    finally:
        new.unlink(missing_ok=True)
    sync_directory(directory)


def _check_continues(target: pathlib.Path, last: Manifest | None, first: Snapshot) -> None:
    """Raises ValueError unless a snapshot can follow what is at a path, whose last is `last`."""
    manifest = first.manifest
    if manifest.kind == "delta":
        if last is None or manifest.parent not in last.ids:
            what = "is empty" if last is None else f"ends with {last.id}"
            raise ValueError(
                f"{first.directory} is a delta that continues {manifest.parent}, but {target} "
                f"{what}."
            )
    elif last is not None and last.id not in (*manifest.ids, *manifest.after):
        # A base has the ids of the latest snapshots before it only, but a table its history.
        histories = {entry.name: entry.history for entry in manifest.tables}
        before = Chain.open(target).snapshots[0].manifest.tables
        if not all(each.history and each.history == histories.get(each.name) for each in before):
            raise ValueError(
                f"{target} has snapshots of other tables than {first.directory}, which would "
                "replace them: publish to another path."
            )
        if manifest.watermark < last.watermark:
            raise ValueError(
                f"{target} has later snapshots than {first.directory}, which would replace them: "
                "publish to another path."
            )
