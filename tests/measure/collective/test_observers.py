"""Observed sweeps on threads with a fake NCCL, with logs of four H200s."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from gpubench.backends.cuda import open_device
from gpubench.backends.nccl.backend import NcclBackend
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.collectives.record import Collective
from gpubench.collectives.registry import COLLECTIVES
from gpubench.conditions.circumstances import Circumstances
from gpubench.machine.nvml import Driver
from gpubench.machine.recorded import read_recording
from gpubench.measure.collective import paths
from gpubench.measure.collective import paths as judge
from gpubench.measure.collective.cases import cases
from gpubench.measure.collective.paths import (
    Choice,
    LoggedChoices,
    PathObservations,
    RowObservations,
    Traffic,
    conclude,
    operation_key,
    simulated,
)
from gpubench.measure.collective.sweep import ObservationSources, Observers, PathObserver
from gpubench.measure.path_outcome import PathOutcome
from gpubench.model.facts.process import MpiFacts, RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.facts.traffic import GpuUse, IdleGpu, LinkRates
from gpubench.model.paths.p2p import AS_SLOW_AS_STAGED, Carried
from gpubench.model.paths.topology import Limit, Topology
from gpubench.model.paths.transport import Transport, TransportKind, Tuning, Used
from gpubench.model.paths.wiring import Wiring
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.results.report import CauseRow, CollectiveRow, EvidenceRow, FallbackRow, Report, Table
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.statistics import Sampling
from gpubench.model.terms.verdict import Verdict
from gpubench.ports.backend import Backend
from gpubench.ports.copies import LinkBytes
from gpubench.simulated.machine import parse_machine, snapshots
from tests.cli.running import ROOT
from tests.fakes import cupy_on_numpy, faults
from tests.fakes.library_log import FakeLog, recorded, said
from tests.fakes.one_variant import measure
from tests.fakes.ranks import ThreadGroup, run_ranks
from tests.formats.sample import ROW
from tests.measure.collective.test_sweep import ReceivedRows, request_for

RANKS = 4
RING = {"0 → 1", "1 → 2", "2 → 3", "3 → 0"}
H200S = snapshots(parse_machine("hgx-h200-4"), [])[0]
SIZE, COUNTED = 2**18, 2**21


@dataclass
class FakeCounters:
    """Counters that advance by the same number of bytes per reading."""

    nvlink: int | None = None
    pcie: int | None = None
    readings: int = 0

    def read(self, gpu: int) -> LinkBytes:
        assert gpu == 0
        self.readings += 1
        nvlink, pcie = (None if each is None else each * self.readings for each in (self.nvlink, self.pcie))
        return LinkBytes(nvlink, nvlink, pcie, pcie)


class Users:
    def __init__(self, *uses: GpuUse) -> None:
        self._uses = list(uses)

    def read(self, gpu: int) -> GpuUse:
        assert gpu == 0
        return self._uses.pop(0) if len(self._uses) > 1 else self._uses[0]


@dataclass
class Job:
    """A job with the logs of its ranks. `users` are other processes on its GPUs while it is idle."""

    logs: Callable[[int], FakeLog]
    counters: Callable[[int], FakeCounters] = lambda _rank: FakeCounters()
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    shm_devices: Sequence[int] = (1, 1, 1, 1)
    nodes: Sequence[int] = (0, 0, 0, 0)
    check: bool = True
    wrap: Callable[[Backend, int], Backend] = lambda backend, _rank: backend
    machine: Snapshot = H200S
    process: RankFacts | None = None
    users: Callable[[int], Sequence[GpuUse]] | None = None
    by_design: str = ""
    gpus: Sequence[int] = (0, 1, 2, 3)
    environments: Sequence[Mapping[str, str]] = ({},) * RANKS

    @property
    def identities(self) -> list[RankIdentity]:
        return [
            RankIdentity(
                rank=rank, host=f"n{node}", node=node, local_rank=rank, pid=1, gpu_index=gpu,
                gpu_bus_id=self.machine.gpus[gpu].bus_id,
            )
            for rank, (node, gpu) in enumerate(zip(self.nodes, self.gpus, strict=True))
        ]  # fmt: skip

    def circumstances(self) -> Circumstances:
        facts = [
            RankFacts(rank=rank, host="n0", node=0, local_rank=rank, pid=1, shm_device=device)
            for rank, device in enumerate(self.shm_devices)
        ]
        if self.process is not None:
            facts = [
                replace(self.process, rank=rank, local_rank=rank, environment={**self.process.environment, **more})
                for rank, more in enumerate(self.environments)
            ]
        nodes = dict.fromkeys(self.nodes, Topology(self.machine))
        return Circumstances(wiring=Wiring(self.identities, nodes), facts=facts, settings=self.settings)


@dataclass
class Result:
    report: Report
    rows: list[CollectiveRow]
    logs: list[FakeLog]

    @property
    def evidence(self) -> dict[str, EvidenceRow]:
        return {f"{row.source[5:]} → {row.destination[5:]}": row for row in self.report.rows(EvidenceRow)}

    @property
    def fallback(self) -> list[FallbackRow]:
        return self.report.rows(FallbackRow)


def run(
    monkeypatch: pytest.MonkeyPatch, job: Job, collective: Collective = ALLREDUCE, sizes: tuple[int, ...] = (SIZE,)
) -> Result:
    monkeypatch.setattr(paths, "COUNTED_BYTES", COUNTED)
    nccl = cupy_on_numpy.Nccl(RANKS)
    cupy_on_numpy.install(monkeypatch, cupy_on_numpy.Runtime(RANKS), nccl)
    request = request_for(collective, sizes=sizes, sampling=Sampling(iterations=4), check=job.check)
    logs = [job.logs(rank) for rank in range(RANKS)]

    def body(group: ThreadGroup) -> tuple[Report, list[CollectiveRow]]:
        device = open_device(group.rank, RANKS, "n0", Driver(version="580.1"))
        backend = NcclBackend(group, device, NcclLibrary())
        circumstances = job.circumstances()

        def look_around() -> Circumstances | None:
            return circumstances if group.collect(None) is not None else None

        log, counters = logs[group.rank], job.counters(group.rank)
        sources = ObservationSources(log, counters, look_around, job.nodes, by_design=job.by_design)
        recorder = ReceivedRows()
        report = measure(
            request,
            group,
            job.wrap(backend, group.rank),
            job.identities,
            recorder,
            Observers(path_observer=PathObserver.of(request, group, sources)),
        )
        backend.close()
        return report, recorder.rows

    results = run_ranks(RANKS, body)
    assert [report.sections for report, _ in results[1:]] == [{}] * (RANKS - 1)
    assert not any(log.is_on for log in logs)
    return Result(*results[0], logs)


def direct(rank: int) -> FakeLog:
    return FakeLog(recorded("tuning", rank))


def shared_memory(rank: int) -> FakeLog:
    return FakeLog(recorded("p2p-disabled", rank))


def sockets(rank: int) -> FakeLog:
    ends = [(rank, (rank + 1) % RANKS, "send"), ((rank - 1) % RANKS, rank, "receive")]
    lines = [f"Channel 0{n}/0 : {a}[{a}] -> {b}[{b}] [{end}] via NET/Socket/0" for a, b, end in ends for n in (0, 1)]
    trees = "Trees [0] " + ("1/-1/-1->0->-1" if rank == 0 else f"-1/-1/-1->{rank}->{rank - 1}")
    return FakeLog(said(trees, *lines))


def over_nvlink(_rank: int) -> FakeCounters:
    return FakeCounters(nvlink=2 * COUNTED, pcie=1000)


def over_pcie(_rank: int) -> FakeCounters:
    return FakeCounters(nvlink=0, pcie=2 * COUNTED)


def evidence_of(outcome: PathOutcome) -> list[EvidenceRow]:
    return Report(verdict=Verdict.PASS, complete=True, sections=outcome.sections).rows(EvidenceRow)


def test_a_healthy_job_is_direct_by_all_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, Job(direct, over_nvlink), sizes=(1024, 2048, 4096))
    assert [(row.algorithm, row.protocol, row.channels) for row in result.rows] == [("RING", "LL", 1)] * 6
    assert {(row.transport, row.host_staged) for row in result.rows} == {("P2P/CUMEM", False)}
    assert {(row.limit_gb_s, row.note) for row in result.rows} == {(450, None)}
    assert [row.limit_percent for row in result.rows] == pytest.approx([row.reached_gb_s / 4.5 for row in result.rows])
    small = {row.measurement for row in result.evidence.values()}
    assert small == {"absent"}, "so few bytes say nothing"
    result = run(monkeypatch, Job(direct, over_nvlink))
    assert set(result.evidence) == RING
    for row in result.evidence.values():
        assert (row.capability, row.selection, row.measurement, row.correctness) == ("present",) * 4
        assert (row.path_class, row.limit_gb_s, row.conclusion, row.confidence) == ("NV18", 450, "direct", "proven")
    (verdict,) = result.fallback
    assert set(verdict.pairs) == RING
    assert "algorithms unknown" not in verdict.how
    assert (result.report.verdict, result.report.complete) == (Verdict.PASS, True)
    assert result.report.findings == ()


def test_a_real_machine_is_direct_and_a_setting_is_named_as_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts are of eight H200s, and the logs of four."""
    (machine,), (process,) = read_recording(ROOT / "tests" / "machines" / "h200x8-vm")
    healthy = run(monkeypatch, Job(direct, over_nvlink, machine=machine, process=process))
    assert healthy.report.verdict is Verdict.PASS
    assert [(row.conclusion, row.confidence) for row in healthy.fallback] == [("direct", "proven")]
    assert {row.limit_gb_s for row in healthy.rows} == {450}
    disabled = replace(process, environment={**process.environment, "NCCL_P2P_DISABLE": "1"})
    settings = {"NCCL_P2P_DISABLE": ("1",)}
    job = Job(shared_memory, over_pcie, settings=settings, machine=machine, process=disabled)
    (verdict,) = run(monkeypatch, job).fallback
    assert (verdict.conclusion, verdict.cause) == ("staged", "nccl-p2p-disabled")


