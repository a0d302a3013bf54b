"""Every condition that is planted alone is found, healthy machines have none, and the order of several is fixed."""

import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gpubench import profiles
from gpubench.conditions.checks import CHECKS, run
from gpubench.conditions.circumstances import Facts
from gpubench.conditions.condition import fill_ids
from gpubench.conditions.registry import CAUSES, CONDITIONS
from gpubench.measure.topo import examine, survey
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.nodes import build_topologies, group_nodes, rename_duplicates
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import CauseRow
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.verdict import Cure, Verdict
from gpubench.simulated.machine import parse_machine, snapshots
from tests.fakes.planted import CHECKED, PLANTS, Job, Plant, simulated, with_nodes, with_ranks
from tests.machines.test_machines import read

HEALTHY_MACHINES = (
    *("a100-mig", "a100-pcie-bridged", "h100x8-nic8", "h200x1-vm", "h200x2-vm", "h200x4-nccl-xml"),
    *("h200x4-smi-text", "h200x4-vm", "no-gpu"),
)
"""Healthy machines of tests/machines; their MIG mode and bridges of two are intended."""

LOG_ALONE = {"cuda-ipc-refused"}
BY_OTHERS = {"gpudirect-refused"}
"""Reported only if no more specific condition is found; such a machine also has another cause."""


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.id)
def test_a_planted_cause_is_named_first(plant: Plant) -> None:
    found = plant.diagnosis.named
    named = [each.cause.id for each in found]
    assert [each for each in named if each not in plant.beside][0] == plant.id  # noqa: RUF015 - a list shows what there is
    first = next(each for each in found if each.cause.id == plant.id)
    assert first.seen
    assert first.subject
    assert first.cure


MACHINES = [condition for condition in CONDITIONS if condition.check or condition.in_job is None]
"""Conditions of a machine; tests/measure/explain/test_failures.py plants those that end a job into logs."""


def test_every_condition_is_planted() -> None:
    causes = {cause.id for cause in CAUSES}
    for name, plants, ids in (
        ("PLANTS", PLANTS, causes - LOG_ALONE - BY_OTHERS),
        ("CHECKED", CHECKED, {machine.id for machine in MACHINES} - causes),
    ):
        planted_ids = {plant.id for plant in plants}
        assert planted_ids == ids, f"{name} in tests/fakes/planted.py: {sorted(planted_ids ^ ids)}"


BY_ID = {condition.id: condition for condition in CONDITIONS}


@pytest.mark.parametrize(
    "plant", [plant for plant in (*PLANTS, *CHECKED) if BY_ID[plant.id].check], ids=lambda plant: plant.id
)
def test_a_planted_condition_is_a_finding_of_its_check_once(plant: Plant) -> None:
    """It has its own id, or explains a refused peer access."""
    known = BY_ID[plant.id]
    found = [finding for finding in plant.findings if plant.id == finding.id or finding.cause == known.title]
    assert found
    subjects = [subject for each in found for subject in each.subjects]
    assert len(subjects) == len(set(subjects))
    for each in found:
        assert all((each.subject, each.seen, each.expected, each.cause, each.cure))


@pytest.mark.parametrize("plant", [*PLANTS, *CHECKED], ids=lambda plant: plant.id)
def test_what_nodes_with_the_same_facts_have_is_found_on_all_of_them(plant: Plant) -> None:
    """The result is the same as without known kinds of nodes."""
    job, checks = plant.job, [check for check in CHECKS if check.name == BY_ID[plant.id].check]
    nodes = rename_duplicates([each for node in job.nodes for each in (node, node)])
    kinds = group_nodes(build_topologies(nodes))

    def found(nodes: list[Topology]) -> tuple[object, ...]:
        facts = Facts(nodes, kinds, (), [job.profile] * len(nodes), job.measurements, job.asked)
        return run(checks, facts), survey(nodes, kinds, ()).conditions() if plant in PLANTS else ()

    assert found(build_topologies(nodes)) == found([Topology(node) for node in nodes])


