"""Ranks that are killed in `fit`, and started again: the training ends as if they had not been."""

import json
import os
import pathlib
import sys

import pytest

from parallel import launch

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE.parent / "python" / "publish_process.py"
KILLS = int(os.environ.get("PUBLISH_KILLS", "1"))  # `make soak` has more, and a store
EACH = 2  # the most kills of a training

pytestmark = pytest.mark.slow


def run(folder, name, *options, url=None):
    """Trains on two ranks; returns the bits of each, and the number of kills."""
    kills = [str(EACH)] if options else []
    ended = launch.run(
        "gloo",
        2,
        [
            *(sys.executable, str(SCRIPT), "die" if kills else "train"),
            *(f"{url or folder}/{name}.chain", str(folder / name), *kills),
        ],
        folder / f"{name}.txt",
        limit=240 + 60 * EACH,
        options=options,
        PYTHONPATH=os.pathsep.join(
            [str(HERE.parents[1]), str(HERE.parent / "python"), os.environ.get("PYTHONPATH", "")]
        ),
    )
    assert ended.status == 0, ended.tail()
    bits = [json.loads((folder / f"{name}.{rank}").read_text()) for rank in (0, 1)]
    return bits, ended.output.count("starting all ranks again")


def test_ranks_that_are_killed_and_started_again(tmp_path, path_or_s3):
    if path_or_s3 is not None and "PUBLISH_KILLS" not in os.environ:
        pytest.skip("one process has the same, and takes less: test_publish")
    expected, _ = run(tmp_path, "whole", url=path_or_s3)
    kills = trainings = 0
    while kills < KILLS:
        trainings += 1
        found, killed = run(tmp_path, f"parts{trainings}", "--restart", str(EACH), url=path_or_s3)
        assert found == expected
        assert len(list((tmp_path / f"parts{trainings}.kills").iterdir())) == killed
        kills += killed
        assert trainings < 3 * KILLS + 9  # some end before the moment of their kill