def test_an_operation_above_its_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "busbw_limit", lambda *_: Limit(1e-6, "links of rank 0"))
    result = run(monkeypatch, Job(direct, over_nvlink))
    assert {row.verdict for row in result.rows} == {Verdict.ERROR}
    (finding,) = result.report.findings
    assert (finding.id, finding.severity, finding.subject) == (
        "above-limit",
        Verdict.ERROR,
        "allreduce of 256K on 4 ranks",
    )
    assert finding.expected.startswith("at most 1 kB/s, the limit of the ranks' links and NICs")
    assert result.report.verdict is Verdict.ERROR


@pytest.mark.parametrize("log", ["two-hosts-of-two", "four-ranks-one-gpu"])
def test_ranks_of_one_gpu_are_healthy_with_peer_access_or_requested_sockets(
    monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    """Facts and logs are of one H100 whose driver hides its NVLinks."""
    (machine,), (process,) = read_recording(ROOT / "tests" / "machines" / "h100x1-vm")
    split = log == "two-hosts-of-two"
    hosts = [{"NCCL_HOSTID": f"h{rank // 2}"} if split else {} for rank in range(RANKS)]
    job = Job(
        lambda rank: FakeLog(recorded(log, rank, "h100x1")),
        settings={"NCCL_HOSTID": ("h0", "h1")} if split else {},
        machine=machine,
        process=replace(process, mpi=MpiFacts(version="Open MPI 4.1.6", cuda_aware=False)),
        gpus=(0,) * RANKS,
        environments=hosts,
    )
    result = run(monkeypatch, job)
    assert Topology(machine).snapshot.driver_settings.nvlink_disabled
    first = [cause for cause in causes(result) if cause[2] is None]
    assert first == ([("nccl-hostid", 2, None)] if split else []), "no NVLink, and what MPI cannot do"
    across = [row for row in result.fallback if row.conclusion == "staged"]
    assert [(row.transport, row.verdict, row.cause, row.limit_gb_s, row.times_slower) for row in across] == [
        ("NET/Socket/0", "SKIP", "nccl-hostid", None, None)
    ][: len(across)]
    assert {row.capability_seen for row in result.evidence.values()} == {"both ranks use the same GPU"}
    assert {row.limit_gb_s for row in result.rows} == {None}
    assert result.report.verdict is Verdict.PASS


def causes(result: Result) -> list[tuple[str, int, str | None]]:
    return [(row.id, row.paths, row.implied_by) for row in result.report.rows(CauseRow)]


@pytest.mark.parametrize(
    ("names", "cause"),
    [(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "nccl-shm-disabled"), (("NCCL_HOSTID",), "nccl-hostid")],
)
def test_a_network_that_a_setting_caused_is_its_consequence(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], cause: str
) -> None:
    settings = dict.fromkeys(names, ("1",))
    result = run(monkeypatch, Job(sockets, over_pcie, settings))
    assert causes(result) == [(cause, len(RING), None), ("nccl-net-in-node", len(RING), cause)]
    assert all(name in str(result.fallback[0].cause_seen) for name in names)


