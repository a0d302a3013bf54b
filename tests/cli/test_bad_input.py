"""What users get wrong, and terminals that can do little: one clear message, the right exit code, never a traceback."""

import json
import re
from pathlib import Path

import pytest

from gpubench.errors import no_gpu
from gpubench.formats.registry import FORMATS
from gpubench.model.results.history import DatedName
from tests.cli.running import ASCII, ROOT, environment, gpubench

SIMULATED = ("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1K:1G:32")
RUNS = (
    SIMULATED,
    ("p2p", "--simulate", "hgx-h200-4", "--fault", "link0-1:staged=yes"),
    ("p2p", "--simulate", "hgx-h200-4", "--sizes", "8:64M:8", "--plot"),
    ("kv", "--simulate", "hgx-h200-4", "--fault", "node0:kv=pid"),
    ("topo", "--replay", str(ROOT / "tests" / "machines" / "h100x8-nic8")),
    ("explain", str(ROOT / "tests" / "logs" / "h200x4-p2p-disabled")),
)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--output", "/proc/result.html"), "--output /proc/result.html cannot be written"),
        (("--output", "nowhere/result.prom"), "--output nowhere/result.prom cannot be written: No such file"),
        (("--output", "a.md", "--output", "./a.md"), "--output ./a.md is set twice"),
        (("--output", "result"), "--output result: no format has this suffix"),
        (("--output", "result"), "try:      --output result/\n"),
        (("--output", "/proc/results/"), "--output /proc/results cannot be written"),
        (("--output", "/dev/null/"), "--output /dev/null cannot be written"),
        (("--output", "a/", "--output", "b/"), "--output a/ and --output b/"),
        (("--output", "x" * 300 + ".json"), "cannot be written: File name too long"),
        (("--output", "x" * 300 + "/"), "cannot be written: File name too long"),
        (("--output", "./", "--output", "."), "--output . is set twice"),
        (("--output", "annotations.github"), "no format has this suffix"),
        (("--format", "markdwon"), "try:      --format markdown"),
        (("--exit-style", "nagois"), "try:      --exit-style nagios"),
        (("--plot", "--format", "json"), "--plot with --format json"),
        (("--section", "rows", "--format", "html"), "--section rows without csv"),
        (("--widht", "80"), "--width"),
        (("--width", "39"), "--width"),
        (("extra",), "extra"),
    ],
    ids=lambda each: " ".join(each)[:40] if isinstance(each, tuple) else "",
)
def test_it_is_refused_before_anything_is_done(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = gpubench(*SIMULATED, *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr
    assert "  try:      " in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_told_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.json").mkdir()
    for output, reason in (
        ("none/a.json", "there is no folder none"),
        ("file/a.json", "file is a file, not a folder"),
        ("folder.json", "folder.json is a folder"),
    ):
        result = gpubench(*SIMULATED, "--output", output, cwd=tmp_path)
        assert (result.returncode, reason in result.stderr) == (2, True), result.stderr


def test_the_help_that_is_named_is_that_of_the_command() -> None:
    assert "try:      gpubench check --help" in gpubench("check", "--timeout").stderr


HELP = [(name, "--help") for name in ("allreduce", "topo", "p2p", "kv", "check", "explain", "compare", "profiles")]


@pytest.mark.parametrize("arguments", [*HELP, ("profiles", "show", "hgx-h200-8")], ids=lambda each: each[0])
def test_help_and_profiles_need_no_utf_8(arguments: tuple[str, ...]) -> None:
    result = gpubench(*arguments, env=ASCII)
    assert (result.returncode, result.stdout.isascii()) == (0, True)


@pytest.mark.parametrize(("typed", "meant"), [("allreduc", "allreduce"), ("tpo", "topo"), ("altoal", "alltoall")])
def test_a_command_that_is_nearly_right_is_named(typed: str, meant: str) -> None:
    result = gpubench(typed)
    assert result.returncode == 2
    assert f"'{meant}'" in result.stderr
    assert "gpubench --help" in result.stderr


@pytest.mark.parametrize(("arguments", "name"), [*((RUNS[1], each.name) for each in FORMATS), (RUNS[-1], "table")])
def test_no_format_needs_utf_8(arguments: tuple[str, ...], name: str) -> None:
    result = gpubench(*arguments, "--format", name, env=ASCII)
    assert result.returncode in (0, 1), result.stderr
    assert result.stdout.isascii()
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", RUNS, ids=lambda each: each[0])
def test_sentences_fit_forty_columns(arguments: tuple[str, ...]) -> None:
    """Figures are never cut, nor commands and the last sentence, which can be pasted; everything else fits."""
    result = gpubench(*arguments, "--width", "40")
    as_data = (each for each in arguments if each != "--plot")
    findings = json.loads(gpubench(*as_data, "--format", "json").stdout)["findings"]
    commands = {command for finding in findings for command in finding["commands"]}
    lines = [line for line in result.stdout.splitlines()[:-1] if line.strip() not in commands]
    wide = [line for line in lines if len(line) > 40]
    assert [line for line in wide if "  " not in line.strip()] == []
    if arguments is SIMULATED:
        assert wide == []


@pytest.mark.parametrize("changed", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}], ids=["NO_COLOR", "dumb", "a pipe"])
def test_a_pipe_has_no_colours(changed: dict[str, str]) -> None:
    assert "\x1b" not in gpubench(*SIMULATED, env=environment(**changed)).stdout


def test_nothing_is_said_by_colour_alone() -> None:
    """With colours taken away the text is the same, marks included."""
    arguments = (*RUNS[1], "--no-patterns", "--no-host")
    plain = gpubench(*arguments, "--color", "never").stdout
    colored = gpubench(*arguments, "--color", "always", "--width", "100").stdout
    for code in range(110):
        colored = colored.replace(f"\x1b[{code}m", "").replace(f"\x1b[1;{code}m", "")
    assert colored == plain
    assert "37.9!" in plain


def test_a_folder_keeps_a_result_of_every_run(tmp_path: Path) -> None:
    made = tmp_path / "kept" / "results"
    for output in (f"{made}/", str(made)):
        assert gpubench(*SIMULATED, "--output", output, "--output", str(tmp_path / "last.csv")).returncode == 0
    names = sorted(path.name for path in made.iterdir())
    assert len(names) == 2
    for name in names:
        parsed = DatedName.parse(name)
        assert parsed is not None
        assert (parsed.command, parsed.host) == ("allreduce", "node0")
        assert json.loads((made / name).read_text())["complete"] is True


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "table.txt"),
        ("watch", "--hang", "--for", "3s"),
    ],
    ids=" ".join,
)
def test_a_command_to_try_stands_alone_on_its_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    rows = (ROOT / "tests/results/h200x4/all_reduce.txt").read_text().splitlines(keepends=True)
    (tmp_path / "table.txt").write_text("".join(row for row in rows if "#  Rank" not in row))
    stderr = gpubench(*arguments, cwd=tmp_path, env=environment(NCCL_RAS_ADDR="localhost:1")).stderr
    assert is_pasteable(stderr), stderr


@pytest.mark.parametrize("for_what", ["p2p", "--backend nccl"])
def test_without_a_gpu_nvidia_smi_stands_alone_on_its_line(for_what: str) -> None:
    assert is_pasteable(str(no_gpu("no driver", for_what)))


def is_pasteable(error: str) -> bool:
    """True if the first line to try is one command, without prose."""
    return (
        re.search(r"^  try:      ([A-Z_]+=\S+ )?(gpubench|nvidia-smi)( [^;,]+)?\n            [A-Z]", error, re.M)
        is not None
    )
