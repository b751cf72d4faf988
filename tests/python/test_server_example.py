"""examples/server: a short run of a trainer, a server and a load test."""

from __future__ import annotations

import importlib.util
import json

import pytest
from example_runs import EXAMPLES, run_python

if importlib.util.find_spec("kserve") is None:
    pytest.skip("needs the extra `serve`", allow_module_level=True)


@pytest.mark.slow
def test_server_trainer_and_load(tmp_path):
    """All processes: every answer is the trainer's at its watermark, and none is older."""
    short = ["--users=2000", "--warm-up=20", "--deltas=5", "--pause=0.1", "--seconds=0.5"]
    command = [str(EXAMPLES / "server/run.py"), *short, "--connections=4", "--json=found.json"]
    printed = run_python(command, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["wrong"] == found["older"] == 0
    assert len(found["fresh"]) == 5  # the answers reach the last delta
    assert found["snapshots"] > 1
    assert found["change"] > 1e-4  # so that another snapshot would be a wrong answer
    assert min(found[part]["answers"] for part in ("before", "during", "after")) > 10
    assert "older than an earlier answer: 0" in printed
