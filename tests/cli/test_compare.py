"""`gpubench compare` as a user types it."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from gpubench.measure.compare.report import SECTIONS
from gpubench.model.results.compare import CircumstanceRow, ComparisonRow, FindingChangeRow, HistoryRow
from tests.cli.running import ROOT, gpubench
from tests.fakes.old_nccl_tests import old_output
from tests.formats.schema import SCHEMA, validate

RECORDED = "tests/results/h200x4"
SIMULATED = ("--simulate", "hgx-h200-4", "--sizes", "64K:256M:4")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Simulated results: `a` and `b` differ in noise alone, `slow` has a link through host memory."""
    folder = tmp_path_factory.mktemp("results")
    how = {"a": ("--seed", "1"), "b": ("--seed", "2"), "slow": ("--fault", "link0-1:staged=yes")}
    for name, options in how.items():
        paths = [str(folder / f"{name}.{suffix}") for suffix in ("json", "csv", "jsonl")]
        outputs = [part for path in paths for part in ("--output", path)]
        assert gpubench("allreduce", *SIMULATED, *options, *outputs).returncode == ("--fault" in options)
    return folder


def test_noise_alone_passes(results: Path) -> None:
    result = gpubench("compare", str(results / "a.json"), str(results / "b.json"), "--width", "80")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].startswith("PASS (simulated): ")
    assert "(SIMULATED)" in result.stdout


@pytest.mark.parametrize("suffix", ["json", "csv", "jsonl"])
def test_a_staged_link_is_a_regression(results: Path, suffix: str) -> None:
    result = gpubench("compare", str(results / f"a.{suffix}"), str(results / f"slow.{suffix}"))
    assert result.returncode == 1
    assert "FAIL slower: " in result.stdout


def test_the_staged_run_of_four_h200_in_eighty_columns() -> None:
    result = gpubench("compare", f"{RECORDED}/all_reduce.txt", f"{RECORDED}/ar_NCCL_P2P_DISABLE_1.txt", "--width", "80")
    assert result.returncode == 1
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert "       7.9 %  " in result.stdout
    assert "4 × NVIDIA H200 on vm" in result.stdout
    assert "WARN missing-rows: 18 rows" in result.stdout
    assert "try:\n" not in result.stdout


@pytest.mark.parametrize(
    ("new", "code", "findings"),
    [("check-another-machine.json", 0, set()), ("check-p2p-disabled.json", 1, {"new-finding"})],
)
def test_real_checks_of_four_h200(new: str, code: int, findings: set[str]) -> None:
    """Of two healthy machines on 2026-11-20, and of a third with NCCL_P2P_DISABLE=1."""
    folder = ROOT / "tests" / "results" / "h200x4"
    result = gpubench("compare", str(folder / "check.json"), str(folder / new), "--format", "json")
    document = json.loads(result.stdout)
    assert result.returncode == code
    assert {each["id"] for each in document["findings"]} == findings
    assert {row["verdict"] for row in document["comparison"]} == ({"PASS", "FAIL"} if code else {"PASS"})


def test_json_follows_its_schema_and_csv_has_its_columns(results: Path, tmp_path: Path) -> None:
    paths = [str(results / name) for name in ("a.json", "slow.json")]
    outputs = [str(tmp_path / name) for name in ("out.json", "out.csv", "out.jsonl", "out.txt")]
    result = gpubench("compare", *paths, *(part for path in outputs for part in ("--output", path)))
    document = json.loads(Path(outputs[0]).read_text())
    validate(document)
    assert (result.returncode, document["verdict"], document["complete"]) == (1, "FAIL", True)
    lines = list(csv.DictReader(io.StringIO(Path(outputs[1]).read_text())))
    assert tuple(lines[0]) == ComparisonRow.columns()
    assert [line["verdict"] for line in lines] == sorted((line["verdict"] for line in lines), key="FAIL PASS".index)
    assert len(lines) == len(document["comparison"])
    changed = [row["name"] for row in document["circumstances"] if row["changed"]]
    assert "topology" not in changed
    assert tuple(document["circumstances"][0]) == CircumstanceRow.columns()
    for name, columns in (
        ("comparison_row", ComparisonRow.columns()),
        ("circumstance_row", CircumstanceRow.columns()),
        ("finding_change_row", FindingChangeRow.columns()),
    ):
        assert SCHEMA["$defs"][name]["required"] == list(columns)


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_as_csv(results: Path, section: str) -> None:
    paths = [str(results / name) for name in ("a.json", "slow.json")]
    result = gpubench("compare", *paths, "--format", "csv", "--section", section)
    assert result.returncode == 1
    assert len(result.stdout.splitlines()) > (section != FindingChangeRow.section)


