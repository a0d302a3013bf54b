"""How gpubench detects its launcher, and starts itself again."""

import os
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from gpubench.errors import CouldNotMeasureError
from gpubench.model.facts.environment import LaunchedRank, detect_launcher
from gpubench.ranks import launch
from gpubench.ranks.channel import RankWatch
from gpubench.ranks.launch import Flavour, Launcher, find_launcher
from tests.cli.running import MPI_ENVIRONMENT, ROOT, mpirun_command


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, ("Open MPI's mpirun", 3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, ("Open MPI's mpirun", 0, 1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("a PMI launcher (mpiexec or srun)", 1, 2)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0"}, ("srun", 5, 8)),
        # A batch script inside an allocation of eight tasks is no rank.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),
        # A shell opened by `srun --pty` or by salloc's interactive step is none either.
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "4294967290"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("a PMI launcher (mpiexec or srun)", 0, 1)),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"PMI_RANK": "", "PMI_SIZE": "x"}, None),
    ],
)
def test_launchers_are_recognised(environment: dict[str, str], expected: tuple[str, int, int] | None) -> None:
    assert detect_launcher(environment) == (LaunchedRank(*expected) if expected else None)


def fake_mpirun(directory: Path, answer: str) -> Path:
    path = directory / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("answer", "flavour"),
    [
        ("mpirun (Open MPI) 4.1.6", Flavour.OPEN_MPI),
        ("mpirun (Open MPI) 5.0.11", Flavour.OPEN_MPI),
        ("HYDRA build details: Version: 4.2.0", Flavour.MPICH),
    ],
)
def test_mpirun_on_path_is_found_and_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, flavour: Flavour
) -> None:
    path = fake_mpirun(tmp_path, answer)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path / "nowhere"))
    assert find_launcher(str(tmp_path)) == Launcher(str(path), flavour)


def test_mpirun_beside_this_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, elsewhere = tmp_path / "venv", tmp_path / "site"
    beside.mkdir()
    elsewhere.mkdir()
    expected = fake_mpirun(beside, "mpirun (Open MPI) 5.0.11")
    fake_mpirun(elsewhere, "HYDRA")
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(beside))
    assert find_launcher(str(elsewhere)).path == str(expected)


def test_no_mpirun_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(CouldNotMeasureError, match="no mpirun") as caught:
        find_launcher(str(tmp_path))
    assert "gpubench-cluster[local]" in caught.value.next_step


def test_an_unknown_mpirun_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpirun(tmp_path, "something else")
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(CouldNotMeasureError, match="answered 'something else'"):
        find_launcher("")
    (tmp_path / "mpirun").write_text("not a program")
    with pytest.raises(CouldNotMeasureError, match="mpirun --version answered"):
        find_launcher("")


