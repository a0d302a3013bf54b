"""Efficiency over numbers of ranks, and where and why scaling breaks: on rows and on simulated wiring."""

from collections.abc import Container
from itertools import product

import pytest
from msgspec.structs import replace

from gpubench.jobs.collective.simulated import rank_identities
from gpubench.measure import scaling
from gpubench.model.paths.nodes import build_topologies
from gpubench.model.paths.transport import Pair
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.scaling import ScalingRow
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import percent
from gpubench.model.terms.verdict import SLOW_UNEXPLAINED, Cure, Finding, Verdict
from gpubench.simulated.machine import parse_machine, snapshots

LARGE, SMALL = 2**30, 2**20
ROW = ScalingRow(measured="allreduce", origin="simulated", size_bytes=LARGE, ranks=2, nodes=1, gpus="GPU0-1")


def rows(
    *speeds: float | None, size: int = LARGE, expected: tuple[float, ...] = (), ci95: float = 0
) -> list[ScalingRow]:
    """Return rows for 1, 2, 4, ... ranks."""
    return [
        replace(
            ROW,
            ranks=2**power,
            size_bytes=size,
            time_us=1.0,
            bandwidth_gb_s=speed,
            expected_gb_s=expected[power] if expected else None,
            expected_percent=percent(speed, expected[power] if expected else None),
            ci95_percent=ci95,
        )
        for power, speed in enumerate(speeds)
    ]


def wiring(machine: str) -> Wiring:
    nodes = snapshots(parse_machine(machine), (), 0)
    return Wiring(rank_identities(nodes, len(nodes[0].gpus)), dict(enumerate(build_topologies(nodes))))


def causes(machine: str, staged: Container[object] = ()) -> scaling.Causes:
    return scaling.Causes(wiring(machine), staged, ())


class FakeCauses(scaling.Causes, frozen=True):
    """A fault and a slower path, whatever the ranks."""

    broken: str = ""
    crossed: str = ""

    def fault(self, before: int, after: int, *, is_short: bool) -> str:
        return self.broken

    def crossing(self, before: int, after: int) -> str:
        return self.crossed


def found(
    measured: list[ScalingRow], broken: str = "", crossed: str = ""
) -> list[tuple[int, float | None, str | None]]:
    causes = FakeCauses(Wiring((), {}), (), (), broken, crossed)
    table = scaling.scaling_table(measured, lambda: causes)
    return [(row.ranks, row.efficiency_percent, row.reason if row.breaks else None) for row in table]


def test_efficiency_is_relative_to_the_fewest_ranks_that_exchange_data() -> None:
    assert found(rows(None, 100, 120, 95)) == [
        (1, None, None),
        (2, 100.0, None),
        (4, 120.0, None),
        (8, 95.0, scaling.NO_REASON),
    ]


def test_only_the_first_break_is_marked_and_has_the_reason_of_the_topology() -> None:
    assert [reason for *_, reason in found(rows(None, 100, 80, 10), crossed="SYS")] == [None, None, "SYS", None]


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        (rows(None, 100, 91), None),
        (rows(None, 100, 80, ci95=15), None),
        (rows(None, 100, 80, ci95=2), "NICs"),
        (rows(None, 100, 80, expected=(0, 100, 82)), f"{scaling.EXPECTED}, because NICs"),
        (rows(None, 100, 40, expected=(0, 100, 82)), scaling.NO_REASON),
        (rows(None, 100, 120, expected=(0, 100, 300)), scaling.NO_REASON),
        (rows(None, 40, 120, expected=(0, 100, 300)), None),
        (rows(None, 100, 40, size=SMALL), scaling.SMALL),
    ],
    ids=[
        *("less than 10 %", "within the noise", "beyond the noise", "expected", "more than expected"),
        *("faster, but far below expected", "as slow as with fewer ranks", "latency"),
    ],
)
def test_a_loss_is_a_break_beyond_the_noise_and_names_what_is_expected(
    measured: list[ScalingRow], reason: str | None
) -> None:
    assert found(measured, crossed="NICs")[-1][2] == reason
    assert found(measured, "a fault", "NICs")[-1][2] == (reason and "a fault")


def test_small_sizes_break_nowhere_if_large_ones_were_measured() -> None:
    table = scaling.scaling_table([*rows(None, 100, 99), *rows(None, 10, 5, size=SMALL)], pytest.fail)
    assert not any(row.breaks for row in table)


def test_an_overlap_scales_by_its_step_time() -> None:
    steps = [replace(ROW, ranks=ranks, time_us=time) for ranks, time in ((2, 100.0), (4, 125.0))]
    assert [efficiency for _, efficiency, _ in found(steps)] == [100.0, 80.0]


