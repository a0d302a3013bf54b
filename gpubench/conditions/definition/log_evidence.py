"""NCCL's log of two ranks that reach each other through host memory, in which causes are looked for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gpubench.conditions.definition.explains import Medium, PathKind, Relation
from gpubench.model.paths.nccl_log import Note, RemarkKind

OFF = ("", "0")
SOCKET = "Socket"

ASK_FOR_MORE = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,GRAPH,NET,P2P,SHM"


@dataclass(frozen=True, slots=True)
class ProcessLog:
    """The log of one process: its settings by name, and lines that explain something."""

    settings: tuple[tuple[str, str], ...] = ()
    notes: tuple[Note, ...] = ()

    def setting(self, name: str) -> str | None:
        """The value of a variable, None where it is not set."""
        return dict(self.settings).get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Ranks that reach each other through host memory, and all that the log says of it.

    `one_node` is whether NCCL takes both for ranks of one machine, `same_machine` whether the log shows that they are.
    `network` carries the bytes, None where shared memory does. `path` is NCCL's type of path between the GPUs
    ('PIX', 'SYS'), None where it is not said; `gpus` how many it found on the host, 0 if not said. `notes` are about
    these two GPUs, `bus_ids` theirs. `nvlinks` is whether anything shows NVLinks on the machine, `models` are the
    ranks' GPUs where the text names them, `listed_models` others that it names, `interfaces` those over which processes
    meet. `rdma` is whether any process of the job found an RDMA device, `plugin` whether any has a plugin for a
    network. `peers_elsewhere` is whether both GPUs have peer access to others of the machine.
    """

    one_node: bool
    same_machine: bool
    network: str | None
    path: str | None = None
    gpus: int = 0
    notes: tuple[Note, ...] = ()
    source: ProcessLog = ProcessLog()
    destination: ProcessLog = ProcessLog()
    bus_ids: tuple[str, ...] = ()
    nvlinks: bool = False
    models: tuple[str, ...] = ()
    listed_models: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    rdma: bool = False
    plugin: bool = False
    peers_elsewhere: bool = False

    @property
    def inside(self) -> bool:
        """True if both run on one machine, also where NCCL takes it for several."""
        return self.one_node or self.same_machine

    @property
    def kinds(self) -> tuple[PathKind, ...]:
        """The kinds of paths that this may be: of two machines a log does not say whether NVLinks join them."""
        inside = [Relation.ONE_GPU if self.one_gpu else Relation.ONE_NODE]
        relations = inside if self.inside else [Relation.ONE_DOMAIN, Relation.TWO_NODES]
        medium = Medium.SHM if self.network is None else Medium.SOCKET if self.network == SOCKET else Medium.RDMA
        return tuple(PathKind(relation, medium) for relation in relations)

    @property
    def one_gpu(self) -> bool:
        """True if both run on one GPU."""
        return self.inside and len(self.bus_ids) > 1 and len(set(self.bus_ids)) == 1

    @property
    def virtual(self) -> bool:
        """True if the GPUs are on bus 0, where hypervisors put devices, and no server has a slot."""
        return any(bus_id[5:7] == "00" for bus_id in self.bus_ids)

    def settings(self, name: str) -> tuple[str, ...]:
        """The values that the two have of a variable."""
        values = (process.setting(name) for process in (self.source, self.destination))
        return tuple(dict.fromkeys(value for value in values if value is not None))

    def found(self, *kinds: RemarkKind) -> tuple[Note, ...]:
        """Lines of these kinds, about the two GPUs first, then of either process."""
        notes = (*self.notes, *self.source.notes, *self.destination.notes)
        return tuple(dict.fromkeys(note for kind in kinds for note in notes if note.kind is kind))


class LoggedReason(NamedTuple):
    """Evidence and advice; of a condition that is by design, or is so here, whether the log proves that it is."""

    evidence: str
    advice: str
    is_proven: bool = True
    by_design: bool = False


def through_shm(staged: Staged) -> bool:
    """True if GPUs of one node go through shared memory."""
    return staged.inside and staged.network is None


def by_sockets(staged: Staged) -> bool:
    """True if nodes reach each other by sockets."""
    return not staged.inside and staged.network == SOCKET


def by_rdma(staged: Staged) -> bool:
    """True if nodes reach each other by RDMA."""
    return not staged.inside and staged.network not in (None, SOCKET)


def remark_in_log(
    kind: RemarkKind, advice: str, where: Callable[[Staged], bool] = through_shm, said: str = "NCCL says: {.gist}"
) -> Callable[[Staged], LoggedReason | None]:
    """For what NCCL itself remarks of GPUs that are in some place to each other."""

    def find(staged: Staged) -> LoggedReason | None:
        found = staged.found(kind) if where(staged) else ()
        return LoggedReason(said.format(found[0]), advice) if found else None

    return find
