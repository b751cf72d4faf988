"""How tests are divided among the processes of `pytest -n`."""

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """By file; but all that starts ranks in one process, since one launch runs many tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            return "tests/parallel" if path.startswith("tests/parallel/") else path

    return ByFile(config, log)
