"""Paths that go through host memory and should not, with their causes."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.results.measurements import Need
from gpubench.model.terms.verdict import WRONG_DATA, Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """What measuring found out of paths: host-staged ones, and those of which evidence contradicts itself."""
    for finding in facts.measurements.findings:
        if finding.id != WRONG_DATA and finding.severity is not Verdict.ERROR:
            yield finding


PATHS = Check("paths", "no path goes through host memory that could be direct", find, Need.PEER_COPIES)
