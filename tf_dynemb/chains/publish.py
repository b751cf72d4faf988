"""Served copies of chains, which go on with the chain that they are of."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tf_dynemb._presence import exists, is_url, local_path
from tf_dynemb.chains.snapshot_copy import copy_without_training, without_training
from tf_dynemb.chains.thinning import ThinCopies, Thinning
from tf_dynemb.format.manifest import Manifest
from tf_dynemb.storage import Chain, DataLossError, Snapshot
from tf_dynemb.storage.chain import LOSSES, read_again
from tf_dynemb.storage.files import replace_manifest
from tf_dynemb.storage.local_place import (
    LocalPlace,
    list_snapshots,
)
from tf_dynemb.storage.place import Place
from tf_dynemb.storage.places import place_of
from tf_dynemb.storage.snapshot import MANIFEST, Name, next_number, since_last_base, superseded
from tf_dynemb.storage.stores import Store


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
    (`tf_dynemb.Variable`) keep all of their rows. A key that was left out reads as an unknown key.

    One of both paths can be a URL that `fsspec` knows, such as `s3://bucket/served`: of the copy,
    or of the chain or a stored copy, to make a local copy of, which models and readers follow.
    Snapshots appear as a whole there, too. If two writers publish at once, the second one fails. A
    copy of a stored copy is the same copy, unless `rows`, `where` or `max_rows` are passed.

    Args:
        path: the copy, a directory that is created if it does not exist, or a URL.
        from_: the chain, or a copy of it; a path or URL.
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
        The snapshots that the call has published in the copy; if that is a URL, those of `from_`.

    Raises:
        DataLossError: the chain is damaged. The copy has the snapshots before the damage.
        FileNotFoundError: there is no snapshot at `from_`.
        ImportError: the package that knows a URL is not installed.
        RuntimeError: another process writes at `path`.
        TypeError: `where` has an unknown condition, or one with a value of another type.
        ValueError: `path` has snapshots of another chain, or later ones, or ones that `publish` has
            not made, or is the chain, a snapshot or a SavedModel; or `keep` is negative; or `rows`,
            `where` or `max_rows` has a wrong value, or names a table that the chain does not have,
            or has a condition that does not go with a table; or `path` is a URL, and `from_` is
            one, too, or one of these arguments is passed.
        OSError: an error of the file system or the store.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"keep must be a number of bases, got {keep!r}.")
    thin = not (rows is where is max_rows is None)
    if is_url(path):
        if thin or is_url(from_):
            raise ValueError(
                f"path={str(path)!r} is a URL, for which from_ must be local, and rows, where and "
                "max_rows cannot be passed: publish a local copy, and then publish the copy to the "
                "URL."
            )
        return _upload(Store(str(path)), local_path(from_, "from_"), keep)
    target = local_path(path, "path")
    if exists(target / MANIFEST) or exists(target / "saved_model.pb"):
        what = "a snapshot" if exists(target / MANIFEST) else "a SavedModel"
        raise ValueError(f"{target} is {what}, and cannot contain snapshots: pass another path.")
    source = place_of(from_, "from_")
    if isinstance(source, LocalPlace) and exists(target) and os.path.samefile(target, source.path):
        raise ValueError(f"{target} is the chain itself: publish to another path.")
    is_new = not exists(target) or not list_snapshots(target)
    if is_new or thin:  # before anything is created
        first = read_again(
            lambda: Chain.names(source),
            lambda names: Chain.of(source, names[:1]).snapshots[0],
            lambda error: isinstance(error, LOSSES),
        )
        Thinning.of(rows, where, max_rows, None).check_tables(first.manifest)
        if first.manifest.kind == "delta" and is_new:
            _check_continues(str(target), None, first.manifest, str(first))
    with LocalPlace(target).taken():
        names = list_snapshots(target)
        last = _last(target, names)
        thinning = Thinning.of(rows, where, max_rows, None if last is None else last.copy)
        copying = _Copying(target, source, keep, thinning, thin)
        read_again(
            lambda: Chain.names(source), copying.go_on, lambda error: isinstance(error, LOSSES)
        )
        if last is not None and not copying.published:
            _remember(target / str(names[-1]), thinning)
    # A base may have replaced some of them.
    return [snapshot for snapshot in copying.published if exists(snapshot.directory)]


def _last(target: pathlib.Path, names: Sequence[Name]) -> Manifest | None:
    """Returns the manifest of the last snapshot of a copy, if it has one."""
    last = Snapshot(target / str(names[-1])).manifest if names else None
    if last is not None and last.copy is None:
        raise ValueError(
            f"{target} has snapshots that publish did not write: publish to another path."
        )
    if names and not any(name.kind == "base" for name in names):
        raise DataLossError(f"{target} is damaged: it lacks the base of its deltas.")
    return last


def _base(target: pathlib.Path) -> Manifest:
    """Returns the manifest of the first snapshot of the chain at a path."""
    return Chain.open(target).snapshots[0].manifest


@dataclasses.dataclass
class _Copying:
    """The copying of the snapshots of a chain to a path whose lock is held.

    Attributes:
        target: the path of the copy.
        source: the place of the chain.
        keep: as of `publish`.
        thinning: what the copy has.
        thin: whether the call has arguments for this.
        published: the copies.
    """

    target: pathlib.Path
    source: Place
    keep: int
    thinning: Thinning
    thin: bool
    published: list[Snapshot] = dataclasses.field(default_factory=list)

    def go_on(self, names: Sequence[str]) -> None:
        """Copies the snapshots with these names that are not there; none: the source is one."""
        place = LocalPlace(self.target)
        here = place.names()
        last = _last(self.target, here)
        ids = [name.id for name in map(Name.parse, names) if name]
        after = _place_after(ids, here, last)
        if names and after == len(names) and not self.thin:
            return  # calls that find nothing new read no manifest
        # From the last one that is there; all, if new conditions need the times of all.
        begin = 0 if self.thin else max(after - 1, 0)
        chain = Chain.of(self.source, names[begin:]).snapshots
        if not names:
            after = _place_after([chain[0].manifest.id], here, last)
        missing = chain[after - begin :]
        self.thinning.check_tables(chain[0].manifest)
        copies = ThinCopies(self.target, self.thinning)
        copies.note_times(chain)
        if missing:
            first, where = missing[0].manifest, str(missing[0])
            _check_continues(str(self.target), last, first, where, lambda: _base(self.target))
        for snapshot in missing:
            manifest = snapshot.manifest
            with place.folder(manifest.id) as folder:
                if self._is_same_copy(chain[0].manifest, last, manifest):
                    copy_without_training(snapshot, folder)
                else:
                    copies.write(snapshot, folder)
                name = Name(next_number(place.names()), manifest.kind, manifest.id)
                self.published.append(place.show(folder.name, name))
            if manifest.kind == "base":
                place.remove(superseded(place.names(), self.keep))
            copies.published(self.published[-1])

    def _is_same_copy(self, before: Manifest, last: Manifest | None, manifest: Manifest) -> bool:
        """Whether a snapshot is one of a copy, of which this is the same copy.

        Args:
            before: the snapshot of the source that is the last one at the target, if it is there.
            last: the last one at the target.
            manifest: the snapshot.
        """
        if self.thin or manifest.copy is None:
            return False
        return last is None or _arguments(last) == _arguments(before)


def _arguments(manifest: Manifest | None) -> dict[str, Any]:
    """Returns the arguments that a copy remembers."""
    copy = (manifest and manifest.copy) or {}
    return {name: value for name, value in copy.items() if name != "clock"}


def _place_after(ids: Sequence[str], names: Sequence[Name], last: Manifest | None) -> int:
    """Returns the place in a chain after the last snapshot that a copy has."""
    # The last one of the copy may have been merged from others.
    there = {name.id for name in names}.union(() if last is None else last.ids)
    return next((place for place in range(len(ids), 0, -1) if ids[place - 1] in there), 0)


def _upload(store: Store, source: pathlib.Path, keep: int) -> list[Snapshot]:
    """Publishes the snapshots of a local chain that a store does not have; returns them."""
    published: list[Snapshot] = []

    def go_on(chain: Chain) -> None:
        here = store.snapshots()
        names = [each.name for each in here]
        last = store.manifest(here[-1]) if here else None
        ids = [snapshot.manifest.id for snapshot in chain.snapshots]
        missing = chain.snapshots[_place_after(ids, names, last) :]
        if missing:
            first, where = missing[0].manifest, str(missing[0])
            base = [each for each in here if each.name in since_last_base(names)][:1]
            _check_continues(store.url, last, first, where, lambda: store.manifest(base[0]))
            _check_thin(store.url, last, first, where)
            store.remove_lost(next_number(names))
        for number, snapshot in enumerate(missing, next_number(names)):
            manifest = without_training(snapshot.manifest)
            manifest = dataclasses.replace(manifest, copy=manifest.copy or {})
            snapshot.verify(files=[file for file, _ in manifest.files_of_ranks])
            store.put(number, snapshot.directory, manifest)
            published.append(snapshot)
        here = store.snapshots()
        store.remove(superseded([each.name for each in here], keep))

    Chain.load(source, go_on)
    return published


def _check_thin(target: str, last: Manifest | None, first: Manifest, where: str) -> None:
    """Raises ValueError if a copy with fewer or smaller rows would go on with whole ones."""
    if _arguments(last) and not _arguments(first):
        raise ValueError(
            f"{target} has a copy with rows, where or max_rows, and {where} is of another copy: "
            "publish it to another path."
        )


def _remember(directory: pathlib.Path, thinning: Thinning) -> None:
    """Makes the last snapshot of a copy remember arguments, if they are others."""
    manifest = Snapshot(directory).manifest
    if _arguments(manifest) == thinning.arguments:
        return
    (directory / f"{MANIFEST}.new").unlink(missing_ok=True)  # of a call that was killed
    replace_manifest(directory, dataclasses.replace(manifest, copy=thinning.options), "new")


def _check_continues(
    target: str,
    last: Manifest | None,
    first: Manifest,
    where: str,
    base: Callable[[], Manifest] | None = None,
) -> None:
    """Raises ValueError unless a snapshot can follow what is at a path.

    Args:
        target: the path.
        last: the last snapshot there; None: there is none.
        first: the snapshot.
        where: the place of it, for errors.
        base: returns the first snapshot of the chain at the path.
    """
    if first.kind == "delta":
        if last is None or first.parent not in last.ids:
            what = "is empty" if last is None else f"ends with {last.id}"
            raise ValueError(
                f"{where} is a delta that continues {first.parent}, but {target} {what}."
            )
    elif last is not None and base is not None and last.id not in (*first.ids, *first.after):
        # A base has the ids of the latest snapshots before it only, but a table its history.
        histories = {entry.name: entry.history for entry in first.tables}
        before = base().tables
        if not all(each.history and each.history == histories.get(each.name) for each in before):
            raise ValueError(
                f"{where} would replace the snapshots of other tables at {target}: publish to "
                "another path."
            )
        if first.watermark < last.watermark:
            raise ValueError(
                f"{where} would replace later snapshots at {target}: publish to another path."
            )
