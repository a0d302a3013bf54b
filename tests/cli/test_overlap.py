"""`gpubench overlap` as a user starts it, on simulated machines."""

import csv
import io
import json
import shlex
from pathlib import Path

import pytest

from tests.cli.running import ROOT, gpubench

MACHINE = ("overlap", "--simulate", "hgx-h200-4")


def test_every_size_and_cap_has_a_row_that_is_labelled_as_simulated(tmp_path: Path) -> None:
    result = gpubench(*MACHINE, "--output", str(tmp_path / "x.json"))
    assert result.returncode == 0
    assert "(SIMULATED)" in result.stdout
    assert "the cap with the shortest step:" in result.stdout
    document = json.loads((tmp_path / "x.json").read_text())
    rows = document["overlap"]
    assert len({row["size_bytes"] for row in rows}) == 6
    assert [row["ctas"] for row in rows[:5]] == [None, 16, 8, 4, 2]
    assert {row["origin"] for row in rows} == {"simulated"}
    assert {row["verified"] for row in rows} == {"no"}
    assert len(document["shortest_steps"]) == 6
    assert len(document["rows"]) == 6
    assert document["metadata"]["options"]["collective"] == "allreduce"


def test_the_parts_of_a_row_add_up() -> None:
    result = gpubench(*MACHINE, "--sizes", "64M,1G", "--partner", "gemm,copy,chain", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert {row["partner"] for row in rows} == {"gemm", "copy", "chain"}
    for row in rows:
        number = {name: float(value) for name, value in row.items() if name.endswith(("_us", "slowdown", "share"))}
        assert number["communication_slowdown"] == pytest.approx(
            1 + number["waiting_slowdown"] + number["sharing_slowdown"]
        )
        assert number["together_us"] >= max(number["partner_together_us"], number["communication_together_us"])
        saved = number["partner_alone_us"] + number["communication_alone_us"] - number["together_us"]
        assert number["hidden_share"] == pytest.approx(saved / number["communication_alone_us"])


def test_a_staged_pair_is_a_finding_and_makes_the_step_longer() -> None:
    words = (*MACHINE, "--sizes", "256M", "--ctas", "own", "--format", "json")
    well = json.loads(gpubench(*words).stdout)
    staged = json.loads(gpubench(*words, "--fault", "link0-1:staged=yes").stdout)
    assert "host-staged" in {each["id"] for each in staged["findings"]}
    assert staged["overlap"][0]["communication_alone_us"] > 5 * well["overlap"][0]["communication_alone_us"]


def test_equal_seeds_give_equal_rows() -> None:
    words = (*MACHINE, "--sizes", "64M", "--format", "csv")
    assert gpubench(*words).stdout == gpubench(*words).stdout
    assert gpubench(*words).stdout != gpubench(*words, "--seed", "1").stdout


def test_a_stored_result_is_shown_again(tmp_path: Path) -> None:
    for name in ("x.json", "x.jsonl"):
        path = tmp_path / name
        shown = gpubench(*MACHINE, "--sizes", "64M", "--output", str(path)).stdout
        assert gpubench("report", str(path)).stdout == shown


@pytest.mark.parametrize("ending", ["csv", "json", "jsonl", "xml", "prom", "md", "html", "txt"])
def test_every_format_has_it(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x.{ending}"
    assert gpubench(*MACHINE, "--sizes", "16M,64M,256M", "--output", str(path)).returncode == 0
    text = path.read_text()
    assert text
    if ending == "prom":
        assert 'gpubench_overlap_step_seconds{command="overlap",origin="simulated",collective="allreduce"' in text
    if ending == "xml":
        assert "64M, allreduce, with gemm, 8 CTAs" in text
    if ending == "html":
        assert "by size and limit on CTAs" in text
        assert text.count("<figure>") >= 2


def test_a_narrow_page_keeps_what_matters() -> None:
    result = gpubench(*MACHINE, "--sizes", "64M", "--width", "50")
    head = next(line for line in result.stdout.splitlines() if line.lstrip().startswith("size"))
    assert len(head) <= 50
    assert {"CTAs", "κm", "κc"} <= set(head.split())


def test_several_nodes_are_simulated_too() -> None:
    result = gpubench("overlap", "--simulate", "hgx-h100-8*4", "--sizes", "256M", "--ctas", "own,8")
    assert result.returncode == 0
    assert "32 ranks on 4 hosts" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ctas", "0"), "--ctas 0"),
        (("--ctas", "many"), "--ctas many"),
        (("--partner", "conv"), "--partner"),
        (("--collective", "allreduse"), "allreduce"),
        (("--sizes", "1G:1M"), "in the wrong order"),
        (("--dtype", "float16,float32"), "one type"),
        (("--gemm", "3"), "--gemm"),
        (("--np", "9"), "--np 9"),
        (("--fault", "gpu9:lost=yes"), "gpu9"),
        (("--collective", "broadcast", "--root", "4"), "--root 4"),
    ],
)
def test_bad_input_is_told_in_one_message(words: tuple[str, ...], said: str) -> None:
    result = gpubench(*MACHINE, *words)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_without_gpus_it_refuses_and_names_the_simulation() -> None:
    result = gpubench("overlap")
    assert result.returncode == 3
    assert "--simulate" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_examples_of_the_docs_run(tmp_path: Path) -> None:
    text = (ROOT / "docs/commands/overlap.md").read_text(encoding="utf-8").partition("```sh\n")[2].partition("```")[0]
    commands = [shlex.split(line, comments=True) for line in text.splitlines()]
    assert len(commands) == 5
    for command in commands:
        words = command[command.index("overlap") :]
        simulated = words if "--simulate" in words else [*words, "--simulate", "hgx-h200-4"]
        assert gpubench(*simulated, cwd=tmp_path).returncode == 0, command


def test_forty_columns_hold_every_table() -> None:
    *lines, _ = gpubench("overlap", "--simulate", "hgx-h200-2", "--width", "40").stdout.splitlines()
    assert max(map(len, lines)) <= 40
    assert "size CTAs   alone    κm    κc step µs" in "\n".join(lines)
    assert any("NCCL's own µs" in line for line in lines)
