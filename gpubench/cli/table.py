"""The commands, in the order of --help: what each is for, and the module that is imported when it is chosen."""

from enum import StrEnum
from typing import NamedTuple

from gpubench.collectives.registry import SUMMARIES as COLLECTIVES


class UnderTorchrun(StrEnum):
    """What torchrun's variables mean to a command; shells and programs that a rank of torchrun's starts have them too.

    `RANKS` meet by torch; `ALONE` looks or reckons and passes them over; `REFUSED` measures, and its ranks need MPI.
    """

    RANKS = "ranks"
    ALONE = "alone"
    REFUSED = "refused"


class Command(NamedTuple):
    """A command; its module of `gpubench.cli.commands` has an `app(command)` for typer."""

    name: str
    summary: str
    module: str
    under_torchrun: UnderTorchrun = UnderTorchrun.REFUSED


_ALONE = UnderTorchrun.ALONE

WITHOUT_NAME = Command(
    "", "Check this machine in ten lines and half a minute: hardware, health, speed, next step.", "check"
)
"""What `gpubench` does where no command is named."""

COMMANDS = (
    Command("topo", "Show GPUs, NVLinks and NICs, how they are wired, and the limit of each pair.", "topo", _ALONE),
    Command("p2p", "Measure copies between every pair of GPUs: bandwidth, latency, path.", "p2p"),
    Command(
        "libraries", "List the communication libraries that are installed, and who loads them.", "libraries", _ALONE
    ),
    Command("check", "Check whether this machine or cluster is healthy, and as fast as its profile.", "check"),
    Command("scan", "Find slow, dead or hanging nodes, GPUs, NICs, rails and leaves in a large job.", "scan"),
    Command("watch", "Show the live traffic of running jobs: direct, host-staged, over sockets.", "watch", _ALONE),
    Command("explain", "Read the NCCL logs of any job: which path each connection took, and why.", "explain", _ALONE),
    Command("compare", "Compare two results: what got slower, beyond the noise.", "compare", _ALONE),
    Command("report", "Show a stored result in any format, or judge another program's table.", "report", _ALONE),
    *(Command(name, summary, "collective", UnderTorchrun.RANKS) for name, summary in COLLECTIVES.items()),
    Command(
        "overlap",
        "Measure how much a collective and computation slow each other down.",
        "overlap",
        UnderTorchrun.RANKS,
    ),
    Command(
        "plan",
        "Predict the time of a training step on this fabric; compare bucket sizes and parallel layouts.",
        "plan",
        _ALONE,
    ),
    Command("profiles", "List, show, match, check and learn profiles of healthy machines.", "profiles", _ALONE),
)
