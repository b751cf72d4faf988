"""A power failure at any moment: what is left can be opened, and has what was published.

tests/crash records the calls that a workload makes to the file system, and makes from them the
files that a crash can leave (replay.py says which); every state is opened here. The idea comes from
CrashMonkey (Mohan et al., OSDI 2018) and ALICE (Pillai et al., OSDI 2014).

CRASH_SAMPLES=100 tries 100 times more states of each kind; see CONTRIBUTING.md.
"""

import dataclasses
import fnmatch
import gc
import os
import pathlib
import re
import shutil
import subprocess
import sys

import oracle
import pytest
import replay
import table_reader
import workloads
from oracle import Dumps, Recording, Tables, explore
from recording import compile_recorder
from replay import ORDERED, POSIX, Disk, Kind, Record

HERE = pathlib.Path(__file__).resolve().parent
LONGER = int(os.environ.get("CRASH_SAMPLES", "1"))

# The units in which rows are written: none is torn.
WIDE_UNITS = dataclasses.replace(POSIX, name="posix, wide units", sector=12288)
SECTORS = dataclasses.replace(POSIX, name="posix, sectors", sector=512)
FORGETS = dataclasses.replace(POSIX, name="posix, pages of a failed sync are lost", forgets=True)

WIDE = Tables(workloads.WIDE)
FRESH = Tables(workloads.FRESH)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not any(map(shutil.which, ("cc", "gcc", "g++"))),
    reason="the recorder needs Linux and a C compiler",
)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    return compile_recorder(tmp_path_factory.mktemp("recorder"))


