"""Whether the driver answers at all."""

from collections.abc import Iterator, Mapping

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.snapshot import ProbeFailure, Snapshot
from gpubench.model.terms.verdict import Finding, Verdict

_NOT_READY = "CUDA_ERROR_SYSTEM_NOT_READY"
_KERNEL_LOG = "dmesg | grep -i -E 'NVRM|Xid'"

_BROKEN: Mapping[str, tuple[str, str]] = {
    "sysfs": ("a /sys or /proc that is not mounted, or a bug in gpubench", "ls /sys/bus/pci/devices /proc/driver"),
    "nvml": (
        "libnvidia-ml crashed, belongs to another driver, or may not open /dev/nvidia*",
        f"nvidia-smi; {_KERNEL_LOG}",
    ),
    "cuda": (
        "libcuda crashed, belongs to another driver, or is missing: NVIDIA_DRIVER_CAPABILITIES=utility hides it",
        f"nvidia-smi; ldconfig -p | grep libcuda; {_KERNEL_LOG}",
    ),
}
"""The likely cause, by the source of facts that broke, and the next command."""

_OTHER = ("a bug in gpubench", f"nvidia-smi; {_KERNEL_LOG}")


def find(facts: Facts) -> Iterator[Finding]:
    """ERROR for a source of facts that hung or broke, FAIL where CUDA refuses; a warning for GPUs without a driver."""
    for node in facts.nodes:
        snapshot = node.snapshot
        for failure in snapshot.failures:
            yield _failed(f"{facts.subject(node)}, {failure.stage}", failure, snapshot)
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


def _failed(subject: str, failure: ProbeFailure, snapshot: Snapshot) -> Finding:
    if failure.timed_out:
        return Finding(
            id="driver-silent",
            severity=Verdict.ERROR,
            subject=subject,
            seen=failure.error,
            expected="an answer within the time-out",
            cause="a GPU fell off the bus, or the driver hangs in the kernel",
            next_command=f"{_KERNEL_LOG}; then nvidia-smi, which may hang the same way",
        )
    if _cuda_refuses(failure, snapshot):
        return Finding(
            id="cuda-refuses",
            severity=Verdict.FAIL,
            subject=subject,
            seen=f"NVML answers, and CUDA does not start: {failure.error}",
            expected="CUDA on every GPU that NVML lists",
            cause="the fabric manager is not up, or of another version than the driver",
            next_command=f"systemctl status nvidia-fabricmanager; {_KERNEL_LOG}",
        )
    cause, advice = _BROKEN.get(failure.stage, _OTHER)
    return Finding(
        id="probe-failed",
        severity=Verdict.ERROR,
        subject=subject,
        seen=failure.error,
        expected="facts",
        cause=cause,
        next_command=advice,
    )


def _cuda_refuses(failure: ProbeFailure, snapshot: Snapshot) -> bool:
    """Whether CUDA's refusal tells something of the machine, and is no failure to ask: the driver itself answers."""
    return _NOT_READY in failure.error and not any(each.stage == "nvml" for each in snapshot.failures)


DRIVER = Check("driver", "the driver answers, and sees what is on the PCI bus", find, without_gpus=True)
