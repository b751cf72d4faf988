"""Ranks that are killed while they dump: the chain is unchanged, and the next dump succeeds."""

import os
import pathlib
import sys

import pytest
from chain_reader import fold

from parallel import launch
from tf_dynemb import storage

HERE = pathlib.Path(__file__).resolve().parent
SIZE = 3

# The errors of the operators, eagerly or in a function.
ERRORS = {"gloo": {"AbortedError"}, "horovod": {"UnknownError", "HorovodInternalError"}}

pytestmark = pytest.mark.slow


@pytest.fixture(params=ERRORS)
def engine(request):
    reason = launch.missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def run(engine, tmp_path, rank, where):
    """Launches ranks, one of which is killed; returns the reports of the others."""
    ended = launch.run(
        engine,
        SIZE,
        [
            sys.executable,
            *map(
                str, (HERE / "dump_and_die.py", engine, tmp_path / "chain", tmp_path, rank, where)
            ),
        ],
        tmp_path / "output.txt",
        limit=300,
        PYTHONPATH=os.pathsep.join(
            [str(HERE.parents[1]), str(HERE.parent / "python"), os.environ.get("PYTHONPATH", "")]
        ),
    )
    reports = {
        other: (tmp_path / f"{where}{rank}.{other}").read_text()
        for other in range(SIZE)
        if (tmp_path / f"{where}{rank}.{other}").exists()
    }
    return ended, reports


def versions(path):
    """Returns the versions of the rows on disk, decoded from their vectors."""
    rows = fold(storage.Chain.open(path))["user"]
    numbers = 4 * rows.vectors[:, 0] - rows.keys % 64
    assert len(rows.keys) == 500
    return set((numbers / 100).tolist())


def unpublished(path):
    return [name for name in os.listdir(path) if name.startswith(".tmp-")]


def test_a_rank_that_is_killed(engine, tmp_path):
    chain = tmp_path / "chain"
    for dying, where in ((1, "append"), (0, "rename")):
        ended, reports = run(engine, tmp_path, dying, where)
        assert ended.status not in (0, None), ended.tail()
        others = set(range(SIZE)) - {dying}
        # The launcher kills ranks after some seconds; on a busy machine, one may not have reported.
        assert reports.keys() <= others
        assert reports, ended.tail()
        assert set(reports.values()) <= ERRORS[engine]
        assert versions(chain) == {1}
        # Rank 0 removes the unpublished files if it survives.
        assert len(unpublished(chain)) == (dying == 0) or 0 not in reports
    ended, reports = run(engine, tmp_path, 0, "never")
    assert ended.status == 0, ended.tail()
    assert reports == dict.fromkeys(range(SIZE), "dumped")
    assert versions(chain) == {2}
    assert unpublished(chain) == []
    assert len(os.listdir(chain)) == 2  # LOCK and the base
