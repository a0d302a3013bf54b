"""RDMA NICs that cannot reach GPU memory."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for a node with GPUs and RDMA NICs, but without GPUDirect RDMA."""
    for node in facts.nodes:
        if not node.gpus:
            continue
        answers = {nic.name: node.gpudirect(nic) for nic in node.nics if nic.rdma}
        impossible = [name for name, (possible, _) in answers.items() if possible is False]
        if impossible:
            where = facts.subject(node) if len(facts.nodes) > 1 else ""
            yield Finding(
                id="gpudirect-rdma-unavailable",
                severity=Verdict.WARN,
                subject=f"{where} {', '.join(impossible)}".strip(),
                seen=answers[impossible[0]][1],
                expected="nvidia-peermem, or dma-buf",
                cause="the module was not loaded after the network driver, or the closed kernel module is in use",
                next_command="modprobe nvidia-peermem; or install the open kernel modules, which offer dma-buf",
                subjects=tuple(f"{where} {name}".strip() for name in impossible),
            )


GPUDIRECT = Check("gpudirect", "RDMA NICs can reach GPU memory", find)
