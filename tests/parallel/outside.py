"""The cases of ranks/, as tests of the pytest that a user starts.

One launch for each engine and number of ranks runs the selected cases, when the first of them is
due. The ranks do everything else that pytest does with a test; this process only reports the
result.
"""

from __future__ import annotations

import faulthandler
import pathlib

import pytest

from parallel import launch
from parallel.cases import Launch, Result

CASES = pathlib.Path(__file__).resolve().parent / "ranks"

_launches: dict[tuple[str, int], Launch] = {}
_RESULT = pytest.StashKey[Result]()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Replaces the work of a case, and omits its fixtures: the case only reports its result."""
    item.setup = lambda: None
    item.runtest = lambda: _run(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if call.when == "call" and _RESULT in item.stash:
        report.duration = item.stash[_RESULT].seconds
    return report


def _run(item: pytest.Item) -> None:
    engine, _ = item.callspec.params["ranks"]
    reason = launch.missing(engine)
    if reason is not None:
        pytest.skip(reason)
    item.stash[_RESULT] = result = _launch(item).result(item.nodeid)
    for title, written in result.sections:
        item.add_report_section("call", title, written)
    if result.outcome == "failed":
        pytest.fail(result.text, pytrace=False)
    if result.outcome == "skipped":
        pytest.skip(result.text)


def _launch(item: pytest.Item) -> Launch:
    """The launch of all selected cases with this engine and this number of ranks."""
    place = engine, ranks = item.callspec.params["ranks"]
    if place not in _launches:
        cases = [
            other.nodeid
            for other in item.session.items
            if CASES in other.path.parents and other.callspec.params["ranks"] == place
        ]
        verbosity = item.config.get_verbosity("assertions")
        options = ["-o", f"verbosity_assertions={verbosity}"]
        faulthandler.cancel_dump_traceback_later()  # each case in a launch has a limit
        _launches[place] = Launch(engine, ranks, cases, item.config.rootpath, options=options)
    return _launches[place]
