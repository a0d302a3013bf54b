"""Report on watched jobs: the intervals between readings, the history of each job, rows and findings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.conditions.gpu import GPU
from gpubench.measure.watch.jobs import RunningJob, WatchedJobs, explain, running_jobs
from gpubench.measure.watch.signals import QUIET_GB_S, Joined, Members, Pcie, Signals, decide, signals
from gpubench.measure.watch.transfers import HostTransfer, TransferFinder, transferring_pids
from gpubench.model.facts.process import GpuProcess
from gpubench.model.facts.traffic import GpuRates, NicRates, NodeRates, NodeReading, compute_rates
from gpubench.model.paths.topology import BITS_PER_BYTE, Topology
from gpubench.model.results.fallback import PATH_UNKNOWN, Explanation, cure_columns
from gpubench.model.results.report import FINDINGS_SECTION, TRAFFIC_SECTION, Report, Table
from gpubench.model.results.watch import DeviceKind, JobRow, TrafficRow, Way
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import compress_names, group_by, percent, plural, shorten
from gpubench.model.terms.verdict import HOST_STAGED, Cure, Finding, Origin, Verdict, worst_verdict
from gpubench.ports.traffic import TrafficReader

STEADY_INTERVALS: Mapping[Way, int] = {Way.STAGED: 2, Way.SOCKETS: 2, Way.UNBALANCED: 3, Way.WAITING: 3}
"""Consecutive intervals before a path raises an alarm, because a single interval may span two phases of a job."""

SILENT_INTERVALS = 2  # Consecutive intervals without an answer before a silent driver is reported, even if it recovers
ALARMS = tuple(STEADY_INTERVALS)  # Most severe first
MOST_DOUBT = 0.1
"""A job passes if unclear intervals add up to at most this share of its time on the direct path. Unclear means
unexplained, or staged only briefly. One such interval is always tolerated, because it may span two phases.
"""


class Observed(Struct, frozen=True, kw_only=True):
    """A job during one interval: its signals, the path of its data (`way`), and the meaning of that path as text.

    `transfer` is set if the job stands for two jobs with a transfer between them.
    """

    job: RunningJob
    seen: Signals
    way: Way
    meaning: str
    transfer: HostTransfer | None = None

    def is_doubtful(self, explanation: Explanation | None) -> bool:
        """True if no library took the path, so that it may be intended, or if the hardware may allow no other."""
        if self.transfer is None:
            return self.job.one_process and not self.job.by_nccl
        return not self.transfer.by_ucx or (explanation is not None and explanation.in_doubt)


def observe(rates: NodeRates, joined: Joined) -> tuple[Observed, ...]:
    """Return the jobs on a node during one interval."""
    found = []
    for job in running_jobs(rates):
        seen = signals(job, rates.nics, joined)
        way, meaning = decide(seen)
        found.append(Observed(job=job, seen=seen, way=way, meaning=meaning))
    return tuple(found)


def observe_transfers(rates: NodeRates, observed: Sequence[Observed], finder: TransferFinder) -> Iterator[Observed]:
    """Yield the transfers between jobs during one interval, except those of jobs that raise an alarm themselves."""
    alarming = {gpu.bus_id for one in observed if one.way in (Way.STAGED, Way.SOCKETS) for gpu in one.job.gpus}
    for transfer in finder.observe(rates, [one.job for one in observed]):
        job = transfer.job
        if alarming.isdisjoint(gpu.bus_id for gpu in job.gpus):
            seen = replace(signals(job, rates.nics, finder.joined), staged_ends=transfer.ends, odd_rails=(), doubts=())
            yield Observed(job=job, seen=seen, way=transfer.way, meaning=transfer.meaning, transfer=transfer)


def needs_closer_look(observed: Sequence[Observed]) -> frozenset[int]:
    """Return the processes of jobs that may be host-staged, if it is unknown whether the processes use NCCL."""
    return frozenset(
        task.pid
        for one in observed
        if one.seen.pcie in (Pcie.ACROSS, Pcie.BOTH) or one.seen.idle_gpus
        if one.seen.members is not Members.ONE or one.seen.network != "quiet"
        for task in one.job.tasks
        if task.communicators is not True
    )


class PathTime(Struct):
    """All intervals during which a job used one path.

    `moved` are the total GB per kind of link. `longest_run` is the largest number of consecutive intervals.
    """

    way: Way
    first_seconds: float
    seconds: float = 0.0
    intervals: int = 0
    current_run: int = 0
    longest_run: int = 0
    moved: dict[str, float] = field(default_factory=dict)
    known_seconds: dict[str, float] = field(default_factory=dict)
    last: Observed | None = None

    @property
    def is_steady(self) -> bool:
        """True if the job used the path long enough to raise an alarm. A transfer is found after several intervals."""
        is_transfer = self.last is not None and self.last.transfer is not None
        return is_transfer or self.longest_run >= STEADY_INTERVALS.get(self.way, 1)

    def add(self, observed: Observed, seconds: float) -> None:
        self.seconds += seconds
        self.intervals += 1
        self.current_run += 1
        self.longest_run = max(self.longest_run, self.current_run)
        self.last = observed
        for name in ("nvlink_gb_s", "pcie_sent_gb_s", "pcie_received_gb_s", "network_gb_s"):
            rate = getattr(observed.seen, name)
            if rate is not None:
                self.moved[name] = self.moved.get(name, 0.0) + rate * seconds
                self.known_seconds[name] = self.known_seconds.get(name, 0.0) + seconds

    def rate(self, name: str) -> float | None:
        """Return the mean rate of a signal in GB/s, or None if it was never known."""
        return self.moved[name] / self.known_seconds[name] if self.known_seconds.get(name) else None


class JobCourse(Struct):
    """The history of a job on a node since its first interval, by path."""

    node: str
    name: str
    stretches: dict[Way, PathTime] = field(default_factory=dict)
    explanation: Explanation | None = None
    explained: Way | None = None

    def add(self, observed: Observed, seconds: float, now: float) -> None:
        """Add an interval that ended `now` seconds after the watch began."""
        for way, stretch in self.stretches.items():
            stretch.current_run = stretch.current_run if way is observed.way else 0
        self.stretches.setdefault(observed.way, PathTime(observed.way, now)).add(observed, seconds)

    @property
    def main(self) -> PathTime:
        """The path to report: the most severe steady alarm, or else the path that the job used longest.

        If that is the direct path, but intervals without a clear path lasted too long, report the longest of those
        instead.
        """
        alarms = (self.stretches[way] for way in ALARMS if way in self.stretches)
        alarm = next((stretch for stretch in alarms if stretch.is_steady), None)
        if alarm is not None:
            return alarm
        stretches = list(self.stretches.values())
        calm = [stretch for stretch in stretches if stretch.way not in (Way.IDLE, *ALARMS)]
        idle = [stretch for stretch in stretches if stretch.way is Way.IDLE]
        longest = max(calm or idle or stretches, key=lambda stretch: stretch.seconds)
        if longest.way is not Way.DIRECT:
            return longest
        doubts = [stretch for stretch in stretches if stretch.way in (Way.UNKNOWN, Way.NOT_TOLD, *ALARMS)]
        are_several = sum(doubt.intervals for doubt in doubts) > 1
        if are_several and sum(doubt.seconds for doubt in doubts) > MOST_DOUBT * longest.seconds:
            return max(doubts, key=lambda stretch: stretch.seconds)
        return longest

    @property
    def verdict(self) -> Verdict:
        """The verdict on the job. Only direct traffic passes."""
        return judge_path(self.main, self.explanation)


def judge_path(stretch: PathTime, explanation: Explanation | None) -> Verdict:
    """Return the verdict on one path of a job. A staged path does not fail if it is by design or may be intended."""
    way = stretch.way
    if way in (Way.STAGED, Way.SOCKETS) and stretch.is_steady:
        if explanation is not None and explanation.by_design:
            return Verdict.SKIP
        is_doubtful = stretch.last is not None and stretch.last.is_doubtful(explanation)
        return Verdict.WARN if is_doubtful else Verdict.FAIL
    if way in ALARMS:
        return Verdict.WARN
    return {Way.DIRECT: Verdict.PASS, Way.UNKNOWN: Verdict.WARN}.get(way, Verdict.SKIP)


class Course:
    """The history of all watched nodes.

    `lost` has the reason for each lost GPU, by host and GPU name. `topology` returns the topology of a host.
    """

    def __init__(self, topology: Callable[[str], Topology | None]) -> None:
        self.jobs: dict[tuple[str, str], JobCourse] = {}
        self._silent: dict[str, tuple[str, int]] = {}
        self.lost: dict[tuple[str, str], str] = {}
        self.seconds = 0.0
        self.traffic_seen = False
        self._topology = topology
        self._transfers: dict[str, TransferFinder] = {}

    def observe(self, rates: NodeRates) -> tuple[Observed, ...]:
        """Return the transfers between jobs, and the jobs, on a node during the next interval.

        Only the history of transfers is kept here. `add` keeps the history of jobs.
        """
        if rates.host not in self._transfers:
            self._transfers[rates.host] = TransferFinder(nvlink_finder(self._topology(rates.host)))
        finder = self._transfers[rates.host]
        observed = observe(rates, finder.joined)
        return (*observe_transfers(rates, observed, finder), *observed)

    def add(self, rates: NodeRates, observed: Sequence[Observed], now: float) -> None:
        """Add an interval on a node to the history. The interval ended `now` seconds after the watch began."""
        self.seconds = max(self.seconds, now)
        if rates.driver_silent is not None:
            self.add_silence(rates.host, rates.driver_silent)
            return
        if self._silent.get(rates.host, ("", 0))[1] < SILENT_INTERVALS:
            self._silent.pop(rates.host, None)  # A single late answer does not mean that the driver hangs
        self.lost |= {(rates.host, gpu.device): gpu.lost for gpu in rates.gpus if gpu.lost is not None}
        for one in observed:
            key = rates.host, one.job.name
            course = self.jobs.setdefault(key, JobCourse(*key))
            course.add(one, rates.end - rates.begin, now)
            self.traffic_seen = self.traffic_seen or one.way is not Way.IDLE
            if one.transfer is not None and one.way is not Way.NOT_TOLD:
                course.explanation, course.explained = one.transfer.explain(self._topology(rates.host)), one.way
            elif one.way in (Way.STAGED, Way.SOCKETS) and course.explained is not one.way:
                node = self._topology(rates.host) if course.stretches[one.way].is_steady else None
                if node is not None:
                    course.explanation = explain(one.job, one.way, node, one.seen.staged_ends)
                    course.explained = one.way

    def add_silence(self, host: str, reason: str) -> None:
        """Count an interval in which the driver on a node did not answer."""
        self._silent[host] = reason, self._silent.get(host, ("", 0))[1] + 1

    @property
    def silences(self) -> dict[str, str]:
        """The reason by host, for drivers that were silent for several consecutive intervals or at the end."""
        return {host: reason for host, (reason, _) in self._silent.items()}


def nvlink_finder(node: Topology | None) -> Joined:
    """Return a cached function that finds out whether NVLinks connect two GPUs on a node."""
    gpus = {} if node is None else {gpu.bus_id: gpu for gpu in node.gpus}
    known: dict[tuple[str, str], bool | None] = {}

    def joined(one: str, other: str) -> bool | None:
        if (one, other) not in known:
            ends = gpus.get(one), gpus.get(other)
            links = None if node is None or ends[0] is None or ends[1] is None else node.nvlinks(ends[0], ends[1])
            known[one, other] = None if links is None else links > 0
        return known[one, other]

    return joined


class Interval(Struct, frozen=True, kw_only=True):
    """The rates and jobs on all nodes during one interval, which ended `seconds` after the watch began."""

    seconds: float
    nodes: tuple[tuple[NodeRates, tuple[Observed, ...]], ...]


class NodeWatch:
    """Reads one node, and inspects processes more closely if their traffic looks staged."""

    def __init__(self, reader: TrafficReader, joined: Joined, selection: WatchedJobs) -> None:
        self._reader, self._joined, self._selection = reader, joined, selection
        self._before: NodeReading | None = None

    def read(self) -> NodeReading | None:
        """Return a reading of the node, or None after the end of a recording."""
        reading = self._reader.read()
        if reading is None:
            return None
        if reading.driver_silent is None:
            if self._before is not None and not all(task.communicators for task in reading.tasks):
                rates = compute_rates(self._before, self._selection.of(reading))
                observed = observe(rates, self._joined)
                pids = needs_closer_look(observed) | transferring_pids(rates)
                tasks = self._reader.look_closely(pids) if pids else None
                if tasks is not None:
                    reading = replace(reading, tasks=tasks)
            self._before = reading
        return self._selection.of(reading)

    def close(self) -> None:
        self._reader.close()


class Intervals:
    """Computes the rates between readings on all nodes, and adds them to the history. `keep` receives every reading."""

    def __init__(self, course: Course, keep: Callable[[NodeReading], None] = lambda _: None) -> None:
        self.course = course
        self._keep = keep
        self._before: dict[str, NodeReading] = {}
        self._began: dict[str, float] = {}

    def add(self, readings: Sequence[NodeReading]) -> Interval | None:
        """Return the interval that ends with these readings, or None for the first readings."""
        nodes = []
        now = 0.0
        for reading in readings:
            self._keep(reading)
            began = self._began.setdefault(reading.host, reading.seconds)
            before = self._before.get(reading.host)
            if before is not None:
                between = compute_rates(before, reading)
                now = max(now, reading.seconds - began)
                observed = () if reading.driver_silent is not None else self.course.observe(between)
                nodes.append((between, observed))
            if reading.driver_silent is None:
                self._before[reading.host] = reading
            else:
                if before is None:
                    self.course.add_silence(reading.host, reading.driver_silent)
                self._before.setdefault(reading.host, reading)
        for between, observed in nodes:
            self.course.add(between, observed, now)
        return Interval(seconds=now, nodes=tuple(nodes)) if nodes else None


class Limits:
    """The bandwidth limits of a node's links, in GB/s per direction, read once. A limit is None if unknown."""

    def __init__(self, node: Topology | None) -> None:
        self._nvlink: Mapping[str | None, float | None] = {}
        self._pcie: Mapping[str | None, float | None] = {}
        self._nics: dict[str, float | None] = {}
        if node is not None:
            self._nvlink = {gpu.bus_id: node.nvlink_total(gpu).gb_s for gpu in node.gpus}
            self._pcie = {gpu.bus_id: node.pcie_total(gpu).gb_s for gpu in node.gpus}
            for nic in node.nics:
                rate = None if nic.rate_gbit_s is None else nic.rate_gbit_s / BITS_PER_BYTE
                self._nics |= dict.fromkeys((nic.name, *nic.interfaces), rate)

    def gpu_limit(self, gpu: GpuRates) -> tuple[float | None, float | None]:
        """Return the limit of a GPU's busiest link in GB/s, and its utilization in percent."""
        nvlink, pcie = self._nvlink.get(gpu.bus_id), self._pcie.get(gpu.bus_id)
        return _busiest_link(
            (gpu.nvlink_sent, nvlink), (gpu.nvlink_received, nvlink), (gpu.pcie_sent, pcie), (gpu.pcie_received, pcie)
        )

    def nic_limit(self, nic: NicRates) -> tuple[float | None, float | None]:
        """Return the limit of a NIC port in GB/s, and its utilization in percent."""
        limit = self._nics.get(nic.name)
        return _busiest_link((nic.sent, limit), (nic.received, limit))


