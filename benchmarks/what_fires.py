"""Count which conditions, readers, formats and options real inputs use.

    python -m benchmarks.what_fires [--captures FOLDER] > benchmarks/what_fires.md

Reads the logs, machines, dumps and results of tests/ with every command that takes them, in this process. Files in
`--captures` are counted too, and named nowhere. A condition counts if a JSON report names it. Run it before you
delete or add a condition: one that never fired needs a report of somebody who met it (its `link`), a health check
that fails on it (the source of its severity), or a reason in KEPT.
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
PAGES = ("README.md", "docs/*.md", "docs/recipes/*", "tests/gpu/*.py", "benchmarks/*.py")
_WRITTEN_BY_THE_PROGRAM = ("docs/commands.md", "docs/formats.md", "docs/conditions.md")
_NAMED = re.compile(r'"([a-z0-9]+(?:-[a-z0-9]+)*)(?=["\:])')
_HEALTH_CHECK = re.compile(r"DCGM|AzNHC")
_REPORT = re.compile(r"github\.com/[^/]+/[^/]+/(?:issues|pull)/\d+|forums\.")

KEPT = {
    "its text stands in public logs": (
        "gpu-xid gpu-xid-doubt pcie-fatal-error pcie-error-doubt network-link-down nvlink-uncorrectable "
        "ecc-uncorrectable rdma-registration-failed collnet-not-used communicators-aborted nccl-version-mismatch "
        "nccl-duplicate-gpu cuda-device-missing nccl-no-socket-interface nccl-connect-failed nccl-invalid-usage "
        "rdma-nic-not-opened"
    ),
    "rule 1: without it something would pass that was not read, not measured or went wrong": (
        "probe-failed topology-text-cut above-limit not-measured figures-too-noisy nccl-warning program-exception "
        "rdma-completion-error nccl-diag-failed nccl-diag-doubt network-down nvlink-bandwidth-limited "
        "gpu-differs gpu-model mnnvl-no-domain nic-below-profile host-memory-slow p2p-asymmetric straggler slow-range"
    ),
    "DESIGN: no silent fallback to host memory or sockets": (
        "confidential-computing nccl-net-in-node mnnvl-unused nccl-ib-disabled nccl-shm-disabled staged-despite-grant"
    ),
    "DESIGN: slow is FAIL with the condition that explains it": "host-bound library-differs posted-write-collapse",
}
"""Why a condition stays that neither fired nor has a report."""


def commands(folder: Path) -> Iterator[tuple[str, ...]]:
    """Every command that takes something in this folder."""
    for path in sorted(folder.rglob("*")):
        if (path / "nodes").is_dir():
            rows = [each.stem for each in path.glob("*.jsonl") if each.stem != "ranks"]
            yield "topo", "--replay", str(path), "--causes"
            yield "check", "--replay", str(path), *(() if "check" in rows else ("--quick",))
            yield from ((row, "--replay", str(path), "--evidence") for row in rows if row != "check")
        elif path.is_dir() and len(files := [str(each) for each in sorted(path.iterdir()) if each.is_file()]) > 1:
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
    return named & {each.id for each in CONDITIONS}


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
    """The long options of all commands."""
    params = (each for command in COMMANDS for each in typer_command(command).params)
    return {name for each in params for name in each.opts if name.startswith("--")}


def pages() -> str:
    """What people read and what runs: README, hand-written pages, recipes, GPU tests and benchmarks."""
    files = (path for pattern in PAGES for path in sorted(Path().glob(pattern)) if path.is_file())
    return "\n".join(path.read_text() for path in files if str(path) not in _WRITTEN_BY_THE_PROGRAM)


def page(fired: Counter[str], private: Counter[str], read: Counter[str]) -> Iterator[str]:
    """The result as Markdown."""
    provoked = {id_ for each in provocations(etc=True) for id_ in each.ids}
    gpu_tests = "\n".join(path.read_text() for path in Path("tests/gpu").glob("*.py"))
    needed = {id_: reason for reason, ids in KEPT.items() for id_ in ids.split()}
    yield "# What real inputs use\n"
    yield "Written by `python -m benchmarks.what_fires`, which says how it counts.\n"
    seen = sum(bool(fired[each.id] or private[each.id]) for each in CONDITIONS)
    yield f"{seen} of {len(CONDITIONS)} conditions fired on recorded inputs.\n"
    yield "| condition | tests/ | public captures | else |\n|---|--:|--:|---|"
    for each in CONDITIONS:
        else_ = (
            "provoked on GPUs (`provoked_causes.py`)" * (each.id in provoked)
            or "provoked on GPUs (tests/gpu)" * (f'"{each.id}"' in gpu_tests)
            or needed.get(each.id, "")
            or f"<{each.link}>" * bool(_REPORT.search(each.link))
            or (grade.source if (grade := SEVERITIES.get(each.id)) and _HEALTH_CHECK.search(grade.source) else "")
        )
        count = fired[each.id] or private[each.id]
        why = "" if count else else_ or "**nothing**"
        yield f"| `{each.id}` | {fired[each.id] or ''} | {private[each.id] or ''} | {why} |"
    yield "\n## Readers\n\n| reader | files |\n|---|--:|"
    kinds = {each.summary: each.module for each in READERS} | {each.summary: each.module for each in RESULT_READERS}
    yield from (f"| {summary} | {read[module]} |" for summary, module in kinds.items())
    text = pages()
    yield "\n## Writers and options\n"
    formats = [
        each.name for each in FORMATS if f"--format {each.name}" not in text and (each.suffix or "?") not in text
    ]
    yield f"Formats that no page, recipe, GPU test or benchmark uses: {', '.join(formats) or 'none'}.\n"
    unused = sorted(each for each in options() if not re.search(rf"{each}(?![\w-])", text))
    yield f"Options that none of them uses: {', '.join(f'`{each}`' for each in unused) or 'none'}."


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captures", type=Path, action="append", default=[])
    captures = parser.parse_args().captures
    fired, read = run([TESTS / name for name in ("logs", "machines", "pasted", "results", "dumps", "plan")])
    private, more = run(captures)
    print("\n".join(page(fired, private, read + more)))


if __name__ == "__main__":
    main()
