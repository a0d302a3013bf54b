"""`gpubench compare` and `gpubench report`, which read stored results."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import typer

from gpubench.cli.signature import HelpPage, check_presentation, make_app
from gpubench.errors import UsageError, exclusive
from gpubench.jobs.plans import ComparePlan, ReportPlan
from gpubench.model.terms.commands import Command
from gpubench.model.terms.options import changed_options

_COMPARE = HelpPage(
    (
        ("Compare two results", "gpubench compare base.json new.json"),
        (
            "Compare with a baseline that was kept by allreduce --save-baseline good",
            "gpubench compare --against good now.json",
        ),
        (
            "Compare three runs with three others, to find smaller differences",
            "gpubench compare base1.json new1.json --base base2.json --base base3.json --new new2.json --new new3.json",
        ),
        ("Fail if anything is 5 % slower, or missing", "gpubench compare before.txt after.txt --threshold 5 --strict"),
        (
            "Name the collective, for nccl-tests before 2.17",
            "gpubench compare old.txt new.txt --collective allgather",
        ),
        (
            "Compare the newest results in a folder with the five before them",
            "gpubench compare --last 5 results/",
        ),
    ),
    """
The files may come from gpubench (.json, .jsonl, .csv), nccl-tests (text, or -J), or another benchmark that report
reads, in any combination. - is standard input. Rows with the same collective, size and type are compared. A row is
slower if noise cannot explain the difference. With one run per side, that takes at least 5 % or 0.5 µs (2 % from 16
MiB, more if the values are noisy). With three or more runs per side, 1 % is enough. Two results of check are also
compared by their findings: new, worse or gone.

With --last, BASE is a folder of dated results, as --output results/ writes them. The newest result of each command,
machine
and set of options is compared with those before it.
""",
)

_REPORT = HelpPage(
    (
        ("Turn a gpubench result into an HTML page", "gpubench report result.json -o result.html"),
        ("Judge the output of nccl-tests", "all_reduce_perf -b 8 -e 4G -f 2 -g 8 | gpubench report -"),
        ("Show one section as CSV", "gpubench report node.json --format csv --section nics"),
        ("Judge a pasted table that does not name its machine", "gpubench report pasted.txt --machine 'hgx-b200-8*2'"),
        (
            "Judge a table of two nodes with four NICs of 100 Gbit/s each",
            "gpubench report p4d.txt --machine 'hgx-a100-8-40gb*2' --nics 4x100 -o p4d.html",
        ),
    ),
    """
A gpubench result (.json or .jsonl from --output, of any command) keeps the verdict, findings and exit code of its run.

Tables of nccl-tests, nvbandwidth, OSU and other benchmarks are judged as if gpubench had measured them, with limit, %
of expected and verdict. They may be pasted from a chat, several in one text. GPUs, ranks and hosts are read from the
file. Use
--machine if they were cut off, and --nics for the rate of a NIC (perftest).
""",
)

_EXPECTED = "two files, BASE and NEW, or a folder of dated results with --last N"


def _run_compare(plan: ComparePlan) -> int:
    from gpubench.jobs import compare

    sections: tuple[str, ...] = compare.SECTIONS if plan.last is None else compare.SECTIONS_OF_HISTORY
    sections += compare.SECTIONS_OF_MACHINES if plan.other_machine else ()
    _check_compared(plan)
    return compare.run(check_presentation(plan, tuple(dict.fromkeys(sections))), sys.argv[1:])


def _check_compared(plan: ComparePlan) -> None:
    """Raise UsageError unless there are two results to compare."""
    if plan.last is not None:
        return
    if [plan.first, plan.second, *map(str, (*plan.more_base, *plan.more_new))].count("-") > 1:
        raise UsageError("compare with - twice", expected="standard input for one result, files for the others")
    if plan.against is not None:
        if plan.first is None or plan.second is not None:
            raise UsageError(
                f"compare --against {plan.against} with {'two files' if plan.second else 'no file'}",
                expected="one file, the new result",
                next_step=f"gpubench compare --against {plan.against} new.json",
            )
    elif plan.first is None:
        raise UsageError("compare without results", expected=_EXPECTED, next_step="gpubench compare base.json new.json")
    elif plan.second is None:
        is_folder = Path(plan.first).is_dir()
        files = f"--last 5 {plan.first}" if is_folder else f"{plan.first} new.json"
        raise UsageError(
            f"compare with one {'folder' if is_folder else 'file'}, {plan.first}",
            expected=_EXPECTED,
            next_step=f"gpubench compare {files}",
        )


def _run_report(plan: ReportPlan) -> int:
    """Show a stored result of gpubench, or judge the output of another benchmark.

    Raises: UsageError for a file that is not a result, and for a section that it does not have.
    """
    from gpubench.jobs import report
    from gpubench.readers.documents import read_text, result_path
    from gpubench.readers.registry import WANTED
    from gpubench.readers.results.gpubench_json import is_stored, parse_stored

    plan = dataclasses.replace(plan, name=str(result_path(plan.name)))
    text = read_text(Path(plan.name), WANTED)
    if not is_stored(text):
        return report.judge_results(check_presentation(plan, report.SECTIONS), text, sys.argv[1:])
    for name, _ in changed_options(plan):
        raise exclusive(
            (plan.name, name), "only one of them, because a gpubench result names its machine and has a verdict"
        )
    run = parse_stored(text, plan.name)
    return report.run(run, plan.name, plan.presentation.checked(run.sections))


_APPS: Mapping[str, Callable[[Command], typer.Typer]] = {
    "compare": make_app(_COMPARE, ComparePlan, _run_compare),
    "report": make_app(_REPORT, ReportPlan, _run_report, plots=True),
}


def app(command: Command) -> typer.Typer:
    return _APPS[command.name](command)