def test_separate_containers_are_the_cause_of_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, Job(sockets, over_pcie, shm_devices=(41, 42, 43, 44)))
    (verdict,) = result.fallback
    assert (verdict.transport, verdict.cause) == ("NET/Socket/0", "shm-not-shared")
    assert {(row.transport, row.host_staged) for row in result.rows} == {("NET/Socket/0", True)}


def test_paths_between_nodes_without_rdma_are_staged_by_design(monkeypatch: pytest.MonkeyPatch) -> None:
    def log(rank: int) -> FakeLog:
        peer = (rank + 1) % RANKS
        via = "NET/Socket/0" if rank % 2 else "P2P/CUMEM"
        end = "[send] " if rank % 2 else ""
        return FakeLog(said(f"Channel 00/0 : {rank}[0] -> {peer}[0] {end}via {via}"))

    job = Job(log, over_nvlink, nodes=(0, 0, 1, 1))
    result = run(monkeypatch, job)
    assert {pair: row.verdict for pair, row in result.evidence.items()} == {
        **dict.fromkeys(("0 → 1", "2 → 3"), "PASS"),
        **dict.fromkeys(("1 → 2", "3 → 0"), "SKIP"),
    }
    assert result.evidence["0 → 1"].bandwidth_gb_s is None, "the network held it up"
    assert result.evidence["0 → 1"].measurement == "present"
    assert result.evidence["1 → 2"].path_class == "NET"
    assert result.report.verdict is Verdict.PASS
    assert [finding.severity for finding in result.report.findings] == [Verdict.SKIP]


