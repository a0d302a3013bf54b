"""Copies between fake GPUs of one process."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpubench.measure import paths as p2p_counters
from gpubench.measure.p2p import rows as p2p_rows
from gpubench.measure.p2p.copies import CopyBench, unreachable_pairs
from gpubench.measure.p2p.request import (
    NVBANDWIDTH,
    CopyMachine,
    HostCopy,
    Method,
    P2pRequest,
    default_series,
    sweep_series,
)
from gpubench.measure.p2p.run import SECTIONS, P2pRun
from gpubench.model.facts.process import GpuProcess
from gpubench.model.paths import p2p
from gpubench.model.paths.p2p import Carried, Cell
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.profiles.copies import CopyJudge
from gpubench.model.results.report import Metadata, PairRow, PatternRow, Report
from gpubench.model.terms.operation import CopyPattern, HostMemory, pattern_pairs
from gpubench.model.terms.verdict import Finding, Origin, Verdict
from gpubench.profiles import ProfileMatch, load
from gpubench.simulated.machine import parse_machine, snapshots
from tests.fakes import copies as fake_copies
from tests.fakes.copies import Broken, FakeCopies, Pair

SIZE = 2**16
METHOD = Method(warmup=1, samples=3, repeats=2)


@pytest.fixture(autouse=True)
def small_sizes_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "JUDGED_FROM_BYTES", SIZE)
    monkeypatch.setattr(p2p_counters, "_COUNTED_FROM_BYTES", SIZE)


class Recorder:
    def __init__(self) -> None:
        self.rows: list[PairRow] = []
        self.steps: list[tuple[int, int]] = []

    def begin(self, metadata: Metadata) -> None:
        raise AssertionError("whoever knows the options begins")

    def progress(self, done: int, total: int, label: str) -> None:
        assert label
        self.steps.append((done, total))

    def row(self, row: PairRow) -> None:
        self.rows.append(row)

    def end(self, report: Report) -> None:
        raise AssertionError("whoever began ends")


def request(gpus: int, **changes: Any) -> P2pRequest:
    everything = P2pRequest(
        pairs=tuple((a, b) for a in range(gpus) for b in range(gpus) if a != b),
        series=default_series(SIZE),
        host_bytes=SIZE,
        patterns=tuple(CopyPattern),
        pattern_bytes=SIZE,
        method=METHOD,
        check=True,
    )
    return replace(everything, **changes)


def machine_of(copies: FakeCopies, busy: dict[int, int] | None = None, profile: str = "") -> CopyMachine:
    node = snapshots(parse_machine(f"hgx-h200-8/{len(copies.gpus)}"))[0]
    used = {gpu: (GpuProcess(pid=pid),) for gpu, pid in (busy or {}).items()}
    gpus = [replace(gpu, processes=used.get(gpu.index, ()), idle=gpu.index not in used) for gpu in node.gpus]
    node = replace(node, gpus=tuple(gpus))
    matched = ProfileMatch(load(profile)) if profile else None
    wiring = Wiring([GpuPlace(node.host, 0, gpu.bus_id) for gpu in node.gpus], {0: Topology(node)})
    return CopyMachine(wiring, copies.gpus, (), matched, Origin.MEASURED, unreachable_pairs(copies))


def run(
    copies: FakeCopies, asked: P2pRequest, *, busy: dict[int, int] | None = None, profile: str = ""
) -> tuple[Report, list[PairRow], Recorder]:
    machine = machine_of(copies, busy, profile)
    recorder = Recorder()
    report = P2pRun(asked, CopyBench(asked, copies, copies), machine, recorder).run()
    return report, recorder.rows, recorder


def found(report: Report) -> dict[str, Finding]:
    return {finding.id: finding for finding in report.findings}


def of(rows: list[PairRow], **wanted: object) -> list[PairRow]:
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def test_a_healthy_machine_passes_and_every_copy_is_verified() -> None:
    copies = FakeCopies(4)
    report, rows, recorder = run(copies, request(4))
    assert report.verdict is Verdict.PASS
    assert report.findings == ()
    assert report.complete
    assert {row.verified for row in rows} == {"last"}
    assert {row.verdict for row in of(rows, peer="on", size_bytes=SIZE)} == {Verdict.PASS}
    assert {row.verdict for row in of(rows, peer="off")} == {None}
    assert recorder.steps == [(n, len(recorder.steps)) for n in range(len(recorder.steps))]
    assert len(recorder.steps) == request(4).steps(4)
    assert report.main == PairRow.section
    assert set(report.sections) == set(SECTIONS) - {PairRow.section, "findings"}


def test_copies_faster_than_their_links_are_an_error_of_the_facts() -> None:
    """A hypervisor may show 2 of 18 NVLinks, so copies are faster than the visible links."""
    copies = FakeCopies(2)
    whole = machine_of(copies)
    (node,) = whole.nodes
    shown = [replace(gpu, nvlinks=(gpu.nvlinks or ())[:2]) for gpu in node.gpus]
    few = Topology(replace(node.snapshot, gpus=tuple(shown)))
    machine = replace(whole, wiring=Wiring(whole.wiring.gpus, {0: few}))
    recorder = Recorder()
    report = P2pRun(request(2), CopyBench(request(2), copies, copies), machine, recorder).run()
    fast = of(recorder.rows, peer="on", size_bytes=SIZE)
    assert {row.verdict for row in fast} == {Verdict.ERROR}
    finding = found(report)["above-limit"]
    assert (finding.severity, finding.expected) == (
        Verdict.ERROR,
        "at most 50 GB/s, the limit of the path NV2 according to the driver",
    )
    assert finding.seen.endswith("times the limit")
    assert {"GPU0 → GPU1", "GPU1 → GPU0"} <= set(finding.subjects)
    assert report.verdict is Verdict.ERROR


def test_wrong_data_fail_at_any_speed() -> None:
    report, rows, _ = run(FakeCopies(4, Broken(wrong={(2, 1)})), request(4))
    assert report.verdict is Verdict.FAIL
    finding = found(report)["wrong-data"]
    assert finding.severity is Verdict.FAIL
    assert finding.subject.startswith("GPU2 → GPU1")
    assert {row.verdict for row in of(rows, source="GPU2", destination="GPU1", direction="write")} == {Verdict.FAIL}
    assert {row.verdict for row in of(rows, source="GPU1", destination="GPU2", peer="on", size_bytes=SIZE)} >= {
        Verdict.PASS
    }


def test_a_zero_of_a_counter_that_never_moved_is_no_evidence() -> None:
    everything = {(a, b) for a in range(2) for b in range(2) if a != b}
    _, rows, _ = run(FakeCopies(2, Broken(staged=everything)), request(2))
    assert {row.host_staged for row in of(rows, peer="on")} == {None}


def test_a_failing_pair_is_an_error_and_the_rest_is_measured() -> None:
    report, rows, _ = run(FakeCopies(4, Broken(failing={(3, 0)})), request(4))
    assert report.verdict is Verdict.ERROR
    assert "cudaErrorIllegalAddress" in found(report)["copy-failed"].seen
    broken = of(rows, source="GPU3", destination="GPU0")
    assert {row.verdict for row in broken} == {Verdict.ERROR}
    assert {row.bandwidth_gb_s for row in broken} == {None}
    assert {row.verdict for row in of(rows, source="GPU0", destination="GPU1", peer="on", size_bytes=SIZE)} == {
        Verdict.PASS
    }


def test_peer_access_that_is_granted_but_fails_is_an_error() -> None:
    report, rows, _ = run(FakeCopies(4, Broken(refused={(0, 1)})), request(4))
    assert found(report)["copy-failed"].seen == "cudaErrorPeerAccessUnsupported"
    assert {row.verdict for row in of(rows, source="GPU0", destination="GPU1", peer="on")} == {Verdict.ERROR}


def test_the_pairs_of_a_gpu_without_memory_are_errors() -> None:
    _, rows, _ = run(FakeCopies(4, Broken(full={2})), request(4))
    for row in rows:
        touched = "GPU2" in (row.source, row.destination)
        assert (row.verdict == Verdict.ERROR) == touched
        if touched:
            assert row.note is not None
            assert "out of memory" in row.note


def test_a_gpu_in_use_is_not_judged() -> None:
    slow = {(1, 2): 0.1}
    _, rows, _ = run(FakeCopies(4, Broken(slow=slow)), request(4), busy={1: 4711})
    (row,) = of(rows, source="GPU1", destination="GPU2", engine="ce", direction="write", peer="on", size_bytes=SIZE)
    assert row.verdict is Verdict.SKIP
    assert row.note == "not judged: GPU1 is in use by process 4711"
    (host, *_) = of(rows, source="host", destination="GPU1")
    assert host.verdict is Verdict.SKIP


def test_a_slow_pair_is_measured_again_and_noise_is_no_verdict() -> None:
    steady = FakeCopies(4, Broken(slow={(0, 1): 0.8}))
    run(steady, request(4, host_bytes=None, patterns=()))
    again = sum(pairs == ((0, 1),) for pairs, _ in steady.calls)
    other = sum(pairs == ((0, 2),) for pairs, _ in steady.calls)
    assert again > other
    noisy = FakeCopies(4, Broken(slow={(0, 1): 0.8}, noise={(0, 1): [1.0, 0.7, 1.3]}))
    report, rows, _ = run(noisy, request(4, host_bytes=None, patterns=()))
    assert Verdict.INCONCLUSIVE in {row.verdict for row in of(rows, source="GPU0", destination="GPU1")}
    assert found(report)["p2p-noisy"].subject == "GPU0 → GPU1"


def test_peer_access_slower_than_staging_is_reported() -> None:
    slow = {(0, 1): 0.05}
    report, _, _ = run(FakeCopies(4, Broken(slow=slow), counts=False), request(4))
    (slow_pair,) = report.findings
    assert slow_pair.id == "p2p-slow"
    assert any(line.startswith("p2p-slower-than-staging: GPU0 → GPU1: ") for line in slow_pair.consequences)


def test_a_pattern_that_arrives_wrong_is_counted() -> None:
    report, _, _ = run(FakeCopies(4, Broken(wrong={(2, 0)})), request(4))
    wrong = {row.pattern for row in report.rows(PatternRow) if row.wrong}
    assert wrong == {"all_to_one", "bisection", "all_to_all"}


def test_both_kinds_of_host_memory_are_measured_in_both_directions() -> None:
    report, rows, _ = run(FakeCopies(1), request(1, series=(), patterns=()))
    assert [(row.source, row.destination, row.note) for row in rows] == [
        ("host", "GPU0", "pinned host memory"),
        ("GPU0", "host", "pinned host memory"),
        ("host", "GPU0", "pageable host memory"),
        ("GPU0", "host", "pageable host memory"),
    ]
    assert report.verdict is Verdict.PASS


def host_calls(copies: FakeCopies, memory: HostMemory, gpu: int) -> int:
    return sum(pairs == ((memory, gpu),) for pairs, _ in copies.calls)


def test_slow_pinned_memory_is_measured_again_and_pageable_memory_never_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy, slow = FakeCopies(1), FakeCopies(1)
    asked = request(1, series=(), patterns=())
    _, rows, _ = run(healthy, asked, profile="hgx-h200-2")
    assert [row.verdict for row in rows] == [Verdict.PASS, Verdict.PASS, None, None]
    assert [row.bandwidth_gb_s for row in rows] == [pytest.approx(55.0)] * 4
    assert [row.limit_percent for row in rows] == [pytest.approx(100 * 55 / 63, rel=0.01)] * 4
    monkeypatch.setattr(fake_copies, "HOST_GB_S", 20.0)
    _, rows, _ = run(slow, asked, profile="hgx-h200-2")
    assert [row.verdict for row in rows] == [Verdict.FAIL, Verdict.FAIL, None, None]
    calls = [host_calls(each, HostMemory.PINNED, 0) for each in (healthy, slow)]
    assert calls == [4, 4 * 4]
    assert host_calls(slow, HostMemory.PAGEABLE, 0) == 4
    _, rows, _ = run(FakeCopies(1), replace(asked, host_bytes=SIZE // 2), profile="hgx-h200-2")
    assert {row.verdict for row in rows} == {None}


def test_wrong_data_with_host_memory_fail_and_are_not_measured_again() -> None:
    copies = FakeCopies(1, Broken(wrong_with_host=True))
    report, rows, _ = run(copies, request(1, series=(), patterns=()))
    assert {row.verdict for row in rows} == {Verdict.FAIL}
    assert found(report)["wrong-data"].subjects == ("host and GPU0",)
    assert host_calls(copies, HostMemory.PINNED, 0) == 4


def test_bytes_for_host_memory_need_no_nvlink() -> None:
    still = Cell(seconds=(SIZE / 55e9,), wrong=0, carried=Carried(nvlink_bytes=0, nvlink_share=0.0))
    row = p2p_rows.host_row(machine_of(FakeCopies(1)), HostCopy(HostMemory.PINNED, 0, to_gpu=True), still, SIZE)
    (judged,) = CopyJudge().judge([row])
    assert judged.verdict is Verdict.PASS


def test_a_sweep_has_a_row_for_every_size_and_pair() -> None:
    pairs: tuple[Pair, ...] = ((0, 1), (1, 0))
    asked = request(2, series=sweep_series((8, 24, 1000, SIZE)), pairs=pairs, host_bytes=None, patterns=())
    _, rows, _ = run(FakeCopies(2), asked)
    assert len(rows) == 4 * 2 * 2
    assert {row.size_bytes for row in rows} == {8, 24, 1000, SIZE}
    assert {row.verified for row in rows} == {"last"}


def test_nothing_is_verified_without_check() -> None:
    _, rows, _ = run(FakeCopies(2, Broken(wrong={(0, 1)})), request(2, check=False))
    assert {row.verified for row in rows} == {"no"}


def test_the_repeats_of_a_sample_follow_from_its_duration() -> None:
    assert Method().count_repeats(1e-3) == 10
    assert Method().count_repeats(1e-7) == 100
    assert Method().count_repeats(1.0) == 1
    assert NVBANDWIDTH.count_repeats(1.0) == 16


@pytest.mark.parametrize(
    ("pattern", "pairs"),
    [
        (CopyPattern.RING, ((0, 1), (1, 2), (2, 3), (3, 0))),
        (CopyPattern.ALL_TO_ONE, ((1, 0), (2, 0), (3, 0))),
        (CopyPattern.ONE_TO_ALL, ((0, 1), (0, 2), (0, 3))),
        (CopyPattern.BISECTION, ((0, 2), (1, 3), (2, 0), (3, 1))),
    ],
)
def test_patterns(pattern: CopyPattern, pairs: tuple[Pair, ...]) -> None:
    assert pattern_pairs(pattern, 4) == pairs
    assert len(pattern_pairs(CopyPattern.ALL_TO_ALL, 4)) == 12
    assert pattern_pairs(CopyPattern.RING, 1) == ()
