"""Snapshots of tables on disk, as defined in docs/file_format.md: numpy only, no TensorFlow.

`Publication` writes a snapshot; other processes can each write a `Part` of it. `Chain` and
`Snapshot` read.

May import: `_html`, `_presence`, `_version`, `format`.
"""

from tf_dynemb.format.errors import DataLossError
from tf_dynemb.format.manifest import DenseFile, Manifest
from tf_dynemb.format.steps import Change
from tf_dynemb.format.table_entry import (
    ColumnFile,
    InitializerEntry,
    Shard,
    StateEntry,
    TableEntry,
)
from tf_dynemb.storage.chain import Chain
from tf_dynemb.storage.column_writer import WRITE_UNIT, ColumnWriter
from tf_dynemb.storage.part import Part, joined
from tf_dynemb.storage.publication import Publication
from tf_dynemb.storage.snapshot import Snapshot

__all__ = [
    "WRITE_UNIT",
    "Chain",
    "Change",
    "ColumnFile",
    "ColumnWriter",
    "DataLossError",
    "DenseFile",
    "InitializerEntry",
    "Manifest",
    "Part",
    "Publication",
    "Shard",
    "Snapshot",
    "StateEntry",
    "TableEntry",
    "joined",
]
