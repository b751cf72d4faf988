"""How tests are divided among the processes of `pytest -n`; tests with tables of a device."""

import pytest
import simulated


@pytest.fixture(autouse=True, scope="session")
def small_device_tier():
    """Tables of a device are soon larger than what they may have of its memory."""
    if not simulated.ON_DEVICE:
        yield
        return
    from tf_dynemb.tables import options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "_HBM_GB", simulated.HBM_BYTES / 2**30)
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """By file; but all that starts ranks in one process, since one launch runs many tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            return "tests/parallel" if path.startswith("tests/parallel/") else path

    return ByFile(config, log)
