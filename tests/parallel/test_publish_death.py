"""Ranks that are killed in `fit`, and started again: the training ends as if they had not been."""

import json
import os
import pathlib
import sys

import pytest

from parallel import launch

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE.parent / "python" / "publish_process.py"
KILLS = int(os.environ.get("PUBLISH_KILLS", "2"))

pytestmark = pytest.mark.slow


def run(folder, name, *options):
    """Trains on two ranks; returns the bits of each, and the launcher's output."""
    kills = [str(KILLS)] if options else []
    ended = launch.run(
        "gloo",
        2,
        [
            *(sys.executable, str(SCRIPT), "die" if kills else "train"),
            *(str(folder / f"{name}.chain"), str(folder / name), *kills),
        ],
        folder / f"{name}.txt",
        limit=240 + 60 * KILLS,
        options=options,
        PYTHONPATH=os.pathsep.join([str(HERE.parents[1]), str(HERE.parent / "python")]),
    )
    assert ended.status == 0, ended.tail()
    return [json.loads((folder / f"{name}.{rank}").read_text()) for rank in (0, 1)], ended.output


def test_ranks_that_are_killed_and_started_again(tmp_path):
    expected, _ = run(tmp_path, "whole")
    found, output = run(tmp_path, "parts", "--restart", str(KILLS))
    assert len(list((tmp_path / "parts.kills").iterdir())) == KILLS, output
    assert found == expected
