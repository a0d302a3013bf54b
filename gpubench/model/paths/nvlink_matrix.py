"""Finds pairs of GPUs with fewer NVLinks than their siblings, from the number of NVLinks between each pair.

`topology` uses it for the matrix of `nvidia-smi topo -m`, which does not show where a GPU's NVLinks lead.
"""

from collections import Counter
from collections.abc import Collection, Mapping

Links = Mapping[frozenset[str], int]
"""The number of NVLinks for every pair of GPUs of one model."""

_MOST_LINKS_OF_A_GPU = 18  # H100 to B300; more in a row of the matrix are shared by NVSwitches
_LEAST_GPUS_OF_A_MESH = 4  # Of three GPUs, any two may have a bridge of their own


def pairs_with_lost_links(links: Links) -> dict[frozenset[str], int]:
    """Return the pairs that lost NVLinks, each with the number of its siblings.

    NVSwitches connect all GPUs of a board equally. A mesh or a set of bridges is uneven by design, in a regular pattern
    (hybrid cube mesh: NV1, NV2, SYS), so there only a single pair or a single GPU counts as odd.
    """
    gpus = sorted({gpu for pair in links for gpu in pair})
    joined = {pair for pair, count in links.items() if count}
    totals = [sum(count for pair, count in links.items() if gpu in pair) for gpu in gpus]
    if max(totals, default=0) > _MOST_LINKS_OF_A_GPU:
        usual = max(links.values())
        parts = {gpu: _neighbours(gpu, joined) for gpu in gpus}
        odd = [pair for pair, count in links.items() if count < usual and not _apart(pair, parts)]
    elif len(gpus) >= _LEAST_GPUS_OF_A_MESH and joined:
        tally = Counter(links[pair] for pair in joined)
        usual = max(tally, key=lambda count: (tally[count], count))
        odd = [pair for pair, count in links.items() if count < usual]
        of_one_gpu = bool(odd) and joined.issuperset(odd) and bool(frozenset.intersection(*odd))
        odd = odd if len(odd) == 1 or of_one_gpu else []
    else:
        return {}
    return dict.fromkeys(odd, usual)


def _neighbours(gpu: str, joined: Collection[frozenset[str]]) -> frozenset[str]:
    return frozenset({gpu}.union(*(pair for pair in joined if gpu in pair)))


def _apart(pair: frozenset[str], parts: Mapping[str, frozenset[str]]) -> bool:
    """True if two GPUs are in different partitions of the NVSwitches, each of at least two GPUs."""
    one, other = (parts[gpu] for gpu in pair)
    return one.isdisjoint(other) and min(len(one), len(other)) > 1