def test_columns_without_a_log_are_empty_and_the_reason_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(rank: int) -> FakeLog:
        return FakeLog(no_log="NCCL_DEBUG_SUBSYS=COLL leaves INIT out" if rank == 2 else "")

    result = run(monkeypatch, Job(silent))
    assert {(row.transport, row.algorithm, row.host_staged) for row in result.rows} == {(None, None, None)}
    assert {(row.limit_gb_s, row.note) for row in result.rows} == {
        (None, "the algorithm is unknown: NCCL's log names none")
    }
    (verdict,) = result.fallback
    assert verdict.conclusion == "unknown"
    assert "rank 2: NCCL_DEBUG_SUBSYS=COLL leaves INIT out" in verdict.how
    assert [(finding.id, finding.severity) for finding in result.report.findings] == [("path-unknown", Verdict.WARN)]


def test_an_unknown_limit_keeps_the_note_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(run(monkeypatch, Job(lambda rank: FakeLog(recorded("tuning", rank)))).rows[0], note="±2 %")
    assert judge.add_limit(row, Limit(None, "why")).note == "±2 %; why"
    assert judge.add_limit(replace(row, note=None), Limit(None, "why")).note == "why"
    assert judge.add_limit(row, Limit(400.0, "NVLinks")).note == "±2 %"


def test_a_single_rank_has_no_limit() -> None:
    request = request_for(ALLREDUCE)
    case = next(cases(request, 1))
    circumstances = Circumstances(wiring=Wiring([], {}), facts=[], settings={})
    choices = LoggedChoices(by_operation={operation_key(case): Choice(Used({}), None)})
    observations = PathObservations(
        choices=choices, expected_bytes=[(0.0, 0.0)], traffic=[Traffic()], circumstances=circumstances
    )
    row = judge.PathJudge(request, observations).row(case, replace(ROW, setting=None, limit_gb_s=None, note=None), [0])
    assert (row.limit_gb_s, row.note) == (None, "one rank: there is no communication")


