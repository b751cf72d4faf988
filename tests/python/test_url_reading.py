"""Reading of stored snapshots: which bytes are asked for, and that they are the right ones."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import threading
from unittest import mock

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_helpers import table_entry, write_shard

from tf_dynemb import cli
from tf_dynemb.format.vector_format import decode, encode
from tf_dynemb.serving import Reader
from tf_dynemb.storage import Chain, DataLossError, Publication, Shard, stored_snapshot
from tf_dynemb.storage.store_folder import StoreFolder
from tf_dynemb.storage.stored_snapshot import StoredColumn


class Counting:
    """Counts the bytes and the calls of `StoreFolder.read_ranges`."""

    def __init__(self) -> None:
        self.bytes = self.calls = 0

    def __enter__(self):
        real = StoreFolder.read_ranges

        def counted(folder, file, begins, ends):
            self.calls += 1
            self.bytes += sum(ends) - sum(begins)
            return real(folder, file, begins, ends)

        self._patch = mock.patch.object(StoreFolder, "read_ranges", counted)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()


def write(path, kind, keys, vectors, stored_as="float32", ranks=1, deleted=(), **times):
    """Publishes a snapshot of one table; row i goes to the shard i % ranks."""
    stored = None if stored_as == "float32" else stored_as
    entry = table_entry("t", vectors.shape[1], state=False)
    with Publication(path, kind) as publication:
        shards = []
        for rank in range(ranks):
            here = slice(rank, None, ranks)
            times_of_rows = np.zeros(len(keys[here]), np.uint32)
            columns = {
                "keys": keys[here],
                "vectors": encode(vectors[here], stored_as),
                "updates": times_of_rows,
                "accesses": times_of_rows,
            }
            if kind == "delta":
                columns["deleted"] = np.array(deleted, np.int64)[here]
            write_shard(publication, 0, columns, rank)
            shards.append(Shard(rank, len(times_of_rows), len(columns.get("deleted", ())), 0))
        entry = dataclasses.replace(entry, shards=tuple(shards), vector_format=stored)
        return publication.publish([entry], world_size=ranks, watermark_utc_ns=1, **times)


def table(rows, dimension, seed=0):
    """Returns distinct keys, and vectors."""
    rng = np.random.default_rng(seed)
    keys = rng.permutation(np.arange(rows, dtype=np.int64) * 7 - 3 * rows)
    return keys, rng.normal(size=(rows, dimension)).astype(np.float32)


def memory_url() -> str:
    return f"memory://{os.urandom(6).hex()}/chain"


@pytest.mark.parametrize("stored_as", ["float32", "int8"])
def test_a_lookup_reads_kilobytes(stored_as):
    """Of 64 keys, half of which are there; what was read is not read again."""
    keys, vectors = table(300_000, 32)
    url = memory_url()
    base = write(url, "base", keys, vectors, stored_as, ranks=2, watermark=1)
    with Counting() as opening:
        reader = Reader(url)
    assert opening.bytes == 2 * 3 * 128
    asked = np.concatenate([keys[1000:1032], np.arange(32) * 7 + 1])
    with Counting() as first:
        found = reader.lookup(asked)
    np.testing.assert_array_equal(found[:32], encode_and_decode(vectors[1000:1032], stored_as))
    assert reader.contains(asked).tolist() == [True] * 32 + [False] * 32
    assert 64 * 16 < first.bytes < 100_000
    with Counting() as again:
        np.testing.assert_array_equal(reader.lookup(asked), found)
    assert again.bytes == 0
    # Deltas are in memory.
    changed = np.full((3, 32), 2.0, np.float32)
    write(
        url,
        "delta",
        keys[1000:1003],
        changed,
        parent=base.manifest.id,
        deleted=keys[1003:1004],
        since=1,
        watermark=2,
    )
    assert reader.follow() == 1
    with Counting() as later:
        assert reader.contains(asked).sum() == 31
        np.testing.assert_array_equal(reader.lookup(asked)[:3], changed)
    assert later.bytes == 0


def encode_and_decode(vectors, stored_as):
    return decode(encode(vectors, stored_as), vectors.shape[1])


@settings(max_examples=60)
@given(
    rows=st.integers(1, 3000),
    width=st.sampled_from([None, 1, 5, 130]),
    indexes=st.lists(
        st.one_of(
            st.tuples(st.integers(-10, 3000), st.integers(-10, 3000)),
            st.lists(st.integers(0, 2999), max_size=40),
        ),
        max_size=8,
    ),
    ahead=st.sampled_from([64, 4096, 1 << 24]),
    kept=st.sampled_from([300, 1 << 24]),
    many=st.sampled_from([2, 512]),
    gap=st.sampled_from([0, 1 << 12]),
)
def test_a_stored_column_is_an_array(rows, width, indexes, ahead, kept, many, gap):
    """Slices and arrays of positions, below 0 too, in any order and again."""
    shape = (rows,) if width is None else (rows, width)
    array = np.random.default_rng(1).integers(0, 1 << 30, shape).astype(np.int32)
    content = bytes(128) + array.tobytes()

    def read(begins, ends):
        return b"".join(content[b:e] for b, e in zip(begins, ends, strict=True))

    with (
        mock.patch.object(StoredColumn._rows, "__defaults__", (ahead,)),
        mock.patch.object(stored_snapshot, "_MANY", many),
        mock.patch.object(stored_snapshot, "_GAP", gap),
        mock.patch.object(stored_snapshot, "_KEPT", kept),
    ):
        column = StoredColumn("url", read, array.dtype, shape)
        assert (len(column), column.size, column.ndim) == (rows, array.size, array.ndim)
        for index in indexes:
            if isinstance(index, tuple):
                chosen = slice(*index)
            else:
                chosen = np.array([each % rows - rows * (each % 2) for each in index], np.int64)
            np.testing.assert_array_equal(column[chosen], array[chosen], strict=True)
        mask = np.arange(rows) % 3 == 0
        np.testing.assert_array_equal(column[mask], array[mask], strict=True)
        np.testing.assert_array_equal(column[::2], array[::2], strict=True)
        np.testing.assert_array_equal(np.asarray(column), array, strict=True)
        with pytest.raises(IndexError):
            column[np.array([rows])]


def test_what_single_rows_keep_is_bounded():
    keys, vectors = table(60_000, 64)
    url = memory_url()
    write(url, "base", keys, vectors, watermark=1)
    with mock.patch.object(stored_snapshot, "_KEPT", 1 << 16):
        column = Chain.open(url).last.column(0, "vectors")
        for begin in range(0, 60_000, 1000):
            column[np.arange(begin, begin + 1000, 50)]
        assert sum(each.nbytes for each in column._groups.values()) <= 1 << 16


def test_threads_and_processes_share_a_reader():
    keys, vectors = table(200_000, 8)
    url = memory_url()
    write(url, "base", keys, vectors, watermark=1)
    reader = Reader(url)
    wrong = []

    def look(seed):
        rng = np.random.default_rng(seed)
        for _ in range(30):
            places = rng.integers(0, len(keys), 50)
            if not np.array_equal(reader.lookup(keys[places]), vectors[places]):
                wrong.append(seed)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert np.array_equal(pickle.loads(pickle.dumps(reader)).lookup(keys[:9]), vectors[:9])


def test_a_forked_process_reads(s3):
    """A library's connections are not of both processes."""
    keys, vectors = table(100_000, 8)
    base = write(s3, "base", keys, vectors, watermark=1)
    reader = Reader(s3)
    reader.lookup(keys[:3])
    write(s3, "delta", keys[:1], vectors[1:2], parent=base.manifest.id, since=1, watermark=2)
    child = os.fork()
    if child == 0:
        sound = reader.follow() == 1
        sound &= np.array_equal(reader.lookup(keys[1000:1500]), vectors[1000:1500])
        os._exit(0 if sound else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(reader.lookup(keys[5000:5500]), vectors[5000:5500])
    assert reader.follow() == 1


def test_a_fork_while_threads_look_up():
    """A child has no lock that a thread of its parent holds."""
    keys, vectors = table(200_000, 8)
    url = memory_url()
    write(url, "base", keys, vectors, watermark=1)
    reader = Reader(url)
    ended = threading.Event()

    def look():
        rng = np.random.default_rng(threading.get_ident() % 1000)
        while not ended.is_set():
            reader.lookup(keys[rng.integers(0, len(keys), 4000)])

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(12):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                here = slice(number * 999, number * 999 + 999)
                sound = np.array_equal(reader.lookup(keys[here]), vectors[here])
                os._exit(0 if sound else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_a_base_that_is_gone(tmp_path):
    """Rows that were not read before are lost; the reader goes on with the new base."""
    keys, vectors = table(100_000, 8)
    url = memory_url()
    base = write(url, "base", keys, vectors, watermark=1)
    reader = Reader(url)
    write(url, "base", keys, vectors * 2, watermark=2, after=base.manifest.ids)
    with pytest.raises(FileNotFoundError, match=f"{url}/00000001-base-.*npy"):
        reader.lookup(keys[:50])
    assert reader.follow() == 1
    np.testing.assert_array_equal(reader.lookup(keys[:50]), 2 * vectors[:50])


@pytest.mark.parametrize("store", ["memory", "s3"])
@pytest.mark.parametrize("damage", ["shorter", "missing", "longer", "flipped", "header", "empty"])
def test_damage(capsys, request, damage, store):
    keys, vectors = table(100_000, 8)
    url = memory_url() if store == "memory" else request.getfixturevalue("s3")
    base = write(url, "base", keys, vectors, watermark=1)
    file = f"{base}/000.r0.vectors.npy"
    fs, place = fsspec.core.url_to_fs(file)
    content = bytearray(fs.cat_file(place))
    if damage == "flipped":
        content[5000] ^= 1
    elif damage == "header":
        content[30] ^= 1
    fs.rm_file(place)
    if damage != "missing":
        end = {"shorter": -100, "empty": 0}.get(damage, len(content))
        fs.pipe_file(place, bytes(content[:end]) + b"x" * (damage == "longer"))
    chain = Chain.open(url)
    with pytest.raises(DataLossError, match=file):
        chain.last.verify()
    if damage in ("shorter", "missing", "header", "empty"):
        with pytest.raises(DataLossError, match=file):
            Reader(url).lookup(keys)
    assert cli.main(["verify", url]) == 1
    assert file in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"", b"half"])
@pytest.mark.parametrize("store", ["memory", "s3"])
def test_damaged_deltas(request, content, store):
    """The state before them stays."""
    keys, vectors = table(1000, 8)
    url = memory_url() if store == "memory" else request.getfixturevalue("s3")
    last = write(url, "base", keys, vectors, watermark=1).manifest
    reader = Reader(url)
    delta = write(url, "delta", keys[:9], vectors[:9] * 2, parent=last.id, since=1, watermark=2)
    fs, place = fsspec.core.url_to_fs(f"{delta}")
    for file in ("MANIFEST.json", "000.r0.vectors.npy"):
        sound = fs.cat_file(f"{place}/{file}")
        fs.rm_file(f"{place}/{file}")
        if content is not None:
            fs.pipe_file(f"{place}/{file}", content)
        with pytest.raises(DataLossError, match=file):
            reader.follow()
        with pytest.warns(UserWarning, match="is read as of its snapshot"):
            assert Reader(url).id == last.id
        fs.pipe_file(f"{place}/{file}", sound)
    assert reader.follow() == 1
