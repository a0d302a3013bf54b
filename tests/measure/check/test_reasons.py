"""Code that recognises a reason by its words finds these words where gpubench writes the reason."""

from itertools import chain
from pathlib import Path

import pytest

from gpubench.conditions.subjects import NOT_THERE
from gpubench.measure.check.unread import REFUSED_FACTS

OF_THE_DRIVER = {
    *("Not Supported", "Function Not Found", "Insufficient Permissions", "operating system has blocked"),
    *("ermission denied", "not permitted", "requires restart", "version mismatch", "infoROM", ""),
}
"""Words of NVML and Linux."""
OF_EARLIER_VERSIONS = {"the profile does not say", "CUDA was not asked"}
WRITERS = [
    *Path("gpubench/machine").rglob("*.py"),
    Path("gpubench/simulated/node.py"),
    Path("gpubench/model/facts/health.py"),
]


@pytest.mark.parametrize(
    "words", sorted({*NOT_THERE, *chain(*(row.words for row in REFUSED_FACTS))} - OF_THE_DRIVER - OF_EARLIER_VERSIONS)
)
def test_words_by_which_a_reason_is_recognised_are_written(words: str) -> None:
    assert any(words in path.read_text() for path in WRITERS), words
