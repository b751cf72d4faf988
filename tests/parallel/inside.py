"""A plugin for pytest in each rank: runs the cases in the same order, and keeps the ranks in step.

After each case a rank writes a file with its result, and waits for the files of the others. Ranks
use files because the engine is under test. A rank whose case failed leaves the group first, which
releases the ranks that wait for it in a collective operation. After a failure all ranks form
another group.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import sys
import time

import keras
import pytest

import tf_dynemb as de
from tf_dynemb import communicator
from tf_dynemb.ranks import launchers, start

FOLDER = pathlib.Path(os.environ["DYNEMB_LAUNCH"])
ENGINE = os.environ["DYNEMB_ENGINE"]
# A single rank may have no launcher's variables.
RANK, SIZE = (launchers.find(os.environ) or (0, 1))[:2]

# The seconds until ranks that do not call are an error. Machines are shared, so that a rank may be
# late.
TIMEOUT = float(os.environ.get("DYNEMB_TIMEOUT", "60"))

# The longest wait for the results of the others, in seconds; pytest ends a hanging rank earlier.
PATIENCE = 1.1 * float(os.environ["DYNEMB_CASE_LIMIT"])

_REPORTS = pytest.StashKey[list[pytest.TestReport]]()
_NUMBER = pytest.StashKey[int]()


def pytest_sessionstart() -> None:
    partial = FOLDER / f"{RANK}.partial"
    partial.write_text(str(os.getpid()))
    partial.rename(FOLDER / f"{RANK}.pid")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    by_id = {item.nodeid: item for item in items}
    items[:] = [by_id[case] for case in json.loads((FOLDER / "cases.json").read_text())]
    for number, item in enumerate(items):
        item.stash[_NUMBER] = number


@pytest.fixture(autouse=True, scope="session")
def _ranks() -> None:
    de.init(ENGINE, timeout=TIMEOUT)


@pytest.fixture(autouse=True)
def _seeded(_ranks: None) -> None:
    keras.utils.set_random_seed(1)


@pytest.fixture
def comm(_ranks: None) -> communicator.Communicator:
    """The ranks that run this case."""
    return communicator.get()


@pytest.fixture
def shared_path(request: pytest.FixtureRequest) -> pathlib.Path:
    """An empty folder of this case, the same on all ranks."""
    path = FOLDER / f"shared_{request.node.stash[_NUMBER]}"
    path.mkdir(exist_ok=True)
    return path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    item.stash.setdefault(_REPORTS, []).append(report)
    if report.failed:
        _leave()
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    start = time.time()
    done = yield
    number = item.stash[_NUMBER]
    outcome, text = _outcome(item.stash[_REPORTS])
    result = {
        "outcome": outcome,
        "text": text,
        "sections": item.stash[_REPORTS][-1].sections if outcome == "failed" else [],
        "time": time.time(),
        "seconds": time.time() - start,
    }
    partial = FOLDER / f"{number}.{RANK}.partial"
    partial.write_text(json.dumps(result))
    partial.rename(partial.with_suffix(".json"))
    if "failed" in [_wait_for(number, rank) for rank in range(SIZE)]:
        _leave()
        _restart(number)
    return done


def _outcome(reports: list[pytest.TestReport]) -> tuple[str, str]:
    for report in reports:
        if report.failed:
            return "failed", report.longreprtext
    for report in reports:
        if report.skipped:
            _, _, reason = report.longrepr
            return "skipped", reason.removeprefix("Skipped: ")
    return "passed", ""


def _wait_for(number: int, rank: int) -> str:
    path = FOLDER / f"{number}.{rank}.json"
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if not _is_alive(rank) and not path.exists():
            pytest.exit(f"rank {RANK}: rank {rank} has ended", returncode=3)
        if time.monotonic() > deadline:
            pytest.exit(f"rank {RANK} waited for rank {rank} for {PATIENCE:.0f} s", returncode=3)
        time.sleep(0.005)
    return json.loads(path.read_text())["outcome"]


def _is_alive(rank: int) -> bool:
    path = FOLDER / f"{rank}.pid"
    if not path.exists():
        return True
    try:
        state = pathlib.Path("/proc", path.read_text(), "stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The launcher may keep one that has ended, so that no other process gets its number.
    return state.split()[0] != "Z"


def _leave() -> None:
    if ENGINE == "horovod":
        horovod = sys.modules.get("horovod.tensorflow")
        if horovod is not None:
            horovod.shutdown()
    else:
        start.leave()


def _restart(number: int) -> None:
    """Forms another group after case `number`."""
    if ENGINE == "horovod":
        # A new key, because horovodrun may still give ranks of this host the old addresses.
        os.environ["HOROVOD_HOSTNAME"] = f"after_case_{number}"
    elif ENGINE != "mpi":
        # Another port: a rank that is late must not come to the old one.
        path = FOLDER / f"port_after_{number}"
        if RANK == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                partial = path.with_suffix(".partial")
                partial.write_text(str(probe.getsockname()[1]))
                partial.rename(path)
        while not path.exists():
            time.sleep(0.005)
        os.environ["MASTER_PORT"] = path.read_text()
    de.init(ENGINE, timeout=TIMEOUT)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session):
    yield
    # The files report failures; with an exit status, horovodrun would end the other ranks.
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.OK
