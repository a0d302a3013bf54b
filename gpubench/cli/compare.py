"""`gpubench compare`: its options, the files of both sides, and the report on them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubench.cli import presentation
from gpubench.cli.delivery import delivering
from gpubench.cli.presentation import Presentation, check_writable, parse_presentation
from gpubench.cli.presenter import Presenter, terminal_style
from gpubench.cli.run_metadata import stamp
from gpubench.errors import UsageError
from gpubench.model.results.report import Metadata, Report
from gpubench.model.terms.origin import Origin

if TYPE_CHECKING:
    from gpubench.measure.compare.judge import Rules
    from gpubench.model.results.result_file import ResultFile

NAME = "compare"
SUMMARY = "Two files of results: what got slower, beyond the noise."
HELP = f"""{SUMMARY}

Files may be gpubench's (.json, .jsonl, .csv) or nccl-tests' (text, or -J), also one of each. Rows are brought together
by what they measured. What counts as slower is what chance does not explain: with single runs 5 % or 0.5 µs, 2 % from
16 MiB on, and more where the figures are noisier; with three or more runs a side from 1 % on, as the runs show.
Of two checks the findings are compared too: what is new, graver or gone.

  gpubench compare base.json new.json

  gpubench compare base1.json new1.json --base base2.json --base base3.json --new new2.json --new new3.json

  gpubench compare before.txt after.txt --threshold 5 --strict

  gpubench compare last-week.json now.json     # of gpubench check --output: did this machine get worse?

  gpubench compare --last 5 results/

With --last, BASE is a folder that --output results/ keeps dated results in: the newest result of each command, machine
and set of options is compared with those before it.

