"""Collectives on machines that do not exist."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app, typer_command
from gpubench.cli.process import COMMANDS
from gpubench.conditions import nvlink
from gpubench.measure.check.health import collective_measurements
from gpubench.model.paths import nodes
from gpubench.model.paths.wiring import Wiring
from gpubench.model.terms.commands import Command
from tests.cli.running import environment, gpubench, mpirun
from tests.formats.schema import validate


def rows(*arguments: str) -> list[dict[str, str]]:
    result = gpubench(*arguments, "--format", "csv")
    assert result.returncode == ("--fault" in arguments), result.stderr
    return list(csv.DictReader(io.StringIO(result.stdout)))


@pytest.mark.parametrize(
    ("machine", "seen", "cure"),
    [
        ("host", "allreduce on host, which has no GPU", "--simulate hgx-h100-8"),
        ("dgx-spark", "allreduce on one GPU of dgx-spark", "--simulate 'dgx-spark*2'"),
    ],
)
def test_a_machine_with_too_few_gpus_is_refused_with_one_that_has_enough(machine: str, seen: str, cure: str) -> None:
    result = gpubench("allreduce", "--simulate", machine)
    assert result.returncode == 2
    assert result.stderr.splitlines()[0].endswith(seen)
    assert result.stderr.splitlines()[-1].endswith(cure)


def test_the_facts_of_nodes_that_are_alike_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective of 512 nodes took three times as long when each of them was judged again."""
    counted: Counter[str] = Counter()
    for owner, name in ((nodes, "node_traits"), (nvlink, "_denied"), (Wiring, "refusal")):
        monkeypatch.setattr(owner, name, counting(getattr(owner, name), counted, name))

    def calls(*words: str) -> dict[str, int]:
        counted.clear()
        CliRunner().invoke(app, ["allreduce", "--sizes", "1G", "--no-progress", *words], catch_exceptions=False)
        return dict(counted)

    few, many = (calls("--simulate", f"hgx-h100-8*{number}") for number in (2, 32))
    assert few == many
    odd = calls("--simulate", "hgx-h100-8*32", "--fault", "node20.gpu3:nvlink=12")
    assert odd["_denied"] > few["_denied"], "and a node that is not like the others is judged by itself"


def counting(function: Callable[..., object], counted: Counter[str], name: str) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        counted[name] += 1
        return function(*arguments)

    return call


def test_every_row_says_that_it_is_simulated() -> None:
    found = rows("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1M:1G:32")
    assert len(found) == 3 * 2
    for row in found:
        assert (row["origin"], row["backend"], row["verified"], row["wrong"]) == ("simulated", "simulated", "no", "")
        assert row["verdict"] == "PASS"
        assert (row["ranks"], row["nodes"]) == ("4", "1")


def test_the_table_says_so_too() -> None:
    result = gpubench("allgather", "--simulate", "hgx-h200-4", "--sizes", "1M")
    assert result.returncode == 0
    assert "(SIMULATED)" in result.stdout
    assert "a model from profile hgx-h200-4, nothing was measured" in result.stdout
    assert "PASS (simulated): " in result.stdout


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    arguments = ("alltoall", "--simulate", "hgx-h100-8*2", "--sizes", "1M,64M")
    assert rows(*arguments) == rows(*arguments)
    assert rows(*arguments) != rows(*arguments, "--seed", "7")


def test_a_fault_slows_the_collective_down() -> None:
    healthy = rows("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1G")
    faulty = rows("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1G", "--fault", "gpu1:nvlink=9")
    staged = rows("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1G", "--fault", "link0-1:staged=yes")
    for before, half, none in zip(healthy, faulty, staged, strict=True):
        assert 1.5 < float(half["time_us"]) / float(before["time_us"]) < 2.5
        assert float(none["time_us"]) / float(before["time_us"]) > 5
        assert half["slowest_rank"] == "1"


def test_a_staged_link_is_said_to_be_simulated_and_fails() -> None:
    arguments = ("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1G", "--fault", "link0-1:staged=yes")
    result = gpubench(*arguments, "--format", "json")
    document = json.loads(result.stdout)
    validate(document)
    assert (result.returncode, document["verdict"]) == (1, "FAIL")
    assert [(row["origin"], row["pairs"], row["cause"]) for row in document["fallback"]] == [
        ("simulated", ["0 → 1", "1 → 0"], "staged-despite-grant")
    ]
    assert {row["origin"] for row in document["evidence"]} == {"simulated"}
    assert "fallback (simulated): HOST-STAGED: ranks 0 → 1, 1 → 0 through host memory" in result.stderr
    healthy = gpubench("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1G", "--strict", "--format", "json")
    assert (healthy.returncode, healthy.stderr, json.loads(healthy.stdout)["fallback"]) == (0, "", [])


