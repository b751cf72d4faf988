"""A system's clock that is set while a process runs, or was wrong when a file was written."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

CLOCKS = r"""
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static int64_t ahead, passed;  /* seconds */
void set_ahead(int64_t seconds) { ahead = seconds; }
void pass_time(int64_t seconds) { passed += seconds; }
int clock_gettime(clockid_t clock, struct timespec* time) {
  int result = (int)syscall(SYS_clock_gettime, clock, time);
  if (result == 0 && clock == CLOCK_REALTIME) time->tv_sec += ahead + passed;
  if (result == 0 && clock == CLOCK_BOOTTIME) time->tv_sec += passed;
  return result;
}
"""

BEGIN = """
import ctypes, datetime, json, os, pathlib, sys
import numpy as np
clocks, work = ctypes.CDLL(sys.argv[1]), pathlib.Path(sys.argv[2])
set_ahead = lambda seconds: clocks.set_ahead(ctypes.c_int64(seconds))
pass_time = lambda seconds: clocks.pass_time(ctypes.c_int64(seconds))
day, year = 86400, 365 * 86400
if len(sys.argv) > 3:
    set_ahead(int(sys.argv[3]))
import tf_dynemb as de

def now():
    return datetime.datetime.now(datetime.timezone.utc)

def make(name="t", **options):
    return de.DynamicVariable(
        2, name=name, ttl=datetime.timedelta(days=1), var_type="hybrid", **options
    )

def held(table):
    return [key for key in range(1, 9) if table.contains([key]).numpy()[0]]
"""

JUMPS = """
real = now()
table = make()
durable = make("durable", file_path=str(work / "files"), persistent=True)
def step(key):
    table.upsert([key], [[1.0, key]])
    durable.upsert([key], [[1.0, key]])
step(1)
pass_time(day // 2)
step(2)
set_ahead(year)
step(3)
in_jump = now()
assert held(table) == held(durable) == [1, 2, 3]
assert table.expire() == 0
# Times that are computed from the wrong clock are ages.
assert table.size_if(updated_before=now() - datetime.timedelta(hours=1)) == 1
mark = de.dump(work / "dump", [table], quiet=True)
durable.flush()
assert abs(mark.utc - real) < datetime.timedelta(hours=13), mark
explained = table.explain([3])[0]
assert abs(explained.updated - real) < datetime.timedelta(hours=13), explained
set_ahead(0)
step(4)
for conditions in ({"updated_since": in_jump}, {"updated_before": in_jump}):
    try:
        table.size_if(**conditions)
    except ValueError as error:
        assert "later than now" in str(error)
    else:
        raise AssertionError(conditions)
keys, _ = de.incremental_model_dump(table, real + datetime.timedelta(hours=6))
assert sorted(keys[0].tolist()) == [2, 3, 4]
assert table.stats()["clock_jumps"] == 2, table.stats()
pass_time(day // 2 + 60)
assert held(table) == held(durable) == [2, 3, 4]
pass_time(day // 2 + 200)
assert held(table) == held(durable) == []
os._exit(0)  # the durable table is not flushed again
"""

LOADS = """
table = make()
if (work / "dump").exists():
    de.load(work / "dump", [table], quiet=True)
durable = make("durable", file_path=str(work / "files"), persistent=True)
seen = [[held(table), held(durable)]]
for seconds in json.loads(sys.argv[4]):
    pass_time(seconds)
    seen.append([held(table), held(durable)])
print(json.dumps({"seen": seen, "jumps": table.stats()["clock_jumps"]}))
"""

WRITES = """
table, durable = make(), make("durable", file_path=str(work / "files"), persistent=True)
for each in (table, durable):
    each.upsert([1], [[1.0, 1]])
pass_time(day // 2)
for each in (table, durable):
    each.upsert([2], [[1.0, 1]])
de.dump(work / "dump", [table], quiet=True)
durable.flush()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]


@pytest.fixture(scope="module")
def clocks(tmp_path_factory):
    """The path of a library that takes the place of the machine's clocks."""
    folder = tmp_path_factory.mktemp("clocks")
    (folder / "clocks.c").write_text(CLOCKS)
    command = ["gcc", "-shared", "-fPIC", "-o", "clocks.so", "clocks.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "clocks.so"


def run(clocks: pathlib.Path, work: pathlib.Path, script: str, *arguments: str):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, str(clocks), str(work), *arguments],
        env={**os.environ, "LD_PRELOAD": str(clocks)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def load(clocks, work, ahead, passes):
    done = run(clocks, work, LOADS, str(ahead), json.dumps(passes))
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_jump_ages_no_row_and_is_in_no_file(clocks, tmp_path):
    warnings = run(clocks, tmp_path, JUMPS).stderr
    assert "clock was set ahead by 31536000 s" in warnings
    assert "clock was set back by 31536000 s" in warnings
    # Half a day later; the flush and the dump were when 2 was new, and 1 half a day old.
    found, warnings = load(clocks, tmp_path, 86400, [0])
    assert found == {"seen": [[[2, 3], [2, 3]]] * 2, "jumps": 0}
    found, _ = load(clocks, tmp_path, 86400, [43200 + 300])
    assert found["seen"][1] == [[], []]
    assert "clock was set" not in warnings


def test_files_of_a_clock_that_was_ahead(clocks, tmp_path):
    run(clocks, tmp_path, WRITES, str(365 * 86400))
    found, warnings = load(clocks, tmp_path, 0, [86400 - 600, 900])
    assert found["seen"] == [[[1, 2]] * 2, [[1, 2]] * 2, [[], []]]
    assert found["jumps"] == 2  # the dump and the flush
    assert "is behind a time in a file" in warnings