def run_recorded(recorder, arguments):
    root = HERE.parents[1]
    paths = [HERE.parent / "crash", HERE, *([root] if (root / "tf_dynemb").is_dir() else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "LD_PRELOAD": str(recorder),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def recorded(recorder, tmp_path_factory):
    """All workloads, by name."""
    folder = tmp_path_factory.mktemp("recorded")
    run_recorded(recorder, [HERE.parent / "crash" / "workloads.py", folder, *workloads.WORKLOADS])
    # Objects that exist now stay: collections are for the tables of a state.
    gc.collect()
    gc.freeze()
    yield {name: Recording.read(folder / name) for name in workloads.WORKLOADS}
    gc.unfreeze()


# --- The recorder


def check_complete(trace, files):
    """The trace, replayed, has the files of the folder; otherwise calls were missed."""
    for model in (POSIX, ORDERED):
        disk = Disk(model)
        for record in trace:
            disk.feed(record)
        state = disk.everything()
        found = {path: state.content(file) for path, file in state.files}
        there = [path for path in files.rglob("*") if path.is_file()]
        assert found == {f"/{path.relative_to(files)}": path.read_bytes() for path in there}
        folders = [path for path in files.rglob("*") if path.is_dir()]
        assert sorted(state.directories) == sorted(f"/{p.relative_to(files)}" for p in folders)


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_no_call_of_a_workload_is_missed(recorded, name):
    recording = recorded[name]
    check_complete(recording.trace, recording.folder / "files")
    assert any(record.kind is Kind.SYNC for record in recording.trace)


CALLS = """
import mmap, os, pathlib, shutil, sys
from recording import Recorder
files, trace = map(pathlib.Path, sys.argv[1:])
recorder = Recorder()
recorder.start(files, trace)
(files / "a").write_bytes(bytes(range(256)) * 40)
shutil.copyfile(files / "a", files / "copy")
with (files / "a").open("r+b") as file:
    file.seek(100)
    file.write(b"in the middle")
    file.truncate(9000)
with (files / "a").open("ab") as file:
    file.write(b"at the end")
os.makedirs(files / "d" / "e")
here = os.open(files / "d", os.O_RDONLY)
file = os.open("f", os.O_RDWR | os.O_CREAT, dir_fd=here)
other = os.dup(file)
os.writev(other, [b"one", b"two"])
os.pwritev(other, [b"three", b"four"], 20)
os.posix_fallocate(file, 0, 5000)
with mmap.mmap(file, 5000) as map:
    map[4000:4003] = b"map"
    os.fsync(file)
    map[10:13] = b"map"
os.link("f", files / "g", src_dir_fd=here)
os.replace(files / "g", files / "copy")
os.rename(files / "d", files / "renamed")
os.pwrite(file, b"after the renames", 0)
os.fsync(here)
if os.fork() == 0:
    (files / "of a child").write_text("x")
    os._exit(0)
os.wait()
os.chdir(files)
pathlib.Path("relative").write_text("y")
os.remove("relative")
os.mkdir("gone")
pathlib.Path("gone", "x").touch()
shutil.rmtree("gone")
with open("a", "wb"):
    pass
"""


def test_every_kind_of_call_is_recorded(recorder, tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    run_recorded(recorder, ["-c", CALLS, files, tmp_path / "trace"])
    trace = replay.read_trace(tmp_path / "trace")
    check_complete(trace, files)
    assert {record.kind for record in trace} == set(Kind) - {Kind.MARK, Kind.UNKNOWN}
    # The check sees a call that is missing.
    for i, record in enumerate(trace):
        if record.kind in (Kind.SYNC, Kind.WRITE, Kind.TRUNCATE):
            continue  # the latter may be written over
        if record.kind is Kind.UNLINK and record.path == "/gone/x":
            continue  # nothing finds it in a directory that is gone
        with pytest.raises((AssertionError, KeyError)):
            check_complete(trace[:i] + trace[i + 1 :], files)


FOPEN = """
import ctypes, pathlib, sys
from recording import Recorder
files, trace = map(pathlib.Path, sys.argv[1:])
Recorder().start(files, trace)
ctypes.CDLL(None).fopen(bytes(files / "x"), b"w")
"""


def test_stdio_is_refused(recorder, tmp_path):
    (tmp_path / "files").mkdir()
    run_recorded(recorder, ["-c", FOPEN, tmp_path / "files", tmp_path / "trace"])
    with pytest.raises(ValueError, match="cannot follow UNKNOWN fopen /x"):
        replay.read_trace(tmp_path / "trace")


# --- The model


def made(kind, path="", other="", inode=0, offset=0, data=b"", error=0):
    return Record(kind, error, inode, offset, path, other, data)


def left(trace, model):
    """The remains of crashes, during a trace and after it: two sets of (path, content)."""
    during, after = set(), set()
    marked = [*trace, made(Kind.MARK, "{}")]
    for crash in replay.crashes(marked, model, lambda path: False, 100, 0, lambda mark: "after"):
        files = tuple((path, crash.state.content(file)) for path, file in crash.state.files)
        (after if crash.at > len(trace) else during).add(files)
    return during, after


WRITTEN = [
    made(Kind.CREATE, "/a", inode=1),
    made(Kind.WRITE, inode=1, data=b"old"),
    made(Kind.SYNC, "/a", inode=1),
    made(Kind.SYNC),
]
REPLACED = [
    made(Kind.CREATE, "/b", inode=2),
    made(Kind.WRITE, inode=2, data=b"new"),
    made(Kind.SYNC, "/b", inode=2),
    made(Kind.RENAME, "/b", "/a"),
]
OLD, NEW = ("/a", b"old"), ("/a", b"new")


def test_a_file_that_is_replaced():
    empty, zeros = ("/a", b""), ("/a", bytes(3))
    during, after = left(WRITTEN, POSIX)
    assert during == {(), (empty,), (zeros,), (OLD,)}
    assert after == {(OLD,)}
    _, after = left(WRITTEN + REPLACED, POSIX)
    assert after == {(OLD,), (NEW,), (OLD, ("/b", b"new"))}
    _, after = left(WRITTEN + REPLACED, ORDERED)
    assert after == {(OLD, ("/b", b"new")), (NEW,)}
    for model in (POSIX, ORDERED):
        _, after = left([*WRITTEN, *REPLACED, made(Kind.SYNC)], model)
        assert after == {(NEW,)}
    # Without the sync of the new file, its name may be older than its contents.
    for model in (POSIX, ORDERED):
        _, after = left([*WRITTEN, *REPLACED[:2], REPLACED[3]], model)
        assert {(OLD,), (empty,), (NEW,)} <= after


def test_what_is_lost_without_a_sync():
    trace = [
        made(Kind.MKDIR, "/d", inode=1),
        made(Kind.CREATE, "/d/a", inode=2),
        made(Kind.WRITE, inode=2, data=b"x" * 8192),
        made(Kind.SYNC, "/d/a", inode=2),
    ]
    found = {}
    for model in (POSIX, ORDERED):
        during, after = left(trace, model)
        found[model] = {files[0][1] for files in during if files}
        # A name is durable with its directory only; with ext4, with any sync.
        assert (() in after) == (model is POSIX)
        assert (("/d/a", b"x" * 8192),) in after
    # All or nothing, or some of the pages; the size alone is not there without them in ext4.
    whole = {b"", b"x" * 8192}
    torn = {b"x" * 4096, bytes(4096) + b"x" * 4096}
    assert whole < found[ORDERED] <= whole | torn
    torn |= {b"x" * 4096 + bytes(4096)}
    assert whole | {bytes(8192)} < found[POSIX] <= whole | {bytes(8192)} | torn


def test_a_sync_that_fails():
    trace = [
        made(Kind.CREATE, "/a", inode=1),
        made(Kind.SYNC),
        made(Kind.WRITE, inode=1, data=b"x"),
        made(Kind.SYNC, "/a", inode=1, error=5),
        made(Kind.SYNC, "/a", inode=1),
    ]
    assert left(trace, POSIX)[1] == {(("/a", b"x"),)}
    assert left(trace, FORGETS)[1] == {(("/a", content),) for content in (b"", b"\0", b"x")}


# --- Tables and dumps after a crash


def explored(recorded, tmp_path, name, model, opener, samples, trace=None, **options):
    recording = recorded[name]
    trace = recording.trace if trace is None else trace
    return explore(recording, trace, model, opener, tmp_path, samples * LONGER, **options)


# Workload, model, how it is opened, the numbers of samples, and of states at least.
CASES = [
    ("life", POSIX, Tables(), 20, 150),
    ("life", ORDERED, Tables(), 10, 100),
    ("wide", WIDE_UNITS, WIDE, 1, 60),
    ("fresh", ORDERED, FRESH, 3, 60),
    ("failing", FORGETS, Tables(), 12, 250),
    ("failing_after_rename", ORDERED, Tables(), 10, 20),
    ("failing_segment", WIDE_UNITS, WIDE, 2, 20),
    ("killed", POSIX, Tables(), 12, 120),
    ("killed", ORDERED, Tables(), 6, 60),
    ("dumps", POSIX, Dumps, 1, 150),
    ("fresh_dumps", ORDERED, lambda: Dumps("new/dumps"), 1, 100),
    ("forgotten_dumps", POSIX, Dumps, 1, 60),
    ("forgotten_dumps", ORDERED, Dumps, 1, 40),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1].name}")
def test_what_was_published_is_there(recorded, tmp_path, case):
    name, model, opener, samples, least = case
    every = 1
    if name.endswith("dumps"):
        opener = opener()
        every = 3 if LONGER == 1 else 1  # a load takes longer than opening a table
    outcome = explored(recorded, tmp_path, name, model, opener, samples, every=every)
    assert not outcome.failures, str(outcome)
    assert outcome.states >= least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "opener"),
    [
        pytest.param("wide", POSIX, WIDE, id="a unit is torn"),
        pytest.param("life", SECTORS, Tables(), id="a block is torn"),
        pytest.param("fresh", POSIX, FRESH, id="file_path is created"),
        pytest.param("failing_after_rename", POSIX, Tables(), id="a failed flush is removed"),
        pytest.param("failing_segment", FORGETS, WIDE, id="a sync is repeated"),
        pytest.param("life", POSIX, Tables(same_process=True), id="a process with the same id"),
    ],
)
def test_what_crashes_once_did(recorded, tmp_path, name, model, opener):
    """Each of these was a loss."""
    outcome = explored(recorded, tmp_path, name, model, opener, 3)
    assert not outcome.failures, str(outcome)