def _busiest_link(*links: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    known = [(share, limit) for rate, limit in links if (share := percent(rate, limit)) is not None]
    if not known:
        return next((limit for _, limit in links if limit is not None), None), None
    share, limit = max(known, key=itemgetter(0))
    return limit, round(share, 1)


def traffic_rows(
    rates: NodeRates, observed: Sequence[Observed], limits: Limits, origin: Origin, now: float
) -> Iterator[TrafficRow]:
    """Yield the rows of one node for an interval that ended `now` seconds after the watch began."""
    jobs = {gpu.bus_id: one.job.name for one in observed for gpu in one.job.gpus}
    names = {task.pid: task.name for task in rates.tasks}
    seconds, interval = round(now, 3), round(rates.end - rates.begin, 3)
    for gpu in rates.gpus:
        limit, share = limits.gpu_limit(gpu)
        yield TrafficRow(
            seconds=seconds,
            interval_seconds=interval,
            node=rates.host,
            device=gpu.device,
            device_kind=DeviceKind.GPU,
            bus_id=gpu.bus_id,
            origin=origin,
            nvlink_sent_gb_s=_rounded(gpu.nvlink_sent),
            nvlink_received_gb_s=_rounded(gpu.nvlink_received),
            pcie_sent_gb_s=_rounded(gpu.pcie_sent),
            pcie_received_gb_s=_rounded(gpu.pcie_received),
            limit_gb_s=_rounded(limit),
            limit_percent=share,
            utilization_percent=gpu.utilization_percent,
            clock_mhz=gpu.clock_mhz,
            throttle_reasons=gpu.throttle_reasons,
            errors_grown=gpu.errors_grown,
            users=None if gpu.processes is None else [_user(process, names) for process in gpu.processes],
            job=jobs.get(gpu.bus_id),
            note=_note(gpu.unknown),
        )
    for nic in rates.nics:
        limit, share = limits.nic_limit(nic)
        yield TrafficRow(
            seconds=seconds,
            interval_seconds=interval,
            node=rates.host,
            device=nic.name,
            device_kind=DeviceKind.NIC,
            origin=origin,
            network_sent_gb_s=_rounded(nic.sent),
            network_received_gb_s=_rounded(nic.received),
            limit_gb_s=_rounded(limit),
            limit_percent=share,
            errors_grown=nic.errors_grown,
            note=_note(nic.unknown),
        )


def _user(process: GpuProcess, names: Mapping[int, str | None]) -> str:
    name = names.get(process.pid) or process.name
    user = f"{process.pid} ({name})" if name else str(process.pid)
    return f"{user} under MPS" if process.mps else user


def _note(unknown: Mapping[str, str]) -> str | None:
    return "; ".join(f"{name.replace('_', ' ')}: {reason}" for name, reason in unknown.items()) or None


SECTIONS = (TRAFFIC_SECTION, JobRow.section, FINDINGS_SECTION)

RAIL_UNBALANCED, GPU_WAITED_FOR = "rail-unbalanced", "gpu-idle-while-peers-wait"
DRIVER_SILENT, JOB_NOT_FOUND = "driver-silent", "job-not-found"

_UNKNOWN_COUNTERS = "the counters do not show it, or could not be read"
_MOST_JOBS = 3
_GPU_LOST = next(condition for condition in GPU.conditions if condition.id == "gpu-lost")

_LOOK_CLOSER = Cure.of(
    "gpubench topo --causes", comment="Or set NCCL_DEBUG=INFO in the job and run `gpubench explain` on its log."
)


def report_course(course: Course, origin: Origin, *, missing: str = "") -> Report:
    """Return the report on all jobs, without the rows of intervals.

    `missing` names the selected jobs if none of their processes was found, and is empty otherwise.
    """
    jobs = [row for job in course.jobs.values() for row in _job_rows(job, origin)]
    findings = tuple(_findings(course))
    if missing:
        not_found = Finding(
            id=JOB_NOT_FOUND,
            severity=Verdict.ERROR,
            subject=missing,
            seen="none of its processes used a GPU on any watched node",
            expected="a running job on these nodes",
            cause="the job has ended, has not started or runs elsewhere, or its pids are those of a container",
            cure=Cure.of("gpubench watch --for 3s", comment="It shows every process that uses a GPU."),
        )
        findings = (not_found, *findings)
    judged = [job.verdict for job in course.jobs.values()]
    verdict = worst_verdict((*judged, *(finding.severity for finding in findings)))
    if verdict is Verdict.PASS and any(job.main.way is Way.NOT_TOLD for job in course.jobs.values()):
        verdict = Verdict.SKIP
    sections = Table.group_by_section({JobRow: jobs})
    return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=JobRow.section)


