"""`gpubench compare`: its help, which files fit together, and the report on them."""

import sys
from dataclasses import replace
from pathlib import Path

from gpubench.cli.options import PresentationOptions
from gpubench.cli.signature import HelpPage, app_of
from gpubench.errors import UsageError
from gpubench.jobs.plans import ComparePlan

HELP = HelpPage(
    (
        ("Compare two results", "gpubench compare base.json new.json"),
        (
            "Compare with the baseline that allreduce --save-baseline good kept",
            "gpubench compare --against good now.json",
        ),
        (
            "Compare three runs with three, which finds smaller differences",
            "gpubench compare base1.json new1.json --base base2.json --base base3.json --new new2.json --new new3.json",
        ),
        ("Fail if anything is 5 % slower, or missing", "gpubench compare before.txt after.txt --threshold 5 --strict"),
        (
            "Say which collective ran, for nccl-tests before 2.17",
            "gpubench compare old.txt new.txt --collective allgather",
        ),
        (
            "Compare the newest results in a folder with the five before them",
            "gpubench compare --last 5 results/",
        ),
    ),
    """
The files may be gpubench's (.json, .jsonl, .csv), nccl-tests' (text, or -J), rccl-tests', OSU's or nvbandwidth's, also
one of each. Rows with the same collective, size and type are compared. A row is slower if noise cannot explain the
difference: from 5 % or 0.5 µs on with one run a side (2 % from 16 MiB on, more if the figures are noisier), from 1 % on
with three or more runs a side. Two results of check are compared by their findings too: new, worse or gone.

With --last, BASE is a folder that --output results/ writes dated results to. The newest result of each command, machine
and set of options is compared with those before it.
""",
)

_EXPECTED = "two files, BASE and NEW, or a folder of dated results with --last N"


def _run(plan: ComparePlan, shown: PresentationOptions) -> int:
    from gpubench.jobs import compare

    sections: tuple[str, ...] = compare.SECTIONS if plan.last is None else compare.SECTIONS_OF_HISTORY
    sections += compare.SECTIONS_OF_MACHINES if plan.other_machine else ()
    _check(plan)
    return compare.run(replace(plan, presentation=shown.parse(tuple(dict.fromkeys(sections)))), sys.argv[1:])


def _check(plan: ComparePlan) -> None:
    """Raise UsageError where the files do not fit together."""
    if plan.last is not None:
        _check_folder(plan, plan.last)
    elif plan.against is not None:
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


def _check_folder(plan: ComparePlan, last: int) -> None:
    beside = {
        "--base": plan.more_base,
        "--new": plan.more_new,
        "NEW": plan.second,
        "--against": plan.against,
        "--other-machine": plan.other_machine,
        "--collective": plan.collective,
    }
    unfit = [name for name, value in beside.items() if value]
    if unfit:
        raise UsageError(
            f"--last and {', '.join(unfit)} exclude each other",
            expected="a folder only: its newest results are compared with those before them",
            next_step=f"gpubench compare --last {last} {plan.folder}",
        )


app = app_of(HELP, ComparePlan, _run)
