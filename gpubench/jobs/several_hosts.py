"""Start a check on the nodes of a Slurm allocation or on the hosts in a file, and present its report.

The first rank prints its report as JSON on stdout. Any other output of launchers is forwarded to stderr.
"""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from json import JSONDecodeError, JSONDecoder
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from gpubench.errors import WRONG_USAGE, UsageError
from gpubench.formats.delivery import say
from gpubench.jobs.check import NAME
from gpubench.jobs.metadata import build_metadata, recorded_settings
from gpubench.jobs.plans import CheckPlan
from gpubench.jobs.runner import presenting
from gpubench.machine.nvml import read_driver
from gpubench.model.facts.environment import detect_launcher
from gpubench.model.results.report import Report, Table, VerdictRow
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import shorten
from gpubench.model.terms.verdict import Cure, Finding, Origin, Verdict, worst_verdict
from gpubench.ranks.launch import (
    EndedJob,
    Silence,
    allocated_hosts,
    find_launcher,
    find_named_hosts,
    mpirun_command,
    read_hostfile,
    run_to_its_end,
    silent_hosts,
    srun_command,
)
from gpubench.readers.results.gpubench_json import StoredRun, parse_stored

if TYPE_CHECKING:
    from gpubench.formats.presenter import Presenter

NO_RESULT = "hosts-gave-no-result"  # Finding if a launcher could not start the check on its hosts, or if ranks died
_FOR_RANKS = ("--format", "json", "--no-progress")


def run_there(plan: CheckPlan, arguments: Sequence[str], for_ranks: Sequence[str]) -> int:
    """Start `gpubench` with the arguments `for_ranks`, by srun or by mpirun on the hosts in a file. Return the exit
    code.

    Hosts without a report get the verdict ERROR. Raises GpubenchError if there are no hosts, no allocation or no
    launcher.
    """
    launch, hosts = detect_launcher(os.environ), None if plan.slurm else plan.hosts
    if launch is not None and launch.size > 1:
        raise UsageError(
            f"{'--slurm' if hosts is None else '--hosts'} under {launch.launcher}",
            expected="one process, which starts the ranks",
            next_step=launch.advice_without_launcher,
        )
    start = _start_of(plan, [*for_ranks, *_FOR_RANKS])
    for host, silence in start.silent.items():
        say(f"gpubench: {host}: {silence.seen}", to=sys.stderr)
    expected = f"an answer from every host ({len(start.answering)} of {len(start.hosts)} answered)"
    lost = tuple(_findings_of(start.silent, expected))
    with presenting(plan.presentation) as presenter:
        if not start.answering:
            return _present_loss(plan, presenter, arguments, start.hosts, lost)
        say(f"gpubench: {shlex.join(start.command)}", to=sys.stderr)
        job = run_to_its_end(start.command, start.environment, partial(say, to=sys.stderr))
        stored = _report_in(job.stdout)
        if stored is None:
            lost = (*lost, *_findings_of_job(plan, start.answering, job))
            return _present_loss(plan, presenter, arguments, start.hosts, lost)
        metadata = replace(stored.metadata, command=["gpubench", *arguments])
        report = replace(stored.report, sentence="") if plan.presentation.exit_style else stored.report
        if lost:
            metadata = replace(metadata, hosts=[*metadata.hosts, *start.silent])
            report = _add_lost_hosts(report, lost, start.silent)
        presenter.begin(metadata, ())
        presenter.end(report)
    return presenter.exit_code


class _Start(NamedTuple):
    """The hosts of a check, the hosts that do not respond, and the command that starts ranks on the other hosts."""

    hosts: Sequence[str]
    silent: Mapping[str, Silence]
    command: Sequence[str]
    environment: Mapping[str, str]

    @property
    def answering(self) -> list[str]:
        return [host for host in self.hosts if host not in self.silent]


