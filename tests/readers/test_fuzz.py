"""Whatever bytes a reader is given, it reads them or refuses them in words; for a minute with `pytest -m slow`."""

import contextlib
import time

import pytest
from hypothesis import HealthCheck, given, settings

from gpubench.errors import GpubenchError
from tests.examples import examples
from tests.fakes.fuzz_targets import FUZZ_TARGETS, FuzzTarget, hostile_bytes

SECONDS = 60.0
"""Of all targets together."""

_EACH = pytest.mark.parametrize("target", FUZZ_TARGETS, ids=lambda each: each.name)
_SLOW_TOO = (HealthCheck.too_slow, HealthCheck.data_too_large)


def fuzz(target: FuzzTarget, tries: int) -> None:
    @settings(max_examples=tries, deadline=None, suppress_health_check=_SLOW_TOO)
    @given(hostile_bytes(target))
    def run(content: bytes) -> None:
        with contextlib.suppress(GpubenchError):
            target.run(content)

    run()


@_EACH
def test_whole_files_are_read(target: FuzzTarget) -> None:
    for seed in target.seeds:
        target.run(seed)


@_EACH
def test_any_bytes_are_read_or_refused(target: FuzzTarget) -> None:
    fuzz(target, examples(10))


@pytest.mark.slow
@_EACH
def test_any_bytes_are_read_or_refused_for_a_minute(target: FuzzTarget) -> None:
    ended = time.monotonic() + SECONDS / len(FUZZ_TARGETS)
    while time.monotonic() < ended:
        fuzz(target, 100)
