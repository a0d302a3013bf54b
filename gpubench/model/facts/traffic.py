"""One reading of what the links of a node have carried: of its GPUs, its NICs, and of the processes that use them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpubench.model.facts.gpu_process import GpuProcess
from gpubench.model.facts.rank_facts import RankFacts

LOOPBACK = "lo"
"""The interface by which a host talks to itself: where NCCL finds no other way inside a node, it takes sockets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """A GPU at one moment. What is None is unknown, and `unknown` says why, by field.

    `nvlink_sent_bytes` and `nvlink_received_bytes` are counters of all its NVLinks, payload alone. Rates in GB/s are as
    the driver averaged them since the reading before; of PCIe else over a moment, which `pcie_sampled_seconds` is then:
    its byte counters have 32 bits, and go around in 34 ms. `kernels_percent` is the part of the time in which kernels
    ran, copies left out, which `utilization_percent` counts as well; it is asked for where PCIe carries bytes out.
    `errors` are counters by name.
    """

    index: int
    bus_id: str
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    nvlink_sent_gb_s: float | None = None
    nvlink_received_gb_s: float | None = None
    pcie_sent_gb_s: float | None = None
    pcie_received_gb_s: float | None = None
    pcie_sampled_seconds: float | None = None
    utilization_percent: int | None = None
    kernels_percent: float | None = None
    clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] | None = None
    lost: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NicReading:
    """A port of a NIC, or the loopback, at one moment: bytes that it has sent and received, payload and headers.

    `counts_to` is where its counters start again from 0. `active` is None where the port does not say.
    """

    name: str
    rdma: bool
    sent_bytes: int | None = None
    received_bytes: int | None = None
    counts_to: int = 2**64
    active: bool | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """A process that uses GPUs, as far as /proc shows it to this user.

    `facts` are those of a rank, with the process's own environment and files; None where it may not be read, and
    `unread` says why. `together` names what makes processes one job, each with who says so: 'torchrun 127.0.0.1:29500',
    'Slurm 4711.0'. `communicators` is whether NCCL has a communicator in it, None where nobody looked.
    """

    pid: int
    name: str | None = None
    user: int | None = None
    container: str | None = None
    slurm_job: str | None = None
    together: tuple[str, ...] = ()
    communicators: bool | None = None
    facts: RankFacts | None = None
    unread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """A node at one moment, in seconds of a clock that only goes forward.

    `driver_silent` says why there is nothing of the GPUs this time: the driver did not answer, or there is none.
    """

    host: str
    seconds: float
    gpus: tuple[GpuReading, ...] = ()
    nics: tuple[NicReading, ...] = ()
    tasks: tuple[TaskFacts, ...] = ()
    driver_silent: str | None = None
