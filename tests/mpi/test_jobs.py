"""Runs with real ranks, as users start them."""

import csv
import io
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from gpubench.backends.mpi.group import host_name
from gpubench.collectives.record import Collective
from gpubench.collectives.registry import COLLECTIVES
from tests.cli import running
from tests.cli.running import MPI_ENVIRONMENT, PROGRAM, ROOT, broken, environment, gpubench, mpirun, mpirun_command
from tests.formats.schema import VALIDATOR

pytestmark = pytest.mark.mpi

HOST = ("--backend", "host")
SMALL = (*HOST, "--sizes", "1K:64K:4", "--iters", "3")


def all_but_slow(*names: str) -> list[Any]:
    """Return all collectives, with all but these marked slow."""
    return [
        pytest.param(each, id=each.name, marks=() if each.name in names else pytest.mark.slow) for each in COLLECTIVES
    ]


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("collective", all_but_slow("reducescatter"))
def test_every_collective_launches_itself(collective: Collective) -> None:
    result = gpubench(collective.name, *SMALL, "--np", "3", "--format", "csv", "--no-progress")
    assert (result.returncode, result.stderr) == (0, "")
    found = rows(result.stdout)
    assert {row["wrong"] for row in found} == {"0"}
    assert {row["ranks"] for row in found} == {"3"}
    assert len(found) == 4 * (2 if collective.in_place else 1)
    assert all(float(row["time_us"]) > 0 for row in found)


