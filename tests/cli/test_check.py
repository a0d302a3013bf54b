"""`gpubench check` and `gpubench profiles` as a user types them, on simulated machines and on this one."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from gpubench import profiles
from gpubench.cli.commands import diagnose as command
from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.jobs import check as check_measure
from gpubench.jobs.check import GPU_SIZES, ChildCommands, SimulatedMeasurer, measured
from gpubench.jobs.plans import CheckPlan, Depth
from gpubench.jobs.sources import Simulated, parse_simulation
from gpubench.model.paths.topology import Topology
from gpubench.model.results.figures import Measurements, Need
from gpubench.model.terms.units import group_by
from gpubench.model.terms.verdict import FINDING_COLUMNS
from gpubench.simulated.machine import parse_machine, snapshots
from tests.cli.running import environment, gpubench, mpirun, planned, without_gpus
from tests.formats.schema import validate


def checked(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = gpubench("check", *arguments, "--format", "json")
    document = json.loads(result.stdout)
    validate(document)
    return result.returncode, document


def test_a_healthy_simulated_machine_passes_and_says_that_it_is_simulated() -> None:
    code, document = checked("--simulate", "hgx-h200-4")
    assert (code, document["verdict"], document["findings"]) == (0, "PASS", [])
    assert document["metadata"]["origin"] == "simulated"
    assert document["metadata"]["profile"]["name"] == "hgx-h200-4"
    verdicts = {(row["scope"], row["verdict"]) for row in document["verdicts"]}
    assert verdicts == {("node", "PASS"), ("gpu", "PASS"), ("nic", "PASS"), ("link", "PASS")}
    assert [row["size_bytes"] for row in document["rows"]] == [2**10, 2**28, 2**32]
    data = next(row for row in document["checks"] if row["check"] == "data_correct")
    assert (data["verdict"], data["note"]) == ("SKIP", "a simulated machine moves no data")


def test_of_four_nodes_the_one_at_fault_is_named_down_to_the_gpu() -> None:
    code, document = checked("--simulate", "hgx-h100-8/4*4", "--fault", "node3.gpu2:nvlink=12")
    assert (code, document["verdict"]) == (1, "FAIL")
    bad = [row for row in document["verdicts"] if row["verdict"] == "FAIL"]
    devices = {(row["scope"], row["subject"][:10]) for row in bad if row["scope"] != "link"}
    assert devices == {("node", "node3"), ("gpu", "node3 GPU2")}
    links = [row for row in bad if row["scope"] == "link"]
    assert len(links) == 6, "no link is well whose figures are not"
    assert all("GPU2" in row["subject"] and row["findings"] == ["nvlink-down", "p2p-slow"] for row in links)


def test_of_many_links_that_do_not_pass_a_few_are_named() -> None:
    shown = gpubench("check", "--simulate", "hgx-h100-8", "--fault", "gpu5:nvlink=12").stdout
    assert "56 links: 42 PASS, 14 FAIL" in shown
    assert shown.count(" → GPU5 (") + shown.count("GPU5 (0000:1b:00.0) → ") == 4
    assert "  and 10 FAIL more\n" in shown


def test_a_link_of_which_no_figure_is_judged_is_no_pass() -> None:
    """Copies of a GPU that somebody else uses are not judged: '56 links: 56 PASS' stood above them."""
    code, document = checked("--simulate", "hgx-h100-4", "--fault", "gpu3:busy=77")
    assert (code, document["verdict"]) == (0, "WARN")
    links = [row for row in document["verdicts"] if row["scope"] == "link"]
    assert {row["verdict"] for row in links if "GPU3" in row["subject"]} == {"WARN"}
    assert {row["verdict"] for row in links if "GPU3" not in row["subject"]} == {"PASS"}


def test_csv_has_a_row_a_finding() -> None:
    result = gpubench("check", "--quick", "--simulate", "hgx-h100-8", "--fault", "gpu2:rows=failure", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert result.returncode == 1
    assert tuple(rows[0]) == FINDING_COLUMNS
    assert [(row["id"], row["severity"]) for row in rows] == [("row-remap-failed", "FAIL")]


def test_quick_measures_nothing_and_is_quick() -> None:
    code, document = checked("--quick", "--simulate", "hgx-h100-8")
    assert code == 0
    assert document["pairs"] == document["rows"] == []
    skipped = {row["note"] for row in document["checks"] if row["verdict"] == "SKIP"}
    assert "--quick" in skipped
    assert {row["check"] for row in document["checks"] if row["note"] == "--quick"} > {"paths", "p2p_bandwidth"}


def test_a_warning_fails_only_where_that_was_asked_for() -> None:
    fault = ("--quick", "--simulate", "hgx-h100-8", "--fault", "gpu2:temperature=88")
    assert checked(*fault)[0] == 0
    assert checked(*fault, "--strict")[0] == 1


def test_a_silent_driver_is_exit_code_3() -> None:
    code, document = checked("--simulate", "hgx-h100-8", "--fault", "node0:silent=nvml")
    assert (code, document["verdict"]) == (3, "ERROR")


def test_one_gpu_has_nobody_to_talk_to_and_passes() -> None:
    code, document = checked("--simulate", "hgx-h200-4/1")
    assert (code, document["verdict"]) == (0, "PASS")
    notes = {row["note"] for row in document["checks"] if row["check"] in ("p2p_bandwidth", "stragglers")}
    assert notes == {"one GPU, but copies need two", "one GPU, but a collective needs two"}


def test_a_recorded_gpu_that_stands_alone_is_healthy_although_the_driver_hides_its_nvlinks() -> None:
    machine = str(Path(__file__).parents[1] / "machines" / "h100x1-vm")
    code, document = checked("--replay", machine)
    assert (code, document["verdict"], document["findings"]) == (0, "PASS", [])
    assert document["metadata"]["profile"]["note"] == "one GPU of it"
    shown = gpubench("--replay", machine).stdout
    assert "NVLinks hidden by the driver" in shown
    assert shown.splitlines()[-1].startswith("PASS")
    topo = gpubench("topo", "--replay", machine, "--strict")
    assert (topo.returncode, topo.stdout.splitlines()[-1][:4]) == (0, "PASS")


def test_full_measures_all_collectives() -> None:
    code, document = checked("--full", "--simulate", "hgx-h200-2")
    assert code == 0
    assert len({row["collective"] for row in document["rows"]}) == 9
    assert {row["engine"] for row in document["pairs"]} == {"ce", "sm"}


def test_a_recorded_check_gives_the_same_report(tmp_path: Path) -> None:
    fault = ("--simulate", "hgx-h100-4", "--fault", "gpu3:speed=0.5")
    code, first = checked(*fault, "--record", str(tmp_path / "seen"))
    again, second = checked("--replay", str(tmp_path / "seen"))
    assert code == again == 1
    for section in ("findings", "checks", "verdicts", "pairs", "rows"):
        assert first[section] == second[section]


ANOTHER = "the recording is from a command other than check"


def test_a_recording_of_another_command_is_checked_by_its_facts() -> None:
    code, document = checked("--replay", "tests/machines/h200x4-vm")
    assert (code, document["verdict"]) == (3, "SKIP")  # nothing was measured: no gate passes by what nobody looked at
    assert gpubench("check", "--quick", "--replay", "tests/machines/h200x4-vm").returncode == 0
    notes = {row["check"]: row["note"] for row in document["checks"] if row["note"] not in (None, ANOTHER)}
    assert {name: note for name, note in notes.items() if "was not read" in note or "could not be read" in note} == {
        "nvlink_active": "the NVLink bandwidth mode was not read",
        "ecc": "memory errors could not be read",
        "clocks": "highest clock could not be read",
        "temperature": "temperature could not be read",
    }
    assert notes["redirection"] == "no GPU reaches another, or a NIC, over PCIe"


def test_without_a_gpu_it_is_exit_code_3_with_the_reason() -> None:
    result = gpubench("check", env=environment(CUDA_VISIBLE_DEVICES=""))
    if "no usable GPU" not in result.stderr:
        pytest.skip("this machine has a GPU")
    assert result.returncode == 3
    assert "--profile host" in result.stderr


@without_gpus
@pytest.mark.mpi
def test_the_cpu_side_is_checked_where_that_was_asked_for(tmp_path: Path) -> None:
    """Options that nobody typed are those of the check, and not of what it measures with."""
    (tmp_path / "gpubench.toml").write_text('output = "all.json"\nformat = "json"\n[allreduce]\ncheck = false\n')
    result = gpubench("check", "--profile", "host", cwd=tmp_path)
    document = json.loads(result.stdout)
    validate(document)
    assert document["metadata"]["subject"] == "check"
    assert json.loads((tmp_path / "all.json").read_text()) == document
    assert (result.returncode, document["verdict"]) == (3, "SKIP"), "a gate passes no speed that nobody judged"
    assert [row["wrong"] for row in document["rows"]] == [0, 0, 0]
    assert {row["backend"] for row in document["rows"]} == {"host"}
    assert all(row["ci95_percent"] is not None for row in document["rows"]), "timed until the mean is known"


@without_gpus
@pytest.mark.mpi
def test_ranks_of_a_launcher_check_their_host_together() -> None:
    result = mpirun(2, "check", "--profile", "host", "--format", "json")
    document = json.loads(result.stdout)
    assert (result.returncode, document["verdict"]) == (3, "SKIP"), result.stderr
    assert (len(document["rows"]), document["rows"][0]["ranks"]) == (3, 2)
    assert all(row["ci95_percent"] is not None for row in document["rows"]), "as gpubench check alone times them"
    assert [row["scope"] for row in document["verdicts"]].count("node") == 1
    quick = mpirun(2, "check", "--quick", "--profile", "host")
    assert (quick.returncode, "PASS: " in quick.stdout) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--quick", "--full"), "--quick and --full exclude each other"),
        (("--profile", "hgx-h2000-8"), "no profile is called 'hgx-h2000-8'"),
        (("--profile", "/nowhere/mine.toml"), "cannot be read"),
        (("--simulate", "hgx-h200-4", "--replay", "x"), "exclude each other"),
        (("--replay", "/nowhere"), "has no recording"),
        (("--hosts", ""), "--hosts without a value"),
        (("--fault", "gpu0:nvlink=1"), "without --simulate"),
        (("--section", "verdicts"), "without csv"),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = gpubench("check", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_broken_profile_of_ones_own_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    broken = tmp_path / "mine.toml"
    broken.write_text((profiles.folder() / "hgx-h200-4.toml").read_text().replace("value = 396.1", "value = 3961"))
    output = tmp_path / "out.json"
    result = gpubench("check", "--simulate", "hgx-h200-4", "--profile", str(broken), "--output", str(output))
    assert result.returncode == 2
    assert "value is 3961 GB/s" in result.stderr
    assert not output.exists()


def test_a_profile_of_another_machine_fails_what_it_does_not_describe() -> None:
    code, document = checked("--quick", "--simulate", "hgx-h200-4", "--profile", "hgx-h100-8")
    assert code == 1
    assert {each["id"] for each in document["findings"]} >= {"gpu-model"}


def test_a_recording_edited_by_hand_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    checked("--simulate", "hgx-h200-2", "--record", str(folder))
    samples = folder / "check.jsonl"
    samples.write_text(samples.read_text().replace('"pairs"', '"pears"', 1))
    result = gpubench("check", "--replay", str(folder))
    assert result.returncode == 2
    assert "pears" in result.stderr


def test_a_measurement_that_hangs_is_an_error_and_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_measure, "module_command", lambda *_: ["sleep", "3600"])
    node = Topology(snapshots(parse_machine("hgx-h200-4"))[0])
    found = ChildCommands([node], Depth.DEFAULT, 0.2).peer_and_host_copies()
    assert found.failed == dict.fromkeys((Need.PEER_COPIES, Need.HOST_COPIES), "gpubench p2p did not end within 0.2 s")
    reduced = measured(Depth.DEFAULT, [node], ChildCommands([node], Depth.DEFAULT, 0.2))
    assert reduced.failed[Need.ALL_REDUCE] == "gpubench allreduce did not end within 0.2 s"


def test_what_eight_real_gpus_reported_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = "tests/results/h200x8/allreduce-p2p-disabled.json"
    monkeypatch.setattr(check_measure, "module_command", lambda *_: ["cat", staged])
    node = Topology(snapshots(parse_machine("hgx-h200-8"))[0])
    found = ChildCommands([node], Depth.DEFAULT, 20.0).collective(ALLREDUCE, GPU_SIZES)
    assert [each.id for each in found.findings] == ["host-staged"]
    assert {row.reached_gb_s < 11 for row in found.collectives} == {True}


def test_a_command_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_measure, "module_command", lambda *_: ["sh", "-c", "echo no GPU >&2; exit 3"])
    node = Topology(snapshots(parse_machine("hgx-h200-4"))[0])
    found = ChildCommands([node], Depth.DEFAULT, 20.0).peer_and_host_copies()
    assert set(found.failed.values()) == {"gpubench p2p ended with exit code 3: no GPU"}
    spoken = "printf 'mpirun: help\\ngpubench: error: no rank started\\n  likely:   MPI\\n' >&2; exit 3"
    monkeypatch.setattr(check_measure, "module_command", lambda *_: ["sh", "-c", spoken])
    found = ChildCommands([node], Depth.DEFAULT, 20.0).peer_and_host_copies()
    assert set(found.failed.values()) == {"gpubench p2p ended with exit code 3: no rank started; likely: MPI"}


@pytest.mark.parametrize("words", ["list", "show hgx-h100-8", "show hgx-h100-8 -v"])
def test_profiles_obey_the_width(words: str) -> None:
    found = gpubench("profiles", *words.split(), env=environment(COLUMNS="80")).stdout.splitlines()
    assert len(found) > 20
    assert [line for line in found if len(line) > 80] == []


def test_profiles_are_listed_shown_matched_and_linted() -> None:
    _, *listed = gpubench("profiles", "list", env=environment(COLUMNS="120")).stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(profiles.profile_names())
    shown = gpubench("profiles", "show", "hgx-h200-8").stdout
    assert "measured with gpubench" in shown
    assert gpubench("profiles", "match", "--simulate", "hgx-h200-4").stdout.startswith("hgx-h200-4 (4 of 8 GPUs")
    assert gpubench("profiles", "lint").stdout.count("no errors") == len(profiles.profile_names())


def test_an_unknown_machine_matches_the_generic_profile_and_hears_so() -> None:
    result = gpubench("profiles", "match", "--simulate", "generic-pcie")
    assert result.stdout.startswith("generic-pcie")
    assert "no profile has PCIe GPU" in result.stderr


def test_ones_own_folder_comes_first(tmp_path: Path) -> None:
    text = (profiles.folder() / "hgx-h200-4.toml").read_text().replace('name = "hgx-h200-4"', 'name = "ours"')
    (tmp_path / "ours.toml").write_text(text)
    own = environment(GPUBENCH_PROFILES=str(tmp_path))
    assert "yours: HGX H200" in gpubench("profiles", "list", env=own).stdout
    assert gpubench("profiles", "match", "--simulate", "hgx-h200-4", env=own).stdout.startswith("ours")
    home = environment(XDG_CONFIG_HOME=str(tmp_path / "config"), GPUBENCH_PROFILES="")
    (tmp_path / "config" / "gpubench").mkdir(parents=True)
    (tmp_path / "config" / "gpubench" / "profiles").symlink_to(tmp_path)
    assert "yours: HGX H200" in gpubench("profiles", "list", env=home).stdout
    (tmp_path / "broken.toml").write_text("schema = 1")
    result = gpubench("profiles", "list", env=own)
    assert (result.returncode, "broken.toml has no field" in result.stderr) == (2, True)


def test_options_become_what_was_asked_for() -> None:
    given = {"full": True, "strict": True, "timeout_s": 300.0}
    plan = planned(CheckPlan, command.checked, given)
    assert (plan.depth, plan.strict, plan.facts_timeout_s) == (Depth.FULL, True, 20.0)


@pytest.mark.parametrize("part", ["pairs", "collectives", "evidence"])
def test_a_part_without_rows_and_without_a_reason_is_no_pass(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "seen"
    checked("--simulate", "hgx-h200-2", "--record", str(folder))
    samples = folder / "check.jsonl"
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    samples.write_text("".join(json.dumps(line | {part: []}) + "\n" for line in lines))
    code, document = checked("--replay", str(folder))
    assert (code, document["verdict"]) == (3, "ERROR")
    samples.write_text("")
    assert checked("--replay", str(folder))[0] == 3


ROW_BY_ROW = [
    ("rtx-4090-2", "gpu0:speed=0.86", 0, {"p2p_bandwidth": "PASS"}, "host copies 23 (86 %)"),
    ("rtx-4090-2", "gpu0:speed=0.5", 1, {"host_bandwidth": "FAIL"}, "50 %"),
    ("dgx-spark*2", "gpu0:speed=0.86", 0, {"host_bandwidth": "SKIP"}, "speed of host copies not judged"),
    ("gh200-1*2", "gpu0:speed=0.86", 0, {"host_bandwidth": "PASS"}, "host copies 295 GB/s (82 % of expected)"),
    ("hgx-h100-8", "gpu0:mig=on", 3, {"collective_bandwidth": "SKIP"}, "not judged: MIG splits the GPUs"),
]


@pytest.mark.parametrize(("machine", "fault", "code", "checks", "said"), ROW_BY_ROW)
def test_the_sentence_and_the_checks_agree_on_what_was_judged(
    machine: str, fault: str, code: int, checks: dict[str, str], said: str
) -> None:
    """A network hides a slow GPU, and host memory a slow link: then copies with host memory say how fast it is."""
    ended, document = checked("--strict", "--simulate", machine, "--fault", fault)
    verdicts = {row["check"]: row["verdict"] for row in document["checks"]}
    assert (ended, said in document["sentence"]) == (code, True), document["sentence"]
    assert checks.items() <= verdicts.items()


def test_a_fault_without_a_subject_is_on_every_node() -> None:
    result = gpubench("check", "--quick", "--simulate", "gb200-nvl72", "--fault", "imex=down")
    assert result.returncode == 1
    assert "--simulate gb200-nvl72 --fault imex=down\n" in result.stdout
    assert "18 nodes: 18 FAIL" in result.stdout


@pytest.mark.parametrize(("small", "verdict"), [(1, "FAIL"), (9, "WARN")])
def test_nodes_outside_the_clique_of_their_rack_are_named(small: int, verdict: str) -> None:
    """A smaller clique fell apart; two halves may be wanted."""
    faults = [word for node in range(small) for word in ("--fault", f"node{node}:clique=1")]
    result = gpubench("check", "--quick", "--simulate", "gb200-nvl72", *faults)
    assert f"{verdict} mnnvl-clique-differs: node0" in result.stdout
    assert result.stdout.count(": mnnvl-clique-differs\n") == (small if small == 1 else 18)


def test_copies_of_healthy_simulated_nodes_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was made with all nodes of its cluster, and a check of 2,048 took longer than seven minutes."""
    made: list[int] = []
    own = SimulatedMeasurer._node_copies

    def counted(self: SimulatedMeasurer, number: int, node: Topology) -> Measurements:
        made.append(number)
        return own(self, number, node)

    monkeypatch.setattr(SimulatedMeasurer, "_node_copies", counted)
    simulation = parse_simulation("hgx-h100-8*5", ["node2.gpu1:nvlink=9"], 1)
    nodes = Simulated(simulation).machines().nodes
    found = SimulatedMeasurer(simulation, nodes, Depth.DEFAULT).copies()
    assert made == [0, 2]
    rows = group_by(found.pairs, lambda row: row.source_node)
    assert list(rows) == [f"node{number}" for number in range(5)]
    assert len({len(own) for own in rows.values()}) == 1
    assert [row.bandwidth_gb_s for row in rows["node4"]] == [row.bandwidth_gb_s for row in rows["node0"]]
    assert [row.bandwidth_gb_s for row in rows["node2"]] != [row.bandwidth_gb_s for row in rows["node0"]]


@pytest.mark.parametrize("fault", ["driver_missing=yes", "silent=nvml"])
def test_a_driver_that_is_down_is_the_one_finding_of_all_that_was_not_measured(fault: str) -> None:
    result = gpubench("check", "--simulate", "hgx-h100-8", "--fault", f"node0:{fault}", "--format", "json")
    (finding,) = json.loads(result.stdout)["findings"]
    assert (result.returncode, finding["severity"]) == (3, "ERROR")
    assert finding["id"].startswith("driver-")
    assert [line.split(": ")[1] for line in finding["consequences"]] == ["peer copies", "host copies", "all-reduce"]
