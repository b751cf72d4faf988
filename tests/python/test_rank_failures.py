"""What fails on one rank fails on all, leaves everything as it was, and nobody waiting."""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import threading

import numpy as np
import pytest
import table_reader
import tensorflow as tf
from chain_reader import fold
from rank_model import Rank, whole
from rank_threads import RankGoneError, outcomes, ranks_are_threads, run
from test_sok_dump import KEY, STATE, WEIGHT, write

import tf_dynemb as de
from tf_dynemb import joint_reading, rows_io, shared_path, storage
from tf_dynemb.agreement import OtherRankError
from tf_dynemb.snapshots import Snapshots
from tf_dynemb.storage import column_writer, publication

SIZE = 3
KEYS = np.arange(120)


class DiedError(BaseException):
    """Where the process of a rank is thought to end."""


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    with ranks_are_threads(monkeypatch):
        yield


@pytest.fixture
def ranks(tmp_path):
    """Ranks that have dumped a base, and changed since."""

    def begin(comm):
        rank = Rank(comm, tmp_path / "chain")
        rank.write(KEYS, 1)
        rank.dump()
        rank.write(KEYS[60:] + 40, 2)
        rank.erase(KEYS[:20])
        return rank

    return run(SIZE, begin)


def ended(ranks, work):
    """How `work(rank)` ended on each of the ranks, which run again."""

    def call(comm):
        ranks[comm.rank].comm = comm
        return work(ranks[comm.rank])

    return outcomes(len(ranks), call)


def succeed(ranks, work):
    found = ended(ranks, work)
    assert [outcome.error for outcome in found] == [None] * len(ranks)
    return [outcome.value for outcome in found]


def contents(ranks):
    return whole([rank.contents() for rank in ranks])


def on_disk(path, ranks):
    folded = fold(storage.Chain.open(path))
    return {name: folded[name] for name in contents(ranks)}


def unpublished(path):
    return [name for name in os.listdir(path) if name.startswith(".tmp-")]


def open_files(path):
    """Files below a path that this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in found if name.startswith(f"{path}/")]


def check_failed(found, failing, kind, says):
    """The failing ranks raised their own errors, the others one that names the first of them."""
    for rank, outcome in enumerate(found):
        if rank in failing:
            assert type(outcome.error) is kind, repr(outcome.error)
            assert re.search(says, str(outcome.error))
        else:
            assert type(outcome.error) is OtherRankError, repr(outcome.error)
            assert f"on rank {failing[0]}: {kind.__name__}: " in str(outcome.error)
            assert re.search(says, str(outcome.error))


def writes(kind):
    """What writes a base or a delta, at the rank's path or another."""

    def work(rank, path=None):
        return rank.dump(path) if kind == "base" else rank.dump_delta(path=path)

    return work


def path_of(function, args):
    """The file that a call is about."""
    if function in ("os.write", "os.pwrite", "os.fsync", "os.posix_fallocate"):
        return os.readlink(f"/proc/self/fd/{args[0]}")
    return str(args[0].path if function == "ColumnWriter.append" else args[0])


def rank_of(path):
    """The rank that writes a file; all that is not of a rank is rank 0's."""
    match = re.search(r"\.r(\d+)\.", path)
    return int(match[1]) if match else 0


HOMES = {
    "os": os,
    "Path": pathlib.Path,
    "ColumnWriter": column_writer.ColumnWriter,
}


@contextlib.contextmanager
def failing(function, rank, call, error):
    """Makes a rank's call of a function fail, counted from 0; counts the calls."""
    home, name = function.split(".")
    real = getattr(HOMES[home], name)
    counted = [0]
    lock = threading.Lock()

    def fails(*args, **kwargs):
        path = path_of(function, args)
        if "chain" in path and rank_of(path) == rank and ".tmp-" in path:
            with lock:
                counted[0] += 1
                this = counted[0] - 1
            if this == call:
                raise error
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HOMES[home], name, fails)
        yield counted


