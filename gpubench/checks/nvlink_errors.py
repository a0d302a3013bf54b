"""NVLinks that count errors."""

from collections.abc import Iterator

from gpubench.checks.check import Check, Facts
from gpubench.model.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for every GPU whose links have replayed, recovered or seen damaged flits since the driver started."""
    for node in facts.nodes:
        for gpu in node.gpus:
            counted = [
                f"link {link.number}: {', '.join(f'{count} {name}' for name, count in link.errors.items() if count)}"
                for link in gpu.nvlinks or ()
                if any(link.errors.values())
            ]
            if counted:
                yield Finding(
                    id="nvlink-errors",
                    severity=Verdict.WARN,
                    subject=facts.subject(node, gpu),
                    seen="; ".join(counted),
                    expected="no replay, recovery or CRC error",
                    cause="a link that is about to fail, or was disturbed once: the counters do not say when",
                    next_command="nvidia-smi nvlink -e, again after some traffic: do they grow?",
                )


NVLINK_ERRORS = Check("nvlink_errors", "NVLinks count no errors", find)