def test_a_row_has_the_choice_of_its_setting() -> None:
    request = request_for(ALLREDUCE)
    case = next(cases(request, 1))

    def chosen(algorithm: str) -> LoggedChoices:
        tuning = Tuning("AllReduce", case.size_bytes, algorithm, "SIMPLE", 2)
        return LoggedChoices(by_operation={operation_key(case): Choice(Used({}), tuning)})

    observations = PathObservations(
        choices=chosen("RING"),
        choices_by_setting={"tree": chosen("TREE"), "ring": chosen("TREE")},
        expected_bytes=[(0.0, 0.0)],
        traffic=[Traffic()],
        circumstances=Circumstances(wiring=Wiring([], {}), facts=[], settings={}),
    )
    path_judge = judge.PathJudge(request, observations)
    found = {
        setting: path_judge.row(
            replace(case, setting=setting), replace(ROW, setting=setting, algorithm=None, protocol=None, note=None), [0]
        )
        for setting in (None, "tree", "ring", "again", "pat")
    }
    assert [row.algorithm for row in found.values()] == ["RING", "TREE", "TREE", "RING", None]
    assert str(found["ring"].note).startswith("ring was requested, but NCCL used tree")
    assert str(found["tree"].note).startswith("one rank")


def test_counters_decide_without_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, Job(lambda _rank: FakeLog(no_log="why"), over_nvlink))
    assert len(result.evidence) == RANKS * (RANKS - 1)
    (verdict,) = result.fallback
    assert (verdict.conclusion, verdict.confidence) == ("direct", "likely")
    assert "rank 0: why" in verdict.how
    staged = run(monkeypatch, Job(lambda _rank: FakeLog(no_log="why"), over_pcie))
    assert [row.conclusion for row in staged.fallback] == ["staged"]


@pytest.mark.parametrize("counters", [lambda _rank: FakeCounters(), over_pcie], ids=["no counters", "over PCIe"])
def test_a_library_that_always_stages_is_staged_by_design(
    monkeypatch: pytest.MonkeyPatch, counters: Callable[[int], FakeCounters]
) -> None:
    result = run(monkeypatch, Job(lambda _rank: FakeLog(no_log="why"), counters, by_design="Gloo copies"))
    (verdict,) = result.fallback
    assert (verdict.conclusion, verdict.verdict, verdict.cause_seen) == ("staged", "SKIP", "Gloo copies")
    assert {row.selection_seen for row in result.evidence.values()} == {"Gloo copies"}
    assert result.report.verdict is Verdict.PASS


def test_ranks_of_one_gpu_need_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wiring, "share_gpu", lambda _self, _pair: True)
    result = run(monkeypatch, Job(lambda _rank: FakeLog(no_log="why")))
    assert list(result.fallback) == []
    assert result.report.verdict is Verdict.PASS
    assert [finding.id for finding in result.report.findings] == []


def test_a_rank_without_connections_in_the_log_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_third(rank: int) -> FakeLog:
        lines = [line for line in recorded("tuning", rank) if b" via " not in line or rank != 2]
        return FakeLog([*lines, *said("Ring 00 : 3 -> 0 -> 1", "Ring 00 : 1 -> 2 -> 3")])

    result = run(monkeypatch, Job(without_third), sizes=(1024,))
    assert {row.host_staged for row in result.rows} == {None}
    assert result.evidence["2 → 3"].conclusion == "unknown"
    assert result.evidence["0 → 1"].conclusion == "direct"
    assert [finding.id for finding in result.report.findings] == ["path-unknown"]


def test_a_rank_without_a_logged_peer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_third(rank: int) -> FakeLog:
        return FakeLog([line for line in recorded("normal", rank) if b" via " not in line or rank != 2])

    result = run(monkeypatch, Job(without_third, over_nvlink))
    assert {row.host_staged for row in result.rows} == {None}
    assert [(row.conclusion, row.pairs) for row in result.fallback] == [
        ("unknown", ("2 → ?",)),
        ("direct", ("0 → 1", "1 → 2", "3 → 0")),
    ]
    assert [finding.id for finding in result.report.findings] == ["path-unknown"]
    assert run(monkeypatch, Job(without_third, over_nvlink)).report.verdict is Verdict.WARN