def test_strict_and_threshold(results: Path) -> None:
    base, fewer = f"{RECORDED}/all_reduce.txt", str(results / "fewer.txt")
    lines = Path(base).read_text().splitlines(keepends=True)
    Path(fewer).write_text("".join(line for line in lines if "  4294967296 " not in line))
    assert gpubench("compare", base, fewer).returncode == 0
    assert gpubench("compare", base, fewer, "--strict").returncode == 1
    assert gpubench("compare", str(results / "a.json"), str(results / "b.json"), "--threshold", "0").returncode == 1


def test_several_runs_a_side(results: Path) -> None:
    base, new = str(results / "a.json"), str(results / "b.json")
    result = gpubench("compare", base, new, "--base", base, "--new", new, "--format", "csv")
    assert result.returncode == 0
    assert {(row["base_runs"], row["new_runs"]) for row in csv.DictReader(io.StringIO(result.stdout))} == {("2", "2")}


@pytest.mark.parametrize(
    ("new", "code", "said"),
    [
        (f"{RECORDED}/all_gather.txt", 3, "collective allgather, not allreduce"),
        ("missing.json", 2, "missing.json does not exist"),
        ("README.md", 2, "is not the start of a file that gpubench can read"),
    ],
)
def test_what_cannot_be_compared(new: str, code: int, said: str) -> None:
    result = gpubench("compare", f"{RECORDED}/all_reduce.txt", new)
    assert result.returncode == code
    assert said in (result.stdout if code == 3 else result.stderr)
    assert "Traceback" not in result.stderr


