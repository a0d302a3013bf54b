"""Findings on made-up matrices of copies."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from gpubench.measure.p2p.findings import copy_findings, staged_pairs
from gpubench.measure.p2p.rows import CopyMatrix, Judged, bandwidth_gb_s
from gpubench.model.paths.p2p import AS_SLOW_AS_STAGED, LATENCY_BYTES, Carried, Cell, Pair, Series
from gpubench.model.terms.operation import CopyGpu, Direction, Engine
from gpubench.model.terms.verdict import Finding, Verdict

SIZE = 2**28
ON = Series(Engine.CE, Direction.WRITE, peer=True, size_bytes=SIZE)
OFF = replace(ON, peer=False)
READ, BOTH = replace(ON, direction=Direction.READ), replace(ON, direction=Direction.BOTH)
GPUS = [CopyGpu(f"GPU{gpu}", gpu, f"bus{gpu}", "", "") for gpu in range(4)]
PAIRS = [(one, other) for one in range(4) for other in range(4) if one != other]


def cell(gb_s: float, size_bytes: int = SIZE, **others: object) -> Cell:
    return replace(Cell((size_bytes / gb_s / 1e9,), 0), **others)


def matrix(
    cells: Mapping[Pair, Cell], series: Series = ON, verdicts: Mapping[Pair, Verdict] | None = None
) -> CopyMatrix:
    every = {pair: cell(400, series.size_bytes) for pair in PAIRS} | dict(cells)
    judged: dict[Pair, Judged] = dict.fromkeys(PAIRS, (Verdict.PASS, ""))
    judged |= {pair: (verdict, f"{pair} is slow") for pair, verdict in (verdicts or {}).items()}
    return CopyMatrix(series, every, {pair: bandwidth_gb_s(series, each) for pair, each in every.items()}, judged)


def found(*matrices: CopyMatrix) -> list[Finding]:
    return list(copy_findings(matrices, GPUS, ()))


@pytest.mark.parametrize(
    ("pcie_share", "words"),
    [
        (None, "10% of the bytes went over NVLink, although its counters work for other pairs"),
        (0.4, "10% of the bytes went over NVLink, although its counters work for other pairs"),
        (0.6, "10% of the bytes went over NVLink, although its counters work for other pairs; PCIe carried the rest"),
    ],
)
def test_counters_of_a_staged_pair_are_described(pcie_share: float | None, words: str) -> None:
    carried = Carried(nvlink_share=0.1, pcie_share=pcie_share)
    assert staged_pairs([matrix({(0, 1): cell(400, carried=carried)})]) == {(0, 1): words}
    assert staged_pairs([matrix({(0, 1): cell(400, carried=carried)}, OFF)]) == {}


def latency(microseconds: float) -> Cell:
    return Cell((microseconds / 1e6,), 0)


def test_times_at_the_largest_common_size_show_staged_pairs() -> None:
    soon, late = replace(ON, size_bytes=LATENCY_BYTES), replace(OFF, size_bytes=LATENCY_BYTES)
    small, small_off = replace(ON, size_bytes=SIZE // 4), replace(OFF, size_bytes=SIZE // 4)
    slow_off = matrix(dict.fromkeys(PAIRS, cell(40)), OFF)
    fine = [slow_off, matrix({}), matrix({}, small), matrix({}, small_off)]
    assert staged_pairs(fine) == {}, "of the smaller size both are alike"
    staged = [slow_off, matrix({(0, 1): cell(42), (2, 1): cell(60)})]
    assert staged_pairs(staged) == {}, "over PCIe direct copies may be no faster"
    assert staged_pairs(staged, lambda _: True) == {(0, 1): AS_SLOW_AS_STAGED}
    times = [matrix({(0, 1): latency(10)}, soon), matrix({(0, 1): latency(12)}, late)]
    assert staged_pairs([*staged, *times]) == {(0, 1): AS_SLOW_AS_STAGED}
    times = [matrix({(0, 1): latency(2)}, soon), matrix({(0, 1): latency(12)}, late)]
    assert staged_pairs([*staged, *times]) == {}
    proven = matrix({(0, 1): cell(42, carried=Carried(nvlink_share=1.0))})
    assert staged_pairs([slow_off, proven]) == {}
    tiny = [matrix({}, replace(series, size_bytes=2**20)) for series in (ON, OFF)]
    assert staged_pairs(tiny) == {}, "latency rules small copies"


def test_slower_copies_with_peer_access_are_a_warning() -> None:
    off = matrix({(0, 1): cell(100), (1, 0): cell(100), (2, 3): cell(100)}, OFF)
    on = matrix({(0, 1): cell(80), (1, 0): cell(50), (2, 3): cell(95)}, verdicts={})
    (finding,) = [each for each in found(off, on) if each.id == "p2p-slower-than-staging"]
    assert finding.subject == "GPU0 → GPU1, GPU1 → GPU0"
    assert finding.seen == "50 GB/s with peer access, 100 GB/s through host memory"
    small = [replace(each, series=replace(each.series, size_bytes=2**20)) for each in (off, on)]
    assert found(*small) == []


def test_noise_is_reported_once_per_pair() -> None:
    verdicts = {(0, 1): Verdict.INCONCLUSIVE}
    matrices = [matrix({}, series, verdicts) for series in (ON, READ)]
    (finding,) = found(*matrices)
    assert (finding.id, finding.severity, finding.subjects) == ("p2p-noisy", Verdict.INCONCLUSIVE, ("GPU0 → GPU1",))
    assert found(matrix({}, BOTH, verdicts)) == []


def test_an_error_names_its_pairs_once_and_two_errors_are_two_findings() -> None:
    broken = {(0, 1): Cell(error="a"), (1, 0): Cell(error="b")}
    series = [CopyMatrix(each, broken, {}, {}) for each in (ON, READ)]
    assert [(each.seen, each.subjects) for each in found(*series)] == [("a", ("GPU0 → GPU1",)), ("b", ("GPU1 → GPU0",))]


def test_wrong_data_with_host_memory_alone_are_a_finding_too() -> None:
    (finding,) = copy_findings([matrix({})], GPUS, ["GPU1", "GPU1"])
    assert (finding.id, finding.subjects) == ("wrong-data", ("host and GPU1",))
    assert finding.seen == "wrong data arrived"


@pytest.mark.parametrize(("pairs", "rest"), [(4, ""), (5, " and 1 more")])
def test_four_pairs_are_named_and_the_others_counted(pairs: int, rest: str) -> None:
    broken = dict.fromkeys(PAIRS[:pairs], Cell(error="a"))
    (finding,) = found(CopyMatrix(ON, broken, {}, {}))
    assert finding.subject == f"GPU0 → GPU1, GPU0 → GPU2, GPU0 → GPU3, GPU1 → GPU0{rest}"
    assert len(finding.subjects) == pairs