def test_running_files_without_a_lock(tmp_path):
    """A process with the same id has another table, and names its running files as these."""
    table = workloads.WIDE.open(tmp_path)
    workloads.fill(table, range(300), 1)
    table.flush()
    rows = table_reader.rows_of(table)
    (running,) = tmp_path.glob("rows-*")
    process, number = running.name.rpartition("-")[::2]
    del table
    gc.collect()
    left = tmp_path / f"{process}-{int(number) + 1}" / "0"
    left.mkdir(parents=True)
    for file in tmp_path.glob("*.persistent/flush-*/*.rows"):
        os.link(file, left / file.name)
    other = workloads.WIDE.open(tmp_path, "another")
    workloads.fill(other, range(1000, 1300), 2)
    found = table_reader.rows_of(workloads.WIDE.open(tmp_path))
    assert found.same(rows, oracle.COLUMNS), "the flush has rows of another table"


# --- Planted faults: each is found


def without_syncs(trace, pattern, which=lambda number: True):
    """A trace as if the code did not sync some files."""
    numbers = iter(range(len(trace)))
    return [
        record
        for record in trace
        if record.kind is not Kind.SYNC
        or not fnmatch.fnmatch(record.path, pattern)
        or not which(next(numbers))
    ]


def without_sync_after(trace, kind, pattern):
    """A trace as if the code did not sync the directory after a call."""
    kept, follows = [], False
    for record in trace:
        if record.kind is Kind.SYNC and follows:
            follows = False
            continue
        follows |= record.kind is kind and fnmatch.fnmatch(record.path, pattern)
        kept.append(record)
    return kept


