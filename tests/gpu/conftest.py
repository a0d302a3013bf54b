"""Fixtures of the GPU tests: a server of MPS where their ranks share one GPU."""

from collections.abc import Iterator

import pytest

from tests.gpu import machine


@pytest.fixture(scope="module")
def mps() -> Iterator[None]:
    """A server for the tests of a module; on several GPUs nothing."""
    with machine.serving():
        yield


@pytest.fixture
def own_mps() -> Iterator[None]:
    """A server for one test alone: after a client was killed, a server may refuse new ones for some seconds."""
    with machine.serving():
        yield
