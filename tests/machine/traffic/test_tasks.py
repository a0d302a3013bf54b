"""Processes by /proc: what makes them one job, what they have set, and what NCCL has in them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpubench.jobs.metadata import recorded_settings
from gpubench.machine import traffic
from gpubench.machine.host import FIRST_PID_NAMESPACE
from gpubench.machine.traffic import Tasks
from tests.fakes.sysfs import Tree

LIBRARY = "7f0000-7f1000 r-xp 00000000 00:00 1    /opt/lib/libnccl.so.2"
SHARED = "7f0000-7f1000 rw-s 00000000 00:00 1    /dev/shm/nccl-6JxS0E (deleted)"


class Processes:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def add(
        self,
        pid: int,
        environment: dict[str, str] | None,
        *,
        parent: int = 1,
        maps: str = "",
        threads: tuple[str, ...] = ("python",),
        cgroup: str = "0::/user.slice",
        started: int = 5,
    ) -> None:
        folder = f"proc/{pid}"
        self.tree.write(f"{folder}/status", f"Name:\tpython\nPPid:\t{parent}\nUid:\t{os.getuid()}\t0\t0\t0")
        self.tree.write(f"{folder}/stat", f"{pid} (py thon) S " + " ".join(["0"] * 18) + f" {started} 0")
        self.tree.write(f"{folder}/cmdline", "/usr/bin/python3\0train.py")
        self.tree.write(f"{folder}/cgroup", cgroup)
        self.tree.write(f"{folder}/maps", maps)
        if environment is not None:
            text = "\0".join(f"{name}={value}" for name, value in environment.items())
            (self.tree.root / folder / "environ").write_text(text)
        for number, name in enumerate(threads):
            self.tree.write(f"{folder}/task/{pid + number}/comm", name)

    def tasks(self) -> Tasks:
        return Tasks("node0", recorded_settings, self.tree.root)


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    made = Processes(Tree(tmp_path))
    made.tree.symlink("proc/self/ns/pid", FIRST_PID_NAMESPACE)
    return made


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "torch h:1"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "h", "TORCHELASTIC_RUN_ID": "r"}, "torchrun r h:?"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "prterun-1"}, "mpirun prterun-1"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_ess_base_jobid": "77"}, "mpirun 77"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "47", "SLURM_STEP_ID": "0"}, "Slurm 47.0"),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "47"}, None),
        ({}, None),
    ],
)
def test_launchers_tell_what_is_one_job(processes: Processes, environment: dict[str, str], key: str | None) -> None:
    processes.add(50, environment)
    (task,) = processes.tasks().read([50])
    assert task.together == (() if key is None else (key,))
    assert (task.name, task.user, task.unread) == ("python3", os.getuid(), "")


def test_loopbacks_of_two_containers_are_not_one(processes: Processes) -> None:
    """Pods of four GPUs each, in which torchrun takes its usual port."""
    address = {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for pid, container in ((50, "a" * 64), (51, "b" * 64)):
        processes.add(pid, address, cgroup=f"0::/docker/{container}")
        processes.add(pid + 10, address | {"MASTER_ADDR": "pod-0.svc"}, cgroup=f"0::/docker/{container}")
    one, other, *between = [each.together[0] for each in processes.tasks().read([50, 51, 60, 61])]
    assert (one, other) == (
        f"torch localhost:29500 in docker {'a' * 12}",
        f"torch localhost:29500 in docker {'b' * 12}",
    )
    assert between == ["torch pod-0.svc:29500"] * 2


def test_children_of_one_python_are_together_and_those_of_a_shell_are_not(processes: Processes) -> None:
    processes.add(40, {})
    processes.add(50, {}, parent=40)
    processes.tree.write("proc/41/cmdline", "/bin/bash")
    processes.add(51, {}, parent=41)
    first, second = processes.tasks().read([50, 51])
    assert (first.together, second.together) == (("children of 40",), ())


def test_settings_are_the_process_s_own_and_never_its_whole_environment(processes: Processes) -> None:
    processes.add(50, {"NCCL_P2P_DISABLE": "1", "SECRET": "x", "NCCL_CONF_FILE": "/etc/own.conf"})
    processes.tree.write("proc/50/root/etc/own.conf", "NCCL_SHM_DISABLE=1")
    processes.tree.write("proc/50/root/etc/nccl.conf", "NCCL_ALGO=Ring\nNCCL_SHM_DISABLE=0")
    (task,) = processes.tasks().read([50])
    assert task.facts is not None
    assert "SECRET" not in task.facts.environment
    assert task.facts.environment["NCCL_P2P_DISABLE"] == "1"
    settings = {name: tuple(value) for name, value in task.facts.nccl_settings.items()}
    assert settings["NCCL_SHM_DISABLE"] == ("1", "/etc/own.conf")
    assert settings["NCCL_ALGO"] == ("Ring", "/etc/nccl.conf")


@pytest.mark.parametrize(
    ("environment", "maps", "threads", "communicators"),
    [
        ({}, LIBRARY, ("python",), False),
        ({}, LIBRARY, ("python", "pt_nccl_watchdg"), True),
        ({}, SHARED, ("python",), True),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "h"}, LIBRARY, ("python",), True),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "", ("python",), False),
    ],
)
def test_what_nccl_has_in_a_process_is_seen_from_outside(
    processes: Processes, environment: dict[str, str], maps: str, threads: tuple[str, ...], communicators: bool
) -> None:
    processes.add(50, environment, maps=maps, threads=threads)
    tasks = processes.tasks()
    assert tasks.read([50])[0].communicators is None
    assert tasks.look_closely([50], 0.0)
    assert tasks.read([50])[0].communicators is communicators
    assert [tasks.look_closely([50], now) for now in (1.0, 2.0, 5.0, 6.0, 10.0, 11.0)] == [
        False,
        True,
        False,
        True,
        False,
        True,
    ]


def test_a_process_of_another_user_is_not_read(processes: Processes) -> None:
    """As the kernel refuses it: the file is there and cannot be opened."""
    processes.add(50, None, cgroup="0::/slurm/uid_0/job_47/step_0/user")
    (task,) = processes.tasks().read([50])
    assert (task.facts, task.communicators) == (None, None)
    assert task.unread.startswith("process 50 belongs to user ")
    assert (task.slurm_job, task.together) == ("47", ("Slurm 47.0",))
    assert not processes.tasks().look_closely([50], 0.0)


def test_a_process_that_is_not_visible_is_said_to_be(processes: Processes) -> None:
    (task,) = processes.tasks().read([50])
    assert task.unread == "process 50 is not visible here"


def test_inside_a_container_a_process_that_uses_no_gpu_is_another_with_that_number(processes: Processes) -> None:
    (processes.tree.root / "proc/self/ns/pid").unlink()
    processes.tree.symlink("proc/self/ns/pid", "pid:[4026532999]")
    processes.add(50, {"NCCL_ALGO": "Ring"}, maps=LIBRARY)
    processes.add(51, {"NCCL_ALGO": "Ring"}, maps="7f0000-7f1000 rw-s 00000000 00:00 1    /dev/nvidiactl")
    hidden, seen = processes.tasks().read([50, 51])
    assert (hidden.unread, hidden.facts) == ("process 50 is not visible here", None)
    assert seen.facts is not None


def test_a_number_that_another_process_has_got_is_read_anew(processes: Processes) -> None:
    processes.add(50, {"NCCL_ALGO": "Ring"})
    tasks = processes.tasks()
    tasks.read([50])
    shutil.rmtree(processes.tree.root / "proc/50")
    processes.add(50, {"NCCL_ALGO": "Tree"}, started=9)
    (task,) = tasks.read([50])
    assert task.facts is not None
    assert task.facts.environment == {"NCCL_ALGO": "Tree"}
    assert tasks.read([]) == ()


def test_a_real_process_is_read_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "sees_all_pids", lambda _root: True)  # also where tests run in a container
    program = "print('ready', flush=True); input()"
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "NCCL_P2P_DISABLE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert started.stdout is not None
        started.stdout.readline()
        tasks = Tasks("node0", recorded_settings)
        (task,) = tasks.read([started.pid])
        assert task.facts is not None
        assert task.facts.environment["NCCL_P2P_DISABLE"] == "1"
        assert tasks.look_closely([started.pid], 0.0)
        assert tasks.tasks()[0].communicators is False
    finally:
        started.kill()
        started.communicate()