def test_the_document_validates_and_names_profile_and_source() -> None:
    arguments = ("reduce", "--simulate", "hgx-a100-8*40", "--sizes", "8,1M", "--root", "9", "--format", "json")
    result = gpubench(*arguments)
    document = json.loads(result.stdout)
    validate(document)
    metadata = document["metadata"]
    assert metadata["profile"]["name"] == "hgx-a100-8"
    assert metadata["source"] == "--simulate hgx-a100-8*40"
    assert len(metadata["ranks"]) == 320
    assert {row["root"] for row in document["rows"]} == {9}


def test_a_thousand_ranks_are_one_line() -> None:
    result = gpubench("allreduce", "--simulate", "hgx-h100-8*128", "--sizes", "1G")
    assert "rank 0-1023 on 128 hosts: node0-127: NVIDIA H100 80GB HBM3" in result.stdout
    assert len(result.stdout.splitlines()) < 20


def test_ranks_may_be_fewer() -> None:
    assert {row["ranks"] for row in rows("sendrecv", "--simulate", "hgx-h100-8*2", "--np", "4", "--sizes", "1M")} == {
        "4"
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--simulate", "hgx-h200-4/1"], "allreduce on one GPU of hgx-h200-4/1"),
        (["--simulate", "dgx-spark"], "dgx-spark*2"),
        (["--simulate", "hgx-h200-4", "--np", "5"], "at most 4"),
        (["--simulate", "hgx-h100-8*2", "--np", "3"], "the same number of ranks on every node"),
        (["--simulate", "hgx-h200-4", "--backend", "host"], "--simulate and --backend exclude each other"),
        (["--simulate", "hgx-h200-4", "--graph", "3"], "--graph needs GPUs"),
        (["--simulate", "hgx-h200-4", "--fault", "gpu9:nvlink=1"], "gpu9"),
        (["--simulate", "nothing"], "no profile is called 'nothing'"),
        (["--fault", "gpu0:lost=yes"], "without --simulate"),
    ],
)
def test_wrong_usage_is_one_clear_message(arguments: list[str], said: str) -> None:
    result = gpubench("allreduce", *arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_launcher_is_told_that_it_is_not_needed() -> None:
    result = mpirun(2, "allreduce", "--simulate", "hgx-h200-4", env=environment())
    assert result.returncode == 2
    assert (result.stderr + result.stdout).count("run the same command without the launcher") == 1


def test_a_header_in_full_is_asked_for_by_a_letter() -> None:
    short, full = (
        gpubench(*("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1K"), *more).stdout.splitlines()
        for more in ((), ("-v",))
    )
    assert "  rank 0-3 on node0: GPU 0-3, NVIDIA H200" in short
    assert [line for line in full if line.startswith("  rank ")] == [
        f"  rank {rank} on node0: GPU {rank} 0000:00:0{rank + 6}.0 NVIDIA H200" for rank in range(4)
    ]


@pytest.mark.parametrize(
    "command",
    [(), ("topo",), ("check",), ("allreduce", "--sizes", "256M"), ("watch", "--for", "3s")],
    ids=lambda command: " ".join(command) or "bare",
)
def test_a_variable_of_the_environment_is_named_with_its_cure(command: tuple[str, ...]) -> None:
    """What the README's picture shows: with the variable every command said PASS."""
    with_variable = environment(NCCL_P2P_DISABLE="1", NCCL_BUFFSIZE="4")
    result = gpubench(*command, "--simulate", "hgx-h100-8", "--width", "200", env=with_variable)
    last = result.stdout.splitlines()[-1]
    assert last.startswith("FAIL (simulated): ")
    assert "gpubench p2p && unset NCCL_P2P_DISABLE" in result.stdout
    assert "nccl-p2p-disabled" in result.stdout or "NCCL_P2P_DISABLE=1 in the environment" in result.stdout
    assert result.stderr.count("ignored in simulation: NCCL_BUFFSIZE=4") == 1


@pytest.mark.parametrize(
    ("machine", "variable", "cause", "where"),
    [
        ("hgx-h100-8", "node0:env=NCCL_MAX_NCHANNELS=1", "nccl-few-channels", "this job"),
        ("hgx-h100-8", "node0:env=NCCL_PROTO=LL", "nccl-algorithm-forced", "this job"),
        ("hgx-h100-8", "node0:env=NCCL_ALGO=Tree", "nccl-algorithm-forced", "this job"),
        ("hgx-h100-8*2", "node1:env=NCCL_MAX_NCHANNELS=1", "nccl-few-channels", "node1"),
    ],
)
def test_a_slow_setting_has_the_same_cause_and_cure_in_every_command(
    machine: str, variable: str, cause: str, where: str
) -> None:
    brief = () if "Tree" in variable else ((),)  # Trees are fast enough at the one large size of a brief look
    for command in (*brief, ("check",), ("allreduce", "--sizes", "1G")):
        asked = (*command, "--simulate", machine, "--fault", variable, "--format", "json")
        document = json.loads(gpubench(*asked).stdout)
        found, name = document["findings"][0], variable.split("=")[1]
        assert (found["id"], found["subject"], found["commands"]) == (cause, where, [f"unset {name}"])
        assert document["sentence"].endswith(f"Try: unset {name}")
        if command[:1] == ("allreduce",):  # What a check of real GPUs takes from the command that it runs
            assert cause in [each.id for each in collective_measurements(document).findings]


@pytest.mark.parametrize(
    ("command", "machine", "fault", "exit_code"),
    [
        ("allreduce", "hgx-h100-8", "link1-2:corrupts=yes", 0),  # NVSwitches reduce: no path between two GPUs
        ("allreduce", "hgx-h100-8", "link2-5:corrupts=yes", 0),
        ("sendrecv", "hgx-h100-8", "link1-2:corrupts=yes", 1),
        ("allreduce", "hgx-h200-4", "link1-2:corrupts=yes", 1),
    ],
)
def test_a_corrupted_path_that_a_collective_does_not_use_is_named(
    command: str, machine: str, fault: str, exit_code: int
) -> None:
    result = gpubench(command, "--simulate", machine, "--sizes", "1G", "--fault", fault)
    assert result.returncode == exit_code
    assert (f"note: --fault {fault} has no effect on {command}: " in result.stderr) is (exit_code == 0)


@pytest.mark.parametrize("command", ["p2p", "allreduce"])
def test_a_missing_driver_has_the_cure_of_its_condition_and_no_note(command: str) -> None:
    result = gpubench(command, "--simulate", "hgx-h100-8", "--fault", "node0:driver_missing=yes")
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.endswith("try:      modprobe nvidia && nvidia-smi\n")
    assert "no effect" not in result.stderr


@pytest.mark.parametrize(
    ("machine", "where"), [("hgx-h100-8", "node0 GPU0 → GPU1"), ("hgx-h100-8*2", "on node0-1"), ("hgx-h200-2", "node0")]
)
def test_the_last_line_of_check_has_figure_place_and_cure_of_a_setting(machine: str, where: str) -> None:
    for command in ((), ("check",)):
        result = gpubench(*command, "--simulate", machine, env=environment(NCCL_P2P_DISABLE="1"))
        last = result.stdout.splitlines()[-1]
        assert len(last) <= 160
        assert all(each in last for each in (where, "all-reduce reaches", "NCCL_P2P_DISABLE=1"))
        assert last.endswith("Try: gpubench p2p && unset NCCL_P2P_DISABLE")


def test_ranks_with_another_setting_are_those_of_their_node() -> None:
    asked = ("check", "--quick", "--simulate", "hgx-h100-8*2", "--fault", "node1:env=NCCL_MAX_NCHANNELS=1")
    assert "unset on ranks 0-7 on node0; 1 on ranks 8-15 on node1" in gpubench(*asked).stdout


def test_copies_pass_whatever_nccl_is_told() -> None:
    result = gpubench("p2p", "--simulate", "hgx-h200-2", env=environment(NCCL_P2P_DISABLE="1"))
    assert result.stdout.splitlines()[-1].startswith("PASS (simulated): ")


def test_a_recorded_simulation_names_the_variable_again(tmp_path: Path) -> None:
    folder = str(tmp_path / "seen")
    arguments = ("allreduce", "--format", "json")
    fault = ("--fault", "node0:env=NCCL_P2P_DISABLE=1")
    first = gpubench(*arguments, "--sizes", "256M", "--simulate", "hgx-h200-2", *fault, "--record", folder)
    again = gpubench(*arguments, "--replay", folder)
    found = [json.loads(each.stdout)["findings"] for each in (first, again)]
    assert found[0] == found[1]
    assert found[0][0]["cause"] == "NCCL_P2P_DISABLE=1 in the environment"


def test_a_simulated_sweep_has_every_setting_and_names_the_fastest(tmp_path: Path) -> None:
    asked = ("allreduce", "--algo", "ring,tree", "--sizes", "1K,256M", "--out-of-place", "--format", "json")
    first = gpubench(*asked, "--simulate", "hgx-h200-4", "--record", str(tmp_path / "seen"))
    document = json.loads(first.stdout)
    validate(document)
    settings = [row["setting"] for row in document["rows"]]
    assert settings == [None, "ring", "tree", "again"] * 2
    own, ring, tree, _ = (row["time_us"] for row in document["rows"][4:])
    assert ring == pytest.approx(own, rel=0.05)
    assert 1.3 < tree / own < 1.6
    assert {row["origin"] for row in document["rows"]} == {"simulated"}
    assert [row["size_bytes"] for row in document["winners"]] == [2**10, 256 * 2**20]
    again = gpubench("allreduce", "--replay", str(tmp_path / "seen"), "--format", "json")
    assert json.loads(again.stdout)["winners"] == document["winners"]


def test_a_setting_that_nccl_refuses_is_left_out_with_the_reason() -> None:
    asked = ("allgather", "--algo", "ring,tree", "--sizes", "1M", "--simulate", "hgx-h200-4", "--format", "json")
    document = json.loads(gpubench(*asked).stdout)
    assert {row["setting"] for row in document["rows"]} == {None, "ring", "again"}
    assert [(row["setting"], row["reason"]) for row in document["refused"]] == [
        ("tree", "NCCL has no tree for allgather")
    ]


@pytest.mark.parametrize(
    ("machine", "setting"),
    [
        ("l40s-8", ("--proto", "ll")),  # Only H100s and H200s were measured
        ("hgx-h100-8*2", ("--algo", "ring")),
        ("hgx-h100-8", ("--algo", "nvls")),
        ("hgx-h100-8", ("--set", "NCCL_BUFFSIZE=65536")),
        ("hgx-h100-8", ("--register", "user")),
        ("hgx-h100-8*2", ("--hierarchical",)),
    ],
)
def test_a_setting_of_unknown_speed_is_refused_with_a_command_that_works(
    machine: str, setting: tuple[str, ...]
) -> None:
    result = gpubench("allreduce", "--simulate", machine, "--sizes", "1M", *setting)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{setting[0]} with --simulate {machine}" in result.stderr
    assert "--simulate hgx-h100-8" in result.stderr


@pytest.mark.parametrize(
    ("machine", "split", "fault", "groups", "slow"),
    [
        ("hgx-h200-4", "pairs", None, ["ranks 0-1", "ranks 2-3"], []),
        ("hgx-h100-8", "4", "gpu6:speed=0.5", ["ranks 0-3", "ranks 4-7"], ["ranks 4-7"]),
        ("hgx-h100-8*3", "node", "node2.gpu3:nvlink=9", [f"node node{n}" for n in range(3)], ["node node2"]),
        ("hgx-h100-8*3", "rail", "node1.nic3:rate=100", [f"rail {n}" for n in range(8)], ["rail 3"]),
        ("hgx-h100-8*4", "16", "node3:env=NCCL_P2P_LEVEL=LOC", ["ranks 0-15", "ranks 16-31"], ["ranks 16-31"]),
        ("gb200-nvl72/8", "node", None, ["node node0", "node node1"], []),
        ("l40s-8*2", "node", None, ["node node0", "node node1"], []),
    ],
)
def test_a_split_slows_only_the_group_with_the_fault(
    machine: str, split: str, fault: str | None, groups: list[str], slow: list[str]
) -> None:
    faults = () if fault is None else ("--fault", fault)
    asked = ("allreduce", "--sizes", "256M", "--out-of-place", "--split", split, "--format", "json")
    document = json.loads(gpubench(*asked, "--simulate", machine, *faults).stdout)
    validate(document)
    rows = {row["group"]: row for row in document["rows"]}
    assert list(rows) == groups
    assert [name for name, row in rows.items() if row["verdict"] != "PASS"] == slow
    assert [name for name, row in rows.items() if row["expected_percent"] < 60] == slow
    assert {row["origin"] for row in document["rows"]} == {"simulated"}
    assert document["complete"]
    assert document["verdict"] in (("WARN", "FAIL") if slow else ("PASS",))


@pytest.mark.parametrize(
    ("machine", "split", "why"),
    [
        ("l40s-8", "pairs", "its groups share PCIe and host memory"),
        ("hgx-h100-8*3", "12", "its groups share NICs"),
        ("gb200-nvl72/12", "8", "its groups share"),
        ("hgx-h100-8", "rail", "rails need several nodes"),
    ],
)
def test_groups_that_disturb_each_other_are_refused(machine: str, split: str, why: str) -> None:
    result = gpubench("allreduce", "--sizes", "1M", "--split", split, "--simulate", machine)
    assert (result.returncode, result.stdout) == (2, "")
    assert why in result.stderr


READ_FILES = {"explain", "compare", "report", "profiles", "run"}
"""Commands that read files, logs or the user's own job: nothing there can be simulated."""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_that_measures_accepts_a_simulated_machine(command: Command) -> None:
    options = {option for each in typer_command(command).params for option in each.opts}
    assert ("--simulate" in options) is (command.name not in READ_FILES)


@pytest.mark.parametrize(
    ("command", "fault", "named"),
    [
        ("p2p", "gpu1:throttle=hw_slowdown", "has no effect on copies"),
        ("p2p", "gpu1:rows=pending", "has no effect on copies"),
        ("p2p", "link0-1:speed=0.9", ""),
        ("allreduce --sizes 1G", "gpu1:throttle=sw_power_cap", "has no effect on collectives"),
        ("allreduce --sizes 1G", "gpu1:throttle=hw_slowdown", ""),
        ("allreduce --sizes 1G", "gpu1:busy=77", "has no effect on collectives"),
        ("overlap --sizes 1G", "gpu1:ecc=off", "has no effect on collectives"),
    ],
)
def test_a_fault_that_changes_nothing_measured_is_named_and_refused_by_no_command(
    command: str, fault: str, named: str
) -> None:
    """p2p refused a throttled GPU, and ignored `rows=pending`."""
    result = gpubench(*command.split(), "--simulate", "hgx-h200-4", "--fault", fault)
    assert result.returncode in (0, 1)
    assert result.stdout
    note = f"gpubench: note: --fault {fault} {named}: gpubench check shows it\n"
    assert (note in result.stderr) if named else ("note" not in result.stderr)


def test_a_gpu_whose_clock_is_halved_slows_collectives_and_is_the_cause() -> None:
    result = gpubench("allreduce", "--simulate", "hgx-h100-8", "--sizes", "1G", "--fault", "gpu2:throttle=hw_slowdown")
    last = result.stdout.splitlines()[-1]
    assert last.startswith("FAIL (simulated): node0 GPU2: clocks lowered: hw slowdown, all-reduce reaches ")


LAST_LINES = (
    (
        "p2p --simulate hgx-h100-8 --fault gpu5:nvlink=12 --fault link0-3:staged=yes",
        "node0 GPU5: 6 of 18 NVLinks down (links 12-17), and 1 more finding. ",
    ),
    (
        "check --simulate hgx-h100-8*2 --fault node0.gpu1:nvlink=12 --fault node1.gpu6:throttle=hw_slowdown",
        "node0 GPU1: 6 of 18 NVLinks down (links 12-17), and 1 more finding. ",
    ),
    ("p2p --simulate hgx-h100-8 --fault link2-5:speed=0.5", "node0 GPU2 → GPU5, GPU5 → GPU2: p2p reaches 188 of 376 "),
    ("check --simulate hgx-h100-8 --fault link2-5:speed=0.5", "node0 GPU2 → GPU5, GPU5 → GPU2: p2p reaches 188 of "),
    ("check --simulate hgx-h100-8 --fault gpu5:speed=0.5", "node0 GPU5: all-reduce reaches 236 of 472 GB/s (50 %)"),
    (
        "p2p --simulate hgx-h100-8 --fault link0-3:staged=yes",
        "node0 GPU0 → GPU3, GPU3 → GPU0: data go through host memory, p2p reaches 37 of 376 GB/s (10 %)",
    ),
    ("allreduce --simulate hgx-h100-8 --fault link0-3:staged=yes", "ranks 0 → 3, 3 → 0 on node0: data go through host"),
    (
        "allreduce --simulate hgx-h100-8*2 --fault node1.gpu3:throttle=hw_slowdown",
        "node1 GPU3: clocks lowered: hw slowdown, all-reduce reaches 280 of 471 GB/s (59 %)",
    ),
    ("check --simulate l40s-8 --fault link0-1:staged=yes", "node0 GPU0 → GPU1, GPU1 → GPU0: data go through host memo"),
    ("check --simulate hgx-a100-4 --fault link0-1:nvlink=0", "node0 GPU0, GPU1: 4 of 12 NVLinks down (links 0-3), "),
)
"""Commands, and how their last lines begin: the device or pair of the finding, its own figure, the other findings."""


@pytest.mark.parametrize(("command", "line"), LAST_LINES)
def test_a_last_line_names_the_devices_of_its_finding_and_their_own_figure(command: str, line: str) -> None:
    last = gpubench(*command.split(), "-q").stdout.splitlines()[-1]
    assert last.startswith(f"FAIL (simulated): {line}")
    assert len(last) <= 160


@pytest.mark.parametrize(
    ("command", "cure"),
    [
        (
            "scan --simulate hgx-h100-8*8 --fault node3.gpu2:nvlink=9",
            "ssh node3 nvidia-smi --gpu-reset -i 0000:18:00.0",
        ),
        ("check --quick --simulate hgx-h100-8*2 --fault node1.gpu3:lost=yes", 'ssh node1 "dmesg | grep Xid"'),
        (
            "topo --simulate hgx-h100-8*2 --fault node1.gpu3:nvlink=9",
            "ssh node1 nvidia-smi --gpu-reset -i 0000:19:00.0",
        ),
        ("check --quick --simulate hgx-h100-8 --fault gpu3:lost=yes", "dmesg | grep Xid"),
        ("check --simulate l40s-8 --fault link2-5:speed=0.5", "gpubench topo"),
    ],
)
def test_a_cure_runs_on_the_node_and_the_links_that_its_finding_names(command: str, cure: str) -> None:
    assert gpubench(*command.split(), "-q").stdout.splitlines()[-1].endswith(f". Try: {cure}")


def test_the_comment_on_mig_switches_it_off_on_the_named_gpu_alone() -> None:
    shown = gpubench("topo", "--simulate", "hgx-h100-8", "--fault", "gpu2:mig=on", "--width", "200").stdout
    assert "`nvidia-smi -mig 0 -i 0000:18:00.0`" in shown


def test_a_pair_that_corrupts_data_fails_the_collectives_that_use_its_path() -> None:
    for fault, word in (("link0-1:corrupts=yes", "FAIL"), ("link0-2:corrupts=yes", "PASS")):
        result = gpubench("allgather", "--simulate", "hgx-h100-8", "--sizes", "1G", "--fault", fault)
        last = result.stdout.splitlines()[-1]
        assert last.startswith(f"{word} (simulated)"), last
        assert ("wrong elements" in last) is (word == "FAIL"), last


def test_percentiles_stand_beside_an_unchanged_mean() -> None:
    options = ("allreduce", "--simulate", "hgx-h100-8", "--sizes", "1K,1G")
    plain, both = (
        json.loads(gpubench(*options, *more, "--format", "json").stdout) for more in ((), ("--percentiles",))
    )
    for row, fuller in zip(plain["rows"], both["rows"], strict=True):
        assert row["p50_us"] is row["p99_us"] is None
        assert 0 < fuller["p50_us"] <= fuller["p95_us"] <= fuller["p99_us"]
        assert fuller | {"p50_us": None, "p95_us": None, "p99_us": None} == row
    heads = gpubench(*options, "--percentiles", "--width", "140").stdout
    assert re.search(r"size +time µs +p50 +p95 +p99 +algbw +busbw", heads)
    narrow = gpubench(*options, "--percentiles", "--width", "100").stdout
    assert re.search(r"size +time µs +p99 +busbw", narrow)


@pytest.mark.parametrize("other", [("--mode", "latency"), ("--graph", "3")], ids=" ".join)
def test_percentiles_are_of_the_plain_loop_alone(other: tuple[str, ...]) -> None:
    result = gpubench("allreduce", "--percentiles", *other, "--simulate", "hgx-h100-8")
    assert (result.returncode, f"--percentiles and {other[0]} exclude each other" in result.stderr) == (2, True)
