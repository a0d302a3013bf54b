"""One fact of a healthy machine is edited, and `check --quick` is judged again: one line per kind.

Add a line to `ILL` if the edit makes a machine ill, and to `HEALTHY` if it does not. Name several kinds of machines:
boards with NVSwitches, cards with and without bridges, workstations, racks, DGX Spark.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpubench.conditions.definition.circumstances import Facts
from gpubench.hardware.simulated.machine import parse_machine, snapshots
from gpubench.measure.check.health import judge
from gpubench.model.facts.health import REPLAYS
from gpubench.model.facts.snapshot import GpuFacts, GpuLimits, NvLink, RdmaPort, RemappedRows, Snapshot
from gpubench.model.paths.nodes import group
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import Report
from gpubench.model.terms.verdict import Verdict
from gpubench.profiles import matched_profiles
from tests.together import together

Edit = Callable[[Snapshot], Snapshot]


def node(**facts: Any) -> Edit:
    """Change facts of the node."""
    return lambda snapshot: replace(snapshot, **facts)


def _part(kind: str, numbers: tuple[int, ...], facts: dict[str, Any]) -> Edit:
    def edit(snapshot: Snapshot) -> Snapshot:
        parts = list(getattr(snapshot, kind))
        for number in numbers or range(len(parts)):
            changed = {name: value(parts[number]) if callable(value) else value for name, value in facts.items()}
            parts[number] = replace(parts[number], **changed)
        changed_parts: dict[str, Any] = {kind: tuple(parts)}
        return replace(snapshot, **changed_parts)

    return edit


def gpu(*numbers: int, **facts: Any) -> Edit:
    """Change facts of these GPUs, all without numbers; a function gets the GPU and returns the value."""
    return _part("gpus", numbers, facts)


def nic(*numbers: int, **facts: Any) -> Edit:
    """Change facts of these NICs, all without numbers."""
    return _part("nics", numbers, facts)


def port(*numbers: int, **facts: Any) -> Edit:
    """Change facts of these RDMA ports, all without numbers."""
    return _part("rdma_ports", numbers, facts)


def both(*edits: Edit) -> Edit:
    """Apply several edits in order."""

    def edit(snapshot: Snapshot) -> Snapshot:
        for each in edits:
            snapshot = each(snapshot)
        return snapshot

    return edit


def links(**facts: Any) -> Callable[[GpuFacts], tuple[NvLink, ...]]:
    """Change facts of the first NVLink of a GPU."""

    def edit(gpu: GpuFacts) -> tuple[NvLink, ...]:
        first, *others = gpu.nvlinks or ()
        return replace(first, **facts), *others

    return edit


def throttled(reason: str, *numbers: int) -> Edit:
    """Give GPUs that are not idle a reason for lower clocks."""
    return gpu(*numbers, throttle_reasons=(reason,), idle=False)


def power(limit_w: float, *numbers: int) -> Edit:
    """Set the power limit of GPUs whose default is 700 W."""
    return gpu(*numbers, limits=GpuLimits(power_w=limit_w, default_power_w=700.0))


def rows(**facts: Any) -> Edit:
    """Set the remapped memory rows of GPU1."""
    known: dict[str, Any] = {"correctable": 0, "uncorrectable": 0, "pending": False, "failure": False, **facts}
    return gpu(1, remapped_rows=RemappedRows(**known))


def counted(**counters: int) -> Callable[[RdmaPort], dict[str, int]]:
    """Set counters of an RDMA port."""
    return lambda port: {**(port.counters or {}), **counters}


BOARDS = "hgx-h100-8 hgx-a100-8 hgx-b200-8 hgx-h200-4"
HBM = f"{BOARDS} h100-pcie-2 h100-nvl-2 a100-pcie-2 gb200-nvl-4"
RDMA = "hgx-h100-8 hgx-a100-8"
CARDS = "l40s-8 l4-8 h100-pcie-2 h100-nvl-2 a100-pcie-2 rtx-pro-6000-8"
WORKSTATIONS = "rtx-4090-2 rtx-5090-2"
EVERYWHERE = f"{BOARDS} {CARDS} {WORKSTATIONS} gb200-nvl-4 dgx-1-v100"


ILL: list[tuple[str, str, Edit, str]] = [
    # what is edited, on which machines, the edit, and the finding with its severity
    ("one GPU is split by MIG", "hgx-h100-8 hgx-a100-8", gpu(3, mig=True), "mig-on WARN"),
    ("one NIC is down", "hgx-h100-8 hgx-b200-8", nic(3, state="down"), "rdma-port-down FAIL"),
    ("one GPU is 3 °C below its limit", EVERYWHERE, gpu(1, temperature_c=86, slowdown_margin_c=3), "gpu-hot WARN"),
    ("all GPUs are above their limit", EVERYWHERE, gpu(slowdown_margin_c=-2), "gpu-hot WARN"),
    ("one GPU is at 95 °C of an unknown limit", EVERYWHERE, gpu(1, temperature_c=95), "gpu-hot WARN"),
    ("one GPU slows down because of heat", EVERYWHERE, throttled("sw_thermal_slowdown", 1), "gpu-throttled WARN"),
    ("one GPU that nobody uses is capped", EVERYWHERE, throttled("sw_power_cap", 1), "clocks-capped WARN"),
    ("one GPU has a lower power limit", EVERYWHERE, both(power(700.0), power(500.0, 1)), "power-limited WARN"),
    ("all GPUs have half of their power", EVERYWHERE, power(350.0), "power-limited WARN"),
    ("ECC is off on one GPU", HBM, gpu(1, ecc=False), "ecc-off WARN"),
    ("ECC is off on all GPUs", HBM, gpu(ecc=False), "ecc-off WARN"),
    (
        "4 GiB are in use by nobody",
        "hgx-h100-8 l4-8 h100-nvl-2",
        gpu(1, memory_used_bytes=4 * 2**30),
        "memory-in-use WARN",
    ),
    ("512 memory rows were remapped", HBM, rows(uncorrectable=512), "row-remap WARN"),
    ("a memory bank has no spare row", HBM, rows(uncorrectable=9, banks_without_spares=1), "row-remap-failed FAIL"),
    ("one GPU has replayed 5,000 packets", EVERYWHERE, gpu(1, pcie_replays=5000), "pcie-errors WARN"),
    ("all GPUs have replayed 1,000,000 packets", EVERYWHERE, gpu(pcie_replays=10**6), "pcie-errors WARN"),
    ("replays grow during the run", EVERYWHERE, node(errors_grown={"GPU1": {REPLAYS: 11}}), "pcie-errors FAIL"),
    ("all NVLinks count errors", BOARDS, gpu(nvlinks=links(errors={"replay": 10**6})), "nvlink-errors WARN"),
    ("NVLink errors grow", BOARDS, node(errors_grown={"GPU1": {"replay on link 0": 11}}), "nvlink-errors FAIL"),
    ("all ports count errors", RDMA, port(counters=counted(symbol_error=10**6)), "rdma-port-errors WARN"),
    ("port errors grow", RDMA, node(errors_grown={"mlx5_0": {"symbol_error": 11}}), "rdma-port-errors FAIL"),
]

HEALTHY: list[tuple[str, str, Edit]] = [
    ("nothing is edited", EVERYWHERE, node()),
    ("all GPUs are 50 °C", EVERYWHERE, gpu(temperature_c=50)),
    ("one GPU is 29 °C warmer than its siblings", EVERYWHERE, gpu(1, temperature_c=64)),
    ("one GPU is at 68 °C after use", EVERYWHERE, gpu(0, temperature_c=68, slowdown_margin_c=19)),
    ("all GPUs are at 86 °C under load", EVERYWHERE, gpu(temperature_c=86, slowdown_margin_c=6)),
    ("one GPU is at 86 °C of an unknown limit", EVERYWHERE, gpu(1, temperature_c=86)),
    ("an idle GPU has a power cap", EVERYWHERE, gpu(1, throttle_reasons=("sw_power_cap",))),
    ("all GPUs have a power cap", EVERYWHERE, throttled("sw_power_cap")),
    ("all GPUs have 71 % of their power", EVERYWHERE, power(500.0)),
    ("ECC is off on all workstation cards", WORKSTATIONS, gpu(ecc=False)),
    ("the driver holds 600 MiB", EVERYWHERE, gpu(memory_used_bytes=600 * 2**20)),
    ("a hidden process holds 1,500 MiB", EVERYWHERE, gpu(1, memory_used_bytes=1500 * 2**20)),
    ("three memory rows were remapped", HBM, rows(correctable=9, uncorrectable=3, banks_without_spares=0)),
    ("one GPU has replayed 140 packets in 200 days", EVERYWHERE, gpu(1, pcie_replays=140)),
    ("one NVLink has counted 140 errors", BOARDS, gpu(1, nvlinks=links(errors={"replay": 140}))),
    ("one port counted 900 errors before its cable was replaced", RDMA, port(1, counters=counted(port_rcv_errors=900))),
]


def check(machine: str, edit: Edit) -> Report:
    """Judge a simulated machine whose first node was edited, by the profile that it then matches."""
    first, *others = snapshots(parse_machine(machine))
    nodes = [Topology(each) for each in (edit(first), *others)]
    return judge(Facts(nodes, group(nodes), (), matched_profiles(nodes, {})))


@together("what, machines, edit, expected", ILL, ids=lambda case: case[0])
def test_an_edited_fact_is_named(what: str, machines: str, edit: Edit, expected: str) -> None:
    for machine in machines.split():
        report = check(machine, edit)
        found = [f"{each.id} {each.severity.value}" for each in report.findings]
        assert expected in found, f"{what} on {machine}: {found}"
        assert report.verdict.value == expected.split()[1], f"{what} on {machine}: {found}"


@together("what, machines, edit", HEALTHY, ids=lambda case: case[0])
def test_a_healthy_edit_raises_no_alarm(what: str, machines: str, edit: Edit) -> None:
    for machine in machines.split():
        report = check(machine, edit)
        alarms = [(each.id, each.seen) for each in report.findings if each.severity is not Verdict.SKIP]
        assert alarms == [], f"{what} on {machine}"
