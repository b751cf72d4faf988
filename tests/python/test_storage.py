"""Snapshots on disk: written content is read, and damaged content is refused."""

import dataclasses
import os
import pathlib
import random

import numpy as np
import pytest
import storage_helpers as helpers

from tf_dynemb.format import crc32c, npy
from tf_dynemb.storage import (
    Chain,
    DataLossError,
    InitializerEntry,
    Publication,
    Shard,
    Snapshot,
    StateEntry,
    column_writer,
    local_place,
)


@pytest.mark.parametrize("kind", ["base", "delta"])
@pytest.mark.parametrize("blocks", [1, 3, 40])
@pytest.mark.parametrize("block_bytes", [128, 129, 1000, 1 << 20])
def test_round_trip(tmp_path, kind, blocks, block_bytes):
    tables, columns = [], []
    types = [
        ("int64", "float32", 2, True, 33),
        ("int32", "float16", 3, False, 7),
        ("uint64", "bfloat16", 1, True, 0),
    ]
    for key_type, dtype, dimension, state, rows in types:
        deleted = 4 if kind == "delta" else 0
        table = helpers.table_entry(key_type, dimension, key_type, dtype, state)
        columns.append(helpers.shard_columns(table, kind, rows, deleted))
        tables.append(dataclasses.replace(table, shards=(Shard(0, rows, deleted, 3),)))
    with Publication(tmp_path / "a" / "b", kind, block_bytes=block_bytes) as publication:
        assert publication.last is None
        for number, values in enumerate(columns):
            helpers.write_shard(publication, number, values, blocks=blocks)
        published = publication.publish(tables, watermark=5, watermark_utc_ns=6)
    snapshot = Chain.open(tmp_path / "a" / "b").last
    snapshot.verify()
    assert snapshot.manifest == published.manifest
    assert snapshot.manifest.block_bytes == block_bytes
    for number, values in enumerate(columns):
        name = tables[number].name
        for column, written in values.items():
            array = snapshot.column(name, column)
            np.testing.assert_array_equal(array, written, strict=True)
            assert not array.flags.writeable
            file = snapshot.manifest.tables[number].shards[0].files[column].file
            np.save(tmp_path / "numpy.npy", written)
            on_disk = (snapshot.directory / file).read_bytes()
            assert on_disk == (tmp_path / "numpy.npy").read_bytes()
            assert on_disk[: npy.HEADER_BYTES] == npy.header(written.dtype, written.shape)


def test_verify_with_progress_and_another_checksum(tmp_path):
    snapshot = helpers.publish(tmp_path, rows=100)
    calls, steps = [], []

    def checksum(data, initial, room, block_bytes):
        calls.append((data.size, initial, room, block_bytes))
        return crc32c.blocks(data, initial, room, block_bytes)

    snapshot.verify(checksum, lambda done, total: steps.append((done, total)))
    files = snapshot.manifest.tables[0].shards[0].files.values()
    assert sum(call[0] for call in calls) == sum(file.bytes for file in files)
    assert steps[-1] == (sum(file.bytes for file in files),) * 2
    assert steps == sorted(steps)


def test_verify_reads_a_file_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("tf_dynemb.format.crc32c._READ_BYTES", 3 * helpers.BLOCK_BYTES)
    snapshot = helpers.publish(tmp_path, rows=300)
    snapshot.verify()
    file = snapshot.directory / "000.r0.vectors.npy"
    for offset in (0, 1000, 191, 192, 575, 576, file.stat().st_size - 1):
        content = file.read_bytes()
        file.write_bytes(content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :])
        begin = offset // helpers.BLOCK_BYTES * helpers.BLOCK_BYTES
        with pytest.raises(DataLossError, match=rf"vectors\.npy .* byte offset {begin} "):
            snapshot.verify()
        file.write_bytes(content)


@pytest.mark.parametrize("seed", range(5))
def test_writes_end_at_multiples_of_the_unit(tmp_path, monkeypatch, seed):
    unit, rng, ends = 256, np.random.default_rng(seed), []
    monkeypatch.setattr(column_writer, "WRITE_UNIT", unit)
    write = os.write

    def short(descriptor, data):
        written = write(descriptor, data[: rng.integers(1, len(data) + 1)])
        if written == len(data):
            ends.append(os.lseek(descriptor, 0, os.SEEK_CUR))
        return written

    parts = [rng.integers(0, 9, [size, 3], np.uint32) for size in rng.integers(0, 200, 20)]
    with Publication(tmp_path, "base") as publication:
        writer = publication.part.column(0, "vectors", np.uint32, (3,))
        monkeypatch.setattr(os, "write", short)
        for number, part in enumerate(parts):
            writer.append(part)
            if number == 10:
                writer.flush()
                assert os.stat(writer.path).st_size == ends.pop() == 128 + 12 * writer.rows
        assert len(ends) > 20
        assert all(end % unit == 0 for end in ends)
        entry = writer.close()
        assert np.load(writer.path).tolist() == np.concatenate(parts).tolist()
        assert entry.crc32c == f"{crc32c.crc32c(pathlib.Path(writer.path).read_bytes()):08x}"


