"""MANIFEST.json: the description of a snapshot and of its files.

The classes have the members of the JSON objects in docs/file_format.md, with the same names.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from typing import Any

from tf_dynemb.format.crc32c import crc32c
from tf_dynemb.format.errors import DataLossError
from tf_dynemb.format.fields import Fields
from tf_dynemb.format.steps import decays
from tf_dynemb.format.table_entry import (
    ID,
    LAST_TICK,
    VERSION,
    ColumnFile,
    TableEntry,
    check_shards,
    parse_file,
    parse_table,
)

FORMAT = "tf_dynemb.snapshot"
# Version 1 has no salts for indexes. Version 3 is for deltas which change the vectors of rows that
# they do not have (steps.py).
VERSIONS = (1, 2, 3, 4, 5)

KINDS = ("base", "delta")
DENSE_PARTS = ("weights", "training")

# The most ids of `after` that are written.
MOST_AFTER = 256

# The most bytes of a manifest.
MOST_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class DenseFile(ColumnFile):
    """A file of dense variables by name (safetensors.py).

    The file of rank 0 has all variables. Another rank has a file only if some of its variables
    have other values, such as the random seeds of dropout; the file has these.

    Attributes:
        part: "weights" of the model, or what only "training" needs: the variables of the optimizer
            and of random seeds.
        rank: the rank that wrote it.
    """

    part: str
    rank: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json, except its format, version and checksum.

    `dense`, `extra` and `copy` can be missing in the file. `extra` is an object of the user. `copy`
    is None unless it is a served copy; then it has the arguments of `publish`.
    """

    kind: str
    id: str
    parent: str | None
    since: int
    watermark: int
    watermark_utc_ns: int
    world_size: int
    writer: str
    block_bytes: int
    optimizer: Mapping[str, Any] | None
    tables: tuple[TableEntry, ...]
    continues: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    dense: tuple[DenseFile, ...] = ()
    extra: Mapping[str, Any] | None = None
    copy: Mapping[str, Any] | None = None

    @property
    def files_of_ranks(self) -> list[tuple[ColumnFile, int]]:
        """All files of the snapshot, except its manifest, with the ranks that wrote them."""
        shards = [shard for table in self.tables for shard in table.shards]
        return [
            *((file, shard.rank) for shard in shards for file in shard.files.values()),
            *((file, file.rank) for file in self.dense),
        ]

    @property
    def ids(self) -> tuple[str, ...]:
        """The snapshot's id, and the ids of the snapshots whose state it also has."""
        return (self.id, *self.continues)

    @property
    def watermark_utc(self) -> datetime.datetime:
        """The time at which the watermark was taken, to the microsecond."""
        epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
        return epoch + datetime.timedelta(microseconds=self.watermark_utc_ns // 1000)

    def to_json(self) -> str:
        """Returns the file's text, with a checksum; raises ValueError if JSON cannot express it."""
        version = VERSION
        version += any(decays(table.steps) for table in self.tables)
        version += 2 * any(table.vector_format is not None for table in self.tables)
        members = {"format": FORMAT, "version": version, **dataclasses.asdict(self)}
        members = json.loads(json.dumps(members, allow_nan=False))  # keys are strings from here on
        members["crc32c"] = f"{checksum_of(members):08x}"
        return json.dumps(members, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, file: str) -> Manifest:
        """Parses and checks a manifest.

        Args:
            text: the text of the file.
            file: the name of the file, for errors.

        Raises:
            DataLossError: the text is damaged, or contradicts itself.
            ValueError: the manifest has a version that this code does not read.
        """
        if len(text) > MOST_BYTES:
            raise DataLossError(f"{file} has more than {MOST_BYTES} bytes.")
        try:
            parsed = json.loads(text, object_pairs_hook=_with_distinct_names)
            content = dict(parsed) if isinstance(parsed, dict) else {}
            content.pop("crc32c", None)
            checksum = f"{checksum_of(content):08x}"  # it may be nested too deeply for this, too
        except (ValueError, RecursionError) as error:
            raise DataLossError(f"{file} is damaged: it is not JSON ({error}).") from error
        members = Fields.of(parsed, file)
        members.choice("format", (FORMAT,))
        version = members.integer("version", 0)
        if version not in VERSIONS:
            raise ValueError(
                f"{file} is of version {version}; this tf_dynemb reads versions "
                f"{VERSIONS[0]} to {VERSIONS[-1]}. "
                "Read it with the tf_dynemb that wrote it, or a later one."
            )
        expected = members.text("crc32c")
        if checksum != expected:
            raise DataLossError(f"{file} is damaged: its CRC32C is not {expected}.")
        return _manifest(members, version)

    def without_shards(self) -> Manifest:
        """Returns a copy without the shards of tables, which are most of the manifest."""
        tables = (dataclasses.replace(table, shards=()) for table in self.tables)
        return dataclasses.replace(self, tables=tuple(tables))

    def table(self, table: int | str) -> tuple[int, TableEntry]:
        """Returns a table's number and entry, by number or name; raises KeyError if none has it."""
        for number, entry in enumerate(self.tables):
            if table in (number, entry.name):
                return number, entry
        names = ", ".join(repr(entry.name) for entry in self.tables)
        raise KeyError(f"no table {table!r}: there are {names or 'none'}.")


def dense_file_name(part: str, rank: int) -> str:
    """Returns the name of a file of dense variables in the snapshot's directory."""
    return f"dense.r{rank}.{part}.safetensors"


def checksum_of(members: Mapping[str, Any]) -> int:
    """Returns the CRC32C of the canonical form of an object's members."""
    return crc32c(json.dumps(members, sort_keys=True, separators=(",", ":")).encode())


def _with_distinct_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has a name twice")
    return members


def _manifest(members: Fields, version: int) -> Manifest:
    kind = members.choice("kind", KINDS)
    block_bytes = members.integer("block_bytes", 1, 1 << 30)
    world_size = members.integer("world_size", 1, 2**31)
    tables = tuple(parse_table(table, version) for table in members.objects("tables"))
    names = [table.name for table in tables]
    members.require(len(set(names)) == len(names), "tables", "has a name twice")
    for table, where in zip(tables, members.objects("tables"), strict=True):
        check_shards(table, where, kind, world_size, block_bytes)
    base = kind == "base"
    members.require(not base or members.get("parent") is None, "parent", "must be null in a base")
    members.require(not base or members.get("since") == 0, "since", "must be 0 in a base")
    manifest = Manifest(
        kind=kind,
        id=members.text("id", ID),
        parent=members.optional("parent", lambda: members.text("parent", ID)),
        since=members.integer("since", 0, LAST_TICK),
        watermark=members.integer("watermark", 0, LAST_TICK),
        watermark_utc_ns=members.integer("watermark_utc_ns", 0),
        world_size=world_size,
        writer=members.text("writer"),
        block_bytes=block_bytes,
        optimizer=members.optional("optimizer", lambda: members.object("optimizer").members),
        tables=tables,
        continues=_ids(members, "continues", base),
        after=_ids(members, "after", base),
        dense=_dense(members, world_size, block_bytes),
        extra=_object(members, "extra"),
        copy=_object(members, "copy"),
    )
    files = [file.file for file, _ in manifest.files_of_ranks]
    members.require(len(set(files)) == len(files), "tables", "has a file twice")
    return manifest


def _dense(members: Fields, world_size: int, block_bytes: int) -> tuple[DenseFile, ...]:
    if members.members.get("dense") is None:
        return ()
    files = []
    for each in members.objects("dense"):
        part, rank = each.choice("part", DENSE_PARTS), each.integer("rank", 0, world_size - 1)
        file = parse_file(each)
        digits = 8 * -(-file.bytes // block_bytes)
        each.require(len(file.crc32c) == digits, "crc32c", f"needs {digits} digits")
        files.append(DenseFile(file.file, file.bytes, file.crc32c, part, rank))
    places = [(file.part, file.rank) for file in files]
    members.require(len(set(places)) == len(places), "dense", "has a part of a rank twice")
    first = all((part, 0) in places for part, _ in places)
    members.require(first, "dense", "lacks the file of rank 0")
    return tuple(files)


def _object(members: Fields, name: str) -> Mapping[str, Any] | None:
    if members.members.get(name) is None:
        return None
    return members.object(name).members


def _ids(members: Fields, name: str, base: bool) -> tuple[str, ...]:
    """Reads ids of other snapshots, which can be missing."""
    ids = members.members.get(name, [])
    plain = isinstance(ids, list) and all(isinstance(i, str) and ID.fullmatch(i) for i in ids)
    members.require(plain, name, f"must be a list of ids, got {ids!r:.80}")
    members.require(base or not ids, name, "must be empty in a delta")
    return tuple(ids)
