"""Start the ranks of a command on named hosts or on the nodes of a Slurm allocation, and present their report.

The first rank prints its report as JSON on stdout. Any other output of launchers is forwarded to stderr.
"""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from json import JSONDecodeError, JSONDecoder
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from gpubench.errors import WRONG_USAGE, CouldNotMeasureError, UsageError
from gpubench.formats.delivery import say
from gpubench.formats.registry import Presentation
from gpubench.jobs.metadata import build_metadata, recorded_settings
from gpubench.jobs.plans import Targets
from gpubench.jobs.runner import presenting
from gpubench.machine.nvml import read_driver
from gpubench.model.facts.environment import detect_launcher, performance_variables, refuse_several_ranks
from gpubench.model.results.report import Report, Table, VerdictRow
from gpubench.model.terms.commands import find_command
from gpubench.model.terms.options import options_of
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import group_by, shorten
from gpubench.model.terms.verdict import Cure, Finding, Origin, Verdict, worst_verdict
from gpubench.ranks.launch import (
    EndedJob,
    Silence,
    allocated_hosts,
    find_launcher,
    find_named_hosts,
    mpirun_command,
    run_to_its_end,
    silent_hosts,
    srun_command,
)
from gpubench.readers.results.gpubench_json import StoredRun, parse_stored

if TYPE_CHECKING:
    from gpubench.formats.presenter import Presenter

NO_RESULT = "hosts-gave-no-result"  # Finding if a launcher could not start ranks on its hosts, or if ranks died


def run_there(plan: Any, targets: Targets, arguments: Sequence[str]) -> int:
    """Start the ranks of a plan by srun, or by mpirun on named hosts. Return the exit code.

    Hosts without a report get the verdict ERROR. Raises GpubenchError if there are no hosts, no allocation or no
    launcher.
    """
    option = "--slurm" if targets.slurm else "--hosts"
    refuse_several_ranks(detect_launcher(os.environ), option, "one process that starts the ranks")
    start = _start_of(plan, targets)
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
        if stored is None or not stored.report.complete:
            lost = (*lost, *_findings_of_job(start.answering, job, by_slurm=targets.slurm))
        if stored is None:
            return _present_loss(plan, presenter, arguments, start.hosts, lost)
        metadata = replace(stored.metadata, command=["gpubench", *arguments])
        report = replace(stored.report, sentence="") if plan.presentation.exit_style else stored.report
        if lost:
            metadata = replace(metadata, hosts=[*metadata.hosts, *start.silent])
            report = _add_lost_hosts(report, lost, start.silent)
        presenter.begin(metadata, stored.columns)
        for row in stored.rows:
            presenter.row(row)
        presenter.end(report)
    return presenter.exit_code


def rank_arguments(plan: Any, typed: Mapping[str, Any]) -> list[str]:
    """Return the command line of the ranks: all options except those for output and for the choice of hosts."""
    here = {"hosts", "slurm", *(option.field for option in options_of(Presentation))}
    words = [str(typed["command"])]
    for option in options_of(type(plan)):
        if option.field in here or not option.is_asked(typed):
            continue
        value = typed[option.field]
        if isinstance(value, bool):
            words.append(option.name if value else option.name_when_off)
        else:
            for text in value if isinstance(value, (list, tuple)) else [value]:
                words += [option.name, str(text)]
    streams = find_command(typed["command"], typed["command"]).streamed_section
    return [*words, "--format", "jsonl" if streams else "json", "--no-progress"]


_OWN_ERROR, _JSON_LINE = "gpubench: error: ", '{"kind": '


class _Start(NamedTuple):
    """The hosts of a job, the hosts that do not respond, and the command that starts ranks on the other hosts."""

    hosts: Sequence[str]
    silent: Mapping[str, Silence]
    command: Sequence[str]
    environment: Mapping[str, str]

    @property
    def answering(self) -> list[str]:
        return [host for host in self.hosts if host not in self.silent]


def _start_of(plan: Any, targets: Targets) -> _Start:
    words, room = rank_arguments(plan, targets.typed), targets.hosts or {}
    slots = min((slots for slots in room.values() if slots is not None), default=None)
    visible = read_driver(os.environ).visible
    asked = len(targets.gpus or ()) or getattr(plan, "expected_gpus", None)
    ranks = asked or min(filter(None, (visible, slots)), default=1)
    if targets.slurm:
        return _Start(allocated_hosts(os.environ), {}, srun_command(os.environ, ranks, words), dict(os.environ))
    mpirun = find_launcher()
    environment = mpirun.host_environment(os.environ)
    start = _Start(list(room), silent_hosts(list(room), environment), (), environment)
    variables = performance_variables(os.environ)  # Without them, ranks on other hosts would measure other settings
    return start._replace(command=mpirun_command(mpirun, start.answering, ranks, words, variables))


