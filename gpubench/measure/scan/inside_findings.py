"""The findings of phase 0 that need no comparison between nodes: damaged data, and figures below a profile's."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from gpubench.collectives.curve import curve
from gpubench.collectives.registry import collective_named
from gpubench.errors import UsageError
from gpubench.model.profiles.expectation import Expectation, judge_bandwidth
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.scan_rounds import (
    BOTH_WAYS,
    EXCHANGED_BYTES,
    WRONG_DATA_ARRIVED,
    LocalFigure,
    LocalQuantity,
    ScanFabric,
)
from gpubench.model.terms.units import BYTES_PER_GB, compress_names
from gpubench.model.terms.verdict import WRONG_DATA, Finding, Verdict

_COLLECTIVES: Mapping[LocalQuantity, tuple[str, int]] = {
    LocalQuantity.PAIR: ("sendrecv", BOTH_WAYS),
    LocalQuantity.ALL_REDUCE: ("allreduce", 1),
}
"""The collective by which a profile expects each, and a factor: of a pair each GPU sends and receives at once."""


def wrong_data_inside(fabric: ScanFabric, figures: Sequence[LocalFigure]) -> Iterator[Finding]:
    """GPUs of one node between which data arrived damaged, however rarely."""
    found = {each.place: each for each in figures if each.failure.startswith(WRONG_DATA_ARRIVED)}
    for each in found.values():
        host = fabric.hosts[each.node]
        yield Finding(
            WRONG_DATA,
            Verdict.FAIL,
            f"{host} GPU{each.gpu} and GPU{each.partner}" if each.partner is not None else host,
            f"{each.quantity.value}: {each.failure}",
            "every element exact",
            "data damaged on the way: a GPU, a link, or ACS and IOMMU between peers",
            f"ssh {shlex.quote(host)} gpubench check",
            subjects=(host,),
        )


def not_measured_inside(
    fabric: ScanFabric, passes: Sequence[Sequence[LocalFigure]], named: Sequence[LocalFigure]
) -> Iterator[Finding]:
    """Nodes of which something inside could not be measured, and that nobody has named for it.

    An ERROR in the last pass, as where it is so on most nodes and none of them is odd; once alone it is a doubt.
    """
    known = {each.place for each in named}
    last = {each.place for each in passes[-1] if each.failure}
    found: dict[tuple[LocalQuantity, str, Verdict], dict[int, None]] = {}
    for each in (each for figures in passes for each in figures if each.failure and each.place not in known):
        if not each.failure.startswith(WRONG_DATA_ARRIVED):
            severity = Verdict.ERROR if each.place in last else Verdict.WARN
            found.setdefault((each.quantity, each.failure, severity), {})[each.node] = None
    for (quantity, failure, severity), nodes in found.items():
        names = [fabric.hosts[node] for node in sorted(nodes)]
        yield Finding(
            "inside-not-measured",
            severity,
            compress_names(names),
            f"{quantity.value}: {failure}" + ("" if severity is Verdict.ERROR else ", once of two times"),
            "a figure of every GPU of a node, every pair of them, and its all-reduce",
            "NCCL needs longer than the deadline to connect, somebody has the memory, or what the nodes share hangs",
            f"gpubench scan --timeout 60; ssh {shlex.quote(names[0])} gpubench check",
            subjects=tuple(names),
        )


def expected_inside(profile: Profile | None, gpus: int) -> dict[LocalQuantity, Expectation]:
    """What a profile expects of phase 0 with so many GPUs; nothing where it is of no particular machine.

    Of a pair no more than a copy reaches: where NVLinks join GPUs directly, a collective has those to all others too.
    """
    found: dict[LocalQuantity, Expectation] = {}
    if profile is None or profile.match.generic is not None or gpus < 2 or profile.match.visible < 2:
        return found
    for quantity, (name, ways) in _COLLECTIVES.items():
        collective = collective_named(name)
        try:
            seconds = curve(profile, collective, gpus, gpus).at(EXCHANGED_BYTES)
        except UsageError:
            continue
        gb_s = ways * EXCHANGED_BYTES * collective.busbw_factor(gpus) / seconds / BYTES_PER_GB
        if quantity is LocalQuantity.PAIR:
            gb_s = min([gb_s, *(ways * each.value for each in profile.find("p2p.write_gb_s"))])
        found[quantity] = Expectation(gb_s, f"profile {profile.name}")
    return found


def below_profile(
    fabric: ScanFabric,
    passes: Sequence[Sequence[LocalFigure]],
    profiles: Mapping[int, Profile | None],
    named: Sequence[LocalFigure],
) -> Iterator[Finding]:
    """Nodes of which the median figure is below what their profile expects, in both passes; profiles are by node.

    What comparisons with other nodes have `named` is not counted.
    """
    known = {each.place for each in named}
    expected = {node: expected_inside(profile, fabric.rails) for node, profile in profiles.items()}
    best: dict[tuple[int, LocalQuantity], dict[tuple[int, int | None], float]] = {}
    for each in (each for figures in passes for each in figures if not each.failure and each.place not in known):
        own = best.setdefault((each.node, each.quantity), {})
        own[each.gpu, each.partner] = max(each.gb_s, own.get((each.gpu, each.partner), 0.0))
    by_kind: dict[tuple[LocalQuantity, str], list[tuple[float, int, Expectation]]] = {}
    for (node, quantity), own in best.items():
        expectation = expected.get(node, {}).get(quantity)
        if expectation is not None and own:
            by_kind.setdefault((quantity, expectation.whose), []).append((median(own.values()), node, expectation))
    for (quantity, _), nodes in by_kind.items():
        slow = [each for each in nodes if judge_bandwidth(each[0], each[2], None) is not None]
        if not slow:
            continue
        gb_s, worst, expectation = min(slow)
        judged = judge_bandwidth(gb_s, expectation, None)
        if judged is None:
            continue
        severity, seen, wanted = judged
        names = [fabric.hosts[node] for _, node, _ in slow]
        yield Finding(
            "inside-below-profile",
            severity,
            compress_names(names),
            f"{quantity.value}: {seen}, on {fabric.hosts[worst]}",
            wanted,
            "what these nodes have in common: a setting of NCCL's, driver, firmware, clocks, or somebody who uses them",
            f"ssh {shlex.quote(fabric.hosts[worst])} gpubench check",
            subjects=tuple(names),
        )
