"""The cases of this folder run on several ranks together; see CONTRIBUTING.md.

Each case is one test for each number of ranks on Gloo, with the same id outside the ranks and
inside; those marked `engines` also run on the other engines.
"""

import os

import pytest

from parallel.launch import ENGINES

if "DYNEMB_LAUNCH" not in os.environ:
    from parallel.outside import pytest_itemcollected, pytest_runtest_makereport  # noqa: F401

SIZES = (1, 2, 4)
USUAL = 2


@pytest.fixture(autouse=True, scope="session")
def ranks(request):
    """The number of ranks."""
    _, number = request.param
    return number


def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("ranks")
    sizes = marker.args if marker else SIZES
    if not _runs_with_all(metafunc) and USUAL in sizes:
        sizes = (USUAL,)
    places = [("gloo", size) for size in sizes]
    if metafunc.definition.get_closest_marker("engines") is not None:
        several = [size for size in sizes if size > 1]
        places += [(engine, size) for engine in ENGINES[1:] for size in several]
    metafunc.parametrize("ranks", places, indirect=True, scope="session", ids=_id)


def _id(place):
    engine, size = place
    return f"np{size}" if engine == "gloo" else f"{engine}-np{size}"


def _runs_with_all(metafunc):
    # Inside the ranks, the ids of the cases have been chosen.
    return (
        metafunc.definition.get_closest_marker("any_number_of_ranks") is not None
        or metafunc.config.getoption("--all-ranks")
        or "DYNEMB_LAUNCH" in os.environ
    )
