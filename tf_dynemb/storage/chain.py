"""Reading of the chain of snapshots at a path."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from tf_dynemb import _html
from tf_dynemb.format.errors import DataLossError
from tf_dynemb.format.steps import Change, changes
from tf_dynemb.storage.places import AnyPlace, place_of
from tf_dynemb.storage.snapshot import Snapshot, content, forms, since_last_base

T = TypeVar("T")

# The maximum number of attempts, if files were removed because a newer base superseded them.
_ATTEMPTS = 5

# The errors that a missing file causes.
LOSSES = (DataLossError, FileNotFoundError)


@dataclasses.dataclass(frozen=True)
class Chain:
    """The last base at a path and the deltas after it; only deltas if there is no base."""

    base: Snapshot | None
    deltas: list[Snapshot]

    def __str__(self) -> str:
        return os.path.dirname(str(self.last))

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the last snapshot, rows and bytes, and the tables."""
        last = self.last.manifest
        tables = {entry.name: entry for each in self.snapshots for entry in each.manifest.tables}
        lines = {
            **_html.watermark(last.id, last.watermark, last.watermark_utc),
            "base": content([self.base]) if self.base else "",
            "deltas": f"{len(self.deltas)}: {content(self.deltas)}" if self.deltas else "",
            **forms(tables.values()),
            "extra": str(last.extra or ""),
        }
        return _html.table(f"Chain at {self}", lines)

    @property
    def snapshots(self) -> list[Snapshot]:
        """All snapshots, in order."""
        return [self.base, *self.deltas] if self.base else self.deltas

    @property
    def last(self) -> Snapshot:
        """The latest snapshot."""
        return self.snapshots[-1]

    @property
    def dense_source(self) -> Snapshot | None:
        """The last snapshot that has dense variables; None: no snapshot has."""
        return next((each for each in reversed(self.snapshots) if each.manifest.dense), None)

    def changes(self, name: str) -> list[Change]:
        """Returns, for each snapshot, what later steps do to rows of a table that it has.

        A row of a key that a later snapshot has, too, is the one of that snapshot.
        """
        records = []
        for snapshot in self.snapshots:
            entries = [each for each in snapshot.manifest.tables if each.name == name]
            records.append(entries[0].steps if entries else ())
        return changes(records)

    @staticmethod
    def open(path: AnyPlace) -> Chain:
        """Opens the chain at a path or URL, or the one snapshot whose directory is given.

        The files of the chain are not opened yet, and a new base can remove them; `load` handles
        this.

        Raises:
            FileNotFoundError: there is no snapshot.
            DataLossError: a manifest is missing or damaged, or a snapshot does not continue the
                one before it.
            ValueError: a snapshot has a version that this code does not read.
        """
        return Chain.load(path, lambda chain: chain)

    @staticmethod
    def load(path: AnyPlace, read: Callable[[Chain], T]) -> T:
        """Calls `read` with the chain at a path, and returns its result.

        If a new base has removed files meanwhile, `read` is called again, with the new chain.

        Raises:
            the errors of `open` and of `read`.
        """
        return read_again(
            lambda: Chain.names(path),
            lambda names: read(Chain.of(path, names)),
            lambda error: isinstance(error, LOSSES),
        )

    @staticmethod
    def names(path: AnyPlace, begin: str = "") -> list[str]:
        """Returns the names of the directories of a path's chain; none if it is a snapshot itself.

        Args:
            path: the path.
            begin: a name; if it is in the chain, the names before it are left out.

        Raises:
            FileNotFoundError: there is no snapshot.
        """
        place = place_of(path)
        if place.is_snapshot:
            return []
        names = since_last_base(place.names(begin))
        if not names:
            raise place.absent()
        return [str(name) for name in names]

    @staticmethod
    def names_until(path: AnyPlace, until: str | int) -> list[str]:
        """Returns the names of the directories of the chain that ends with an earlier snapshot.

        Args:
            path: a path with snapshots, of which later bases may have superseded some.
            until: the id of the snapshot, or its first digits; or a time in nanoseconds since 1970
                UTC: the last snapshot that was published and is not of a later time.

        Raises:
            FileNotFoundError: there is no such snapshot; the message names the existing ones.
            ValueError: several snapshots have these first digits.
            DataLossError: a manifest is damaged.
        """
        place = place_of(path)
        names = place.names()
        if not names:
            raise place.absent()
        if isinstance(until, int):
            what = "that was written then or before"
            all_of_them = place.open([str(name) for name in names])
            found = [
                number
                for number, snapshot in enumerate(all_of_them)
                if snapshot.manifest.watermark_utc_ns <= until
            ][-1:]
        else:
            what = until
            found = [number for number, name in enumerate(names) if name.id.startswith(until)]
            if not found:  # a base may have the state of one that is no longer there
                bases = [number for number, name in enumerate(names) if name.kind == "base"]
                opened = place.open([str(names[number]) for number in bases])
                found = [
                    number
                    for number, base in zip(bases, opened, strict=True)
                    if any(id_.startswith(until) for id_ in base.manifest.ids)
                ]
        if not found:
            there = ", ".join(f"{name.id[:8]} ({name.kind})" for name in names[-20:]) or "none"
            raise FileNotFoundError(f"{place} holds no snapshot {what}; those there: {there}.")
        if len(found) > 1:
            raise ValueError(f"{place} holds several snapshots {what}; pass more digits of the id.")
        return [str(name) for name in since_last_base(names[: found[0] + 1])]

    @staticmethod
    def of(path: AnyPlace, names: Sequence[str]) -> Chain:
        """Opens the chain with the names that `names` returned; raises the errors of `open`."""
        snapshots = place_of(path).open(names)
        for before, after in itertools.pairwise(snapshots):
            if after.manifest.parent not in before.manifest.ids:
                raise DataLossError(
                    f"a gap before {after}: it continues snapshot "
                    f"{after.manifest.parent}, but before it is {before.manifest.id} "
                    f"({before})."
                )
        base = snapshots[0] if snapshots[0].manifest.kind == "base" else None
        return Chain(base, snapshots[1:] if base else snapshots)


def read_again(
    list_names: Callable[[], list[str]],
    read: Callable[[list[str]], T],
    is_loss: Callable[[Exception], bool],
) -> T:
    """Calls `read` with the names of a chain; calls it again if a new base has superseded them.

    Args:
        list_names: returns the result of `Chain.names` for a path.
        read: called with the names.
        is_loss: returns whether missing files may have caused an error of `read`.

    Raises:
        the errors of `read` and `list_names`.
    """
    names = list_names()
    for _ in range(_ATTEMPTS - 1):
        try:
            return read(names)
        except Exception as error:
            if not is_loss(error):
                raise
            found = list_names()
            if found[:1] == names[:1]:  # the snapshots that were read have not been superseded
                raise
            names = found
    return read(names)