def _add_lost_hosts(report: Report, lost: Sequence[Finding], hosts: Iterable[str]) -> Report:
    """Add findings to the report. If it judges nodes, hosts that did not respond get the verdict ERROR."""
    rows = [
        VerdictRow(
            scope="node", node=host, subject=host, verdict=Verdict.ERROR, findings=(NO_RESULT,), origin=Origin.MEASURED
        )
        for host in hosts
    ]
    judged = report.rows(VerdictRow)
    verdicts = Table.group_by_section({VerdictRow: [*judged, *rows]} if judged else {})
    return replace(
        report,
        verdict=worst_verdict((report.verdict, Verdict.ERROR)),
        findings=(*report.findings, *lost),
        sections={**report.sections, **verdicts},
        sentence="",
    )


def _report_in(stdout: str) -> StoredRun | None:
    """Parse the report from the first rank, or return None if there is none. Launchers may print text before and
    after it.
    """
    lines = [line for line in stdout.splitlines() if line.startswith(_JSON_LINE)]
    start = stdout.find('{\n  "schema_version"')
    if lines:
        return parse_stored("\n".join([*lines, ""]), "the report from the first rank")
    if start < 0:
        return None
    try:
        _, end = JSONDecoder().raw_decode(stdout, start)
    except JSONDecodeError:
        return None
    return parse_stored(stdout[start:end], "the report from the first rank")


def _findings_of_job(hosts: Sequence[str], job: EndedJob, *, by_slurm: bool) -> Iterator[Finding]:
    """Yield findings for the hosts that the launcher names in its errors. If it names none, yield findings for all
    hosts.
    """
    printed = job.stdout.splitlines()
    for line in printed:
        if not line.startswith(_JSON_LINE):
            say(line, to=sys.stderr)
    ended = f"the launcher ended with exit code {job.exit_code} and no report"
    above = "see the output of the launcher and the ranks above"
    if job.exit_code == WRONG_USAGE:
        raise UsageError(f"the ranks refuse the options: {ended}", reason=above)
    error = next((line for line in job.stderr if line.startswith(_OWN_ERROR)), None)
    if error is not None:  # A rank started and failed
        failed = Silence(error.removeprefix(_OWN_ERROR), above, "")
        yield from _findings_of(dict.fromkeys(hosts, failed), "a report from the first rank")
        return
    cause = "a host is down, its name is not known here, or ssh to it asks for a password"
    named = find_named_hosts(hosts, [*job.stderr, *printed])
    look = "scontrol show node {host}" if by_slurm else "ssh {host} true"
    silent = {host: Silence(said, cause, look.format(host=host)) for host, said in named.items()}
    everywhere = {host: Silence(ended, above, look.format(host=host)) for host in hosts}
    yield from _findings_of(silent or everywhere, "ranks that start on every host, and a report from the first rank")


def _findings_of(silent: Mapping[str, Silence], expected: str) -> Iterator[Finding]:
    """Yield findings for hosts without a result. Hosts with the same reason share one finding."""
    for seen, hosts in group_by(silent, lambda host: silent[host].seen).items():
        first = silent[hosts[0]]
        yield Finding(
            id=NO_RESULT,
            severity=Verdict.ERROR,
            subject=shorten(hosts),
            seen=seen,
            expected=expected,
            cause=first.cause,
            cure=Cure.of(*filter(None, [first.command])),
            subjects=tuple(hosts),
            places=tuple(map(DevicePlace, hosts)),
        )


def _present_loss(
    plan: Any,
    presenter: "Presenter",
    arguments: Sequence[str],
    hosts: Sequence[str],
    findings: Sequence[Finding],
) -> int:
    """Present a check that has only findings, because no host returned a result. Return the exit code.

    Raises CouldNotMeasureError with the first finding for every other command, which has nothing to show.
    """
    command, first = plan.targets.typed["command"], findings[0]
    if command != "check":
        raise CouldNotMeasureError(
            f"{first.subject}: {first.seen}",
            expected=first.expected,
            reason=first.cause or "",
            next_step=first.next_command,
        )
    metadata = build_metadata(
        arguments,
        command,
        origin=Origin.MEASURED,
        hosts=list(hosts),
        environment=recorded_settings(os.environ),
        options={"depth": plan.depth.value, "strict": plan.strict, "timeout_s": plan.timeout_s},
    )
    presenter.begin(metadata, ())
    presenter.end(Report(verdict=Verdict.ERROR, complete=True, findings=tuple(findings)))
    return presenter.exit_code
