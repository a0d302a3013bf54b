"""Data that arrived damaged."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.results.measurements import Need
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import WRONG_DATA, Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL for every copy and collective whose destination found wrong elements, however fast it was."""
    yield from (each for each in facts.measurements.findings if each.id == WRONG_DATA)
    for row in facts.measurements.collectives:
        if row.wrong:
            yield Finding(
                id=WRONG_DATA,
                severity=Verdict.FAIL,
                subject=f"{row.collective} of {format_size(row.size_bytes)} on {row.ranks} ranks",
                seen=f"{row.wrong} wrong elements",
                expected="every element exact",
                cause="data damaged on the way: a GPU, a link, ACS or IOMMU between peers, or a bug in the library",
                next_command="gpubench p2p; then NCCL_P2P_DISABLE=1: if that is clean, peer copies are at fault",
            )


DATA_CORRECT = Check("data_correct", "all data arrive as they were sent", find, Need.VERIFIED_DATA, without_gpus=True)
