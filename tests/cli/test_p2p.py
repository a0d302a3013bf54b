"""`gpubench p2p` as a user types it, on simulated machines and on one without GPUs."""

import csv
import io
import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from gpubench.model.results.report import PAIR_COLUMNS
from tests.cli.running import gpubench, mpirun
from tests.formats.schema import validate

MACHINE = ("p2p", "--simulate", "hgx-h200-4")


def rows(*arguments: str) -> list[dict[str, str]]:
    result = gpubench(*arguments, "--format", "csv")
    assert result.returncode == 0, result.stderr
    return list(csv.DictReader(io.StringIO(result.stdout)))


def test_matrices_for_people() -> None:
    result = gpubench(*MACHINE)
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert "(SIMULATED)" in text
    assert "256M, copy engine, written by the source, peer access on" in text
    assert "256M, copy engine, written by the source, peer access off: through host memory" in text
    assert "a copy of 16 bytes, copy engine" in text
    assert "bandwidth with peer access on, divided by bandwidth with it off" in text
    assert "ring        write" in text
    assert "PASS (simulated): " in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("width", [80, 100])
def test_eight_gpus_fit(width: int) -> None:
    result = gpubench("p2p", "--simulate", "hgx-h100-8", "--width", str(width))
    assert max(map(len, result.stdout.splitlines()[:-1])) <= width


def test_every_row_says_that_it_is_simulated_and_follows_the_schema() -> None:
    found = rows(*MACHINE)
    assert tuple(found[0]) == PAIR_COLUMNS
    assert {row["origin"] for row in found} == {"simulated"}
    assert {row["verified"] for row in found} == {"no"}
    assert {row["scope"] for row in found} == {"process"}
    pairs = [row for row in found if "host" not in (row["source"], row["destination"])]
    assert len(pairs) == 7 * 12
    assert len(found) - len(pairs) == 4 * 4


def test_a_pattern_takes_as_long_as_its_busiest_link() -> None:
    shown = gpubench("p2p", "--simulate", "hgx-h100-8", "--fault", "link0-1:staged=yes").stdout
    (line,) = (each for each in shown.splitlines() if each.startswith("all to one  write"))
    assert 255 < float(line.split()[5]) < 262, "the staged pair takes ten times as long, the six others share NVLinks"


def test_the_document_validates(tmp_path: Path) -> None:
    output = tmp_path / "p2p.json"
    assert gpubench(*MACHINE, "--output", str(output)).returncode == 0
    document = json.loads(output.read_text())
    validate(document)
    sections = ["pairs", "matrices", "ratios", "patterns", "evidence", "fallback", "causes", "tree", "findings"]
    assert list(document)[6:] == sections
    assert document["metadata"]["profile"]["name"] == "hgx-h200-4"
    assert document["ratios"]["GPU0"]["GPU1"] > 5


def test_a_staged_link_fails() -> None:
    result = gpubench(*MACHINE, "--fault", "link0-3:staged=yes")
    assert result.returncode == 1
    assert "FAIL host-staged: GPU0 → GPU3, GPU3 → GPU0" in result.stdout


def test_a_gpu_in_use_is_not_judged() -> None:
    found = rows(*MACHINE, "--fault", "gpu1:busy=4711", "--no-patterns")
    judged = [row for row in found if row["peer"] == "on" and int(row["size_bytes"]) > 16]
    for row in judged:
        in_use = "GPU1" in (row["source"], row["destination"])
        assert row["verdict"] == ("SKIP" if in_use else "PASS")
        assert ("GPU1 is in use by process 4711" in row["note"]) == in_use


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("gpu1:width=1", {("pcie-width", "FAIL")}),
        ("gpu1:busy=4711", {("gpu-in-use", "WARN")}),
        ("gpu1:lost=yes", {("gpu-lost", "FAIL")}),
        ("gpu1:missing=yes", {("gpu-missing", "FAIL")}),
    ],
)
def test_what_is_slow_missing_or_not_judged_is_no_pass(fault: str, found: set[tuple[str, str]]) -> None:
    arguments = ("p2p", "--simulate", "hgx-h100-4", "--fault", fault, "--no-patterns", "--strict", "--format", "json")
    result = gpubench(*arguments)
    document = json.loads(result.stdout)
    assert {(each["id"], each["severity"]) for each in document["findings"]} == found
    assert (result.returncode, document["verdict"]) == (1, "WARN" if ("gpu-in-use", "WARN") in found else "FAIL")


