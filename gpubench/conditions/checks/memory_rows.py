"""GPU memory that is wearing out."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL where a row could not be replaced; a warning where one waits for a reset."""
    for node in facts.nodes:
        for gpu in node.gpus:
            rows = gpu.remapped_rows
            if gpu.retirement_pending:
                yield Finding(
                    id="page-retirement-pending",
                    severity=Verdict.WARN,
                    subject=facts.subject(node, gpu),
                    seen="a memory page waits to be retired",
                    expected="none",
                    cause="memory errors since the last reset",
                    next_command="nvidia-smi -r -i INDEX, when nobody uses it; nvidia-smi -q -d PAGE_RETIREMENT",
                )
            if rows is None or not (rows.pending or rows.failure):
                continue
            yield Finding(
                id="row-remap-failed" if rows.failure else "row-remap-pending",
                severity=Verdict.FAIL if rows.failure else Verdict.WARN,
                subject=facts.subject(node, gpu),
                seen="a memory row could not be remapped" if rows.failure else "a memory row waits to be remapped",
                expected="no row pending or failed",
                cause="uncorrectable memory errors, and no spare row left"
                if rows.failure
                else "an uncorrectable memory error since the last reset",
                next_command="replace the GPU (RMA)" if rows.failure else "nvidia-smi -r -i INDEX, when nobody uses it",
            )


MEMORY_ROWS = Check("memory_rows", "no memory row waits to be remapped, or cannot be", find)
