"""Fixtures of the GPU tests: an MPS server for ranks that share a GPU."""

from collections.abc import Iterator

import pytest

from tests.gpu import machine


@pytest.fixture(scope="module")
def mps() -> Iterator[None]:
    """Run a server for the tests of a module. With several GPUs, do nothing."""
    with machine.serving():
        yield


@pytest.fixture
def own_mps() -> Iterator[None]:
    """Run a server for one test. After a client was killed, a server may refuse new ones for some seconds."""
    with machine.serving():
        yield
