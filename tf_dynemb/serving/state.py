"""The state of all tables as of one snapshot, and the creation of the next state from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tf_dynemb.format.safetensors import Array
from tf_dynemb.serving.table import Schema, Table
from tf_dynemb.storage import DataLossError, Manifest, Snapshot


@dataclasses.dataclass(eq=False)
class Lineage:
    """The ids of the snapshots that a state contains.

    Attributes:
        applied: the base, the snapshots that it continues, and the deltas that were applied.
        after: older snapshots, of which the base is a later state.
        histories: the histories of the tables of the base, by name; None: unknown.
    """

    applied: set[str] = dataclasses.field(default_factory=set)
    after: set[str] = dataclasses.field(default_factory=set)
    histories: Mapping[str, str | None] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, base: Manifest) -> Lineage:
        """Returns the lineage of the state of a base."""
        histories = {entry.name: entry.history for entry in base.tables}
        return cls(set(base.ids), set(base.after), histories)

    def __contains__(self, id_: object) -> bool:
        return id_ in self.applied or id_ in self.after

    def places(self, ids: Sequence[str | None]) -> tuple[int, int]:
        """Returns the numbers of a chain's snapshots up to two of them; 0 if there is none.

        Args:
            ids: the ids of the snapshots.

        Returns:
            (done, older): up to the last one that was applied, and if none was, up to the last one
            that is older than the state.
        """
        done = older = 0
        for place in range(len(ids), 0, -1):
            if ids[place - 1] in self.applied:
                done = place
                break
            if not older and ids[place - 1] in self.after:
                older = place
        return done, older

    def has_earlier(self, base: Manifest, last: str) -> bool:
        """Returns whether a base is an earlier state of what was applied, up to the id `last`."""
        if base.id in self.applied:
            return True
        return last not in base.continues and not self.applied.isdisjoint(base.continues)

    def foreign_table(self, base: Manifest) -> str | None:
        """Returns the name of a table that a base has of another history; None: there is none."""
        if any(id_ in self for id_ in (*base.continues, *base.after)):
            return None
        for entry in base.tables:
            history = self.histories.get(entry.name)
            if None not in (history, entry.history) and history != entry.history:
                return entry.name
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """Tables as of a snapshot; immutable.

    Attributes:
        last: the manifest of the last snapshot in the state.
        schemas: the schema of every table of the base.
        tables: the tables that were requested.
        dense: the dense weights of the last snapshot that has some; None: none has.
    """

    last: Manifest
    schemas: Mapping[str, Schema]
    tables: Mapping[str, Table]
    dense: Mapping[str, Array] | None

    @classmethod
    def of_base(
        cls, snapshot: Snapshot, wanted: tuple[str, ...] | None, before: State | None
    ) -> State:
        """Maps a base.

        Args:
            snapshot: the base.
            wanted: the names of the tables to open; None: all.
            before: the state that it replaces, whose dense weights stay if the base has none.

        Raises:
            DataLossError: a file is missing or has the wrong size or type.
            ValueError: the base lacks a wanted table, or a table has no index.
        """
        entries = {entry.name: entry for entry in snapshot.manifest.tables}
        missing = [name for name in wanted or () if name not in entries]
        if missing:
            there = ", ".join(map(repr, entries)) or "none"
            raise ValueError(f"{snapshot} has no table {missing[0]!r}: it has {there}.")
        # Unlike rows, they are read as a whole anyway.
        snapshot.verify(files=[each for each in snapshot.manifest.dense if each.part == "weights"])
        return cls(
            snapshot.manifest,
            {name: Schema.of(entry) for name, entry in entries.items()},
            {
                name: Table.of_base(snapshot, entry)
                for name, entry in entries.items()
                if wanted is None or name in wanted
            },
            snapshot.dense("weights") or (None if before is None else before.dense),
        )

    def after_delta(self, snapshot: Snapshot, lineage: Lineage) -> State:
        """Returns the state after a delta; this one, if it has the changes of the delta.

        Args:
            snapshot: the delta.
            lineage: the lineage of this state.

        Raises:
            DataLossError: the delta is damaged, or does not fit these tables, or does not continue
                this state.
        """
        manifest = snapshot.manifest
        if manifest.parent is not None and manifest.parent not in lineage:
            raise DataLossError(
                f"a gap before {snapshot}: it continues snapshot {manifest.parent}, "
                f"which was not applied; the last snapshot applied is {self.last.id}."
            )
        if manifest.parent == self.last.id and manifest.watermark < self.last.watermark:
            raise DataLossError(
                f"{snapshot} has the watermark {manifest.watermark}, which is less than "
                f"the watermark of the snapshot it continues, {self.last.watermark}."
            )
        if manifest.watermark <= self.last.watermark:
            return self
        if manifest.since > self.last.watermark:
            raise DataLossError(
                f"a gap before {snapshot}: it has the changes since "
                f"{manifest.since}, but only changes up to {self.last.watermark} were applied."
            )
        snapshot.verify()
        tables = dict(self.tables)
        for entry in snapshot.manifest.tables:
            schema = Schema.of(entry)
            known = self.schemas.get(entry.name)
            if known is None:
                there = ", ".join(map(repr, self.schemas)) or "none"
                raise DataLossError(
                    f"{snapshot} has table {entry.name!r}, but its base has {there}."
                )
            if schema != known:
                raise DataLossError(
                    f"{snapshot} has {schema}, but the snapshot before it has {known}."
                )
            if entry.name in tables:
                tables[entry.name] = tables[entry.name].with_delta(snapshot, entry)
        dense = snapshot.dense("weights") or self.dense
        if dense and self.dense and _forms(dense) != _forms(self.dense):
            raise DataLossError(
                f"the dense weights in {snapshot} have other names, dtypes or shapes than in the "
                "snapshot before it."
            )
        return State(snapshot.manifest, self.schemas, tables, dense)


def _forms(dense: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (array.dtype, array.values.shape) for name, array in dense.items()}
