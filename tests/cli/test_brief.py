"""`gpubench` alone: a machine in ten lines, by the same measurements and judgements as `gpubench check`."""

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.collectives.registry import collective_named
from gpubench.jobs import check
from gpubench.jobs.check import ChildCommands, measured
from gpubench.jobs.plans import Depth
from gpubench.model.facts.snapshot import is_amd
from gpubench.model.paths.topology import Topology
from gpubench.model.results.figures import Need
from gpubench.profiles import all_profiles, load
from gpubench.simulated.machine import parse_machine, snapshots
from tests.cli.running import gpubench, mpirun
from tests.formats.schema import validate

DOWN = ("--simulate", "hgx-h100-8", "--fault", "gpu5:nvlink=12")
MOST_LINES = 12
"""Ten, and two where names are long."""


def labels(text: str) -> list[str]:
    """The words at the beginning of lines that do not go on from the line before."""
    return [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]


def test_a_healthy_machine_is_told_in_ten_lines() -> None:
    result = gpubench("--simulate", "hgx-h100-8")
    assert result.returncode == 0
    assert labels(result.stdout) == [
        *("gpubench", "machine", "software", "health", "copies", "allreduce", "problems", "next", "PASS")
    ]
    assert len(result.stdout.splitlines()) <= MOST_LINES
    assert "8 × NVIDIA H100 80GB HBM3" in result.stdout
    assert "problems  none found" in result.stdout
    assert len(re.findall(r"\(\d+ % of [\d.]+ expected\)", result.stdout)) == 2


MACHINES = [profile.name for profile in all_profiles() if profile.match.visible and not is_amd(profile.gpu.name)]


@pytest.mark.parametrize("name", MACHINES)
def test_the_copies_line_of_a_healthy_machine_has_the_slowest_large_copy_of_every_pair_once(name: str) -> None:
    """It had copies of 16 bytes, `0 GB/s (nothing is expected)`, and each pair twice, on 10 of 30 profiles."""
    result = CliRunner().invoke(app, ["--simulate", name, "--no-progress", "--width", "200"], catch_exceptions=False)
    line = next(line for line in result.stdout.splitlines() if line.startswith("copies "))
    found = re.fullmatch(
        r"copies +(?P<gb_s>[\d.]+) GB/s \((no expected value|(?P<percent>\d+) % of [\d.]+ expected)\): "
        r"(\S+ → \S+, the slowest with host memory|the slowest of (?P<pairs>\d+) pairs, GPU\d+ → GPU\d+; .+)",
        line,
    )
    assert found, line
    profile, gpus = load(name), load(name).match.visible
    assert found["percent"] is not None or not profile.typical("host_to_device_gb_s"), line
    assert found["percent"] is None or 95 <= int(found["percent"]) <= 105, line
    nodes = 1 if profile.domain is None else profile.domain.nodes
    assert found["pairs"] == (str(nodes * gpus * (gpus - 1)) if gpus > 1 else None), line
    said = re.search(r"p2p ([\d.]+) GB/s|host copies ([\d.]+)", result.stdout)
    assert said
    assert float(said[1] or said[2]) == pytest.approx(float(found["gb_s"]), rel=0.04), "as in the last line"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_what_is_wrong_is_named_with_its_cure_and_no_line_is_too_wide(width: int) -> None:
    result = gpubench(*DOWN, "--width", str(width))
    assert result.returncode == 1
    told = " ".join(result.stdout.split())
    assert "FAIL nvlink-down: GPU5 (0000:1b:00.0): 6 of 18 NVLinks down" in told
    assert "try nvidia-smi --gpu-reset -i 0000:1b:00.0" in told
    assert "7 PASS, 1 FAIL" in told
    assert re.search(r"67 % of 374 expected", told)
    *lines, sentence = result.stdout.splitlines()
    assert all(len(line) <= width or line.startswith("  try") for line in lines), "a command is not broken"
    assert sentence.startswith(
        "FAIL (simulated): node0 GPU5: 6 of 18 NVLinks down (links 12-17), all-reduce reaches 252 of 374 GB/s (67 %)"
    )


