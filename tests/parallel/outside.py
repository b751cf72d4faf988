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
_RESULT = pytest.StashKey[Result]()


def pytest_itemcollected(item: pytest.Item) -> None:
    """A case has no fixtures here, and does nothing but report."""
    item.setup = lambda: None
    item.runtest = lambda: _run(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if call.when == "call" and _RESULT in item.stash:
        report.duration = item.stash[_RESULT].seconds
    return report


def _run(item: pytest.Item) -> None:
    if not launch.INSTALLED:
        from tf_dynemb import communicator  # with TensorFlow, so not where conftest.py is read

        pytest.skip(communicator.INSTALL)
    item.stash[_RESULT] = result = _launch(item).result(item.nodeid)
    for title, written in result.sections:
        item.add_report_section("call", title, written)
    if result.outcome == "failed":
        pytest.fail(result.text, pytrace=False)
    if result.outcome == "skipped":
        pytest.skip(result.text)


def _launch(item: pytest.Item) -> Launch:
    """That of all selected cases with as many ranks."""
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
    return _launches[ranks]
