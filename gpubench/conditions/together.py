"""What several pairs at once do to each other on PCIe, where each of them alone is fine."""

from collections.abc import Iterator, Sequence

from gpubench.conditions.cause import Cause, Family, Sighting, Unread
from gpubench.conditions.circumstances import Circumstances
from gpubench.conditions.sightings import of_pairs
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.selection import Pair
from gpubench.model.results.rows.causes import Effect

_BELOW_ONE_SWITCH = ("PIX", "PXB")

_COLLAPSED = 2.0
"""So many times as fast as writes, reads by the same pairs show that it is not the links. Where links are all that
counts, the two differ by a third at most (H200, over NVLink)."""

_SEVERAL = 2


def _shared_uplink(around: Circumstances) -> Iterator[Sighting | Unread]:
    for pair in around.staged or ():
        refusal = around.refusals.get(pair)
        if refusal is not None and refusal.by_design and around.wiring.path(pair) in _BELOW_ONE_SWITCH:
            yield of_pairs(
                around,
                [pair],
                f"{around.wiring.path(pair)}, and through host memory: up and down the same uplink",
                Confidence.LIKELY,
            )


def _write_collapse(around: Circumstances) -> Iterator[Sighting | Unread]:
    """Of copies that were made at once both ways: by the sources, which write, and by the destinations, which read."""
    for each in around.together:
        pairs = _converging(around, each.pairs)
        if pairs and each.read_gb_s > _COLLAPSED * each.write_gb_s:
            seen = f"{each.pattern}: together writes reach {each.write_gb_s:.3g} GB/s, reads {each.read_gb_s:.3g}"
            yield of_pairs(around, pairs, seen, Confidence.LIKELY)


def _converging(around: Circumstances, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs over PCIe whose sources share a switch and write to GPUs below several root complexes."""
    by_switch: dict[tuple[int, str], list[Pair]] = {}
    for pair in pairs:
        source, destination = (around.wiring.gpu(gpu) for gpu in pair)
        if source is None or destination is None or around.wiring.has_nvlinks(pair):
            continue
        for switch in source.place.switches[:1]:
            if switch not in destination.place.switches and destination.place.host_bridge is not None:
                by_switch.setdefault((around.wiring.gpus[pair[0]].node, switch), []).append(pair)
    return [
        pair
        for members in by_switch.values()
        if len({source for source, _ in members}) >= _SEVERAL and len(_roots(around, members)) >= _SEVERAL
        for pair in members
    ]


def _roots(around: Circumstances, pairs: Sequence[Pair]) -> set[str]:
    found = (around.wiring.gpu(destination) for _, destination in pairs)
    return {gpu.place.host_bridge for gpu in found if gpu is not None and gpu.place.host_bridge is not None}


TOGETHER = Family(
    "together",
    "Several pairs at once",
    (
        Cause(
            id="posted-write-collapse",
            title="P2P writes collapse when several GPUs below one PCIe switch write to several root complexes; reads "
            "do not",
            effects=(Effect.SLOW,),
            detection="gpubench p2p's patterns: the same pairs at once, over PCIe, read more than twice as fast as "
            "they write",
            settles="gpubench p2p: the lines `all to all`, write and read; pair by pair both are fine",
            cure="have NCCL read: NCCL_P2P_READ_ENABLE=1 gpubench alltoall, and without; else spread the cards over "
            "root complexes",
            link="https://github.com/local-inference-lab/rtx6kpro",
            look=_write_collapse,
        ),
        Cause(
            id="staging-shares-uplink",
            title="Pairs under one PCIe switch are slower through host memory than pairs under two",
            effects=(Effect.SLOW,),
            detection="pairs without P2P by design, through host memory, below one switch",
            settles="gpubench p2p: PIX pairs slower than SYS pairs",
            cure="nothing to repair: both ways share the switch's uplink; spread such ranks over switches",
            link="https://github.com/NVIDIA/nccl/issues/1086",
            look=_shared_uplink,
            by_design=True,
        ),
    ),
)
