"""The table of commands, with the properties of each command that other modules need."""

from enum import StrEnum
from typing import NamedTuple


class UnderTorchrun(StrEnum):
    """How a command behaves under torchrun.

    With RANKS, its processes form a job through torch. With ALONE, it ignores torchrun. With REFUSED, it exits with an
    error.
    """

    RANKS = "ranks"
    ALONE = "alone"
    REFUSED = "refused"


class Command(NamedTuple):
    """A command of `gpubench`.

    - `group`: the heading in `gpubench --help`
    - `module`: the module in `gpubench.cli.commands` whose `app(command)` returns the typer application
    - `page`: the module in `gpubench.formats.text` that prints the report
    - `main_section`: the section that formats show if they have room for only one
    - `streamed_section`: the section whose rows are written as soon as they are measured
    - `is_gate`: the command never exits 0 if nothing was judged
    - `measures`: false if all values come from other programs
    - `findings_only`: the stored rows add nothing to the findings
    - `ranks`: the module whose `run_launched` runs in launched ranks
    - `starts_job`: the first argument is a program, and all words after it are for this program
    """

    name: str
    summary: str
    group: str
    module: str
    under_torchrun: UnderTorchrun = UnderTorchrun.REFUSED
    page: str = "topo"
    main_section: str = "pairs"
    streamed_section: str = ""
    is_gate: bool = False
    measures: bool = True
    findings_only: bool = False
    writes_reports: bool = True
    ranks: str = ""
    starts_job: bool = False


_ALONE = UnderTorchrun.ALONE

TOPO = Command(
    "topo",
    "Show GPUs, NVLinks, NICs, the limit of each pair, and software.",
    "Measure",
    "machine",
    _ALONE,
    findings_only=True,
)
P2P = Command(
    "p2p",
    "Measure copies between all pairs of GPUs: speed, latency, path.",
    "Measure",
    "machine",
    page="p2p",
    streamed_section="pairs",
)
KV = Command(
    "kv",
    "Measure KV-cache transfers between two processes (UCX, NIXL).",
    "Measure",
    "kv",
    page="kv",
    main_section="kv",
    streamed_section="kv",
)
LIBRARIES = Command(
    "libraries",
    "Show the communication libraries of an environment.",
    "",
    "machine",
    _ALONE,
    page="libraries",
    main_section="libraries",
    measures=False,
)
"""The report of `gpubench topo --software`."""

CHECK = Command(
    "check",
    "Check that a machine or cluster is healthy and fast.",
    "Diagnose",
    "diagnose",
    page="check",
    main_section="findings",
    is_gate=True,
    findings_only=True,
)
BARE = CHECK._replace(
    name="", summary="Check this machine in ten lines and half a minute: hardware, health, speed, next step."
)
"""The check that `gpubench` runs if no command is named."""

SCAN = Command(
    "scan",
    "Find slow or dead nodes, GPUs, NICs and switches in a cluster.",
    "Diagnose",
    "diagnose",
    page="scan",
    main_section="cells",
    is_gate=True,
)
WATCH = Command(
    "watch",
    "Show which paths running jobs use: direct, host-staged, sockets.",
    "Diagnose",
    "diagnose",
    _ALONE,
    page="watch",
    main_section="jobs",
    streamed_section="traffic",
)
RUN = Command(
    "run",
    "Run a job with NCCL and UCX logging on, and explain the logs.",
    "Diagnose",
    "diagnose",
    page="explain",
    main_section="paths",
    is_gate=True,
    measures=False,
    starts_job=True,
)
EXPLAIN = Command(
    "explain",
    "Explain the paths in NCCL, UCX and NIXL logs of any job.",
    "Diagnose",
    "diagnose",
    _ALONE,
    page="explain",
    main_section="paths",
    is_gate=True,
    measures=False,
)
COMPARE = Command(
    "compare",
    "Compare two results: what got slower, beyond the noise.",
    "Results",
    "results",
    _ALONE,
    page="compare",
    main_section="comparison",
    is_gate=True,
    measures=False,
)
REPORT = Command(
    "report", "Show a stored result, or judge the table of another benchmark.", "Results", "results", _ALONE
)
COLLECTIVE = Command(
    "",
    "",
    "Measure",
    "collective",
    UnderTorchrun.RANKS,
    page="collective",
    main_section="rows",
    streamed_section="rows",
    ranks="gpubench.jobs.collective.job",
)
"""Properties that all collectives share. Each collective has its own name and summary."""

OVERLAP = Command(
    "overlap",
    "Measure how a collective and computation slow each other down.",
    "Expert",
    "overlap",
    UnderTorchrun.RANKS,
    page="overlap",
    main_section="overlap",
    streamed_section="overlap",
    ranks="gpubench.training.overlap",
)
PLAN = Command(
    "plan",
    "Predict how much communication, or a fault, slows a training step.",
    "Expert",
    "plan",
    _ALONE,
    page="plan",
    main_section="layouts",
)
PROFILES = Command(
    "profiles",
    "List, show, match, check and learn profiles of healthy machines.",
    "Setup",
    "profiles",
    _ALONE,
    writes_reports=False,
)

# In the order of --help
BEFORE_COLLECTIVES = (CHECK, SCAN, EXPLAIN, WATCH, RUN, TOPO, P2P, KV)
AFTER_COLLECTIVES = (COMPARE, REPORT, OVERLAP, PLAN, PROFILES)
_BY_NAME = {command.name: command for command in (*BEFORE_COLLECTIVES, LIBRARIES, *AFTER_COLLECTIVES)}


def find_command(subject: str, collective: str | None = None) -> Command:
    """Return the command that wrote a report: COLLECTIVE for every collective, TOPO if the subject is unknown."""
    return _BY_NAME.get(subject, TOPO if collective is None else COLLECTIVE)
