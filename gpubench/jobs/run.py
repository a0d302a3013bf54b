"""Start a job with its logs switched on, and explain them when it ends.

`job_logs` chooses the variables and limits the size of the logs. `ranks.foreground` passes signals on.
"""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from gpubench.errors import DONE, GpubenchError, UsageError
from gpubench.formats.delivery import say, tell
from gpubench.formats.registry import QUIET, TABLE
from gpubench.formats.text.explain import status_line
from gpubench.jobs import explain
from gpubench.jobs.hangs import ask
from gpubench.jobs.job_logs import FOLDER_VARIABLE, JobLogs, make_logs
from gpubench.jobs.plans import ExplainPlan, RunPlan
from gpubench.jobs.runner import check_writable
from gpubench.machine.environment import DEBUG, DEBUG_FILE, DEBUG_SUBSYSTEMS
from gpubench.measure.explain.hangs import RasCourse
from gpubench.measure.explain.report import RANKS_MISSING
from gpubench.model.facts.environment import detect_launcher
from gpubench.model.results.ending import JOB_INTERRUPTED
from gpubench.model.terms.verdict import Cure, Finding, Verdict
from gpubench.ranks.foreground import ForegroundJob

NAME = "run"
SECTIONS = explain.SECTIONS

_SECONDS_BETWEEN_LOOKS = 10.0  # A log that NCCL_DEBUG=TRACE fills grows by about 1 GB in this time


