"""The rows, the live view and the last line of `gpubench watch`: the traffic on links, and a verdict on each job."""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.model.facts.traffic import FOREIGN_GB_S, sum_rates
from gpubench.model.results.ending import LinePart, part
from gpubench.model.results.fallback import HangRow
from gpubench.model.results.report import OnPage, Record, Report
from gpubench.model.terms.units import compress_names, group_by, shorten
from gpubench.model.terms.verdict import Origin, Verdict


class DeviceKind(StrEnum):
    GPU = "gpu"
    NIC = "nic"


class Way(StrEnum):
    """The path of a job's traffic according to hardware counters.

    NOT_TOLD means that the counters cannot distinguish a healthy job from a staged one. UNKNOWN and NOT_TOLD do not
    pass.
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


class TrafficRow(Record, frozen=True, kw_only=True):
    """The traffic of one GPU or one NIC port in one interval. `note` explains values that are unknown (null)."""

    section = "traffic"

    seconds: float  #: end of the interval, in seconds since the start of the watch
    interval_seconds: float  #: length of the interval in seconds
    node: str  #: host name of the node
    device: str  #: name of the GPU or NIC port: GPU0, mlx5_0, lo
    device_kind: Annotated[str, DeviceKind]  #: type of the device: gpu or nic
    bus_id: str | None = None  #: PCI address of the GPU; null for a NIC
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    nvlink_sent_gb_s: float | None = None  #: payload sent over all NVLinks of the GPU, in GB/s
    nvlink_received_gb_s: float | None = None  #: payload received over all NVLinks of the GPU, in GB/s
    pcie_sent_gb_s: float | None = None  #: data sent by the GPU over PCIe in GB/s, including headers
    pcie_received_gb_s: float | None = None  #: data received by the GPU over PCIe in GB/s, including headers
    network_sent_gb_s: float | None = None  #: data sent through the NIC port in GB/s
    network_received_gb_s: float | None = None  #: data received through the NIC port in GB/s
    limit_gb_s: float | None = None  #: limit of the busiest link in this row, in GB/s per direction
    limit_percent: float | None = None  #: traffic on the busiest link as a percentage of its limit
    utilization_percent: int | None = None  #: percent of time in which a kernel ran on the GPU
    clock_mhz: int | None = None  #: SM clock in MHz
    throttle_reasons: Sequence[str] | None = None  #: reasons why the GPU clocks are lowered
    errors_grown: Mapping[str, int] = field(default_factory=dict)  #: increase of each error counter in the interval
    users: Sequence[str] | None = None  #: processes that use the GPU (null if unknown)
    job: str | None = None  #: job to which these processes belong
    note: str | None = None  #: why a value is unknown


class JobRow(Record, frozen=True, kw_only=True):
    """The verdict on one job's traffic on one node, from the intervals with traffic."""

    section = "jobs"
    on_page = OnPage(
        columns=(
            *("node", "job", "gpus", "way", "verdict", "seconds", "nvlink_gb_s", "pcie_sent_gb_s"),
            *("pcie_received_gb_s", "network_gb_s", "seen", "cause_seen"),
        )
    )

    node: str  #: host name of the node
    job: str  #: name of the job from its launcher, or the job's only process
    gpus: Sequence[str]  #: GPUs that the job uses on this node
    way: Annotated[str, Way]  #: path of the job's traffic
    verdict: Annotated[str, Verdict]  #: verdict on the path; PASS: direct
    origin: Annotated[str, Origin]  #: origin of the values: measured, simulated or recorded
    first_seconds: float  #: end of the first interval with this path, in seconds since the start of the watch
    seconds: float  #: total duration of the intervals with this path, in seconds
    nvlink_gb_s: float | None = None  #: NVLink traffic sent by the job's GPUs in GB/s, mean over these intervals
    pcie_sent_gb_s: float | None = None  #: PCIe traffic sent by the job's GPUs in GB/s, mean over these intervals
    #: PCIe traffic received by the job's GPUs in GB/s, mean over these intervals
    pcie_received_gb_s: float | None = None
    network_gb_s: float | None = None  #: traffic sent by the node's NICs in GB/s, mean over these intervals
    seen: str  #: values that show the path
    cause: str | None = None  #: ID of the condition that explains the path
    cause_seen: str | None = None  #: evidence for the cause
    advice: str | None = None  #: cure for the cause: commands and comment in one text
    commands: tuple[str, ...] = ()  #: commands to run in this order, ready to paste
    comment: str | None = None  #: comment on the commands, or what to do if there are none