FUNCTIONS = [
    "os.open",
    "os.write",
    "os.pwrite",
    "os.fsync",
    "os.posix_fallocate",
    "Path.open",
    "ColumnWriter.append",
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("kind", ["base", "delta"])
def test_a_rank_that_cannot_write(ranks, tmp_path, kind, rank, function):
    chain = tmp_path / "chain"
    before = on_disk(chain, ranks)
    copied = tmp_path / "copied-chain"
    shutil.copytree(chain, copied)
    with failing(function, rank, -1, None) as counted:
        succeed(ranks, lambda each: writes(kind)(each, copied))
    total = counted[0]
    if kind == "delta" and function in ("os.posix_fallocate", "Path.open"):
        # A delta has no index, and only rank 0 writes a manifest.
        assert total == (rank == 0 and function == "Path.open")
    else:
        assert total > 0
    for call in sorted({0, total // 2, total - 1} if total else ()):
        error = OSError(errno.EIO, os.strerror(errno.EIO), f"call {call}")
        with failing(function, rank, call, error):
            found = ended(ranks, writes(kind))
        check_failed(found, [rank], OSError, "Input/output error")
        assert unpublished(chain) == []
        assert open_files(chain) == []
        assert table_reader.same(on_disk(chain, ranks), before)
    succeed(ranks, writes(kind))
    assert table_reader.same(on_disk(chain, ranks), contents(ranks))


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_publication_that_fails(ranks, tmp_path, monkeypatch, kind):
    chain = tmp_path / "chain"
    before = on_disk(chain, ranks)
    for function in ("rename", "scandir"):
        with monkeypatch.context() as patch:

            def fails(*args, function=function):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), function)

            if function == "rename":
                patch.setattr(os, "rename", fails)
            else:
                patch.setattr(publication, "list_snapshots", fails)
            found = ended(ranks, writes(kind))
        check_failed(found, [0], PermissionError, "denied: .*" + function)
        assert unpublished(chain) == []
        assert table_reader.same(on_disk(chain, ranks), before)
    succeed(ranks, writes(kind))
    assert table_reader.same(on_disk(chain, ranks), contents(ranks))


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_another_process_writes_there(ranks, tmp_path, kind):
    with storage.Publication(tmp_path / "chain", "base"):
        found = ended(ranks, writes(kind))
    check_failed(found, [0], RuntimeError, "another process writes at")
    succeed(ranks, writes(kind))


@pytest.mark.parametrize("kind", ["base", "delta"])
@pytest.mark.parametrize("rank", range(SIZE))
def test_a_rank_with_wrong_arguments(ranks, tmp_path, kind, rank):
    def call(each):
        tables = each.tables if each.comm.rank != rank else [*each.tables, tf.Variable([1.0])]
        if kind == "base":
            de.dump(each.path, tables, quiet=True)
        else:
            de.incremental_dump(each.path, tables, quiet=True)

    check_failed(ended(ranks, call), [rank], TypeError, "variables must be DynamicVariables")

    def none_there(each):
        since = "yesterday" if each.comm.rank == rank else None
        de.incremental_dump(each.path, each.tables, since, quiet=True)

    check_failed(ended(ranks, none_there), [rank], TypeError, "since must be a Watermark")
    assert unpublished(tmp_path / "chain") == []
    assert len(storage.Chain.open(tmp_path / "chain").snapshots) == 1


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_rank_whose_table_is_another(ranks, rank):
    ranks[rank].tables[1].snapshots = Snapshots()
    check_failed(ended(ranks, Rank.dump_delta), [rank], ValueError, "these tables never were")
    assert unpublished(ranks[0].path) == []


def test_ranks_that_name_different_variables(ranks, tmp_path):
    chain = tmp_path / "chain"
    before = on_disk(chain, ranks)

    def mixed(each):
        order = slice(None, None, 1 if each.comm.rank else -1)
        return {
            "dump": lambda: de.dump(chain, each.tables[order], quiet=True),
            "load": lambda: de.load(chain, each.tables[order], quiet=True),
            "apply_delta": lambda: de.apply_delta(chain, each.tables[order]),
            "incremental_dump": lambda: de.incremental_dump(chain, each.tables[order]),
            "other dtype": lambda: de.dump(
                chain,
                de.DynamicVariable(2, name="a", dtype=[tf.float32, tf.float16][each.comm.rank > 1]),
            ),
            "optimizer": lambda: de.dump(
                chain, each.tables, each.optimizer if each.comm.rank else None, quiet=True
            ),
        }

    for what in mixed(ranks[0]):
        for outcome in ended(ranks, lambda each, what=what: mixed(each)[what]()):
            assert type(outcome.error) is ValueError, what
            assert "the variables must be the same on all ranks" in str(outcome.error)
            assert "rank 2" in str(outcome.error)
    assert table_reader.same(on_disk(chain, ranks), before)


def test_ranks_that_call_different_things(ranks):
    calls = [Rank.dump, Rank.load, Rank.dump_delta]
    for outcome in ended(ranks, lambda each: calls[each.comm.rank](each)):
        assert type(outcome.error) is RuntimeError
        assert "dump on rank 0, load on rank 1, incremental_dump on rank 2" in str(outcome.error)
    assert unpublished(ranks[0].path) == []
    succeed(ranks, Rank.dump)


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_ranks_that_see_different_file_systems(ranks, tmp_path, monkeypatch, kind):
    """The same path, but rank 2 finds another directory there."""
    monkeypatch.setattr(shared_path, "_PATIENCE", 0.1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def call(each):
        each.path = elsewhere if each.comm.rank == 2 else tmp_path / "chain"
        return writes(kind)(each)

    check_failed(ended(ranks, call), [2], FileNotFoundError, "must share the file system")
    found = ended(ranks, Rank.load)
    check_failed(found, [2], FileNotFoundError, "rank 2 does not see .*must share the file system")
    assert unpublished(tmp_path / "chain") == []


def test_a_file_system_that_shows_things_late(ranks, tmp_path, monkeypatch):
    is_dir = pathlib.Path.is_dir
    late = {}

    def seen(path):
        if threading.current_thread().name == "rank 2" and path.parent.name == "chain":
            late.setdefault(path, 3)
            late[path] -= 1
            return late[path] < 0 and is_dir(path)
        return is_dir(path)

    monkeypatch.setattr(pathlib.Path, "is_dir", seen)
    succeed(ranks, Rank.dump)
    succeed(ranks, Rank.load)
    assert sorted(path.name[:5] for path in late) == [".tmp-", "00000"]


def test_files_that_rank_0_does_not_see(ranks, tmp_path, monkeypatch):
    """Another file system behind the directory of the snapshot, as after a failed mount."""
    open_part = de.snapshot.JointPublication._open_part

    def other(self):
        part = open_part(self)
        part._directory = tmp_path / f"of {part.rank}"
        part._directory.mkdir()
        return part

    monkeypatch.setattr(de.snapshot.JointPublication, "_open_part", other)
    found = ended(ranks, Rank.dump)
    check_failed(found, [0], ValueError, r"has 0 bytes, but rank 1 has written .* must share")


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("kind", ["base", "delta"])
def test_a_rank_that_dies(ranks, tmp_path, monkeypatch, kind, rank):
    chain = tmp_path / "chain"
    before = on_disk(chain, ranks)
    exit_ = publication.Publication.__exit__
    for function in ("ColumnWriter.append", "os.fsync", "os.pwrite"):
        with monkeypatch.context() as patch, failing(function, rank, 3, DiedError()):
            if rank == 0:
                # A process that is killed does not clean up.
                patch.setattr(
                    publication.Publication, "__exit__", lambda self, *_: os.close(self._lock)
                )
            found = ended(ranks, writes(kind))
        for each, outcome in enumerate(found):
            assert type(outcome.error) is (DiedError if each == rank else RankGoneError)
        assert len(unpublished(chain)) == (rank == 0)
        assert table_reader.same(on_disk(chain, ranks), before)
    assert publication.Publication.__exit__ is exit_
    succeed(ranks, writes(kind))
    assert unpublished(chain) == []
    assert table_reader.same(on_disk(chain, ranks), contents(ranks))


@pytest.fixture
def followers(ranks):
    """Ranks, one fewer, that are to load a base and a delta, and hold other rows."""
    succeed(ranks, Rank.dump_delta)

    def begin(comm):
        rank = Rank(comm, ranks[0].path)
        rank.write(KEYS[:30] + 1000, 9)
        return rank

    return run(2, begin)


def states(ranks):
    return [rank.state() for rank in ranks]


def test_damage_that_one_rank_finds(ranks, followers, tmp_path):
    before = states(followers)
    finders = set()
    for file in sorted((tmp_path / "chain").rglob("*.npy")):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 4
        file.write_bytes(flipped)
        found = ended(followers, Rank.load)
        (finder,) = (r for r in range(2) if type(found[r].error) is not OtherRankError)
        finders.add(finder)
        check_failed(found, [finder], storage.DataLossError, re.escape(str(file)))
        file.write_bytes(content[:-1])
        for outcome in ended(followers, Rank.load):
            assert re.search(
                f"{re.escape(str(file))} has|{re.escape(str(file))} ends", str(outcome.error)
            )
        file.write_bytes(content)
    assert finders == {0, 1}
    for manifest in (tmp_path / "chain").rglob("MANIFEST.json"):
        content = manifest.read_bytes()
        manifest.write_bytes(content.replace(b'"rows": ', b'"rows": 1', 1))
        check_failed(ended(followers, Rank.load), [0, 1], storage.DataLossError, "CRC32C")
        manifest.write_bytes(content)
    assert states(followers) == before
    succeed(followers, Rank.load)
    assert table_reader.same(contents(followers), contents(ranks))


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("call", range(6))
def test_a_rank_that_cannot_load(ranks, followers, monkeypatch, rank, call):
    before = states(followers)
    load_rows = rows_io.load_rows
    here = threading.local()
    counted = []

    def fails(*args):
        if here.rank == rank:
            counted.append(args)
            if len(counted) == call + 1:
                raise tf.errors.ResourceExhaustedError(None, None, "no memory")
        return load_rows(*args)

    def load(each):
        here.rank = each.comm.rank
        return each.load()

    with monkeypatch.context() as patch:
        patch.setattr(rows_io, "load_rows", fails)
        found = ended(followers, load)
    check_failed(found, [rank], tf.errors.ResourceExhaustedError, "cannot take the rows.*no memory")
    assert states(followers) == before
    succeed(followers, Rank.load)
    assert table_reader.same(contents(followers), contents(ranks))


def test_a_rank_whose_variable_differs(followers):
    def load(each):
        name = "user" if each.comm.rank == 0 else "nobody"
        return de.load(each.path, {name: each.tables[0]}, quiet=True)

    before = states(followers)
    for outcome in ended(followers, load):
        assert type(outcome.error) is ValueError
        assert "must be the same on all ranks" in str(outcome.error)
    check = ended(followers, lambda each: de.load(each.path, {"nobody": each.tables[0]}))
    for outcome in check:
        assert type(outcome.error) is ValueError
        assert "has no table 'nobody'" in str(outcome.error)
    assert states(followers) == before


def test_deltas_are_verified_before_any_rank_applies_one(ranks, followers, tmp_path):
    base = next((tmp_path / "chain").glob("*-base-*"))
    succeed(followers, lambda each: de.load(base, each.variables, each.optimizer, quiet=True))
    succeed(ranks, lambda each: (each.write([7], 5), each.dump_delta()))
    before = states(followers)
    deltas = sorted((tmp_path / "chain").glob("*-delta-*"))
    for file in sorted(deltas[1].glob("*.npy")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = ended(followers, Rank.apply)
        (finder,) = (r for r in range(2) if type(found[r].error) is not OtherRankError)
        check_failed(found, [finder], storage.DataLossError, re.escape(str(file)))
        file.write_bytes(content)
    assert states(followers) == before
    succeed(followers, Rank.apply)
    assert table_reader.same(contents(followers), contents(ranks))


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_that_fell_behind_catches_up(ranks, followers, tmp_path, monkeypatch, rank):
    """A delta that one rank could not apply is verified, and applied, when it is tried again."""
    base = next((tmp_path / "chain").glob("*-base-*"))
    succeed(followers, lambda each: de.load(base, each.variables, each.optimizer, quiet=True))
    here = threading.local()
    load_rows = rows_io.load_rows

    def fails(*args, **kwargs):
        if here.rank == rank:
            raise OSError(errno.EIO, "gone")
        return load_rows(*args, **kwargs)

    def apply(each):
        here.rank = each.comm.rank
        return each.apply()

    with monkeypatch.context() as patch:
        patch.setattr(rows_io, "load_rows", fails)
        check_failed(ended(followers, apply), [rank], OSError, "gone")
    ids = [set(dict(each.tables[-1].snapshots.items())) for each in followers]
    assert ids[rank] < ids[1 - rank]
    verified = []
    verify = joint_reading.verify

    def verifying(ranks, snapshots, quiet):
        verified.append(len(snapshots))
        return verify(ranks, snapshots, quiet)

    monkeypatch.setattr("tf_dynemb.applying.verify", verifying)
    marks = succeed(followers, apply)
    assert verified == [1, 1]
    assert marks == [de.Watermark.of(storage.Chain.open(ranks[0].path).last.manifest)] * 2
    assert table_reader.same(contents(followers), contents(ranks))


def write_sok_dump(folder, keys, vectors):
    folder.mkdir()
    write(folder / "user-key", KEY, keys)
    write(folder / "user-weight", WEIGHT, vectors)
    for state, factor in (("m", 2), ("v", 3)):
        write(folder / f"user-Adam-{state}", STATE, vectors * factor, state=state)
    write(folder / "grid-key", KEY, np.array([3, 0, 4, 1, 2]))
    write(folder / "grid-weight", WEIGHT, np.arange(10, dtype=np.float32).reshape(5, 2))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_dump_of_sok_is_spread_over_ranks(tmp_path, monkeypatch, size):
    keys = np.arange(-50, 50)
    vectors = (keys[:, None] * [1, 10, 100]).astype(np.float32)
    write_sok_dump(tmp_path / "sok", keys, vectors)
    monkeypatch.setattr(rows_io, "_LOAD_BYTES", 1000)
    grid = np.zeros((5, 2), np.float32)
    grid[[3, 0, 4, 1, 2]] = np.arange(10).reshape(5, 2)

    def load(comm):
        rank = Rank(comm)
        rank.write([7000], 1)
        matrix = de.Variable(tf.zeros([5, 2]), name="grid")
        de.load_sok_dump(tmp_path / "sok", [rank.tables[0], matrix], rank.optimizer)
        np.testing.assert_array_equal(matrix.numpy(), grid[comm.rank :: size])
        before = rank.contents()["user"]
        bad = de.DynamicVariable(3, name="user", mode=f"localized:{size - 1}")
        de.load_sok_dump(tmp_path / "sok", bad)
        assert len(bad) == (100 if comm.rank == size - 1 else 0)
        if comm.rank == size - 1:
            (tmp_path / "sok" / "user-weight").unlink()
        comm.barrier()
        with pytest.raises(ValueError, match=r"user-weight is missing"):
            de.load_sok_dump(tmp_path / "sok", [rank.tables[0], matrix], rank.optimizer)
        assert before.same(rank.contents()["user"])
        return rank.contents()

    found = whole(run(size, load))["user"]
    np.testing.assert_array_equal(found.keys, keys)
    np.testing.assert_array_equal(found.vectors, vectors)
    np.testing.assert_array_equal(found.state, np.concatenate([vectors * 2, vectors * 3], 1))
