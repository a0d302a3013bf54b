"""How the ends of trial jobs of MPI on GPU memory are read. The jobs are scripts."""

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from gpubench.backends.mpi.backends import TrialCommand, read_support
from gpubench.backends.mpi.trial import SIZES_BYTES
from gpubench.conditions.process import mpi_findings
from gpubench.jobs.collective.metadata import add_mpi_support, nothing_measured
from gpubench.model.facts.process import MpiSupport, TrialOutcome
from gpubench.model.results.backends import MpiTrialRow
from gpubench.model.terms.verdict import Verdict

SMALL, LARGE = SIZES_BYTES

ENDS = {
    "right": "say(begins=1024); say(size_bytes=1024, wrong=0); say(begins=1048576); say(size_bytes=1048576, wrong=0)",
    "wrong": "say(begins=1024); say(size_bytes=1024, wrong=7); say(begins=1048576); say(size_bytes=1048576, wrong=9)",
    "no count": "say(begins=1024); say(size_bytes=1024); die(1)",
    "bad end": "say(begins=1024); say(size_bytes=1024, wrong=0); say(size_bytes=1048576, wrong=0); die(1)",
    "crash": "say(begins=1024); os.kill(os.getpid(), signal.SIGSEGV)",
    "late crash": "say(begins=1024); say(size_bytes=1024, wrong=0); say(begins=1048576); die(139)",
    "error": "say(begins=1024); print('mpi4py.MPI.Exception: MPI_ERR_BUFFER: invalid buffer pointer'); die(16)",
    "hang": "say(begins=1024); time.sleep(600)",
    "no start": "print('ImportError: libmpi.so.40: cannot open shared object file'); die(1)",
}

SCRIPT = """
import json, os, signal, sys, time

def say(**what):
    print(json.dumps(what), flush=True)

def die(code):
    print("{not json", flush=True)
    if code == 139:
        print("mpirun noticed that process rank 0 with PID 7 on node n exited on signal 11 (Segmentation fault).")
    sys.stdout.flush()
    os._exit(code)

say(library="Open MPI v4.1.6", claims={"MPIX_Query_cuda_support": "no", "pml": "ob1\\x1b[31m"})
END
"""


@pytest.fixture
def command(tmp_path: Path) -> TrialCommand:
    lines = [f"if sys.argv[1] == {name!r}:\n{textwrap.indent(end, '    ')}" for name, end in ENDS.items()]
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.replace("END", "\n".join(lines)))
    info = tmp_path / "ompi_info"
    info.write_text("#!/bin/sh\necho mca:mpi:base:param:mpi_built_with_cuda_support:value:false\n")
    info.chmod(0o755)
    return TrialCommand([sys.executable, str(script)], dict(os.environ), str(info))


def outcomes(support: MpiSupport, operation: str) -> list[tuple[TrialOutcome, str]]:
    return [(each.outcome, each.said) for each in support.find_trials(operation)]


def test_every_end_of_a_job_is_told_apart(command: TrialCommand) -> None:
    completed: list[int] = []
    support = read_support(list(ENDS), command, 2.0, lambda: completed.append(1))
    assert len(completed) == len(ENDS)
    assert (support.library, support.asked) == ("Open MPI v4.1.6", "right")
    assert support.claims["MPIX_Query_cuda_support"] == "no"
    assert support.claims["ompi_info"] == "mpi_built_with_cuda_support: false"
    assert "\x1b" not in support.statements
    assert outcomes(support, "right") == [(TrialOutcome.RIGHT, "")] * 2
    assert outcomes(support, "no count") == [(TrialOutcome.REFUSED, "exit code 1"), (TrialOutcome.UNKNOWN, "")]
    assert outcomes(support, "bad end") == [(TrialOutcome.RIGHT, "right, but the job ended with exit code 1")] * 2
    assert outcomes(support, "wrong") == [
        (TrialOutcome.WRONG, "7 wrong elements"),
        (TrialOutcome.WRONG, "9 wrong elements"),
    ]
    assert outcomes(support, "crash") == [(TrialOutcome.CRASHED, "signal 11 (SIGSEGV)"), (TrialOutcome.UNKNOWN, "")]
    assert outcomes(support, "late crash") == [
        (TrialOutcome.RIGHT, ""),
        (TrialOutcome.CRASHED, "signal 11 (SIGSEGV): Segmentation fault"),
    ]
    assert outcomes(support, "error")[0][0] is TrialOutcome.REFUSED
    assert "MPI_ERR_BUFFER: invalid buffer pointer" in outcomes(support, "error")[0][1]
    assert outcomes(support, "hang") == [(TrialOutcome.HUNG, "no end after 2 s"), (TrialOutcome.UNKNOWN, "")]
    assert outcomes(support, "no start")[0][0] is TrialOutcome.UNKNOWN
    assert "libmpi.so.40" in outcomes(support, "no start")[0][1]
    assert support.working == ["right", "bad end"]
    assert support.failing == ["wrong", "no count", "crash", "late crash", "error", "hang"]
    assert not support.works("no start"), "what was not tested is no promise"
    assert support.why_not("right") == ""
    assert support.why_not("late crash") == (
        "late crash of 1M on GPU memory crashed: signal 11 (SIGSEGV): Segmentation fault"
    )
    assert support.why_not("other") == "other was not tested"


def test_an_mpi_that_takes_nothing_fails_and_one_that_takes_what_was_asked_warns(command: TrialCommand) -> None:
    (found,) = mpi_findings(read_support(["crash", "error"], command, 9.0))
    assert (found.id, found.severity) == ("mpi-not-cuda-aware", Verdict.FAIL)
    assert found.seen == "crash of 1K on GPU memory crashed: signal 11 (SIGSEGV); 1 other operation fails too"
    assert "MPIX_Query_cuda_support no" in found.cause
    (partial,) = mpi_findings(read_support(["right", "crash"], command, 9.0))
    assert partial.severity is Verdict.WARN
    assert partial.seen.endswith("; right works")
    assert mpi_findings(read_support(["right"], command, 9.0)) == ()


def test_a_run_without_a_row_is_no_success(command: TrialCommand) -> None:
    support = read_support(["crash"], command, 9.0)
    report = add_mpi_support(nothing_measured(), support)
    assert (report.verdict, report.complete) == (Verdict.FAIL, True)
    assert [each.id for each in report.findings] == ["mpi-not-cuda-aware", "not-measured"]
    rows = report.rows(MpiTrialRow)
    assert [(row.operation, row.size_bytes, row.outcome) for row in rows] == [
        ("crash", SMALL, "crashed"),
        ("crash", LARGE, "not tried"),
    ]
    assert add_mpi_support(report, None) is report
    assert json.dumps([row.to_record() for row in rows])


def test_an_mpi_without_ompi_info_says_nothing_by_it(command: TrialCommand, tmp_path: Path) -> None:
    silent = TrialCommand(command.words, command.environment, None)
    assert "ompi_info" not in read_support(["right"], silent, 9.0).claims
    gone = TrialCommand(command.words, command.environment, str(tmp_path / "none"))
    assert "ompi_info" not in read_support(["right"], gone, 9.0).claims


def test_the_jobs_are_those_of_the_launcher_that_gpubench_uses() -> None:
    command = TrialCommand.of_launcher({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PATH": "/usr/bin"})
    assert command.words[0].endswith("mpirun")
    assert command.words[1:3] == ["-n", "2"]
    assert command.words[-1] == "gpubench.backends.mpi.trial"
    assert "OMPI_COMM_WORLD_RANK" not in command.environment, "else its mpirun would believe that it is a rank"
