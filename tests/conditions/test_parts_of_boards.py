"""Machines that show a part of a board, as clouds, containers and virtual machines do: healthy ones are never ill."""

from dataclasses import replace
from itertools import product

import pytest

from gpubench.conditions.definition.circumstances import Facts
from gpubench.conditions.definition.subjects import is_mesh
from gpubench.hardware.simulated.machine import SimulatedMachine, parse_machine, snapshots
from gpubench.measure.check.health import judge
from gpubench.measure.topo import examine
from gpubench.model.facts.snapshot import GpuFacts, NvLink, Snapshot
from gpubench.model.paths.nodes import group
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.verdict import Verdict
from gpubench.profiles import all_profiles, matched_profiles
from tests.together import together

BOARDS = [each for each in all_profiles() if each.match.visible and each.gpu.name]
HIDDEN, SHOWN, DOWN = "hidden", "shown", "down"


def part(profile: Profile, gpus: int, links: str, *, virtual: bool) -> Snapshot:
    """The first GPUs of a healthy board; `links` says how those to GPUs that are not there look."""
    (whole,) = snapshots(SimulatedMachine(profile))
    kept = whole.gpus[:gpus]
    here = {gpu.bus_id for gpu in kept}
    names = {gpu.device for gpu in kept}
    return replace(
        whole,
        machine=replace(whole.machine, virtual_machine=virtual),
        gpus=tuple(_with_links(gpu, here, links) for gpu in kept),
        gpus_of_others=0 if virtual else len(whole.gpus) - gpus,
        nvswitches=() if virtual else whole.nvswitches,
        pairs=tuple(each for each in whole.pairs if {each.source, each.destination} <= names),
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


@pytest.mark.parametrize("profile", BOARDS, ids=lambda each: each.name)
@together("links, virtual", product([HIDDEN, SHOWN, DOWN], [True, False]))
def test_a_healthy_part_of_a_board_has_no_finding(profile: Profile, links: str, virtual: bool) -> None:
    equal_parts = [gpus for gpus in range(1, profile.match.visible + 1) if profile.match.visible % gpus == 0]
    for gpus in equal_parts:
        nodes = [Topology(part(profile, gpus, links, virtual=virtual))]
        (known,) = matched_profiles(nodes, {})
        report = judge(Facts(nodes, group(nodes), profiles=[known]))
        findings = (*report.findings, *examine(nodes, (), [known]).findings)
        found = {each.id for each in findings if each.severity not in (Verdict.PASS, Verdict.SKIP)}
        assert found <= {"profile-unknown"}, (gpus, findings)


def test_only_links_that_are_up_and_lead_to_gpus_of_the_node_make_a_mesh() -> None:
    (node,) = snapshots(parse_machine("hgx-a100-4"), [])
    assert is_mesh(Topology(node))
    for change in ({"active": False}, {"peer_bus_id": "0000:ff:00.0"}):
        first, *others = node.gpus
        cut = replace(first, nvlinks=tuple(replace(link, **change) for link in first.nvlinks or ()))
        assert not is_mesh(Topology(replace(node, gpus=(cut, *others))))
