"""RDMA ports that count errors."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.error_counts import port_errors
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for a port that erred during the run; without one, for far more errors than its node's other ports."""
    for node in facts.nodes:
        nics = {nic.name: nic for nic in node.nics}
        for errors in port_errors(node.snapshot):
            nic = nics.get(errors.device)
            if nic is None:
                continue
            yield Finding(
                id="nic-errors",
                severity=Verdict.WARN,
                subject=facts.subject(node, nic),
                seen=errors.seen,
                expected=errors.expected,
                cause="cable, transceiver or switch port: clean it, reseat it, replace it",
                next_command="perfquery -x, again after some traffic: do they grow? mlxlink -d BUS_ID -m",
            )


NIC_ERRORS = Check(
    "nic_errors",
    "RDMA ports count no errors while they are used, and no more than their siblings before",
    find,
    without_gpus=True,
)
