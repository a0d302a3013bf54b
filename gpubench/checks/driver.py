"""Whether the driver answers at all."""

from collections.abc import Iterator

from gpubench.checks.check import Check, Facts
from gpubench.model.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """ERROR for a source of facts that hung, FAIL for one that broke; a warning for GPUs without a driver."""
    for node in facts.nodes:
        snapshot = node.snapshot
        for failure in snapshot.failures:
            if failure.timed_out:
                yield Finding(
                    id="driver-silent",
                    severity=Verdict.ERROR,
                    subject=f"{facts.subject(node)}, {failure.stage}",
                    seen=failure.error,
                    expected="an answer within the time-out",
                    cause="a GPU fell off the bus, or the driver hangs in the kernel",
                    next_command="dmesg | grep -i -E 'NVRM|Xid'; then nvidia-smi, which may hang the same way",
                )
            else:
                yield Finding(
                    id="probe-failed",
                    severity=Verdict.FAIL,
                    subject=f"{facts.subject(node)}, {failure.stage}",
                    seen=failure.error,
                    expected="facts",
                    cause="CUDA_ERROR_SYSTEM_NOT_READY: the fabric manager is not up; else the library crashed, or "
                    "belongs to another driver",
                    next_command="nvidia-smi; systemctl status nvidia-fabricmanager; dmesg | grep -i -E 'NVRM|Xid'",
                )
        if snapshot.gpus and snapshot.driver.absent:
            yield Finding(
                id="driver-missing",
                severity=Verdict.WARN,
                subject=facts.subject(node),
                seen=f"{len(snapshot.gpus)} NVIDIA GPUs on the PCI bus, and {snapshot.driver.absent}",
                expected="the NVIDIA driver, loaded",
                cause="the driver is not installed or its module failed to load; a container was started without GPUs",
                next_command="modprobe nvidia && nvidia-smi; in a container: docker run --gpus all",
            )


DRIVER = Check("driver", "the driver answers, and sees what is on the PCI bus", find)
