"""Copies between ranks, which are threads."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, count, permutations, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.errors import CouldNotMeasureError
from gpubench.jobs.runner import NullListener
from gpubench.measure import paths as p2p_counters
from gpubench.measure.p2p.copies import RankBench
from gpubench.measure.p2p.request import CopyMachine, Method, P2pRequest
from gpubench.measure.p2p.run import P2pRun
from gpubench.measure.paths import IdleWindow
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths import p2p
from gpubench.model.paths.p2p import LATENCY_BYTES, Series, pairing_rounds
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.wiring import GpuPlace, Wiring
from gpubench.model.results.report import CauseRow, PairRow, Report
from gpubench.model.terms.operation import CopyGpu, Direction, Engine
from gpubench.model.terms.ranks import UNWATCHED, hang_error
from gpubench.model.terms.verdict import Origin, Verdict
from gpubench.ports.copies import LinkBytes
from gpubench.simulated.machine import parse_machine, snapshots
from tests.fakes.library_log import FakeLog, sent_between
from tests.fakes.progress import FakeProgress
from tests.fakes.rank_copies import IPC_GB_S, LATENCY_SECONDS, NETWORK_GB_S, Fabric, FakeRankCopies, Pair
from tests.fakes.ranks import ThreadGroup, run_ranks

SIZE = 2**16
WRITE = Series(Engine.CE, Direction.WRITE, peer=True, size_bytes=SIZE)
READ = replace(WRITE, direction=Direction.READ)
SENT = replace(WRITE, network=True)


@pytest.fixture(autouse=True)
def small_sizes_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "JUDGED_FROM_BYTES", SIZE)
    monkeypatch.setattr(p2p_counters, "_COUNTED_FROM_BYTES", SIZE)


class Recorder(NullListener):
    def __init__(self) -> None:
        self.rows: list[PairRow] = []

    def row(self, row: Any) -> None:
        self.rows.append(row)


@dataclass
class Outcome:
    report: Report
    rows: list[PairRow]

    def row(self, pair: Pair, series: Series = WRITE) -> PairRow:
        wanted = (
            str(pair[0]),
            str(pair[1]),
            series.direction,
            series.size_bytes,
            "network" if series.network else "ipc",
        )
        found = [
            row
            for row in self.rows
            if (row.source, row.destination, row.direction, row.size_bytes, row.scope) == wanted
        ]
        assert len(found) == 1
        return found[0]

    @property
    def findings(self) -> dict[str, str]:
        return {finding.id: finding.subject for finding in self.report.findings}


class Sending:
    def __init__(self, step: int) -> None:
        self._sent = count(0, step) if step else repeat(0)

    def read(self, gpu: int) -> LinkBytes:
        assert gpu == 0
        return LinkBytes(nvlink_sent=next(self._sent))


def machine(ranks: int, per_node: int) -> CopyMachine:
    board = per_node + per_node % 2
    nodes = tuple(Topology(snapshot) for snapshot in snapshots(parse_machine(f"hgx-h200-{board}*{ranks // per_node}")))
    places = [
        GpuPlace(nodes[rank // per_node].snapshot.host, rank // per_node, nodes[0].gpus[rank % per_node].bus_id)
        for rank in range(ranks)
    ]
    gpus = [
        CopyGpu(f"rank {rank}", rank, str(nodes[0].gpus[rank % per_node].bus_id), f"GPU-{rank}", "NVIDIA H200")
        for rank in range(ranks)
    ]
    return CopyMachine(Wiring(places, dict(enumerate(nodes))), gpus, (), None, Origin.MEASURED, is_ranks=True)


def request(ranks: int, *series: Series, **changes: Any) -> P2pRequest:
    asked = P2pRequest(
        pairs=tuple(permutations(range(ranks), 2)),
        series=series or (WRITE, READ, replace(WRITE, size_bytes=LATENCY_BYTES)),
        host_bytes=None,
        patterns=(),
        pattern_bytes=SIZE,
        method=Method(warmup=1, samples=3, repeats=2),
        check=True,
    )
    return replace(asked, **changes)


def run(
    fabric: Fabric,
    asked: P2pRequest,
    wiring: CopyMachine,
    *,
    via: str = "",
    progress: Sequence[FakeProgress] = (),
    foreign: int | None = None,
) -> Outcome:
    """Measure copies between ranks. Another process sends from the GPU of rank `foreign`."""

    def body(group: ThreadGroup) -> Outcome:
        copies = FakeRankCopies(fabric, group.rank)
        across = [pair for pair in asked.pairs if wiring.scope(pair) == "network"]
        log = FakeLog(sent_between(across, via)) if via else None
        shown = progress[group.rank] if progress else UNWATCHED
        window = None
        if foreign is not None:
            window = IdleWindow(Sending(4 * 10**9 if group.rank == foreign else 0), wait=lambda _seconds: None)
        bench = RankBench(asked, group, copies, copies, log, shown, window)
        listener = Recorder()
        report = P2pRun(asked, bench, wiring, listener).run()
        bench.close()
        return Outcome(report, listener.rows)

    outcomes = run_ranks(len(wiring.gpus), body)
    for other in outcomes[1:]:
        assert other.rows == outcomes[0].rows
        assert other.report.verdict == outcomes[0].report.verdict
        assert other.report.findings == outcomes[0].report.findings
    return outcomes[0]


@given(st.integers(0, 40))
def test_rounds_are_disjoint_and_hold_every_pair_once(ranks: int) -> None:
    met = pairing_rounds(ranks)
    assert sorted(pair for each in met for pair in each) == list(combinations(range(ranks), 2))
    for each in met:
        in_it = [rank for pair in each for rank in pair]
        assert len(in_it) == len(set(in_it))
    if ranks > 1:
        assert len(met) == (ranks if ranks % 2 else ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_ordered_pair_of_a_node_is_measured_verified_and_judged(ranks: int) -> None:
    fabric = Fabric()
    outcome = run(fabric, request(ranks), machine(ranks, ranks))
    assert outcome.report.verdict is Verdict.PASS
    assert len(outcome.rows) == 3 * ranks * (ranks - 1)
    assert {row.verified for row in outcome.rows} == {"last"}
    assert {(row.scope, row.engine, row.peer, row.path_class) for row in outcome.rows} == {("ipc", "ce", "on", "NV18")}
    row = outcome.row((0, 1))
    assert row.bandwidth_gb_s == pytest.approx(SIZE / (LATENCY_SECONDS + SIZE / (IPC_GB_S * 1e9)) / 1e9)
    assert row.limit_gb_s == 450
    assert row.nvlink_bytes == 2 * SIZE
    assert row.host_staged is False
    assert row.source_bus_id != row.destination_bus_id
    issuers = {(by == pair[0]) for by, pair, size, _ in fabric.copied if size == SIZE}
    assert issuers == {True, False}


def test_between_nodes_nccl_sends_and_is_not_compared_with_nvlink() -> None:
    wiring = machine(4, 2)
    outcome = run(Fabric(), request(4, WRITE, READ, SENT), wiring, via="NET/Socket/0")
    assert outcome.report.verdict is Verdict.PASS
    assert len(outcome.rows) == 4 + 4 + 8
    row = outcome.row((0, 2), SENT)
    assert (row.engine, row.peer, row.path_class, row.limit_gb_s) == ("nccl", None, "NET", None)
    assert row.note == "no limit: no NIC with a known rate is near the GPU"
    assert row.bandwidth_gb_s == pytest.approx(SIZE / (LATENCY_SECONDS + SIZE / (NETWORK_GB_S * 1e9)) / 1e9)
    assert (row.verified, row.verdict, row.nvlink_bytes) == ("last", "PASS", None)
    assert row.source_node == wiring.nodes[0].snapshot.host
    assert row.destination_node == wiring.nodes[1].snapshot.host
    assert {row.scope for row in outcome.rows if row.engine == "ce"} == {"ipc"}
    assert {(row.engine, row.transport, row.host_staged) for row in outcome.rows} == {
        ("ce", None, False),
        ("nccl", "NET/Socket/0", True),
    }


@pytest.mark.parametrize(
    ("via", "staged", "found"),
    [
        ("NET/Socket/0", True, {"host-staged"}),
        ("NET/IB/0/GDRDMA", False, {"path-disputed"}),
        ("PIGEON/7", None, {"path-unknown"}),
        ("", None, {"path-unknown"}),
    ],
)
def test_nccls_log_shows_the_path_between_nodes(via: str, staged: bool | None, found: set[str]) -> None:
    outcome = run(Fabric(), request(4, SENT), machine(4, 2), via=via)
    assert {row.host_staged for row in outcome.rows} == {staged}
    assert {row.transport for row in outcome.rows} == {via or None}
    assert set(outcome.findings) == found


@pytest.mark.parametrize("pair", [(1, 2), (0, 1)])
def test_wrong_data_fail_on_a_node_and_between_nodes(pair: Pair) -> None:
    series = SENT if pair == (1, 2) else WRITE
    outcome = run(Fabric(wrong={pair}), request(4, WRITE, SENT), machine(4, 2))
    assert outcome.report.verdict is Verdict.FAIL
    assert outcome.findings["wrong-data"] == f"rank {pair[0]} → rank {pair[1]}"
    assert outcome.row(pair, series).verdict == "FAIL"
    assert "1 wrong element" in str(outcome.row(pair, series).note)


def test_a_copy_that_moves_nothing_is_wrong() -> None:
    outcome = run(Fabric(stale={(0, 1)}), request(2, WRITE), machine(2, 2))
    assert outcome.row((0, 1)).verdict == "FAIL"
    assert outcome.row((1, 0)).verdict != "FAIL"


def test_data_are_not_verified_without_check() -> None:
    outcome = run(Fabric(wrong={(0, 1)}), request(4, WRITE, check=False), machine(4, 4))
    assert outcome.report.verdict is Verdict.PASS
    assert {row.verified for row in outcome.rows} == {"no"}


def test_a_pair_whose_memory_cannot_be_opened_is_an_error_and_the_rest_is_measured() -> None:
    outcome = run(Fabric(closed_to={(1, 3)}), request(4, WRITE, READ), machine(4, 4))
    assert outcome.report.verdict is Verdict.ERROR
    assert [(row.source, row.destination, row.direction) for row in outcome.rows if row.verdict == "ERROR"] == [
        ("1", "3", "write"),
        ("3", "1", "read"),
    ]
    assert outcome.row((1, 3)).note == "cudaErrorInvalidResourceHandle; different containers"
    assert outcome.row((1, 3)).bandwidth_gb_s is None
    assert outcome.findings["copy-failed"] == "rank 1 → rank 3, rank 3 → rank 1"


def test_a_rank_that_cannot_share_its_memory_still_sends_over_the_network() -> None:
    outcome = run(Fabric(unshared={0}), request(4, WRITE, SENT), machine(4, 2))
    assert outcome.row((0, 1)).verdict == outcome.row((1, 0)).verdict == "ERROR"
    assert outcome.row((0, 1)).note == "cudaErrorNotSupported; WSL"
    assert outcome.row((2, 3)).bandwidth_gb_s is not None
    assert outcome.row((0, 2), SENT).verdict == "PASS"


def test_the_pairs_of_a_rank_without_memory_are_errors() -> None:
    outcome = run(Fabric(full={2}), request(4, WRITE, SENT), machine(4, 2))
    assert {(row.source, row.destination) for row in outcome.rows if row.verdict == "ERROR"} == {
        (str(one), str(other)) for one, other in permutations(range(4), 2) if 2 in (one, other)
    }


def test_all_ranks_repeat_a_pair_before_an_alarm() -> None:
    fabric = Fabric(slow={(0, 1): 0.8})
    run(fabric, request(4, WRITE), machine(4, 4))
    assert sum(pair == (0, 1) for _, pair, _, _ in fabric.copied) > sum(
        pair == (1, 0) for _, pair, _, _ in fabric.copied
    )


def test_a_pair_that_breaks_when_it_is_measured_again() -> None:
    class Breaking(Fabric):
        def seconds(self, pair: Pair, size_bytes: int, repeats: int, gb_s: float) -> float:
            if pair == (0, 1) and sum(each == pair for _, each, _, _ in self.copied) > 4:
                raise CouldNotMeasureError("cudaErrorIllegalAddress")
            return super().seconds(pair, size_bytes, repeats, gb_s)

    outcome = run(Breaking(slow={(0, 1): 0.8}), request(4, WRITE), machine(4, 4))
    assert outcome.rows[0].verdict == "ERROR"


def test_bytes_that_nvlink_did_not_carry_are_staged() -> None:
    everything = tuple(permutations(range(4), 2))
    asked = request(4, WRITE, READ, pairs=(*everything[1:], everything[0]))
    outcome = run(Fabric(uncounted={(0, 1)}), asked, machine(4, 4))
    assert outcome.row((0, 1), READ).host_staged is True
    assert outcome.findings["host-staged"] == "ranks 0 → 1"


def test_an_unused_scope_is_not_measured() -> None:
    outcome = run(Fabric(), request(4, WRITE, SENT, pairs=((2, 3),)), machine(4, 2))
    assert {row.scope for row in outcome.rows} == {"ipc"}
    assert len(outcome.rows) == 1


def on(machine: CopyMachine, node: Snapshot) -> CopyMachine:
    return replace(machine, wiring=replace(machine.wiring, nodes={0: Topology(node)}))


def test_gpus_that_the_driver_did_not_describe_are_measured_and_not_judged() -> None:
    wired = machine(2, 2)
    blind = on(wired, replace(wired.nodes[0].snapshot, gpus=(), pairs=()))
    outcome = run(Fabric(), request(2, WRITE), blind)
    assert {(row.path_class, row.limit_gb_s, row.verdict) for row in outcome.rows} == {("?", None, "SKIP")}
    assert "there are no facts about these GPUs" in str(outcome.rows[0].note)


def test_the_rank_that_all_wait_for_is_behind_in_a_hanging_round() -> None:
    let_go = threading.Event()
    watched = [FakeProgress(rank) for rank in range(4)]
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(run, Fabric(stuck={(1, 2): let_go}), request(4, WRITE), machine(4, 4), progress=watched)
        number = next(number for number, pairs in enumerate(pairing_rounds(4), 1) if (1, 2) in pairs)
        label = f"round {number} of 3 (ce write 64K; 0 → 3, 1 → 2)"
        deadline = time.monotonic() + 300
        while [(each.state().label, each.state().done) for each in watched] != [
            (label, 0 if rank == 1 else 1) for rank in range(4)
        ]:
            assert time.monotonic() < deadline, [each.state() for each in watched]
            time.sleep(0.01)
        said = str(hang_error([each.state(20) for each in watched], {}, 20))
        let_go.set()
        assert outcome.result(60).report.verdict is Verdict.PASS
    assert f"missing:  rank 1 (pid 1), in operation {label}, 0 of 6 done, for 20 s" in said
    assert f"arrived:  rank 0, rank 2, rank 3: in operation {label}, 1 of 6 done" in said


def test_foreign_traffic_of_one_gpu_is_known_on_all_ranks() -> None:
    asked = request(4)
    outcome = run(Fabric(), asked, machine(4, 4), foreign=2)
    (cause,) = outcome.report.rows(CauseRow)
    assert (cause.id, cause.confidence) == ("foreign-nvlink-traffic", "proven")
    assert "GB/s over NVLink while this job is idle" in cause.evidence
    assert cause.subject == "GPU2"
