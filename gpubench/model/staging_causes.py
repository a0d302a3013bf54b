"""The first cause of a fallback to host memory that settings, processes and machines show."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpubench.model.evidence import State
from gpubench.model.rank_facts import ENVIRONMENT, RankFacts
from gpubench.model.selection import Pair
from gpubench.model.transport import Transport
from gpubench.model.wiring import Wiring

Staged = Mapping[Pair, Sequence[Transport]]
"""The pairs that go through host memory, with what they take."""


@dataclass(frozen=True, slots=True)
class Cause:
    """What explains a fallback: a stable id, what was seen, what to do."""

    id: str
    seen: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What may explain a fallback. `settings` are the user's, by variable: the distinct values that ranks have."""

    wiring: Wiring
    facts: Sequence[RankFacts]
    settings: Mapping[str, Sequence[str]]


def first_cause(staged: Staged, around: Circumstances) -> Cause:
    """The first of the causes, in the order in which NCCL comes to them."""
    return next(cause for find in _CAUSES for cause in find(staged, around))


def _environment(staged: Staged, around: Circumstances) -> Iterator[Cause]:
    """Variables that forbid a direct path."""
    inside = {pair: transports for pair, transports in staged.items() if around.wiring.together(pair)}
    by_network = any(transport.network for transports in inside.values() for transport in transports)
    wired = any(around.wiring.has_nvlinks(pair) for pair in inside)
    blamed = {
        name: ",".join(values)
        for name, values in around.settings.items()
        if any(
            (inside and _keeps_off_peers(name, value, by_network=by_network, wired=wired))
            or (len(inside) < len(staged) and _keeps_off_rdma(name, value))
            for value in values
        )
    }
    if blamed:
        shown = " ".join(f"{name}={values}" for name, values in blamed.items())
        places = places_of(blamed, around.facts)
        yield Cause("environment", f"{shown} in {' and '.join(places)}", removal(blamed, places))


def places_of(names: Collection[str], facts: Sequence[RankFacts]) -> list[str]:
    """Where variables of NCCL's stand: the environment, files."""
    known = [each.nccl_settings for each in facts]
    found = {settings[name].place: None for settings in known for name in names if name in settings}
    return list(found) or [ENVIRONMENT]


def removal(names: Collection[str], places: Sequence[str]) -> str:
    """How to be rid of variables."""
    files = [place for place in places if place != ENVIRONMENT]
    unset = [f"unset {' '.join(names)}"] if ENVIRONMENT in places else []
    return "; ".join([*unset, *([f"take {' '.join(names)} out of {' and '.join(files)}"] if files else [])])


def _keeps_off_peers(name: str, value: str, *, by_network: bool, wired: bool) -> bool:
    """Whether a variable keeps ranks of one node from peer access, or from the shared memory that comes before it."""
    if name == "NCCL_P2P_LEVEL":
        return value.upper() in (("0", "LOC") if wired else ("0", "1", "2", "LOC", "NVL", "PIX", "PXB"))
    if name == "NCCL_SHM_DISABLE":
        return by_network and value != "0"
    return (name == "NCCL_P2P_DISABLE" and value != "0") or (name == "NCCL_HOSTID" and by_network)


def _keeps_off_rdma(name: str, value: str) -> bool:
    """Whether a variable keeps ranks of different nodes from RDMA, or RDMA from GPU memory."""
    return (
        (name == "NCCL_IB_DISABLE" and value != "0")
        or (name == "NCCL_NET" and value.lower() == "socket")
        or (name == "NCCL_NET_GDR_LEVEL" and value.upper() in ("0", "LOC"))
    )


def _shared_memory(staged: Staged, around: Circumstances) -> Iterator[Cause]:
    """A /dev/shm of their own: NCCL then takes ranks of one host for strangers."""
    devices = {each.rank: each.shm_device for each in around.facts}
    for pair in staged:
        source, destination = (devices.get(rank) for rank in pair)
        if around.wiring.together(pair) and None not in (source, destination) and source != destination:
            yield Cause(
                "shm-not-shared",
                f"ranks {pair[0]} and {pair[1]} are on one host with different /dev/shm, as in containers of their own",
                "run the ranks in one container, or share it: docker run --ipc=host",
            )


def by_design(pair: Pair, transports: Sequence[Transport], wiring: Wiring) -> str:
    """Why a pair goes through host memory where that is no fault; inside a node, no design makes it take a network."""
    if wiring.together(pair) and any(transport.network for transport in transports):
        return ""
    return wiring.by_design(pair)


def _by_design(staged: Staged, around: Circumstances) -> Iterator[Cause]:
    """Policies, and hardware without a direct path: nothing to repair, whatever variables say."""
    reasons = [by_design(pair, transports, around.wiring) for pair, transports in staged.items()]
    if all(reasons):
        yield Cause("by-design", "; ".join(dict.fromkeys(reasons)), "nothing to repair; gpubench topo shows the wiring")


def _refused(staged: Staged, around: Circumstances) -> Iterator[Cause]:
    """Peer access, or GPUDirect RDMA, that the driver refuses."""
    for pair in staged:
        capability = around.wiring.capability(pair)
        if capability.state is State.CONTRADICTING:
            yield Cause("refused", capability.seen, "gpubench topo says what to do about it")


def _sockets(staged: Staged, around: Circumstances) -> Iterator[Cause]:
    """Sockets between nodes that have RDMA NICs."""
    for pair, transports in staged.items():
        nics = [nic.name for rank in pair for nic in around.wiring.rdma_nics(rank)]
        if not around.wiring.together(pair) and nics and any(each.network == "Socket" for each in transports):
            yield Cause(
                "sockets",
                f"sockets between the nodes, although {nics[0]} is up",
                "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET shows why: libibverbs or /dev/infiniband may be missing",
            )


def _unknown(_staged: Staged, _around: Circumstances) -> Iterator[Cause]:
    yield Cause(
        "unknown",
        "no setting, /dev/shm, driver or policy explains it",
        "NCCL_DEBUG=INFO shows what NCCL found; gpubench topo shows what is there",
    )


_CAUSES: Sequence[Callable[[Staged, Circumstances], Iterator[Cause]]] = (
    _by_design,
    _environment,
    _shared_memory,
    _refused,
    _sockets,
    _unknown,
)


def users_settings(facts: Sequence[RankFacts], said: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """NCCL's variables as ranks have them in their environment, or took them from a configuration file."""
    found: dict[str, dict[str, None]] = {}
    known = ({name: setting.value for name, setting in each.nccl_settings.items()} for each in facts)
    for variables in (*known, *said):
        for name, value in variables.items():
            if name.startswith("NCCL_"):
                found.setdefault(name, {})[value] = None
    return {name: tuple(values) for name, values in sorted(found.items())}