Exit codes: 0 nothing got worse; 1 something did: time, path, data, or with --strict a row is missing; 2 a file that
cannot be read, or of another machine; 3 nothing in common to compare, or a row that could not be measured any more.
"""

_USUAL_FOLDER = "results"
_EXPECTED = "two files, BASE and NEW, or a folder of dated results with --last N"

BASE = Annotated[
    str | None,
    typer.Argument(
        metavar="BASE", help="Old results; with --last their folder, results/ by default.", show_default=False
    ),
]
NEW = Annotated[str | None, typer.Argument(metavar="NEW", help="New results.", show_default=False)]
LAST = Annotated[
    int | None,
    typer.Option(
        "--last",
        metavar="N",
        min=1,
        help="Compare the newest results of a folder with the N before them.",
        show_default=False,
    ),
]
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
    """What the user asked for: files of both sides, or `last` results of a folder, None where files were named."""

    base: tuple[Path, ...]
    new: tuple[Path, ...]
    folder: Path
    last: int | None
    rules: "Rules"
    other_machine: bool
    presentation: Presentation


def parse_compare_options(given: dict[str, Any]) -> CompareOptions:
    """The options of `compare` from what typer read.

    Raises:
        UsageError: neither two files nor a folder, both, or an option of presentation that cannot be read.
    """
    from gpubench.measure.compare.history_report import SECTIONS_OF_HISTORY
    from gpubench.measure.compare.judge import Rules
    from gpubench.measure.compare.report import SECTIONS

    last, base, new = given["last"], given["base_file"], given["new_file"]
    if last is None:
        _check_two_files(base, new)
    else:
        _check_one_folder(given)
    named = last is None
    return CompareOptions(
        base=tuple(map(Path, (base, *(given["base"] or ())))) if named else (),
        new=tuple(map(Path, (new, *(given["new"] or ())))) if named else (),
        folder=Path(_USUAL_FOLDER if named or base is None else base),
        last=last,
        rules=Rules(threshold_percent=given["threshold"], strict=given["strict"]),
        other_machine=given["other_machine"],
        presentation=parse_presentation(given, SECTIONS if named else SECTIONS_OF_HISTORY),
    )


def _check_two_files(base: str | None, new: str | None) -> None:
    if base is not None and new is not None:
        return
    if base is None:
        raise UsageError("compare without results", expected=_EXPECTED, next_step="gpubench compare base.json new.json")
    is_folder = Path(base).is_dir()
    raise UsageError(
        f"compare with one {'folder' if is_folder else 'file'}, {base}",
        expected=_EXPECTED,
        next_step=f"gpubench compare --last 5 {base}" if is_folder else f"gpubench compare {base} new.json",
    )


def _check_one_folder(given: dict[str, Any]) -> None:
    unfit = [f"--{name}" for name in ("base", "new") if given[name]]
    unfit += ["NEW"] if given["new_file"] is not None else []
    unfit += ["--other-machine"] if given["other_machine"] else []
    if unfit:
        raise UsageError(
            f"--last and {', '.join(unfit)} exclude each other",
            expected="a folder, of which the newest results are compared with those before them on the same machine",
            next_step=f"gpubench compare --last {given['last']} {given['base_file'] or _USUAL_FOLDER}",
        )


def run(given: dict[str, Any]) -> None:
    """Be the command."""
    raise typer.Exit(run_compare(parse_compare_options(given), sys.argv[1:]))


def run_compare(options: CompareOptions, arguments: Sequence[str]) -> int:
    """Read both sides and show what differs; the exit code.

    Raises:
        GpubenchError: a file or folder cannot be read, a file is of another machine, or an output cannot be written.
    """
    shown = options.presentation
    if options.last is not None:
        from gpubench.readers.results.history import list_results

        list_results(options.folder)
    check_writable(shown.outputs)
    presenter = Presenter(shown, terminal_style(shown, sys.stdout), progress=False)
    with delivering(presenter):
        sides, report = _of_files(options) if options.last is None else _of_folder(options, options.last)
        presenter.begin(_metadata(options, arguments, sides), ())
        presenter.end(report)
    return shown.exit_code(report.verdict)


@dataclass(frozen=True, slots=True)
class _Sides:
    """The files of a comparison; `series` names it where there are several."""

    series: str | None
    base: Sequence["ResultFile"]
    new: Sequence["ResultFile"]


def _of_files(options: CompareOptions) -> tuple[list[_Sides], Report]:
    from gpubench.measure.compare.report import compare
    from gpubench.readers.results.registry import read_results

    base, new = ([read_results(path) for path in paths] for paths in (options.base, options.new))
    return [_Sides(None, base, new)], compare(base, new, options.rules, other_machine=options.other_machine)


def _of_folder(options: CompareOptions, last: int) -> tuple[list[_Sides], Report]:
    from gpubench.measure.compare.history_report import compare_history
    from gpubench.measure.compare.series import choose
    from gpubench.readers.results.history import list_results

    chosen = choose(list_results(options.folder), last)
    sides = [_Sides(each.name, each.base, [each.new]) for each in chosen.series]
    return sides, compare_history(chosen, options.folder, options.rules)


def _metadata(options: CompareOptions, arguments: Sequence[str], sides: Sequence[_Sides]) -> Metadata:
    files = [file for side in sides for file in (*side.base, *side.new)]
    hosts = dict.fromkeys(host for file in files for host in file.circumstances.hosts)
    origins = {row.origin for file in files for row in file.rows} | {row.origin for file in files for row in file.pairs}
    origins |= {file.circumstances.origin for file in files if file.circumstances.origin is not None}
    source = ", ".join(map(str, (*options.base, *options.new)))
    return Metadata(
        **stamp(arguments),
        subject=NAME,
        origin=Origin.SIMULATED if Origin.SIMULATED in origins else Origin.RECORDED,
        hosts=list(hosts) or ["unknown"],
        options={
            "base": [_described(file, side.series) for side in sides for file in side.base],
            "new": [_described(file, side.series) for side in sides for file in side.new],
            "last": options.last,
            "threshold": options.rules.threshold_percent,
            "strict": options.rules.strict,
            "other_machine": options.other_machine,
        },
        source=source or str(options.folder),
    )


def _described(file: "ResultFile", series: str | None) -> dict[str, Any]:
    from gpubench.measure.compare.circumstances import describe_file

    return {
        "file": file.name,
        "kind": file.kind,
        "told": describe_file(file),
        "rows": len(file.rows) + len(file.pairs),
        "complete": file.complete,
        "remarks": list(file.remarks),
        "series": series,
    }


PARAMETERS: tuple[tuple[str, Any, Any], ...] = (
    ("base_file", BASE, None),
    ("new_file", NEW, None),
    ("base", MORE_BASE, None),
    ("new", MORE_NEW, None),
    ("last", LAST, None),
    ("threshold", THRESHOLD, None),
    ("strict", STRICT, False),
    ("other_machine", OTHER_MACHINE, False),
    *presentation.PARAMETERS,
)