_MOST_ALIKE = 2
_RATES = ("nvlink_gb_s", "pcie_sent_gb_s", "pcie_received_gb_s")


class WatchFrame(Struct, frozen=True, kw_only=True):
    """The rows of the interval that ended `seconds` after the start.

    `silences` contains hosts whose GPUs could not be read, with the reasons.
    """

    seconds: float
    rows: Sequence[TrafficRow]
    jobs: Sequence[JobRow]
    silences: Sequence[tuple[str, str]] = ()
    waiting: bool = False

    @property
    def kinds(self) -> "list[AlikeNodes]":
        """Groups of nodes whose jobs have the same type of traffic, the largest group first."""
        jobs = group_by(self.jobs, lambda row: row.node)
        hosts = list(dict.fromkeys((*(row.node for row in self.rows), *jobs, *(host for host, _ in self.silences))))
        silent = dict(self.silences)
        groups = group_by(
            hosts,
            lambda host: (silent.get(host), *((row.way, len(row.gpus), row.cause) for row in jobs.get(host, ()))),
        )
        kinds = [
            AlikeNodes(tuple(members), tuple(merge_similar_jobs(jobs.get(members[0], ()))))
            for members in groups.values()
        ]
        return sorted(kinds, key=lambda kind: -len(kind.hosts))


class AlikeNodes(Struct, frozen=True):
    """Nodes whose jobs have the same type of traffic, with the jobs of the first node as an example."""

    hosts: tuple[str, ...]
    jobs: tuple[JobRow, ...]


def merge_similar_jobs(jobs: Sequence[JobRow]) -> Iterator[JobRow]:
    """Merge a node's similar jobs into one row if there are many, for example servers with one process per GPU."""
    for alike in group_by(jobs, lambda row: (row.way, row.verdict, row.cause)).values():
        if len(alike) <= _MOST_ALIKE:
            yield from alike
            continue
        rates = {name: sum_rates([getattr(row, name) for row in alike]) for name in _RATES}
        gpus = [gpu for row in alike for gpu in row.gpus]
        yield replace(alike[0], job=f"{len(alike)} jobs, {alike[0].job} and others", gpus=gpus, **rates)


_MOST_JOBS = 3


def watch_part(report: Report) -> LinePart:
    """Return 'torch 127.0.0.1:29500 on node0 is direct for 28 s, NVLink 78.1 GB/s', or why no job was judged."""
    if HangRow.section in report.sections:
        seen = "RAS does not show whether operations make progress: " if report.verdict is not Verdict.PASS else ""
        return part(f"{seen}no rank keeps others waiting")
    rows = report.rows(JobRow)
    main: dict[tuple[str, str], JobRow] = {}
    for row in rows:
        main.setdefault((row.node, row.job), row)
    busy = sorted((row for row in main.values() if row.way != Way.IDLE), key=lambda row: -row.seconds)
    sentences = [_sentence(alike) for alike in group_by(busy, lambda row: (row.job, row.way)).values()]
    if sentences:
        unjudged = "" if report.verdict is Verdict.PASS else "the path between GPUs is unknown: "
        return part(*(unjudged + shorten(sentences, most) for most in range(min(len(sentences), _MOST_JOBS), 0, -1)))
    return part("all jobs are idle, without traffic between GPUs" if rows else "no process uses a GPU")


def _sentence(rows: list[JobRow]) -> str:
    first = rows[0]
    job = f"{first.job} on {compress_names([row.node for row in rows])}"
    rates = [row.nvlink_gb_s for row in rows if row.nvlink_gb_s is not None]
    if first.way == Way.NOT_TOLD:
        return f"counters do not show the path of {job} (a healthy job shows the same)"
    if first.way != Way.DIRECT or not rates:
        return f"{job} shows {first.way} for {first.seconds:.0f} s"
    per_node = " per node" if len(rows) > 1 else ""
    crosses_nodes = min(first.network_gb_s or 0.0, first.pcie_sent_gb_s or 0.0) >= FOREIGN_GB_S
    beside = ", not judged between nodes" if crosses_nodes else ""
    return f"{job} is direct for {first.seconds:.0f} s, NVLink {sum(rates) / len(rates):.1f} GB/s{per_node}{beside}"
