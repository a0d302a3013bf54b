"""Findings of a scan other than faulty parts."""

from gpubench.measure.scan.report import clock_findings
from tests.measure.scan.fabrics import fabric


def test_a_clock_is_ahead_or_behind() -> None:
    nodes = fabric(4)
    ahead, behind = clock_findings(nodes, {2: -3600.0, 1: 5.0})
    assert (ahead.subject, ahead.seen) == (nodes.hosts[1], "its clock is 5 s ahead of the first node's")
    assert (behind.subject, behind.seen) == (nodes.hosts[2], "its clock is 3600 s behind the first node's")
