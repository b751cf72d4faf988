"""The split of tests among the processes of `pytest -n`, and the size of device tiers in tests."""

import pytest
import simulated


@pytest.fixture(autouse=True, scope="session")
def small_device_tier():
    """Device tables get a device tier that is smaller than most tests' tables."""
    if not simulated.ON_DEVICE:
        yield
        return
    from tf_dynemb.tables import options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "_HBM_GB", simulated.HBM_BYTES / 2**30)
        yield


def pytest_collection_modifyitems(items):
    """Puts the tests that start ranks first: they take longest, and wait much of the time."""
    first = ("tests/parallel/ranks/", "tests/parallel/")
    items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in first])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Splits by file. The cases of ranks/ stay in one process: a launch runs many of them.

    The files begin in the order of the items.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            return "ranks" if path.startswith("tests/parallel/ranks/") else path

    config.option.loadscopereorder = False
    return ByFile(config, log)
