"""Check the nodes of an allocation, or of a file of hosts, in one command that starts their ranks.

The first rank sends its report as JSON. It is presented here, in all formats, to the files and in the exit style that
were asked for; what launchers print beside it is no part of it.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from json import JSONDecodeError, JSONDecoder
from typing import TYPE_CHECKING

from gpubench.errors import WRONG_USAGE, UsageError
from gpubench.formats.delivery import say
from gpubench.hardware.launch import (
    EndedJob,
    find_launcher,
    hosts_of,
    mpirun_command,
    named_in,
    run_to_its_end,
    srun_command,
)
from gpubench.hardware.node.nvml import read_driver
from gpubench.jobs.check import NAME
from gpubench.jobs.metadata import metadata_of, recorded_settings
from gpubench.jobs.outputs import presenting
from gpubench.jobs.plans import CheckPlan
from gpubench.model.facts.environment import launched_by
from gpubench.model.results.report import Report
from gpubench.model.terms.units import some_of
from gpubench.model.terms.verdict import Finding, Origin, Verdict
from gpubench.readers.results.gpubench_json import StoredRun, stored_of

if TYPE_CHECKING:
    from gpubench.formats.presenter import Presenter

NO_RESULT = "hosts-gave-no-result"  # A launcher could not start the check on its hosts, or ranks died
_FOR_RANKS = ("--format", "json", "--no-progress")
_ALLOCATION = "SLURM_JOB_NODELIST"


def run_there(plan: CheckPlan, arguments: Sequence[str], for_ranks: Sequence[str]) -> int:
    """Start `gpubench` with the arguments `for_ranks` by srun, or mpirun on named hosts; present its report.

    Returns the exit code; hosts without a report are an ERROR. Raises GpubenchError: hosts, allocation or launcher
    missing.
    """
    launch, hosts = launched_by(os.environ), None if plan.slurm else plan.hosts
    if launch is not None and launch.size > 1:
        raise UsageError(
            f"{'--slurm' if hosts is None else '--hosts'} under {launch.launcher}",
            expected="one process, which starts the ranks",
            next_step=launch.without_it,
        )
    ranks, words = plan.expected_gpus or read_driver(os.environ).visible, [*for_ranks, *_FOR_RANKS]
    names = [os.environ.get(_ALLOCATION, "the allocation")]
    if hosts is None:
        command, environment = srun_command(os.environ, ranks or 1, words), dict(os.environ)
    else:
        room, mpirun = hosts_of(hosts), find_launcher()
        names = list(room)
        ranks = ranks or min((slots for slots in room.values() if slots is not None), default=1)
        command, environment = mpirun_command(mpirun, names, ranks, words), mpirun.on_hosts(os.environ)
    with presenting(plan.presentation) as presenter:
        say(f"gpubench: {shlex.join(command)}", to=sys.stderr)
        job = run_to_its_end(command, environment, partial(say, to=sys.stderr))
        stored = _report_in(job.stdout)
        if stored is None:
            return _without_report(plan, presenter, arguments, names, job)
        presenter.begin(replace(stored.metadata, command=["gpubench", *arguments]), ())
        presenter.end(replace(stored.report, sentence="") if plan.presentation.exit_style else stored.report)
    return presenter.exit_code


def _report_in(stdout: str) -> StoredRun | None:
    """The report of the first rank, behind and before which a launcher may have printed something; None without one."""
    start = stdout.find('{\n  "schema_version"')
    if start < 0:
        return None
    try:
        _, end = JSONDecoder().raw_decode(stdout, start)
    except JSONDecodeError:
        return None
    return stored_of(stdout[start:end], "the report of the first rank")


def _without_report(
    plan: CheckPlan, presenter: "Presenter", arguments: Sequence[str], hosts: Sequence[str], job: EndedJob
) -> int:
    printed = job.stdout.splitlines()
    for line in printed:
        say(line, to=sys.stderr)
    ended = f"the launcher ended with exit code {job.exit_code} and no report"
    above = "what the launcher and the ranks printed stands above"
    if job.exit_code == WRONG_USAGE:
        raise UsageError(f"the ranks refuse what they are asked for: {ended}", reason=above)
    named = named_in(hosts, [*job.stderr, *printed])
    subjects = tuple(named) or tuple(hosts)
    finding = Finding(
        id=NO_RESULT,
        severity=Verdict.ERROR,
        subject=some_of(subjects),
        seen=next(iter(named.values()), ended),
        expected="ranks that start on every host, and a report of the first",
        cause="a host is down, its name is not known here, or ssh to it asks for a password" if named else above,
        next_command=f"ssh {subjects[0]} true",
        subjects=subjects,
    )
    metadata = metadata_of(
        arguments,
        NAME,
        origin=Origin.MEASURED,
        hosts=list(hosts),
        environment=recorded_settings(os.environ),
        options={"depth": plan.depth.value, "strict": plan.strict, "timeout_s": plan.timeout_s},
    )
    presenter.begin(metadata, ())
    presenter.end(Report(verdict=Verdict.ERROR, complete=True, findings=(finding,)))
    return presenter.exit_code
