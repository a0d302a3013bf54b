"""Models NCCL's algorithms and protocols inside a node with NVSwitch: how much slower each is than NCCL's own
choice.

The latencies are those that NCCL compares (src/graph/tuning.cc of NCCL 2.28). So are the shares of bandwidth, except
for LL: on four H200s a ring with LL reached 0.44 of a ring with Simple, and a tree with LL 0.31. Kind: derived.
docs/settings.md has the times of four H200s. The model is within 40 % of them, except for a tree with Simple at 16 MiB,
which took twice as long.
"""

from collections.abc import Iterator, Mapping

from gpubench.collectives.expected import BASE_US, NVLINK_US
from gpubench.collectives.record import Collective
from gpubench.conditions.nccl_settings import ALGORITHMS, PROTOCOLS, chosen
from gpubench.errors import CouldNotMeasureError
from gpubench.model.terms.settings import ALGORITHM_VARIABLE, PROTOCOL_VARIABLE
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND

_RING, _TREE = "ring", "tree"
_SHARES = {
    _RING: {"ll": 0.44, "ll128": 0.92, "simple": 1.0},
    _TREE: {"ll": 0.41, "ll128": 7 / 9, "simple": 0.92},
}
"""Shares of the link bandwidth. Every rank of a tree forwards all data in both directions."""

_NAMES = {ALGORITHM_VARIABLE: ALGORITHMS, PROTOCOL_VARIABLE: PROTOCOLS}


def is_known_choice(name: str, value: str) -> bool:
    """True if a value of NCCL_ALGO or NCCL_PROTO allows rings, trees or protocols for every collective."""
    found = chosen(value, _NAMES[name])
    known = {*_SHARES} if name == ALGORITHM_VARIABLE else PROTOCOLS
    return set(found) == {""} and not known.isdisjoint(found[""])


def leaves_nvls(variables: Mapping[str, str]) -> bool:
    """True if NCCL may still reduce in NVSwitches, which needs the protocol Simple."""
    needed = {ALGORITHM_VARIABLE: "nvls", PROTOCOL_VARIABLE: "simple"}
    left = {name: chosen(variables[name], _NAMES[name]).get("", ()) for name in needed if name in variables}
    return all(needed[name] in names for name, names in left.items())


def slower_by_choice(
    variables: Mapping[str, str], collective: Collective, size_bytes: int, ranks: int, gb_s: float
) -> float:
    """Return how many times slower NCCL's best choice under these variables is than its best ring or tree.

    `gb_s` is the busbw of the unrestricted choice. Raises CouldNotMeasureError if NCCL has no such algorithm.
    """
    if collective.point_to_point or variables.keys().isdisjoint(_NAMES):
        return 1.0
    times = dict(_times(collective, size_bytes, ranks, gb_s))
    allowed = {name: chosen(value, _NAMES[name])[""] for name, value in variables.items() if name in _NAMES}
    algorithms = allowed.get(ALGORITHM_VARIABLE, ALGORITHMS)
    protocols = allowed.get(PROTOCOL_VARIABLE, PROTOCOLS)
    left = [times[one, other] for one, other in times if one in algorithms and other in protocols]
    if not left:
        raise CouldNotMeasureError(f"NCCL has no {' or '.join(sorted(algorithms))} for {collective.name}")
    return min(left) / min(times.values())


def _times(collective: Collective, size_bytes: int, ranks: int, gb_s: float) -> Iterator[tuple[tuple[str, str], float]]:
    is_all_reduce = collective.name == "allreduce"
    by_links = size_bytes * collective.busbw_factor(ranks) / (gb_s * BYTES_PER_GB)
    steps = (2 if is_all_reduce else 1) * (ranks - 1)
    for algorithm in (_RING, _TREE) if is_all_reduce else (_RING,):
        # Between two ranks a tree equals a ring.
        part = (ranks - 1) / ranks if algorithm == _TREE and ranks > 2 else 1.0
        for protocol, share in _SHARES[algorithm].items():
            base = BASE_US[algorithm.upper()][protocol.upper()]
            hop = NVLINK_US[algorithm.upper()][protocol.upper()]
            yield (algorithm, protocol), (base + steps * hop) / MICROSECONDS_PER_SECOND + by_links / (share * part)
