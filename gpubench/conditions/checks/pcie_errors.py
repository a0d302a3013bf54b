"""PCIe links that count errors."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.error_counts import Errors, pcie_errors
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for errors that came during the run; without one, for far more than siblings have, or grave ones."""
    for node in facts.nodes:
        gpus = {gpu.device: gpu for gpu in node.gpus}
        kinds = {each.bus_id: each.kind for each in node.snapshot.pci_devices}
        where = f"{facts.subject(node)} " if len(facts.nodes) > 1 else ""
        for errors in pcie_errors(node.snapshot):
            gpu = gpus.get(errors.device)
            kind = kinds.get(errors.device, "")
            yield _finding(facts.subject(node, gpu) if gpu else f"{where}{kind} {errors.device}", errors)


def _finding(subject: str, errors: Errors) -> Finding:
    return Finding(
        id="pcie-errors",
        severity=Verdict.WARN,
        subject=subject,
        seen=errors.seen,
        expected=errors.expected,
        cause="a riser, a slot, dirt on the contacts, or a card that is not seated",
        next_command="gpubench check, which measures: do they grow meanwhile? then reseat the card",
    )


PCIE_ERRORS = Check("pcie_errors", "PCIe links count no errors while they are used, and few before", find)
