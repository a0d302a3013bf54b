"""`gpubench run` as a user types it, around jobs that write logs as NCCL, UCX and PyTorch do."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from gpubench.errors import UsageError
from gpubench.jobs.job_logs import make_logs
from gpubench.ranks.launch import find_launcher
from tests.cli.running import MPI_ENVIRONMENT, PROGRAM, ROOT, SECONDS, environment
from tests.cli.test_watch_hang import four
from tests.fakes.ras import as_json, service

HEALTHY, STAGED = "h200x4-normal", "h200x4-p2p-disabled"
_WRITE = """
import os, pathlib, shutil, socket, sys
logs = sorted(pathlib.Path({logs!r}).iterdir())
def name(variable, number=0):
    text = os.environ[variable].replace("%%", "%")
    return text.replace("%h", socket.gethostname()).replace("%p", str(os.getpid() * 10 + number))
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK"))
for number, log in enumerate(logs if rank is None else [logs[int(rank)]]):
    shutil.copy(log, name("NCCL_DEBUG_FILE", number))
"""
"""A job that writes a recorded log: that of its own rank under a launcher, and otherwise those of all ranks."""


PATHS = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))


def job(log: str = HEALTHY, then: str = "") -> list[str]:
    return [sys.executable, "-c", _WRITE.format(logs=str(ROOT / "tests" / "logs" / log)) + then]


def run(
    *words: str, cwd: Path, env: Mapping[str, str] | None = None, stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PROGRAM, "run", *words],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=SECONDS,
        check=False,
        env={**environment(), "PYTHONPATH": PATHS, **(env or {})},
        cwd=cwd,
    )


def folder_of(done: "subprocess.CompletedProcess[str]") -> Path:
    found = re.search(r"the logs of this job go to (\S+)", done.stderr)
    assert found, done.stderr
    return Path(found[1])


def test_the_job_keeps_its_streams_and_the_answer_follows_its_output(tmp_path: Path) -> None:
    echo = "print(sys.stdin.read().upper(), *sys.argv[1:]); print('said', file=sys.stderr)"
    done = run("--", *job(then=echo), "a b", "--", "--help", cwd=tmp_path, stdin="typed")
    assert done.returncode == 0, done.stderr
    first, rest = done.stdout.split("\n", 1)
    assert first == "TYPED a b -- --help"
    assert rest.startswith("gpubench ")
    assert rest.rstrip().splitlines()[-1].startswith("PASS: ")
    assert "said\n" in done.stderr
    assert folder_of(done).parent == tmp_path


@pytest.mark.parametrize(
    ("log", "own_code", "options", "code", "last"),
    [
        (HEALTHY, 0, (), 0, "PASS: "),
        (STAGED, 0, (), 1, "FAIL: all 4 GPU-to-GPU paths went through host memory"),
        (STAGED, 0, ("--exit-zero",), 0, "FAIL: all 4 GPU-to-GPU paths went through host memory"),
        (STAGED, 7, (), 7, "FAIL: all 4 GPU-to-GPU paths went through host memory"),
        (HEALTHY, 7, ("--exit-zero",), 7, "FAIL: the job on vm: exit code 7"),
    ],
)
def test_a_failed_job_keeps_its_code_and_otherwise_the_answer_decides(
    log: str, own_code: int, options: Sequence[str], code: int, last: str, tmp_path: Path
) -> None:
    done = run(*options, "--", *job(log, f"sys.exit({own_code})"), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stdout.rstrip().splitlines()[-1].startswith(last)


def test_json_on_stdout_is_not_broken_by_the_output_of_the_job(tmp_path: Path) -> None:
    done = run("--json", "-o", "run.csv", "--", *job(STAGED, "print('step 1')"), cwd=tmp_path)
    assert json.loads(done.stdout)["verdict"] == "FAIL"
    assert "step 1\n" in done.stderr
    assert "SHM/direct" in (tmp_path / "run.csv").read_text()


def test_variables_of_the_user_are_kept_and_their_files_are_read(tmp_path: Path) -> None:
    own = tmp_path / "100%" / "own"
    own.mkdir(parents=True)
    (own / "n.before.1.log").write_text("vm:1:1 [0] NCCL INFO of an earlier job")
    os.utime(own / "n.before.1.log", (1, 1))
    variables = {
        "NCCL_DEBUG": "TRACE",
        "NCCL_DEBUG_SUBSYS": "INIT",
        "NCCL_DEBUG_FILE": f"{str(own).replace('%', '%%')}/n.%h.%p.log",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/mine_",
    }
    show = (
        "print({each: os.environ.get(each) for each in (*sys.argv[1:], 'TORCH_FR_DUMP_TEMP_FILE', 'UCX_PROTO_INFO')})"
    )
    done = run("--", *job(STAGED, show), *variables, cwd=tmp_path, env=variables)
    assert done.stdout.startswith(str({**variables, "TORCH_FR_DUMP_TEMP_FILE": None, "UCX_PROTO_INFO": "y"}))
    assert done.returncode == 1
    assert "4 files" in " ".join(done.stdout.split())
    for_containers = (folder_of(done) / ".env").read_text().splitlines()
    assert {"NCCL_DEBUG=TRACE", f"NCCL_DEBUG_FILE={variables['NCCL_DEBUG_FILE']}"} <= {*for_containers}


@pytest.mark.parametrize(("level", "is_raised"), [("WARN", True), ("version", True), ("info", False)])
def test_a_log_level_without_connections_is_raised(level: str, tmp_path: Path, *, is_raised: bool) -> None:
    done = run("--", *job(then="print(os.environ['NCCL_DEBUG'])"), cwd=tmp_path, env={"NCCL_DEBUG": level})
    assert done.stdout.startswith("INFO\n" if is_raised else f"{level}\n")
    assert (f"NCCL_DEBUG={level} logs no connections" in done.stderr) is is_raised


def test_logs_of_ucx_are_moved_into_the_folder(tmp_path: Path) -> None:
    log = ROOT / "tests" / "ucx"
    table = next(path for path in sorted(log.rglob("*")) if path.is_file() and "cuda_ipc" in path.read_text())
    then = f"shutil.copy({str(table)!r}, name('UCX_LOG_FILE')); open(name('UCX_LOG_FILE', 1), 'w').close()"
    done = run("--", *job(then=f"{then}; print(os.environ['UCX_LOG_FILE'])"), cwd=tmp_path)
    file = Path(done.stdout.splitlines()[0])
    assert not list(file.parent.glob(f"{file.name.partition('.')[0]}*"))
    assert [path.suffix for path in folder_of(done).glob("gpubench-run-*")] == [".log"]
    assert "GPU memory that UCX moves" in done.stdout


def test_logs_beyond_the_limit_keep_their_beginning_and_the_newest_lines(tmp_path: Path) -> None:
    logs = make_logs(tmp_path, {}, has_ras=False)
    (tmp_path / "nccl.a.2.log").write_text("short\n")
    with (tmp_path / "nccl.a.1.log").open("w") as writer:  # NCCL keeps its log open, too
        writer.writelines(f"line {number:09}\n" for number in range(2**17))
        writer.flush()
        assert logs.limit_size(2**19)
        assert (tmp_path / "nccl.a.1.log").stat().st_blocks * 512 <= 2**18 + 2**13
        writer.write("the newest line\n")
    logs.collect()
    first, *lines = (tmp_path / "nccl.a.1.log").read_text().splitlines()
    assert (first, lines[-2:]) == ("line 000000000", [f"line {2**17 - 1:09}", "the newest line"])
    assert all(re.fullmatch(r"line \d{9}", line) for line in lines[:-1])
    assert (tmp_path / "nccl.a.2.log").read_text() == "short\n"


def test_logs_below_the_limit_stay_whole(tmp_path: Path) -> None:
    logs = make_logs(tmp_path, {}, has_ras=False)
    text = "".join(f"line {number:09}\n" for number in range(2**15))
    (tmp_path / "nccl.a.1.log").write_text(text)
    assert logs.limit_size(2**20)
    logs.collect()
    assert (tmp_path / "nccl.a.1.log").read_text() == text


NO_PROGRAM = [
    (("no-such-program",), "mistyped", "command -v no-such-program"),
    (("FOO=1", "python", "x.py"), "a variable must come before gpubench", "FOO=1 gpubench run -- python x.py"),
    (("python x.py", "-v"), "quoted as a single word", "gpubench run -- python x.py -v"),
    (("./script.py",), "not executable", "gpubench run -- python ./script.py"),
    (("./script.sh", "-v"), "not executable", "chmod +x ./script.sh"),
    (("./lines", "-v"), "not executable", "gpubench run -- sh ./lines -v"),
    (("script.sh",), "not on PATH", "gpubench run -- sh script.sh"),
]


@pytest.mark.parametrize(("words", "reason", "next_step"), NO_PROGRAM)
def test_a_command_that_cannot_start_is_wrong_usage(
    words: Sequence[str], reason: str, next_step: str, tmp_path: Path
) -> None:
    for name, text in (("script.py", "print()"), ("script.sh", "#!/bin/bash\n"), ("lines", "echo\n")):
        (tmp_path / name).write_text(text)
    done = run("--", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{words[0]} is not a program that can be started" in done.stderr
    assert reason in done.stderr
    assert f"try:      {next_step}\n" in done.stderr
    assert not list(tmp_path.glob("gpubench-run-*"))


@pytest.mark.parametrize(
    ("line", "reason", "next_step"),
    [
        ("echo hi", "", "gpubench run -- sh ./script"),
        ("#! /opt/none/bash -e", "likely:   its first line names '/opt/none/bash'", "ls -l '/opt/none/bash'"),
        ("#!/bin/sh\r", r"likely:   its first line names '/bin/sh\r'", r"ls -l '/bin/sh\r'"),
    ],
)
def test_a_script_whose_interpreter_is_missing_is_wrong_usage(
    line: str, reason: str, next_step: str, tmp_path: Path
) -> None:
    (tmp_path / "script").write_text(f"{line}\n", newline="")
    (tmp_path / "script").chmod(0o755)
    done = run("--", "./script", cwd=tmp_path)
    assert done.returncode == 2
    assert reason in done.stderr
    assert f"try:      {next_step}\n" in done.stderr


def test_options_that_cannot_hold_are_refused_before_the_job_runs(tmp_path: Path) -> None:
    for words, code, seen in (
        (("--logs", ""), 2, "--logs is empty"),
        (("--exit-style", "nagios"), 3, "COMMAND and --exit-style exclude each other"),
        (("--exit-style", "npd"), 2, "COMMAND and --exit-style exclude each other"),
    ):
        done = run(*words, "--", "touch", "ran", cwd=tmp_path)
        assert done.returncode == code
        assert seen in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_a_required_path_is_asserted_for_the_job(tmp_path: Path) -> None:
    for log, code in ((HEALTHY, 0), (STAGED, 1)):
        done = run("--require-path", "p2p", "--", *job(log), cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert ("path-required" in done.stdout) is bool(code)


def test_a_folder_that_cannot_be_written_or_is_not_new_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("--logs", "file/logs", "--", "true", cwd=tmp_path)
    assert (done.returncode, "--logs" in done.stderr, "cannot be written" in done.stderr) == (2, True, True)


def test_logs_of_an_earlier_job_are_not_explained_as_those_of_this_one(tmp_path: Path) -> None:
    first = run("--logs", "logs", "--", *job(), cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    old = {path: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    again = run("--logs", "logs", "-o", "second.json", "--", "touch", "ran", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert "is not empty: nccl." in again.stderr
    assert f"try:      --logs {tmp_path}/logs-2\n" in again.stderr
    assert not (tmp_path / "ran").exists()
    assert old == {path: path.read_bytes() for path in (tmp_path / "logs").iterdir()}


def test_a_folder_without_logs_is_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        assert run("--logs", "logs", "--", "true", cwd=tmp_path).returncode == 3
    assert run("--logs", "logs", "--", *job(), cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(("host", "age_s"), [("other", 3600), (socket.gethostname(), 0)])
def test_a_mark_that_a_killed_run_left_allows_no_old_logs(host: str, age_s: float, tmp_path: Path) -> None:
    (tmp_path / f".running-{host}").touch()
    log = tmp_path / "nccl.log"
    log.touch()
    os.utime(log, (time.time() - age_s,) * 2)
    with pytest.raises(UsageError, match=r"is not empty: nccl\.log"):
        make_logs(tmp_path, {}, has_ras=False)


def test_hosts_that_share_a_folder_are_explained_together(tmp_path: Path) -> None:
    """Another host's gpubench run has just started its part of the job."""
    shared = tmp_path / "shared"
    shared.mkdir()
    *others, last = sorted((ROOT / "tests" / "logs" / HEALTHY).iterdir())
    for path in others:
        (shared / path.name).write_bytes(path.read_bytes())
    (shared / ".running-other").touch()
    copy = f"cp {last} $GPUBENCH_RUN_FOLDER/"
    done = run("--logs", "shared", "--strict", "--", "sh", "-c", copy, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    alone = run("--", "sh", "-c", copy, cwd=tmp_path)
    assert f"copy the logs of other hosts into {folder_of(alone)}, then: gpubench explain" in alone.stderr


@pytest.mark.parametrize(
    ("words", "reason", "next_step"),
    [
        (("env", "-i", "sh", "-c", ":"), "the launcher clears the environment", "set -a; . FOLDER/.env; set +a"),
        (("sh", "-c", ": docker run image"), "a container has its own", "docker run --env-file FOLDER/.env -v FOLDER:"),
        (("sh", "-c", ": mpirun -n 16 x"), "only if -x names it", "mpirun -x NCCL_DEBUG -x NCCL_DEBUG_SUBSYS"),
        (("sh", "-c", ": /usr/bin/srun x"), "SLURM_EXPORT_ENV", "gpubench run -- srun --export=ALL"),
    ],
)
def test_a_job_whose_processes_wrote_no_log_is_not_called_healthy(
    words: Sequence[str], reason: str, next_step: str, tmp_path: Path
) -> None:
    done = run("-o", "result.json", "--", *words, cwd=tmp_path)
    assert done.returncode == 3
    assert json.loads((tmp_path / "result.json").read_text())["verdict"] == "ERROR"
    text = " ".join(done.stdout.split())
    assert re.search(r"processes of the job ran for \d+ s, but no log appeared", text)
    assert reason in text
    assert next_step.replace("FOLDER", str(folder_of(done))) in text
    variables = (folder_of(done) / ".env").read_text().splitlines()
    assert "NCCL_DEBUG=INFO" in variables


def test_a_job_that_fails_before_nccl_starts_leaves_a_result(tmp_path: Path) -> None:
    done = run("-q", "-o", "result.json", "--", "sh", "-c", "exit 7", cwd=tmp_path)
    report = json.loads((tmp_path / "result.json").read_text())
    assert (done.returncode, report["verdict"], report["complete"]) == (7, "ERROR", True)
    assert re.search(r"seen: +exit code 7 after \d+ s, but no log appeared\n", done.stdout)
    assert re.search(r"likely: +it ended before NCCL started \(see its messages above\)", done.stdout)


def test_a_run_inside_a_run_only_starts_its_command(tmp_path: Path) -> None:
    done = run("--", *PROGRAM, "run", "--json", "--", *job(STAGED, "print('once'); sys.exit(4)"), cwd=tmp_path)
    assert done.returncode == 4
    assert done.stdout.count("once\n") == 1
    assert done.stdout.count("FAIL: all 4 GPU-to-GPU paths") == 1
    assert "already runs under gpubench run" in done.stderr
    assert len(list(tmp_path.glob("gpubench-run-*"))) == 1


def test_a_run_below_a_launcher_is_told_to_stand_before_it(tmp_path: Path) -> None:
    done = run("--", "true", cwd=tmp_path, env={"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    assert done.returncode == 2
    assert "gpubench run as one of 2 processes of Open MPI's mpirun" in done.stderr


_COUNT = """
import os, signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: got.append(number))
print("ready", os.getpid(), flush=True)
end = time.monotonic() + 60
while not got and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.5)
print("got", [int(number) for number in got], flush=True)
sys.exit(9)
"""
"""A job that counts its signals and ends with code 9."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start a job that prints a line with its process id once it is ready, and end what is left afterwards."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, **settings: object) -> "subprocess.Popen[str]":
        started.append(
            subprocess.Popen(
                [*PROGRAM, "run", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
                env={**environment(), "PYTHONPATH": PATHS},
                **settings,  # type: ignore[call-overload]
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for(process: "subprocess.Popen[str]", word: str) -> int:
    """Read lines until one begins with the word. Return the number at its end."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith(word):
            return int(line.split()[-1])
    pytest.fail(f"no line begins with {word}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_the_job_once(number: signal.Signals, start: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = start("--", sys.executable, "-c", _COUNT)
    wait_for(process, "ready")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert f"got [{int(number)}]" in output
    assert process.returncode == 9


@pytest.mark.parametrize(
    ("log", "number", "verdict"),
    [
        (HEALTHY, signal.SIGINT, "WARN: the job on vm: interrupted by a signal (exit code 130)"),
        (HEALTHY, signal.SIGTERM, "WARN: the job on vm: interrupted by a signal (exit code 143)"),
        (STAGED, signal.SIGHUP, "FAIL: all 4 GPU-to-GPU paths went through host memory"),
        ("", signal.SIGTERM, "ERROR: the job: interrupted by a signal (exit code 143) after"),
    ],
)
def test_an_interrupted_job_is_never_a_complete_pass(
    log: str, number: signal.Signals, verdict: str, start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    # An interrupt during an import may be swallowed, so the job is ready only after it. Under nohup it ignores SIGHUP.
    usual = "import signal, time; signal.signal(1, signal.SIG_DFL); signal.signal(2, signal.SIG_DFL)"
    then = f"{usual}; print('ready 1', flush=True); time.sleep(60)"
    process = start("-o", "result.json", "--", *(job(log, then) if log else ("sh", "-c", "echo ready 1; sleep 60")))
    wait_for(process, "ready")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    report = json.loads((tmp_path / "result.json").read_text())
    assert process.returncode == 128 + number
    assert report["complete"] is False
    assert report["sentence"].startswith(verdict)
    assert "interrupted" in report["sentence"]
    assert output.rstrip().splitlines()[-1] == report["sentence"]


def test_ctrl_c_on_a_terminal_reaches_the_job_once(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    """A terminal interrupts gpubench and the job, so gpubench must not pass the signal on."""
    leader, terminal = pty.openpty()
    process = start(
        "--", sys.executable, "-c", _COUNT, stdin=terminal, start_new_session=True, preexec_fn=_take_terminal
    )
    wait_for(process, "ready")
    os.write(leader, b"\x03")
    output, _ = process.communicate(timeout=60)
    os.close(leader)
    os.close(terminal)
    assert f"got [{int(signal.SIGINT)}]" in output
    assert process.returncode == 9


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


_DEAF = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(99)"


@pytest.mark.parametrize(
    ("script", "code"),
    [("sleep 99 & echo $!; kill -9 $$", 137), (f"{sys.executable} -c '{_DEAF}' & sleep 2; kill $$", 143)],
)
def test_a_killed_launcher_leaves_no_rank_behind(script: str, code: int, tmp_path: Path) -> None:
    done = run("--", "sh", "-c", script, cwd=tmp_path)
    assert done.returncode == code
    assert not is_running(int(done.stdout.splitlines()[0]))
    assert f"the job ended with exit code {code}" in done.stderr


def test_a_job_that_ends_well_may_leave_a_daemon(tmp_path: Path) -> None:
    done = run("--", "sh", "-c", "sleep 99 >/dev/null 2>&1 & echo $!", cwd=tmp_path)
    pid = int(done.stdout.splitlines()[0])
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)


def test_the_job_is_ended_if_gpubench_is_killed(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = start("--", sys.executable, "-c", _COUNT)
    pid = wait_for(process, "ready")
    process.kill()
    output, _ = process.communicate(timeout=60)
    assert f"got [{int(signal.SIGTERM)}]" in output
    end = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end:  # It closes its output before it has ended
        time.sleep(0.01)
    assert not is_running(pid)


def test_a_rank_that_hangs_is_named_while_the_job_runs(tmp_path: Path) -> None:
    answers = [as_json(four(19)), as_json(four(20, counts={"AllReduce": 19, "Broadcast": 4}))]
    for script, code in (("sleep 3", 0), ("sleep 3; kill $$", 143)):
        with service(answers) as address:
            words = ("--hang", "500ms", "--", "sh", "-c", script)
            done = run(*words, cwd=tmp_path, env={"NCCL_RAS_ADDR": address})
        assert done.stderr.count(" s  rank 2 (10.0.0.1:102): did not join, AllReduce number 20") == 1
        assert done.returncode == (code or 3)
        assert bool(list(folder_of(done).glob("ras-*"))) is bool(code)
        assert ("FAIL: rank 2 (10.0.0.1:102)" in done.stdout) is bool(code)


def test_silence_of_ras_is_not_taken_for_health(tmp_path: Path) -> None:
    done = run(
        "--hang",
        "200ms",
        "--",
        *job(then="import time; time.sleep(1); print(os.environ['NCCL_RAS_ADDR'])"),
        cwd=tmp_path,
    )
    assert re.match(r"localhost:\d+\n", done.stdout)
    assert "--hang: no process of the job answered" in done.stderr


@pytest.mark.mpi
def test_ranks_of_mpirun_write_one_log_each(tmp_path: Path) -> None:
    done = run("--", find_launcher().path, "-n", "4", *job(STAGED), cwd=tmp_path, env=MPI_ENVIRONMENT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(list(folder_of(done).glob("nccl.*"))) == 4
    assert "4 files" in done.stdout


_GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print("sum", int(ones))
dist.destroy_process_group()
"""


def test_processes_of_torchrun_write_one_log_each(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(job(STAGED, _GLOO)[-1])
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run("--", *torchrun, "train.py", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("sum 2\n") == 2
    assert len(list(folder_of(done).glob("nccl.*"))) == 2
