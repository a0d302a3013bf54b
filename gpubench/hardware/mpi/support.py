"""Whether MPI takes memory of GPUs, found out in jobs of their own: an MPI that does not ends its process.

`MPIX_Query_cuda_support` is what Open MPI was built with, and says nothing of the UCX below it. Some take GPU memory in
one operation and crash in the next. So every operation is tried, at a small and a large size, in a child job.
"""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import IO

from gpubench.hardware.launch.interpreter import module_command
from gpubench.hardware.launch.launcher import find_launcher, start, stop
from gpubench.hardware.mpi.trial import SIZES_BYTES
from gpubench.hardware.system_files import printable
from gpubench.model.facts.mpi_support import MpiSupport, OperationTrial, TrialOutcome

_MODULE = "gpubench.hardware.mpi.trial"
_RANKS = 2
_SECONDS_TO_END = 60.0
_SECONDS_TO_ANSWER = 20
_SECONDS_BETWEEN_LOOKS = 0.05
_CORES_A_JOB = 2
_LONGEST_SAID = 200
_MOST_BYTES = 1 << 20

_SIGNAL = re.compile(r"exited on signal (\d+)")
_CRASH = re.compile(r"Segmentation fault|Bus error|address not mapped to object", re.IGNORECASE)
_ERROR = re.compile(r"^.*(?:MPI_ERR_\w+|mpi4py\.MPI\.Exception: .*|\w*Error: .*)$", re.MULTILINE)
_INFO = re.compile(r"^mca:mpi:base:param:mpi_built_with_cuda_support:value:(\w+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TrialCommand:
    """The command line and the environment of the jobs that try operations, each with its name as last argument.

    `info` is the `ompi_info` of the same MPI, None where there is none.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    info: str | None = None

    @classmethod
    def of_launcher(cls, environment: Mapping[str, str] = os.environ) -> "TrialCommand":
        """That of the mpirun which gpubench itself would use. Raises CouldNotMeasureError: there is none."""
        launcher = find_launcher()
        words = [launcher.path, "-n", str(_RANKS), *module_command(_MODULE)]
        info = Path(launcher.path).with_name("ompi_info")
        return cls(words, launcher.environment(environment, ""), str(info) if os.access(info, os.X_OK) else None)


@dataclass(slots=True)
class _TrialJob:
    """A job that tries an operation, and the file that it writes to."""

    operation: str
    output: IO[bytes]
    process: "subprocess.Popen[bytes]"
    began: float

    @classmethod
    def started(cls, operation: str, command: TrialCommand) -> "_TrialJob":
        output = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        process = start([*command.words, operation], command.environment, output)
        return cls(operation, output, process, time.monotonic())

    def is_over(self, timeout_s: float) -> bool:
        return self.process.poll() is not None or time.monotonic() - self.began > timeout_s

    def end(self) -> "_JobEnd":
        late, seconds = self.process.poll() is None, time.monotonic() - self.began
        code = stop(self.process)
        with self.output as output:
            output.seek(0)
            text = output.read(_MOST_BYTES).decode(errors="replace")
        return _JobEnd(list(_objects(text)), text, code, late, seconds)


@dataclass(frozen=True, slots=True)
class _JobEnd:
    """The objects that the first rank wrote, all that was printed, the exit code, and whether it took too long."""

    lines: Sequence[Mapping[str, object]]
    text: str
    code: int
    late: bool
    seconds: float


def read_support(
    operations: Sequence[str],
    command: TrialCommand,
    timeout_s: float = _SECONDS_TO_END,
    completed: Callable[[], object] = lambda: None,
) -> MpiSupport:
    """The support of all these operations, the first of which matters most; jobs run side by side as cores allow.

    A job that has not ended after `timeout_s` hangs. `completed` is called as each job ends.
    """
    began = time.monotonic()
    ends = dict(_all_ends(operations, command, timeout_s, completed))
    first = next((line for end in ends.values() for line in end.lines if "library" in line), {})
    claims = first.get("claims")
    said = claims if isinstance(claims, dict) else {}
    return MpiSupport(
        library=printable(str(first.get("library", "MPI"))),
        asked=operations[0],
        trials=[trial for name in operations for trial in _trials(name, ends[name])],
        claims={str(name): printable(str(value)) for name, value in said.items()} | _info(command.info),
        seconds=time.monotonic() - began,
    )


def _all_ends(
    operations: Sequence[str], command: TrialCommand, timeout_s: float, completed: Callable[[], object]
) -> Iterator[tuple[str, _JobEnd]]:
    waiting, running = list(operations), list[_TrialJob]()
    at_once = max(1, len(os.sched_getaffinity(0)) // _CORES_A_JOB)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_TrialJob.started(waiting.pop(0), command))
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            for job in [each for each in running if each.is_over(timeout_s)]:
                running.remove(job)
                yield job.operation, job.end()
                completed()
    finally:
        for job in running:
            job.end()


def _objects(text: str) -> Iterator[Mapping[str, object]]:
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def _trials(operation: str, end: _JobEnd) -> Iterator[OperationTrial]:
    """Each size: right or wrong where its line is there; the end of the job is that of the first without."""
    counted = (line for line in end.lines if "size_bytes" in line)
    wrong = {line["size_bytes"]: line["wrong"] for line in counted if isinstance(line.get("wrong"), int)}
    badly = _ended_badly(end) if wrong.keys() >= set(SIZES_BYTES) else ""
    told = False
    for size_bytes in SIZES_BYTES:
        if size_bytes in wrong:
            outcome = TrialOutcome.WRONG if wrong[size_bytes] else TrialOutcome.RIGHT
            said = f"{wrong[size_bytes]} wrong elements" if wrong[size_bytes] else badly
        elif told:
            outcome, said = TrialOutcome.UNKNOWN, ""
        else:
            outcome, said = _outcome(end)
            told = True
        yield OperationTrial(
            operation=operation,
            size_bytes=size_bytes,
            outcome=outcome,
            seconds=None if outcome is TrialOutcome.UNKNOWN else end.seconds,
            said=said,
        )


def _ended_badly(end: _JobEnd) -> str:
    """How a job ended that did all sizes, where that was not well; else empty."""
    if end.late:
        return "right, and the job did not end"
    return f"right, and the job ended with exit code {end.code}" if end.code else ""


def _outcome(end: _JobEnd) -> tuple[TrialOutcome, str]:
    """How a job ended that did not finish a size, in its own words where it has some."""
    found = _SIGNAL.search(end.text)
    number = int(found[1]) if found else end.code - 128 if end.code > 128 else -end.code if end.code < 0 else 0
    begun = any("begins" in line for line in end.lines)
    if end.late:
        return TrialOutcome.HUNG, f"no end after {end.seconds:.0f} s"
    if begun and (number or _CRASH.search(end.text)):
        crash = _CRASH.search(end.text)
        return TrialOutcome.CRASHED, ": ".join(filter(None, (_signal(number), crash[0] if crash else "")))
    error = _ERROR.search(end.text)
    words = printable(error[0].strip())[:_LONGEST_SAID] if error else f"exit code {end.code}"
    return (TrialOutcome.REFUSED if begun else TrialOutcome.UNKNOWN), words


def _signal(number: int) -> str:
    if not number:
        return ""
    try:
        return f"signal {number} ({Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _info(program: str | None) -> dict[str, str]:
    """What `ompi_info` says, where there is one."""
    if program is None:
        return {}
    try:
        answer = subprocess.run(
            [program, "--parsable", "--all"], capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = _INFO.search(answer)
    return {"ompi_info": f"mpi_built_with_cuda_support: {found[1]}"} if found else {}
