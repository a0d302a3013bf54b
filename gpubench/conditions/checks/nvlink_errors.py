"""NVLinks that count errors."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.error_counts import nvlink_errors
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for a GPU whose links erred during the run; without one, for far more errors than siblings have."""
    for node in facts.nodes:
        gpus = {gpu.device: gpu for gpu in node.gpus}
        for errors in nvlink_errors(node.snapshot):
            yield Finding(
                id="nvlink-errors",
                severity=Verdict.WARN,
                subject=facts.subject(node, gpus[errors.device]),
                seen=errors.seen,
                expected=errors.expected,
                cause=f"a link that is about to fail{'' if errors.meanwhile else ', or was disturbed once'}",
                next_command="gpubench check, which measures, and nvidia-smi nvlink -e: do they grow meanwhile?",
            )


NVLINK_ERRORS = Check("nvlink_errors", "NVLinks count no errors while they are used, and few before", find)
