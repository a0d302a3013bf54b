"""Findings of p2p and check on simulated machines with slower copies.

To add a kind of bad machine, add a line to ILL: the slower copies, the factor, and the finding with its severity.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from gpubench.conditions.circumstances import Facts
from gpubench.jobs import p2p as p2p_job
from gpubench.jobs.check import SimulatedMeasurer
from gpubench.jobs.plans import Depth
from gpubench.jobs.sources import parse_simulation
from gpubench.measure.check.health import judge
from gpubench.measure.p2p.request import sweep_series
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import Report
from gpubench.model.terms.operation import Engine, HostMemory
from gpubench.model.terms.verdict import Finding, Verdict
from gpubench.ports.copies import CopyStream
from gpubench.simulated import links
from gpubench.simulated.machine import parse_machine, snapshots

NVLINKED = ("hgx-h100-8/4", "hgx-h200-4", "hgx-a100-4", "gb200-nvl-4", "hgx-b200-8/4", "h100-nvl-2")
OVER_PCIE = ("l40s-8/4", "a10-4", "rtx-pro-6000-8/4")
PINNED, PAGEABLE = HostMemory.PINNED, HostMemory.PAGEABLE


@dataclass(frozen=True)
class Copied:
    """A timed copy. Its ends are positions of GPUs or kinds of host memory."""

    ends: tuple[Any, Any]
    streams: int
    reads: bool
    kernel: bool
    direct: bool
    size_bytes: int
    both: bool

    @property
    def with_host(self) -> bool:
        return any(isinstance(end, HostMemory) for end in self.ends)

    @property
    def one_way(self) -> bool:
        return self.direct and self.streams == 1 and not self.kernel and self.size_bytes > 2**20


Chosen = Callable[[Copied], bool]
KINDS: dict[str, Chosen] = {
    "reads of one pair": lambda copy: copy.one_way and copy.reads and copy.ends == (0, 1),
    "writes of one pair": lambda copy: copy.one_way and not copy.reads and copy.ends == (0, 1),
    "reads of GPU1": lambda copy: copy.one_way and copy.reads and 1 in copy.ends,
    "all reads": lambda copy: copy.one_way and copy.reads,
    "all writes": lambda copy: copy.one_way and not copy.reads,
    "both ways of one pair": lambda copy: copy.both and set(copy.ends) == {0, 1},
    "all both ways": lambda copy: copy.both,
    "kernels of GPU1": lambda copy: copy.direct and copy.kernel and 1 in copy.ends,
    "all kernels": lambda copy: copy.direct and copy.kernel,
    "latency of GPU1": lambda copy: copy.direct and copy.size_bytes == 16 and 1 in copy.ends,
    "all latencies": lambda copy: copy.direct and copy.size_bytes == 16,
    "patterns": lambda copy: copy.streams > 2,
    "pageable memory of GPU1": lambda copy: PAGEABLE in copy.ends and 1 in copy.ends,
    "pinned memory of GPU1": lambda copy: PINNED in copy.ends and 1 in copy.ends,
    "all pinned memory": lambda copy: PINNED in copy.ends,
    "sizes up to 16 MiB": lambda copy: copy.direct and copy.streams == 1 and copy.size_bytes <= 2**24,
    "sizes up to 16 MiB of GPU1": lambda copy: copy.direct and copy.size_bytes <= 2**24 and 1 in copy.ends,
}

SLOW, HOST = "p2p-slow", "host-copies-slow"
FAIL, WARN = Verdict.FAIL, Verdict.WARN
ILL: tuple[tuple[tuple[str, ...], str, float, str, Verdict], ...] = (
    (NVLINKED, "reads of one pair", 2, SLOW, FAIL),
    (NVLINKED, "writes of one pair", 2, SLOW, FAIL),
    (NVLINKED, "reads of GPU1", 2, SLOW, FAIL),
    (NVLINKED, "all reads", 2, SLOW, FAIL),
    (NVLINKED, "all writes", 2, SLOW, FAIL),
    (NVLINKED, "both ways of one pair", 2, SLOW, FAIL),
    (NVLINKED, "all both ways", 2, SLOW, FAIL),
    (NVLINKED, "kernels of GPU1", 2, SLOW, FAIL),
    (NVLINKED, "all kernels", 2, SLOW, FAIL),
    (NVLINKED[:-1], "latency of GPU1", 2, SLOW, WARN),
    (("hgx-h100-8/4", "hgx-h200-4", "hgx-a100-4"), "latency of GPU1", 10, SLOW, FAIL),
    (("hgx-h200-4",), "all latencies", 2, SLOW, WARN),
    (("hgx-h100-8/4", "h100-nvl-2"), "all latencies", 10, SLOW, FAIL),
    (NVLINKED[:-1], "patterns", 1.2, SLOW, WARN),
    (NVLINKED[:-1], "patterns", 3, SLOW, FAIL),
    (NVLINKED, "pageable memory of GPU1", 3, HOST, FAIL),
    (NVLINKED, "pinned memory of GPU1", 2, HOST, FAIL),
    (NVLINKED, "all pinned memory", 2, HOST, FAIL),
    (OVER_PCIE, "reads of one pair", 2, SLOW, FAIL),
    (OVER_PCIE, "reads of GPU1", 2, SLOW, FAIL),
    (("l40s-8/4", "a10-4"), "all reads", 2, SLOW, FAIL),
    (OVER_PCIE, "kernels of GPU1", 2, SLOW, FAIL),
    (OVER_PCIE, "both ways of one pair", 2, SLOW, FAIL),
    (OVER_PCIE, "all both ways", 2, SLOW, WARN),
    (OVER_PCIE, "latency of GPU1", 2, SLOW, WARN),
    (("l40s-8/4", "a10-4"), "all latencies", 10, "host-staged", FAIL),
    (OVER_PCIE, "pageable memory of GPU1", 3, HOST, FAIL),
    (OVER_PCIE, "pinned memory of GPU1", 2, HOST, FAIL),
    (OVER_PCIE, "all pinned memory", 2, HOST, FAIL),
)
LINES = [(name, *rest) for names, *rest in ILL for name in names]

HEALTHY = (*NVLINKED, *OVER_PCIE, "rtx-4090-2", "dgx-1-v100")
Slower = Callable[[Copied], float]


def test_every_kind_is_used() -> None:
    used = {kind for _, kind, *_ in ILL} | {kind for kind in KINDS if kind.startswith("sizes")}
    assert used == set(KINDS)


def edited(patch: pytest.MonkeyPatch, slower: Slower) -> None:
    real = links.SimulatedCopies._busiest

    def busiest(copies: links.SimulatedCopies, streams: Sequence[CopyStream]) -> float:
        source, destination = links._place(streams[0].source), links._place(streams[0].destination)
        back = len(streams) == 2 and links._place(streams[1].source) == destination
        direct = isinstance(source, int) and isinstance(destination, int) and copies._is_direct(source, destination)
        copy = Copied(
            ends=(source, destination),
            streams=len(streams),
            reads=streams[0].by == destination,
            kernel=streams[0].engine is Engine.SM,
            direct=direct,
            size_bytes=streams[0].size_bytes,
            both=back and direct,
        )
        return real(copies, streams) * slower(copy)

    patch.setattr(links.SimulatedCopies, "_busiest", busiest)


@dataclass(frozen=True)
class Said:
    p2p: list[Finding]
    check: list[Finding]

    @classmethod
    def of(cls, *reports: Report) -> "Said":
        found = ([finding for finding in report.findings if finding.severity is not Verdict.SKIP] for report in reports)
        return cls(*found)


def said(name: str, slower: Slower, seed: int = 1, noise: float | None = None) -> Said:
    machine = parse_machine(name)
    shown = [Topology(node) for node in snapshots(machine, (), seed)]
    reports: list[Report] = []
    real = p2p_job.measured

    def measured(*arguments: Any) -> Report:
        reports.append(real(*arguments))
        return reports[-1]

    with pytest.MonkeyPatch.context() as patch:
        edited(patch, slower)
        patch.setattr(p2p_job, "measured", measured)
        found = SimulatedMeasurer(parse_simulation(name, (), seed), shown, Depth.FULL, noise=noise).copies()
    return Said.of(reports[0], judge(Facts(shown, group_nodes(shown), (), [machine.profile], found)))


@pytest.mark.parametrize(
    ("name", "kind", "times", "id_", "severity"), LINES, ids=[f"{line[0]}, {line[1]} ×{line[2]}" for line in LINES]
)
def test_slow_copies_have_one_finding_in_p2p_and_in_check(
    name: str, kind: str, times: float, id_: str, severity: Verdict
) -> None:
    found = said(name, lambda copy: times if KINDS[kind](copy) else 1.0)
    assert {(each.id, each.severity) for each in found.p2p} == {(id_, severity)}
    assert {(each.id, each.severity) for each in found.check} == {(id_, severity)}
    assert {(each.subjects, each.seen) for each in found.p2p} == {(each.subjects, each.seen) for each in found.check}


@pytest.mark.parametrize("name", ["hgx-h100-8/4", "hgx-h200-4", "l40s-8/4"])
@pytest.mark.parametrize("kind", ["sizes up to 16 MiB", "sizes up to 16 MiB of GPU1"])
def test_slow_small_copies_of_a_sweep_are_found(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sweep_series((2**14, 2**20, 2**24))
    monkeypatch.setattr("gpubench.measure.p2p.request.default_series", lambda *_, **__: sizes)
    found = said(name, lambda copy: 3.0 if KINDS[kind](copy) else 1.0)
    assert {each.id for each in found.p2p} == {each.id for each in found.check} == {SLOW}


def by_copy(spread: float, seed: int, chosen: Chosen) -> Slower:
    def slower(copy: Copied) -> float:
        own = random.Random(f"{seed} {copy}").uniform(-spread, spread)
        return 1 + own if chosen(copy) else 1.0

    return slower


NOISE: dict[str, Callable[[int], Slower]] = {
    "host memory ±10 %": lambda seed: by_copy(0.1, seed, lambda copy: copy.with_host),
    "one GPU's host memory 11 % slower": lambda _: lambda copy: 1.12 if copy.with_host and 1 in copy.ends else 1.0,
    "pairs ±3 %": lambda seed: by_copy(0.03, seed, lambda copy: copy.one_way),
    "latencies ±20 %": lambda seed: by_copy(0.2, seed, lambda copy: copy.size_bytes == 16),
    "patterns 10 % slower": lambda _: lambda copy: 1.1 if copy.streams > 2 else 1.0,
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("kind", NOISE)
def test_healthy_noise_raises_no_alarm(name: str, kind: str) -> None:
    for seed in range(2):
        found = said(name, NOISE[kind](seed), seed)
        assert (found.p2p, found.check) == ([], [])


def test_samples_that_scatter_by_ten_percent_raise_no_alarm() -> None:
    for seed in range(3):
        found = said("hgx-h100-8/4", lambda copy: 1.11 if copy.with_host and 1 in copy.ends else 1.0, seed, noise=0.1)
        assert (found.p2p, found.check) == ([], [])


PCIE_GB_S = {"PIX": 26.4, "PXB": 26.0, "PHB": 25.5, "NODE": 22.5}


@pytest.mark.parametrize("across_gb_s", [19.5, 17.5, 12.0])
@pytest.mark.parametrize("name", ["l40s-8", "l4-8", "a10-4"])
def test_paths_of_several_kinds_raise_no_alarm(name: str, across_gb_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gb_s = PCIE_GB_S | {"SYS": across_gb_s}

    def direct(copies: links.SimulatedCopies, _stream: CopyStream, source: int, destination: int) -> float:
        return gb_s[copies._paths[source, destination]]

    monkeypatch.setattr(links.SimulatedCopies, "_direct_gb_s", direct)
    found = said(name, lambda _: 1.0)
    assert (found.p2p, found.check) == ([], [])
