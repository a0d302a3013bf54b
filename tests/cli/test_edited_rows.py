"""Seconds of a recording × a factor: what each command says of them. A kind is a line."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app

Edit = Callable[[dict[str, Any]], object]
K, M, G = 2**10, 2**20, 2**30
HOST = Path("tests/cli/recordings/host")


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document."""
    result = CliRunner().invoke(app, [*arguments, "--format", "json"])
    return result.exit_code, json.loads(result.stdout)


@cache
def recorded(machine: str, command: str = "allreduce") -> Path:
    """A recording of a healthy machine."""
    if machine == "host":
        return HOST
    folder = Path(mkdtemp()) / "seen"
    run(command, "--simulate", machine, "--record", str(folder))
    return folder


def replayed(tmp_path: Path, machine: str, edit: Edit, command: str = "allreduce", *options: str) -> dict[str, Any]:
    """The document of a recording whose rows were edited."""
    folder = tmp_path / "edited"
    shutil.copytree(recorded(machine, command), folder)
    samples = folder / f"{command}.jsonl"
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    for line in lines:
        for row in [line["row"]] if line.get("row") else line.get("collectives", []):
            edit(row)
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run(command, "--replay", str(folder), *options)[1]


def said(document: dict[str, Any]) -> list[str]:
    """Severity and id of all findings but those that every such machine has."""
    return [f"{each['severity']} {each['id']}" for each in document["findings"]]


def slower(low: int, high: int, times: float, placement: str = "_place", rank: int | None = None) -> Edit:
    """Rows from `low` to `high` bytes take that many times as long, on all ranks or on one."""

    def edit(row: dict[str, Any]) -> None:
        case = row["case"]
        if low <= 4 * case["layout"]["count"] <= high and case["placement"].endswith(placement):
            for number, answer in enumerate(row["sample"]["answers"]):
                answer["seconds"] *= times if rank in (None, number) else 1.0

    return edit


def wrong(low: int, rank: int) -> Edit:
    def edit(row: dict[str, Any]) -> None:
        if 4 * row["case"]["layout"]["count"] == low and row["case"]["placement"] == "out_of_place":
            row["sample"]["answers"][rank]["wrong"] = 1

    return edit


def noisy(row: dict[str, Any]) -> None:
    row["sample"]["own"]["interval"] = 4.16


ALONE, NOISE = "out_of_place", ["INCONCLUSIVE figures-too-noisy"]
HGX, PCIE = ("hgx-h100-8", "hgx-h200-4", "hgx-b200-8"), ("l40s-8", "a100-pcie-2")
KINDS: list[tuple[str, tuple[str, ...], Edit, list[str]]] = [
    ("healthy", (*HGX, *PCIE, "hgx-h100-8*2", "host"), slower(0, 0, 1.0), []),
    ("the same 2 % slower", (*HGX, *PCIE), slower(0, 8 * G, 1.02), []),
    ("one row × 3", (*HGX, *PCIE), slower(16 * M, 16 * M, 3.0, ALONE), NOISE),
    ("one small row × 3", ("hgx-h200-4",), slower(64 * K, 64 * K, 3.0, ALONE), NOISE),
    ("the largest row × 3", (*HGX, *PCIE), slower(4 * G, 4 * G, 3.0, ALONE), NOISE),
    ("both rows of a size × 3", (*HGX, *PCIE), slower(16 * M, 16 * M, 3.0), ["FAIL slow-unexplained"]),
    ("all rows × 2.5", (*HGX, *PCIE), slower(0, 8 * G, 2.5), ["FAIL slow-unexplained"]),
    ("medium sizes × 1.3", (*HGX, *PCIE), slower(M, 8 * M, 1.3), ["WARN slow-range"]),
    ("large sizes × 1.08", ("hgx-h100-8", "hgx-b200-8", *PCIE), slower(64 * M, 256 * M, 1.08), ["WARN slow-range"]),
    ("large sizes × 1.3", ("hgx-h100-8", "hgx-b200-8", *PCIE), slower(64 * M, 256 * M, 1.3), ["WARN slow-range"]),
    ("large sizes × 1.3, known", ("hgx-h200-4",), slower(64 * M, 256 * M, 1.3), ["FAIL slow-unexplained"]),
    ("one rank × 1.08", (*HGX, *PCIE), slower(0, 8 * G, 1.08, rank=1), ["WARN straggler"]),
    ("one rank × 1.3", (*HGX, *PCIE), slower(0, 8 * G, 1.3, rank=1), ["WARN straggler"]),
    ("a wrong element on one rank", (*HGX, *PCIE), wrong(M, 1), ["FAIL wrong-data"]),
    ("a wrong element on one rank", ("host",), wrong(8 * K, 1), ["FAIL wrong-data"]),
    ("a wrong element in the smallest row", (*HGX, *PCIE), wrong(8, 0), ["FAIL wrong-data"]),
    ("a wrong element in the smallest row", ("host",), wrong(K, 0), ["FAIL wrong-data"]),
    ("noise", ("host",), noisy, NOISE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "edit", "expected"),
    [
        pytest.param(machine, edit, expected, id=f"{name}, {machine}")
        for name, machines, edit, expected in KINDS
        for machine in machines
    ],
)
def test_edited_rows_are_judged(machine: str, edit: Edit, expected: list[str], tmp_path: Path) -> None:
    document = replayed(tmp_path, machine, edit)
    assert said(document) == expected
    worst = expected[0].partition(" ")[0] if expected else "PASS"
    assert document["verdict"] == worst


