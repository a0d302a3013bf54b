"""Copies of managed memory and their findings."""

from pathlib import Path

import pytest

from gpubench.errors import CouldNotMeasureError
from gpubench.jobs.p2p import check_managed
from gpubench.machine import recorded
from gpubench.measure.p2p.copies import CopyBench
from gpubench.measure.p2p.request import (
    FILE,
    Method,
    P2pRequest,
    RecordedP2p,
    RecordingBench,
    ReplayedBench,
    read_samples,
)
from gpubench.measure.p2p.run import P2pRun
from gpubench.model.paths.p2p import Series
from gpubench.model.results.report import PairRow, Report
from gpubench.model.terms.operation import Direction, Engine, ManagedSupport
from gpubench.model.terms.verdict import Origin, Verdict
from tests.fakes.copies import FakeCopies
from tests.fakes.managed import Driver, FakeManaged
from tests.measure.p2p.test_one_process import Recorder, machine_of, of

SIZE = 2**20


def request(managed: FakeManaged, gpus: int = 2, *, host: bool = True) -> P2pRequest:
    ways = ((Engine.CE, Direction.WRITE), (Engine.SM, Direction.READ))
    return P2pRequest(
        pairs=tuple((a, b) for a in range(gpus) for b in range(gpus) if a != b),
        series=tuple(Series(engine, way, peer=True, size_bytes=SIZE) for engine, way in ways),
        host_bytes=SIZE if host else None,
        pattern_bytes=SIZE,
        method=Method(warmup=1, samples=3, repeats=1),
        check=True,
        managed_bytes=SIZE,
        managed=tuple(managed.support()),
    )


def run(driver: Driver | None = None, gpus: int = 2) -> tuple[Report, list[PairRow], FakeManaged]:
    copies = FakeCopies(gpus)
    managed = FakeManaged(copies, driver)
    asked, recorder = request(managed, gpus), Recorder()
    bench = CopyBench(asked, copies, copies, managed=managed)
    report = P2pRun(asked, bench, machine_of(copies), recorder).run()
    assert len(recorder.steps) == asked.steps(gpus)
    return report, recorder.rows, managed


def gb_s(rows: list[PairRow], engine: str, source: str, destination: str) -> float:
    (row,) = of(rows, engine=engine, source=source, destination=destination)
    assert row.bandwidth_gb_s is not None
    return row.bandwidth_gb_s


def ids(report: Report) -> dict[str, Verdict]:
    return {finding.id: finding.severity for finding in report.findings}


def test_wrong_data_are_the_gravest_finding() -> None:
    report, rows, _ = run(Driver(corrupts=True))
    assert ids(report)["wrong-data"] is Verdict.FAIL
    assert {row.verdict for row in of(rows, engine="prefetch")} == {Verdict.FAIL}


def test_a_prefetch_that_brings_nothing_is_found() -> None:
    report, _, _ = run(Driver(ignores_prefetch=True))
    assert ids(report)["managed-prefetch-ignored"] is Verdict.WARN
    (found,) = (finding for finding in report.findings if finding.id == "managed-prefetch-ignored")
    assert found.subjects == ("host → GPU0", "host → GPU1")
    assert "100% of the page fault time" in found.seen


def test_pages_that_move_against_advice_are_found() -> None:
    report, _, _ = run(Driver(moves_anyway=True))
    (found,) = report.findings
    assert found.id == "managed-moved-anyway"
    assert set(found.subjects) == {f"GPU{a} → GPU{b}" for a, b in ((0, 1), (1, 0))} | {
        f"{source} → {destination}"
        for gpu in ("GPU0", "GPU1")
        for source, destination in (("host", gpu), (gpu, "host"))
    }


def test_migration_through_host_memory_is_found() -> None:
    report, rows, _ = run(Driver(through_host=True))
    assert ids(report) == {"managed-through-host": Verdict.WARN}
    assert {row.host_staged for row in of(rows, engine="prefetch", source="GPU0", destination="GPU1")} == {True}


def test_a_refused_prefetch_is_an_error_of_its_rows() -> None:
    report, rows, managed = run(Driver(refuses=True))
    assert report.verdict is Verdict.ERROR
    assert {row.verdict for row in of(rows, engine="prefetch")} == {Verdict.ERROR}
    assert {row.verdict for row in of(rows, engine="sm", source="host")} == {None}
    assert managed.advice[-1][2] is False


def test_a_gpu_that_takes_no_advice_is_skipped_with_its_reason() -> None:
    report, rows, _ = run(Driver(lacking={1: "concurrent"}))
    assert ids(report) == {"managed-without-concurrent-access": Verdict.WARN}
    skipped = [row for row in rows if row.verdict == Verdict.SKIP]
    assert {(row.source, row.destination) for row in skipped} == {
        ("host", "GPU1"),
        ("GPU1", "host"),
        ("GPU0", "GPU1"),
        ("GPU1", "GPU0"),
    }
    assert all("concurrentManagedAccess 0" in (row.note or "") for row in skipped)
    assert gb_s(rows, "prefetch", "host", "GPU0") > 0
    assert gb_s(rows, "sm", "host", "GPU1") > 0, "pinned memory needs none of it"


def test_no_managed_memory_at_all_is_refused() -> None:
    check_managed([ManagedSupport(device="GPU0", managed=True), ManagedSupport(device="GPU1", managed=False)])
    with pytest.raises(CouldNotMeasureError, match="GPU0 has no managed memory"):
        check_managed([ManagedSupport(device="GPU0", managed=False)])


def test_memory_that_does_not_fit_is_refused_before_allocation() -> None:
    copies = FakeCopies(2)
    managed = FakeManaged(copies, Driver(full=True))
    with pytest.raises(CouldNotMeasureError, match="more than a quarter"):
        CopyBench(request(managed), copies, copies, managed=managed)
    assert copies.taken == 0


def test_a_recording_gives_the_same_rows(tmp_path: Path) -> None:
    copies = FakeCopies(2)
    managed = FakeManaged(copies)
    asked, first, second = request(managed), Recorder(), Recorder()
    machine = machine_of(copies)
    start = RecordedP2p(
        schema_version=1, origin=Origin.MEASURED, request=asked, hosts=("node0",), gpus=tuple(copies.gpus)
    )
    with recorded.recording_samples(tmp_path, FILE) as write:
        write(start)
        bench = RecordingBench(CopyBench(asked, copies, copies, managed=managed), write)
        P2pRun(asked, bench, machine, first).run()
    found, samples = read_samples(recorded.read_samples(tmp_path, FILE, "p2p"), str(tmp_path))
    assert found == start
    P2pRun(found.request, ReplayedBench(found, samples), machine, second).run()
    assert second.rows == first.rows
