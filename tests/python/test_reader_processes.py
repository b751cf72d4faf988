"""serving.Reader after a fork, after chdir, and in other processes."""

import copy
import dataclasses
import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest

import tf_dynemb as de
from tf_dynemb import serving

ROWS, DELTAS = 2000, 20

# Forks children that follow while a thread of the parent does, as a server does that opens its
# reader before it starts its workers. Each child must reach the last snapshot.
CHILD = """
import os, signal, sys, threading
import tf_dynemb.serving as serving

base, chain, last_id = sys.argv[1:]
failures = 0
for attempt in range(16):
    reader = serving.Reader(base)
    thread = threading.Thread(target=reader.follow, args=[chain])
    thread.start()
    if attempt % 2:
        while reader.id == first_id and thread.is_alive():
            pass
    first_id = reader.id
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        reader.follow(chain)
        right = reader.id == last_id and reader.lookup([3]).tolist() == [[float(DELTAS)] * 4]
        os._exit(0 if right else 3)
    failures += os.waitpid(pid, 0)[1] != 0
    thread.join()
    assert reader.id == last_id
print(failures)
"""


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A base, and at another path a copy of it with deltas."""
    path = tmp_path_factory.mktemp("chain") / "dump"
    table = de.DynamicVariable(4, name="reader_processes")
    table.upsert(np.arange(ROWS), np.zeros([ROWS, 4], np.float32))
    de.dump(path, [table])
    base = path.with_name("base")
    base.mkdir()
    (first,) = (each for each in path.iterdir() if "base" in each.name)
    (base / first.name).symlink_to(first)
    for number in range(1, DELTAS + 1):
        table.upsert(np.arange(ROWS), np.full([ROWS, 4], float(number), np.float32))
        de.incremental_dump(path, [table])
    return base, path


def test_forks_while_a_thread_follows(chain):
    base, path = chain
    code = CHILD.replace("DELTAS", str(DELTAS)).replace(
        "failures = 0\n", f"failures, first_id = 0, {serving.Reader(base).id!r}\n"
    )
    arguments = [str(base), str(path), serving.Reader(path).id]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.stdout == "0\n", done.stderr[-2000:]


def test_a_fork_between_two_statements(chain):
    """A child's state is consistent wherever the thread of the parent was."""
    base, path = chain
    forked = []

    class Watched(serving.Reader):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_held":
                lineage = copy.deepcopy(value.lineage)
                forked.append(dataclasses.replace(value, lineage=lineage))

    watched = Watched(base)
    watched.follow(path)
    held = [each for each in forked if getattr(each, "state", None) is not None]
    assert len(held) == DELTAS + 1
    for each in held:
        child = serving.Reader(base)
        child._held = each
        child.follow(path)
        assert child.id == watched.id
        assert child.lookup([3]).tolist() == [[float(DELTAS)] * 4]


def test_a_relative_path(chain, tmp_path, monkeypatch):
    _, path = chain
    monkeypatch.chdir(path.parent)
    readers = [serving.Reader(path.name), serving.Reader(pathlib.Path("base"))]
    monkeypatch.chdir(tmp_path)
    assert [reader.follow() for reader in readers] == [0, 0]
    assert readers[1].follow(path) == DELTAS
    assert repr(str(path)) in repr(readers[0])


def test_pickles(chain, tmp_path, monkeypatch):
    _, path = chain
    monkeypatch.chdir(path.parent)
    reader = serving.Reader("dump", tables=["reader_processes"], verify=True)
    saved = pickle.dumps(reader)
    assert len(saved) < 1000
    monkeypatch.chdir(tmp_path)
    other = pickle.loads(saved)
    assert (other._wanted, other._verify, other.id) == (("reader_processes",), True, reader.id)
    np.testing.assert_array_equal(other.lookup([1, -5]), reader.lookup([1, -5]))
    assert other.follow() == 0
    code = "import pickle, sys; r = pickle.load(sys.stdin.buffer); print(r.id, r.size())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=saved,
        capture_output=True,
        timeout=300,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.decode().split() == [reader.id, str(ROWS)]
    with pytest.raises(FileNotFoundError):
        pickle.loads(saved.replace(b"dump", b"gone"))
