"""Options of the test run, and which tests may not run beside each other."""

import pytest
from hypothesis import settings

settings.register_profile("gpubench", deadline=None)  # how fast a machine is, or how busy, is no test
settings.load_profile("gpubench")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="write the golden outputs of tests/machines anew")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """MPI jobs one after another: the ranks of several at once would take the CPUs from each other.

    Those between hosts stand still where another job's ranks spin beside them on few CPUs.
    """
    for item in items:
        if item.get_closest_marker("mpi") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("mpi"))
    # They come first: whoever is done with the rest would else wait for them.
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
