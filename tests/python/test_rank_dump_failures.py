"""A dump that fails on one rank fails on all, changes nothing, and leaves no rank waiting."""

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
from rank_dump_helpers import dump_and_change
from rank_model import Rank, check_failed, contents, outcomes_on, run_on, unpublished
from rank_threads import RankGoneError, ranks_are_threads

import tf_dynemb as de
from tf_dynemb import storage
from tf_dynemb.persistence import shared_path
from tf_dynemb.persistence.joint_publication import JointPublication
from tf_dynemb.storage import column_writer, local_place
from tf_dynemb.tables.lineage import Snapshots

SIZE = 3
KEYS = np.arange(120)


class DiedError(BaseException):
    """A simulated end of a rank's process."""


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    with ranks_are_threads(monkeypatch):
        yield


@pytest.fixture
def ranks(tmp_path):
    """Returns ranks that dumped a base and then changed rows."""
    return dump_and_change(tmp_path / "chain", SIZE)


def on_disk(path, ranks):
    folded = fold(storage.Chain.open(path))
    return {name: folded[name] for name in contents(ranks)}


def open_files(path):
    """Returns the files below a path that this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in found if name.startswith(f"{path}/")]


def writes(kind):
    """Returns a function that writes a base or a delta, at the rank's path or another."""

    def work(rank, path=None):
        return rank.dump(path) if kind == "base" else rank.dump_delta(path=path)

    return work


def path_of(function, args):
    """Returns the file that a call uses."""
    if function in ("os.write", "os.pwrite", "os.fsync", "os.posix_fallocate"):
        return os.readlink(f"/proc/self/fd/{args[0]}")
    return str(args[0].path if function == "ColumnWriter.append" else args[0])


def rank_of(path):
    """Returns the rank that writes a file: the rank in its name, otherwise rank 0."""
    match = re.search(r"\.r(\d+)\.", path)
    return int(match[1]) if match else 0


HOMES = {
    "os": os,
    "Path": pathlib.Path,
    "ColumnWriter": column_writer.ColumnWriter,
}


@contextlib.contextmanager
def failing(function, rank, call, error):
    """Counts a rank's calls of a function, from 0, and makes number `call` fail."""
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
def test_failed_write_on_one_rank(ranks, tmp_path, kind, rank, function):
    chain = tmp_path / "chain"
    before = on_disk(chain, ranks)
    copied = tmp_path / "copied-chain"
    shutil.copytree(chain, copied)
    with failing(function, rank, -1, None) as counted:
        run_on(ranks, lambda each: writes(kind)(each, copied))
    total = counted[0]
    if kind == "delta" and function in ("os.posix_fallocate", "Path.open"):
        # A delta has no index, and only rank 0 writes a manifest.
        assert total == (rank == 0 and function == "Path.open")
    else:
        assert total > 0
    for call in sorted({0, total // 2, total - 1} if total else ()):
        error = OSError(errno.EIO, os.strerror(errno.EIO), f"call {call}")
        with failing(function, rank, call, error):
            found = outcomes_on(ranks, writes(kind))
        check_failed(found, [rank], OSError, "Input/output error")
        assert unpublished(chain) == []
        assert open_files(chain) == []
        assert table_reader.same(on_disk(chain, ranks), before)
    run_on(ranks, writes(kind))
    assert table_reader.same(on_disk(chain, ranks), contents(ranks))


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_failed_publication(ranks, tmp_path, monkeypatch, kind):
    chain = tmp_path / "chain"
    before = on_disk(chain, ranks)
    for function in ("rename", "scandir"):
        with monkeypatch.context() as patch:

            def fails(*args, function=function):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), function)

            if function == "rename":
                patch.setattr(os, "rename", fails)
            else:
                patch.setattr(local_place, "list_snapshots", fails)
            found = outcomes_on(ranks, writes(kind))
        check_failed(found, [0], PermissionError, "denied: .*" + function)
        assert unpublished(chain) == []
        assert table_reader.same(on_disk(chain, ranks), before)
    run_on(ranks, writes(kind))
    assert table_reader.same(on_disk(chain, ranks), contents(ranks))


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_another_writer_at_the_path(ranks, tmp_path, kind):
    with storage.Publication(tmp_path / "chain", "base"):
        found = outcomes_on(ranks, writes(kind))
    check_failed(found, [0], RuntimeError, "another process writes at")
    run_on(ranks, writes(kind))


