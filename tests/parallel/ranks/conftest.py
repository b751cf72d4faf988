"""The cases of this folder run on several ranks together; see CONTRIBUTING.md.

Each case is one test for each number of ranks, with the same id outside the ranks and inside.
"""

import os

import pytest

if "DYNEMB_LAUNCH" not in os.environ:
    from parallel.outside import pytest_itemcollected, pytest_runtest_makereport  # noqa: F401

SIZES = (1, 2, 4)
USUAL = 2


@pytest.fixture(autouse=True, scope="session")
def ranks(request):
    """The number of ranks: `-np` of horovodrun."""
    return request.param


def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("ranks")
    sizes = marker.args if marker else SIZES
    if not _runs_with_all(metafunc) and USUAL in sizes:
        sizes = (USUAL,)
    metafunc.parametrize("ranks", sizes, indirect=True, scope="session", ids="np{}".format)


def _runs_with_all(metafunc):
    # Inside the ranks, the ids of the cases have been chosen.
    return (
        metafunc.definition.get_closest_marker("any_number_of_ranks") is not None
        or metafunc.config.getoption("--all-ranks")
        or "DYNEMB_LAUNCH" in os.environ
    )