def _job_rows(course: JobCourse, origin: Origin) -> Iterator[JobRow]:
    """Yield one row for each path that a job used. The first row is the path that determines the verdict."""
    main = course.main
    others = sorted(
        (stretch for stretch in course.stretches.values() if stretch is not main), key=lambda stretch: -stretch.seconds
    )
    for stretch in (main, *others):
        explanation = course.explanation if course.explained is stretch.way else None
        yield _job_row(course, stretch, judge_path(stretch, explanation), explanation, origin)


def _job_row(
    course: JobCourse, stretch: PathTime, verdict: Verdict, explanation: Explanation | None, origin: Origin
) -> JobRow:
    gpus = () if stretch.last is None else stretch.last.job.gpus
    return JobRow(
        node=course.node,
        job=course.name,
        gpus=[gpu.device for gpu in gpus],
        way=stretch.way,
        verdict=verdict,
        origin=origin,
        first_seconds=round(stretch.first_seconds, 3),
        seconds=round(stretch.seconds, 3),
        nvlink_gb_s=_rounded(stretch.rate("nvlink_gb_s")),
        pcie_sent_gb_s=_rounded(stretch.rate("pcie_sent_gb_s")),
        pcie_received_gb_s=_rounded(stretch.rate("pcie_received_gb_s")),
        network_gb_s=_rounded(stretch.rate("network_gb_s")),
        seen=_describe(stretch),
        cause=None if explanation is None else explanation.id,
        cause_seen=None if explanation is None else explanation.evidence,
        **cure_columns(None if explanation is None else explanation.cure),
    )


