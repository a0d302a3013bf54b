"""The errors that a PCI device counted (AER), from the files aer_dev_* of sysfs, which everyone may read.

The format is that of the kernel's Documentation/ABI/testing/sysfs-bus-pci-devices-aer: a name and a count a line, the
last of them the total. A device without AER has no such files, and neither has one in most virtual machines. Not seen
on hardware: written after that description and checked against files made of it.
"""

from pathlib import Path

from gpubench.hardware.system_files import UnknownFields
from gpubench.model.facts.pci_capabilities import PcieErrors

_SEVERITIES = ("correctable", "nonfatal", "fatal")
_TOTAL = "TOTAL_ERR_"
_MOST_DIGITS = 19


def read_errors(device: Path, unknown: UnknownFields) -> PcieErrors | None:
    """The counters of a device; None, with the reason kept as `errors`, where it has none that can be read."""
    totals: dict[str, int] = {}
    named: dict[str, int] = {}
    for severity in _SEVERITIES:
        reader = UnknownFields()
        text = reader.text("errors", device / f"aer_dev_{severity}")
        counts = _counts(text or "")
        total = next((count for name, count in counts.items() if name.startswith(_TOTAL)), None)
        if total is None:
            unknown.reasons.setdefault("errors", reader.reasons.get("errors") or f"aer_dev_{severity} has no total")
            if severity == _SEVERITIES[0] and text is None:
                # The kernel makes all three files or none.
                return None
            continue
        totals[severity] = total
        errors = {name: count for name, count in counts.items() if count and not name.startswith(_TOTAL)}
        named |= {f"{severity}.{name}": count for name, count in errors.items()}
    return PcieErrors(**totals, named=named) if totals else None


def _counts(text: str) -> dict[str, int]:
    """Counts by name; a line that is none is left out."""
    found = {}
    for line in text.splitlines():
        name, _, count = line.strip().rpartition(" ")
        if name.isprintable() and name and count.isascii() and count.isdecimal() and len(count) <= _MOST_DIGITS:
            found[name] = int(count)
    return found