def test_small_copies_are_shown_by_what_they_take() -> None:
    text = gpubench(*MACHINE, "--sizes", "8K,64K").stdout.splitlines()
    corners = {title.split(",")[0]: corner.split()[0] for title, corner in pairwise(text) if ", copy engine" in title}
    assert corners == {"8K": "µs", "64K": "GB/s"}


def test_evidence_from_latencies_names_the_copies_that_it_compares() -> None:
    """It said `7.5 times as fast` above a table of bandwidths that differed by 1.1."""
    text = " ".join(gpubench("p2p", "--simulate", "l40s-8", "--sizes", "64M").stdout.split())
    assert "copies of 16 bytes are 7.5 times as fast as with peer access off" in text


def test_chosen_pairs_and_sizes_are_lines() -> None:
    found = rows(*MACHINE, "--pairs", "0-1,3-2", "--sizes", "8:1M:32")
    assert {(row["source"], row["destination"]) for row in found} == {("GPU0", "GPU1"), ("GPU3", "GPU2")}
    assert len(found) == 2 * 2 * 4
    assert all(row["bandwidth_gb_s"] and row["latency_us"] for row in found)
    text = gpubench(*MACHINE, "--pairs", "0-1", "--sizes", "8:1M:32").stdout
    assert "GPU0 → GPU1" in text


def test_nvbandwidth_s_parameters() -> None:
    result = gpubench(*MACHINE, "--as", "nvbandwidth")
    assert "each 16 copies after 4 warm-up copies" in result.stdout
    assert "512M, kernel, read by the destination" in result.stdout
    assert "many pairs" not in result.stdout


def test_one_gpu_copies_with_host_memory_only() -> None:
    result = gpubench("p2p", "--simulate", "hgx-h200-4/1")
    assert result.returncode == 0, result.stderr
    assert "one GPU: copies with host memory only" in result.stdout
    assert "to GPU, pinned" in result.stdout


def test_pairs_without_peer_access_are_measured_through_the_host() -> None:
    found = rows("p2p", "--simulate", "rtx-4090-2")
    assert {row["verdict"] for row in found if row["peer"] == "on"} == {"SKIP"}
    assert all(row["bandwidth_gb_s"] for row in found if row["peer"] == "off")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pairs", "0-4"], "there is no GPU4"),
        (["--pairs", "0-0"], "--pairs '0-0' is not a pair of GPUs"),
        (["--pairs", "zero-one"], "--pairs 'zero-one' is not a pair of GPUs"),
        (["--sizes", "1G:8"], "in the wrong order"),
        (["--as", "nvbandwith"], "try:      --as nvbandwidth"),
        (["--as", "nvbandwidth", "--sizes", "8"], "exclude each other"),
        (["--section", "pair"], "try:      --section pairs"),
        (["--fault", "gpu7:lost=yes"], "gpu7"),
        (["--replay", "x"], "--replay and --simulate exclude each other"),
        (["--record", "/proc/x"], "--record /proc/x cannot be written"),
        (["--output", "/nowhere/p2p.csv"], "No such file or directory"),
    ],
)
def test_wrong_usage_is_one_clear_message(arguments: list[str], said: str) -> None:
    result = gpubench(*MACHINE, *arguments)
    assert result.returncode == 2, result.stdout
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "broken",
    [
        [],
        ["--fault", "link0-3:staged=yes"],
        ["--fault", "gpu1:speed=0.4", "--fault", "gpu2:busy=9"],
        ["--sizes", "8,64M"],
    ],
)
def test_what_was_recorded_is_replayed(tmp_path: Path, broken: list[str]) -> None:
    folder = str(tmp_path / "recorded")
    shown = gpubench(*MACHINE, *broken, "--record", folder, "--format", "json")
    again = gpubench("p2p", "--replay", folder, "--format", "json")
    assert again.returncode == shown.returncode
    assert shown.stderr.endswith(again.stderr), "after a note on faults"
    measured, replayed = (json.loads(result.stdout) for result in (shown, again))
    for document in (measured, replayed):
        del document["duration_s"]
        document["metadata"] = {
            name: document["metadata"][name] for name in ("hosts", "options", "topology", "profile", "origin")
        }
    assert replayed == measured
    strictly = gpubench("p2p", "--replay", folder, "--strict").returncode
    strict = gpubench(*MACHINE, *broken, "--strict", "--record", f"{folder}-strict").returncode
    assert strict == strictly == gpubench("p2p", "--replay", f"{folder}-strict").returncode