def jobs_now(interval: Interval, course: Course, origin: Origin) -> Iterator[JobRow]:
    """Yield one row per job for one interval, with the cause if it is known."""
    for node_rates, observed in interval.nodes:
        for one in observed:
            job = course.jobs[node_rates.host, one.job.name]
            now = PathTime(one.way, interval.seconds)
            now.add(one, node_rates.end - node_rates.begin)
            explanation = job.explanation if job.explained is one.way else None
            yield _job_row(job, now, judge_path(job.stretches[one.way], explanation), explanation, origin)


def _describe(stretch: PathTime) -> str:
    """Describe mean rates, for example 'NVLink 0.00, PCIe 27.3 out and 27.1 in GB/s: some GPUs send …'."""
    if (observed := stretch.last) is None:
        return ""
    details = [*observed.seen.odd_rails, *observed.seen.idle_gpus, *observed.seen.doubts]
    return f"{_rates(stretch)}: {observed.meaning}" + (f" ({'; '.join(details)})" if details else "")


def _rates(stretch: PathTime) -> str:
    sent, received = _gb_s(stretch.rate("pcie_sent_gb_s")), _gb_s(stretch.rate("pcie_received_gb_s"))
    parts = [f"NVLink {_gb_s(stretch.rate('nvlink_gb_s'))}", f"PCIe {sent} out and {received} in"]
    if (stretch.rate("network_gb_s") or 0.0) > QUIET_GB_S:
        parts.append(f"NICs {_gb_s(stretch.rate('network_gb_s'))} out")
    return f"{', '.join(parts)} GB/s"


