"""`gpubench compare`: its options, the files of both sides, and the report on them."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from gpubench.cli.options import PresentationOptions, parse_collective
from gpubench.cli.signature import INPUT, JUDGE, HelpPage, app_of, completed, flag, option
from gpubench.errors import UsageError
from gpubench.records import dataclass

if TYPE_CHECKING:
    from gpubench.jobs.compare import ComparePlan

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

Exit codes: 0 nothing got worse; 1 a time, path or data got worse, or with --strict a row is missing; 2 a file cannot be
read, or is of another machine; 3 the files have nothing in common, or a row could not be measured any more.
""",
)

_USUAL_FOLDER = "results"
_EXPECTED = "two files, BASE and NEW, or a folder of dated results with --last N"


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The files to compare, and how to judge them."""

    help_group: ClassVar = INPUT

    base_file: Annotated[
        str | None,
        typer.Argument(metavar="BASE", help="Old result; with --last, a folder of results (default: results/)."),
    ] = None
    new_file: Annotated[str | None, typer.Argument(metavar="NEW", help="New result.")] = None
    base: list[str] | None = option("FILE", "One more run of the old side. Repeatable.", common=True)
    new: list[str] | None = option("FILE", "One more run of the new side. Repeatable.", common=True)
    against: str | None = option(
        "NAME",
        "Compare with the baseline that --save-baseline NAME kept.",
        autocompletion=completed("against"),
        common=True,
    )
    last: int | None = option(
        "N", "Compare the newest results in a folder with the N results before them.", min=1, common=True
    )
    threshold: float | None = option(
        "PERCENT",
        "Call a row slower if it lost more than this share of its bandwidth, whatever the noise.",
        min=0,
        max=99,
        common=True,
        group=JUDGE,
    )
    strict: bool = flag("Exit 1 for missing rows and other doubts too.", common=True, group=JUDGE)
    other_machine: bool = flag("Compare results of different machines: per GPU, per node, ratios.", common=True)
    collective: str | None = option("NAME", "Collective of files that do not name it: nccl-tests before 2.17.")
    presentation: PresentationOptions

    def plan(self) -> "ComparePlan":
        """The plan that these options ask for; UsageError where the files do not fit together."""
        from gpubench.jobs.compare import SECTIONS, SECTIONS_OF_HISTORY, SECTIONS_OF_MACHINES, ComparePlan

        sections: tuple[str, ...] = SECTIONS if self.last is None else SECTIONS_OF_HISTORY
        sections += SECTIONS_OF_MACHINES if self.other_machine else ()
        files = self._files() if self.last is None else self._no_files(self.last)
        return ComparePlan(
            base=files[0],
            new=files[1],
            folder=Path(_USUAL_FOLDER if self.last is None or self.base_file is None else self.base_file),
            last=self.last,
            threshold_percent=self.threshold,
            strict=self.strict,
            other_machine=self.other_machine,
            collective=parse_collective(self.collective),
            presentation=self.presentation.parse(tuple(dict.fromkeys(sections))),
        )

    def _files(self) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        base, new = self.base_file, self.new_file
        if self.against is not None:
            return self._against(self.against)
        if base is not None and new is not None:
            return tuple(map(Path, (base, *(self.base or ())))), tuple(map(Path, (new, *(self.new or ()))))
        if base is None:
            raise UsageError(
                "compare without results", expected=_EXPECTED, next_step="gpubench compare base.json new.json"
            )
        is_folder = Path(base).is_dir()
        raise UsageError(
            f"compare with one {'folder' if is_folder else 'file'}, {base}",
            expected=_EXPECTED,
            next_step=f"gpubench compare --last 5 {base}" if is_folder else f"gpubench compare {base} new.json",
        )

    def _against(self, name: str) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """The baseline of that name, and the one file that is named, which is the new one."""
        from gpubench.readers.results.history import find_baseline

        if self.base_file is None or self.new_file is not None:
            raise UsageError(
                f"compare --against {name} with {'two files' if self.new_file else 'no file'}",
                expected="one file, the new result",
                next_step=f"gpubench compare --against {name} new.json",
            )
        base = (find_baseline(name, os.environ), *map(Path, self.base or ()))
        return base, tuple(map(Path, (self.base_file, *(self.new or ()))))

    def _no_files(self, last: int) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """None of either side, as it has to be where a folder is compared."""
        given = {
            "--base": self.base,
            "--new": self.new,
            "NEW": self.new_file,
            "--against": self.against,
            "--other-machine": self.other_machine,
        }
        given["--collective"] = self.collective
        unfit = [name for name, value in given.items() if value]
        if unfit:
            raise UsageError(
                f"--last and {', '.join(unfit)} exclude each other",
                expected="a folder only: its newest results are compared with those before them",
                next_step=f"gpubench compare --last {last} {self.base_file or _USUAL_FOLDER}",
            )
        return (), ()


def _run(options: CompareOptions) -> int:
    from gpubench.jobs import compare

    return compare.run(options.plan(), sys.argv[1:])


app = app_of(HELP, CompareOptions, _run)
