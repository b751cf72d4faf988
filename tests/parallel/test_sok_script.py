"""A script for SOK v2 runs with one line changed, with the same result on one rank and on two."""

import json
import os
import pathlib
import sys

import pytest

from parallel import launch

HERE = pathlib.Path(__file__).resolve().parent

pytestmark = pytest.mark.skipif(
    launch.missing("horovod") is not None, reason=str(launch.missing("horovod"))
)


def test_a_script_for_sok(tmp_path):
    results = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        ended = launch.run(
            "horovod",
            ranks,
            [sys.executable, str(HERE / "sok_script.py"), str(folder)],
            folder / "output.txt",
            limit=300,
            PYTHONPATH=os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        )
        assert ended.status == 0, ended.tail()
        found = [json.loads((folder / f"result.{rank}.json").read_text()) for rank in range(ranks)]
        assert found == found[:1] * ranks
        results.append(found[0])
    assert results[0]["rows"] == results[1]["rows"]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-4)