@pytest.mark.parametrize(
    ("machine", "kernel", "place"),
    [
        ({"chassis": "laptop", "product": "LENOVO 21HM"}, {}, "laptop: LENOVO 21HM"),
        ({"virtual_machine": True, "product": "Amazon EC2 p5.48xlarge"}, {}, "virtual machine: Amazon EC2 p5.48xlarge"),
        ({"container": "docker", "virtual_machine": True}, {}, "Docker container in a virtual machine"),
        ({"virtual_machine": True, "container": ""}, {"wsl": True}, "WSL 2 (Linux inside Windows)"),
        ({"virtual_machine": False, "container": ""}, {}, None),
    ],
)
def test_the_kind_of_place_has_a_line(
    tmp_path: Path, machine: dict[str, object], kernel: dict[str, object], place: str | None
) -> None:
    seen = tmp_path / "seen"
    assert gpubench("check", "--quick", "--simulate", "gh200-1", "--record", str(seen)).returncode == 0
    (file,) = (seen / "nodes").iterdir()
    node = json.loads(file.read_text())
    node |= {"machine": {"virtual_machine": False, **machine}, "kernel": node["kernel"] | kernel}
    file.write_text(json.dumps(node))
    told = [
        line for line in gpubench("--replay", str(seen), "--width", "80").stdout.splitlines() if line[:9] == "place    "
    ]
    assert told == ([] if place is None else [f"place     {place}"])


def test_it_finds_what_check_finds() -> None:
    def found(*arguments: str) -> list[tuple[str, str]]:
        document = json.loads(gpubench(*arguments, "--format", "json").stdout)
        validate(document)
        return [(each["id"], each["severity"]) for each in document["findings"]]

    for fault in ("gpu1:nvlink=12", "gpu0:fabric=in_progress", "gpu2:throttle=hw_slowdown", "link0-3:staged=yes"):
        machine = ("--simulate", "hgx-h100-8/4", "--fault", fault)
        assert found(*machine) == found("check", *machine), fault


def test_a_driver_that_does_not_answer_is_an_error_and_no_pass() -> None:
    result = gpubench("--simulate", "hgx-h100-8", "--fault", "node0:silent=nvml")
    assert result.returncode == 3
    assert result.stdout.splitlines()[-1].startswith("ERROR (simulated): ")
    assert "problems  none found" not in result.stdout


def test_quick_measures_nothing_and_says_so() -> None:
    result = gpubench("--quick", "--simulate", "hgx-h100-8")
    assert result.returncode == 0
    assert "speed     not measured: --quick" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("PASS (simulated): 8 × H100 80GB HBM3, speed not measured")


@pytest.mark.mpi
def test_without_a_gpu_it_shows_the_machine_and_passes_nothing() -> None:
    result = gpubench()
    if "GPUs:" in result.stdout:
        pytest.skip("this machine has GPUs")
    assert result.returncode == 0
    assert result.stdout.splitlines()[1].startswith("machine   no GPU")
    assert "GB/s at 1M (no expected value); 2 CPU ranks, by MPI" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("SKIP: no GPU")
    assert gpubench("--quick", "--strict").returncode == 3


@pytest.mark.mpi
def test_under_mpirun_the_first_rank_answers() -> None:
    result = mpirun(2)
    if "GPUs:" in result.stdout:
        pytest.skip("this machine has GPUs")
    assert result.returncode == 0
    assert result.stdout.count("gpubench 0.") == 1
    assert result.stdout.splitlines()[-1].startswith("SKIP: no GPU")


def test_what_it_ran_is_kept_and_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "today.json"
    shown = gpubench(*DOWN, "-o", str(path))
    document = json.loads(path.read_text())
    validate(document)
    assert {"nodes", "gpus", "nics", "checks", "verdicts", "pairs", "rows"} <= document.keys()
    assert gpubench("report", str(path)).stdout == shown.stdout


def test_its_copies_are_few_and_what_it_leaves_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def command(*words: str) -> list[str]:
        asked.append(words)
        return ["echo", '{"complete": true, "verdict": "PASS", "findings": []}']

    monkeypatch.setattr(check, "module_command", command)
    node = Topology(snapshots(parse_machine("hgx-h200-4"))[0])
    found = ChildCommands([node], Depth.BRIEF, 20.0).peer_and_host_copies()
    assert found.left_out == {Need.HOST_COPIES: "gpubench check measures them"}
    assert asked[0][1:5] == ("p2p", "--strict", "--sizes", "256M")


def test_its_collectives_on_gpus_may_take_long_enough_to_be_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def command(*words: str) -> list[str]:
        asked.append(words)
        return ["echo", '{"complete": true, "verdict": "PASS", "findings": [], "metadata": {"ranks": []}}']

    monkeypatch.setattr(check, "module_command", command)
    snapshot = snapshots(parse_machine("hgx-h200-4"))[0]
    for node in (Topology(snapshot), Topology(replace(snapshot, gpus=()))):
        ChildCommands([node], Depth.BRIEF, 20.0).collective(collective_named("allreduce"), (1024,))
    assert asked[0][2:5] == ("--sizes", "1024", "--out-of-place")
    timed = [words[words.index("--iters") : words.index("--budget") + 2] for words in asked]
    assert timed == [("--iters", "auto", "--budget", "1"), ("--iters", "auto", "--budget", "0.1")]


