"""The entries of tables in MANIFEST.json, and of the files that hold their rows.

The classes have the members of the JSON objects in docs/file_format.md, with the same names.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_dynemb.format import npy
from tf_dynemb.format.fields import Fields
from tf_dynemb.format.key_index import index_size
from tf_dynemb.format.steps import is_record
from tf_dynemb.format.strategies import STRATEGIES
from tf_dynemb.format.vector_format import FORMATS

# The version of the format that is written.
VERSION = 2

KEY_TYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in ("int64", "int32", "uint64")
}
# The dtypes of tables, and of the columns of their vectors.
DTYPES = {name: FORMATS[name].dtype for name in ("float32", "float16", "bfloat16")}
STRING_HASHES = ("farmhash64",)
TTL_CLOCKS = ("steps", "wall", "data")
INITIALIZERS = ("constant", "uniform", "normal", "truncated_normal")

# The 64-bit words of a line of admission counters, and the most lines of a table.
ADMISSION_WORDS = 8
_MOST_LINES = 2**32 - 1

# From this number of rows on, positions do not fit into the index.
INDEX_ROWS = 2**32 - 1

# The largest tick that a manifest may contain: a load continues the clock from its watermark.
LAST_TICK = 2**62

# The most elements of a vector.
_MOST_DIMENSION = 2**20

ID = re.compile("[0-9a-f]{32}")
_CHECKSUMS = re.compile("(?:[0-9a-f]{8})+")


@dataclasses.dataclass(frozen=True)
class ColumnFile:
    """A file of the snapshot.

    Attributes:
        file: its name in the snapshot's directory.
        bytes: its size.
        crc32c: eight hexadecimal digits for each block of `Manifest.block_bytes`.
    """

    file: str
    bytes: int
    crc32c: str


@dataclasses.dataclass(frozen=True)
class Shard:
    """The rows of a table that one rank wrote; `files` maps columns to files.

    `expiry_marks` can be missing in the file. If rows expire, it has the tick up to which they have
    expired, and then pairs of a tick and the time of its use (docs/file_format.md).
    `admission_lines` lines of admission counters, from number `first_admission_line` on, are in the
    column `admission`. `steps` is the record of the steps of an optimizer with `catch_up`, which
    rows lack that a delta does not have (`steps.py`). These three members can be missing in the
    file.
    """

    rank: int
    rows: int
    deleted: int
    base_tick: int
    files: Mapping[str, ColumnFile] = dataclasses.field(default_factory=dict)
    index_salt: int = 0
    expiry_marks: tuple[int, ...] = ()
    first_admission_line: int = 0
    admission_lines: int = 0
    steps: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class StateEntry:
    """The optimizer's state in a row: the width and the initial value of each state."""

    optimizer: str
    widths: tuple[int, ...]
    inits: tuple[float, ...]