@pytest.mark.parametrize(
    ("machine", "before", "after", "said"),
    [
        ("hgx-h200-8", 2, 8, ""),
        ("hgx-h100-8*2", 8, 16, "the added GPUs are on another node, behind NICs"),
        ("gb200-nvl72", 4, 8, "the added GPUs are on another node of the NVLink domain"),
        ("l40s-8", 4, 8, "pairs with the added GPUs cross a NUMA boundary (SYS)"),
        ("a100-pcie-2", 1, 2, ""),
    ],
)
def test_the_reason_is_the_slowest_new_path(machine: str, before: int, after: int, said: str) -> None:
    assert causes(machine).crossing(before, after) == said


@pytest.mark.parametrize(
    ("known", "added", "said"),
    [("PIX", "PXB", "switches"), ("PIX", "NODE", "bridges"), ("SYS", "PHB", "a PCIe host bridge"), ("PIX", "PIX", "")],
)
def test_other_switches_and_bridges_are_named(
    monkeypatch: pytest.MonkeyPatch, known: str, added: str, said: str
) -> None:
    monkeypatch.setattr(Wiring, "path", lambda _self, pair: known if max(pair) < 4 else added)
    reason = causes("l40s-8").crossing(4, 8)
    assert (said in reason, added in reason) == (True, bool(said))


@pytest.mark.parametrize(
    ("machine", "pair", "before", "after", "said"),
    [
        ("hgx-h200-8", (0, 3), 2, 4, "GPU0 → GPU3 goes through host memory"),
        ("hgx-h200-8", (0, 3), 4, 8, ""),
        ("hgx-h100-8*2", (10, 13), 8, 16, "node1 GPU2 → GPU5 goes through host memory"),
        ("hgx-h100-8*2", (2, 13), 8, 16, "node0 GPU2 → node1 GPU5 goes through host memory"),
    ],
)
def test_a_staged_pair_is_the_reason_only_if_the_added_gpus_have_it(
    machine: str, pair: Pair, before: int, after: int, said: str
) -> None:
    assert causes(machine, {pair}).fault(before, after, is_short=False) == said


@pytest.mark.parametrize(
    ("place", "severity", "is_short", "before", "after", "is_named"),
    [
        (DevicePlace("node0", "GPU5", "0000:1b:00.0"), Verdict.FAIL, False, 4, 8, True),
        (DevicePlace("node0", "GPU5", "0000:1b:00.0"), Verdict.FAIL, True, 2, 4, False),
        (DevicePlace("node0", "GPU5", "0000:1b:00.0"), Verdict.FAIL, False, 8, 16, False),
        (DevicePlace("node0", "GPU5", "0000:1b:00.0"), Verdict.FAIL, True, 8, 16, True),
        (DevicePlace("node0", "GPU5", "0000:1b:00.0"), Verdict.WARN, False, 4, 8, False),
        (DevicePlace("node0", "GPU5", "0000:1b:00.0"), Verdict.WARN, True, 4, 8, True),
        (DevicePlace("node1", "mlx5_3"), Verdict.FAIL, False, 8, 16, True),
        (DevicePlace("node1", "mlx5_3"), Verdict.FAIL, True, 4, 8, False),
    ],
)
def test_a_finding_is_the_reason_if_the_added_ranks_have_its_part(
    place: DevicePlace, severity: Verdict, is_short: bool, before: int, after: int, is_named: bool
) -> None:
    finding = Finding("ill", severity, "a part", "", "", "", Cure(), places=(place,))
    symptom = replace(finding, id=SLOW_UNEXPLAINED)
    known = replace(causes("hgx-h100-8*2"), findings=(symptom, finding))
    assert known.fault(before, after, is_short=is_short) == ("ill, a part" if is_named else "")


def test_leaving_nvlink_is_said() -> None:
    machine = wiring("dgx-1-v100")
    joined = {machine.path((one, other)) for one, other in product(range(4), repeat=2) if one != other}
    assert all(path.startswith("NV") for path in joined)
    assert scaling.Causes(machine, (), ()).crossing(4, 8).endswith("(SYS), not NVLink")


def test_gpus_are_named_by_host() -> None:
    ranks = wiring("hgx-h100-8*2").gpus
    assert scaling.describe_gpus(ranks[:4]) == "GPU0-3"  # type: ignore[arg-type]
    assert scaling.describe_gpus(ranks) == "node0-1: GPU0-7"  # type: ignore[arg-type]
