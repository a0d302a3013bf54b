"""Variants of a sweep on threads with a fake NCCL."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest

from gpubench.backends.cuda import open_device
from gpubench.backends.nccl.backend import NcclBackend
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.collectives.record import Hierarchy, SweepRequest
from gpubench.collectives.registry import COLLECTIVES
from gpubench.machine.nvml import Driver
from gpubench.measure.collective.cases import Case
from gpubench.measure.collective.sweep import Issue, Sweep
from gpubench.measure.collective.variants import SweepVariant, measure_variants
from gpubench.model.results.report import CollectiveRow, Report, Table
from gpubench.model.terms.operation import DataType, NumberKind, ReduceOp, TwoLevels
from gpubench.model.terms.statistics import Sampling
from gpubench.model.terms.verdict import Verdict
from gpubench.ports.backend import Launch
from tests.fakes import cupy_on_numpy
from tests.fakes.ranks import ThreadGroup, run_ranks
from tests.measure.collective.test_sweep import ReceivedRows, identity, request_for

REDUCESCATTER = next(collective for collective in COLLECTIVES if collective.name == "reducescatter")
EXACT = tuple(op for op in ReduceOp if op is not ReduceOp.AVG)
Others = Callable[[SweepRequest, ThreadGroup, NcclBackend, NcclLibrary], Sequence[SweepVariant]]


def run(
    monkeypatch: pytest.MonkeyPatch, ranks: int, request: SweepRequest, others: Others
) -> tuple[Report, list[CollectiveRow], cupy_on_numpy.Nccl]:
    nccl = cupy_on_numpy.Nccl(ranks)
    runtime = cupy_on_numpy.Runtime(ranks)
    cupy_on_numpy.install(monkeypatch, runtime, nccl)

    def body(group: ThreadGroup) -> tuple[Report, list[CollectiveRow]]:
        library = NcclLibrary()
        backend = NcclBackend(group, open_device(group.rank, ranks, "n0", Driver(version="580.1")), library)
        ways = [SweepVariant(setting=None, backend=backend), *others(request, group, backend, library)]
        recorder = ReceivedRows()
        identities = [identity(rank) for rank in range(ranks)]
        report = measure_variants(request, group, ways, identities, recorder)
        backend.close()
        return report, recorder.rows

    results = run_ranks(ranks, body)
    assert not runtime.allocations
    return *results[0], nccl


def variant_of(
    algorithm: str, request: SweepRequest, group: ThreadGroup, backend: NcclBackend, library: NcclLibrary
) -> SweepVariant:
    """Return a variant like `VariantMaker`, but without the environment, which threads share."""
    opened: list[Any] = []

    def open_() -> Issue:
        opened.append(backend.open(group))
        cast("Any", backend)._communicators[id(opened[-1])]._made.algorithm = algorithm
        return partial(request.collective.issue, opened[-1])

    return SweepVariant(
        setting=algorithm,
        backend=backend,
        open=open_,
        drop=lambda _issue: backend.drop(opened.pop()),
        refusals=(library.error,),
    )


def both(
    request: SweepRequest, group: ThreadGroup, backend: NcclBackend, library: NcclLibrary
) -> Sequence[SweepVariant]:
    return [variant_of(name, request, group, backend, library) for name in ("ring", "tree")]


def records(report: Report, section: str) -> list[dict[str, Any]]:
    table = report.sections[section]
    assert isinstance(table, Table)
    return [row.to_record() for row in table.rows()]


def test_gpus_are_warmed_up_after_a_row_of_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[tuple[int, str]] = []
    wake_up = Sweep.wake_up

    def noted(sweep: Sweep, case: Case) -> None:
        worked.append((sweep.group.rank, case.label))
        wake_up(sweep, case)

    monkeypatch.setattr(Sweep, "wake_up", noted)

    def another(
        request: SweepRequest, group: ThreadGroup, backend: NcclBackend, library: NcclLibrary
    ) -> Sequence[SweepVariant]:
        return [SweepVariant(setting=None, backend=NcclBackend(group, backend._device, library))]

    _, rows, _ = run(monkeypatch, 2, request_for(ALLREDUCE), another)
    of_first = [label for rank, label in worked if rank == 0]
    assert len(of_first) == 1 + 2 * (len(rows) // 3)
    worked.clear()
    run(monkeypatch, 2, request_for(ALLREDUCE), both)
    assert len(worked) == 2, "settings of one backend leave no GPU at rest"


def test_a_single_variant_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(*arguments: Any) -> Sequence[SweepVariant]:
        return [variant_of("tree", *arguments)]

    report, rows, _ = run(monkeypatch, 2, request_for(REDUCESCATTER), tree)
    assert {row.setting for row in rows} == {None}
    assert records(report, "winners") == []
    assert [record["setting"] for record in records(report, "refused")] == ["tree"]


def test_a_refusal_on_one_rank_is_a_refusal_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class SaysNoError(Exception):
        pass

    def refusing(
        request: SweepRequest, group: ThreadGroup, backend: NcclBackend, _library: NcclLibrary
    ) -> list[SweepVariant]:
        def open_() -> Issue:
            if group.rank == 1:
                raise SaysNoError("no memory")
            return partial(request.collective.issue, backend.calls)

        return [SweepVariant(setting="ring", backend=backend, open=open_, refusals=(SaysNoError,))]

    report, rows, _ = run(monkeypatch, 3, request_for(ALLREDUCE), refusing)
    assert {row.setting for row in rows} == {None}
    assert [record["reason"] for record in records(report, "refused")] == ["rank 1: no memory"]
    assert records(report, "refused")[0]["size_bytes"] is None


def test_a_variant_with_wrong_data_fails_and_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(
        request: SweepRequest, _group: ThreadGroup, backend: NcclBackend, _library: NcclLibrary
    ) -> list[SweepVariant]:
        def nothing(call: object) -> Launch:
            return backend.chain([])

        return [SweepVariant(setting="ring", backend=backend, open=lambda: nothing)]

    report, rows, _ = run(monkeypatch, 2, request_for(ALLREDUCE), idle)
    assert report.verdict is Verdict.FAIL
    assert all(bool(row.wrong) == (row.setting == "ring") for row in rows)
    assert records(report, "winners") == []


def hierarchical(nodes: str) -> Others:
    def make(
        _request: SweepRequest, group: ThreadGroup, backend: NcclBackend, _library: NcclLibrary
    ) -> list[SweepVariant]:
        levels = TwoLevels.of(nodes)
        node, place = levels.nodes[group.rank], levels.places[group.rank]

        def open_() -> Issue:
            inside, across = (backend.open(group.split(color, group.rank)) for color in (node, place))
            return Hierarchy(backend.calls, inside, across, place, levels.ranks_per_node, backend.chain).all_reduce

        def fits(case: Any) -> bool:
            return Hierarchy.fits(case.layout.count, case.dtype, levels.ranks_per_node)

        return [SweepVariant(setting="hierarchical", backend=backend, open=open_, fits=fits)]

    return make


FLOATS = tuple(each for each in DataType if each.kind is NumberKind.FLOAT)


@pytest.mark.parametrize(
    ("nodes", "dtypes", "ops"),
    [
        ("aabb", tuple(DataType), (ReduceOp.SUM,)),
        ("aabb", FLOATS, (ReduceOp.AVG,)),
        ("abcabc", (DataType.FLOAT32,), EXACT),
    ],
)
def test_a_hierarchical_all_reduce_is_right_in_every_type_and_reduction(
    monkeypatch: pytest.MonkeyPatch, nodes: str, dtypes: tuple[DataType, ...], ops: tuple[ReduceOp, ...]
) -> None:
    once = Sampling(iterations=1)
    request = request_for(ALLREDUCE, dtypes=dtypes, ops=ops, sizes=(24, 4096 + 8), sampling=once, warmup=0)
    report, rows, _ = run(monkeypatch, len(nodes), request, hierarchical(nodes))
    assert report.verdict is Verdict.PASS
    made = [row for row in rows if row.setting == "hierarchical"]
    assert len(made) == len(dtypes) * len(ops) * 2, "of 24 bytes there is no block for every rank"
    assert {(row.size_bytes, row.wrong) for row in made} == {(4104, 0)}
    flat = [row for row in rows if row.setting is None and row.size_bytes == 4104]
    factors = {round(row.reached_gb_s / row.algbw_gb_s, 9) for row in (*made, *flat)}
    assert len(factors) == 1, "that of an all-reduce over all ranks"


def test_a_hierarchical_all_reduce_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    report, rows, _ = run(monkeypatch, 4, request_for(ALLREDUCE, graph_replays=2), hierarchical("aabb"))
    assert report.verdict is Verdict.PASS
    assert {row.graph for row in rows if row.setting == "hierarchical"} == {2}
