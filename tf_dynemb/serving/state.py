"""The state of all tables as of one snapshot, and the creation of the next state from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping

from tf_dynemb.serving.table import Schema, Table
from tf_dynemb.storage import DataLossError, Manifest, Snapshot


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """Tables as of a snapshot; immutable.

    Attributes:
        last: the manifest of the last snapshot in the state.
        schemas: the schema of every table of the base.
        tables: the tables that were requested.
    """

    last: Manifest
    schemas: Mapping[str, Schema]
    tables: Mapping[str, Table]

    @classmethod
    def of_base(cls, snapshot: Snapshot, wanted: tuple[str, ...] | None) -> State:
        """Maps a base.

        Args:
            snapshot: the base.
            wanted: the names of the tables to open; None: all.

        Raises:
            DataLossError: a file is missing or has the wrong size or type.
            ValueError: the base lacks a wanted table, or a table has no index.
        """
        entries = {entry.name: entry for entry in snapshot.manifest.tables}
        missing = [name for name in wanted or () if name not in entries]
        if missing:
            there = ", ".join(map(repr, entries)) or "none"
            raise ValueError(f"{snapshot.directory} has no table {missing[0]!r}: it has {there}.")
        return cls(
            snapshot.manifest,
            {name: Schema.of(entry) for name, entry in entries.items()},
            {
                name: Table.of_base(snapshot, entry)
                for name, entry in entries.items()
                if wanted is None or name in wanted
            },
        )

    def check_continued_by(self, snapshot: Snapshot, applied: Container[str]) -> None:
        """Raises DataLossError if a delta begins later than this state ends.

        Args:
            snapshot: the delta.
            applied: the ids of the snapshots that are in this state.
        """
        manifest = snapshot.manifest
        if manifest.parent is not None and manifest.parent not in applied:
            raise DataLossError(
                f"a gap before {snapshot.directory}: it continues snapshot {manifest.parent}, "
                f"which was not applied; the last snapshot applied is {self.last.id}."
            )
        if manifest.since > self.last.watermark:
            raise DataLossError(
                f"a gap before {snapshot.directory}: it has the changes since "
                f"{manifest.since}, but only changes up to {self.last.watermark} were applied."
            )

    def with_delta(self, snapshot: Snapshot) -> State:
        """Verifies a delta, and returns the state after it.

        Raises:
            DataLossError: the delta is damaged, or does not fit these tables.
        """
        snapshot.verify()
        tables = dict(self.tables)
        for entry in snapshot.manifest.tables:
            schema = Schema.of(entry)
            known = self.schemas.get(entry.name)
            if known is None:
                there = ", ".join(map(repr, self.schemas)) or "none"
                raise DataLossError(
                    f"{snapshot.directory} has table {entry.name!r}, but its base has {there}."
                )
            if schema != known:
                raise DataLossError(
                    f"{snapshot.directory} has {schema}, but the snapshot before it has {known}."
                )
            if entry.name in tables:
                tables[entry.name] = tables[entry.name].with_delta(snapshot, entry)
        return State(snapshot.manifest, self.schemas, tables)