def test_the_job_stays_on_this_host_and_keeps_the_users_settings() -> None:
    outer = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "1",
        "PBS_NODEFILE": "/nodes",
        "PMIX_RANK": "0",
        "OMPI_MCA_ess": "env",
        "OMPI_MCA_orte_hnp_uri": "1;tcp://10.0.0.1:5",
        "NCCL_ALGO": "Ring",
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_plm_rsh_agent": "sh",
        "PMIX_MCA_gds": "hash",
    }
    inner = Launcher("mpirun", Flavour.OPEN_MPI).environment(outer, "/tmp/channel")
    assert not set(inner) & {"SLURM_JOB_ID", "PBS_NODEFILE", "PMIX_RANK", "OMPI_MCA_ess", "OMPI_MCA_orte_hnp_uri"}
    assert (inner["OMPI_MCA_plm_rsh_agent"], inner["PMIX_MCA_gds"]) == ("sh", "hash")
    assert inner["NCCL_ALGO"] == "Ring"
    assert inner["OMPI_MCA_btl"] == "self,tcp"
    assert inner["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert inner["GPUBENCH_CHANNEL"] == "/tmp/channel"
    assert "OMPI_MCA_btl" not in inner["GPUBENCH_SETTINGS"]
    assert "OMPI_ALLOW_RUN_AS_ROOT" in inner["GPUBENCH_SETTINGS"]


def test_mpi_chooses_what_carries_messages_where_these_are_measured_or_the_user_chose() -> None:
    mpirun = Launcher("mpirun", Flavour.OPEN_MPI)
    assert "OMPI_MCA_pml" not in mpirun.environment({}, "c")
    agreeing = mpirun.environment({}, "c", measures_mpi=False)
    assert (agreeing["OMPI_MCA_pml"], agreeing["OMPI_MCA_btl_vader_single_copy_mechanism"]) == ("ob1", "none")
    assert {"OMPI_MCA_pml", "HWLOC_COMPONENTS"} <= set(agreeing["GPUBENCH_SETTINGS"].split(","))
    for name, value in [("OMPI_MCA_pml", "ucx"), ("OMPI_MCA_mtl", "ofi"), ("OMPI_MCA_btl", "self,tcp")]:
        inner = mpirun.environment({name: value, "HWLOC_COMPONENTS": "-x86"}, "c", measures_mpi=False)
        assert inner[name] == value
        assert inner["HWLOC_COMPONENTS"] == "-x86"
        assert "OMPI_MCA_btl_vader_single_copy_mechanism" not in inner
        assert name == "OMPI_MCA_pml" or "OMPI_MCA_pml" not in inner


@pytest.mark.mpi
def test_ranks_that_only_agree_by_mpi_start_and_end(tmp_path: Path) -> None:
    """The real mpirun accepts all of these settings."""
    program = tmp_path / "rank.py"
    program.write_text("from mpi4py import MPI\nassert MPI.COMM_WORLD.allreduce(1) == 2\n")
    environment = find_launcher().environment(os.environ, "", measures_mpi=False)
    job = subprocess.run(
        [find_launcher().path, "-n", "2", sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (job.returncode, job.stderr) == (0, "")


def test_mpich_is_given_no_open_mpi_settings_and_no_flags() -> None:
    mpich = Launcher("/opt/mpirun", Flavour.MPICH)
    assert not [name for name in mpich.environment({}, "c") if name.startswith("OMPI")]
    started = ["/opt/mpirun", "-n", "4", sys.executable, "-P", "-m", "gpubench", "allreduce"]
    assert mpich.command(4, ["allreduce"]) == started


def test_a_job_that_ignores_sigterm_is_killed_with_its_children() -> None:
    script = "trap '' TERM; sleep 300 & echo $!; wait; wait; sleep 300"
    job = launch.start(["bash", "-c", script], dict(os.environ))
    assert job.stdout is not None
    child = int(job.stdout.readline())
    assert launch.stop(job, seconds_to_end=0.2) == -signal.SIGKILL
    job.stdout.close()
    wait_until_gone(child)


def test_a_launcher_that_outlives_its_ranks_is_noticed() -> None:
    job = launch.start([sys.executable, "-c", OUTLIVES], dict(os.environ))
    assert job.stdout is not None
    watch = RankWatch(job, seconds_to_follow=0.1)
    assert not watch.ended()
    rank = int(job.stdout.readline())
    assert not watch.ended()
    os.kill(rank, signal.SIGKILL)
    assert job.stdout.readline() == b"it is gone\n"
    while not watch.ended():
        time.sleep(0.02)
    assert job.poll() is None
    launch.stop(job)
    assert watch.ended()
    job.stdout.close()


OUTLIVES = """
import subprocess, time
rank = subprocess.Popen(["sleep", "300"])
print(rank.pid, flush=True)
rank.wait()
print("it is gone", flush=True)
time.sleep(300)
"""


def test_stopping_a_job_that_is_over_returns_its_code() -> None:
    job = launch.start(["sh", "-c", "exit 7"], dict(os.environ))
    job.communicate()
    assert launch.stop(job) == 7


def test_a_job_dies_with_the_process_that_started_it() -> None:
    """The middle process starts a job and is killed. Nothing may be left."""
    program = (
        "import os, sys, time\n"
        "from gpubench.ranks import launch\n"
        "job = launch.start(['sleep', '300'], dict(os.environ))\n"
        "print(job.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    middle = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert middle.stdout is not None
    pid = int(middle.stdout.readline())
    middle.kill()
    middle.wait()
    middle.stdout.close()
    wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    """Wait until the process is gone or a zombie. The test's time limit ends the wait."""
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] in "ZX":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.01)


@pytest.mark.mpi
def test_a_rank_may_start_ranks_of_its_own_without_the_launchers_variables() -> None:
    """They inherit the setting that the user gave to the outer mpirun."""
    script = (
        "import os, subprocess, sys\n"
        "from gpubench.model.facts.environment import detect_launcher, strip_launcher\n"
        "inner = strip_launcher(os.environ)\n"
        "assert detect_launcher(os.environ) and not detect_launcher(inner), sorted(inner)\n"
        'show = \'import os; print(os.environ["OMPI_COMM_WORLD_SIZE"], os.environ["OMPI_MCA_coll"])\'\n'
        "sys.exit(subprocess.call([sys.argv[1], '-n', '2', sys.executable, '-c', show], env=inner))\n"
    )
    mpirun = mpirun_command(1)[0]
    environment = dict(os.environ) | MPI_ENVIRONMENT | {"OMPI_MCA_coll": "^hcoll", "PYTHONPATH": str(ROOT)}
    command = [mpirun, "-n", "1", sys.executable, "-c", script, mpirun]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["2 ^hcoll", "2 ^hcoll"]
