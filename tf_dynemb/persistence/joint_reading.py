"""Chains that all ranks read: all ranks use the same snapshots, and each file is verified once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tf_dynemb import storage
from tf_dynemb.parallel.agreement import Ranks
from tf_dynemb.persistence import columns
from tf_dynemb.persistence.shared_path import wait_for
from tf_dynemb.storage import chain
from tf_dynemb.storage.local_place import LocalPlace
from tf_dynemb.storage.places import place_of

T = TypeVar("T")


def read_chain(
    ranks: Ranks,
    path: str | os.PathLike[str],
    read: Callable[[list[str]], T],
    until: str | int | None = None,
) -> T:
    """Calls `read` with the chain at a path, as rank 0 sees it, and returns its result.

    If a new base has removed files meanwhile, `read` is called again, with the new chain.

    Args:
        ranks: the ranks, all of which call this.
        path: the path of the chain.
        read: called with the names of the chain's directories; raises on all ranks or on none.
        until: as in `storage.Chain.names_until`; None: the last snapshot.

    Raises:
        FileNotFoundError: there is no such snapshot; raised on all ranks.
    """
    lost = {error.__name__ for error in chain.LOSSES}
    return chain.read_again(
        lambda: _names(ranks, path, until),
        read,
        lambda _: any(failure.kind in lost for failure in ranks.failures),
    )


def _names(ranks: Ranks, path: str | os.PathLike[str], until: str | int | None) -> list[str]:
    with ranks.stage() as stage:
        if ranks.rank == 0:
            try:
                if until is None:
                    names = storage.Chain.names(path)
                else:
                    names = storage.Chain.names_until(path, until)
                stage.say([names, None])
            except FileNotFoundError as error:
                # An answer, not a failure: all ranks then raise the same error.
                stage.say([None, str(error)])
    names, missing = stage.said[0]
    if missing is not None:
        raise FileNotFoundError(missing)
    return list(names)


def open_chain(ranks: Ranks, path: str | os.PathLike[str], names: Sequence[str]) -> storage.Chain:
    """Opens the chain of these directories; raises as `storage.Chain.open`, on this rank only."""
    place = place_of(path)
    if ranks.rank and isinstance(place, LocalPlace):
        for name in names or [""]:
            wait_for(place.path / name, ranks.rank)
    return storage.Chain.of(place, names)


def verify(ranks: Ranks, snapshots: Sequence[storage.Snapshot], quiet: bool | None) -> None:
    """Verifies this rank's share of the files of snapshots."""
    for snapshot in snapshots:
        with columns.progress(0, "verify", "B", quiet) as bar:

            def show(done: int, total: int, bar: Any = bar) -> None:
                bar.total = total
                bar.update(done - bar.n)

            files = _shares(snapshot, ranks.size)[ranks.rank]
            snapshot.verify(columns.checksum, show, files)


def _shares(snapshot: storage.Snapshot, size: int) -> list[list[storage.ColumnFile]]:
    """Assigns a snapshot's files to ranks, so that each has about the same number of bytes.

    If possible, files are assigned to the rank that wrote them, which probably reads them anyway.
    """
    writer = {file.file: rank % size for file, rank in snapshot.manifest.files_of_ranks}
    shares: list[list[storage.ColumnFile]] = [[] for _ in range(size)]
    loads = [0] * size
    for file in sorted(snapshot.files, key=lambda file: (-file.bytes, file.file)):
        rank = writer[file.file]
        if loads[rank] >= min(loads) + file.bytes:
            rank = loads.index(min(loads))
        shares[rank].append(file)
        loads[rank] += file.bytes
    return shares
