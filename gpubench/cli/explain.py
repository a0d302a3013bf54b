"""`gpubench explain`: its options, and the report on the logs it is given."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gpubench.cli import presentation
from gpubench.cli.delivery import delivering
from gpubench.cli.presentation import Presentation, check_writable, parse_presentation
from gpubench.cli.presenter import Presenter, terminal_style
from gpubench.cli.run_metadata import stamp
from gpubench.hardware.timing.clock import no_garbage_collection
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.model.results.report import Metadata
from gpubench.model.terms.origin import Origin
from gpubench.readers.nccl_log.files import STDIN, LogFile, read_logs
from gpubench.readers.nccl_log.stream import NcclLogReader

NAME = "explain"
SUMMARY = "Read NCCL's logs of any job: who talks to whom over what, what is host-staged, why."
HELP = f"""{SUMMARY}

Any program that uses NCCL (PyTorch, nccl-tests, ...) writes them when these are in every rank's environment:

  NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log

NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV,NET,TUNING says more about why. A log of all ranks together, as mpirun or srun
collect it, will do too, and so will gzip.

  gpubench explain /tmp/nccl.*.log

  gpubench explain logs/ --output paths.csv

  zcat slurm-4711.out.gz | gpubench explain -

Exit codes: 0 nothing goes through host memory, or only by design; 1 something does and need not; 3 the logs do not
say enough.
"""

LOGS = Annotated[
    list[str],
    typer.Argument(metavar="LOG", help="Files, folders of files, or - for standard input.", show_default=False),
]

_MOST_NAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """What the user asked for."""

    logs: tuple[str, ...]
    presentation: Presentation


def parse_explain_options(given: dict[str, Any]) -> ExplainOptions:
    """The options of `explain` from what typer read.

    Raises:
        UsageError: an option of presentation that cannot be read.
    """
    from gpubench.measure.explain.report import SECTIONS

    return ExplainOptions(logs=tuple(given["logs"]), presentation=parse_presentation(given, SECTIONS))


def run(given: dict[str, Any]) -> None:
    """Be the command."""
    raise typer.Exit(run_explain(parse_explain_options(given), sys.argv[1:]))


def run_explain(options: ExplainOptions, arguments: Sequence[str]) -> int:
    """Read the logs and show what they say; the exit code.

    Raises:
        GpubenchError: a log cannot be read, or an output cannot be written.
    """
    from gpubench.measure.explain.report import explain

    shown = options.presentation
    check_writable(shown.outputs)
    presenter = Presenter(shown, terminal_style(shown, sys.stdout), progress=False)
    # Nothing here makes reference cycles, and looking for them among a million pairs takes a sixth of the time.
    with delivering(presenter), no_garbage_collection():
        reader = NcclLogReader()
        files = read_logs(options.logs, reader, sys.stdin.buffer)
        facts = reader.facts()
        presenter.begin(_metadata(options, arguments, facts, files), ())
        report = explain(facts, _names(options.logs))
        presenter.end(report)
    return options.presentation.exit_code(report.verdict)


def _metadata(options: ExplainOptions, arguments: Sequence[str], facts: LogFacts, files: Sequence[LogFile]) -> Metadata:
    hosts = dict.fromkeys(member.host for each in facts.communicators for member in each.members)
    values: dict[str, dict[str, None]] = {}
    for setting in facts.settings:
        values.setdefault(setting.name, {})[setting.value] = None
    return Metadata(
        **stamp(arguments),
        subject=NAME,
        origin=Origin.RECORDED,
        hosts=list(hosts) or ["unknown"],
        libraries={
            name: ", ".join(found) for name, found in (("NCCL", facts.versions), ("network", facts.networks)) if found
        },
        environment={name: " or ".join(found) for name, found in values.items()},
        options={
            "files": len(files),
            "files_without_nccl": sum(not file.nccl_lines for file in files),
            "lines": facts.lines,
            "nccl_lines": facts.nccl_lines,
            "warnings": dict(facts.warnings),
        },
        source=", ".join(_names(options.logs)),
    )


def _names(logs: Sequence[str]) -> list[str]:
    """The first few of many."""
    names = ["standard input" if log == STDIN else log for log in logs]
    more = len(names) - _MOST_NAMES
    return names[:_MOST_NAMES] + ([f"{more} more"] if more > 0 else [])


PARAMETERS: tuple[tuple[str, Any, Any], ...] = (
    ("logs", LOGS, ...),
    *presentation.PARAMETERS,
)
