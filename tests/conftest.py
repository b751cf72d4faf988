"""Splits tests among the processes of `pytest -n`; options, temporary folders, device tiers."""

import gc
import importlib
import os
import pathlib
import shutil
import sys
import tempfile

import gpu
import hypothesis
import pytest

# The same examples each time: what passes passes again. New ones: `--hypothesis-profile=random`.
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("same")

# Has the sitecustomize module of all processes.
START = pathlib.Path(__file__).with_name("start")
# A file system in memory, and the free bytes that it needs to have.
MEMORY, LEAST_FREE = pathlib.Path("/dev/shm"), 4 << 30


@pytest.fixture(autouse=True, scope="session")
def small_device_tier():
    """Device tables get a device tier that is smaller than most tests' tables."""
    if not gpu.ON:
        yield
        return
    from tf_dynemb.tables import options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "_HBM_GB", gpu.HBM_BYTES / 2**30)
        yield


@pytest.fixture(autouse=True, scope="module")
def what_is_there_stays():
    """Collections of garbage do not look at what imports and earlier modules have left.

    TensorFlow and Keras keep a million objects: each collection would take a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_global_seed():
    """Forgets the seed that a test has set, which would decide the seeds of later tables."""
    yield
    if "tensorflow" in sys.modules:
        context = importlib.import_module("tensorflow.python.eager.context")
        context.context()._seed = None


def pytest_configure(config):
    """Makes temporary folders, and the start of processes, fast; a crash ends `pytest -n`.

    Otherwise xdist would start another process for the files of the one that crashed, and with
    files as scopes would then wait for ever.

    Temporary folders are in memory: dumps and flushes sync each file, and tests would wait for the
    disk half of their time. No test can tell the difference: none cuts the power.
    """
    if getattr(config.option, "maxworkerrestart", "0") is None:
        config.option.maxworkerrestart = "0"
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(START) not in places:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(START), *places]))
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= LEAST_FREE:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.fixture
def disk_folder():
    """A temporary folder where the system has them, usually on a disk: for O_DIRECT."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield pathlib.Path(folder)
        gc.collect()  # tables that still use it


@pytest.fixture(scope="session")
def s3_server():
    """The URL of an S3 server."""
    import store_helpers

    with store_helpers.s3_server() as url:
        yield url


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The URL of an empty folder in a bucket of the server."""
    import store_helpers

    return store_helpers.empty_folder(s3_server, monkeypatch)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A folder with a chain, and `models` with version 7 of a model that follows it.

    Tests do not change it.
    """
    import serve_helpers

    folder = tmp_path_factory.mktemp("served")
    serve_helpers.export(serve_helpers.build(), folder, "7")
    return folder


@pytest.fixture(params=["path", "s3"])
def path_or_s3(request):
    """Where a test has its chains: None: at a path; or the URL of an empty folder of a store."""
    return None if request.param == "path" else request.getfixturevalue("s3")


def pytest_addoption(parser):
    parser.addoption(
        "--all-ranks",
        action="store_true",
        help="run the cases of tests/parallel/ranks with 1, 2 and 4 ranks, where 2 are the rule",
    )


def pytest_collection_modifyitems(items):
    """Puts the tests that start ranks first: they take longest, and wait much of the time."""
    first = ("tests/parallel/ranks/", "tests/parallel/")
    items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in first])


def pytest_terminal_summary(terminalreporter):
    """Shows the failures of tests that passed when they were tried again (`--reruns`)."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"failed once: {report.nodeid}", "_")
        terminalreporter.line(report.longreprtext)


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
