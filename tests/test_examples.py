"""Every example of the README and of pages is run, and what they show is what comes out.

A block that begins with `$ gpubench` shows a command and its output; a line `...` stands for lines left out. Lines of a
bash block are commands; of a launcher's the program is run, and what needs GPUs runs on a simulated machine, on which
ranks that would share a GPU have one each.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import forking
from tests.cli.running import ROOT, environment, gpubench
from tests.fakes.nccl_tests import Half, Output, Result

PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("check", "compare", "explain", "index", "reading", "recordings", "scan")),
)
STAND_INS = {
    "gpubench": """needs=hgx-h100-8
case "$1" in explain|compare|report|profiles) needs= ;; scan) needs='hgx-h100-8*8' ;; esac
case " $* " in *" --simulate "*|*" --replay "*|*" --from "*|*" --help "*) needs= ;; esac
{gpubench} "${@/#--ranks-per-gpu/--np}" ${needs:+--simulate "$needs"}
echo "$? gpubench $*" >> "$CODES\"""",
    "mpirun": 'while [ "$1" != gpubench ]; do shift; done; exec "$@"',
    "srun": 'while [ "$1" != gpubench ]; do shift; done; exec "$@"',
    "all_reduce_perf": f"cat {ROOT}/tests/results/h200x4/all_reduce.txt",
}
"""What stands in for programs that are not here: gpubench itself, with a machine that does not exist."""

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
    for name, line in STAND_INS.items():
        path = folder / "bin" / name
        path.write_text("#!/bin/bash\n" + line.replace("{gpubench}", shlex.join(forking.for_shells())) + "\n")
        path.chmod(0o755)
    fill(folder)
    return folder


def fill(folder: Path) -> None:
    shutil.copy(next((ROOT / "tests/machines/h200x4-nccl-xml").glob("*.xml")), folder / "topo.xml")
    shutil.copy(ROOT / "tests/results/h200x4/all_reduce.txt", folder / "before.txt")
    seconds, ranks = 0.0044, 16
    algbw = 2**30 / seconds / 1e9
    half = Half(time_us=seconds * 1e6, algbw=algbw, busbw=algbw * 2 * (ranks - 1) / ranks)
    table = Output(hosts=("n1", "n2"), gpus=8, results=(Result(size=2**30, count=2**28, halves=(half, half)),))
    lines = table.text().splitlines(keepends=True)
    (folder / "pasted.txt").write_text("".join(line for line in lines if not line.startswith("#  Rank")))
    leaves = (f"SwitchName=leaf{each} Nodes=node[{each * 8}-{each * 8 + 7}]\n" for each in range(8))
    (folder / "topology.conf").write_text("".join(leaves))
    command = ["allreduce", "--simulate", "hgx-h100-8", "--output", "base.json", "--output", "results/"]
    made = subprocess.run([*forking.for_shells(), *command], capture_output=True, text=True, check=False, cwd=folder)
    assert made.returncode == 0, made.stderr
    for name in ("new", "b1", "b2", "b3", "n1", "n2", "n3"):
        shutil.copy(folder / "base.json", folder / f"{name}.json")


@pytest.mark.parametrize(("page", "command", "output"), SHOWN, ids=[f"{page}: {text[:60]}" for page, text, _ in SHOWN])
def test_what_is_shown_comes_out(page: str, command: str, output: str) -> None:
    words = shlex.split(command.partition("gpubench ")[2])
    printed = gpubench(*words).stdout
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
    codes = own / "codes"
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = environment(PATH=path, PYTHONPATH=str(ROOT), CODES=str(codes))
    ended = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=own,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        stdin=subprocess.DEVNULL,
    )
    assert "Traceback" not in ended.stderr
    assert "not found" not in ended.stderr
    ran = codes.read_text().splitlines()
    assert len(ran) == sum(line.partition("#")[0].count("gpubench ") or line.startswith("gpubench") for line in lines)
    assert [line for line in ran if line[0] not in "01"] == [], ended.stderr
