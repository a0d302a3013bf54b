"""Evidence and causes of paths from measured copies."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import pytest
from msgspec.structs import replace

from gpubench.jobs.runner import NullListener
from gpubench.measure import paths as p2p_counters
from gpubench.measure.p2p.copies import CopyBench, unreachable_pairs
from gpubench.measure.p2p.request import (
    Copy,
    CopyMachine,
    Method,
    P2pRequest,
    PatternCopy,
    default_series,
    wiring_of_process,
)
from gpubench.measure.p2p.run import P2pRun
from gpubench.measure.paths import IdleWindow
from gpubench.model.facts.snapshot import PairFacts, Snapshot
from gpubench.model.paths import p2p
from gpubench.model.paths.p2p import Cell, Pair
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.results.report import CauseRow, EvidenceRow, FallbackRow, Report
from gpubench.model.terms.operation import CopyGpu, CopyPattern, Direction
from gpubench.model.terms.verdict import Origin, Verdict
from gpubench.ports.copies import LinkBytes, LinkCounters
from gpubench.simulated.machine import parse_machine, snapshots
from tests.conditions.test_together import collapsing
from tests.fakes.copies import Broken, FakeCopies

SIZE = 2**16
Edit = Callable[[Snapshot], Snapshot]


@pytest.fixture(autouse=True)
def small_sizes_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "JUDGED_FROM_BYTES", SIZE)
    monkeypatch.setattr(p2p_counters, "_COUNTED_FROM_BYTES", SIZE)


def measured(
    copies: FakeCopies,
    edit: Edit = lambda node: node,
    *,
    check: bool = True,
    counters: LinkCounters | None = None,
    window: IdleWindow | None = None,
) -> Report:
    gpus = len(copies.gpus)
    node = edit(snapshots(parse_machine(f"hgx-h200-{gpus}"))[0])
    request = P2pRequest(
        pairs=tuple((a, b) for a in range(gpus) for b in range(gpus) if a != b),
        series=default_series(SIZE),
        host_bytes=None,
        patterns=(),
        pattern_bytes=SIZE,
        method=Method(warmup=1, samples=3, repeats=2),
        check=check,
    )
    wiring = Wiring([GpuPlace(node.host, 0, gpu.bus_id) for gpu in node.gpus], {0: Topology(node)})
    machine = CopyMachine(wiring, copies.gpus, (), None, Origin.MEASURED, unreachable_pairs(copies))
    return P2pRun(request, CopyBench(request, copies, counters or copies, window), machine, NullListener()).run()


class Crowded:
    """Counters of copies, together with the traffic of another process on the first GPU."""

    def __init__(self, copies: FakeCopies, nvlink_bytes: int) -> None:
        self._copies, self._bytes, self._readings = copies, nvlink_bytes, 0

    def read(self, gpu: int) -> LinkBytes:
        self._readings += 1
        found = self._copies.read(gpu)
        more = self._bytes * self._readings if gpu == 0 else 0
        return replace(found, nvlink_sent=(found.nvlink_sent or 0) + more, pcie_sent=None, pcie_received=None)


def test_foreign_traffic_during_copies_is_no_evidence() -> None:
    copies = FakeCopies(4)
    report = measured(copies, counters=Crowded(copies, 16 * SIZE * 2))
    row = evidence(report)
    assert row.measurement == "absent"
    assert "times the bytes of this job: another program uses these links" in row.measurement_seen
    assert evidence(report, "GPU1", "GPU0").measurement == "present"
    (cause,) = report.rows(CauseRow)
    assert (cause.id, cause.confidence, cause.subject) == ("foreign-nvlink-traffic", "proven", "GPU0")


def test_foreign_traffic_between_copies_is_no_evidence() -> None:
    copies = FakeCopies(4)
    clock = count(0.0, 0.01).__next__
    window = IdleWindow(Crowded(copies, 4 * 10**9), clock=clock, wait=lambda _seconds: None)
    report = measured(copies, window=window)
    assert evidence(report).measurement == "present"
    assert evidence(report).measurement_seen.startswith("PCIe counters showed no traffic during the copy; ")
    report = measured(copies, counters=Crowded(copies, 0), window=window)
    assert evidence(report).measurement == "absent"
    assert "over NVLink while this job was idle: another program" in evidence(report).measurement_seen
    (cause,) = report.rows(CauseRow)
    assert cause.id == "foreign-nvlink-traffic"
    assert cause.evidence.startswith("GPU0 sends ")


class SlowWrites(CopyBench):
    def measure(self, copies: Sequence[Copy]) -> Iterator[Cell]:
        for copy, cell in zip(copies, super().measure(copies), strict=True):
            is_slow = copy == PatternCopy(CopyPattern.ALL_TO_ALL, Direction.WRITE)
            yield replace(cell, seconds=tuple(each * (9 if is_slow else 1) for each in cell.seconds))


def test_collapsing_writes_are_named_though_every_pair_is_healthy() -> None:
    node = collapsing().nodes[0]
    gpus = tuple(CopyGpu(gpu.device, gpu.index, gpu.bus_id or "", "", "") for gpu in node.gpus)
    copies = FakeCopies(len(gpus))
    request = P2pRequest(
        pairs=((0, 1),), series=default_series(SIZE), host_bytes=None,
        patterns=(CopyPattern.RING, CopyPattern.ALL_TO_ALL),
        pattern_bytes=SIZE, method=Method(warmup=1, samples=1, repeats=1), check=False,
    )  # fmt: skip
    machine = CopyMachine(wiring_of_process(Topology(node), gpus), gpus, (), None, Origin.MEASURED)
    report = P2pRun(request, SlowWrites(request, copies, copies), machine, NullListener()).run()
    (row,) = report.rows(CauseRow)
    assert (row.id, row.verdict) == ("posted-write-collapse", "WARN")
    assert row.evidence.startswith("all to all: writes reach ")


def evidence(report: Report, source: str = "GPU0", destination: str = "GPU1") -> EvidenceRow:
    return next(row for row in report.rows(EvidenceRow) if (row.source, row.destination) == (source, destination))


def fallback(report: Report) -> list[FallbackRow]:
    return report.rows(FallbackRow)


def refused(status: str, pairs: set[Pair]) -> Edit:
    """Return an edit in which the driver refuses these pairs. Remove NVLinks, which would make it a fabric fault."""
    named = {(f"GPU{one}", f"GPU{other}") for one, other in pairs}

    def edit(node: Snapshot) -> Snapshot:
        facts: list[PairFacts] = [
            replace(pair, cuda=False, read=status, write=status, path="SYS")
            if (pair.source, pair.destination) in named
            else pair
            for pair in node.pairs
        ]
        return replace(node, pairs=tuple(facts), gpus=tuple(replace(gpu, nvlinks=()) for gpu in node.gpus))

    return edit


def test_still_pcie_counters_show_a_direct_path_without_nvlink_counters() -> None:
    class OnlyPcie(FakeCopies):
        def read(self, gpu: int) -> LinkBytes:
            return replace(super().read(gpu), nvlink_sent=None, nvlink_received=None)

    seen = evidence(measured(OnlyPcie(4)))
    assert seen.measurement_seen == "PCIe counters showed no traffic during the copy"
    assert (seen.measurement, seen.conclusion) == ("present", "direct")


def test_data_that_nobody_checked_prove_nothing() -> None:
    seen = evidence(measured(FakeCopies(4), check=False))
    assert (seen.correctness, seen.correctness_seen) == ("absent", "data were not verified")
    assert seen.confidence == "likely"


def test_wrong_data_outrank_everything() -> None:
    report = measured(FakeCopies(4, Broken(wrong={(0, 1)})))
    assert evidence(report).conclusion == "wrong data"
    assert "1 wrong element arrived" in evidence(report).correctness_seen
    assert fallback(report)[0].pairs == ("GPU0 → GPU1",)
    assert "host-staged" not in {finding.id for finding in report.findings}


def test_a_pair_that_the_driver_stages_although_it_grants_peer_access() -> None:
    report = measured(FakeCopies(4, Broken(staged={(0, 3)})))
    staged, direct = fallback(report)
    assert (staged.conclusion, staged.pairs, staged.cause) == ("staged", ("GPU0 → GPU3",), "staged-despite-grant")
    assert staged.times_slower is not None
    assert staged.times_slower > 10
    assert "PCIe carried the rest" in str(staged.cause_seen)
    assert len(direct.pairs) == 11
    assert report.verdict is Verdict.FAIL


def test_pairs_that_the_driver_refuses_are_staged_and_it_says_why() -> None:
    pairs = {(0, 1), (1, 0)}
    report = measured(FakeCopies(4, Broken(unreachable=pairs)), refused("CNS", pairs))
    row = next(row for row in fallback(report) if row.conclusion == "staged")
    assert row.pairs == ("GPU0 → GPU1", "GPU1 → GPU0")
    assert (row.cause, row.confidence) == ("p2p-virtual-machine", "proven")
    assert row.cause_seen == "NVML reports CNS: chipset not supported in a virtual machine"
    assert row.bandwidth_gb_s == pytest.approx(38, rel=0.1)


def test_a_path_staged_by_design_is_no_fault() -> None:
    pairs = {(0, 1), (1, 0)}
    report = measured(FakeCopies(2, Broken(unreachable=pairs)), refused("GNS", pairs))
    (row,) = fallback(report)
    assert (row.verdict, row.cause, row.cause_seen) == (
        *("SKIP", "gpu-without-pcie-p2p", "NVML reports GNS: GPU not supported"),
    )
    assert report.verdict is Verdict.PASS


def test_a_failed_copy_is_no_evidence_of_the_path() -> None:
    report = measured(FakeCopies(4, Broken(failing={(0, 1)})))
    row = next(row for row in fallback(report) if row.conclusion == "unknown")
    assert row.pairs == ("GPU0 → GPU1",)
    assert "cudaErrorIllegalAddress" in row.how