def test_a_recording_is_not_overwritten_and_shows_its_topology_too(tmp_path: Path) -> None:
    folder = str(tmp_path / "recorded")
    assert gpubench(*MACHINE, "--record", folder).returncode == 0
    second = gpubench(*MACHINE, "--record", folder)
    assert second.returncode == 2
    assert "already has a recording" in second.stderr
    assert "GPU3" in gpubench("topo", "--replay", folder).stdout


def test_a_run_that_was_cut_short_is_replayed_as_far_as_it_went(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    assert gpubench(*MACHINE, "--record", str(folder)).returncode == 0
    samples = folder / "p2p.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[: len(lines) // 2]) + lines[-1][:20])
    result = gpubench("p2p", "--replay", str(folder), "--format", "csv")
    assert result.returncode == 3
    found = list(csv.DictReader(io.StringIO(result.stdout)))
    assert {row["note"] for row in found if row["verdict"] == "ERROR"} == {"not recorded: the run was cut short"}
    assert any(row["bandwidth_gb_s"] for row in found)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("p2p") / "recorded"
    assert gpubench(*MACHINE, "--pairs", "0-1", "--sizes", "8", "--record", str(folder)).returncode == 0
    return folder


def edited(line: str, **changes: object) -> str:
    return json.dumps(json.loads(line) | changes)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda lines: [], "p2p.jsonl: empty"),
        (lambda lines: ["junk", *lines[1:]], "p2p.jsonl, line 1: no JSON"),
        (
            lambda lines: [lines[0], '{"of": "x", "cell": {"seconds": [NaN]}}'],
            "line 2: no JSON (NaN, which is not a number)",
        ),
        (lambda lines: [lines[0], '{"of": "x", "cell": {"seconds": [0.0]}}'], "line 2.cell.seconds[0] is 0"),
        (lambda lines: [edited(lines[0], schema_version=2)], "line 1: schema_version 2"),
        (lambda lines: [edited(lines[0], unreachable=[[0, 9]])], "line 1: the pair [0, 9]"),
        (lambda lines: [edited(lines[0], hosts=["elsewhere"])], "samples of elsewhere"),
        (lambda lines: [edited(lines[0], hosts=[])], "line 1: ranks on more than 0 nodes"),
        (lambda lines: [edited(lines[0], wings=2)], "unknown field 'wings'"),
    ],
)
def test_a_damaged_recording_names_its_line(
    recorded: Path, edit: Callable[[list[str]], list[str]], said: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(recorded, tmp_path / "recorded"))
    samples = folder / "p2p.jsonl"
    samples.write_text("".join(f"{line}\n" for line in edit(samples.read_text().splitlines())))
    result = gpubench("p2p", "--replay", str(folder))
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_what_topo_recorded_has_no_samples(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    assert gpubench("topo", "--simulate", "hgx-h200-4", "--record", str(folder)).returncode == 0
    result = gpubench("p2p", "--replay", str(folder))
    assert result.returncode == 2
    assert "has no samples for p2p" in result.stderr


@pytest.mark.parametrize(
    ("machine", "fault", "code", "said"),
    [
        ("hgx-h100-8", "node0:silent=nvml", 3, "the driver of node0 does not answer: nvml, no answer"),
        ("hgx-h100-8", "node0:silent=cuda", 3, "the driver of node0 does not answer: cuda, no answer"),
        ("hgx-h100-8", "node0:driver_missing=yes", 3, "no usable GPU: "),
        ("hgx-h100-8*4", "node2.gpu3:nvlink=2", 2, "node2.gpu3:nvlink=2 is on a node that p2p does not measure"),
    ],
)
def test_a_simulated_node_that_nobody_can_measure_is_no_pass(machine: str, fault: str, code: int, said: str) -> None:
    result = gpubench("p2p", "--simulate", machine, "--fault", fault)
    if code == 3:
        collective = gpubench("allreduce", "--simulate", machine, "--fault", fault, "--sizes", "1K")
        assert (collective.returncode, said in collective.stderr) == (3, True), collective.stderr
    assert (result.returncode, said in result.stderr) == (code, True), result.stderr
    assert not result.stdout


def test_a_machine_without_gpus_says_what_it_needs() -> None:
    result = gpubench("p2p")
    if result.returncode == 0:
        pytest.skip("this machine has GPUs")
    assert result.returncode == 3
    assert "at least one NVIDIA GPU for p2p" in result.stderr
    assert "--simulate hgx-h200-4" in result.stderr


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_cannot_be_simulated_and_the_message_comes_once() -> None:
    result = mpirun(2, *MACHINE)
    assert result.returncode == 2
    assert (result.stderr + result.stdout).count("nothing is measured here") == 1


def test_colours_show_what_is_slow() -> None:
    broken = (*MACHINE, "--fault", "gpu1:speed=0.4")
    plain = gpubench(*broken).stdout
    coloured = gpubench(*broken, "--color", "always").stdout
    assert "\x1b[" not in plain
    assert "\x1b[1;31m157." in coloured
    assert "\x1b[1;32m39" in coloured


def test_sizes_on_a_single_gpu_say_that_it_has_nobody_to_copy_to() -> None:
    result = gpubench("p2p", "--simulate", "hgx-h200-4/1", "--sizes", "1M")
    assert result.returncode == 3
    assert result.stderr.startswith("gpubench: error: 1 GPU, but copies need two\n")
    assert "Traceback" not in result.stderr


def test_managed_memory_stands_beside_plain_memory(tmp_path: Path) -> None:
    output = tmp_path / "managed.json"
    result = gpubench("p2p", "--memory", "managed", "--simulate", "hgx-h200-2", "--output", str(output))
    assert result.returncode == 0, result.stderr
    assert "managed memory of GPU0-1: prefetch, advice and page faults; no HMM" in result.stdout
    head = next(line for line in result.stdout.splitlines() if line.startswith("from"))
    assert head.split("  ")[0] == "from"
    assert all(word in head for word in ("copy engine", "kernel", "prefetch", "page faults", "in place"))
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 100
    document = json.loads(output.read_text())
    validate(document)
    engines = {(row["engine"], row["source"] == "host") for row in document["pairs"]}
    assert {("prefetch", True), ("faults", False), ("in place", True), ("sm", True)} <= engines
    again = gpubench("report", str(output))
    assert [line for line in again.stdout.splitlines() if "GPU0  GPU1" in line]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "1M,2M"), "--memory managed with 2 sizes"),
        (("--as", "nvbandwidth"), "--as and --memory exclude each other"),
    ],
)
def test_managed_memory_is_of_one_size(arguments: tuple[str, ...], message: str) -> None:
    result = gpubench("p2p", "--memory", "managed", "--simulate", "hgx-h200-2", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_word_that_is_no_memory() -> None:
    result = gpubench("p2p", "--memory", "mangaed")
    assert result.returncode == 2
    assert "--memory managed" in result.stderr
