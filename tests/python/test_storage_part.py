"""Snapshots that several processes write: each writes a part, and one of them publishes."""

import dataclasses
import shutil

import numpy as np
import pytest
import storage_helpers as helpers

from tf_dynemb.format.table_entry import tables_from_json, tables_to_json
from tf_dynemb.storage import Chain, Part, Publication, Shard, joined
from tf_dynemb.storage.local_place import unpublished

TIMES = {"watermark": 9, "watermark_utc_ns": 1}


def write_part(part, table, seed, rows=5):
    """Writes a rank's shard; returns its columns, and the entry as sent to other ranks."""
    columns = helpers.shard_columns(table, "base", rows, seed=seed)
    for column, values in columns.items():
        part.column(0, column, values.dtype, values.shape[1:]).append(values)
    part.write_index(0)
    shard = Shard(part.rank, rows, 0, seed)
    (entry,) = part.with_files([dataclasses.replace(table, shards=(shard,))])
    return columns, tables_from_json(tables_to_json([entry]), "test")


def test_parts_are_published_together(tmp_path):
    table = helpers.table_entry()
    with Publication(tmp_path, "base", block_bytes=192) as publication:
        parts = [publication.part]
        for rank in (1, 4):
            directory = unpublished(tmp_path, publication.id)
            parts.append(Part(directory, rank, block_bytes=192))
        written = [write_part(part, table, seed) for seed, part in enumerate(parts)]
        tables = joined([entries for _, entries in written])
        publication.publish(tables, world_size=5, **TIMES)
    snapshot = Chain.open(tmp_path).last
    snapshot.verify()
    assert helpers.unpublished(tmp_path) == []
    (entry,) = snapshot.manifest.tables
    assert [(s.rank, s.rows, s.base_tick) for s in entry.shards] == [
        (0, 5, 0),
        (1, 5, 1),
        (4, 5, 2),
    ]
    for part, (columns, _) in zip(parts, written, strict=True):
        for column, values in columns.items():
            found = snapshot.column("user", column, part.rank)
            np.testing.assert_array_equal(found, values, strict=True)


def test_files_of_other_ranks_are_checked(tmp_path):
    table = helpers.table_entry()
    for spoil in ("remove", "cut"):
        with Publication(tmp_path, "base") as publication:
            part = Part(unpublished(tmp_path, publication.id), 1)
            tables = joined([write_part(p, table, 0)[1] for p in (publication.part, part)])
            file = unpublished(tmp_path, publication.id) / "000.r1.state.npy"
            if spoil == "remove":
                file.unlink()
            else:
                file.write_bytes(file.read_bytes()[:-1])
            with pytest.raises(ValueError, match=r"000\.r1\.state\.npy has .* rank 1 has written"):
                publication.publish(tables, world_size=2, **TIMES)
        assert list(tmp_path.glob("0*")) == helpers.unpublished(tmp_path) == []


def test_contradictory_parts():
    table = helpers.table_entry(shards=(Shard(0, 1, 0, 0),))
    for other in (
        dataclasses.replace(table, name="item"),
        dataclasses.replace(table, state=None),
        dataclasses.replace(table, seed=1),
    ):
        with pytest.raises(ValueError, match="part 1 has another table than part 0"):
            joined([[table], [other]])
    with pytest.raises(ValueError, match="shorter"):
        joined([[table], []])


def test_abandoned_part_closes_its_files(tmp_path):
    part = Part(tmp_path, 3)
    writer = part.column(0, "keys", np.int64)
    writer.append(np.arange(3))
    part.abandon()
    part.abandon()
    with pytest.raises(ValueError, match=r"000\.r3\.keys\.npy is closed"):
        writer.append(np.arange(3))
    with pytest.raises(ValueError, match="not complete"):
        part.with_files([])


def test_part_that_writes_after_the_publication_was_dropped(tmp_path, monkeypatch):
    rmtree = shutil.rmtree

    with Publication(tmp_path, "base") as publication:
        part = Part(unpublished(tmp_path, publication.id), 1)
        part.column(0, "keys", np.int64)

        def racing(directory, **options):
            """Removes the existing files, but no file that the part creates during the removal."""
            if directory.exists():
                for file in directory.iterdir():
                    file.unlink()
                if not list(tmp_path.glob("*-dropped")):
                    part.column(0, "vectors", np.float32).append(np.zeros(3, np.float32))
            if not directory.exists() or not list(directory.iterdir()):
                rmtree(directory, **options)

        monkeypatch.setattr(shutil, "rmtree", racing)
    assert helpers.unpublished(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        part.column(0, "state", np.float32)
    part.abandon()
    helpers.publish(tmp_path)