def removed_first(trace):
    """A trace as if a flush removed the one before it before it is published."""
    out = list(trace)
    for i, record in enumerate(trace):
        if record.kind is Kind.UNLINK and record.path.endswith("/manifest"):
            out.remove(record)
            out.insert(max(k for k in range(i) if out[k].kind is Kind.RENAME), record)
            return out
    raise AssertionError("no flush is removed")


FAULTS = {
    "files of rows": lambda trace: without_syncs(trace, "*.rows"),
    "the index": lambda trace: without_syncs(trace, "*/index"),
    "the manifest": lambda trace: without_syncs(trace, "*/manifest.new"),
    "the names, before the manifest's": lambda trace: without_syncs(
        trace, "*/flush-*[0-9]", lambda number: number == 0
    ),
    "the name of the manifest": lambda trace: without_sync_after(trace, Kind.RENAME, "*"),
    "the name of the flush": lambda trace: without_sync_after(trace, Kind.MKDIR, "*/flush-*"),
    "the forgotten keys": lambda trace: without_syncs(trace, "*/forgotten.new"),
    "the folder of the table": lambda trace: without_syncs(trace, ""),
    "the order of removal": removed_first,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_flushes_is_found(recorded, tmp_path, fault):
    trace = FAULTS[fault](recorded["life"].trace)
    assert trace != recorded["life"].trace
    outcome = explored(recorded, tmp_path, "life", POSIX, Tables(), 6, trace, most_failures=1)
    assert outcome.failures


DUMP_FAULTS = {
    "keys": lambda trace: without_syncs(trace, "*.keys.npy"),
    "vectors": lambda trace: without_syncs(trace, "*.vectors.npy"),
    "the index": lambda trace: without_syncs(trace, "*.index.npy"),
    "the manifest": lambda trace: without_syncs(trace, "*/MANIFEST.json"),
    "the names": lambda trace: without_syncs(trace, "*/.tmp-????????????????????????????????"),
    "the name of the snapshot": lambda trace: without_syncs(trace, "*/chain"),
    "the name of the path": lambda trace: without_syncs(trace, ""),
}


@pytest.mark.parametrize("fault", DUMP_FAULTS)
def test_a_fault_of_dumps_is_found(recorded, tmp_path, fault):
    trace = DUMP_FAULTS[fault](recorded["dumps"].trace)
    assert trace != recorded["dumps"].trace
    outcome = explored(recorded, tmp_path, "dumps", POSIX, Dumps(), 2, trace, most_failures=1)
    assert outcome.failures


def test_the_ordered_model_finds_faults(recorded, tmp_path):
    """Faults that ext4 does not make good: in contents, and in the order of calls."""
    for fault in ("files of rows", "the index", "the manifest", "the order of removal"):
        trace = FAULTS[fault](recorded["life"].trace)
        at = tmp_path / fault
        at.mkdir()
        outcome = explored(recorded, at, "life", ORDERED, Tables(), 6, trace, most_failures=1)
        assert outcome.failures, fault


def test_other_rows_are_found(recorded, tmp_path):
    """The oracle sees one bit that differs, a row too many and a row too few."""
    recording = recorded["life"]
    phase = oracle.Phase(least=2, most=2)
    rows = recording.expected[2][workloads.NAME]
    oracle.check({workloads.NAME: rows}, recording, phase)
    vectors = rows.vectors.copy()
    vectors.view("u4")[3, 2] ^= 1
    wrong = [
        rows._replace(vectors=vectors),
        oracle.subset(rows, rows.keys != rows.keys[4]),
        recording.expected[1][workloads.NAME],
        recording.expected[3][workloads.NAME],
    ]
    for each in wrong:
        with pytest.raises(AssertionError, match="the rows are not from publication 2 to 2"):
            oracle.check({workloads.NAME: each}, recording, phase)


def after_forget_mark(change):
    """A fault of what happens after the first mark of a call that forgets."""

    def faulty(trace):
        begin = next(i for i, r in enumerate(trace) if r.kind is Kind.MARK and "forgets" in r.path)
        return trace[:begin] + change(trace[begin:])

    return faulty


def removed_before_the_manifest(trace):
    """A trace as if the files of a snapshot were removed before its manifest is replaced."""
    out = list(trace)
    unlinks = [r for r in trace if r.kind is Kind.UNLINK and re.search("/000[0-9]*-.*npy", r.path)]
    for record in unlinks:
        out.remove(record)
    at = next(i for i, r in enumerate(out) if r.kind is Kind.RENAME and "MANIFEST" in r.path)
    return out[:at] + unlinks + out[at:]


FORGET_FAULTS = {
    "keys": lambda trace: without_syncs(trace, "*.keys.npy"),
    "vectors": lambda trace: without_syncs(trace, "*.vectors.npy"),
    "the index": lambda trace: without_syncs(trace, "*.index.npy"),
    "the manifest": lambda trace: without_syncs(trace, "*/MANIFEST.json.*"),
    "the names": lambda trace: without_syncs(trace, "/chain/0*"),
    "the order of removal": removed_before_the_manifest,
}


@pytest.mark.parametrize("fault", FORGET_FAULTS)
def test_a_fault_of_forgetting_is_found(recorded, tmp_path, fault):
    trace = after_forget_mark(FORGET_FAULTS[fault])(recorded["forgotten_dumps"].trace)
    assert trace != recorded["forgotten_dumps"].trace
    outcome = explored(
        recorded, tmp_path, "forgotten_dumps", POSIX, Dumps(), 3, trace, most_failures=1
    )
    assert outcome.failures
