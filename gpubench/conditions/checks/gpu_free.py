"""GPUs that somebody uses, or whose memory nobody gave back."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.terms.verdict import Finding, Verdict

MOST_USED_SHARE = 0.02
"""Of the memory of a GPU that nobody uses; the driver's own part is not counted as used."""


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for a GPU at work for somebody else, and for memory in use that belongs to no process.

    What is measured on such a GPU is no fault of it: it is not judged.
    """
    for node in facts.nodes:
        for gpu in node.gpus:
            if gpu.processes and gpu.idle is not True:
                users = ", ".join(
                    f"process {each.pid}" + (f" ({each.name})" if each.name else "") for each in gpu.processes
                )
                yield _finding(facts.subject(node, gpu), "gpu-in-use", f"in use by {users}", "nobody")
            elif _is_kept(gpu.memory_used_bytes, gpu.memory_bytes) and not gpu.processes:
                seen = f"{(gpu.memory_used_bytes or 0) / 2**30:.1f} GiB in use, and no process is seen"
                yield _finding(facts.subject(node, gpu), "memory-in-use", seen, "free memory")


def _is_kept(used: int | None, total: int | None) -> bool:
    return used is not None and bool(total) and used > MOST_USED_SHARE * (total or 0)


def _finding(subject: str, name: str, seen: str, expected: str) -> Finding:
    return Finding(
        id=name,
        severity=Verdict.WARN,
        subject=subject,
        seen=seen,
        expected=expected,
        cause="a job that was not ended, or one in another container, whose processes are not visible here",
        next_command="nvidia-smi; fuser -v /dev/nvidia*",
    )


GPU_FREE = Check("gpu_free", "nobody uses the GPUs, and their memory is free", find)