def run(plan: RunPlan, arguments: Sequence[str]) -> int:
    """Run the job, explain its logs, and return the exit code.

    It is the job's own code if the job failed, and otherwise the code of `explain`. Raises GpubenchError if the job
    cannot start, or if it succeeded without writing a log.
    """
    program = _find_program(plan.job)
    outer = os.environ.get(FOLDER_VARIABLE)
    if outer:
        _note(f"this job already runs under gpubench run, which explains it: its logs are in {outer}")
        os.execvpe(program, list(plan.job), dict(os.environ))
    _refuse_under_launcher(plan.job)
    check_writable(plan.presentation.outputs)
    folder = plan.logs or Path(f"gpubench-run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    logs = make_logs(folder, os.environ, has_ras=plan.hang_s is not None)
    if plan.presentation.show_progress:
        _note(f"the logs of this job go to {logs.folder}")
    if os.environ.get(DEBUG) not in (None, "", logs.variables[DEBUG]):
        _note(f"NCCL_DEBUG={os.environ[DEBUG]} logs no connections, so this job uses NCCL_DEBUG=INFO")
    try:
        code, was_stopped = _run_job(plan, program, logs)
    finally:
        logs.collect()
    ending = _interruption(code) if was_stopped else _failure(code) if code else None
    try:
        answer = _explain(plan, arguments, logs, ending)
    except GpubenchError as error:
        if code == DONE:
            raise
        tell(error, sys.stderr)
        answer = error.exit_code
    return code or answer


def _note(text: str) -> None:
    say(f"gpubench: {text}", to=sys.stderr)


def _find_program(job: Sequence[str]) -> str:
    name, rest = job[0], job[1:]
    found = shutil.which(name)
    if found is not None:
        return found
    variable, equals, _ = name.partition("=")
    words = ["gpubench", NAME, "--"]
    if equals and variable.isidentifier():
        reason, words = "a variable must come before gpubench, not after it", [name, *words, *rest]
    elif " " in name.strip():
        reason, words = "the whole command is quoted as a single word", [*words, *name.split(), *rest]
    elif Path(name).is_file():
        reason = "the file is not executable" if "/" in name else "the file is not on PATH"
        call = ["python", name] if name.endswith(".py") else ["sh", name]
        words = ["chmod", "+x", name] if "/" in name and _interpreter(name) else [*words, *call, *rest]
    else:
        reason, words = "the name is mistyped, or an environment or module is not loaded", ["command", "-v", name]
    raise UsageError(
        f"{name} is not a program that can be started",
        expected="the job as you start it without gpubench: gpubench run -- torchrun --nproc-per-node 8 train.py",
        reason=reason,
        next_step=" ".join(words),
    )


def _interpreter(program: str) -> str:
    """Return the interpreter that the first line of a script names, or an empty text."""
    try:
        with Path(program).open("rb") as file:
            line = file.readline(256).decode(errors="replace").rstrip("\n")
    except OSError:
        return ""
    return line.removeprefix("#!").strip(" ").partition(" ")[0] if line.startswith("#!") else ""


def _refuse_under_launcher(job: Sequence[str]) -> None:
    launch = detect_launcher(os.environ)
    if launch is not None and launch.size > 1:
        raise UsageError(
            f"gpubench {NAME} as one of {launch.size} processes of {launch.launcher}",
            expected="one gpubench run before the launcher, so that its variables reach all ranks",
            next_step=f"gpubench {NAME} -- LAUNCHER ... {job[0]} ...",
        )


def _run_job(plan: RunPlan, program: str, logs: JobLogs) -> tuple[int, bool]:
    """Run the job to its end. Return its exit code, and whether a signal from the user ended it."""
    is_data = plan.presentation.format not in (TABLE, QUIET)  # The job's output would break the data on stdout
    sys.stdout.flush()
    environment = {**os.environ, **logs.variables}
    try:
        job = ForegroundJob(program, plan.job, environment, stdout=2 if is_data else 1)
    except OSError as error:
        interpreter = _interpreter(program)
        raise UsageError(
            f"{program} cannot be started: {error.strerror}",
            expected="a program, or a script whose first line names its interpreter: #!/bin/sh",
            reason=f"its first line names {interpreter!r}, which cannot be started" if interpreter else "",
            next_step=f"ls -l {interpreter!r}" if interpreter else f"gpubench {NAME} -- sh {' '.join(plan.job)}",
        ) from None
    watcher = HangWatcher(logs, plan.hang_s) if plan.hang_s is not None else None
    can_limit = True
    seconds = min(_SECONDS_BETWEEN_LOOKS, plan.hang_s or _SECONDS_BETWEEN_LOOKS)
    while (code := job.wait(seconds)) is None:
        if can_limit and not logs.limit_size():
            can_limit = False
            _note(f"the size of the logs cannot be limited on this file system: df -h {logs.folder}")
        if watcher is not None:
            watcher.look()
    job.end()
    if watcher is not None:
        watcher.end(code)
    if code:
        _note(f"the job ended with exit code {code}. The findings of explain follow")
    return code, job.was_signalled


class HangWatcher:
    """Asks NCCL's RAS every `interval_s` seconds which rank keeps the others of its job waiting."""

    def __init__(self, logs: JobLogs, interval_s: float) -> None:
        self._folder, self._environment = logs.folder, {**os.environ, **logs.variables}
        self._interval_s = interval_s
        self._course = RasCourse()
        self._begun = self._asked = time.monotonic()
        self._reported = ""

    def look(self) -> None:
        """Ask if it is time, and report the ranks that have not moved since the last answer. Report a change only."""
        now = time.monotonic()
        if now - self._asked < self._interval_s:
            return
        self._asked = now
        try:
            answer = ask(self._folder, self._course.asked + 1, self._environment)
        except GpubenchError:  # No process has started NCCL, or all have ended
            return
        self._course.add(answer, time.time())
        hangs = self._course.hangs()
        names = "; ".join(f"{hang.ranks} {hang.reason}" for hang in hangs)
        if hangs and names != self._reported:
            _note(f"after {status_line(now - self._begun, None, hangs).strip()}")
        self._reported = names

    def end(self, code: int) -> None:
        """Delete the answers of a job that succeeded, because its last ones may show a short wait as a hang."""
        if not self._course.asked:
            _note("--hang: no process of the job answered; NCCL's RAS needs NCCL 2.24 and NCCL_RAS_ENABLE not 0")
        for path in self._folder.glob("ras-*") if code == DONE else ():
            path.unlink(missing_ok=True)


def _explain(plan: RunPlan, arguments: Sequence[str], logs: JobLogs, ending: Finding | None) -> int:
    """Explain the logs, and return the exit code of `explain`. `ending` is set if the job did not end well."""
    names = logs.to_read()
    shown = ExplainPlan(logs=names, require_path=plan.require_path, strict=plan.strict, presentation=plan.presentation)
    presenter = explain.present(shown, arguments, ending if names else _without_logs(plan.job, logs, ending))
    report = presenter.report
    if report is not None and any(finding.id == RANKS_MISSING for finding in report.findings):
        reason, next_step = _way_to_processes(plan.job, logs)
        _note(f"some ranks left no log in {logs.folder}. Likely: {reason}")
        _note(f"try: {next_step}")
        _note(f"try: copy the logs of other hosts into {logs.folder}, then: gpubench explain {logs.folder}")
    return presenter.exit_code


def _failure(code: int) -> Finding:
    return Finding(
        id="job-failed",
        severity=Verdict.FAIL,
        subject="the job",
        seen=f"exit code {code}",
        expected="exit code 0",
        cause="the program or its launcher failed, which may not be visible in library logs",
        cure=Cure(comment="The last lines that the job printed show more."),
    )


def _interruption(code: int) -> Finding:
    return Finding(
        id=JOB_INTERRUPTED,
        severity=Verdict.WARN,
        subject="the job",
        seen=f"interrupted by a signal (exit code {code})",
        expected="a job that ends by itself",
        cause="Ctrl-C, a time limit or another process. The report covers the time before",
        cure=Cure(comment="Let the job run to its end."),
    )


def _without_logs(job: Sequence[str], logs: JobLogs, ending: Finding | None) -> Finding:
    """Return the finding for a job without logs. A job that did not end well probably ended before NCCL started."""
    reason, next_step = _way_to_processes(job, logs)
    seconds, expected = time.time() - logs.started, f"a log of every process that uses NCCL or UCX, in {logs.folder}"
    if ending is None:
        seen = f"processes of the job ran for {seconds:.0f} s, but no log appeared"
        cure = Cure.of(
            next_step, comment="It sets the variables where the processes start. Hosts must share the folder."
        )
        return Finding("no-logs", Verdict.ERROR, "the job", seen, expected, reason, cure)
    seen = f"{ending.seen} after {seconds:.0f} s, but no log appeared"
    cause = f"it ended before NCCL started (see its messages above), or {reason}"
    return replace(ending, severity=Verdict.ERROR, seen=seen, expected=expected, cause=cause)


_CONTAINER = "--env-file {file} -v {folder}:{folder} ..."
_WAYS = {
    "docker": ("a container has its own environment and folders", f"docker run {_CONTAINER}"),
    "podman": ("a container has its own environment and folders", f"podman run {_CONTAINER}"),
    "srun": ("SLURM_EXPORT_ENV or --export removes variables", "gpubench run -- srun --export=ALL ..."),
    "sudo": ("sudo clears the environment", f"sudo --preserve-env={DEBUG},{DEBUG_SUBSYSTEMS},{DEBUG_FILE} ..."),
    "ssh": ("ssh passes no variables on", 'ssh HOST "env $(xargs < {file}) COMMAND"'),
    "ray": ("Ray's workers have the environment of `ray start`", "set -a; . {file}; set +a; ray start ..."),
    **dict.fromkeys(
        ("mpirun", "mpiexec"),
        (
            "Open MPI passes a variable to other hosts only if -x names it",
            f"mpirun -x {DEBUG} -x {DEBUG_SUBSYSTEMS} -x {DEBUG_FILE} ...",
        ),
    ),
}
"""Why the variables may not reach the processes, and how to pass them on, by launcher. The innermost comes first."""

_ANY_LAUNCHER = (
    "the launcher clears the environment (env -i), a host lacks this folder, or the job uses no NCCL (one GPU, Gloo)",
    "set -a; . {file}; set +a",
)


def _way_to_processes(job: Sequence[str], logs: JobLogs) -> tuple[str, str]:
    words = {Path(word).name for text in job for word in text.split()}
    reason, next_step = next((way for name, way in _WAYS.items() if name in words), _ANY_LAUNCHER)
    file, folder = shlex.quote(str(logs.variables_file)), shlex.quote(str(logs.folder))
    return reason, next_step.format(file=file, folder=folder)