PLACEHOLDER = re.compile(r"(-i GPU|-d DEVICE|-s BUS_ID|I-J|INTERFACE)\b")


@pytest.mark.parametrize("plant", [*PLANTS, *CHECKED], ids=lambda plant: plant.id)
def test_commands_have_real_ids(plant: Plant) -> None:
    commands = [command for each in (*plant.findings, *plant.report.findings) for command in each.commands]
    commands += [text for row in plant.report.rows(CauseRow) for text in (*row.commands, row.settles)]
    assert [each for each in commands if PLACEHOLDER.search(each)] == []


GPU3, GPU4 = DevicePlace("n1", "GPU3", "0000:1b:00.0"), DevicePlace("n1", "GPU4", "0000:2b:00.0")
ELSEWHERE, NIC = DevicePlace("n2", "GPU3", "0000:3b:00.0"), DevicePlace("n1", "mlx5_0", "0000:18:00.0")
BOTH = Cure.of("a -i 0000:1b:00.0,0000:2b:00.0 -s 0000:1b:00.0")
ON_TWO = Cure.of("a -i 0000:1b:00.0", comment="Then b. Run this on n1. On n2, use the device IDs of that node.")


@pytest.mark.parametrize(
    ("cure", "places", "filled"),
    [
        (Cure.of("nvidia-smi -i GPU"), [GPU3], Cure.of("nvidia-smi -i 0000:1b:00.0")),
        (Cure.of("a -i GPU -s BUS_ID"), [GPU3, GPU4], BOTH),
        (Cure.of("mlxlink -d DEVICE"), [NIC], Cure.of("mlxlink -d mlx5_0")),
        (Cure.of("a -i GPU", comment="Then b."), [GPU3, ELSEWHERE], ON_TWO),
        (Cure.of("nvidia-smi -i GPU"), [DevicePlace("n1", "GPU3")], Cure.of("nvidia-smi -i 3")),
        (Cure.of("lspci -s BUS_ID"), [DevicePlace("n1", "GPU3")], Cure.of("lspci -s BUS_ID")),
        (Cure.of("nvidia-smi -i GPU"), [DevicePlace("n1")], Cure.of("nvidia-smi -i GPU")),
        (Cure(comment="Replace the GPU."), [GPU3], Cure(comment="Replace the GPU.")),
    ],
)
def test_ids_are_those_of_the_places(cure: Cure, places: list[DevicePlace], filled: Cure) -> None:
    assert fill_ids(cure, places) == filled


def test_of_nodes_with_the_same_facts_one_is_looked_at() -> None:
    nodes = build_topologies(simulated("hgx-h100-8*6", "node3.gpu1:temperature=70").nodes)
    profile = profiles.load("hgx-h100-8")

    def looked_at(*ranks: RankFacts, matched: int = 6) -> list[int]:
        circumstances = Facts(nodes, (), ranks, [profile] * matched + [None] * (6 - matched)).circumstances.distinct
        assert {gpu.node for gpu in circumstances.wiring.gpus} == set(circumstances.nodes)
        return list(circumstances.nodes)

    assert looked_at() == [0, 3, 4]
    assert looked_at(matched=2) == [0, 2, 3, 4]
    assert looked_at(*simulated("hgx-h100-8*6").ranks) == [0, 1, 2, 3, 4, 5]


def faults(nodes: list[Snapshot], ranks: list[RankFacts]) -> list[str]:
    topologies = [Topology(node) for node in nodes]
    return [
        row.id for row in survey(topologies, group_nodes(topologies), ranks).conditions() if row.verdict != Verdict.SKIP
    ]


@pytest.mark.parametrize("machine", HEALTHY_MACHINES)
def test_healthy_machines_yield_none(machine: str) -> None:
    assert faults(*read(machine)) == []


