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
    "Show GPUs, NVLinks and NICs, how they are wired, and the limit of each pair.",
    "machine",
    _ALONE,
    findings_only=True,
)
P2P = Command(
    "p2p",
    "Measure copies between every pair of GPUs: bandwidth, latency, path.",
    "machine",
    page="p2p",
    streamed_section="pairs",
)
KV = Command(
    "kv",
    "Measure KV-cache transfers between two processes: UCX's or NIXL's path, and why it is slow.",
    "kv",
    page="kv",
    main_section="kv",
    streamed_section="kv",
)
LIBRARIES = Command(
    "libraries",
    "List the communication libraries that are installed, and who loads them.",
    "machine",
    _ALONE,
    page="libraries",
    main_section="libraries",
    measures=False,
)
CHECK = Command(
    "check",
    "Check whether this machine or cluster is healthy, and as fast as its profile.",
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
    "Find slow, dead or hanging nodes, GPUs, NICs, rails and leaves in a large job.",
    "diagnose",
    page="scan",
    main_section="cells",
    is_gate=True,
)
WATCH = Command(
    "watch",
    "Show the live traffic of running jobs: direct, host-staged, over sockets.",
    "diagnose",
    _ALONE,
    page="watch",
    main_section="jobs",
    streamed_section="traffic",
)
RUN = Command(
    "run",
    "Run a job (torchrun, mpirun, srun, ...) with its logs on, and explain them.",
    "diagnose",
    page="explain",
    main_section="paths",
    is_gate=True,
    measures=False,
    starts_job=True,
)
EXPLAIN = Command(
    "explain",
    "Read logs of NCCL, UCX and NIXL from any job: which path each connection took, and why.",
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
    "results",
    _ALONE,
    page="compare",
    main_section="comparison",
    is_gate=True,
    measures=False,
)
REPORT = Command("report", "Show a stored result in any format, or judge another program's table.", "results", _ALONE)
COLLECTIVE = Command(
    "",
    "",
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
    "Measure how much a collective and computation slow each other down.",
    "overlap",
    UnderTorchrun.RANKS,
    page="overlap",
    main_section="overlap",
    streamed_section="overlap",
    ranks="gpubench.training.overlap",
)
PLAN = Command(
    "plan",
    "Predict what this fabric, or a fault in it, costs a training step.",
    "plan",
    _ALONE,
    page="plan",
    main_section="layouts",
)
PROFILES = Command(
    "profiles",
    "List, show, match, check and learn profiles of healthy machines.",
    "profiles",
    _ALONE,
    writes_reports=False,
)

BEFORE_COLLECTIVES = (TOPO, P2P, KV, LIBRARIES, CHECK, SCAN, WATCH, RUN, EXPLAIN, COMPARE, REPORT)
# In the order of --help. OVERLAP, PLAN and PROFILES come after the collectives.
AFTER_COLLECTIVES = (OVERLAP, PLAN, PROFILES)
_BY_NAME = {command.name: command for command in (*BEFORE_COLLECTIVES, *AFTER_COLLECTIVES)}


def find_command(subject: str, collective: str | None = None) -> Command:
    """Return the command that wrote a report: COLLECTIVE for every collective, TOPO if the subject is unknown."""
    return _BY_NAME.get(subject, TOPO if collective is None else COLLECTIVE)
