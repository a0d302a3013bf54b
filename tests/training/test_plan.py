"""`gpubench plan` as a user runs it: from recorded curves, from profiles, and with what cannot be."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpubench.training.cluster import SIZES, measured_now
from gpubench.training.report import SECTIONS
from tests.cli.running import ROOT, gpubench, without_gpus

RECORDED = ROOT / "tests" / "plan" / "h200x2"
GPT = "layers = 16\nhidden = 2048\nheads = 16\nsequence = 2048\nbatch = 4\nbiases = true\n"
GIVEN = ("--tflops", "513")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "gpt-0.8B.toml"
    path.write_text(GPT)
    return str(path)


def overlap_of(tmp_path: Path, ctas: str = "own") -> str:
    """Contention of a simulated machine: waiting for GEMMs of 1.5 ms."""
    path = tmp_path / "overlap.json"
    sizes = ("--sizes", "16M,64M,256M", "--ctas", ctas)
    assert gpubench("overlap", "--simulate", "hgx-h200-2", *sizes, "--output", str(path)).returncode == 0
    return str(path)


@without_gpus
def test_stored_curves_make_a_step(model: str, tmp_path: Path) -> None:
    page, document = tmp_path / "p.html", tmp_path / "p.json"
    result = gpubench(
        *("plan", model, "--results", str(RECORDED / "healthy"), *GIVEN, "--layout", "ddp"),
        *("--output", str(page), "--output", str(document)),
    )
    assert result.returncode == 0, result.stderr
    assert "plan  gpt-0.8B on 2 GPUs (NVIDIA H200)  (RECORDED)\n" in result.stdout
    assert "806 M parameters: 16 layers" in result.stdout
    assert "contention between compute and communication was not measured. As on two H200s" in result.stdout
    assert re.match(
        r"SKIP: a step of ddp takes 9\d\.\d ms, of which communication costs", result.stdout.splitlines()[-1]
    )
    found = json.loads(document.read_text())
    assert set(SECTIONS) <= found.keys()
    (row,) = found["layouts"]
    assert row["step_ms"] == pytest.approx(row["compute_ms"] + row["slowed_ms"] + row["exposed_ms"] + row["bubble_ms"])
    assert row["step_least_ms"] <= row["step_ms"] <= row["step_most_ms"]
    assert f"collectives measured: {RECORDED / 'healthy' / 'allreduce.json'}" in found["metadata"]["options"]["notes"]
    text = page.read_text()
    assert "<li>contention between compute and communication was not measured. As on two H200s" in text


@without_gpus
def test_a_staged_fabric_is_said_to_be_one_and_what_it_costs(model: str, tmp_path: Path) -> None:
    overlap = overlap_of(tmp_path)
    command = ("plan", model, *GIVEN, "--layout", "ddp", "--overlap", overlap, "--results")
    healthy = gpubench(*command, str(RECORDED / "healthy"), "--format", "json")
    staged = gpubench(*command, str(RECORDED / "staged"), "--format", "json")
    quick, slow = (json.loads(each.stdout) for each in (healthy, staged))
    assert slow["layouts"][0]["step_ms"] > 1.05 * quick["layouts"][0]["step_ms"]
    assert "slower than on the fabric that hgx-h200-2 expects" in slow["sentence"]
    assert any("went through host memory" in note for note in slow["metadata"]["options"]["notes"])
    assert [row["fault"] for row in slow["fault_costs"]] == ["none"]
    assert slow["fault_costs"][0]["slower_percent"] < -4
    assert quick["metadata"]["options"]["contention_assumed"] is False


def test_a_bucket_of_your_own_is_taken(model: str) -> None:
    command = ("plan", model, *GIVEN, "--layout", "ddp", "--results", str(RECORDED / "healthy"))
    result = gpubench(*command, "--bucket-mb", "1000", "--format", "json")
    found = json.loads(result.stdout)
    assert found["layouts"][0]["bucket_mb"] == 1000


def test_a_profile_stands_for_a_machine_and_is_labelled() -> None:
    result = gpubench("plan", "--parameters", "7B", "--simulate", "hgx-h200-8")
    assert result.returncode == 0, result.stderr
    assert "on 8 GPUs (NVIDIA H200)  (SIMULATED)" in result.stdout
    computed = re.sub(r"\s+", " ", result.stdout)
    assert "products at 48% to 66% of the 989 TFLOP/s in the data sheet of NVIDIA H200" in computed
    assert re.search(r"a step of \S+ takes \d+ to \d+ ms, of which communication costs \d+ %", result.stdout)
    assert "collectives expected: profile hgx-h200-8" in result.stdout
    assert re.search(r"link0-1:staged=yes +a pair that goes through host memory", result.stdout)
    assert re.search(r"gpu0:nvlink=9 +a GPU with 9 NVLinks", result.stdout)


def test_nodes_are_planned_for_and_their_rails() -> None:
    command = ("plan", "--parameters", "13B", "--simulate", "hgx-h100-8", "--nodes", "4", "--layout", "tp8 ddp")
    result = gpubench(*command, "--layout", "fsdp", "--format", "json")
    found = json.loads(result.stdout)
    assert {row["gpus"] for row in found["layouts"]} == {32}
    assert "nic0:bandwidth=0.5" in {row["fault"] for row in found["fault_costs"]}
    notes = found["metadata"]["options"]["notes"]
    assert {each for each in notes if each.startswith("collectives")} == {
        "collectives expected: profile hgx-h100-8",
        "collectives expected: profile hgx-h100-8, between nodes by a model of NICs",
    }


def test_faults_that_a_check_found_are_costed(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    faults = ("--fault", "gpu1:nvlink=9", "--fault", "link0-2:staged=yes")
    gpubench("check", "--simulate", "hgx-h200-4", *faults, "--output", str(file))
    result = gpubench(
        *("plan", "--parameters", "1B", "--simulate", "hgx-h200-4", "--layout", "fsdp"),
        *("--faults-from", str(file), "--format", "json"),
    )
    found = {row["fault"]: row for row in json.loads(result.stdout)["fault_costs"]}
    assert found.keys() == {"gpu1:nvlink=9", "link0-2:staged=yes"}
    assert {row["source"] for row in found.values()} == {"check.json"}
    assert found["link0-2:staged=yes"]["slower_percent"] > found["gpu1:nvlink=9"]["slower_percent"] >= 0


def test_faults_that_a_scan_found_are_costed(tmp_path: Path) -> None:
    file = tmp_path / "scan.json"
    machine = "hgx-h100-8*16"
    gpubench("scan", "--simulate", machine, "--fault", "node3.nic2:bandwidth=0.5", "--output", str(file))
    result = gpubench(
        *("plan", "--parameters", "7B", "--simulate", machine, "--layout", "fsdp"),
        *("--faults-from", str(file), "--format", "json"),
    )
    (row,) = json.loads(result.stdout)["fault_costs"]
    assert (row["fault"], row["what"]) == ("nic2:bandwidth=0.5", "a slow rail")


def test_a_model_that_does_not_fit_is_told_what_would() -> None:
    result = gpubench("plan", "--parameters", "70B", "--simulate", "hgx-h200-4")
    assert result.returncode == 2
    assert "70B does not fit 4 × NVIDIA H200: 'fsdp' takes 263.9 GiB of 140.4 GiB per GPU" in result.stderr
    assert re.search(
        r"try: +--simulate 'hgx-h200-4\*4' --layout fsdp, which takes \d+\.\d GiB on each of 16 GPUs", result.stderr
    )
    ddp = ("plan", "--parameters", "13B", "--simulate", "hgx-h200-8", "--layout", "ddp")
    refused = gpubench(*ddp)
    assert refused.returncode == 2
    assert re.search(r"try: +--layout fsdp, which takes \d+\.\d GiB on each of 8 GPUs", refused.stderr)
    ran = gpubench(*ddp, "--step", "1s")
    assert ran.returncode == 0, "what was measured did fit"
    both = gpubench(*ddp, "--layout", "fsdp")
    assert "ddp is left out: its states take 187.5 GiB per GPU" in both.stdout


H200 = ("--simulate", "hgx-h200-4")
HEALTHY = ("--results", str(RECORDED / "healthy"))


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ((), "neither MODEL nor --parameters"),
        (("m.toml", "--parameters", "7B"), "MODEL and --parameters"),
        (("nowhere.toml", *H200), "nowhere.toml does not exist"),
        (("--parameters", "7", *H200), "--parameters 7: no unit"),
        (("--parameters", "1B", *H200, "--layout", "tp3"), "needs a multiple of 3 GPUs, but there are 4"),
        (("--parameters", "1B", *H200, "--layout", "tp2 tp2"), "is not part of a layout, or is repeated"),
        (("--parameters", "1B", *H200, "--layout", "pp4 v8"), "16 layers are fewer than 32 stages"),
        (("--parameters", "1B", *H200, "--recompute", "all"), "'all'"),
        (("--parameters", "1B", *H200, "--step", "412ms"), "a measured step without --layout"),
        (("--parameters", "1B", *H200, "--layout", "ddp", "--step", "412"), "--step 412 is not the time of a step"),
        (("--parameters", "1B", *H200, "--layout", "ddp", "--step", "1ms"), "a step of ddp in 1 ms on 4 GPUs"),
        (("--parameters", "1B", *H200, "--tflops", "3", "--step", "412ms"), "exclude each other"),
        (("--parameters", "1B", "--simulate", "hgx-a100-8", "--fp8"), "--fp8 on NVIDIA A100"),
        (("--parameters", "1B", *H200, "--measure"), "--measure without a GPU"),
        (("--parameters", "1B", *H200, "--measure", "--tflops", "3"), "exclude each other"),
        (("--parameters", "1B", *H200, "--gpus", "5"), "--gpus 5 of a machine with 4"),
        (("--parameters", "1B", *H200, "--fault", "gpu9:nvlink=3"), "there is no GPU 9"),
        (("--parameters", "1B", "--simulate", "host"), "has no GPUs"),
        (("--parameters", "1B", "--simulate", "rtx-pro-6000-8"), "the compute speed of"),
        (("--parameters", "1B", "--simulate", "hgx-h100-8", *HEALTHY), "results are from"),
        (("--parameters", "1B", *H200, "--results", "docs"), "docs has no results for a collective"),
        (("--parameters", "1B", *H200, "--overlap", "README.md"), "README.md"),
        (
            ("--parameters", "1B", *H200, "--overlap", str(RECORDED / "healthy" / "allreduce.json")),
            "has no overlap rows",
        ),
        (("--parameters", "1B", *H200, "--nodes", "2", "--simulate", "hgx-h200-4*4"), "differ"),
    ],
)
def test_what_cannot_be_has_one_message(words: tuple[str, ...], seen: str) -> None:
    result = gpubench("plan", *words)
    assert result.returncode == 2, result.stdout
    assert seen in result.stderr
    assert "Traceback" not in result.stderr
    assert "expected:" in result.stderr


@without_gpus
def test_a_collective_that_nobody_knows_is_named(tmp_path: Path, model: str) -> None:
    """Results without GPUs' names match no profile, so there is nothing to fall back to."""
    text = (ROOT / "tests/results/h200x4/all_reduce.txt").read_text()
    file = tmp_path / "all_reduce.txt"
    file.write_text(re.sub(r"NVIDIA H200", "Some GPU", text))
    command = ("plan", model, "--results", str(file), "--tflops", "500")
    assert gpubench(*command, "--layout", "ddp").returncode == 0
    result = gpubench(*command, "--layout", "zero1")
    assert result.returncode == 2
    assert "there is no time for reducescatter among 4 ranks" in result.stderr
    assert "Known: allreduce of 4" in result.stderr
    everything = gpubench(*command)
    assert everything.returncode == 0, everything.stderr
    assert "zero1 is left out: there is no time for reducescatter among 4 ranks" in everything.stdout