def _findings(course: Course) -> Iterator[Finding]:
    """Yield one finding for all jobs and nodes with the same path and cause, then lost GPUs and silent drivers."""
    made: list[tuple[JobCourse, Finding]] = []
    direct = {job.name: job.node for job in course.jobs.values() if job.main.way is Way.DIRECT}
    for job in sorted(course.jobs.values(), key=lambda job: list(Way).index(job.main.way)):
        observed = job.main.last
        make = _FINDINGS.get(job.main.way) if job.main.is_steady else _unknown_path
        if observed is not None and observed.transfer is not None:
            make = _transfer
        if observed is not None and make is not None:
            found = replace(make(job, observed.job), places=_places(job.node, observed.job.gpus))
            if job.main.way is Way.NOT_TOLD and job.name in direct:
                cause = f"on {direct[job.name]} the same job is direct"
                found = replace(found, severity=Verdict.WARN, cause=cause, cure=_LOOK_CLOSER)
            made.append((job, found))
    for alike in group_by(made, _cause_key).values():
        yield alike[0][1] if len(alike) == 1 else _merge(alike)
    for (host, device), reason in course.lost.items():
        yield Finding(
            id=_GPU_LOST.id,
            severity=_GPU_LOST.severity or Verdict.FAIL,
            subject=f"{host} {device}",
            places=(DevicePlace(host, device),),
            seen=reason,
            expected=_GPU_LOST.expected,
            cause=_GPU_LOST.likely,
            cure=_GPU_LOST.cure,
        )
    for host, reason in course.silences.items():
        yield Finding(
            id=DRIVER_SILENT,
            severity=Verdict.ERROR,
            subject=host,
            places=(DevicePlace(host),),
            seen=reason,
            expected="GPU counters at every interval",
            cause="the driver hangs, a GPU fell off the bus, or the driver is busy for longer than an interval",
            cure=Cure.of("dmesg | grep -i -e xid -e nvrm", comment="Then run `gpubench check --quick`."),
        )


