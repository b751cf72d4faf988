"""A crash at any point of a publication leaves the chain as before, or as after it."""

import dataclasses
import errno
import fcntl
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import storage_helpers as helpers

from tf_dynemb.storage import WRITE_UNIT, Chain, Publication, Shard, local_place

STEPS = ["os.write", "os.pwrite", "os.posix_fallocate", "os.fsync", "os.rename", "shutil.rmtree"]


class CrashError(BaseException):
    """A simulated end of the process."""


def crash_before(patch, step, call):
    """Makes a function raise from call number `call` on, counted from 0."""
    module, name = step.split(".")
    function = getattr(sys.modules[module], name)
    calls = iter(range(1 << 30))

    def crashing(*args, **kwargs):
        if next(calls) >= call:
            raise CrashError
        return function(*args, **kwargs)

    patch.setattr(f"{module}.{name}", crashing)


def publish_until_a_crash(path, kind, parent, step, call):
    """Returns whether it crashed."""
    with pytest.MonkeyPatch.context() as patch:
        crash_before(patch, step, call)
        # A killed process would not run the clean-up of the `with` statement.
        patch.setattr(local_place, "_discard", lambda _: None)
        try:
            helpers.publish(path, kind, parent, rows=4, seed=9)
        except CrashError:
            return True
    return False


def directories(path):
    return [p for p in path.iterdir() if p.is_dir()]


@pytest.mark.parametrize("kind", ["base", "delta"])
@pytest.mark.parametrize("step", STEPS)
def test_crash_before_each_step(tmp_path, kind, step):
    crashes = 0
    for call in range(100):
        path = tmp_path / str(call)
        last = helpers.publish_chain(path)[-1].manifest.id
        before = helpers.chain_content(path)
        parent = last if kind == "delta" else None
        crashed = publish_until_a_crash(path, kind, parent, step, call)
        found = helpers.chain_content(path)
        if crashed and found == before:
            assert len(helpers.unpublished(path)) == 1
        else:
            assert len(found) == (1 if kind == "base" else 3)
            assert helpers.unpublished(path) == []
        crashes += crashed
        follower = helpers.publish(path, "delta", found[-1][0].id, seed=3)
        assert helpers.chain_content(path) == [*found, helpers.content(follower)]
        assert helpers.unpublished(path) == []
        # Snapshots that a base has superseded, and could not remove, stay until the next base.
        assert kind == "base" or len(directories(path)) == len(found) + 1
        helpers.publish(path, "base", None, seed=4)
        assert len(directories(path)) == 1
        if not crashed:
            break
    least = {"os.write": 10, "os.pwrite": 5, "os.fsync": 9, "os.rename": 1}
    assert crashes >= least.get(step, 1 if kind == "base" else 0)
    assert not crashed


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_everything_is_synced_before_and_after_the_rename(tmp_path, monkeypatch, kind):
    events = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree
    last = helpers.publish_chain(tmp_path / "path")[-1].manifest.id

    def synced(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(source, target):
        files = sorted(str(file) for file in source.iterdir())
        assert sorted(events) == sorted([*files, str(source)])
        assert events[-1] == str(source)
        assert events[-2] == str(source / "MANIFEST.json")
        events[:] = ["renamed"]
        rename(source, target)

    def removed(directory, **options):
        if directory.exists():
            events.append("removed")
        rmtree(directory, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    helpers.publish(tmp_path / "path", kind, last if kind == "delta" else None)
    superseded = ["removed", "removed"] if kind == "base" else []
    assert events == ["renamed", str(tmp_path / "path"), *superseded]


def test_killed_process(tmp_path):
    before = helpers.publish(tmp_path)
    script = (
        "import sys, time, numpy as np\n"
        "from tf_dynemb.storage import Publication\n"
        "with Publication(sys.argv[1], 'base') as publication:\n"
        "    publication.part.column(0, 'keys', np.int64).append(np.arange(1000))\n"
        "    print('written', flush=True)\n"
        "    time.sleep(60)\n"
    )
    root = pathlib.Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path],
        stdout=subprocess.PIPE,
        cwd=root if (root / "tf_dynemb").is_dir() else None,
    ) as process:
        try:
            assert process.stdout.readline() == b"written\n"
            with pytest.raises(RuntimeError, match="another process writes at"):
                helpers.publish(tmp_path)
            assert len(helpers.unpublished(tmp_path)) == 1
        finally:
            process.kill()
    assert Chain.open(tmp_path).last.manifest == before.manifest
    deadline = time.monotonic() + 10
    while len(helpers.unpublished(tmp_path)) and time.monotonic() < deadline:
        helpers.publish(tmp_path)
    assert helpers.unpublished(tmp_path) == []


