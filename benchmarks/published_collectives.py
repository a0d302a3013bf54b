"""Hold what is expected of collectives against what others published of their machines.

`tests/published/collectives.csv` has figures and their sources. Rows of `use` tuned were seen when constants, or how
far from them FAIL is, were chosen; the held-out ones were not. `state` is what the source says of the machine: healthy,
questioned (somebody asks whether it is), ill, or threshold: somebody fails machines below. NICs with an e are plain
Ethernet. With a question mark the table does not say which there are. Rows of one node have
none. Run as `python -m benchmarks.published_collectives`.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from gpubench.collectives.expected import time_from_network, time_from_profile
from gpubench.collectives.registry import collective_named
from gpubench.model.paths.wiring import NodeNetwork, internode_limit
from gpubench.model.results.report import CollectiveRow, Verified
from gpubench.model.results.speed import ExpectedTime
from gpubench.model.terms.operation import DataType, Placement, ReduceOp
from gpubench.model.terms.statistics import Mode
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, format_size
from gpubench.model.terms.verdict import Origin, Verdict, worst_verdict
from gpubench.profiles import load, profile_names

FIGURES = Path(__file__).parents[1] / "tests" / "published" / "collectives.csv"
LARGE_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Published:
    """One published figure, with its row and what is expected of it."""

    use: str
    state: str
    source: str
    profile: str
    row: CollectiveRow
    expected: ExpectedTime
    limit_gb_s: float

    @property
    def predicted_gb_s(self) -> float:
        """The expected busbw."""
        return self.row.reached_gb_s * self.row.time_us / self.expected.time_us

    @property
    def ratio(self) -> float:
        """Predicted over published busbw."""
        return self.predicted_gb_s / self.row.reached_gb_s

    @property
    def is_near(self) -> bool:
        """True within 25 % from 128 MiB on, and within a factor of 2 below."""
        most = 1.25 if self.row.size_bytes >= LARGE_BYTES else 2.0
        return 1 / most <= self.ratio <= most

    def verdict(self, slower: float = 1.0) -> Verdict:
        """The verdict on the figure, or on that of a machine so many times slower; SKIP if the expectation is."""
        row = replace(self.row, time_us=slower * self.row.time_us)
        return Verdict.SKIP if self.expected.doubt(row) else self.expected.verdict(row)


@cache
def read() -> tuple[Published, ...]:
    """All figures of machines that a profile knows."""
    known = profile_names()
    with FIGURES.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["profile"] in known]
    return tuple(map(_published, lines))


def _published(line: dict[str, str]) -> Published:
    nodes, local, size = (int(line[key]) for key in ("nodes", "ranks_per_node", "size_bytes"))
    count, rate = map(int, line["nics_gbit_s"].rstrip("e?").split("x"))
    collective, busbw = collective_named(line["collective"]), float(line["busbw_gb_s"])
    ranks = nodes * local
    factor = collective.busbw_factor(ranks)
    time_us = size * factor / busbw / BYTES_PER_GB * MICROSECONDS_PER_SECOND
    row = CollectiveRow(
        collective=collective.name,
        backend="nccl",
        origin=Origin.RECORDED,
        ranks=ranks,
        nodes=nodes,
        size_bytes=size,
        count=size // 4,
        dtype=DataType.FLOAT32,
        op=ReduceOp.SUM,
        root=None,
        placement=Placement.OUT_OF_PLACE,
        mode=Mode.THROUGHPUT,
        graph=0,
        iterations=20,
        time_us=time_us,
        time_us_fastest_rank=None,
        time_us_slowest_rank=None,
        slowest_rank=None,
        algbw_gb_s=busbw / factor,
        busbw_gb_s=busbw,
        wrong=None,
        verified=Verified.NO,
        verdict=None,
        algorithm=line["algorithm"] or None,
    )
    profile = load(line["profile"]).split_into_domains(nodes)
    joined = 1 if profile.domain is None else min(nodes, profile.domain.nodes)
    if nodes == 1:
        own = time_from_profile(profile, collective, row, nccl=None)
        assert own is not None, line
        is_hopper = float(profile.gpu.compute_capability) >= 9 and profile.nvlink is not None
        has_nvls = is_hopper and bool(profile.nvlink and profile.nvlink.switches) and collective.name == "allreduce"
        in_switches = 2 * (ranks - 1) / (ranks + 1) if has_nvls else 1
        most = profile.carried_gb_s(collective.name, ranks) * max(1.0, in_switches)
        return Published(line["use"], line["state"], line["source"], profile.name, row, own, most)
    rdma = not line["nics_gbit_s"].endswith("e")
    network = NodeNetwork(nodes // joined, ranks, joined * count * rate / 8, rate / 8, rdma)
    expected = time_from_network(collective, row, network, profile, nics_known=not line["nics_gbit_s"].endswith("?"))
    if expected is None:
        raise ValueError(f"{line['source']}: nothing is expected")
    # In one domain no NIC is a limit, and NVLS reduces in the switches: 2(n-1)/(n+1) times the NVLinks.
    inside = profile.link_gb_s * 2 * (ranks - 1) / (ranks + 1)
    limit = inside if network.nodes == 1 else internode_limit(row.algorithm, collective, network).gb_s or 0.0
    return Published(line["use"], line["state"], line["source"], profile.name, row, expected, limit)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far predictions are off, and what verdicts healthy machines and those of half their speed get.

    Verdicts are of tables, the gravest of their rows each, as the last line of a report tells it.
    """

    near: int
    figures: int
    false_fails: int
    false_warnings: int
    halves_seen: int
    tables: int

    @classmethod
    def of(cls, figures: Sequence[Published]) -> "Bounds":
        """Over the healthy figures of these."""
        healthy = [figure for figure in figures if figure.state == "healthy"]
        tables: dict[str, list[Published]] = {}
        for each in healthy:
            tables.setdefault(each.source, []).append(each)
        verdicts = [worst_verdict(each.verdict() for each in table) for table in tables.values()]
        halves = [worst_verdict(each.verdict(slower=2.0) for each in table) for table in tables.values()]
        return cls(
            near=sum(each.is_near for each in healthy),
            figures=len(healthy),
            false_fails=verdicts.count(Verdict.FAIL),
            false_warnings=verdicts.count(Verdict.WARN),
            halves_seen=len(halves) - halves.count(Verdict.PASS),
            tables=len(tables),
        )

    def __str__(self) -> str:
        return (
            f"{self.near} of {self.figures} figures within 25 % from 128 MiB on and a factor of 2 below; "
            f"{self.tables} tables: {self.false_fails} false FAIL, {self.false_warnings} WARN; "
            f"at half the speed {self.halves_seen} not PASS"
        )