def test_it_is_not_one_of_the_commands_and_bad_options_are_refused() -> None:
    assert "Diagnose:" in gpubench("--help").stdout
    assert gpubench("--version").stdout.startswith("gpubench 0.")
    wrong = gpubench("--fast")
    assert (wrong.returncode, wrong.stderr.splitlines()[-1]) == (2, "  try:      python -m gpubench --help")
    assert gpubench("chekc").returncode == 2
    assert "ten lines" in gpubench("--quick", "--help").stdout


def test_a_machine_without_a_gpu_is_not_said_to_have_one() -> None:
    assert "not measured: no GPU, but a collective needs two" in gpubench("--simulate", "host").stdout


def test_of_gpus_that_cuda_hides_none_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = snapshots(parse_machine("hgx-h200-4"))[0]
    gpus = tuple(replace(gpu, cuda_index=0 if gpu.index == 2 else None) for gpu in snapshot.gpus)
    by = ChildCommands([Topology(replace(snapshot, gpus=gpus))], Depth.BRIEF, 20.0)
    assert by.why_alone == "one GPU, but a collective needs two"
    asked: list[tuple[str, ...]] = []

    def command(*words: str) -> list[str]:
        asked.append(words)
        return ["false"]

    monkeypatch.setattr(check, "module_command", command)
    by.peer_and_host_copies()
    assert "--no-patterns" in asked[0]
    assert "--sizes" not in asked[0]


def test_a_machine_with_neither_gpu_nor_mpi_is_shown_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "gpubench: error: no mpirun was found\n  try:      pip install 'gpubench-cluster[local]'"
    monkeypatch.setattr(check, "module_command", lambda *_: ["sh", "-c", f'echo "{words}" >&2; exit 3'])
    node = Topology(replace(snapshots(parse_machine("hgx-h200-4"))[0], gpus=()))
    found = measured(Depth.BRIEF, [node], ChildCommands([node], Depth.BRIEF, 20.0))
    assert found.failed == {}
    assert found.left_out[Need.ALL_REDUCE].startswith("gpubench allreduce ended with exit code 3: no mpirun was found")
    assert Need.ALL_REDUCE in measured(Depth.DEFAULT, [node], ChildCommands([node], Depth.DEFAULT, 20.0)).failed


def test_of_long_words_the_beginning_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"gpubench: error: no MPI; {'for a reason ' * 50}"
    monkeypatch.setattr(check, "module_command", lambda *_: ["sh", "-c", f'echo "{words}" >&2; exit 3'])
    node = Topology(snapshots(parse_machine("hgx-h200-4"))[0])
    (said,) = set(ChildCommands([node], Depth.BRIEF, 20.0).peer_and_host_copies().failed.values())
    assert "exit code 3: no MPI; for a reason" in said
    assert said.endswith(" ...")


def test_a_small_size_that_is_slow_and_passes_is_not_left_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "today.json"
    gpubench("--simulate", "hgx-h200-2", "-o", str(path))
    document = json.loads(path.read_text())
    small = min(document["rows"], key=lambda row: row["size_bytes"])
    assert "hosts can differ this much" not in gpubench("report", str(path)).stdout
    small |= {"time_us": small["expected_us"] / 0.6, "expected_percent": 60.0}
    path.write_text(json.dumps(document))
    told = " ".join(gpubench("report", str(path)).stdout.split())
    assert "µs at 1K (6.27 µs expected; hosts can differ this much)" in told
    small["verdict"] = "FAIL"
    path.write_text(json.dumps(document))
    assert "hosts can differ this much" not in gpubench("report", str(path)).stdout


@pytest.mark.parametrize("option", ["--full", "--kv", "--hosts", "--slurm", "--ranks-per-gpu"])
def test_an_option_that_only_check_has_names_check(option: str) -> None:
    ended = gpubench(option, "--simulate", "hgx-h200-4")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1] == f"  try:      gpubench check {option}"
    assert option in gpubench("check", "--help-all").stdout


@pytest.mark.parametrize(
    ("command", "title"), [((), "gpubench (SIMULATED)"), (("check",), "gpubench check (SIMULATED)")]
)
def test_a_page_has_the_command_as_its_title(command: tuple[str, ...], title: str, tmp_path: Path) -> None:
    gpubench(*command, "--simulate", "hgx-h200-4", "-o", str(tmp_path / "page.html"), "-o", str(tmp_path / "page.md"))
    assert f"<h1>{title}</h1>" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "page.md").read_text().startswith(f"# {title}: ")