def _places(host: str, gpus: Sequence[GpuRates]) -> tuple[DevicePlace, ...]:
    return tuple(DevicePlace(host, gpu.device, gpu.bus_id) for gpu in gpus) or (DevicePlace(host),)


def _cause_key(made: tuple[JobCourse, Finding]) -> tuple[object, ...]:
    course, finding = made
    meaning = "" if course.main.last is None else course.main.last.meaning
    return finding.id, finding.severity, finding.cause, finding.next_command, meaning


def _merge(alike: Sequence[tuple[JobCourse, Finding]]) -> Finding:
    """Merge findings that are the same except for the job or node."""
    first = alike[0][1]
    nodes = list(dict.fromkeys(course.node for course, _ in alike))
    subjects = nodes if len(nodes) > 1 else dict.fromkeys(name for _, finding in alike for name in finding.subjects)
    others = f"on {plural(len(nodes) - 1, 'more node')}"
    if len(nodes) < len(alike):
        others = f"for {plural(len(alike) - 1, 'more job')} on {compress_names(nodes)}"
    hosts_by_job: dict[tuple[str, str], list[str]] = {}
    for course, _ in alike:
        if course.main.last is not None:
            hosts_by_job.setdefault((course.name, course.main.last.job.devices), []).append(course.node)
    jobs = [f"{name} on {compress_names(hosts)} {devices}" for (name, devices), hosts in hosts_by_job.items()]
    return replace(
        first,
        subject=shorten(jobs, _MOST_JOBS),
        subjects=tuple(subjects),
        seen=f"on {nodes[0]}, {first.seen}; the same {others}",
        places=tuple(dict.fromkeys(place for _, finding in alike for place in finding.places)),
    )