def test_another_machine_is_refused_unless_asked_for(results: Path) -> None:
    refused = gpubench("compare", f"{RECORDED}/all_reduce.txt", str(results / "a.json"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "simulated, not measured" in refused.stderr
    assert "--other-machine" in refused.stderr


@pytest.mark.parametrize("new", ["all_reduce.txt", "ar_NCCL_P2P_DISABLE_1.txt", "without-devices.txt"])
def test_other_machine_shows_a_table_without_a_verdict_whatever_differs(
    results: Path, tmp_path: Path, new: str
) -> None:
    lines = (ROOT / RECORDED / new.replace("without-devices", "ar_NCCL_P2P_DISABLE_1")).read_text().splitlines(True)
    path = tmp_path / new
    path.write_text("".join(line for line in lines if new != "without-devices.txt" or "#  Rank" not in line))
    for base in (results / "a.json", ROOT / RECORDED / "all_reduce.txt"):
        done = gpubench("compare", str(base), str(path), "--other-machine")
        assert done.returncode == 0
        assert done.stdout.splitlines()[-1].startswith("SKIP")


def test_two_machines_side_by_side(results: Path, tmp_path: Path) -> None:
    large = str(tmp_path / "large.json")
    gpubench("allreduce", "--simulate", "hgx-h100-8*16", "--sizes", "1K:1G:32", "--output", large)
    small = str(tmp_path / "small.json")
    gpubench("allreduce", "--simulate", "hgx-h100-8", "--sizes", "1K:1G:32", "--output", small)
    done = gpubench("compare", small, large, "--other-machine", "--width", "80")
    assert done.returncode == 0
    assert re.search(r"allreduce +8 → 128 +1G +\d+ → \d+ +0\.\d\d × ", done.stdout)
    assert "latency is not compared: 128 ranks, not 8 (times grow with the number of ranks)\n" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"SKIP \(simulated\): all-reduce reaches 0\.\d\d × per GPU at 1G \(\d+ → \d+ GB/s\)", last)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert gpubench("compare", small, large, "--other-machine", "--strict").returncode == 3


def test_a_newer_schema_is_refused(results: Path) -> None:
    document = json.loads((results / "a.json").read_text())
    newer = results / "newer.json"
    newer.write_text(json.dumps(document | {"schema_version": 99}))
    output = results / "never.json"
    result = gpubench("compare", str(results / "a.json"), str(newer), "--output", str(output))
    assert result.returncode == 2
    assert not output.exists()
    assert "newer.json has schema version 99" in result.stderr


def test_pairs(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{number}.json") for number in range(3)]
    for name, options in zip(names, ([], ["--seed", "5"], ["--fault", "link0-3:staged=yes"]), strict=True):
        gpubench("p2p", "--simulate", "hgx-h200-4", "--sizes", "16,256M", *options, "--output", name)
    assert gpubench("compare", names[0], names[1]).returncode == 0
    result = gpubench("compare", names[0], names[2], "--format", "json")
    assert result.returncode == 1
    found = {finding["id"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert "path-was-direct" in found
    assert set(found["path-was-direct"]["subjects"]) == {"GPU0 → GPU3", "GPU3 → GPU0"}


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four simulated runs of two commands; in the newest all-reduce a link goes through host memory."""
    folder = tmp_path_factory.mktemp("nights")
    for night in range(4):
        fault = ("--fault", "link0-1:staged=yes") if night == 3 else ("--seed", str(night))
        assert gpubench("allreduce", *SIMULATED, *fault, "--output", str(folder)).returncode == (night == 3)
    for seed in ("1", "2"):
        assert gpubench("allgather", *SIMULATED, "--seed", seed, "--output", f"{folder}/").returncode == 0
    (folder / "notes.txt").write_text("night 3: somebody changed a cable\n")
    return folder


def test_the_newest_of_a_folder_against_those_before_it(nights: Path) -> None:
    result = gpubench("compare", "--last", "2", str(nights), "--width", "80")
    assert (result.returncode, result.stderr) == (1, "")
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert "FAIL slower: 2026-" in result.stdout
    assert "allgather: 14 rows in common: 14 same" in result.stdout
    assert "older than the last 2" in result.stdout
    assert "left out: notes.txt: not named like a dated result" in result.stdout


def test_a_folder_in_json_and_csv(nights: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    result = gpubench(
        *("compare", "--last", "5", str(nights), "--output", str(output)), "--format", "csv", "--section", "history"
    )
    assert result.returncode == 1
    lines = list(csv.DictReader(io.StringIO(result.stdout)))
    assert tuple(lines[0]) == HistoryRow.columns()
    assert SCHEMA["$defs"]["history_row"]["required"] == list(HistoryRow.columns())
    uses = {use: sum(line["use"] == use for line in lines) for use in ("new", "base", "left out")}
    assert uses == {"new": 2, "base": 4, "left out": 1}
    document = json.loads(output.read_text())
    validate(document)
    assert {row["series"] for row in document["comparison"]} == {line["series"] for line in lines if line["series"]}


def test_the_usual_folder_and_one_without_anything_to_compare(tmp_path: Path) -> None:
    assert gpubench("allreduce", *SIMULATED, "--output", "results/", cwd=tmp_path).returncode == 0
    (kept,) = (tmp_path / "results").iterdir()
    result = gpubench("compare", "--last", "5", cwd=tmp_path)
    assert result.returncode == 3
    assert f"left out: {kept.name[:4]}" in result.stdout
    assert "the only result of allreduce" in result.stdout
    assert "ERROR nothing-before: results" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "compare without results"),
        (("base.json",), "try:      gpubench compare base.json new.json"),
        (("tests",), "try:      gpubench compare --last 5 tests"),
        (("--last", "5", "nowhere"), "there is no folder nowhere"),
        (("--last", "5", "README.md"), "README.md is not a folder"),
        (("--last", "0", "tests"), "--last"),
        (("--last", "5", "tests", "other"), "--last and NEW exclude each other"),
        (("--last", "5", "--new", "a.json", "--other-machine"), "--last and --new and --other-machine"),
        (("--last", "5", "--collective", "reduce"), "--last and --collective exclude each other"),
        (("a.json", "b.json", "--format", "csv", "--section", "history"), "--section 'history' is not known"),
    ],
    ids=lambda each: " ".join(each)[:40] if isinstance(each, tuple) else "",
)
def test_a_folder_or_two_files(arguments: tuple[str, ...], said: str) -> None:
    result = gpubench("compare", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_person_says_which_collective_a_file_is_of(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_text(old_output("all_gather"))
    refused = gpubench("compare", str(path), str(path))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "the collective is not named" in refused.stderr
    assert "--collective allgather" in refused.stderr
    for name in ("allgather", "all_gather", "all_gather_perf"):
        result = gpubench("compare", str(path), str(path), "--collective", name)
        assert (result.returncode, "allgather: 4 rows in common" in result.stdout) == (0, True)
    for name, said in (("broadcast", "its rows are not of broadcast"), ("allgatter", "--collective allgather")):
        refused = gpubench("compare", str(path), str(path), "--collective", name)
        assert (refused.returncode, said in refused.stderr) == (2, True)


CHECKED = ("check", "--simulate", "hgx-h200-4")


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checks of simulated machines: one that is well, with another seed, and with GPUs that are not as they were."""
    folder = tmp_path_factory.mktemp("checks")
    how: dict[str, tuple[str, ...]] = {
        "well": (),
        "again": ("--seed", "2"),
        "bad": ("--fault", "gpu2:rows=failure", "--fault", "gpu1:temperature=88"),
        "fewer": ("--fault", "gpu2:missing=yes"),
    }
    for name, options in how.items():
        outputs = [part for suffix in ("json", "jsonl") for part in ("--output", str(folder / f"{name}.{suffix}"))]
        assert gpubench(*CHECKED, *options, *outputs).returncode == (1 if name == "bad" else 0)
        assert gpubench(*CHECKED, "--quick", *options, "--output", str(folder / f"q-{name}.json")).returncode in (0, 1)
    return folder


@pytest.mark.parametrize(
    ("base", "new", "code", "said"),
    [
        ("well.json", "again.jsonl", 0, "PASS (simulated): "),
        ("well.json", "bad.json", 1, "FAIL new-finding: row-remap-failed: GPU2 (0000:00:08.0)"),
        ("well.json", "bad.json", 1, "WARN new-finding: gpu-hot: GPU1 (0000:00:07.0)"),
        ("bad.jsonl", "well.json", 0, "gone: FAIL row-remap-failed: GPU2 (0000:00:08.0)"),
        ("q-well.json", "q-bad.json", 1, "findings: 2 new"),
        ("q-well.json", "q-fewer.json", 1, "FAIL device-gone: GPU2 (0000:00:08.0)"),
        ("well.json", "fewer.json", 1, "FAIL device-gone: GPU2 (0000:00:08.0)"),
        ("well.json", "q-well.json", 0, "WARN not-looked-at"),
    ],
)
def test_did_my_machine_get_worse(checks: Path, base: str, new: str, code: int, said: str) -> None:
    result = gpubench("compare", str(checks / base), str(checks / new), "--width", "120")
    assert (result.returncode, result.stderr) == (code, ""), result.stdout
    assert said in result.stdout
    assert "NVIDIA H200 on node0" in " ".join(result.stdout.split())
    assert "(SIMULATED)" in result.stdout


def test_findings_of_two_checks_in_json_and_csv(checks: Path) -> None:
    paths = [str(checks / name) for name in ("q-well.json", "q-bad.json")]
    document = json.loads(gpubench("compare", *paths, "--format", "json").stdout)
    validate(document)
    assert {(row["finding"], row["status"], row["verdict"]) for row in document["finding_changes"]} == {
        ("row-remap-failed", "new", "FAIL"),
        ("gpu-hot", "new", "WARN"),
    }
    lines = gpubench("compare", *paths, "--format", "csv", "--section", "finding_changes").stdout
    assert [line["subject"] for line in csv.DictReader(io.StringIO(lines))] == [
        "GPU2 (0000:00:08.0)",
        "GPU1 (0000:00:07.0)",
    ]


def test_a_folder_of_checks_every_night(tmp_path: Path) -> None:
    for options in (("--seed", "1"), ("--seed", "2"), ("--fault", "gpu2:missing=yes")):
        assert gpubench(*CHECKED, "--quick", *options, "--output", f"{tmp_path}/").returncode == 0
    result = gpubench("compare", "--last", "5", str(tmp_path))
    assert result.returncode == 1
    assert "FAIL device-gone: GPU2 (0000:00:08.0)" in result.stdout


def test_a_finding_edited_by_hand_is_refused(checks: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited.json"
    edited.write_text((checks / "q-bad.json").read_text().replace('"severity": "FAIL"', '"severity": "BAD"'))
    result = gpubench("compare", str(checks / "q-well.json"), str(edited))
    assert (result.returncode, result.stdout) == (2, "")
    assert "findings[0]" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("factor", "spread"), [(1.3, 0.5), (3.0, 1.0), (10.0, 50.0), (3.0, 1e308)])
def test_a_run_so_noisy_that_it_hides_any_slowdown_is_no_pass(tmp_path: Path, factor: float, spread: float) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    gpubench("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1M,64M", "-o", str(old))
    document = json.loads(old.read_text())
    document["metadata"]["topology"] = 1e308
    for row in document["rows"]:
        row["time_us"] *= factor
        row["batch_cv"] = spread
    new.write_text(json.dumps(document))
    compared = gpubench("compare", str(old), str(new), "--strict")
    assert (compared.returncode, compared.stdout.splitlines()[-1].partition(" (simulated):")[0]) == (1, "INCONCLUSIVE")
