"""Which snapshots are newer than a reader's state: the same rule for `Reader` and served models."""

from __future__ import annotations

import numpy as np
import pytest
from chain_writer import publish
from op_helpers import ops
from served_helpers import describe, lookup, opened
from serving_helpers import delta, plain

import tf_dynemb as de
from tf_dynemb.serving import Reader
from tf_dynemb.storage import DataLossError

KEYS = [1, 2, 3]
MINUTES = 60 * 10**9


class PythonReader:
    def __init__(self, folder, path):
        self.reader = Reader(path)

    def follow(self, path) -> int:
        return self.reader.follow(path)

    @property
    def id(self) -> str:
        return self.reader.id

    @property
    def values(self) -> list[float]:
        return self.reader.lookup(KEYS, default=-1.0)[:, 0].tolist()


class ServedModel:
    def __init__(self, folder, path):
        table = de.DynamicVariable(3, -1.0, "host", name="plain")
        self.handle = opened(table, describe(folder, path))

    def follow(self, path) -> int:
        try:
            return int(ops.dynemb_apply_snapshots(self.handle, str(path)))
        except Exception as error:
            raise DataLossError(str(error)) from error

    @property
    def id(self) -> str:
        return ops.dynemb_served_state(self.handle).id.numpy().decode()

    @property
    def values(self) -> list[float]:
        return lookup(self.handle, KEYS).numpy()[:, 0].tolist()


@pytest.fixture(params=[PythonReader, ServedModel])
def open_reader(request, tmp_path):
    return lambda path: request.param(tmp_path, path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chain"


def test_a_clock_that_was_ahead(open_reader, path):
    """The order of publications counts, not the times of their writers' clocks."""
    now = 1_700_000_000 * 10**9
    base = publish(path, "base", plain(KEYS), watermark=10, watermark_utc_ns=now + 10 * MINUTES)
    reader = open_reader(path)
    delta(path, plain([1], 20), base, 10, 20, watermark_utc_ns=now + MINUTES)
    assert reader.follow(path) == 1
    assert reader.values == [20, 1, 2]
    publish(path, "base", plain(KEYS, 30), watermark=30, watermark_utc_ns=now + 2 * MINUTES)
    assert reader.follow(path) == 1
    assert reader.values == [30, 31, 32]
    # Another process began to count from 0, and its clock is behind.
    publish(path, "base", plain(KEYS, 40), watermark=1, watermark_utc_ns=now - 10 * MINUTES)
    assert reader.follow(path) == 1
    assert reader.values == [40, 41, 42]


def test_snapshots_that_are_older_than_the_base(open_reader, tmp_path, path):
    """Tables were dumped to `path`, and later to `own`: the chain at `path` is older."""
    older = publish(path, "base", plain(KEYS, 5), watermark=5)
    second = delta(path, plain([1], 50), older, 5, 6)
    ids = [snapshot.manifest.id for snapshot in (older, second)]
    publish(tmp_path / "own", "base", plain(KEYS, 10), watermark=10, after=ids)
    reader = open_reader(tmp_path / "own")
    for at in (path, path, second.directory, older.directory):
        assert reader.follow(at) == 0
        assert reader.values == [10, 11, 12]
    newer = delta(path, plain([2], 70), second, 6, 12)
    assert reader.follow(path) == 3
    assert reader.values == [50, 70, 7]
    assert reader.id == newer.manifest.id


def test_another_chain_replaces_the_state(open_reader, tmp_path, path):
    """Nothing says that it is older; it becomes visible with its last snapshot."""
    publish(tmp_path / "own", "base", plain(KEYS, 10), watermark=10)
    reader = open_reader(tmp_path / "own")
    other = publish(path, "base", plain(KEYS, 50), watermark=8, watermark_utc_ns=1)
    delta(path, plain([3], 60), other, 8, 9)
    assert reader.follow(path) == 2
    assert reader.values == [50, 51, 60]
    assert reader.follow(path) == 0


def test_a_merged_base(open_reader, tmp_path, path):
    """It is older than a state that has more of the chain, and replaces one that has no more."""
    base = publish(path, "base", plain(KEYS), watermark=10)
    first = delta(path, plain([1], 20), base, 10, 20)
    second = delta(path, plain([2], 30), first, 20, 30)
    reader = open_reader(path)
    merged = {"watermark": 20, "continues": [first.manifest.id]}
    publish(tmp_path / "merged", "base", plain(KEYS, 7), **merged)
    for _ in range(2):
        assert reader.follow(tmp_path / "merged") == 0
        assert reader.values == [20, 30, 2]
    merged = {"watermark": 30, "continues": [second.manifest.id]}
    replacing = publish(tmp_path / "second", "base", plain(KEYS, 8), **merged)
    assert reader.follow(tmp_path / "second") == 1
    assert reader.id == replacing.manifest.id


def test_a_damaged_delta_of_a_new_chain(open_reader, path):
    """The base and the deltas before it become visible; the error names it."""
    publish(path, "base", plain(KEYS), watermark=10)
    reader = open_reader(path)
    base = publish(path, "base", plain(KEYS, 40), watermark=40)
    sound = delta(path, plain([1], 50), base, 40, 50)
    broken = delta(path, plain([2], 60), sound, 50, 60)
    file = broken.directory / "000.r0.vectors.npy"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"?")
    with pytest.raises(DataLossError, match=broken.directory.name):
        reader.follow(path)
    assert (reader.values, reader.id) == ([50, 41, 42], sound.manifest.id)
    file.write_bytes(content)
    assert reader.follow(path) == 1
    assert reader.values == [50, 60, 42]


def test_a_delta_of_other_tables_is_a_gap(open_reader, tmp_path, path):
    """It has fewer ticks than the state, which does not have its changes all the same."""
    publish(path, "base", plain(KEYS), watermark=10)
    reader = open_reader(path)
    other = publish(tmp_path / "other", "base", plain(KEYS), watermark=3)
    delta(tmp_path / "deltas", plain([1], 20), other, 3, 5)
    with pytest.raises(DataLossError, match=f"gap before .*{other.manifest.id}"):
        reader.follow(tmp_path / "deltas")
    assert reader.values == [0, 1, 2]


def test_a_model_that_follows_what_its_tables_were_dumped_to(open_reader, tmp_path, path):
    """A dump of tables says which dumps came before it."""
    table = de.DynamicVariable(3, 0.0, "host", name="plain")
    table.upsert(KEYS, np.full([3, 3], 1.0))
    de.dump(path, table)
    table.upsert([1], np.full([1, 3], 2.0))
    de.incremental_dump(path, table)
    table.upsert([2], np.full([1, 3], 3.0))
    de.dump(tmp_path / "own", table)
    reader = open_reader(tmp_path / "own")
    assert reader.follow(path) == 0
    assert reader.values == [2, 3, 1]
    table.upsert([3], np.full([1, 3], 4.0))
    de.incremental_dump(path, table)
    assert reader.follow(path) == 3
    assert reader.values == [2, 3, 4]