def _staged(course: JobCourse, job: RunningJob) -> Finding:
    found, observed = course.explanation, course.main.last
    hop = "" if observed is None else observed.seen.staged_hop
    medium = "the loopback or Ethernet" if course.main.way is Way.SOCKETS else "host memory"
    expected = f"traffic {hop} over NVLink" if hop else "GPU traffic over NVLink"
    if not hop and course.main.way is Way.SOCKETS and len(job.gpus) < 2:
        expected = "traffic between nodes over RDMA"
    return Finding(
        id=HOST_STAGED,
        severity=course.verdict,
        subject=f"{course.name} on {course.node} {hop}" if hop else _subject(course, job),
        seen=f"sends its GPU traffic through {medium} for {course.main.seconds:.0f} s: {_describe(course.main)}",
        expected=expected,
        cause="no known cause was found" if found is None else found.evidence,
        cure=_LOOK_CLOSER if found is None else found.cure,
        subjects=tuple(gpu.device for gpu in job.gpus if not hop or gpu.device in hop.replace(",", "").split()),
    )


def _transfer(course: JobCourse, job: RunningJob) -> Finding:
    main, found, observed = course.main, course.explanation, course.main.last
    hop = "" if observed is None else observed.seen.staged_hop
    is_proven = main.way is Way.SOCKETS
    # PCIe rates include headers, and the loopback may carry other data.
    links = ("pcie_sent_gb_s", "pcie_received_gb_s", *(["network_gb_s"] if is_proven else []))
    rate = _gb_s(min(main.rate(link) or 0.0 for link in links))
    how = f"host-staged, {rate} GB/s, through TCP on the loopback interface" if is_proven else f"{rate} GB/s"
    return Finding(
        id=HOST_STAGED if is_proven else PATH_UNKNOWN,
        severity=course.verdict,
        subject=f"{hop} on {course.node}",
        seen=f"{how}, for {main.seconds:.0f} s; {job.name}, {_describe(main)}",
        expected=f"direct traffic {hop}, over NVLink or PCIe",
        cause="unrelated copies may show the same rates" if found is None else found.evidence,
        cure=Cure.of("gpubench kv", comment="It measures such a transfer.") if found is None else found.cure,
    )