def test_launched_ranks_are_handed_the_plan_and_do_without_what_they_do_not_need(tmp_path: Path) -> None:
    """Without GPUs, modules for paths and presentation would be two thirds of a rank's imports."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'GPUBENCH_CHANNEL' in os.environ:\n"
        "    needless = 'conditions readers.nccl_log simulated backends.nccl.backend '\n"
        "    needless += 'machine.gpus formats.presenter model.facts.snapshot model.paths.topology'\n"
        "    sys.modules |= {'typer': None, 'rich': None, 'pydantic': None}\n"
        "    sys.modules |= {f'gpubench.{each}': None for each in needless.split()}\n"
    )
    arguments = ("allreduce", *SMALL, "--no-progress", "--op", "max", "--in-place", "--format", "json")
    result = running.gpubench(*arguments, env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"))
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["metadata"]["command"] == ["gpubench", *arguments]
    assert {(row["op"], row["placement"], row["iterations"]) for row in document["rows"]} == {("max", "in_place", 3)}
    assert document["verdict"] == "PASS"


@pytest.mark.parametrize(
    "how",
    [
        ("--iters", "auto", "--budget", "0.05"),
        pytest.param(("--mode", "latency", "--iters", "30"), marks=pytest.mark.slow),
    ],
)
def test_rows_say_how_their_times_vary(how: tuple[str, ...]) -> None:
    result = gpubench("allreduce", *HOST, "--sizes", "1K,64K", *how, "--np", "2", "--format", "json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    VALIDATOR.validate(document)
    assert document["metadata"]["options"]["iters"] == ("auto" if "auto" in how else 30)
    for row in document["rows"]:
        if row["mode"] == "latency":
            assert row["iterations"] == 30
            assert 0 < row["p50_us"] <= row["p95_us"] <= row["p99_us"]
            assert row["batch_median_us"] is None
        else:
            assert row["batch_median_us"] > 0
            assert row["ci95_percent"] <= 1 or " %, budget 0.05 s; ±1 % takes about " in row["note"]
            assert row["p50_us"] is None


@pytest.mark.slow
@pytest.mark.parametrize("own_mpirun", [True, False])
def test_a_rank_that_the_others_wait_for_is_named(own_mpirun: bool, tmp_path: Path) -> None:
    """It enters every operation late, so its own times are the shortest."""
    output = tmp_path / "late.json"
    arguments = ("allreduce", *HOST, "--sizes", "1K:16K:4", "--mode", "latency", "--iters", "8", f"--output={output}")
    late = broken("1:late")
    result = mpirun(3, *arguments, env=late) if own_mpirun else gpubench(*arguments, "--np", "3", env=late)
    assert result.returncode == 0, result.stderr
    document = json.loads(output.read_text())
    VALIDATOR.validate(document)
    (finding,) = document["findings"]
    assert (finding["id"], finding["severity"]) == ("straggler", "WARN")
    assert finding["subject"] == f"rank 1 on {host_name()}"
    by_rank = {rank: [row for row in document["rank_times"] if row["rank"] == rank] for rank in range(3)}
    assert all(len(lines) == len(document["rows"]) == 6 for lines in by_rank.values())
    late_us = {rank: median(line["late_us"] for line in lines) for rank, lines in by_rank.items()}
    assert late_us[1] > max(15_000, late_us[0], late_us[2])
    assert "WARN straggler" in result.stdout


@pytest.mark.slow
def test_no_module_is_imported_while_mpi_starts_or_ends(tmp_path: Path) -> None:
    """MPI_Init changes the environment, and a concurrent getenv of a loading library crashes."""
    (tmp_path / "beside.py").write_text(
        "import time; from mpi4py import MPI; begun = MPI.Is_initialized(); time.sleep(0.3); "
        "print('imported beside MPI', begun and not MPI.Is_finalized(), flush=True)"
    )
    script = (
        "from gpubench.backends.mpi import group as mpi; from gpubench.model.facts.environment import LaunchedRank; "
        "mpi.start(LaunchedRank('test', 0, 1), ('beside',)); mpi.finish()"
    )
    command = [mpirun_command(1)[0], "-n", "2", sys.executable, "-c", script]
    paths = environment(**MPI_ENVIRONMENT, PYTHONPATH=os.pathsep.join((str(ROOT), str(tmp_path))))
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=paths, cwd=ROOT)
    assert result.stdout.splitlines() == ["imported beside MPI True"] * 2, result.stderr


@pytest.mark.slow
def test_what_is_imported_beside_a_rank_changes_no_variable() -> None:
    """A concurrent getenv of the rank would crash. nvmlInit's did during NumPy's import."""
    script = (
        "import sys, threading; from gpubench.backends.mpi import group as mpi; "
        "from gpubench.jobs.collective import job; "
        "from gpubench.model.facts.environment import LaunchedRank; changed = []; "
        "sys.addaudithook(lambda event, words: changed.append(words) if event in ('os.putenv', 'os.unsetenv') "
        "and threading.current_thread() is not threading.main_thread() else None); "
        "mpi.start(LaunchedRank('test', 0, 1), job.ON_GPUS + job.ON_HOSTS); mpi.finish(); "
        "print('numpy' in sys.modules, changed)"
    )
    command = [mpirun_command(1)[0], "-n", "1", sys.executable, "-c", script]
    paths = environment(**MPI_ENVIRONMENT, PYTHONPATH=str(ROOT))
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=paths, cwd=ROOT)
    assert result.stdout.splitlines() == ["True []"], result.stderr


@pytest.mark.parametrize("collective", all_but_slow("allreduce"))
def test_every_collective_in_groups_at_once(collective: Collective, tmp_path: Path) -> None:
    output = tmp_path / "groups.json"
    asked = (*SMALL, "--np", "4", "--split", "pairs", "--exit-zero", "--no-progress")
    result = gpubench(collective.name, *asked, f"--output={output}")
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(output.read_text())
    VALIDATOR.validate(document)
    found = [(row["group"], row["ranks"], row["wrong"], row["slowest_rank"] // 2) for row in document["rows"]]
    assert set(found) == {("ranks 0-1", 2, 0, 0), ("ranks 2-3", 2, 0, 1)}
    assert len(found) == 2 * 4 * (2 if collective.in_place else 1)
    assert [line["rank"] for line in document["rank_times"]].count(3) == len(found) / 2
    assert "slowest group     ranks " in result.stdout


@pytest.mark.slow
def test_wrong_data_in_one_group_fail_the_run_under_a_users_own_mpirun(tmp_path: Path) -> None:
    output = tmp_path / "groups.json"
    arguments = ("allreduce", *SMALL, "--split", "2", "--out-of-place", f"--output={output}")
    result = mpirun(4, *arguments, env=broken("3:spoil"))
    assert result.returncode == 1, result.stderr
    document = json.loads(output.read_text())
    assert {row["group"] for row in document["rows"] if row["wrong"]} == {"ranks 2-3"}
    assert [finding["subject"] for finding in document["findings"]] == [f"rank 3 on {host_name()}"]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_type_and_reduction_on_the_host(ranks: int) -> None:
    types = "int8,uint8,int32,int64,float16,float32,float64"
    result = gpubench(
        *("reducescatter", *HOST, "--sizes", "4K", "--iters", "1", "--warmup", "0", "--dtype", types),
        *("--op", "sum,prod,max,min,avg", "--np", str(ranks), "--format", "csv"),
    )
    assert result.returncode == 0, result.stderr
    assert [row["wrong"] for row in rows(result.stdout)] == ["0"] * (7 * 5 * 2)


@pytest.mark.slow
def test_moved_bfloat16_is_fine_and_reduced_is_refused_by_name() -> None:
    moved = gpubench("allgather", *SMALL, "--dtype", "bfloat16", "--format", "csv")
    assert moved.returncode == 0
    reduced = gpubench("allreduce", *SMALL, "--dtype", "bfloat16")
    assert reduced.returncode == 2
    assert "this MPI library cannot reduce it" in reduced.stderr
    assert "Traceback" not in reduced.stderr
    assert reduced.stdout == ""


def test_outputs_hold_the_same_rows(tmp_path: Path) -> None:
    names = [tmp_path / f"result{suffix}" for suffix in (".csv", ".json", ".jsonl", ".txt")]
    arguments = [word for name in names for word in ("--output", str(name))]
    result = gpubench("allreduce", *SMALL, "--format", "json", *arguments)
    assert result.returncode == 0
    document = json.loads(result.stdout)
    VALIDATOR.validate(document)
    assert json.loads(names[1].read_text()) == document
    assert len(rows(names[0].read_text())) == len(document["rows"]) == 8
    assert len(document["rank_times"]) == 8 * 2
    assert len(names[2].read_text().splitlines()) == 8 + 8 * 2 + 2
    assert "PASS: " in names[3].read_text()
    assert document["metadata"]["hosts"] == [host_name()]
    assert document["metadata"]["command"][:2] == ["gpubench", "allreduce"]
    chosen = {name for name in document["metadata"]["environment"] if name.startswith("OMPI_MCA_btl")}
    assert chosen <= os.environ.keys(), "what the launch chose itself is not the user's setting"


@pytest.mark.slow
def test_dropped_sizes_are_named_on_stderr_where_stdout_has_no_room() -> None:
    result = gpubench("allgather", *HOST, "--sizes", "8,1K,512T", "--iters", "1", "--format", "csv")
    assert result.returncode == 0
    assert "not measured: 512T: 3 buffers of that size do not fit, because rank " in result.stderr
    assert "not measured: 8: a rank's share rounds down to 0" in result.stderr
    assert {row["size_bytes"] for row in rows(result.stdout)} == {"1024"}


@pytest.mark.slow
def test_nothing_that_fits_is_an_error() -> None:
    result = gpubench("allreduce", *HOST, "--sizes", "512T")
    assert result.returncode == 3
    assert "no size is left to measure" in result.stderr


@pytest.mark.slow
def test_a_users_own_mpirun_into_a_file_from_a_terminal_holds_no_escape_codes(tmp_path: Path) -> None:
    """Open MPI gives ranks a pty, and this test gives mpirun a pty for all but stdout."""
    outer, inner = pty.openpty()
    with (tmp_path / "out").open("w") as stdout:
        subprocess.run(
            mpirun_command(2, "allreduce", *SMALL, program=PROGRAM),
            stdin=inner,
            stdout=stdout,
            stderr=inner,
            check=True,
            timeout=300,
            env=environment(TERM="xterm") | MPI_ENVIRONMENT,
        )
    os.close(inner)
    os.close(outer)
    text = (tmp_path / "out").read_text()
    assert text.count("PASS: ") == 1
    assert "2 ranks on 1 host" in text
    assert "\x1b" not in text


def test_a_terminal_gets_colours_progress_and_its_own_width() -> None:
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gpubench", "allreduce", *SMALL],
        stdout=inner,
        stderr=inner,
        env=environment(TERM="xterm-256color", COLUMNS="80"),
        cwd=ROOT,
    )
    os.close(inner)
    shown = b""
    while True:
        try:
            data = os.read(outer, 4096)
        except OSError:
            break
        if not data:
            break
        shown += data
    os.close(outer)
    assert process.wait() == 0
    assert b"\x1b[1;32mPASS: " in shown
    assert b"allreduce 64K" in shown
    starting, took_back, rest = shown.partition(b"\r\x1b[K")
    assert (starting, took_back) == (b"starting 2 ranks on this host, for 300 s at most ...", b"\r\x1b[K")
    assert rest.lstrip(b"\x1b[1m").startswith(b"gpubench ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("allreduce", *SMALL, "--np", "3"), "--np 3 under a launcher that started 2 ranks"),
        pytest.param(("alreduce",), "No such command 'alreduce'", marks=pytest.mark.slow),
        pytest.param(("broadcast", *SMALL, "--root", "2"), "a rank from 0 to 1", marks=pytest.mark.slow),
    ],
)
def test_wrong_usage_under_mpirun_is_said_once(arguments: tuple[str, ...], said: str) -> None:
    result = mpirun(2, *arguments)
    assert result.returncode == 2
    assert result.stderr.count(said) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "claims",
    [{"PMI_RANK": "0", "PMI_SIZE": "4"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}],
)
def test_separate_one_rank_jobs_are_refused_with_the_reason(claims: dict[str, str]) -> None:
    result = running.gpubench("allreduce", *SMALL, env=environment(**claims, **MPI_ENVIRONMENT))
    assert result.returncode == 3
    assert "started 4 processes, but in each of them MPI sees a single rank" in result.stderr
    not_first = {name: "1" if name in ("PMI_RANK", "SLURM_PROCID") else value for name, value in claims.items()}
    other = running.gpubench("allreduce", *SMALL, env=environment(**not_first, **MPI_ENVIRONMENT))
    assert (other.returncode, other.stdout, other.stderr) == (3, "", "")


@pytest.mark.slow
def test_inside_a_slurm_allocation_the_job_stays_here() -> None:
    allocation = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOBID": "77",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "nowhere[1-2]",
        "SLURM_JOB_NODELIST": "nowhere[1-2]",
        "SLURM_NTASKS": "16",
        "SLURM_TASKS_PER_NODE": "8(x2)",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_ID": "4294967290",
    }
    result = gpubench("allreduce", *SMALL, env=environment(**allocation))
    assert result.returncode == 0, result.stderr
    assert f"rank 0-1 on {host_name()}" in result.stdout


@pytest.mark.slow
def test_no_mpi_library_is_named() -> None:
    claims = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "MPI4PY_LIBMPI": "/nowhere/libmpi.so.40"}
    result = running.gpubench("allreduce", *SMALL, env=environment(**claims))
    assert result.returncode == 3
    assert "mpi4py cannot load an MPI library" in result.stderr


def test_wrong_data_fail_the_run_and_name_the_rank(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    result = gpubench("allreduce", *SMALL, "--output", str(output), env=broken("1:spoil"))
    assert result.returncode == 1
    assert f"FAIL wrong-data: rank 1 on {host_name()}" in result.stdout
    assert json.loads(output.read_text())["verdict"] == "FAIL"
    assert mpirun(2, "allreduce", *SMALL, env=broken("1:spoil")).returncode == 1


def test_a_rank_that_raises_ends_the_job_at_once_and_is_named(tmp_path: Path) -> None:
    output = tmp_path / "result.csv"
    result = gpubench("allreduce", *SMALL, "--output", str(output), env=broken("1:raise"))
    assert result.returncode == 3
    assert f"rank 1 on {host_name()}: RuntimeError: planted in a test" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(rows(output.read_text())) == 4
    assert "ERROR: the run was cut short" in result.stdout


@pytest.mark.slow
def test_a_rank_that_raises_under_mpirun_is_named_too_and_a_traceback_can_be_had() -> None:
    result = mpirun(2, "allreduce", *SMALL, env=broken("1:raise") | {"GPUBENCH_TRACEBACK": "1"})
    assert result.returncode == 3
    assert f"rank 1 on {host_name()}: RuntimeError: planted in a test" in result.stderr
    assert "Traceback" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_run_keeps_its_rows_and_leaves_no_rank_behind(tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "result.csv"
    marker = f"--output={output}"
    process = subprocess.Popen(
        [*PROGRAM, "allreduce", *SMALL, marker],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=broken("1:stall"),
        cwd=ROOT,
    )
    until(lambda: output.exists() and len(rows(output.read_text())) == 4)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert stderr.splitlines()[-1].startswith("gpubench: interrupted after 4 rows. Try: gpubench allreduce ")
    assert "Traceback" not in stderr
    assert "ERROR: the run was cut short" in stdout
    assert len(rows(output.read_text())) == 4
    until(lambda: not processes_with(marker))  # a watchdog ends after its rank


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_with(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in command.split("\0"):
            found.append(command)
    return found


@pytest.mark.parametrize(
    "format_name", ["table", pytest.param("csv", marks=pytest.mark.slow), pytest.param("jsonl", marks=pytest.mark.slow)]
)
def test_a_closed_pipe_ends_the_run_quietly(format_name: str) -> None:
    options = f"--backend host --sizes 1K:16M --format {format_name} --no-progress"
    command = f"{shlex.join(PROGRAM)} allreduce {options}"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment(),
        cwd=ROOT,
    )
    assert result.returncode == 0
    assert result.stderr == ""


def test_what_ranks_print_reaches_stderr_and_never_the_data() -> None:
    result = gpubench("allreduce", *SMALL, "--format", "csv", env=environment(OMPI_MCA_pml="nonsense"))
    assert result.returncode == 3
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "before any rank started" in result.stderr or " in MPI_Init" in result.stderr
    assert "gpubench: " in result.stderr.partition("gpubench: error")[0]


def test_a_full_disk_ends_the_run_with_one_message(tmp_path: Path) -> None:
    output = tmp_path / "result.csv"
    arguments = ["allreduce", *SMALL, "--format", "csv", "--output", str(output)]
    command = f"{shlex.join([*PROGRAM, *arguments])} > /dev/full"
    variables = environment()
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False, env=variables, cwd=ROOT
    )
    assert result.returncode == 3
    assert "stdout can no longer be written: No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr


def test_what_a_rank_prints_is_passed_on_to_stderr_live() -> None:
    """For example NCCL_DEBUG=INFO, also before the first row."""
    result = gpubench("allreduce", *SMALL, "--format", "csv", env=broken("1:print"))
    assert result.returncode == 0
    assert "gpubench: hello from NCCL" in result.stderr
    assert len(rows(result.stdout)) == 8


@pytest.mark.slow
def test_memory_does_not_grow_from_row_to_row(tmp_path: Path) -> None:
    """At most 15 MB between the first and the last row in addition to the buffers, and 400 MB in total."""
    notes = tmp_path / "notes"
    largest = 8 * 2**20
    arguments = ("allreduce", *HOST, "--sizes", "8,1K,64K,1M,8M", "--iters", "3", "--format", "csv")
    result = gpubench(*arguments, env=broken("1:memory") | {"GPUBENCH_TEST_FILE": str(notes)})
    assert result.returncode == 0, result.stderr
    kilobytes = [int(line.split()[0]) for line in notes.read_text().splitlines()]
    assert len(kilobytes) == len(rows(result.stdout)) + 1  # plus a warm-up row
    # The warm-up has touched both buffers before the first row.
    assert kilobytes[-1] - kilobytes[0] < 15_000
    assert kilobytes[-1] * 1024 - 2 * largest < 400e6


def run_ranks(ranks: int, name: str, *arguments: str) -> None:
    command = mpirun_command(ranks, *arguments, program=(sys.executable, "-m", f"tests.mpi.{name}"))
    result = running.run_mpirun(command, environment(**MPI_ENVIRONMENT))
    assert result.stdout.count("all right") == ranks, result.stdout + result.stderr


@pytest.mark.parametrize("check", ["clocks", "starting_line", "timing", "pieces", "trials"])
def test_a_group_of_ranks(check: str) -> None:
    run_ranks(3, "group_checks", check)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_messages_beyond_two_to_the_31_elements() -> None:
    run_ranks(2, "huge", str(2**31 + 48))


def test_a_killed_rank_is_told_and_its_rows_are_kept(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    result = gpubench("allreduce", *SMALL, "--output", str(output), env=broken("1:kill"))
    assert result.returncode == 3
    assert "rank 1 on " in result.stderr
    # A launcher that is quicker than the watchdog takes the signal along: "was killed or crashed".
    assert "was killed " in result.stderr
    assert "The 4 rows measured before are kept" in result.stderr
    document = json.loads(output.read_text())
    assert (document["complete"], document["verdict"], len(document["rows"])) == (False, "ERROR", 4)


def test_each_number_of_ranks_is_a_job_of_its_own() -> None:
    result = gpubench("allreduce", *HOST, "--np", "1,2", "--sizes", "1K", "--iters", "3", "--format", "json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    VALIDATOR.validate(document)
    assert [row["ranks"] for row in document["rows"]] == [2, 2, 1, 1]
    found = [(row["ranks"], row["gpus"], row["efficiency_percent"], row["reason"]) for row in document["scaling"]]
    copied = "a local copy: one rank has no bus bandwidth (nccl-tests shows 0)"
    assert found == [(1, "CPU ranks", None, copied), (2, "CPU ranks", pytest.approx(100), None)] * 2
    assert {row["wrong"] for row in document["rows"]} == {0}


@pytest.mark.slow
def test_several_numbers_of_ranks_under_mpirun_are_refused() -> None:
    result = mpirun(2, "allreduce", *SMALL, "--np", "1,2")
    assert result.returncode == 2
    assert "expected: one process that starts one job per number of ranks" in result.stderr