@pytest.fixture(scope="module")
def simulated_curve(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("curve") / "nccl.json"
    assert (
        gpubench("allreduce", "--simulate", "hgx-h100-8", "--sizes", "1M:1G:4", "--output", str(path)).returncode == 0
    )
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def stored(folder: Path, name: str, document: dict[str, Any], **changes: object) -> Path:
    rows = [row | changes | {"time_us": row["time_us"] * 1000} for row in document["rows"]] if changes else None
    (folder / name).write_text(json.dumps(document | ({"rows": rows} if rows else {})))
    return folder


def step_and_notes(*words: str) -> tuple[float, str]:
    result = gpubench("plan", *words, "--layout", "ddp", "--format", "json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    return found["layouts"][0]["step_ms"], json.dumps(found["metadata"])


def test_backends_of_one_table_are_never_one_curve(model: str, tmp_path: Path, simulated_curve: dict[str, Any]) -> None:
    machine = ("--simulate", "hgx-h100-8", "--results")
    alone, _ = step_and_notes(model, *machine, str(stored(tmp_path, "nccl.json", simulated_curve)))
    stored(tmp_path, "gloo.json", simulated_curve, backend="torch:gloo")
    both, notes = step_and_notes(model, *machine, str(tmp_path))
    assert both == alone
    assert "allreduce was measured with simulated. Left out: torch:gloo" in notes
    only, notes = step_and_notes(model, *machine, str(tmp_path / "gloo.json"))
    assert only > alone
    assert "torch:gloo, which is unusual for training on GPUs" in notes


def test_times_of_wrong_data_are_no_curve(model: str, tmp_path: Path, simulated_curve: dict[str, Any]) -> None:
    machine = ("--simulate", "hgx-h100-8")
    expected, _ = step_and_notes(model, *machine)
    stored(tmp_path, "wrong.json", simulated_curve, wrong=7)
    found, notes = step_and_notes(model, *machine, "--results", str(tmp_path / "wrong.json"))
    assert found == expected
    assert "rows of allreduce with wrong data are left out" in notes


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"partner_count": 0}, "overlap[0].partner_count is 0"),
        ({"communication_alone_us": -1.0}, "overlap[0].communication_alone_us is -1.0"),
        ({"communication_slowdown": -5.0}, "overlap[0].communication_slowdown is -5.0"),
    ],
)
def test_overlap_that_cannot_have_been_measured_is_refused(
    tmp_path: Path, changes: dict[str, float], seen: str
) -> None:
    path = Path(overlap_of(tmp_path))
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"overlap": [row | changes for row in document["overlap"]]}))
    result = gpubench("plan", "--parameters", "1B", "--simulate", "hgx-h200-2", "--overlap", str(path))
    assert result.returncode == 2, result.stdout
    assert seen in result.stderr