def _unbalanced(course: JobCourse, job: RunningJob) -> Finding:
    return Finding(
        id=RAIL_UNBALANCED,
        severity=course.verdict,
        subject=_subject(course, job),
        seen=_describe(course.main),
        expected="the same traffic on all rails, within 30 %",
        cause="a NIC, cable or switch port of the odd rail, or a job that does not use all NICs",
        cure=Cure.of("gpubench check", comment="To find the bad rail of several nodes, run `gpubench scan`."),
    )


def _waiting(course: JobCourse, job: RunningJob) -> Finding:
    idle = "" if course.main.last is None else ", ".join(course.main.last.seen.idle_gpus)
    return Finding(
        id=GPU_WAITED_FOR,
        severity=course.verdict,
        subject=_subject(course, job),
        seen=f"{idle} idle for {course.main.seconds:.0f} s while the other GPUs of the job run kernels: "
        f"{_rates(course.main)}",
        expected="all GPUs of a job work or wait together",
        cause="the process of the idle GPU waits for data, for the CPU or for a file, has ended, or hangs",
        cure=Cure.of(
            "nvidia-smi", comment="Find the process on the idle GPU. `py-spy dump --pid PID` shows where it waits."
        ),
    )


def _unknown_path(course: JobCourse, job: RunningJob) -> Finding:
    return Finding(
        id=PATH_UNKNOWN,
        severity=course.verdict,
        subject=_subject(course, job),
        seen=_describe(course.main),
        expected="a known path of its traffic",
        cause=_UNKNOWN_COUNTERS
        if course.main.is_steady
        else f"{course.main.way} for {course.main.seconds:.0f} s is too short to be sure",
        cure=_LOOK_CLOSER,
    )


def _undecidable_path(course: JobCourse, job: RunningJob) -> Finding:
    return replace(
        _unknown_path(course, job),
        cause="a healthy job looks the same, because the counters do not show which path its traffic uses",
        cure=Cure.of("gpubench p2p", comment="Run it, and `gpubench allreduce`, while no job runs."),
    )


_FINDINGS = {
    Way.STAGED: _staged,
    Way.SOCKETS: _staged,
    Way.UNBALANCED: _unbalanced,
    Way.WAITING: _waiting,
    Way.UNKNOWN: _unknown_path,
    Way.NOT_TOLD: _undecidable_path,
}


def _subject(course: JobCourse, job: RunningJob) -> str:
    return f"{course.name} on {course.node} {job.devices}"


def _gb_s(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
