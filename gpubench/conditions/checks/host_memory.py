"""Nodes whose own memory is slow beside that of the others."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.profiles.expectation import odd_among
from gpubench.model.results.measured_copies import memory_row
from gpubench.model.results.measurements import Need
from gpubench.model.terms.verdict import Finding, Verdict

SLOW_SHARE = 0.75
FAILED_SHARE = 0.5
"""Of what nodes with the same CPU reach. Wider than for GPUs: others use the same memory, and one thread copies at the
clock of its core."""


def find(facts: Facts) -> Iterator[Finding]:
    """A warning below 75 % and FAIL below 50 % of what nodes with the same CPU copy in their memory."""
    by_cpu: dict[str | None, dict[str, float]] = {}
    for node in facts.nodes:
        row = memory_row(facts.measurements, node.snapshot.host)
        if row is not None and row.bandwidth_gb_s is not None:
            by_cpu.setdefault(node.snapshot.machine.cpu, {})[node.snapshot.host] = row.bandwidth_gb_s
    for figures in by_cpu.values():
        for host, (_, share, usual) in odd_among(figures).items():
            if share < SLOW_SHARE:
                yield Finding(
                    id="host-memory-slow",
                    severity=Verdict.FAIL if share < FAILED_SHARE else Verdict.WARN,
                    subject=host,
                    seen=f"{figures[host]:.4g} GB/s, {share:.0%}: one thread, copying in host memory",
                    expected=f"{usual:.4g} GB/s, as nodes with the same CPU reach",
                    cause="CPU clocks held down, memory channels without modules, or others who use CPUs and memory",
                    next_command="lscpu; dmidecode -t memory; top, on that node",
                )


HOST_MEMORY = Check(
    "host_memory", "nodes copy in their memory as fast as the others", find, Need.HOST_MEMORY, without_gpus=True
)
