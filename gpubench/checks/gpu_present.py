"""GPUs that are gone although the machine has them."""

from collections.abc import Iterator

from gpubench.checks.check import Check, Facts
from gpubench.model.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL for a GPU that the driver lost, or does not list although it is on the PCI bus."""
    for node in facts.nodes:
        for gpu in node.gpus:
            if gpu.lost:
                yield Finding(
                    id="gpu-lost",
                    severity=Verdict.FAIL,
                    subject=facts.subject(node, gpu),
                    seen=gpu.lost,
                    expected="a GPU that answers",
                    cause="it fell off the bus (Xid 79): power, temperature, a PCIe fault, or a failed GPU",
                    next_command="dmesg | grep Xid; a reboot or power cycle brings it back, or it has to be replaced",
                )


GPU_PRESENT = Check("gpu_present", "every GPU of the machine answers", find)
