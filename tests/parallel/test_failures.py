"""Ranks that fail, do not call, or end; and the reports of this by the tests of ranks/."""

import pathlib
import re

import pytest

from parallel import launch
from parallel.cases import Launch

FAULTS = pathlib.Path(__file__).resolve().parent / "faults.py"

CASES = re.findall(r"^def (test_\w+)", FAULTS.read_text("utf-8"), re.MULTILINE)

# What a rank reports that waited for one whose case has failed, and for one that did not call.
RELEASED = {
    "gloo": "rank 1 has left the group",
    "horovod": "Horovod has been shut down",
    "mpi": "rank 1 has left the group",
}
MISSED = {
    "gloo": "allgather 'dynemb/missed' on rank 0: rank 1 has sent nothing for 6 s",
    "horovod": "Horovod has been shut down",
    "mpi": "allgather 'dynemb/missed' on rank 0: rank 1 has sent nothing for 6 s",
}


@pytest.fixture(scope="module", params=launch.ENGINES)
def engine(request):
    reason = launch.missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def result_of(request, engine):
    """Runs all cases of faults.py at once; returns a function for the result of one."""
    root = request.config.rootpath
    prefix = f"{FAULTS.relative_to(root)}::"
    faults = Launch(
        engine,
        2,
        [prefix + name for name in CASES],
        root,
        HOROVOD_STALL_CHECK_TIME_SECONDS="1",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="2",
        DYNEMB_TIMEOUT="6",
    )
    assert faults.ended.status is not None, faults.ended.tail()
    return lambda name: faults.result(prefix + name)


@pytest.mark.parametrize("name", [name for name in CASES if "passes" in name])
def test_other_cases_pass(result_of, name):
    result = result_of(name)
    assert (result.outcome, result.text) == ("passed", "")


def test_the_first_failure_is_reported_first_and_releases_the_other_rank(result_of, engine):
    result = result_of("test_rank_1_fails_while_rank_0_waits")
    assert result.outcome == "failed"
    first, second = result.text.split("----- failed: rank ")[1:]
    assert first.startswith("1 of 2")
    assert "AssertionError: planted" in first
    assert second.startswith("0 of 2")
    assert RELEASED[engine] in second
    assert result.seconds < 30


def test_a_rank_that_does_not_call_fails_the_others(result_of, engine):
    result = result_of("test_rank_1_does_not_call")
    assert result.outcome == "failed"
    assert result.text.startswith("----- failed: rank 0 of 2")
    assert MISSED[engine] in result.text
    if engine == "horovod":
        ((title, written),) = result.sections
        assert title == "stderr call on rank 0"
        assert re.search(r"Missing ranks:\s+1!?: \[dynemb/missed\]", written)
    assert 2 < result.seconds < 30


def test_a_rank_that_does_not_call_a_function_fails_the_others(result_of, engine):
    result = result_of("test_rank_1_does_not_call_a_function")
    assert result.outcome == "failed"
    assert MISSED[engine].replace("missed", "missed/graph") in result.text
    if engine != "horovod":
        assert "errors_impl.AbortedError" in result.text


def test_skipping(result_of):
    result = result_of("test_both_skip")
    assert (result.outcome, result.text) == ("skipped", "a reason")
    result = result_of("test_rank_1_skips")
    assert result.outcome == "failed"
    assert "{0: 'passed', 1: 'skipped'}" in result.text


def test_a_rank_that_ends_fails_the_others(result_of, engine):
    result = result_of("test_rank_1_ends_while_rank_0_waits")
    assert result.outcome == "failed"
    # Rank 0 has passed, unless mpiexec, which saw a rank end without MPI_Finalize, has ended it.
    assert re.match("----- no result: rank (0, )?1 of 2", result.text)
    if engine != "mpi":
        assert result.text.startswith("----- no result: rank 1 of 2")
        assert "rank 0: rank 1 has ended" in result.text
    assert result.seconds < 30

    result = result_of("test_after_the_end_of_rank_1")
    assert result.outcome == "failed"
    assert "no result: rank 0, 1 of 2" in result.text