def test_an_unknown_transport_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def strange(rank: int) -> FakeLog:
        return FakeLog(said(f"Channel 00/0 : {rank}[0] -> {(rank + 1) % RANKS}[0] via WARP/9"))

    result = run(monkeypatch, Job(strange))
    assert {(row.transport, row.host_staged) for row in result.rows} == {("WARP/9", None)}
    assert {row.selection for row in result.evidence.values()} == {"absent"}
    assert "NCCL chose WARP/9, which gpubench does not know" in result.fallback[0].how
    assert [(finding.id, finding.severity) for finding in result.report.findings] == [("path-unknown", Verdict.WARN)]
    assert run(monkeypatch, Job(strange, over_nvlink)).fallback[0].conclusion == "direct"


def test_data_that_nobody_checked_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, Job(direct, over_nvlink, check=False))
    assert {row.correctness for row in result.evidence.values()} == {"absent"}
    assert [(row.conclusion, row.confidence) for row in result.fallback] == [("direct", "likely")]
    assert result.report.verdict is Verdict.SKIP


def test_a_counter_that_contradicts_the_log_is_a_dispute(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, Job(direct, over_pcie))
    assert [row.conclusion for row in result.fallback] == ["disputed"]
    assert result.report.verdict is Verdict.WARN


def test_foreign_traffic_is_no_evidence_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process copied from GPU 0 to GPU 1 of four H200s, whose counters advanced by 16 times our bytes."""
    counters = {0: FakeCounters(nvlink=8 * COUNTED), 1: FakeCounters(nvlink=8 * COUNTED)}
    result = run(monkeypatch, Job(direct, lambda rank: counters.get(rank) or over_nvlink(rank)))
    assert {pair: row.measurement for pair, row in result.evidence.items()} == {
        **dict.fromkeys(RING - {"2 → 3"}, "absent"),
        "2 → 3": "present",
    }
    assert "16 times the bytes of this job: another program" in result.evidence["0 → 1"].measurement_seen
    assert result.evidence["0 → 1"].confidence == "likely"
    assert causes(result) == [("foreign-nvlink-traffic", 0, None)]


def test_traffic_while_the_job_is_idle_is_no_evidence() -> None:
    used = Used({(0, 1): (Transport("P2P/CUMEM", TransportKind.P2P),)})
    ours = Carried(nvlink_bytes=2 * SIZE, nvlink_share=2.0)
    observed = PathObservations(
        choices=LoggedChoices({(DataType.FLOAT32, None, SIZE): Choice(used, None)}),
        expected_bytes=[(1.0, 1.0)] * RANKS,
        traffic=[Traffic(ours, ours)] * RANKS,
        circumstances=Job(direct).circumstances(),
    )
    busy = IdleGpu(rates=LinkRates(nvlink_sent=371.0))
    for idle, state in (((), "present"), ((busy, *[IdleGpu()] * 3), "absent")):
        (row,) = evidence_of(conclude(observed.add_idle(idle), RowObservations()))
        assert row.measurement == state


def test_wrong_data_outweigh_all_other_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrap(backend: Backend, rank: int) -> Backend:
        return faults.FaultyBackend(backend, faults.one_bit, timed=4) if rank == 1 else backend

    result = run(monkeypatch, Job(direct, over_nvlink, wrap=wrap))
    assert result.evidence["0 → 1"].conclusion == "wrong data"
    assert result.evidence["1 → 2"].conclusion == "direct"
    assert result.report.verdict is Verdict.FAIL
    assert [finding.id for finding in result.report.findings] == ["wrong-data"]


@pytest.mark.parametrize("name", ["alltoall", "gather", "scatter", "sendrecv"])
def test_sends_and_receives_have_the_transports_of_their_pairs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    collective = next(each for each in COLLECTIVES if each.name == name)

    def log(rank: int) -> FakeLog:
        peers = [peer for peer in range(RANKS) if peer != rank]
        return FakeLog(said(*(f"Channel 00/1 : {rank}[{rank}] -> {peer}[{peer}] via P2P/CUMEM" for peer in peers)))

    result = run(monkeypatch, Job(log, over_nvlink), collective)
    pairs = {"alltoall": 12, "gather": 3, "scatter": 3, "sendrecv": 4}
    assert len(result.evidence) == pairs[name]
    assert {row.conclusion for row in result.evidence.values()} == {"direct"}
    assert {row.transport for row in result.rows} == {"P2P/CUMEM"}
    assert {(row.algorithm, row.limit_gb_s) for row in result.rows} == {(None, 450)}


@pytest.mark.parametrize(("name", "unused"), [("broadcast", "3 → 0"), ("reduce", "0 → 1")])
def test_an_unused_side_of_a_ring_is_no_path(monkeypatch: pytest.MonkeyPatch, name: str, unused: str) -> None:
    collective = next(each for each in COLLECTIVES if each.name == name)
    result = run(monkeypatch, Job(direct, over_nvlink), collective)
    assert set(result.evidence) == RING - {unused}
    assert [(row.conclusion, row.confidence, row.count) for row in result.fallback] == [("direct", "proven", 3)]


def test_counters_do_not_separate_two_kinds_of_paths_at_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    collective = next(each for each in COLLECTIVES if each.name == "alltoall")

    def log(rank: int) -> FakeLog:
        peers = [peer for peer in range(RANKS) if peer != rank]
        vias = {peer: "SHM/direct" if {rank, peer} == {0, 1} else "P2P/CUMEM" for peer in peers}
        return FakeLog(said(*(f"Channel 00/1 : {rank}[0] -> {peer}[0] via {vias[peer]}" for peer in peers)))

    result = run(monkeypatch, Job(log, over_nvlink), collective)
    assert result.evidence["0 → 1"].measurement == "absent"
    assert "several kinds" in result.evidence["0 → 1"].measurement_seen
    assert result.evidence["2 → 3"].measurement == "present"
    assert [(row.conclusion, row.confidence, row.count) for row in result.fallback] == [
        ("staged", "likely", 2),
        ("direct", "likely", 10),
    ]


@pytest.mark.parametrize("expected_bytes", [((1.0, 0.0), (0.0, 0.1)), ((0.1, 0.0), (0.0, 1.0))])
def test_the_end_with_more_traffic_decides_the_bandwidth(
    expected_bytes: tuple[tuple[float, float], ...],
) -> None:
    used = Used({(0, 1): (Transport("P2P/CUMEM", TransportKind.P2P),)})
    choices = LoggedChoices({(DataType.FLOAT32, None, SIZE): Choice(used, None)})
    observed = PathObservations(
        choices=choices,
        expected_bytes=[*expected_bytes, (0.0, 0.0), (0.0, 0.0)],
        traffic=[Traffic()] * RANKS,
        circumstances=Job(direct).circumstances(),
    )
    rows = RowObservations()
    rows.add(replace(ROW, size_bytes=SIZE, algbw_gb_s=100.0, busbw_gb_s=100.0), [0] * RANKS)
    (row,) = evidence_of(conclude(observed, rows))
    assert "100 GB/s measured" in str(row.to_record()), "more than host memory carries"


@pytest.mark.parametrize(
    ("fault", "cause", "evidence"),
    [("gpu2:nvlink=0", "nvlinks-all-down", "18 of 18 NVLinks down"), ("", "staged-despite-grant", AS_SLOW_AS_STAGED)],
)
def test_a_simulated_path_is_explained_by_facts_or_by_copies(fault: str, cause: str, evidence: str) -> None:
    node = snapshots(parse_machine("hgx-h200-4"), [parse_fault(fault)] if fault else [])[0]
    gpus = Job(direct).identities
    outcome = simulated([(2, 1)], gpus, lambda _: Topology(node))
    section = outcome.sections["fallback"]
    assert isinstance(section, Table)
    (row,) = section.rows()
    assert isinstance(row, FallbackRow)
    assert list(row.pairs) == ["2 → 1"]
    assert (row.cause, evidence in str(row)) == (cause, True)


def test_without_an_algorithm_all_connections_count(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "TUNING is not among the NCCL_DEBUG_SUBSYS that are set"
    result = run(monkeypatch, Job(lambda rank: FakeLog(recorded("normal", rank), no_tuning=reason), over_nvlink))
    assert result.fallback[0].how.endswith(f"; algorithms unknown: {reason}")
    assert {(row.algorithm, row.transport) for row in result.rows} == {(None, "P2P/CUMEM")}
    assert set(result.evidence) == RING
