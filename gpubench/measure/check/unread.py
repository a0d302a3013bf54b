"""Facts that a check needs and that could not be read: what nobody looked at passes no check."""

from collections.abc import Iterator, Mapping, Sequence

from gpubench.conditions.checks import Check, unread_by
from gpubench.conditions.definition.circumstances import Facts
from gpubench.model.facts.snapshot import GpuFacts
from gpubench.model.terms.verdict import Finding, Verdict

NOT_LOOKED_AT = "not-looked-at"

_OF_GPUS: Mapping[str, tuple[str, ...]] = {
    "gpu_present": ("bus_id",),
    "nvlink_active": ("nvlinks", "nvlinks.active"),
    "nvlink_errors": ("nvlinks.errors",),
    "fabric": ("fabric",),
    "pcie_link": ("pcie.generation", "pcie.width", "pcie.max_generation", "pcie.max_width"),
    "memory_rows": ("remapped_rows",),
    "throttle": ("throttle_reasons",),
    "gpu_model": ("name",),
    "mig": ("mig",),
    "ecc": ("ecc", "memory_errors"),
    "clocks": ("most_clock_mhz",),
    "temperature": ("temperature_c",),
    "gpu_free": ("processes", "memory_bytes"),
    "pcie_errors": ("pcie_replays",),
}
"""By check, the facts of a GPU without which it says nothing, as `unknown` names them."""

_OF_PAIRS: Mapping[str, tuple[str, ...]] = {"peer_access": ("read", "write")}
_OF_NICS: Mapping[str, tuple[str, ...]] = {"nic_state": ("state",)}

_NOT_THERE = ("Not Supported", "this nvidia-ml-py", "under MIG", "the profile does not say")
"""Reasons of what this kind of GPU, the library that asks, or a simulated machine does not have."""


def unread_facts(check: Check, facts: Facts) -> Iterator[Finding]:
    """A finding for each device of which a fact that the check needs could not be read."""
    for number, node in enumerate(facts.nodes):
        named, on = facts.circumstances.named, facts.circumstances.on
        alive = [gpu for gpu in node.gpus if gpu.lost is None]
        for gpu in alive:
            reasons = _reasons(gpu.unknown, _OF_GPUS.get(check.name, ()))
            reasons = {name: each for name, each in reasons.items() if not _is_not_there(gpu, name, each, alive)}
            yield from _findings(named(number, gpu), reasons)
        devices = {gpu.device for gpu in alive}
        for pair in node.snapshot.pairs:
            if {pair.source, pair.destination} <= devices:
                reasons = _reasons(pair.unknown, _OF_PAIRS.get(check.name, ()))
                there = {name: each for name, each in reasons.items() if not each.startswith(_NOT_THERE)}
                yield from _findings(on(number, f"{pair.source} → {pair.destination}"), there)
        for nic in node.nics:
            yield from _findings(named(number, nic), _reasons(nic.unknown, _OF_NICS.get(check.name, ())))


def not_looked_at(check: Check, facts: Facts) -> str:
    """Why a check that found nothing may not say PASS: what it looks at was not read anywhere. Empty where it may."""
    seen = {each.reason: each.subject for each in unread_by(check, facts) if not each.reason.startswith(_NOT_THERE)}
    if seen:
        reason, subject = next(iter(seen.items()))
        return f"{subject}: {reason}" + (f"; and {len(seen) - 1} more, see gpubench topo" if len(seen) > 1 else "")
    gpus = [gpu for node in facts.nodes for gpu in node.gpus]
    absent = [name for name in _OF_GPUS.get(check.name, ()) if gpus and all(_is_absent(gpu, name) for gpu in gpus)]
    if absent:
        return f"{', '.join(absent)}: not read, of no GPU"
    return _no_redirection_read(facts) if check.name == "redirection" and gpus else ""


def _no_redirection_read(facts: Facts) -> str:
    if all(node.snapshot.machine.virtual_machine for node in facts.nodes):
        return "a virtual machine does not show what its host redirects"
    return "" if any(node.snapshot.pci_devices for node in facts.nodes) else "no bridge of the PCI bus was read"


def _is_absent(gpu: GpuFacts, name: str) -> bool:
    """True for a fact of which neither a value is known nor why it is not."""
    return "." not in name and getattr(gpu, name) is None and name not in gpu.unknown


def _reasons(unknown: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """Why facts with these names, or parts of them, are not known."""
    return {
        name: reason
        for name, reason in unknown.items()
        if name in wanted or (name.startswith("nvlinks.errors.") and "nvlinks.errors" in wanted)
    }


def _is_not_there(gpu: GpuFacts, name: str, reason: str, gpus: Sequence[GpuFacts]) -> bool:
    """True if GPUs of its model do not have a fact; not where another one on the node answers."""
    siblings = [each for each in gpus if each.name == gpu.name]
    return reason.startswith(_NOT_THERE) and all(name in each.unknown for each in siblings)


def _findings(subject: str, reasons: Mapping[str, str]) -> Iterator[Finding]:
    """One finding on a device, where anything of it could not be read."""
    if reasons:
        yield Finding(
            id=NOT_LOOKED_AT,
            severity=Verdict.ERROR,
            subject=subject,
            seen="not read: " + "; ".join(f"{name} ({reason})" for name, reason in reasons.items()),
            expected="an answer, as from other GPUs and drivers",
            cause="a driver in trouble, a GPU that is about to fail, or a container without the right to ask",
            next_command="nvidia-smi -q; dmesg | grep -i -E 'nvrm|xid'",
            subjects=(subject,),
        )