def _start_of(plan: CheckPlan, words: Sequence[str]) -> _Start:
    ranks = plan.expected_gpus or read_driver(os.environ).visible
    if plan.slurm or plan.hosts is None:
        return _Start(allocated_hosts(os.environ), {}, srun_command(os.environ, ranks or 1, words), dict(os.environ))
    room, mpirun = read_hostfile(plan.hosts), find_launcher()
    ranks = ranks or min((slots for slots in room.values() if slots is not None), default=1)
    environment = mpirun.host_environment(os.environ)
    start = _Start(list(room), silent_hosts(list(room), environment), (), environment)
    return start._replace(command=mpirun_command(mpirun, start.answering, ranks, words))


def _add_lost_hosts(report: Report, lost: Sequence[Finding], hosts: Iterable[str]) -> Report:
    """Add hosts that did not respond to the report, as nodes with the verdict ERROR."""
    rows = [
        VerdictRow(
            scope="node", node=host, subject=host, verdict=Verdict.ERROR, findings=(NO_RESULT,), origin=Origin.MEASURED
        )
        for host in hosts
    ]
    verdicts = Table.group_by_section({VerdictRow: [*report.rows(VerdictRow), *rows]})
    return replace(
        report,
        verdict=worst_verdict((report.verdict, Verdict.ERROR)),
        findings=(*report.findings, *lost),
        sections={**report.sections, **verdicts},
        sentence="",
    )


def _report_in(stdout: str) -> StoredRun | None:
    """Parse the report of the first rank, or return None if there is none. Launchers may print text before and
    after it.
    """
    start = stdout.find('{\n  "schema_version"')
    if start < 0:
        return None
    try:
        _, end = JSONDecoder().raw_decode(stdout, start)
    except JSONDecodeError:
        return None
    return parse_stored(stdout[start:end], "the report of the first rank")


def _findings_of_job(plan: CheckPlan, hosts: Sequence[str], job: EndedJob) -> Iterator[Finding]:
    """Yield findings for the hosts that the launcher names in its errors. If it names none, yield findings for all
    hosts.
    """
    printed = job.stdout.splitlines()
    for line in printed:
        say(line, to=sys.stderr)
    ended = f"the launcher ended with exit code {job.exit_code} and no report"
    above = "what the launcher and the ranks printed stands above"
    if job.exit_code == WRONG_USAGE:
        raise UsageError(f"the ranks refuse what they are asked for: {ended}", reason=above)
    cause = "a host is down, its name is not known here, or ssh to it asks for a password"
    named = find_named_hosts(hosts, [*job.stderr, *printed])
    look = "scontrol show node {host}" if plan.slurm else "ssh {host} true"
    silent = {host: Silence(said, cause, look.format(host=host)) for host, said in named.items()}
    everywhere = {host: Silence(ended, above, look.format(host=host)) for host in hosts}
    yield from _findings_of(silent or everywhere, "ranks that start on every host, and a report of the first")


def _findings_of(silent: Mapping[str, Silence], expected: str) -> Iterator[Finding]:
    """Yield findings for hosts without a result. Hosts with the same reason share one finding."""
    by_reason: dict[str, list[str]] = {}
    for host, silence in silent.items():
        by_reason.setdefault(silence.seen, []).append(host)
    for seen, hosts in by_reason.items():
        first = silent[hosts[0]]
        yield Finding(
            id=NO_RESULT,
            severity=Verdict.ERROR,
            subject=shorten(hosts),
            seen=seen,
            expected=expected,
            cause=first.cause,
            cure=Cure.of(first.command),
            subjects=tuple(hosts),
            places=tuple(map(DevicePlace, hosts)),
        )


def _present_loss(
    plan: CheckPlan,
    presenter: "Presenter",
    arguments: Sequence[str],
    hosts: Sequence[str],
    findings: Sequence[Finding],
) -> int:
    """Present a report that has only findings, because no host returned a result. Return the exit code."""
    metadata = build_metadata(
        arguments,
        NAME,
        origin=Origin.MEASURED,
        hosts=list(hosts),
        environment=recorded_settings(os.environ),
        options={"depth": plan.depth.value, "strict": plan.strict, "timeout_s": plan.timeout_s},
    )
    presenter.begin(metadata, ())
    presenter.end(Report(verdict=Verdict.ERROR, complete=True, findings=tuple(findings)))
    return presenter.exit_code
