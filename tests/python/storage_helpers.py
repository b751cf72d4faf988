"""Functions that write and compare small snapshots."""

import dataclasses
import pathlib

import numpy as np

from tf_dynemb.storage import (
    Chain,
    DataLossError,
    InitializerEntry,
    Publication,
    Shard,
    Snapshot,
    StateEntry,
    TableEntry,
)

BLOCK_BYTES = 192


def flipped(content: bytes, offset: int, bit: int = 4) -> bytes:
    """Returns the content of a file with another bit."""
    changed = bytearray(content)
    changed[offset] ^= 1 << bit
    return bytes(changed)


def flip(file: pathlib.Path, offset: int, bit: int = 4) -> bytes:
    """Flips a bit of a file, and returns its previous content."""
    content = file.read_bytes()
    file.write_bytes(flipped(content, offset, bit))
    return content


def table_entry(name="user", dimension=2, key_type="int64", dtype="float32", state=True, shards=()):
    return TableEntry(
        name=name,
        dimension=dimension,
        key_type=key_type,
        dtype=dtype,
        seed=42,
        initializer=InitializerEntry(("uniform",), (-0.05, 0.05)),
        state=StateEntry("adagrad", (dimension,), (0.1,)) if state else None,
        shards=shards,
    )


def shard_columns(table, kind, rows, deleted=0, seed=0):
    """Returns random columns of a shard, by name, without the index."""
    rng = np.random.default_rng(seed)
    shard = Shard(0, rows, deleted, 0)
    columns = {}
    for column in table.columns(kind, shard):
        if column != "index":
            dtype, shape = table.column_type(column, shard)
            columns[column] = rng.integers(0, 200, shape).astype(dtype)
    columns["keys"] = rng.permutation(np.arange(-1, rows - 1).astype(columns["keys"].dtype))
    return columns


def write_shard(publication, number, columns, rank=0, blocks=1):
    """Writes columns in several chunks each, and the index if there are no deleted keys."""
    for column, values in columns.items():
        writer = publication.part.column(number, column, values.dtype, values.shape[1:], rank)
        for block in np.array_split(values, blocks):
            writer.append(block)
    if "deleted" not in columns:
        publication.part.write_index(number, rank)


def publish(path, kind="base", parent=None, rows=5, seed=0, watermark=7, continues=()) -> Snapshot:
    """Publishes a snapshot of one table with one shard."""
    table = table_entry()
    deleted = 3 if kind == "delta" else 0
    columns = shard_columns(table, kind, rows, deleted, seed)
    with Publication(path, kind, block_bytes=BLOCK_BYTES) as publication:
        write_shard(publication, 0, columns)
        return publication.publish(
            [dataclasses.replace(table, shards=(Shard(0, rows, deleted, 1),))],
            parent=parent,
            continues=continues,
            watermark=watermark,
            watermark_utc_ns=1_700_000_000_000_000_000,
        )


def publish_chain(path, deltas=1) -> list[Snapshot]:
    snapshots = [publish(path)]
    for i in range(deltas):
        snapshots.append(publish(path, "delta", snapshots[-1].manifest.id, rows=2, seed=i))
    return snapshots


def content(snapshot):
    """Verifies a snapshot and returns its whole content, in comparable form."""
    snapshot.verify()
    columns = {}
    for table in snapshot.manifest.tables:
        for shard in table.shards:
            for column in shard.files:
                array = snapshot.column(table.name, column, shard.rank)
                columns[table.name, shard.rank, column] = (str(array.dtype), array.tolist())
    return snapshot.manifest, columns


def refusal(directory):
    """Reads a snapshot; returns the error's message and None, or None and the content."""
    try:
        return None, content(Snapshot(directory))
    except DataLossError as error:
        return str(error), None
    except ValueError as error:
        assert "reads versions 1 to 5" in str(error)  # noqa: PT017
        return str(error), None


def chain_content(path):
    return [content(snapshot) for snapshot in Chain.open(path).snapshots]


def unpublished(path):
    return sorted(entry.name for entry in pathlib.Path(path).glob(".tmp-*"))
