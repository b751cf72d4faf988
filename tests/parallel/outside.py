"""The cases of ranks/ as tests of the pytest that a person starts.

One launch for each number of ranks runs those that are selected, when the first of them is due. All
else that pytest does with a test happens in the ranks; here is only the result.
"""

from __future__ import annotations

import pathlib

import pytest

from parallel import launch
from parallel.cases import Launch, Result

CASES = pathlib.Path(__file__).resolve().parent / "ranks"

_launches: dict[int, Launch] = {}


def pytest_runtest_protocol(item: pytest.Item) -> bool:
    """Reports a case, and so keeps pytest from running it."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, _result(item)):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _result(item: pytest.Item) -> Result:
    if not launch.INSTALLED:
        from tf_dynemb import communicator  # with TensorFlow, so not where conftest.py is read

        return Result("skipped", communicator.INSTALL, [], 0)
    ranks = item.callspec.params["ranks"]
    if ranks not in _launches:
        cases = [
            other.nodeid
            for other in item.session.items
            if CASES in other.path.parents and other.callspec.params["ranks"] == ranks
        ]
        verbosity = item.config.get_verbosity("assertions")
        options = ["-o", f"verbosity_assertions={verbosity}"]
        _launches[ranks] = Launch(ranks, cases, item.config.rootpath, options=options)
    return _launches[ranks].result(item.nodeid)


def _reports(item: pytest.Item, result: Result):
    """Those of setup, call and teardown."""
    for when in ("setup", "call", "teardown"):
        its = result if when == "call" else Result("passed", "", [], 0)
        path, line, _ = item.location
        skipped = (path, line or 0, f"Skipped: {its.text}")
        yield pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome=its.outcome,
            longrepr={"passed": None, "skipped": skipped, "failed": its.text}[its.outcome],
            when=when,
            sections=its.sections,
            duration=its.seconds,
        )
