"""The report on a watch: a row a job, findings for what is not as it should be; only what is direct passes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpubench.conditions.gpu import GPU
from gpubench.measure.watch.course import Course, JobCourse, TimeOnWay, verdict_of
from gpubench.measure.watch.intervals import Interval
from gpubench.measure.watch.jobs import RunningJob
from gpubench.measure.watch.signals import QUIET_GB_S
from gpubench.model.results.explanation import Explanation
from gpubench.model.results.fallback import PATH_UNKNOWN
from gpubench.model.results.report import FINDINGS_SECTION, TRAFFIC_SECTION, Report, Section, Table
from gpubench.model.results.rows.watch import JOBS_SECTION, JobRow, Way
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.units import compress_names, counted, some_of
from gpubench.model.terms.verdict import HOST_STAGED, Finding, Verdict, overall

SECTIONS = (TRAFFIC_SECTION, JOBS_SECTION, FINDINGS_SECTION)

RAIL_UNBALANCED, GPU_WAITED_FOR = "rail-unbalanced", "gpu-idle-while-peers-wait"
DRIVER_SILENT, JOB_NOT_FOUND = "driver-silent", "job-not-found"

_CANNOT_COUNT = "counters do not tell it, or may not be read"
_MOST_JOBS = 3
_GPU_LOST = next(each for each in GPU.conditions if each.id == "gpu-lost")

_LOOK_CLOSER = "gpubench topo --causes; NCCL_DEBUG=INFO in the job, and gpubench explain of what it logs"


def report_on(course: Course, origin: Origin, *, missing: str = "") -> Report:
    """The report, without the rows of intervals, which somebody has had as they came.

    `missing` is whose traffic was to be watched, where nothing of it was seen.
    """
    jobs = [row for each in course.jobs.values() for row in job_rows(each, origin)]
    findings = (*([_not_found(missing)] if missing else []), *_findings(course))
    judged = [each.verdict for each in course.jobs.values()]
    verdict = overall((*judged, *(each.severity for each in findings)))
    if verdict is Verdict.PASS and any(each.main.way is Way.NOT_TOLD for each in course.jobs.values()):
        verdict = Verdict.SKIP
    sections: dict[str, Section] = {JOBS_SECTION: Table(JobRow.columns(), lambda: jobs)}
    return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=JOBS_SECTION)


def job_rows(course: JobCourse, origin: Origin) -> Iterator[JobRow]:
    """What a job did, a row a way, first what it is said to do."""
    main = course.main
    others = sorted((each for each in course.stretches.values() if each is not main), key=lambda each: -each.seconds)
    for stretch in (main, *others):
        explanation = course.explanation if course.explained is stretch.way else None
        yield _row(course, stretch, verdict_of(stretch, explanation), explanation, origin)


def _row(
    course: JobCourse, stretch: TimeOnWay, verdict: Verdict, explanation: Explanation | None, origin: Origin
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
        seen=figures(stretch),
        cause=None if explanation is None else explanation.id,
        cause_seen=None if explanation is None else explanation.evidence,
        advice=None if explanation is None else explanation.advice,
    )


def jobs_now(interval: Interval, course: Course, origin: Origin) -> Iterator[JobRow]:
    """What every job does in one interval, with the cause where it was looked for."""
    for rates, observed in interval.nodes:
        for each in observed:
            of_job = course.jobs[rates.host, each.job.name]
            now = TimeOnWay(each.way, interval.seconds)
            now.add(each, rates.end - rates.begin)
            stretch = of_job.stretches[each.way]
            explanation = of_job.explanation if of_job.explained is each.way else None
            yield _row(of_job, now, verdict_of(stretch, explanation), explanation, origin)


def figures(stretch: TimeOnWay) -> str:
    """'NVLink 0.00, PCIe 27.3 out and 27.1 in GB/s: as much leaves …', means over its intervals."""
    observed = stretch.last
    if observed is None:
        return ""
    seen = observed.seen
    details = [*seen.odd_rails, *seen.idle_gpus, *seen.doubts]
    return f"{rates_in_words(stretch)}: {observed.meaning}" + (f" ({'; '.join(details)})" if details else "")


def rates_in_words(stretch: TimeOnWay) -> str:
    """'NVLink 0.00, PCIe 27.3 out and 27.1 in GB/s'."""
    parts = [f"NVLink {_gb_s(stretch.rate('nvlink_gb_s'))}"]
    parts.append(f"PCIe {_gb_s(stretch.rate('pcie_sent_gb_s'))} out and {_gb_s(stretch.rate('pcie_received_gb_s'))} in")
    if (stretch.rate("network_gb_s") or 0.0) > QUIET_GB_S:
        parts.append(f"NICs {_gb_s(stretch.rate('network_gb_s'))} out")
    return f"{', '.join(parts)} GB/s"


def _findings(course: Course) -> Iterator[Finding]:
    """One finding for all nodes that show the same for the same reason: the first one's, with the names of all."""
    made: list[tuple[JobCourse, Finding]] = []
    direct = {each.name: each.node for each in course.jobs.values() if each.main.way is Way.DIRECT}
    for each in sorted(course.jobs.values(), key=lambda job: list(Way).index(job.main.way)):
        observed = each.main.last
        make = _FINDINGS.get(each.main.way) if each.main.is_steady else _unknown
        if observed is not None and make is not None:
            found = make(each, observed.job)
            if each.main.way is Way.NOT_TOLD and each.name in direct:
                cause = f"on {direct[each.name]} the same job is direct"
                found = replace(found, severity=Verdict.ERROR, cause=cause, next_command=_LOOK_CLOSER)
            made.append((each, found))
    for alike in grouped(made, _reason).values():
        _, first = alike[0]
        nodes = list(dict.fromkeys(each.node for each, _ in alike))
        if len(nodes) == len(alike) > 1:
            more = f"on {nodes[0]}, {first.seen}; the same on {counted(len(nodes) - 1, 'more node')}"
            subject = some_of(_together(alike), _MOST_JOBS)
            yield replace(first, subject=subject, subjects=tuple(nodes), seen=more)
        else:
            yield from (finding for _, finding in alike)
    for (host, device), reason in course.lost.items():
        yield Finding(
            id=_GPU_LOST.id,
            severity=_GPU_LOST.severity or Verdict.FAIL,
            subject=f"{host} {device}",
            seen=reason,
            expected=_GPU_LOST.expected,
            cause=_GPU_LOST.likely,
            next_command=_GPU_LOST.cure,
        )
    for host, reason in course.silences.items():
        yield Finding(
            id=DRIVER_SILENT,
            severity=Verdict.ERROR,
            subject=host,
            seen=reason,
            expected="counters of its GPUs at every interval",
            cause="the driver is wedged, a GPU fell off the bus, or it is busy for longer than an interval",
            next_command="dmesg | grep -i -e xid -e nvrm; gpubench check --quick",
        )


