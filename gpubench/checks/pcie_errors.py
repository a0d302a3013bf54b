"""PCIe links that count errors."""

from collections.abc import Iterator
from statistics import median

from gpubench.checks.check import Check, Facts
from gpubench.model.verdict import Finding, Verdict

MOST_REPLAYS = 100
"""Since the driver was loaded. A link that trains replays some packets; a bad one thousands."""

_TIMES_SIBLINGS = 10


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for a GPU that replayed far more packets than its siblings, and for fatal errors of a device."""
    for node in facts.nodes:
        for gpu in node.gpus:
            others = [each.pcie_replays for each in node.gpus if each.pcie_replays is not None and each is not gpu]
            usual = median(others) if others else 0
            if gpu.pcie_replays is not None and gpu.pcie_replays > max(MOST_REPLAYS, _TIMES_SIBLINGS * usual):
                yield _finding(
                    facts.subject(node, gpu),
                    f"{gpu.pcie_replays} replays since the driver was loaded",
                    f"few; its siblings have {usual:g}",
                )
        for device in node.snapshot.pci_devices:
            fatal = device.errors.fatal if device.errors is not None else None
            if fatal:
                named = ", ".join(name for name in (device.errors.named if device.errors else {}) if "fatal." in name)
                where = f"{facts.subject(node)} " if len(facts.nodes) > 1 else ""
                yield _finding(f"{where}{device.kind} {device.bus_id}", f"{fatal} fatal errors {named}".strip(), "none")


def _finding(subject: str, seen: str, expected: str) -> Finding:
    return Finding(
        id="pcie-errors",
        severity=Verdict.WARN,
        subject=subject,
        seen=seen,
        expected=expected,
        cause="a riser, a slot, dirt on the contacts, or a card that is not seated",
        next_command="nvidia-smi -q | grep -i replay, again after some traffic: does it grow? reseat the card",
    )


PCIE_ERRORS = Check("pcie_errors", "PCIe links replay no more than their siblings", find)