@pytest.mark.parametrize("profile", [profile.name for profile in profiles.all_profiles()])
def test_healthy_profiles_yield_none(profile: str) -> None:
    """Tested on a single node, and in a job on two."""
    assert faults(snapshots(parse_machine(profile), []), []) == []
    job = simulated(f"{profile}*2")
    assert faults(list(job.nodes), list(job.ranks)) == []


def test_what_both_devices_had_translated_is_not_redirected() -> None:
    """The bridge has direct translated P2P, and both ends have address translation (ATS) on."""
    job = planted("acs-redirect")

    def translated(node: Snapshot) -> Snapshot:
        devices = (
            replace(
                device,
                address_translation=True,
                access_control=device.access_control
                and replace(device.access_control, enabled=(*device.access_control.enabled, "direct_translated")),
            )
            for device in node.pci_devices
        )
        return replace(node, pci_devices=tuple(devices))

    assert {finding.id for finding in job.findings()} >= {"acs-redirect", "acs-nic-redirect"}
    assert not {finding.id for finding in with_nodes(job, translated).findings()} & {"acs-redirect", "acs-nic-redirect"}
    virtual = with_nodes(job, lambda node: replace(node, machine=replace(node.machine, virtual_machine=True)))
    assert not {finding.id for finding in virtual.findings()} & {"acs-redirect", "acs-nic-redirect"}


def test_what_a_check_tells_of_is_not_told_again_as_standing_in_the_way() -> None:
    for id_, told in (("shm-not-shared", ["shm-not-shared"]), ("nccl-p2p-disabled", ["nccl-p2p-disabled"])):
        job = planted(id_)
        nodes = [Topology(node) for node in job.nodes]
        report = examine(nodes, job.ranks)
        assert [finding.id for finding in report.findings] == told


def planted(id_: str, **settings: str) -> Job:
    """Return the plant of a cause, with variables on all ranks."""
    job = next(plant for plant in PLANTS if plant.id == id_).make()
    return with_ranks(job, lambda facts: replace(facts, environment={**facts.environment, **settings}))


@pytest.mark.parametrize(
    ("job", "order"),
    [
        (lambda: planted("fabric-not-ready", NCCL_P2P_DISABLE="1"), ["fabric-not-ready", "nccl-p2p-disabled"]),
        (lambda: planted("nccl-p2p-disabled", NCCL_SHM_DISABLE="1"), ["nccl-p2p-disabled", "nccl-shm-disabled"]),
        (lambda: planted("shm-not-shared", NCCL_P2P_DISABLE="1"), ["nccl-p2p-disabled", "shm-not-shared"]),
        (lambda: planted("mig-on", NCCL_P2P_DISABLE="1"), ["mig-on", "nccl-p2p-disabled"]),
        (lambda: planted("libibverbs-missing", NCCL_IB_DISABLE="1"), ["nccl-ib-disabled", "libibverbs-missing"]),
    ],
)
def test_causes_that_come_together(job: Callable[[], Job], order: list[str]) -> None:
    assert [each.cause.id for each in job().diagnosis().named] == order


@pytest.mark.parametrize(
    ("cause", "implied"),
    [
        ("mig-on", {"peer-access-refused"}),
        ("fabric-manager-stopped", {"fabric-not-ready", "peer-access-refused"}),
        ("p2p-registry-key", {"peer-access-refused"}),
        ("bar1-small", {"peer-access-refused"}),
        ("nvlink-disabled", {"nvlinks-all-down"}),
        ("rdma-port-down", {"nics-differ"}),
        ("gpudirect-module-missing", {"gpudirect-refused"}),
    ],
)
def test_what_follows_from_a_cause_is_listed_below_it(cause: str, implied: set[str]) -> None:
    job = next(plant for plant in PLANTS if plant.id == cause).make()
    named = job.diagnosis().named
    assert [each.cause.id for each in named if not each.cause.by_design or each.cause.id == cause] == [cause]
    assert {each.cause.id for each in named[0].implied} == implied