def row_columns(
    key_type: str, vector_format: str, dimension: int, state_width: int
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Returns the columns with a row for each key: the dtype and the shape of a row in each."""
    vectors = FORMATS[vector_format]
    columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        "keys": (KEY_TYPES[key_type], ()),
        "vectors": (vectors.dtype, (vectors.width(dimension),)),
        "updates": (np.dtype(np.uint32), ()),
        "accesses": (np.dtype(np.uint32), ()),
    }
    if state_width:
        columns["state"] = (np.dtype(np.float32), (state_width,))
    return columns


@dataclasses.dataclass(frozen=True)
class InitializerEntry:
    """The initial vector of a new key: one kind, or one per column, with two numbers each."""

    kinds: tuple[str, ...]
    args: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class TableEntry:
    """The entry of a table.

    `state` is None if no state was written. `default_vector` and the members after it can be
    missing in the file. `admission_lines` is the number of lines of admission counters of all
    shards; None if the table counts no keys. `history` is an id that all states of one table have,
    over dumps, loads and restarts; None: unknown. `vector_format` is the format of the vectors in
    the files, if it is not that of `dtype`. `matrix` is whether the table is a dense variable.
    """

    name: str
    dimension: int
    key_type: str
    dtype: str
    seed: int
    initializer: InitializerEntry
    state: StateEntry | None
    shards: tuple[Shard, ...]
    default_vector: tuple[float, ...] | None = None
    padding_id: int | None = None
    string_hash: str | None = None
    evict_strategy: str | None = None
    ttl_clock: str | None = None
    admission_lines: int | None = None
    history: str | None = None
    vector_format: str | None = None
    matrix: bool = False

    @property
    def stored_as(self) -> str:
        """The name of the format of the vectors in the files (`vector_format.FORMATS`)."""
        return self.vector_format or self.dtype

    @property
    def accesses_are_times(self) -> bool:
        """Whether the column `accesses` has times of last access, not scores."""
        return not STRATEGIES[self.evict_strategy or "lru"].has_scores

    @property
    def expiry_marks(self) -> tuple[int, ...]:
        """Marks that hold for the rows of all shards, whose ranks wrote their own.

        A row that has expired by the result at some time has expired by the marks of its rank.
        """
        marks = [np.array(shard.expiry_marks) for shard in self.shards if shard.expiry_marks]
        if not marks:
            return ()
        times = np.unique(np.concatenate([each[2::2] for each in marks]))
        # For each time, the last tick whose rows were used at it or before: on each rank, on all.
        untils = np.min(
            [
                np.append(each[0], each[1::2])[np.searchsorted(each[2::2], times, "right")]
                for each in marks
            ],
            axis=0,
        )
        pairs = np.stack([untils, times], axis=1).ravel()
        return (min(int(each[0]) for each in marks), *pairs.tolist())

    @property
    def steps(self) -> tuple[float, ...]:
        """The record of steps: all ranks take the same ones, but can count from other numbers."""
        return max((shard.steps for shard in self.shards if shard.steps), default=())

    @property
    def state_width(self) -> int:
        """Floats of state per row."""
        return 0 if self.state is None else sum(self.state.widths)

    @property
    def row_columns(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """The columns with a row for each key."""
        return row_columns(self.key_type, self.stored_as, self.dimension, self.state_width)

    def column_type(self, column: str, shard: Shard) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Returns the dtype and shape of a shard's column; raises KeyError if it is unknown."""
        special_columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            "deleted": (KEY_TYPES[self.key_type], (shard.deleted,)),
            "index": (np.dtype(np.uint32), (index_size(shard.rows),)),
            "admission": (np.dtype(np.uint64), (shard.admission_lines, ADMISSION_WORDS)),
        }
        if column in special_columns:
            return special_columns[column]
        dtype, row_shape = self.row_columns[column]
        return dtype, (shard.rows, *row_shape)

    def columns(self, kind: str, shard: Shard) -> tuple[str, ...]:
        """Returns the columns that a shard must have in a snapshot of this kind."""
        names = list(self.row_columns)
        if kind == "delta":
            names.append("deleted")
        elif shard.rows < INDEX_ROWS:
            names.append("index")
        if shard.admission_lines:
            names.append("admission")
        return tuple(names)


def tables_to_json(tables: Sequence[TableEntry]) -> str:
    """Returns entries of tables as text; raises ValueError if JSON cannot express them."""
    return json.dumps([dataclasses.asdict(table) for table in tables], allow_nan=False)


def tables_from_json(text: str, where: str) -> tuple[TableEntry, ...]:
    """The inverse of `tables_to_json`; errors name the origin of the text, `where`."""
    return tuple(parse_table(Fields.of(members, where)) for members in json.loads(text))


def file_name(table: int, rank: int, column: str) -> str:
    """Returns the name of a column's file in the snapshot's directory."""
    return f"{table:03d}.r{rank}.{column}.npy"


def parse_table(members: Fields, version: int = VERSION) -> TableEntry:
    """Returns the entry that a JSON object is; raises DataLossError if it is not one."""
    dimension = members.integer("dimension", 1, _MOST_DIMENSION)
    return TableEntry(
        name=members.text("name"),
        dimension=dimension,
        key_type=members.choice("key_type", KEY_TYPES),
        dtype=members.choice("dtype", DTYPES),
        seed=members.integer("seed", -(2**63), 2**64 - 1),
        initializer=_initializer(members.object("initializer"), dimension),
        state=members.optional("state", lambda: _state(members.object("state"))),
        shards=tuple(_shard(shard, version) for shard in members.objects("shards")),
        default_vector=_default_vector(members, dimension),
        padding_id=_padding_id(members),
        string_hash=_string_hash(members),
        evict_strategy=_evict_strategy(members),
        ttl_clock=_ttl_clock(members),
        admission_lines=_admission_lines(members),
        history=_history(members),
        vector_format=_vector_format(members),
        matrix=_matrix(members),
    )


def _history(members: Fields) -> str | None:
    if members.members.get("history") is None:
        return None
    return members.text("history", ID)


def _vector_format(members: Fields) -> str | None:
    if members.members.get("vector_format") is None:
        return None
    return members.choice("vector_format", FORMATS)


def _matrix(members: Fields) -> bool:
    found = members.members.get("matrix", False)
    members.require(isinstance(found, bool), "matrix", "must be true or false")
    return bool(found)


def _default_vector(members: Fields, dimension: int) -> tuple[float, ...] | None:
    if members.members.get("default_vector") is None:
        return None
    values = members.numbers("default_vector")
    members.require(len(values) == dimension, "default_vector", f"must have {dimension} numbers")
    return values


def _padding_id(members: Fields) -> int | None:
    if members.members.get("padding_id") is None:
        return None
    limits = np.iinfo(KEY_TYPES[members.choice("key_type", KEY_TYPES)])
    return members.integer("padding_id", int(limits.min), int(limits.max))


