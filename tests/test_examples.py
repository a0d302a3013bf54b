"""Every example of the README and of pages is run, and what they show is what comes out.

A block that begins with `$ gpubench`, or with variables before it, shows a command and its output; a line `...` stands
for lines left out. Lines of a bash block are commands. What needs GPUs runs on a simulated machine, on which ranks that
would share a GPU have one each. A job of `gpubench run` is one that leaves recorded logs.
"""

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests import shells
from tests.cli.running import ROOT, environment, gpubench
from tests.fakes.nccl_tests import Half, Output, Result

PAGES = (
    "README.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
)
STAND_INS = {
    "mpirun": shells.LAUNCHER,
    "srun": shells.LAUNCHER,
    "docker": shells.LAUNCHER,
    "sudo": shells.LAUNCHER,
    "vllm": "exit 0",
    "all_reduce_perf": f"cat {ROOT}/tests/results/h200x4/all_reduce.txt",
}
"""What stands in for programs that are not here."""

JOB = ("bash", "-c", f'cp {ROOT}/tests/logs/h200x4-normal/* "$(dirname "$NCCL_DEBUG_FILE")"')
HERE = ("--simulate", "hgx-h100-8")
GAP = "..."


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a page that are marked with a language, or with none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def shown(page: str) -> Iterator[tuple[str, str]]:
    """The commands that a page shows the output of, each with that."""
    for block in (*blocks(page, ""), *blocks(page, "text")):
        if block.startswith("$ "):
            command, _, output = re.sub(r" \\\n *", " ", block)[2:].partition("\n")
            yield command, output


SHOWN = [(page, command, output) for page in PAGES for command, output in shown(page)]
EXAMPLES = [
    (page, number)
    for page in PAGES
    for number, block in enumerate(blocks(page, "bash"))
    if re.search(r"^(?!pip |python3 ).*gpubench", block, re.MULTILINE)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-ins, and with files that examples read as if they were there."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "bin").mkdir()
    shells.make_programs(folder / "bin", STAND_INS)
    fill(folder)
    return folder


def fill(folder: Path) -> None:
    shutil.copy(next((ROOT / "tests/machines/h200x4-nccl-xml").glob("*.xml")), folder / "topo.xml")
    shutil.copy(ROOT / "tests/results/h200x4/all_reduce.txt", folder / "before.txt")
    (folder / "ucx-logs").mkdir()
    shutil.copy(ROOT / "tests/ucx/nixl-write-malloc-async.log", folder / "ucx-logs")
    seconds, ranks = 0.0044, 16
    algbw = 2**30 / seconds / 1e9
    half = Half(time_us=seconds * 1e6, algbw=algbw, busbw=algbw * 2 * (ranks - 1) / ranks)
    table = Output(hosts=("n1", "n2"), gpus=8, results=(Result(size=2**30, count=2**28, halves=(half, half)),))
    lines = table.text().splitlines(keepends=True)
    (folder / "pasted.txt").write_text("".join(line for line in lines if not line.startswith("#  Rank")))
    made = gpubench("allreduce", *HERE, "--output", "base.json", "--output", "results/", cwd=folder)
    assert made.returncode == 0, made.stderr
    for name in ("new", "b1", "b2", "b3", "n1", "n2", "n3"):
        shutil.copy(folder / "base.json", folder / f"{name}.json")


@pytest.mark.parametrize(("page", "command", "output"), SHOWN, ids=[f"{page}: {text[:60]}" for page, text, _ in SHOWN])
def test_what_is_shown_comes_out(page: str, command: str, output: str) -> None:
    variables, _, arguments = command.partition("gpubench ")
    changed = dict(each.split("=", 1) for each in variables.split())
    printed = gpubench(*shlex.split(arguments), env=environment(**changed)).stdout
    position = 0
    for part in re.split(rf"^{re.escape(GAP)}\n", output, flags=re.MULTILINE):
        found = printed.find(part, position)
        assert found >= 0, f"{page}: {part!r} is not in what comes out:\n{printed}"
        position = found + len(part)
    assert GAP in output.splitlines() or printed == output


@pytest.mark.parametrize(("page", "number"), EXAMPLES)
def test_examples_run(page: str, number: int, folder: Path, tmp_path: Path) -> None:
    lines = [line for line in blocks(page, "bash")[number].splitlines() if not line.startswith(("pip ", "python3 "))]
    own = shutil.copytree(folder, tmp_path / "own")
    ended = shells.run(["bash", "-c", "\n".join(lines)], folder / "bin", own, on_a_machine)
    assert "Traceback" not in ended.stderr
    assert "not found" not in ended.stderr
    wanted = sum(line.partition("#")[0].count("gpubench ") or line.startswith("gpubench") for line in lines)
    assert len(ended.ran) == wanted
    assert [(words, code) for words, code in ended.ran if code not in (0, 1)] == [], ended.stderr


def on_a_machine(arguments: Sequence[str]) -> list[str]:
    """The arguments, on a simulated machine where they ask for no other and need GPUs."""
    words = [each.replace("--ranks-per-gpu", "--np") for each in arguments]
    if words[:1] == ["run"]:
        return [*words[: words.index("--") + 1], *JOB]
    if {*words[:1]} & {"explain", "compare", "report", "profiles"} or {"--simulate", "--replay", "--from"} & {*words}:
        return words
    return [*words, *(("--simulate", "hgx-h100-8*8") if words[:1] == ["scan"] else HERE)]
