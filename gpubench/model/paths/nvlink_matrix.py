"""Find pairs of GPUs with lost NVLinks in the matrix of `nvidia-smi topo -m`, which has only the number per pair."""

from collections import Counter
from collections.abc import Mapping

Links = Mapping[frozenset[str], int]
"""The number of NVLinks for every pair of GPUs of one model."""


def pairs_with_lost_links(links: Links) -> dict[frozenset[str], int]:
    """Return the pairs that lost NVLinks, each with the number of links of its siblings.

    NVSwitches connect all GPUs of a board equally. A mesh or a set of bridges is uneven by design, so there only a
    single pair or a single GPU counts as odd.
    """
    gpus = sorted({gpu for pair in links for gpu in pair})
    joined = {pair for pair, count in links.items() if count}
    totals = [sum(count for pair, count in links.items() if gpu in pair) for gpu in gpus]
    # H100 to B300 have 18 links. A row of the matrix with more counts links to NVSwitches once per GPU.
    if max(totals, default=0) > 18:
        usual = max(links.values())
        parts = {gpu: frozenset({gpu}.union(*(pair for pair in joined if gpu in pair))) for gpu in gpus}
        odd = [pair for pair, count in links.items() if count < usual and not _apart(pair, parts)]
    # Of three GPUs, any two may have their own bridge.
    elif len(gpus) > 3 and joined:
        tally = Counter(links[pair] for pair in joined)
        usual = max(tally, key=lambda count: (tally[count], count))
        odd = [pair for pair, count in links.items() if count < usual]
        share_one_gpu = bool(odd) and joined.issuperset(odd) and bool(frozenset.intersection(*odd))
        odd = odd if len(odd) == 1 or share_one_gpu else []
    else:
        return {}
    return dict.fromkeys(odd, usual)


def _apart(pair: frozenset[str], parts: Mapping[str, frozenset[str]]) -> bool:
    """True if two GPUs are in different partitions of the NVSwitches, each of at least two GPUs."""
    one, other = (parts[gpu] for gpu in pair)
    return one.isdisjoint(other) and min(len(one), len(other)) > 1
