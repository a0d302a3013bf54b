"""Any command on an allocation or on named hosts, with a real mpirun and a stand-in for srun."""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from gpubench.cli.app import run_command_line
from gpubench.cli.commands.collective import checked
from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.jobs import several_hosts
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.plans import CheckPlan, Targets
from gpubench.jobs.several_hosts import rank_arguments
from gpubench.machine.nvml import Driver, read_driver
from gpubench.model.terms.options import plan_from
from gpubench.ranks.launch import (
    EndedJob,
    Flavour,
    Launcher,
    Silence,
    find_named_hosts,
    mpirun_command,
    read_hostfile,
    read_hosts,
    srun_command,
)
from tests.cli.running import MPI_ENVIRONMENT, PROGRAM, environment, gpubench, without_gpus

ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}


def fake_srun(folder: Path, kinds: str = "MPI plugin types are... none pmi2 pmix pmix_v4") -> str:
    """A srun that notes how it was started, and runs what it should as one task; the PATH that has it first."""
    path = folder / "srun"
    path.write_text(
        f"""#!/bin/bash
if [ "$1" = --mpi=list ]; then echo "{kinds}" >&2; exit 0; fi
echo "$@" > "{folder}/started"
while [ "$1" != gpubench ]; do shift; done
exec {shlex.join(PROGRAM)} "${{@:2}}"
"""
    )
    path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_a_file_of_hosts_is_read_as_mpirun_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# of rack 4\nnode1 slots=8\n\nnode2:4   # by the door\n  node3.example.org\n")
    assert read_hostfile(path) == {"node1": 8, "node2": 4, "node3.example.org": None}
    option = "-oProxyCommand=touch owned"
    for text, said in (
        (option, "is not a host name"),
        (f"node1\n{option}", "is not a host name"),
        ("node1 -oX=1", "is not a host name"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_hostfile(path)
    for text, said in (
        ("", "no host"),
        ("# none\n", "no host"),
        ("-x\n", "'-x' is not a host name"),
        ("a;b\n", "is not a host name"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_hostfile(path)
    with pytest.raises(UsageError, match="missing does not exist"):
        read_hosts(str(tmp_path / "missing"))


def test_hosts_are_named_with_commas_and_a_file_of_that_name_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_hosts("node1, node2:8,10.0.0.3 slots=4") == {"node1": None, "node2": 8, "10.0.0.3": 4}
    (tmp_path / "node1").write_text("n7\nn7\nn8\n")  # As a batch system lists a host once per core
    assert read_hosts("node1") == {"n7": 2, "n8": 1}
    assert read_hosts("a,b,a:2") == {"a": 3, "b": 1}
    for text, said in (
        ("", "without a value"),
        ("a,,b", "'' is not a host name"),
        ("root@a,b", "'root@a' is not a host name"),
        ("a:0", "'a:0' is not a host name"),
    ):
        with pytest.raises(UsageError, match=said):
            read_hosts(text)


def test_every_mpirun_gets_a_rank_a_gpu_and_no_binding() -> None:
    open_mpi = mpirun_command(Launcher("/mpi/mpirun", Flavour.OPEN_MPI), ["a", "b"], 8, ["check", "--quick"])
    assert open_mpi[:12] == [
        *("/mpi/mpirun", "-n", "16", "--host", "a:8,b:8", "--map-by", "ppr:8:node:OVERSUBSCRIBE", "--bind-to", "none"),
        *("-x", "GPUBENCH_DEFAULTS=off", sys.executable),
    ]
    assert open_mpi[-2:] == ["check", "--quick"]
    mpich = mpirun_command(Launcher("mpiexec", Flavour.MPICH), ["a", "b"], 4, ["check"])
    assert mpich[:9] == ["mpiexec", "-n", "8", "-hosts", "a,b", "-ppn", "4", "-bind-to", "none"]


def test_srun_gets_every_node_of_the_allocation_and_the_best_pmi(tmp_path: Path) -> None:
    variables = ALLOCATION | {"PATH": fake_srun(tmp_path)}
    command = srun_command(variables, 8, ["check"])
    assert command[:6] == [
        *(str(tmp_path / "srun"), "--nodes=4", "--ntasks=32", "--ntasks-per-node=8", "--mpi=pmix", "--cpu-bind=none")
    ]
    fake_srun(tmp_path, "none pmi2 pmix_v5")
    assert "--mpi=pmix_v5" in srun_command(variables, 8, ["check"])
    fake_srun(tmp_path, "none")
    with pytest.raises(CouldNotMeasureError, match="srun has no PMI plugin"):
        srun_command(variables, 8, ["check"])
    with pytest.raises(UsageError, match="outside of an allocation"):
        srun_command({"PATH": variables["PATH"]}, 8, ["check"])
    with pytest.raises(CouldNotMeasureError, match="no srun on PATH"):
        srun_command(ALLOCATION | {"PATH": "/nowhere"}, 8, ["check"])


@without_gpus
@pytest.mark.mpi
def test_a_check_of_named_hosts_says_what_it_runs_and_checks_them(tmp_path: Path) -> None:
    if read_driver(os.environ).visible:
        pytest.skip("this machine has GPUs")
    hosts, output = tmp_path / "hosts", tmp_path / "gate.json"
    hosts.write_text("localhost slots=2\n")
    options = ("--profile", "host", "--output", str(output))
    result = gpubench("check", "--hosts", str(hosts), *options, env=environment(**MPI_ENVIRONMENT))
    said = result.stderr.splitlines()[0]
    assert re.match(r"gpubench: \S*mpirun -n 2 --host localhost:2 --map-by ppr:2:node:OVERSUBSCRIBE ", said)
    command = shlex.split(said)
    assert "--hosts" not in command
    assert command[-5:] == ["--profile", "host", "--format", "json", "--no-progress"]
    assert "GPUBENCH_DEFAULTS=off" in command
    document = json.loads(output.read_text())
    assert document["complete"]
    assert document["metadata"]["command"] == ["gpubench", "check", "--hosts", str(hosts), *options]
    assert {row["ranks"] for row in document["rows"]} == {2}
    assert result.returncode == 3
    assert "SKIP: " in result.stdout.splitlines()[-1]


ABSENT = ["no-such-host.invalid", "nor-this-one.invalid"]


@without_gpus
@pytest.mark.mpi
@pytest.mark.skipif(shutil.which("ssh") is None, reason="Open MPI reaches hosts by ssh, which is not here")
@pytest.mark.parametrize("style", [(), ("--exit-style", "nagios"), ("--format", "json")], ids=" ".join)
def test_every_host_that_does_not_answer_is_named_and_the_others_are_judged(
    style: tuple[str, ...], tmp_path: Path
) -> None:
    hosts, output = tmp_path / "hosts", tmp_path / "h.json"
    hosts.write_text("localhost slots=1\n" + "".join(f"{name} slots=1\n" for name in ABSENT))
    options = ("check", "--quick", "--profile", "host", "--hosts", str(hosts), "-o", str(output), *style)
    result = gpubench(*options, env=environment(**MPI_ENVIRONMENT))
    assert result.returncode == 3, result.stderr
    document = json.loads(output.read_text())
    assert document["verdict"] == "ERROR"
    assert document["sentence"].startswith(f"ERROR: {ABSENT[0]}, {ABSENT[1]}: unknown host name. Try: getent hosts ")
    assert [each["subjects"] for each in document["findings"]] == [ABSENT]
    assert document["metadata"]["hosts"][1:] == ABSENT
    nodes = [(row["node"], row["verdict"]) for row in document["verdicts"] if row["scope"] == "node"]
    assert [verdict for _, verdict in nodes] == ["PASS", "ERROR", "ERROR"]
    assert [name for name, _ in nodes[1:]] == ABSENT
    for name in ABSENT:
        assert f"gpubench: {name}: unknown host name" in result.stderr
    if "nagios" in style:
        assert re.fullmatch(rf"GPUBENCH CHECK UNKNOWN - {', '.join(ABSENT)}: .*\n", result.stdout)
    elif "json" in style:
        assert json.loads(result.stdout) == document
    else:
        assert result.stdout.splitlines()[-1] == document["sentence"]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="hosts are asked by ssh, which is not here")
def test_no_ranks_start_if_no_host_answers(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(ABSENT))
    result = gpubench("check", "--hosts", str(hosts), env=environment(**MPI_ENVIRONMENT))
    assert result.returncode == 3
    assert "mpirun" not in result.stderr
    assert "profile" not in result.stdout
    assert result.stdout.splitlines()[-1].startswith(f"ERROR: {ABSENT[0]}, {ABSENT[1]}: unknown host name.")


@pytest.mark.parametrize(
    ("fault", "verdict", "code"), [((), "ERROR", 3), (("--fault", "gpu3:nvlink=9"), "FAIL", 1)], ids=["healthy", "ill"]
)
def test_a_fault_of_a_host_that_answered_decides_over_one_that_did_not(
    fault: tuple[str, ...],
    verdict: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = ("check", "--quick", "--simulate", "hgx-h100-8", *fault)
    told = gpubench(*machine, "--format", "json").stdout
    lost = {"n9": Silence("connection refused", "no ssh server runs there", "ssh n9 true")}
    monkeypatch.setattr(several_hosts, "silent_hosts", lambda *_: lost)
    monkeypatch.setattr(several_hosts, "run_to_its_end", lambda *_: EndedJob(code, told, ()))
    (tmp_path / "hosts").write_text("node0\nn9\n")
    plan = plan_from(CheckPlan, {"quick": True, "hosts": str(tmp_path / "hosts"), "command": "check"})
    assert several_hosts.run_there(plan, plan.targets, ["check"]) == code
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith(f"{verdict} (simulated): ")
    assert "ERROR hosts-gave-no-result: n9" in said
    assert "2 nodes: 1 " in said


@pytest.mark.slow
@without_gpus
@pytest.mark.mpi
def test_several_hosts_are_checked_in_an_exit_style(tmp_path: Path) -> None:
    """Ranks under a launcher each end with a code: the process that started it has one for all."""
    if read_driver(os.environ).visible:
        pytest.skip("this machine has GPUs")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    options = ("check", "--quick", "--profile", "host", "--hosts", str(hosts), "--exit-style", "nagios")
    variables = environment(GPUBENCH_OUTPUT=str(tmp_path / "own.json"), **MPI_ENVIRONMENT)
    result = gpubench(*options, env=variables)
    assert json.loads((tmp_path / "own.json").read_text())["metadata"]["command"][-1] == "nagios"
    assert (result.returncode, result.stdout.split(" - ")[0]) == (0, "GPUBENCH CHECK OK"), result.stderr


def test_what_a_launcher_complains_of_names_the_host() -> None:
    hosts = ["n1", "n2.cluster", "n12", "10.0.0.1"]
    for line, host in (
        ("ssh: Could not resolve hostname n12: Name or service not known", "n12"),
        ("  Remote host:   n2", "n2.cluster"),
        ("srun: error: n1: task 3: Killed", "n1"),
        ("ssh: connect to host 10.0.0.1 port 22: No route to host", "10.0.0.1"),
        ("srun: error: Task launch for StepId=1.0 failed on node n12: Communication connection failure", "n12"),
        ("[proxy:0:1@n2.cluster] HYDU_sock_connect: unable to connect", "n2.cluster"),
    ):
        assert list(find_named_hosts(hosts, ["  Local host:    n1", line])) == [host]
    assert find_named_hosts(hosts, ["version 10.0.0.12 of prterun-n1-7"]) == {}


@pytest.mark.parametrize(
    ("command", "typed", "words"),
    [
        (
            "check --format json",
            "--full --timeout 7.5 --record seen -o a.json -v --hosts a,b",
            "--full --timeout 7.5 --record seen",
        ),
        (
            "allreduce --format jsonl",
            "-b 8 -e 1K -f 2 -c 0 -n 5 -d half,bfloat16 --set NCCL_NTHREADS=64 --no-evidence --slurm",
            "--sizes 8:1K:2 --dtype half,bfloat16 --set NCCL_NTHREADS=64 --iters 5 --no-check --no-evidence",
        ),
        ("p2p --format jsonl", "--pairs 0-1 --pairs 1-0 --no-host --hosts a", "--pairs 0-1 --pairs 1-0 --no-host"),
        ("overlap --format jsonl", "--sizes 64M --ctas own,8 --hosts a", "--sizes 64M --ctas own,8"),
    ],
    ids=lambda text: text.split()[0],
)
def test_the_ranks_of_several_hosts_get_every_option_of_the_measurement(
    command: str, typed: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(plan: Any, targets: Targets, _: object) -> int:
        started.append(rank_arguments(plan, targets.typed))
        return 0

    monkeypatch.setattr(several_hosts, "run_there", start)
    name, form, kind = command.split()
    monkeypatch.setattr(sys, "argv", ["gpubench", name, *typed.split()])
    assert run_command_line(None) == 0
    assert started == [[name, *words.split(), form, kind, "--no-progress"]]


@pytest.mark.parametrize(
    ("visible", "slots", "options", "ranks"),
    [
        *((8, "", {}, 8), (8, ":96", {}, 8), (8, ":2", {}, 2), (0, ":4", {}, 4), (0, "", {}, 1)),
        *((0, "", {"expected_gpus": 4}, 4), (8, "", {"gpus": "0,2-3"}, 3)),
    ],
)
def test_a_host_gets_a_rank_per_gpu_and_no_more_than_its_slots(
    visible: int, slots: str, options: dict[str, object], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_hosts, "read_driver", lambda _: Driver(gpus=visible, visible=visible))
    monkeypatch.setattr(several_hosts, "silent_hosts", lambda *_: {})
    monkeypatch.setenv("NCCL_P2P_LEVEL", "SYS")
    plan = plan_from(CheckPlan, {"hosts": f"a{slots},b{slots}", "command": "check", **options})
    command = several_hosts._start_of(plan, plan.targets).command
    assert command[1:5] == ["-n", str(2 * ranks), "--host", f"a:{ranks},b:{ranks}"]
    assert command[command.index("NCCL_P2P_LEVEL") - 1] == "-x"


def test_rows_that_were_measured_before_a_rank_died_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = gpubench("allreduce", "--simulate", "hgx-h100-8", "--sizes", "1K,1M", "--format", "jsonl").stdout
    cut = "".join(line + "\n" for line in told.splitlines()[:3])
    died = "gpubench: error: rank 3 on b: NCCL timed out"
    monkeypatch.setattr(several_hosts, "silent_hosts", lambda *_: {})
    monkeypatch.setattr(several_hosts, "run_to_its_end", lambda *_: EndedJob(3, f"a banner\n{cut}", (died,)))
    plan = checked(plan_from(CollectivePlan, {"hosts": "a,b", "command": "allreduce"}, "allreduce"))
    assert several_hosts.run_there(plan, plan.targets, ["allreduce"]) == 3
    said = capsys.readouterr().out
    assert re.search(r"^ +1K +[0-9.]+ ", said, re.MULTILINE)
    assert "ERROR hosts-gave-no-result: a, b\n  seen:     rank 3 on b: NCCL timed out\n" in said
    assert said.splitlines()[-1].startswith("ERROR (simulated): the run was cut short")
    monkeypatch.setattr(several_hosts, "run_to_its_end", lambda *_: EndedJob(3, "", (died,)))
    with pytest.raises(CouldNotMeasureError, match="a, b: rank 3 on b: NCCL timed out"):
        several_hosts.run_there(plan, plan.targets, ["allreduce"])


def test_an_allocation_is_checked_by_srun_and_defaults_do_not_start_it_twice(tmp_path: Path) -> None:
    variables = environment(PATH=fake_srun(tmp_path), GPUBENCH_SLURM="1", **ALLOCATION)
    result = gpubench("check", "--quick", "--profile", "host", env=variables)
    started = (tmp_path / "started").read_text().split()
    assert started[:3] == ["--nodes=4", "--ntasks=4", "--ntasks-per-node=1"]
    assert started[-7:] == ["check", "--quick", "--profile", "host", "--format", "json", "--no-progress"]
    assert result.stderr.startswith(f"gpubench: {tmp_path}/srun --nodes=4 ")
    assert result.stdout.splitlines()[0].startswith("gpubench 0.1.0  check  quick")


def test_a_node_of_an_allocation_that_srun_cannot_reach_is_named_alone(tmp_path: Path) -> None:
    """With the words of Slurm 22.05 for a slurmd that is gone."""
    variables = environment(PATH=fake_srun(tmp_path), SLURM_JOB_NODELIST="n[1-3]", **ALLOCATION)
    failed = "Task launch for StepId=1.0 failed on node n3: Communication connection failure"
    scripts = {
        "srun": f'[ "$1" = --mpi=list ] && echo pmix && exit; echo "srun: error: {failed}" >&2; exit 233',
        "scontrol": "printf 'n1\\nn2\\nn3\\n'",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    result = gpubench("check", "--quick", "--profile", "host", "--slurm", env=variables)
    assert result.returncode == 3
    assert "ERROR hosts-gave-no-result: n3\n" in result.stdout
    assert result.stdout.splitlines()[-1] == f"ERROR: n3: srun: error: {failed}. Try: scontrol show node n3"


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    for arguments, said in (
        (("--slurm",), "--slurm outside of an allocation"),
        (("--hosts", str(tmp_path / "none")), "does not exist"),
        (("--slurm", "--simulate", "hgx-h100-8"), "--slurm and --simulate exclude each other"),
        (("--hosts", "a,b", "--slurm"), "--hosts and --slurm exclude each other"),
        (("--hosts", "a,b", "--ranks-per-gpu", "2"), "--hosts and --ranks-per-gpu exclude each other"),
    ):
        variables = {name: value for name, value in environment().items() if not name.startswith("SLURM_")}
        result = gpubench("check", *arguments, env=variables)
        assert (result.returncode, said in result.stderr) == (2, True), result.stderr
    result = gpubench("kv", "--hosts", "a,b")
    assert (result.returncode, "kv --hosts a,b\n  expected: no --hosts, because kv starts" in result.stderr) == (
        2,
        True,
    )
