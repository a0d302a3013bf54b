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

WITHOUT_NAME = Command("", "What is here, is it well, how fast is it, what to do next.", "check")
"""What `gpubench` does where no command is named."""

COMMANDS = (
    Command("topo", "Devices, links, NICs, path and peer-access matrices, limits.", "topo", _ALONE),
    Command("p2p", "Every ordered pair of GPUs: bandwidth, latency, peer access off and on.", "p2p"),
    Command(
        "libraries", "Which libraries that move data are here, which versions, and who uses which.", "libraries", _ALONE
    ),
    Command("check", "Is this machine healthy? Facts and measurements against its profile and its siblings.", "check"),
    Command("scan", "Which node, GPU, NIC, rail or leaf among thousands is slow, dead or hangs.", "scan"),
    Command(
        "watch",
        "Traffic of jobs that run, live: direct, staged, by sockets, unbalanced; a gate with --strict.",
        "watch",
        _ALONE,
    ),
    Command(
        "explain",
        "Read NCCL's logs of any job: who talks to whom over what, what is host-staged, why.",
        "explain",
        _ALONE,
    ),
    Command("compare", "Two files of results: what got slower, beyond the noise.", "compare", _ALONE),
    Command("report", "A stored result again, or another program's table judged; in any format.", "report", _ALONE),
    *(Command(name, summary, "collective", UnderTorchrun.RANKS) for name, summary in COLLECTIVES.items()),
    Command(
        "overlap", "What a collective and computation cost each other when both run.", "overlap", UnderTorchrun.RANKS
    ),
    Command(
        "plan", "What this fabric, as measured, makes of a training step: buckets and layouts compared.", "plan", _ALONE
    ),
    Command("profiles", "What healthy machines reach: list, show, match, lint, learn.", "profiles", _ALONE),
)