def _reason(made: tuple[JobCourse, Finding]) -> tuple[object, ...]:
    """What is alike where nodes show the same for the same reason; figures and names of nodes differ."""
    course, finding = made
    meaning = "" if course.main.last is None else course.main.last.meaning
    return finding.id, finding.severity, finding.expected, finding.cause, finding.next_command, meaning


def _together(alike: Sequence[tuple[JobCourse, Finding]]) -> list[str]:
    """'python (torch node0:29500) on node0-15 GPU0-7': each job with all its nodes."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for course, _ in alike:
        if course.main.last is not None:
            nodes.setdefault((course.name, course.main.last.job.devices), []).append(course.node)
    return [f"{name} on {compress_names(hosts)} {devices}" for (name, devices), hosts in nodes.items()]


def _not_found(asked: str) -> Finding:
    return Finding(
        id=JOB_NOT_FOUND,
        severity=Verdict.ERROR,
        subject=asked,
        seen="no process of it used a GPU on any node that was watched",
        expected="a job that runs here",
        cause="it has ended, has not begun, or runs on another node; a container may show other pids",
        next_command="gpubench watch --for 3s shows every process that uses a GPU",
    )


def _staged(course: JobCourse, job: RunningJob) -> Finding:
    found, observed = course.explanation, course.main.last
    hop = "" if observed is None else observed.seen.staged_hop
    by = "the loopback or Ethernet" if course.main.way is Way.SOCKETS else "host memory"
    return Finding(
        id=HOST_STAGED,
        severity=course.verdict,
        subject=f"{course.name} on {course.node} {hop}" if hop else _subject(course, job),
        seen=f"its bytes go through {by} for {course.main.seconds:.0f} s: {figures(course.main)}",
        expected=f"NVLinks that carry the bytes {hop}" if hop else _expected(job, course.main.way),
        cause="not known" if found is None else found.evidence,
        next_command=_LOOK_CLOSER if found is None else found.advice,
        subjects=tuple(gpu.device for gpu in job.gpus if not hop or gpu.device in hop.replace(",", "").split()),
    )


def _expected(job: RunningJob, way: Way) -> str:
    if way is Way.SOCKETS and len(job.gpus) < 2:
        return "RDMA ports that carry the bytes between nodes"
    return f"NVLinks that carry the bytes between {job.devices}"


def _unbalanced(course: JobCourse, job: RunningJob) -> Finding:
    return Finding(
        id=RAIL_UNBALANCED,
        severity=course.verdict,
        subject=_subject(course, job),
        seen=figures(course.main),
        expected="rails that carry alike, within 30 %",
        cause="a NIC, a cable or a switch port of the odd rail, or a job that does not use all NICs",
        next_command="gpubench check; gpubench scan names the bad rail of a job of its own",
    )


def _waiting(course: JobCourse, job: RunningJob) -> Finding:
    return Finding(
        id=GPU_WAITED_FOR,
        severity=course.verdict,
        subject=_subject(course, job),
        seen=f"for {course.main.seconds:.0f} s: {figures(course.main)}",
        expected="GPUs of one job that work or wait together",
        cause="its process waits for data, for the CPU or for a file, has ended, or hangs",
        next_command="py-spy dump --pid of the process on that GPU shows where it is",
    )


def _unknown(course: JobCourse, job: RunningJob) -> Finding:
    return Finding(
        id=PATH_UNKNOWN,
        severity=course.verdict,
        subject=_subject(course, job),
        seen=figures(course.main),
        expected="to know which way its bytes go",
        cause=_CANNOT_COUNT
        if course.main.is_steady
        else f"{course.main.way} for {course.main.seconds:.0f} s is no proof",
        next_command=_LOOK_CLOSER,
    )


def _not_told(course: JobCourse, job: RunningJob) -> Finding:
    return replace(
        _unknown(course, job),
        cause="a healthy job shows this too: no counter tells its ways apart",
        next_command="gpubench p2p and gpubench allreduce, while no job runs, measure the way",
    )


_FINDINGS = {
    Way.STAGED: _staged,
    Way.SOCKETS: _staged,
    Way.UNBALANCED: _unbalanced,
    Way.WAITING: _waiting,
    Way.UNKNOWN: _unknown,
    Way.NOT_TOLD: _not_told,
}


def _subject(course: JobCourse, job: RunningJob) -> str:
    return f"{course.name} on {course.node} {job.devices}"


def _gb_s(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
