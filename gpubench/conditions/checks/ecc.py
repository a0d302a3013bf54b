"""GPU memory without error correction, or with errors that it could not correct."""

from collections.abc import Iterator
from itertools import zip_longest

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.error_counts import MEMORY_ERRORS, ErrorCounts
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL for ECC that is off where the profile or a sibling has it on; a warning for uncorrectable errors."""
    for node, profile in zip_longest(facts.nodes, facts.profiles[: len(facts.nodes)]):
        by_profile = profile is not None and profile.match.generic is None and profile.gpu.ecc is True
        for gpu in node.gpus:
            sibling = any(other.ecc for other in node.gpus if other.name == gpu.name)
            if gpu.ecc is False and (by_profile or sibling):
                yield Finding(
                    id="ecc-off",
                    severity=Verdict.FAIL,
                    subject=facts.subject(node, gpu),
                    seen="ECC is off",
                    expected="ECC on, as its siblings have it" if sibling else "ECC on, as the profile has it",
                    cause="somebody switched it off",
                    next_command="nvidia-smi -e 1 -i INDEX, then reboot",
                )
            if gpu.memory_errors:
                yield Finding(
                    id="memory-errors",
                    severity=Verdict.WARN,
                    subject=facts.subject(node, gpu),
                    seen=_when(gpu.memory_errors, node.snapshot.errors_grown, gpu.device),
                    expected="none",
                    cause="a cell of its memory fails, or a particle hit it once",
                    next_command="nvidia-smi -q -d ECC,ROW_REMAPPER; nvidia-smi -r -i INDEX, when nobody uses it",
                )


def _when(total: int, grown: ErrorCounts | None, device: str) -> str:
    """A total, and what of it came during the run: each of them may have stopped a program, so old ones count too."""
    since = f"{total} {MEMORY_ERRORS} since the driver was loaded"
    if grown is None:
        return f"{since}, when is not known"
    return f"{since}, {grown.get(device, {}).get(MEMORY_ERRORS, 0)} of them during this run"


ECC = Check("ecc", "error correction is on, and had no error that it could not correct", find)
