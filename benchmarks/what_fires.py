"""Count which conditions, readers, formats and options real inputs use.

    python -m benchmarks.what_fires [--captures FOLDER] > benchmarks/what_fires.md

Reads the logs, machines, dumps and results of tests/ with every command that takes them, in this process. Files in
`--captures` are counted too, without their names. A condition counts if a JSON report names it. Run this before you
delete or add a condition. A condition that never fired needs a public report (its `link`), a health check that fails
on it (the source of its severity), or a reason in KEPT.
"""

import argparse
import contextlib
import io
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

from benchmarks.provoked_causes import provocations
from gpubench.cli.app import run_command_line, typer_command
from gpubench.cli.process import COMMANDS
from gpubench.conditions.policy import SEVERITIES
from gpubench.conditions.registry import CONDITIONS
from gpubench.formats.registry import FORMATS
from gpubench.readers.registry import READERS, RESULT_READERS, FileKind

TESTS = Path("tests")
PAGES = ("README.md", "docs/**/*.md", "docs/recipes/**/*", "tests/gpu/*.py", "benchmarks/*.py")
_WRITTEN_BY_THE_PROGRAM = re.compile(r"<!-- generated: \w+ -->.*?<!-- end -->", re.DOTALL)
_NAMED = re.compile(r'"([a-z0-9]+(?:-[a-z0-9]+)*)(?=["\:])')
_HEALTH_CHECK = re.compile(r"DCGM|AzNHC")
_REPORT = re.compile(r"github\.com/[^/]+/[^/]+/(?:issues|pull)/\d+|forums\.")

KEPT = {
    "the program's own: without it something would pass that was not read, not measured or went wrong": (
        "above-limit not-measured figures-too-noisy nccl-warning topology-text-cut network-down gpu-differs"
    ),
    "first-party: NCCL prints it": "nccl-version-mismatch nccl-diag-failed nccl-diag-doubt",
    "first-party: a documented parameter of the driver": "nvlink-bandwidth-limited",
    "measured and published (github.com/local-inference-lab/rtx6kpro)": "posted-write-collapse",
}
"""Why a condition stays that has neither fired nor a public report."""


def commands(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield every command that reads a file or folder in this folder."""
    for path in sorted(folder.rglob("*")):
        if (path / "nodes").is_dir():
            rows = [file.stem for file in path.glob("*.jsonl") if file.stem != "ranks"]
            yield "topo", "--replay", str(path), "--causes"
            yield "check", "--replay", str(path), *(() if "check" in rows else ("--quick",))
            yield from ((row, "--replay", str(path), "--evidence") for row in rows if row != "check")
        elif path.is_dir() and len(files := [str(file) for file in sorted(path.iterdir()) if file.is_file()]) > 1:
            yield "explain", *files
        elif path.is_file() and "nodes" not in path.parts:
            yield "explain", str(path)
            yield "report", str(path)
            yield "topo", "--from", str(path), "--causes"


def conditions_named(command: Sequence[str]) -> set[str]:
    """Run a command; return the conditions that its JSON names, none if it refuses the file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        nowhere = io.StringIO()
        with (
            patch.object(sys, "argv", ["gpubench", *command, "--output", str(file)]),
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
            contextlib.suppress(SystemExit),
        ):
            run_command_line(None)
        named = set(_NAMED.findall(file.read_text())) if file.exists() else set()
    return named & {condition.id for condition in CONDITIONS}


def run(folders: Sequence[Path]) -> tuple[Counter[str], Counter[str]]:
    """Return how many commands named each condition, and how often each reader read a file."""
    fired: Counter[str] = Counter()
    read: Counter[str] = Counter()
    plain = FileKind.read

    def counting(kind: FileKind[object], *arguments: object) -> object:
        result = plain(kind, *arguments)  # type: ignore[arg-type]
        read[kind.module] += 1
        return result

    with patch.object(FileKind, "read", counting):
        for folder in folders:
            for command in commands(folder):
                fired.update(conditions_named(command))
    return fired, read


def options() -> set[str]:
    """Return the long options of all commands."""
    params = (param for command in COMMANDS for param in typer_command(command).params)
    return {name for param in params for name in param.opts if name.startswith("--")}


def pages() -> str:
    """Return what people read and run: README, hand-written pages, recipes, GPU tests and benchmarks."""
    files = (path for pattern in PAGES for path in sorted(Path().glob(pattern)) if path.is_file())
    return "\n".join(_WRITTEN_BY_THE_PROGRAM.sub("", path.read_text()) for path in files)


def page(fired: Counter[str], private: Counter[str], read: Counter[str]) -> Iterator[str]:
    """Yield the result as Markdown."""
    provoked = {id_ for provocation in provocations(etc=True) for id_ in provocation.ids}
    gpu_tests = "\n".join(path.read_text() for path in Path("tests/gpu").glob("*.py"))
    needed = {id_: reason for reason, ids in KEPT.items() for id_ in ids.split()}
    yield "# What real inputs use\n"
    yield "Written by `python -m benchmarks.what_fires`, which says how it counts.\n"
    seen = sum(bool(fired[condition.id] or private[condition.id]) for condition in CONDITIONS)
    yield f"{seen} of {len(CONDITIONS)} conditions fired on recorded inputs.\n"
    yield "| condition | tests/ | public captures | else |\n|---|--:|--:|---|"
    for condition in CONDITIONS:
        count, grade = fired[condition.id] or private[condition.id], SEVERITIES.get(condition.id)
        evidence = (
            "provoked on GPUs (`provoked_causes.py`)" * (condition.id in provoked)
            or "provoked on GPUs (tests/gpu)" * (f'"{condition.id}"' in gpu_tests)
            or f"<{condition.link}>" * bool(_REPORT.search(condition.link))
            or needed.get(condition.id, "")
            or (grade.source if grade and _HEALTH_CHECK.search(grade.source) else "**nothing**")
        )
        why = "" if count else evidence
        yield f"| `{condition.id}` | {fired[condition.id] or ''} | {private[condition.id] or ''} | {why} |"
    yield "\n## Readers\n\n| reader | files |\n|---|--:|"
    kinds = {kind.summary: kind.module for kind in READERS} | {kind.summary: kind.module for kind in RESULT_READERS}
    yield from (f"| {summary} | {read[module]} |" for summary, module in kinds.items())
    text = pages()
    yield "\n## Writers and options\n"
    names = {kind.name: (f"--format {kind.name}", kind.suffix or "?") for kind in FORMATS}
    formats = [name for name, words in names.items() if not any(word in text for word in words)]
    yield f"Formats that no page, recipe, GPU test or benchmark uses: {', '.join(formats) or 'none'}.\n"
    unused = sorted(option for option in options() if not re.search(rf"{option}(?![\w-])", text))
    yield f"Options that none of them uses: {', '.join(f'`{option}`' for option in unused) or 'none'}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captures", type=Path, action="append", default=[])
    captures = parser.parse_args().captures
    fired, read = run([TESTS / name for name in ("logs", "machines", "pasted", "results", "dumps", "plan")])
    private, more = run(captures)
    print("\n".join(page(fired, private, read + more)))


if __name__ == "__main__":
    main()
