"""`gpubench compare`: its options, the files of both sides, and the report on them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from gpubench.cli import presentation
from gpubench.cli.delivery import delivering
from gpubench.cli.presentation import Presentation, check_writable, parse_presentation
from gpubench.cli.presenter import Presenter, terminal_style
from gpubench.cli.run_metadata import stamp
from gpubench.measure.compare_judge import Rules
from gpubench.model.report import Metadata, Origin
from gpubench.model.result_file import ResultFile
from gpubench.readers.results import read_results

NAME = "compare"
SUMMARY = "Two files of results: what got slower, beyond the noise."
HELP = f"""{SUMMARY}

Files may be gpubench's (.json, .jsonl, .csv) or nccl-tests' (text, or -J), also one of each. Rows are brought together
by what they measured. What counts as slower is what chance does not explain: with single runs 5 % or 0.5 µs, 2 % from
16 MiB on, and more where the figures are noisier; with three or more runs a side from 1 % on, as the runs show.

  gpubench compare base.json new.json

  gpubench compare base1.json new1.json --base base2.json --base base3.json --new new2.json --new new3.json

  gpubench compare before.txt after.txt --threshold 5 --strict

Exit codes: 0 nothing got worse; 1 something did: time, path, data, or with --strict a row is missing; 2 a file that
cannot be read, or of another machine; 3 nothing in common to compare, or a row that could not be measured any more.
"""

BASE = Annotated[str, typer.Argument(metavar="BASE", help="Old results.", show_default=False)]
NEW = Annotated[str, typer.Argument(metavar="NEW", help="New results.", show_default=False)]
MORE_BASE = Annotated[
    list[str] | None,
    typer.Option("--base", metavar="FILE", help="Another run of the old side. Repeatable.", show_default=False),
]
MORE_NEW = Annotated[
    list[str] | None,
    typer.Option("--new", metavar="FILE", help="Another run of the new side. Repeatable.", show_default=False),
]
THRESHOLD = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        metavar="PERCENT",
        min=0,
        max=1000,
        help="How much slower is a regression, whatever the noise.",
        show_default=False,
    ),
]
STRICT = Annotated[
    bool, typer.Option("--strict", help="Exit 1 also for missing rows and other doubts.", show_default=False)
]
OTHER_MACHINE = Annotated[
    bool, typer.Option("--other-machine", help="Compare results of different machines.", show_default=False)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What the user asked for."""

    base: tuple[Path, ...]
    new: tuple[Path, ...]
    rules: Rules
    other_machine: bool
    presentation: Presentation


def parse_compare_options(given: dict[str, Any]) -> CompareOptions:
    """The options of `compare` from what typer read.

    Raises:
        UsageError: an option of presentation that cannot be read.
    """
    from gpubench.measure.compare import SECTIONS

    return CompareOptions(
        base=tuple(map(Path, (given["base_file"], *(given["base"] or ())))),
        new=tuple(map(Path, (given["new_file"], *(given["new"] or ())))),
        rules=Rules(threshold_percent=given["threshold"], strict=given["strict"]),
        other_machine=given["other_machine"],
        presentation=parse_presentation(given, SECTIONS),
    )


def run(given: dict[str, Any]) -> None:
    """Be the command."""
    raise typer.Exit(run_compare(parse_compare_options(given), sys.argv[1:]))


def run_compare(options: CompareOptions, arguments: Sequence[str]) -> int:
    """Read both sides and show what differs; the exit code.

    Raises:
        GpubenchError: a file cannot be read or is of another machine, or an output cannot be written.
    """
    from gpubench.measure.compare import compare

    shown = options.presentation
    check_writable(shown.outputs)
    presenter = Presenter(shown, terminal_style(shown, sys.stdout), progress=False)
    with delivering(presenter):
        base, new = ([read_results(path) for path in paths] for paths in (options.base, options.new))
        report = compare(base, new, options.rules, other_machine=options.other_machine)
        presenter.begin(_metadata(options, arguments, base, new), ())
        presenter.end(report)
    return shown.exit_code(report.verdict)


def _metadata(
    options: CompareOptions, arguments: Sequence[str], base: Sequence[ResultFile], new: Sequence[ResultFile]
) -> Metadata:
    hosts = dict.fromkeys(host for file in (*base, *new) for host in file.circumstances.hosts)
    origins = {row.origin for file in (*base, *new) for row in file.rows}
    origins |= {row.origin for file in (*base, *new) for row in file.pairs}
    return Metadata(
        **stamp(arguments),
        subject=NAME,
        origin=Origin.SIMULATED if Origin.SIMULATED in origins else Origin.RECORDED,
        hosts=list(hosts) or ["unknown"],
        options={
            "base": [_described(file) for file in base],
            "new": [_described(file) for file in new],
            "threshold": options.rules.threshold_percent,
            "strict": options.rules.strict,
            "other_machine": options.other_machine,
        },
        source=", ".join(map(str, (*options.base, *options.new))),
    )


def _described(file: ResultFile) -> dict[str, Any]:
    from gpubench.measure.compare_circumstances import in_words

    return {
        "file": file.name,
        "kind": file.kind,
        "told": in_words(file),
        "rows": len(file.rows) + len(file.pairs),
        "complete": file.complete,
        "remarks": list(file.remarks),
    }


PARAMETERS: tuple[tuple[str, Any, Any], ...] = (
    ("base_file", BASE, ...),
    ("new_file", NEW, ...),
    ("base", MORE_BASE, None),
    ("new", MORE_NEW, None),
    ("threshold", THRESHOLD, None),
    ("strict", STRICT, False),
    ("other_machine", OTHER_MACHINE, False),
    *presentation.PARAMETERS,
)
