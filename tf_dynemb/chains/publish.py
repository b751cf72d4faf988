"""Served copies of chains, which go on with the chain that they are of."""

from __future__ import annotations

import os
import pathlib

from tf_dynemb._presence import exists, local_path, remove_tree
from tf_dynemb.storage import Chain, Snapshot
from tf_dynemb.storage.chain import MANIFEST, Name, list_snapshots
from tf_dynemb.storage.copying import copy_without_training, without_training
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
    path: str | os.PathLike[str], *, from_: str | os.PathLike[str], keep: int = 0
) -> list[Snapshot]:
    """Makes a served copy of a chain, or goes on with one.

    The copy has what lookups need: rows, deleted keys and dense weights. It lacks the state of
    optimizers, which is two thirds of the rows of Adam, and admission counters. Readers and
    exported models follow it as they follow the chain: snapshots keep their ids and watermarks.
    `load` reads it as a dump without an optimizer.

    Each call copies the snapshots of the chain that the copy does not have yet, one after the
    other. If it is killed, the copy has some of them, and the next call goes on. A snapshot that
    the chain has merged into a base before a call is not copied; the base is.

    Args:
        path: the copy, a directory that is created if it does not exist.
        from_: the chain.
        keep: the number of bases before the last one that stay in the copy, with their deltas.

    Returns:
        The snapshots that the call has published in the copy.

    Raises:
        DataLossError: the chain is damaged. The copy has the snapshots before the damage.
        FileNotFoundError: there is no snapshot at `from_`.
        RuntimeError: another process writes at `path`.
        ValueError: `path` has snapshots of another chain, or is the chain, or one snapshot; or
            `keep` is negative.
        OSError: an error of the file system.
    """
    target, source = local_path(path, "path"), local_path(from_, "from_")
    if keep < 0:
        raise ValueError(f"keep must be a number of bases, got {keep}.")
    Chain.names(source)  # before anything is created
    if exists(target / MANIFEST):
        raise ValueError(f"{target} is a snapshot, so none can be published in it.")
    if exists(target) and os.path.samefile(target, source):
        raise ValueError(f"{target} is the chain itself: publish to another path.")
    make_directory(target)
    published: list[Snapshot] = []
    with locked(target) as is_locked:
        if is_locked:
            remove_unpublished(target)
        Chain.load(source, lambda chain: _go_on(target, chain, keep, published))
    return published


def _go_on(target: pathlib.Path, chain: Chain, keep: int, published: list[Snapshot]) -> None:
    """Copies the snapshots of a chain that the target, whose lock is held, does not have."""
    names = list_snapshots(target)
    last = Snapshot(target / str(names[-1])).manifest if names else None
    there = {name.id for name in names}
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
            copy_without_training(snapshot, unfinished)
            os.rename(unfinished, directory)
        finally:
            remove_tree(unfinished)
        sync_directory(target)
        published.append(Snapshot(directory))
        if manifest.kind == "base":
            prune_locked(target, keep)


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