def edited(**times: float) -> Edit:
    """Columns of a row of a recorded check, × a factor."""
    return lambda row: row.update({name: row[name] * factor for name, factor in times.items()})


CHECKED: list[tuple[str, Edit, list[str]]] = [
    ("healthy", edited(), []),
    ("time × 2", edited(time_us=2), ["FAIL slow-unexplained"]),
    ("bandwidth halved", edited(algbw_gb_s=0.5, busbw_gb_s=0.5), ["FAIL slow-unexplained"]),
    ("busbw halved", edited(busbw_gb_s=0.5), ["FAIL slow-unexplained"]),
    ("halved, as expected", edited(busbw_gb_s=0.5, expected_gb_s=0.5, expected_us=2), ["FAIL slow-unexplained"]),
    ("a late rank", lambda row: row.update(time_us_slowest_rank=1.3 * row["time_us"]), ["WARN straggler"]),
    ("noise", lambda row: row.update(ci95_percent=416.0), NOISE),
    ("wrong data", lambda row: row.update(wrong=int(row["size_bytes"] == K)), ["FAIL wrong-data"]),
]


@pytest.mark.parametrize("machine", ["hgx-h100-8", "l40s-8"])
@pytest.mark.parametrize(("edit", "expected"), [each[1:] for each in CHECKED], ids=[each[0] for each in CHECKED])
def test_a_recorded_check_judges_its_rows_anew(machine: str, edit: Edit, expected: list[str], tmp_path: Path) -> None:
    one_rank: Edit = lambda row: row.update(slowest_rank=2)  # noqa: E731 - a late rank is the same in all rows

    def both(row: dict[str, Any]) -> None:
        one_rank(row)
        edit(row)

    document = replayed(tmp_path, machine, both, "check")
    assert said(document) == expected


REAL = Path("tests/results/h200x4/check.json")


@pytest.mark.parametrize(("times", "expected"), [(1.0, []), (1.6, ["FAIL slow-unexplained"])])
def test_a_real_check_is_judged_anew(times: float, expected: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    shutil.copytree("tests/machines/h200x4-vm", folder)
    seen = json.loads(REAL.read_text())
    rows = [row | {"time_us": times * row["time_us"]} for row in seen["rows"]]
    left_out = dict.fromkeys(("peer copies", "host copies", "host memory"), "not part of this test")
    line = {"collectives": rows, "ranks": seen["metadata"]["ranks"], "left_out": left_out}
    (folder / "check.jsonl").write_text(json.dumps(line) + "\n")
    document = run("check", "--replay", str(folder))[1]
    assert [each for each in said(document) if "slow" in each] == expected
