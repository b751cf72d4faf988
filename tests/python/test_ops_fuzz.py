"""Invalid input must not end the process: fuzz_ops.py runs in a separate process."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from operator_calls import operator_calls

HERE = pathlib.Path(__file__).parent
CALLS, GRAPH_CALLS = 220, 12
# Of the libraries that they load, MPI needs a launcher and NCCL a GPU.
NEVER_SUCCEED = {call.name for call in operator_calls() if call.error}


@pytest.fixture(scope="module")
def fuzzed():
    paths = [str(HERE.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    result = subprocess.run(
        [sys.executable, str(HERE / "fuzz_ops.py"), "5", str(CALLS), str(GRAPH_CALLS)],
        capture_output=True,
        text=True,
        timeout=900,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    *lines, errors = [json.loads(line) for line in result.stdout.splitlines()]
    return {line["op"]: line for line in lines}, errors


def test_every_call_returns_or_raises(fuzzed):
    counts, _ = fuzzed
    assert set(counts) == {call.name for call in operator_calls()}
    assert {line["calls"] for line in counts.values()} == {CALLS + GRAPH_CALLS}


def test_each_operator_fails_and_succeeds(fuzzed):
    """If Python's conversions refused all calls, the operators would not be tested."""
    counts, _ = fuzzed
    for name, line in counts.items():
        assert line["failed"] > 0, name
    never = {name for name, line in counts.items() if line["failed"] == line["calls"]}
    assert never == NEVER_SUCCEED


def test_calls_without_garbage_succeed(fuzzed):
    assert {error.split(":")[0] for error in fuzzed[1]["right"]} == NEVER_SUCCEED


def test_bad_input_gives_no_internal_error(fuzzed):
    assert fuzzed[1]["internal"] == []
