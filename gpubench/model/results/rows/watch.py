"""The rows of `gpubench watch`: what every link carried in every interval, and what is concluded of each job."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from gpubench.model.results.report import Record
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.verdict import Verdict

JOBS_SECTION = "jobs"


class DeviceKind(StrEnum):
    """The kind of device whose links are watched."""

    GPU = "gpu"
    NIC = "nic"


class Way(StrEnum):
    """The way that the bytes of a job take, as its counters show it.

    Neither `unknown` nor `not told` passes: the first is worth a look, the second is what healthy jobs show too.
    """

    STAGED = "staged"
    SOCKETS = "sockets"
    UNBALANCED = "unbalanced"
    WAITING = "one GPU idle while its peers wait"
    UNKNOWN = "unknown"
    NOT_TOLD = "not told"
    DIRECT = "direct"
    HOST_COPIES = "host copies"
    LOADING = "loading data"
    SAVING = "saving data"
    IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow(Record):
    """What the links of one GPU or one port of a NIC carried over one interval; null: unknown, and `note` says why."""

    seconds: float  #: since the watch began, at the end of the interval
    interval_seconds: float  #: how long the interval was
    node: str  #: host
    device: str  #: GPU0, mlx5_0, lo
    device_kind: Annotated[str, DeviceKind]  #: gpu or nic
    bus_id: str | None = None  #: PCI address of a GPU
    origin: Annotated[str, Origin]  #: measured, simulated or recorded
    nvlink_sent_gb_s: float | None = None  #: by all NVLinks of the GPU, payload
    nvlink_received_gb_s: float | None = None  #: by all NVLinks of the GPU, payload
    pcie_sent_gb_s: float | None = None  #: from the GPU over PCIe, headers included
    pcie_received_gb_s: float | None = None  #: to the GPU over PCIe, headers included
    network_sent_gb_s: float | None = None  #: by a port
    network_received_gb_s: float | None = None  #: by a port
    limit_gb_s: float | None = None  #: of the busiest link named here, per direction
    limit_percent: float | None = None  #: what it carried, of the limit
    utilization_percent: int | None = None  #: part of the time in which something ran on the GPU
    clock_mhz: int | None = None  #: of its multiprocessors
    throttle_reasons: Sequence[str] | None = None  #: why its clocks are held down
    errors_grown: Mapping[str, int] = field(default_factory=dict)  #: counters of errors that went up, by how much
    users: Sequence[str] | None = None  #: processes on the GPU; null: not known
    job: str | None = None  #: the job that they belong to
    note: str | None = None  #: why something is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow(Record):
    """What was concluded of the traffic of one job on one node, over the intervals that had it."""

    node: str  #: host
    job: str  #: what makes its processes one: their launcher's name for them, or the only process
    gpus: Sequence[str]  #: GPUs that it uses there
    way: Annotated[str, Way]  #: the way that its bytes took
    verdict: Annotated[str, Verdict]  #: PASS for direct alone
    origin: Annotated[str, Origin]  #: measured, simulated or recorded
    first_seconds: float  #: since the watch began: the end of the first interval of this way
    seconds: float  #: how long it went that way, all such intervals together
    nvlink_gb_s: float | None = None  #: sent by all its GPUs, mean over these intervals
    pcie_sent_gb_s: float | None = None  #: the same over PCIe
    pcie_received_gb_s: float | None = None  #: received over PCIe
    network_gb_s: float | None = None  #: sent by all NICs of the node
    seen: str  #: the figures that say so
    cause: str | None = None  #: id of the condition that explains it
    cause_seen: str | None = None  #: its evidence
    advice: str | None = None  #: its cure
