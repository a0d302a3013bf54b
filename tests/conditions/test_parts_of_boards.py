"""Clouds, containers and virtual machines show parts of a board; healthy parts must not be reported as ill."""

from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest
from msgspec.structs import replace

from gpubench.conditions.circumstances import Facts
from gpubench.conditions.subjects import is_mesh
from gpubench.measure.check.health import judge
from gpubench.measure.topo import examine
from gpubench.model.facts.snapshot import GpuFacts, NvLink, Snapshot
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.verdict import Verdict
from gpubench.profiles import all_profiles, find_node_profiles, load
from gpubench.simulated.machine import SimulatedMachine, parse_machine, snapshots

BOARDS = [each for each in all_profiles() if each.match.visible and each.gpu.name]
HIDDEN, SHOWN, DOWN = "hidden", "shown", "down"


@cache
def healthy(name: str) -> Sequence[Snapshot]:
    return snapshots(SimulatedMachine(load(name)))


def part(profile: Profile, gpus: int, links: str, *, virtual: bool) -> Snapshot:
    """The first GPUs of a healthy board; `links` is the state of links to hidden GPUs."""
    (whole,) = healthy(profile.name)
    kept = whole.gpus[:gpus]
    here = {gpu.bus_id for gpu in kept}
    elsewhere = {gpu.bus_id for gpu in whole.gpus} - here
    names = {gpu.device for gpu in kept}
    return replace(
        whole,
        machine=replace(whole.machine, virtual_machine=virtual),
        gpus=tuple(_with_links(gpu, here, links) for gpu in kept),
        gpus_of_others=0 if virtual else len(whole.gpus) - gpus,
        pci_devices=tuple(device for device in whole.pci_devices if not virtual or device.bus_id not in elsewhere),
        nvswitches=() if virtual else whole.nvswitches,
        pairs=tuple(pair for pair in whole.pairs if {pair.source, pair.destination} <= names),
    )


def _with_links(gpu: GpuFacts, here: set[str | None], links: str) -> GpuFacts:
    own = [_seen(link, links, inside=len(here) > 1 and _leads_here(gpu, link, here)) for link in gpu.nvlinks or ()]
    return replace(gpu, nvlinks=tuple(link for link in own if link is not None))


def _leads_here(gpu: GpuFacts, link: NvLink, here: set[str | None]) -> bool:
    switched = link.peer is not None and link.peer.value == "switch"
    return switched or link.peer_bus_id in here - {gpu.bus_id}


def _seen(link: NvLink, links: str, *, inside: bool) -> NvLink | None:
    if inside or links == SHOWN:
        return link
    return None if links == HIDDEN else replace(link, active=False)


def parts(profile: Profile) -> list[Snapshot]:
    """The different views of equal parts of a board.

    A whole bare-metal board is not included: tests/conditions/test_planted.py and tests/cli/test_healthy_machines.py
    test it.
    """
    found = list[Snapshot]()
    for gpus in (each for each in range(1, profile.match.visible + 1) if profile.match.visible % each == 0):
        for links, virtual in product([HIDDEN, SHOWN, DOWN], [True, False]):
            looked_at = part(profile, gpus, links, virtual=virtual)
            if looked_at not in (*found, *healthy(profile.name)):
                found.append(looked_at)
    return found


@pytest.mark.parametrize("profile", BOARDS, ids=lambda profile: profile.name)
def test_a_healthy_part_of_a_board_has_no_finding(profile: Profile) -> None:
    ill = {}
    for node in parts(profile):
        nodes = [Topology(node)]
        (known,) = find_node_profiles(nodes, {})
        report = judge(Facts(nodes, group_nodes(nodes), profiles=[known]))
        findings = (*report.findings, *examine(nodes, (), [known]).findings)
        found = {finding.id for finding in findings if finding.severity not in (Verdict.PASS, Verdict.SKIP)}
        if not found <= {"profile-unknown"}:
            ill[len(node.gpus), node.machine.virtual_machine, node.gpus[0].nvlinks] = findings
    assert ill == {}


def test_only_links_that_are_up_and_lead_to_gpus_of_the_node_make_a_mesh() -> None:
    (node,) = snapshots(parse_machine("hgx-a100-4"), [])
    assert is_mesh(Topology(node))
    for change in ({"active": False}, {"peer_bus_id": "0000:ff:00.0"}):
        first, *others = node.gpus
        cut = replace(first, nvlinks=tuple(replace(link, **change) for link in first.nvlinks or ()))
        assert not is_mesh(Topology(replace(node, gpus=(cut, *others))))