HOST_STAGED_GB_S = 28.4  # All-reduce of 2 H200s through host memory, the fastest that was seen


@dataclass(frozen=True, slots=True)
class KindRates:
    """Tables of healthy machines of one kind, and how many get which verdict: as they are, and made ill."""

    tables: int
    failed: int
    warned: int
    unjudged: int
    halves_passed: int
    staged_passed: int | None

    @classmethod
    def of(cls, figures: Sequence[Published]) -> "KindRates":
        """Of the healthy figures of one kind. Only inside a node with NVLinks is a table made host-staged."""
        tables: dict[str, list[Published]] = {}
        for figure in figures:
            tables.setdefault(figure.source, []).append(figure)
        own = [_of_table(table, lambda _each: 1.0) for table in tables.values()]
        halves = [_of_table(table, lambda _each: 2.0) for table in tables.values()]
        is_staged = all(figure.row.nodes == 1 and load(figure.profile).nvlink is not None for figure in figures)
        staged = [
            _of_table(table, lambda each: max(1.0, each.row.reached_gb_s / HOST_STAGED_GB_S))
            for table in tables.values()
            if is_staged
        ]
        return cls(
            tables=len(tables),
            failed=own.count(Verdict.FAIL),
            warned=own.count(Verdict.WARN),
            unjudged=own.count(Verdict.SKIP),
            halves_passed=halves.count(Verdict.PASS),
            staged_passed=staged.count(Verdict.PASS) if is_staged else None,
        )


def _of_table(table: Sequence[Published], slower: Callable[[Published], float]) -> Verdict:
    """The gravest verdict of the rows; SKIP if nothing is wrong and the largest size is not judged."""
    found = worst_verdict(each.verdict(slower(each)) for each in table)
    largest = max(table, key=lambda each: each.row.size_bytes)
    return largest.verdict(slower(largest)) if found is Verdict.PASS else found


def rates_by_kind(use: str) -> dict[tuple[str, bool], KindRates]:
    """The rates of one part of the tables, by profile and whether several nodes are joined."""
    kinds: dict[tuple[str, bool], list[Published]] = {}
    for each in read():
        if each.use == use and each.state == "healthy":
            kinds.setdefault((each.profile, each.row.nodes > 1), []).append(each)
    return {kind: KindRates.of(figures) for kind, figures in sorted(kinds.items())}


def main() -> None:
    """Print every figure with its prediction, and the bounds."""
    figures = read()
    print("use       state       size  published  predicted  limit  off    verdict  source")
    for figure in figures:
        row = figure.row
        print(
            f"{figure.use:9} {figure.state:10} {format_size(row.size_bytes):>5} {row.busbw_gb_s:10.4g} "
            f"{figure.predicted_gb_s:10.4g} {figure.limit_gb_s:6.4g} {figure.ratio - 1:+5.0%}  {figure.verdict():8} "
            f"{row.collective} {row.algorithm or ''} {figure.source}"
        )
    for use in ("tuned", "held-out"):
        print(f"{use}: {Bounds.of([figure for figure in figures if figure.use == use])}")
        print("| machine | tables | FAIL | WARN | not judged | half PASS | host-staged PASS |")
        print("|---|---|---|---|---|---|---|")
        for (profile, is_joined), rates in rates_by_kind(use).items():
            staged = "–" if rates.staged_passed is None else rates.staged_passed
            counts = f"{rates.tables} | {rates.failed} | {rates.warned} | {rates.unjudged} | {rates.halves_passed}"
            print(f"| {profile}{', several nodes' if is_joined else ''} | {counts} | {staged} |")
    ill: dict[str, list[Published]] = {}
    for figure in figures:
        if figure.state == "ill":
            ill.setdefault(figure.source, []).append(figure)
    seen = [worst_verdict(each.verdict() for each in table) is not Verdict.PASS for table in ill.values()]
    print(f"ill: {sum(seen)} of {len(seen)} tables not PASS")


if __name__ == "__main__":
    main()
