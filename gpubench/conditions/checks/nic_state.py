"""RDMA ports that are down or slower than their siblings."""

from collections import Counter
from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.snapshot import NicFacts
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for every RDMA port that is not active, or has a lower rate than most of its model."""
    for node in facts.nodes:
        for nic in node.nics:
            if not nic.rdma or nic.state is None:
                continue
            usual = _usual_rate([each for each in node.nics if each.model == nic.model and each.kind is nic.kind])
            if nic.state != "active":
                seen, expected = f"port is {nic.state}", "active"
            elif nic.rate_gbit_s and usual and nic.rate_gbit_s < usual:
                seen, expected = f"{nic.rate_gbit_s:g} Gb/s", f"{usual:g} Gb/s, as its siblings have"
            else:
                continue
            yield Finding(
                id="nic-down" if nic.state != "active" else "nic-rate",
                severity=Verdict.WARN,
                subject=facts.subject(node, nic),
                seen=seen,
                expected=expected,
                cause="cable, transceiver or switch port; without a subnet manager a port stays in init",
                next_command="ibstat; mlxlink -d BUS_ID; the switch's log",
            )


def _usual_rate(siblings: list[NicFacts]) -> float | None:
    tally = Counter(nic.rate_gbit_s for nic in siblings if nic.rate_gbit_s and nic.state == "active")
    return max(tally, key=lambda rate: (tally[rate], rate)) if tally else None


NIC_STATE = Check("nic_state", "RDMA ports are active, at the rate of their siblings", find, without_gpus=True)
