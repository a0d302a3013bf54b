"""Find pairs of GPUs that lost NVLinks, from the number of NVLinks per pair in `nvidia-smi topo -m`."""

from collections import Counter
from collections.abc import Mapping

Links = Mapping[frozenset[str], int]
"""The number of NVLinks between two GPUs, for all pairs of GPUs of one model."""


def pairs_with_lost_links(links: Links) -> dict[frozenset[str], int]:
    """Return the pairs that lost NVLinks. The value is the usual number of links for such pairs.

    NVSwitches connect all GPUs of a board equally. A mesh or a set of bridges is uneven by design, so there the result
    is empty unless a single pair or a single GPU differs.
    """
    gpus = sorted({gpu for pair in links for gpu in pair})
    joined = {pair for pair, count in links.items() if count}
    totals = [sum(count for pair, count in links.items() if gpu in pair) for gpu in gpus]
    # H100 to B300 have 18 links. If a GPU's row adds up to more, it counts the same links to NVSwitches once per peer.
    if max(totals, default=0) > 18:
        usual = max(links.values())
        parts = {gpu: frozenset({gpu}.union(*(pair for pair in joined if gpu in pair))) for gpu in gpus}
        odd = [pair for pair, count in links.items() if count < usual and not _apart(pair, parts)]
    # With three GPUs, a bridge may connect any two of them.
    elif len(gpus) > 3 and joined:
        tally = Counter(links[pair] for pair in joined)
        usual = max(tally, key=lambda count: (tally[count], count))
        odd = [pair for pair, count in links.items() if count < usual]
        share_one_gpu = bool(odd) and joined.issuperset(odd) and bool(frozenset.intersection(*odd))
        odd = odd if len(odd) == 1 or share_one_gpu else []
    else:
        return {}
    return dict.fromkeys(odd, usual)


def gaps_in_hives(links: Links) -> dict[frozenset[str], int]:
    """Return the pairs without an xGMI link that have one to the same third GPU.

    AMD's driver reports links between all GPUs of a hive, also between those that are several hops apart.
    """
    joined = {pair for pair, count in links.items() if count}
    gpus = frozenset[str]().union(*joined)
    return {
        pair: 1
        for pair in links
        if pair not in joined and any(all(frozenset((one, gpu)) in joined for one in pair) for gpu in gpus - pair)
    }


def _apart(pair: frozenset[str], parts: Mapping[str, frozenset[str]]) -> bool:
    """True if the GPUs are in different NVSwitch partitions, each with at least two GPUs."""
    one, other = (parts[gpu] for gpu in pair)
    return one.isdisjoint(other) and min(len(one), len(other)) > 1