@pytest.mark.parametrize("kind", ["base", "delta"])
@pytest.mark.parametrize("rank", range(SIZE))
def test_wrong_arguments_on_one_rank(ranks, tmp_path, kind, rank):
    def call(each):
        tables = each.tables if each.comm.rank != rank else [*each.tables, tf.Variable([1.0])]
        if kind == "base":
            de.dump(each.path, tables, quiet=True)
        else:
            de.incremental_dump(each.path, tables, quiet=True)

    check_failed(outcomes_on(ranks, call), [rank], TypeError, "variables must be DynamicVariables")

    def bad_since(each):
        since = "yesterday" if each.comm.rank == rank else None
        de.incremental_dump(each.path, each.tables, since, quiet=True)

    check_failed(outcomes_on(ranks, bad_since), [rank], TypeError, "since must be a Watermark")
    assert unpublished(tmp_path / "chain") == []
    assert len(storage.Chain.open(tmp_path / "chain").snapshots) == 1


@pytest.mark.parametrize("rank", range(SIZE))
def test_table_without_snapshots_on_one_rank(ranks, rank):
    ranks[rank].tables[1].snapshots = Snapshots()
    check_failed(
        outcomes_on(ranks, Rank.dump_delta), [rank], ValueError, "were never dumped to or loaded"
    )
    assert unpublished(ranks[0].path) == []


def test_different_variables_on_ranks(ranks, tmp_path):
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

    for case in mixed(ranks[0]):
        for outcome in outcomes_on(ranks, lambda each, case=case: mixed(each)[case]()):
            assert type(outcome.error) is ValueError, case
            assert "the variables must be the same on all ranks" in str(outcome.error)
            assert "rank 2" in str(outcome.error)
    assert table_reader.same(on_disk(chain, ranks), before)


def test_different_functions_on_ranks(ranks):
    calls = [Rank.dump, Rank.load, Rank.dump_delta]
    for outcome in outcomes_on(ranks, lambda each: calls[each.comm.rank](each)):
        assert type(outcome.error) is RuntimeError
        assert "dump on rank 0, load on rank 1, incremental_dump on rank 2" in str(outcome.error)
    assert unpublished(ranks[0].path) == []
    run_on(ranks, Rank.dump)


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_different_file_systems_on_ranks(ranks, tmp_path, monkeypatch, kind):
    """Rank 2 sees another directory at the same path."""
    monkeypatch.setattr(shared_path, "_PATIENCE", 0.1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def call(each):
        each.path = elsewhere if each.comm.rank == 2 else tmp_path / "chain"
        return writes(kind)(each)

    check_failed(outcomes_on(ranks, call), [2], FileNotFoundError, "must share the file system")
    found = outcomes_on(ranks, Rank.load)
    check_failed(found, [2], FileNotFoundError, "rank 2 does not see .*must share the file system")
    assert unpublished(tmp_path / "chain") == []


def test_file_system_that_shows_directories_late(ranks, tmp_path, monkeypatch):
    is_directory = shared_path.is_directory
    late = {}

    def seen(path):
        if threading.current_thread().name == "rank 2" and path.parent.name == "chain":
            late.setdefault(path, 3)
            late[path] -= 1
            return late[path] < 0 and is_directory(path)
        return is_directory(path)

    monkeypatch.setattr(shared_path, "is_directory", seen)
    run_on(ranks, Rank.dump)
    run_on(ranks, Rank.load)
    assert sorted(path.name[:5] for path in late) == [".tmp-", "00000"]


def test_files_that_rank_0_does_not_see(ranks, tmp_path, monkeypatch):
    """The other ranks write into other directories, as after a failed mount."""
    open_part = JointPublication._open_part

    def other(self):
        part = open_part(self)
        part._directory = tmp_path / f"of {part.rank}"
        part._directory.mkdir()
        return part

    monkeypatch.setattr(JointPublication, "_open_part", other)
    found = outcomes_on(ranks, Rank.dump)
    check_failed(found, [0], ValueError, r"has 0 bytes, but rank 1 has written .* must share")


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("kind", ["base", "delta"])
def test_death_of_a_rank(ranks, tmp_path, monkeypatch, kind, rank):
    chain = tmp_path / "chain"
    before = on_disk(chain, ranks)
    for function in ("ColumnWriter.append", "os.fsync", "os.pwrite"):
        with monkeypatch.context() as patch, failing(function, rank, 3, DiedError()):
            if rank == 0:
                # A process that is killed does not clean up.
                patch.setattr(local_place, "_discard", lambda _: None)
            found = outcomes_on(ranks, writes(kind))
        for each, outcome in enumerate(found):
            assert type(outcome.error) is (DiedError if each == rank else RankGoneError)
        assert len(unpublished(chain)) == (rank == 0)
        assert table_reader.same(on_disk(chain, ranks), before)
    run_on(ranks, writes(kind))
    assert unpublished(chain) == []
    assert table_reader.same(on_disk(chain, ranks), contents(ranks))
