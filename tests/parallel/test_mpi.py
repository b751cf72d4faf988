"""What MPI itself does not do: a start, a failure and an end of ranks that do not hang."""

from __future__ import annotations

import sys

import pytest

from parallel import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(launch.missing("mpi") is not None, reason=str(launch.missing("mpi"))),
]

BEGIN = """
import os, sys, time

import tensorflow as tf

import tf_dynemb as de
from tf_dynemb import communicator
from tf_dynemb.ranks import launchers

rank = launchers.find(os.environ).rank
"""


def run(tmp_path, script):
    path = tmp_path / "script.py"
    path.write_text(BEGIN + script)
    return launch.run("mpi", 2, [sys.executable, str(path)], tmp_path / "log", 150)


def test_a_rank_that_does_not_come(tmp_path):
    ended = run(
        tmp_path,
        """
if rank == 1:
    time.sleep(1000)
try:
    de.init("mpi", timeout=3)
except tf.errors.AbortedError as error:
    print(error.message, flush=True)
    sys.exit(5)
""",
    )
    assert ended.status not in (0, None), ended.tail()
    assert "MPI has not started for 3 s: not all ranks have started" in ended.output


def test_a_rank_whose_script_fails_releases_the_others(tmp_path):
    ended = run(
        tmp_path,
        """
de.init("mpi", timeout=1000)
comm = communicator.get()
comm.barrier("both")
if rank == 1:
    raise RuntimeError("planted")
try:
    comm.barrier("one")
except tf.errors.AbortedError as error:
    print("rank 0 got:", error.message, flush=True)
    raise
""",
    )
    assert ended.status not in (0, None), ended.tail()
    assert "RuntimeError: planted" in ended.output
    assert "allgather 'dynemb/one' on rank 0: rank 1 has ended" in ended.output
    assert "without MPI_Finalize" not in ended.output


def test_ranks_end_at_different_times(tmp_path):
    """Each process waits for the others in MPI_Finalize."""
    ended = run(
        tmp_path,
        """
de.init("mpi", timeout=1000)
comm = communicator.get()
if rank == 0:
    time.sleep(2)
comm.barrier("both")
if rank == 0:
    time.sleep(13)  # longer than ranks wait after a failure
print("ended", flush=True)
""",
    )
    assert ended.status == 0, ended.tail()
    assert ended.output.count("ended") == 2
    assert "without MPI_Finalize" not in ended.output


def test_a_process_that_leaves_and_joins_again(tmp_path):
    ended = run(
        tmp_path,
        """
from tf_dynemb.ranks import start

for _ in range(3):
    de.init("mpi", timeout=1000)
    communicator.get().barrier("both")
    start.leave()
de.init("mpi", timeout=1000)
communicator.get().barrier("both")
""",
    )
    assert ended.status == 0, ended.tail()
    assert "without MPI_Finalize" not in ended.output