def test_append_refuses_another_dtype_or_shape(tmp_path):
    with Publication(tmp_path, "base") as publication:
        writer = publication.part.column(0, "vectors", np.float32, (2,))
        for rows in (np.zeros((3, 2)), np.zeros((3, 3), np.float32), np.zeros(2, np.float32)):
            with pytest.raises(ValueError, match=r"vectors\.npy needs float32 \[n, 2\]"):
                writer.append(rows)
        strided = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, 1:5:3]
        writer.append(strided)
        assert writer.rows == 2
        writer.flush()
        written = np.frombuffer(pathlib.Path(writer.path).read_bytes()[128:], np.float32)
        assert written.tolist() == [1, 4, 13, 16]


def test_every_truncation_is_detected(tmp_path):
    snapshot = helpers.publish(tmp_path)
    before = helpers.content(snapshot)
    for file in sorted(snapshot.directory.iterdir()):
        content = file.read_bytes()
        for size in range(len(content)):
            file.write_bytes(content[:size])
            problem, after = helpers.refusal(snapshot.directory)
            if problem:
                assert file.name in problem
            else:
                assert content[size:].isspace()
                assert after == before
        file.write_bytes(content + b"\0")
        with pytest.raises(DataLossError, match=file.name):
            helpers.content(Snapshot(snapshot.directory))
        file.unlink()
        with pytest.raises(DataLossError, match=f"{file.name} is missing"):
            helpers.content(Snapshot(snapshot.directory))
        file.write_bytes(content)
    assert helpers.content(Snapshot(snapshot.directory)) == before


def test_flipped_bits_are_detected(tmp_path):
    snapshot = helpers.publish(tmp_path)
    before = helpers.content(snapshot)
    files = sorted(snapshot.directory.iterdir())
    draw = random.Random(11)
    detected = 0
    for _ in range(1000):
        file = draw.choice(files)
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        problem, after = helpers.refusal(snapshot.directory)
        if problem:
            assert file.name in problem
            detected += 1
        else:
            assert file.name == "MANIFEST.json"
            assert after == before
        file.write_bytes(content)
    assert detected > 850


def test_column_checks_header_and_size(tmp_path):
    snapshot = helpers.publish(tmp_path)
    file = snapshot.directory / "000.r0.keys.npy"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"<i8", b"<u8"))
    with pytest.raises(DataLossError, match=r"keys\.npy is damaged at byte offset 0"):
        snapshot.column("user", "keys")
    file.write_bytes(content[:-8])
    with pytest.raises(DataLossError, match=r"keys\.npy has 160 bytes; MANIFEST\.json says 168"):
        snapshot.column("user", "keys")
    file.unlink()
    with pytest.raises(DataLossError, match=r"keys\.npy is missing"):
        snapshot.column("user", "keys")


def test_unknown_names_are_key_errors(tmp_path):
    snapshot = helpers.publish(tmp_path)
    with pytest.raises(KeyError, match="no table 'item': there are 'user'"):
        snapshot.column("item", "keys")
    with pytest.raises(KeyError, match="no column 'deleted' of rank 0"):
        snapshot.column("user", "deleted")
    with pytest.raises(KeyError, match="of rank 1"):
        snapshot.column("user", "keys", 1)


def test_entries_that_contradict_the_files(tmp_path):
    table = helpers.table_entry(shards=(Shard(0, 4, 0, 0),))
    columns = helpers.shard_columns(table, "base", 5)

    def publish(tables, columns=columns, index=True, **more):
        with Publication(tmp_path, "base") as publication:
            helpers.write_shard(
                publication, 0, columns if index else {**columns, "deleted": columns["keys"]}
            )
            publication.publish(tables, **{"watermark": 1, "watermark_utc_ns": 1, **more})

    right = dataclasses.replace(table, shards=(Shard(0, 5, 0, 0),))
    for tables, more, problem in [
        ([table], {}, "has 168 bytes, but must have 160"),
        ([], {}, "belong to no shard"),
        ([right, dataclasses.replace(right, name="item")], {}, "keys is missing"),
        ([right], {"index": False}, "index is missing"),
        ([right], {"watermark": -1}, "watermark must be an integer"),
        (
            [dataclasses.replace(right, state=StateEntry("a", (2,), ()))],
            {},
            "same length as widths",
        ),
        (
            [dataclasses.replace(right, initializer=InitializerEntry(("other",), (0, 0)))],
            {},
            "kinds must be one of",
        ),
        ([right], {"optimizer": {"config": float("nan")}}, "JSON"),
    ]:
        with pytest.raises(ValueError, match=problem):
            publish(tables, **more)
        assert local_place.list_snapshots(tmp_path) == []
        assert helpers.unpublished(tmp_path) == []
    publish([right], optimizer={"variables": {2: 1.0, 10: (1, 2)}})
    optimizer = Chain.open(tmp_path).last.manifest.optimizer
    assert optimizer == {"variables": {"2": 1.0, "10": [1, 2]}}
