"""What single runs of healthy machines differ by, as real ones showed it: no file of a single run tells that itself.

Where the figures come from, and how often comparisons of other machines fail with them: docs/compare.md.
"""

from gpubench.model.results.measured_copies import BY_CPU
from gpubench.model.results.rows.comparison import RowKey
from gpubench.model.terms.copies import HostMemory
from gpubench.model.terms.noise import Noise

LARGE_BYTES = 16 * 2**20
_LARGE, _SMALL, _SMALL_US = 0.02, 0.05, 0.5
"""By how much one run may differ from another as a whole: on four H200s medians of NCCL's collectives kept within 2 %
from 16 MiB on, and within 5 % or 0.5 µs below (docs/validation.md)."""

_NETWORK_SMALL = 0.10
"""The same below 16 MiB over a network: of three runs of seven collectives on the same two nodes the middles differed
by up to 9.3 %."""

_OTHER_NODES = 0.15
"""By how much jobs of several nodes differ that ran on other nodes: what lies between these is another part of the
network. Of 45 pairs of ten H100 nodes the same test took up to 13 % longer on one pair than on another, at all sizes
alike."""

_BY_CPU = 0.25
"""Of copies that a CPU makes in host memory: others use both, and `gpubench check` looks no closer either."""

_WITH_HOST = {HostMemory.PINNED.full_name: 0.08, HostMemory.PAGEABLE.full_name: 2.0}
"""Of copies between GPU and host, by `setting`. In seven runs on healthy machines of one kind (H200s, 2026-11-20) those
of pinned memory took 51.4 to 55.4 GB/s, and of pageable memory, which a CPU copies first, 5.7 to 16.7."""

_OF_RINGS, _OF_MANY_PEERS = 0.01, 0.03
"""The standard deviation of a row's change from 16 MiB on. NCCL's rings and trees, and sendrecv, which have the same
neighbours all the time: 0.1 to 0.9 % a run. Many peers at a time, whose order and channels are another in every run, up
to 1 GiB: 0.6 to 3 % a run, at neighbouring sizes alike, which differences between neighbours do not show."""

_MANY_PEERS = frozenset({"alltoall", "alltoallv", "gather", "scatter"})
_MANY_PEERS_UNTIL = 2**30

_WORTH = 20.0
"""The degrees of freedom that this knowledge counts with beside what the files show: about as many as 40 rows have."""


def single_run_floor(key: RowKey, time_us: float, *, other_hosts: bool = False) -> float:
    """By how much single runs of the same differ as a whole, as a part of the time; `time_us` is what a row takes."""
    if key.engine == BY_CPU:
        return _BY_CPU
    if key.setting in _WITH_HOST:
        return _WITH_HOST[key.setting]
    if other_hosts and is_over_network(key):
        return max(_OTHER_NODES, _SMALL_US / time_us)
    if (key.size_bytes or 0) >= LARGE_BYTES:
        return _LARGE
    return max(_NETWORK_SMALL if is_over_network(key) else _SMALL, _SMALL_US / time_us)


def is_over_network(key: RowKey) -> bool:
    """True for rows of a job of several nodes."""
    return (key.nodes or 1) > 1


def with_usual_noise(key: RowKey, found: Noise | None) -> Noise | None:
    """The noise that the files show, and what such rows usually have, each by its degrees of freedom.

    Few rows give a deviation that is often half or twice the true one; this draws it to the usual one, as Smyth does
    for genes (2004, "Linear models and empirical Bayes methods"). Only of large rows of collectives; others have a
    floor that is wider.
    """
    if key.collective is None or (key.size_bytes or 0) < LARGE_BYTES:
        return found
    many = key.collective in _MANY_PEERS and (key.size_bytes or 0) <= _MANY_PEERS_UNTIL
    usual = Noise(_OF_MANY_PEERS if many else _OF_RINGS, _WORTH)
    if found is None:
        return usual
    if found.deviation > usual.deviation:
        return found
    freedom = found.freedom + usual.freedom
    squares = found.freedom * found.deviation**2 + usual.freedom * usual.deviation**2
    return Noise((squares / freedom) ** 0.5, freedom)
