"""RDMA ports that count errors."""

from collections.abc import Iterator
from statistics import median

from gpubench.checks.check import Check, Facts
from gpubench.model.rdma_port import RdmaPort
from gpubench.model.verdict import Finding, Verdict

COUNTERS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
"""Of a port, since its driver was loaded: a cable that was plugged leaves a few of each behind."""

MOST_ERRORS = 10
_TIMES_SIBLINGS = 10


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for a port that counted far more errors than its siblings on the same node."""
    for node in facts.nodes:
        ports = {port.nic: port for port in node.snapshot.rdma_ports}
        totals = {name: _total(port) for name, port in ports.items()}
        for nic in node.nics:
            total = totals.get(nic.name)
            usual = median([each for name, each in totals.items() if name != nic.name] or [0])
            if total is None or total <= max(MOST_ERRORS, _TIMES_SIBLINGS * usual):
                continue
            counted = ports[nic.name].counters or {}
            yield Finding(
                id="nic-errors",
                severity=Verdict.WARN,
                subject=facts.subject(node, nic),
                seen=", ".join(f"{counted[name]} {name}" for name in COUNTERS if counted.get(name)),
                expected=f"few; its siblings have {usual:g}",
                cause="cable, transceiver or switch port: clean it, reseat it, replace it",
                next_command="perfquery -x, again after some traffic: do they grow? mlxlink -d BUS_ID -m",
            )


def _total(port: RdmaPort) -> int:
    return sum((port.counters or {}).get(name, 0) for name in COUNTERS)


NIC_ERRORS = Check("nic_errors", "RDMA ports count no more errors than their siblings", find, without_gpus=True)
