"""What NCCL's own log says of a job: communicators, who is in them, how they are connected, and what may explain it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpubench.model.transport import Edge, Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of a communicator. None is not said.

    `bus_id` is written as lspci does. `nvml_index` counts as nvidia-smi does, whatever CUDA_VISIBLE_DEVICES says.
    `node` is what NCCL takes for the machine: the host, or NCCL_HOSTID where that is set. `process` is `host:pid`.
    """

    rank: int
    host: str
    pid: int
    bus_id: str | None = None
    nvml_index: int | None = None
    node: str = ""
    local_rank: int | None = None

    @property
    def process(self) -> str:
        """Its process, as settings and remarks name it."""
        return f"{self.host}:{self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One communicator as all logs together show it.

    `id` is NCCL's commId; of a split one its parent's with the colour; of NCCL before 2.17, which prints none, one made
    up from its order and size. None is that of lines which no communicator could be told for. `size` and `nodes` are
    None where no line says them. `edges` are what the ends said; `join` puts them together.
    """

    id: str | None
    size: int | None
    nodes: int | None = None
    members: tuple[Member, ...] = ()
    edges: tuple[Edge, ...] = ()
    tunings: tuple[Tuning, ...] = ()
    mnnvl: bool = False
    candidates: tuple[str, ...] = ()

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of which there is no log."""
        present = {member.rank for member in self.members}
        return tuple(rank for rank in range(self.size or 0) if rank not in present)


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable that NCCL took from the environment or a configuration file, and the processes that said so."""

    name: str
    value: str
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Remark:
    """A kind of line that explains something, with what it is about, as first read, and who wrote such a line.

    `kind` is one of the names in readers/nccl_remarks.py. `about` holds the numbers or names in the line.
    """

    kind: str
    about: tuple[str, ...]
    text: str
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """All that the logs of a job say.

    `versions` are NCCL's; `networks` those that communicators use, by how many processes said so. `paths` is NCCL's own
    matrix of path types by host and bus ids, where the GRAPH subsystem printed it. `warnings` are the texts of NCCL
    WARN lines with their count. `lines` are all that were read, `nccl_lines` those of NCCL, `unreadable` those of
    connections that were cut or garbled.
    """

    versions: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    communicators: tuple[Communicator, ...] = ()
    networks: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()
    paths: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    warnings: Mapping[str, int] = field(default_factory=dict)
    lines: int = 0
    nccl_lines: int = 0
    unreadable: int = 0