def test_two_writers(tmp_path):
    with Publication(tmp_path, "base") as first:
        with pytest.raises(RuntimeError, match=f"another process writes at {tmp_path}"):
            helpers.publish(tmp_path)
        assert helpers.unpublished(tmp_path) == [f".tmp-{first.id}"]
    helpers.publish(tmp_path)


def test_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / ".tmp-of-another").mkdir()
    helpers.publish_chain(tmp_path)
    assert len(Chain.open(tmp_path).snapshots) == 2
    assert helpers.unpublished(tmp_path) == [".tmp-of-another"]


def test_leaving_without_publishing(tmp_path):
    helpers.publish(tmp_path)
    before = helpers.chain_content(tmp_path)
    with Publication(tmp_path, "base") as publication:
        publication.part.column(0, "keys", np.int64).append(np.arange(10))
    with pytest.raises(KeyError), Publication(tmp_path, "base") as publication:  # noqa: PT012
        publication.part.column(0, "keys", np.int64)
        raise KeyError
    assert helpers.unpublished(tmp_path) == []
    assert helpers.chain_content(tmp_path) == before


@pytest.mark.parametrize("function", ["write", "pwrite", "posix_fallocate", "fsync"])
def test_full_disk(tmp_path, monkeypatch, function):
    helpers.publish_chain(tmp_path)
    before = helpers.chain_content(tmp_path)
    real = getattr(os, function)
    calls = iter(range(100))

    def full(*args):
        if next(calls) > 2 or function == "posix_fallocate":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        with pytest.raises(OSError, match="No space left") as caught:
            helpers.publish(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    if function == "write":
        assert caught.value.filename.endswith(".npy")
    assert helpers.unpublished(tmp_path) == []
    assert helpers.chain_content(tmp_path) == before
    helpers.publish(tmp_path)


def test_nothing_is_published_after_a_failed_write(tmp_path, monkeypatch):
    with Publication(tmp_path, "base") as publication:
        writer = publication.part.column(0, "keys", np.int64)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda *_: os.close(-1))
            writer.append(np.arange(3))
            with pytest.raises(OSError, match="Bad file descriptor"):
                writer.append(np.arange(WRITE_UNIT))
        with pytest.raises(ValueError, match="closed"):
            writer.append(np.arange(3))
        with pytest.raises(ValueError, match="not complete"):
            publication.publish([], watermark=1, watermark_utc_ns=1)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    helpers.content(helpers.publish(tmp_path))


def test_delta_that_would_leave_a_gap(tmp_path):
    snapshots = helpers.publish_chain(tmp_path)
    for parent in (None, "0" * 32, snapshots[0].manifest.id):
        with pytest.raises(ValueError, match="would have a gap"):
            helpers.publish(tmp_path, "delta", parent)
    assert len(Chain.open(tmp_path).snapshots) == 2


def test_last_is_the_end_of_the_chain(tmp_path):
    snapshots = helpers.publish_chain(tmp_path, deltas=2)
    with Publication(tmp_path, "delta") as publication:
        assert publication.last == snapshots[-1].manifest


def test_base_supersedes_a_damaged_chain(tmp_path):
    snapshots = helpers.publish_chain(tmp_path, deltas=2)
    (snapshots[2].directory / "MANIFEST.json").write_text("{")
    shutil.rmtree(snapshots[1].directory)
    base = helpers.publish(tmp_path)
    assert Chain.open(tmp_path).last.directory == base.directory
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [base.directory.name, "LOCK"]


def test_another_builder_of_the_index(tmp_path):
    calls = []
    table = helpers.table_entry(key_type="int32")
    columns = helpers.shard_columns(table, "base", 9)

    def build(*args):
        calls.append(args)
        with open(args[4], "r+b") as file:
            file.seek(args[5])
            file.write(np.arange(32, dtype=np.uint32).tobytes())
        return 12345

    with Publication(tmp_path, "base") as publication:
        publication.part.column(0, "keys", np.int32).append(columns["keys"])
        publication.part.write_index(0, build=build)
        directory = tmp_path / f".tmp-{publication.id}"
        assert calls == [
            (
                str(directory / "000.r0.keys.npy"),
                128,
                9,
                4,
                str(directory / "000.r0.index.npy"),
                128,
            )
        ]
        index = np.load(directory / "000.r0.index.npy")
        np.testing.assert_array_equal(index, np.arange(32, dtype=np.uint32), strict=True)
        written = dataclasses.replace(table, shards=(Shard(0, 9, 0, 0),))
        (entry,) = publication.part.with_files([written])
        assert entry.shards[0].index_salt == 12345


def test_invalid_arguments(tmp_path):
    with pytest.raises(ValueError, match="kind must be one of base, delta"):
        Publication(tmp_path, "full")
    with pytest.raises(ValueError, match="block_bytes must be at least 128"):
        Publication(tmp_path, "base", block_bytes=64)