def test_overlap_of_another_gpu_or_of_wrong_data_is_not_taken(tmp_path: Path) -> None:
    path = Path(overlap_of(tmp_path))
    other = gpubench("plan", "--parameters", "1B", "--simulate", "hgx-h100-8", "--overlap", str(path))
    assert other.returncode == 2
    assert "results are from NVIDIA H200" in other.stderr
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"overlap": [row | {"wrong": 3} for row in document["overlap"]]}))
    wrong = gpubench("plan", "--parameters", "1B", "--simulate", "hgx-h200-2", "--overlap", str(path))
    assert wrong.returncode == 0, wrong.stderr
    assert "3 rows of overlap left out" in wrong.stdout
    assert "contention between compute and communication was not measured" in wrong.stdout


def fault_costs_ms(machine: str, layout: str, *faults: str) -> set[float]:
    asked = [word for fault in faults for word in ("--fault", fault)]
    result = gpubench(
        "plan", "--parameters", "3B", "--simulate", machine, "--layout", layout, *asked, "--format", "json"
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    return {
        round(row["step_ms"] - found["layouts"][0]["step_ms"], 6)
        for row in found["fault_costs"]
        if row["fault"] in faults
    }


def test_a_fault_costs_the_same_on_every_node_and_gpu() -> None:
    (on_nodes,) = fault_costs_ms("hgx-h100-8*4", "tp8 ddp", "node0.gpu0:nvlink=9", "node3.gpu6:nvlink=9")
    assert on_nodes > 0
    (of_pairs,) = fault_costs_ms("hgx-h100-8", "tp2 dp4 ddp", "link0-1:staged=yes", "link6-7:staged=yes")
    assert of_pairs > 0


@pytest.mark.parametrize(
    ("fault", "seen"), [("node9.gpu0:nvlink=9", "there is no node 9"), ("node3.gpu9:nvlink=9", "there is no GPU 9")]
)
def test_a_fault_of_what_is_not_there_is_refused(fault: str, seen: str) -> None:
    result = gpubench(
        "plan", "--parameters", "3B", "--simulate", "hgx-h100-8*4", "--layout", "tp8 ddp", "--fault", fault
    )
    assert result.returncode == 2
    assert seen in result.stderr


def test_no_gpu_computes_infinitely_fast() -> None:
    result = gpubench("plan", "--parameters", "1B", *H200, "--tflops", "inf")
    assert result.returncode == 2
    assert "--tflops" in result.stderr


def test_what_is_measured_now_is_announced_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`allreduce` of a simulated machine in the place of the one that measures: minutes of it showed nothing."""
    announced: list[tuple[str, float]] = []
    commands: list[Sequence[str]] = []

    def run_command(arguments: Sequence[str], _timeout_s: float) -> None:
        commands.append(arguments)
        options = [each for each in arguments[1:] if each not in ("--np", "2", "--quiet")]
        stored = gpubench(arguments[0], "--simulate", "hgx-h200-2", *options)
        assert stored.returncode == 0, stored.stderr

    monkeypatch.setattr("gpubench.jobs.library.run_command", run_command)
    rows = measured_now(60, lambda label, seconds: announced.append((label, seconds)))("allreduce", 2)
    ((label, seconds),) = announced
    assert label == "measuring allreduce among 2 ranks"
    assert seconds > 10, "so that it is said where there is no terminal, too"
    assert list(commands[0][1:3]) == ["--np", "2"]
    assert {row.size_bytes for row in rows} == set(SIZES)


def test_a_measured_step_on_few_gpus_predicts_many(tmp_path: Path) -> None:
    """7 B of llm-foundry: 10,643 tokens a second and GPU on 8 H100s, 9,670 on 512."""
    file = tmp_path / "mpt-7b.toml"
    shape = "layers = 32\nhidden = 4096\nheads = 32\nvocabulary = 50368\ntied_embeddings = true\nsequence = 2048\n"
    file.write_text(shape)
    command = ("plan", str(file), "--batch", "6", "--layout", "fsdp", "--simulate", "hgx-h100-8*64")
    measured = ("--tokens-per-second", str(8 * 10643), "--measured-on", "8")
    found = json.loads(gpubench(*command, *measured, "--format", "json").stdout)
    (row,) = found["layouts"]
    assert row["tokens_per_second"] / 512 == pytest.approx(9670, rel=0.05)
    assert row["step_least_ms"] == row["step_most_ms"] == row["step_ms"]
    step = 1e3 * 6 * 2048 / 10643
    by_time = json.loads(gpubench(*command, "--step", f"{step}ms", "--measured-on", "8", "--format", "json").stdout)
    assert by_time["layouts"][0]["step_ms"] == pytest.approx(row["step_ms"], rel=1e-3)
    asked = json.loads(gpubench(*command, "--format", "json").stdout)["layouts"][0]
    assert asked["step_least_ms"] < row["step_ms"] < asked["step_most_ms"]


def test_tensor_parallelism_beyond_the_nvlinks_is_priced_and_said() -> None:
    command = ("plan", "--parameters", "7B", "--simulate", "hgx-h100-8*4", "--format", "json", "--layout")
    within, beyond = (json.loads(gpubench(*command, each).stdout) for each in ("tp8 ddp", "tp16 ddp"))
    assert beyond["layouts"][0]["exposed_ms"] > 2 * within["layouts"][0]["exposed_ms"]
    said = "tp16 crosses nodes, whose NVLink connects 8 GPUs, so its time is that of the NICs"
    assert said in beyond["metadata"]["options"]["notes"]
    assert said not in within["metadata"]["options"]["notes"]


def test_the_largest_pipelines_are_answered(tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    file.write_text("layers = 1024\nhidden = 8192\nheads = 64\nsequence = 4096\n")
    command = ("plan", str(file), "--simulate", "hgx-h100-8*1024", "--layout", "tp8 pp1024", "--global-batch", "512")
    (row,) = json.loads(gpubench(*command, "--format", "json").stdout)["layouts"]
    assert row["bubble_ms"] + row["exposed_ms"] > 0.6 * row["step_ms"]
