"""Drivers that are missing, silent, broken, or refuse to start CUDA."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.complaints import complained
from gpubench.conditions.definition.condition import Condition, Family, Found
from gpubench.conditions.definition.sightings import of_every_node, of_node
from gpubench.model.facts.snapshot import ProbeFailure, Snapshot
from gpubench.model.paths.topology import Topology

_NOT_READY = "CUDA_ERROR_SYSTEM_NOT_READY"
_KERNEL_LOG = "dmesg | grep -i -E 'NVRM|Xid'"

_BROKEN: Mapping[str, tuple[str, str]] = {
    "sysfs": ("a /sys or /proc that is not mounted, or a bug in gpubench", "ls /sys/bus/pci/devices /proc/driver"),
    "nvml": ("libnvidia-ml crashed, belongs to another driver, or may not open /dev/nvidia*", ""),
    "cuda": (
        "libcuda crashed, belongs to another driver, or is missing: NVIDIA_DRIVER_CAPABILITIES=utility hides it",
        f"nvidia-smi; ldconfig -p | grep libcuda; {_KERNEL_LOG}",
    ),
}
"""What is likely where a source of facts broke, and the next command where it is a special one."""


def _missing(node: Topology) -> str:
    absent = node.snapshot.driver.absent
    return f"{len(node.gpus)} NVIDIA GPUs on the PCI bus, and {absent}" if node.gpus and absent else ""


def _failures(run: Circumstances, holds: Callable[[ProbeFailure, Snapshot], bool], lead: str = "") -> Found:
    for number, node in run.nodes.items():
        for failure in node.snapshot.failures:
            if holds(failure, node.snapshot):
                likely, cure = _BROKEN.get(failure.stage, ("a bug in gpubench", ""))
                names = (f"{run.named(number)}, {failure.stage}",)
                sighting = of_node(run, number, f"{lead}{failure.error}", names=names)
                known = failure.timed_out or bool(lead)
                yield sighting if known else replace(sighting, likely=likely, cure=cure)


def _silent(run: Circumstances) -> Found:
    return _failures(run, lambda failure, _: failure.timed_out)


def _refuses(failure: ProbeFailure, snapshot: Snapshot) -> bool:
    """True if CUDA's refusal tells something of the machine, and is no failure to ask: the driver itself answers."""
    answers = not any(each.stage == "nvml" for each in snapshot.failures)
    return not failure.timed_out and _NOT_READY in failure.error and answers


def _cuda_refuses(run: Circumstances) -> Found:
    return _failures(run, _refuses, "NVML answers, and CUDA does not start: ")


def _broken(run: Circumstances) -> Found:
    return _failures(run, lambda failure, snapshot: not failure.timed_out and not _refuses(failure, snapshot))


_XID = "https://docs.nvidia.com/deploy/xid-errors/index.html"

DRIVER = Family.of(
    "driver",
    "The driver",
    Condition(
        id="driver-silent",
        title="nvidia-smi hangs: the NVIDIA driver does not answer",
        detection="every source of facts is read in a process of its own with a deadline",
        check="driver",
        expected="an answer within the time-out",
        likely="a GPU fell off the bus, or the driver hangs in the kernel",
        cure=f"{_KERNEL_LOG}; then nvidia-smi, which may hang the same way",
        link=_XID,
        look=_silent,
    ),
    Condition(
        id="cuda-refuses",
        title="CUDA error 802: system not yet initialized, although nvidia-smi works",
        detection="cuInit answers CUDA_ERROR_SYSTEM_NOT_READY, and NVML answers",
        check="driver",
        expected="CUDA on every GPU that NVML lists",
        likely="the fabric manager is not up, or of another version than the driver",
        cure=f"systemctl status nvidia-fabricmanager; {_KERNEL_LOG}",
        link="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html",
        look=_cuda_refuses,
        in_job=complained(r"system not yet initialized|(?:error|failure) 802\b"),
    ),
    Condition(
        id="probe-failed",
        title="NVML, CUDA or /sys cannot be read (library crashed, or of another driver version)",
        detection="how the process ends that reads them",
        check="driver",
        expected="facts",
        cure=f"nvidia-smi; {_KERNEL_LOG}",
        link=_XID,
        look=_broken,
    ),
    Condition(
        id="driver-missing",
        title="NVIDIA GPUs on the PCI bus and no driver loaded (NVIDIA-SMI has failed)",
        detection="NVIDIA devices in /sys/bus/pci, and whether libnvidia-ml finds a driver",
        check="driver",
        expected="the NVIDIA driver, loaded",
        likely="the driver is not installed or its module failed to load; a container was started without GPUs",
        cure="modprobe nvidia && nvidia-smi; in a container: docker run --gpus all",
        link="https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/index.html",
        look=of_every_node(_missing),
    ),
)
