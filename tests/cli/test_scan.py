"""`gpubench scan` of simulated nodes, and of rounds that were kept: reports, lists, folders, bad input."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.formats import blocks
from tests.cli.running import environment, gpubench

FIVE = (
    *("--fault", "node17.nic3:bandwidth=0.41", "--fault", "node9:hangs=round2"),
    *("--fault", "leaf1.rail2:bandwidth=0.6", "--fault", "node30:dies=round3", "--fault", "node40.gpu5:width=4"),
)
MACHINE = "hgx-h100-8*64"
ONE_LEAF = "hgx-h100-8*20"


def test_every_fault_is_named_and_the_last_line_says_so_once() -> None:
    result = gpubench("scan", "--simulate", MACHINE, *FIVE)
    assert result.returncode == 1
    last = result.stdout.rstrip().splitlines()[-1]
    assert last.startswith(
        "FAIL (simulated): 4 of 64 nodes and 1 part of the network are bad: node30 is gone, node9 hangs, "
    )
    assert last.endswith(": node30 is gone, node9 hangs, leaf1 rail 2 at 60 % and 2 more. Try: ping -c 3 node30")
    assert "FAIL nic-slow: node17 rail 3\n" in result.stdout
    assert result.stdout.count(last[:60]) == 1
    assert "--exclude=node[9,17,30,40]" in result.stdout
    assert "kubectl cordon -- node9 node17 node30 node40" in result.stdout


@pytest.mark.parametrize(
    ("fault", "kind", "subject"),
    [
        ("node3.gpu2:nvlink=9", "GPU", "node3 GPU2"),
        ("node3.link2-5:staged=yes", "pair of GPUs", "node3 GPU2 and GPU5"),
        ("node3.gpu2:p2p=CNS", "GPU", "node3 GPU2"),
    ],
)
def test_what_is_slow_inside_a_node_is_named_by_phase_0_and_is_no_nic(fault: str, kind: str, subject: str) -> None:
    result = gpubench("scan", "--simulate", "hgx-h100-8*4", "--fault", fault, "--format", "json")
    (part,) = json.loads(result.stdout)["parts"]
    assert (part["part_kind"], part["subject"], part["rail"], part["nic"]) == (kind, subject, None, None)
    assert part["seen"].startswith("copies inside the node between GPU2 and GPU")
    assert part["partner_gpu"] == (5 if kind == "pair of GPUs" else None)


def test_what_is_slow_inside_all_nodes_is_seen_by_their_profile() -> None:
    """None is slower than another; where most are slow, the rest would be called well and nobody slow."""
    every = [f"--fault=node{node}.gpu{gpu}:speed=0.5" for node in range(4) for gpu in range(4)]
    result = gpubench("scan", "--simulate", "hgx-a100-4*4", *every)
    assert result.returncode == 1
    assert "FAIL inside-below-profile: node0-3" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("FAIL (simulated): node0-3: copies inside the node: ")


def test_healthy_nodes_pass_and_the_sentence_says_what_would_have_been_seen() -> None:
    result = gpubench("scan", "--simulate", ONE_LEAF)
    assert result.returncode == 0
    assert result.stdout.rstrip().splitlines()[-1].startswith("PASS (simulated): all 20 nodes are healthy (a node ")


def test_every_format_has_every_cell(tmp_path: Path) -> None:
    endings = ("json", "xml", "prom", "html", "csv", "md", "jsonl")
    files = [f"--output={tmp_path / f'a.{ending}'}" for ending in endings]
    assert gpubench("scan", "--simulate", ONE_LEAF, "--fault", "node17.nic3:bandwidth=0.41", *files).returncode == 1
    document = json.loads((tmp_path / "a.json").read_text())
    cells = document["cells"]
    assert len(cells) == 20 * 8
    (bad,) = [row for row in cells if row["verdict"] != "PASS"]
    assert (bad["node"], bad["rail"], bad["nic"], bad["part"]) == ("node17", 3, "nic3", "node17 rail 3")
    assert bad["score_percent"] == pytest.approx(41, abs=2)
    assert bad["phase"] == "confirmation"
    (part,) = document["parts"]
    assert (part["part_kind"], part["nodes"], part["verdict"]) == ("NIC or cable", ["node17"], "FAIL")
    assert [row["number"] for row in document["rounds"]] == list(range(1, 12))
    assert [row["subject"] for row in document["scan_collectives"]] == ["all"]
    assert document["scan_collectives"][0]["percent"] == pytest.approx(100, abs=5)
    assert [each["id"] for each in document["findings"]] == ["nic-slow"]
    suite = ElementTree.parse(tmp_path / "a.xml").getroot()[0]
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    assert failed == ["nic-slow: node17 rail 3"]
    prometheus = (tmp_path / "a.prom").read_text()
    assert 'gpubench_scan_cell_ratio{command="scan",origin="simulated",node="node17",rail="3"' in prometheus
    page = (tmp_path / "a.html").read_text()
    assert ">Nodes and rails</h2>" in page
    rows = re.findall(r"<tr><th>(node\d+) ", page)
    assert (rows[0], len(rows)) == ("node17", 20), "bad nodes first"
    assert (tmp_path / "a.csv").read_text().count("\n") == 20 * 8 + 1


def test_the_map_of_very_many_nodes_is_of_the_leaves_where_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "a.html"
    monkeypatch.setattr(blocks, "_MOST_MAPPED", 63)
    faults = ("--fault", "node17.nic3:bandwidth=0.41")
    CliRunner().invoke(app, ["scan", "--simulate", MACHINE, *faults, "--output", str(page)])
    assert "Only the 32 nodes on leaves where something is wrong." in page.read_text()


@pytest.mark.parametrize("fault", ["node17.nic3:bandwidth=0.41", "node9:hangs=round2", "leaf1.rail2:bandwidth=0.6"])
def test_bandwidth_and_share_of_a_rail_are_of_the_same_rounds(fault: str) -> None:
    """Of a node that hung from its second round on, the share counted rounds that failed and the bandwidth did not."""
    machine = MACHINE if "leaf" in fault else ONE_LEAF
    result = gpubench("scan", "--simulate", machine, "--fault", fault, "--format", "json")
    cells = [each for each in json.loads(result.stdout)["cells"] if each["score_percent"]]
    whole = {(each["both_ways_gb_s"] / each["score_percent"] * 100) for each in cells if each["verdict"] == "PASS"}
    for each in cells:
        if each["verdict"] == "FAIL":
            assert min(whole) * 0.9 < each["both_ways_gb_s"] / each["score_percent"] * 100 < max(whole) * 1.1, each


def test_quick_names_suspects_and_confirms_nothing() -> None:
    result = gpubench("scan", "--simulate", ONE_LEAF, "--fault", "node17.nic3:bandwidth=0.41", "--quick")
    assert result.returncode == 0
    last = result.stdout.rstrip().splitlines()[-1]
    assert last.startswith("WARN (simulated): 1 of 20 nodes may be slow: node17 rail 3 at 4")
    assert "3 rounds: 3 screening" in result.stdout
    strict = gpubench("scan", "--simulate", ONE_LEAF, "--fault", "node17.nic3:bandwidth=0.41", "--quick", "--strict")
    assert strict.returncode == 1


def test_the_hostfile_has_the_good_nodes(tmp_path: Path) -> None:
    gpubench("scan", "--simulate", "hgx-h100-8*8", "--fault", "node2:bandwidth=0.5", "--hostfile", str(tmp_path / "h"))
    assert (tmp_path / "h").read_text().splitlines() == [f"node{n} slots=8" for n in range(8) if n != 2]


def test_leaves_from_a_file_decide_what_a_leaf_is(tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text(
        "SwitchName=left Nodes=node[0-7]\nSwitchName=right Nodes=node[8-15]\nSwitchName=up Nodes=node[16-31]\n"
    )
    faults = ("--fault", "leaf1.rail2:bandwidth=0.6")
    result = gpubench("scan", "--simulate", "hgx-h100-8*32", *faults, "--leaves", str(file))
    assert "1 part of the network is bad: right rail 2 at 60 %" in result.stdout


def test_rounds_are_kept_gone_on_with_and_judged_again(tmp_path: Path) -> None:
    folder, faults = tmp_path / "rounds", ("--fault", "node17.nic3:bandwidth=0.41", "--fault", "node9:dies=round5")
    whole = gpubench("scan", "--simulate", ONE_LEAF, *faults, "--rounds", str(folder), "--format", "csv")
    kept = folder / "scan.jsonl"
    lines = kept.read_text().splitlines(keepends=True)
    assert len(lines) == 2 + 11
    replayed = gpubench("scan", "--replay", str(folder), "--format", "csv")
    assert replayed.returncode == 1
    assert replayed.stdout == whole.stdout
    kept.write_text("".join(lines[:6]) + lines[6][: len(lines[6]) // 2])
    cut = gpubench("scan", "--replay", str(folder))
    assert cut.returncode == 0
    assert "node17 rail 3 at 4" in cut.stdout
    assert "the job ended before the confirmation" in cut.stdout
    kept.write_text("".join(lines[:6]))
    resumed = gpubench("scan", "--simulate", ONE_LEAF, *faults, "--resume", str(folder), "--format", "csv")
    assert resumed.stdout == whole.stdout
    assert len(kept.read_text().splitlines()) == 2 + 11


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--simulate", "hgx-h100-8"], "scan of one node"),
        (["--simulate", "hgx-h100-8*2"], "do not show which of them is slow"),
        (["--simulate", "hgx-h200-2*8"], "no NIC with a known rate"),
        (["--simulate", MACHINE, "--fault", "leaf2.rail1:bandwidth=0.5"], "the nodes are connected to 2 leaves"),
        (["--simulate", MACHINE, "--fault", "leaf1.rail9:bandwidth=0.5"], "rails 0 to 7"),
        (["--simulate", MACHINE, "--fault", "node64:dies=round1"], "node"),
        (["--simulate", MACHINE, "--fault", "node6:dies=round12"], "round1 to round11"),
        (["--replay", "nowhere"], "does not exist"),
        (["--replay", "a", "--resume", "b"], "exclude each other"),
        (["--simulate", MACHINE, "--replay", "b"], "exclude each other"),
        (["--backend", "mpi"], "not known"),
        (["--simulate", MACHINE, "--leaves", "nowhere"], "does not exist"),
        ([], "mpirun --hostfile hosts --map-by ppr:1:node gpubench scan with one host per line in the file hosts"),
    ],
)
def test_bad_input_is_told_in_one_message(arguments: list[str], said: str) -> None:
    result = gpubench("scan", *arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_in_an_allocation_of_slurm_it_is_started_by_srun() -> None:
    result = gpubench("scan", env=environment(SLURM_JOB_ID="4711"))
    assert result.returncode == 2
    assert "try:      srun --mpi=pmix --ntasks-per-node=1 gpubench scan" in result.stderr


def test_leaves_that_name_other_nodes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "leaves"
    file.write_text("gpu[00-63] leaf1\n")
    result = gpubench("scan", "--simulate", MACHINE, "--leaves", str(file))
    assert result.returncode == 2
    assert "has no leaf for node0, node1, node2, node3 and 60 more: 64 of 64 nodes" in result.stderr
    assert "it has other names: gpu00" in result.stderr


def test_another_scan_in_the_folder_is_not_overwritten_or_gone_on_with(tmp_path: Path) -> None:
    folder = str(tmp_path / "rounds")
    assert gpubench("scan", "--simulate", "hgx-h100-8*8", "--rounds", folder).returncode == 0
    again = gpubench("scan", "--simulate", "hgx-h100-8*8", "--rounds", folder)
    assert again.returncode == 2
    assert f"gpubench scan --resume {folder}" in again.stderr
    other = gpubench("scan", "--simulate", "hgx-h100-8*9", "--resume", folder)
    assert other.returncode == 2
    assert "nodes are 8 of other names, here 9" in other.stderr


@pytest.mark.parametrize("text", ["{}\n", "nothing\n", '{"hosts": ["a"], "rails": 0}\n'])
def test_a_folder_with_something_else_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "scan.jsonl").write_text(text)
    result = gpubench("scan", "--replay", str(tmp_path))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


SLOW = ("--simulate", "hgx-h100-8*8", "--fault", "node3:bandwidth=0.5")


@pytest.fixture(scope="module")
def whole_rounds(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rounds") / "r"
    gpubench("scan", *SLOW, "--rounds", str(folder))
    return (folder / "scan.jsonl").read_text()


@pytest.fixture
def rounds(whole_rounds: str, tmp_path: Path) -> Path:
    (tmp_path / "r").mkdir()
    path = tmp_path / "r" / "scan.jsonl"
    path.write_text(whole_rounds)
    return path


@pytest.mark.parametrize("edit", ["[0, 0, 99]", "[0, 99, 1]", "[0, 0, 1, 1]"])
def test_figures_inside_nodes_of_gpus_that_are_not_there_are_refused(rounds: Path, edit: str) -> None:
    text = rounds.read_text()
    assert "[0, 0, 1]" in text.splitlines()[1]
    rounds.write_text(text.replace("[0, 0, 1]", edit, 1))
    result = gpubench("scan", "--replay", str(rounds.parent))
    assert result.returncode == 2
    assert "a value of" in result.stderr


@pytest.mark.parametrize("edit", ['"places": [[0, 99, 0]', '"places": [[0, 1, 99]', '"places": [[0, 1]'])
def test_rounds_of_nodes_that_are_not_there_are_refused(rounds: Path, edit: str) -> None:
    head, local, first, *_ = rounds.read_text().splitlines()
    start = first.index('"places": [[')
    rounds.write_text("\n".join((head, local, first[:start] + edit + first[first.index("]", start + 12) + 1 :])) + "\n")
    result = gpubench("scan", "--replay", str(rounds.parent))
    assert result.returncode == 2
    assert "a value of" in result.stderr


def test_faults_of_rounds_mean_nothing_elsewhere() -> None:
    result = gpubench("topo", "--simulate", MACHINE, "--fault", "node3:dies=round2")
    assert result.returncode == 2
    assert "gpubench scan --simulate 'hgx-h100-8*64' --fault node3:dies=round2" in result.stderr


def test_two_leaves_of_which_the_uplink_is_slow_are_said_to_be_slow_between() -> None:
    result = gpubench("scan", "--simulate", MACHINE, "--fault", "leaf1:uplink=0.8")
    assert "between-leaves-slow" in result.stdout
    assert result.stdout.rstrip().splitlines()[-1].startswith("WARN (simulated): ")


@pytest.mark.parametrize(
    ("nodes", "faults", "said"),
    [
        (96, ["leaf1:uplink=0.6"], "leaf1 at 60 % (uplink)"),
        (64, ["leaf1.rail2:bandwidth=0.6"], "leaf1 rail 2 at 60 %"),
        (3, ["node0:bandwidth=0.3"], "node0 at 30 %, 2 could not be judged"),
    ],
)
def test_of_few_leaves_and_nodes_the_one_at_fault_is_named(nodes: int, faults: list[str], said: str) -> None:
    options = [word for fault in faults for word in ("--fault", fault)]
    result = gpubench("scan", "--simulate", f"hgx-h100-8*{nodes}", *options, "--summary")
    assert result.returncode == 1
    assert said in result.stdout


EVERY_SECOND_NODE = [word for node in range(0, 32, 2) for word in ("--fault", f"node{node}:bandwidth=0.5")]


def test_where_half_of_all_nodes_are_slow_nothing_is_said_of_any(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    halves = (*EVERY_SECOND_NODE, "--hostfile", str(hosts), "--format", "json")
    result = gpubench("scan", "--simulate", "hgx-h100-8*32", *halves)
    report = json.loads(result.stdout)
    assert (result.returncode, report["verdict"]) == (3, "INCONCLUSIVE")
    assert {row["verdict"] for row in report["cells"]} == {"INCONCLUSIVE"}
    assert hosts.read_text() == ""


def test_beside_a_dead_node_nobody_is_called_well_where_figures_are_too_noisy_to_tell() -> None:
    faults = (*EVERY_SECOND_NODE, "--fault", "node10:dies=round2")
    result = gpubench("scan", "--simulate", "hgx-h100-8*32", *faults)
    assert result.returncode == 1
    last = result.stdout.rstrip().splitlines()[-1]
    assert (
        last == "FAIL (simulated): 1 of 32 nodes is bad: node10 is gone, 31 could not be judged. Try: ping -c 3 node10"
    )


def test_a_scan_goes_on_behind_a_line_that_was_cut_off(rounds: Path) -> None:
    whole = rounds.read_text()
    rounds.write_text("".join(whole.splitlines(keepends=True)[:4]) + '{"number":3,"pha')
    again = ("scan", *SLOW, "--resume", str(rounds.parent))
    assert gpubench(*again).returncode == 1
    assert [line.partition('"seconds"')[0] for line in rounds.read_text().splitlines()] == [
        line.partition('"seconds"')[0] for line in whole.splitlines()
    ]
    assert gpubench("scan", "--replay", str(rounds.parent)).returncode == 1


def test_nodes_that_were_gone_when_it_went_on_are_gone_in_what_is_judged_again(rounds: Path) -> None:
    lines = rounds.read_text().splitlines(keepends=True)
    rounds.write_text("".join(lines[:4]) + '{"absent": {"5": "it is not in the resumed job"}}\n')
    result = gpubench("scan", "--replay", str(rounds.parent), "--format", "json")
    bad = [row["subject"] for row in json.loads(result.stdout)["parts"] if row["verdict"] == "FAIL"]
    assert (result.returncode, bad) == (1, ["node5"])


@pytest.mark.parametrize(
    ("before", "after"),
    [('"screening"', '"confirmation"'), ('"rails": 8', '"rails": 1000000000'), ('"node1"', '"node0"')],
)
def test_rounds_that_no_scan_wrote_are_refused(rounds: Path, before: str, after: str) -> None:
    text = rounds.read_text()
    assert before in text
    rounds.write_text(text.replace(before, after))
    result = gpubench("scan", "--replay", str(rounds.parent))
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.parametrize("fault", ["node1:acs=on", "gpu0:nvlink=9", "link0-1:staged=yes"])
def test_a_replay_finds_what_the_scan_found(fault: str, tmp_path: Path) -> None:
    """By facts too, which are not measured again: a scan with a warning was replayed as PASS."""
    kept = ("--rounds", str(tmp_path / "rounds"), "--format", "json")
    scanned = json.loads(gpubench("scan", "--simulate", "hgx-h100-8*4", "--fault", fault, *kept).stdout)
    replayed = json.loads(gpubench("scan", "--replay", str(tmp_path / "rounds"), "--format", "json").stdout)
    assert scanned["findings"]
    assert [(each["id"], each["subject"]) for each in replayed["findings"]] == [
        (each["id"], each["subject"]) for each in scanned["findings"]
    ]
    assert replayed["verdict"] == scanned["verdict"]


def test_a_network_that_is_slow_for_all_alike_fails_and_does_so_when_it_is_judged_again(tmp_path: Path) -> None:
    rounds = tmp_path / "rounds"
    slow = [each for node in range(4) for each in ("--fault", f"node{node}:bandwidth=0.45")]
    result = gpubench("scan", "--simulate", "hgx-h100-8*4", *slow, "--rounds", str(rounds))
    assert result.returncode == 1
    assert result.stdout.rstrip().splitlines()[-1].startswith("FAIL (simulated): all rails between nodes: ")
    assert re.search(r"\nusual between nodes: 4\d % of the NICs' rate, on the slowest rail\n", result.stdout)
    again = gpubench("scan", "--replay", str(rounds), "--format", "json")
    assert (again.returncode, [each["id"] for each in json.loads(again.stdout)["findings"]]) == (1, ["below-nic-rate"])


@pytest.mark.parametrize(
    "fault",
    ["silent=nvml", "driver_missing=yes", "gpu2:rows=pending", "gpu2:nvlink=12", "gpu2:lost=yes", "nic1:state=down"],
)
def test_a_node_that_fails_by_its_facts_is_neither_counted_healthy_nor_kept(fault: str, tmp_path: Path) -> None:
    hostfile = tmp_path / "good.txt"
    where = f"node3:{fault}" if fault.partition(":")[1] == "" else f"node3.{fault}"
    faults = ["--fault", where, "--fault", "node1:bandwidth=0.5"]
    result = gpubench("scan", "--simulate", "hgx-h100-8*8", *faults, "--hostfile", str(hostfile))
    kept = {line.split()[0] for line in hostfile.read_text().splitlines()}
    assert kept == {f"node{number}" for number in range(8)} - {"node1", "node3"}
    assert f"and 2 more: written to {hostfile}" in " ".join(result.stdout.split())
    assert "6 are healthy" in result.stdout.splitlines()[-1]


def test_wrong_data_inside_a_node_are_a_failure() -> None:
    result = gpubench("scan", "--quick", "--simulate", "hgx-h100-8*4", "--fault", "node2.link0-1:corrupts=yes")
    assert result.returncode == 1
    assert "FAIL wrong-data: node2 GPU0 and GPU1" in result.stdout
    assert "1 of 4 nodes is bad: node2 GPU0 and GPU1" in result.stdout
    assert "slow" not in result.stdout.partition("\nFAIL wrong-data")[2]