def _string_hash(members: Fields) -> str | None:
    if members.members.get("string_hash") is None:
        return None
    return members.choice("string_hash", STRING_HASHES)


def _evict_strategy(members: Fields) -> str | None:
    if members.members.get("evict_strategy") is None:
        return None
    return members.choice("evict_strategy", tuple(STRATEGIES))


def _ttl_clock(members: Fields) -> str | None:
    if members.members.get("ttl_clock") is None:
        return None
    return members.choice("ttl_clock", TTL_CLOCKS)


def _expiry_marks(members: Fields) -> tuple[int, ...]:
    if members.members.get("expiry_marks") is None:
        return ()
    marks = members.integers("expiry_marks", 0, 2**63 - 1)
    untils, times = (marks[0:1] + marks[1::2], marks[2::2]) if marks else ((), ())
    ascending = all(list(numbers) == sorted(numbers) for numbers in (untils, times))
    members.require(
        not marks or (len(marks) % 2 == 1 and ascending), "expiry_marks", "must ascend, in pairs"
    )
    return marks


def _steps(members: Fields) -> tuple[float, ...]:
    if members.members.get("steps") is None:
        return ()
    record = members.numbers("steps")
    members.require(is_record(record), "steps", "must be whole runs of all steps")
    return record


def _admission_lines(members: Fields) -> int | None:
    if members.members.get("admission_lines") is None:
        return None
    return members.integer("admission_lines", 1, _MOST_LINES)


def _initializer(members: Fields, dimension: int) -> InitializerEntry:
    kinds = members.texts("kinds", INITIALIZERS)
    args = members.numbers("args")
    members.require(len(kinds) in (1, dimension), "kinds", "must be one, or one for each column")
    members.require(len(args) == 2 * len(kinds), "args", "must be two for each kind")
    return InitializerEntry(kinds, args)


def _state(members: Fields) -> StateEntry:
    widths = members.integers("widths", 0, 2**31)
    inits = members.numbers("inits")
    members.require(len(inits) == len(widths), "inits", "must have the same length as widths")
    return StateEntry(members.text("optimizer"), widths, inits)


def _shard(members: Fields, version: int) -> Shard:
    files = members.object("files")
    return Shard(
        rank=members.integer("rank", 0, 2**31),
        rows=members.integer("rows", 0, 2**48),
        deleted=members.integer("deleted", 0, 2**48),
        base_tick=members.integer("base_tick", 0, LAST_TICK),
        files={column: parse_file(files.object(column)) for column in files.members},
        index_salt=members.integer("index_salt", 0, 2**64 - 1) if version > 1 else 0,
        expiry_marks=_expiry_marks(members),
        **{
            name: members.integer(name, 0, _MOST_LINES)
            for name in ("first_admission_line", "admission_lines")
            if name in members.members
        },
        steps=_steps(members),
    )


def parse_file(members: Fields) -> ColumnFile:
    """Returns the entry of a file that a JSON object is; raises DataLossError if it is not one."""
    file = members.text("file")
    plain = not set(file) & set("/\\\0") and file not in ("", ".", "..")
    members.require(plain, "file", "must be a name without a directory")
    return ColumnFile(file, members.integer("bytes", 0), members.text("crc32c", _CHECKSUMS))


def check_shards(
    table: TableEntry, members: Fields, kind: str, world_size: int, block_bytes: int
) -> None:
    """Raises DataLossError unless the shards and the files of a table fit together.

    Args:
        table: the entry of the table.
        members: the same as JSON, for errors.
        kind: that of the manifest, as are the next two.
        world_size: the number of ranks.
        block_bytes: the number of bytes that a checksum covers.
    """
    ranks = [shard.rank for shard in table.shards]
    members.require(len(set(ranks)) == len(ranks), "shards", "has a rank twice")
    for shard, where in zip(table.shards, members.objects("shards"), strict=True):
        where.require(shard.rank < world_size, "rank", f"must be below world_size={world_size}")
        where.require(kind == "delta" or not shard.deleted, "deleted", "must be 0 in a base")
        end = shard.first_admission_line + shard.admission_lines
        most = table.admission_lines or 0
        where.require(end <= most, "admission_lines", f"must end at line {most} or before")
        files = where.object("files")
        for column in table.columns(kind, shard):
            files.require(column in shard.files, column, "is missing")
            dtype, shape = table.column_type(column, shard)
            size = npy.HEADER_BYTES + dtype.itemsize * math.prod(shape)
            given = shard.files[column].bytes
            files.require(given == size, column, f"has {given} bytes, but must have {size}")
        for column, file in shard.files.items():
            digits = 8 * -(-file.bytes // block_bytes)
            files.require(len(file.crc32c) == digits, column, f"needs {digits} digits of crc32c")
