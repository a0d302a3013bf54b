"""Compare the expected times of collectives with published measurements.

    python -m benchmarks.published_collectives

`tests/published/collectives.csv` has the figures and their sources. Rows of `use` tuned helped to choose constants and
the bound of FAIL; held-out rows did not. `state` is what the source says of the machine: healthy, questioned (somebody
asks whether it is healthy), ill, or threshold (somebody rejects machines below it). NICs with an e are plain Ethernet;
a question mark means that the source does not name them. Rows of one node have none.
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
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, format_size, group_by
from gpubench.model.terms.verdict import Origin, Verdict, worst_verdict
from gpubench.profiles import load, profile_names

FIGURES = Path(__file__).parents[1] / "tests" / "published" / "collectives.csv"
LARGE_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Published:
    """One published figure, with its row and the expected time."""

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
        """Expected over published busbw."""
        return self.predicted_gb_s / self.row.reached_gb_s

    @property
    def is_near(self) -> bool:
        """True if within 25 % from 128 MiB on, and within a factor of 2 below."""
        most = 1.25 if self.row.size_bytes >= LARGE_BYTES else 2.0
        return 1 / most <= self.ratio <= most

    def verdict(self, slower: float = 1.0) -> Verdict:
        """Return the verdict on the figure, or on a machine `slower` times as slow; SKIP if the expectation is in
        doubt.
        """
        row = replace(self.row, time_us=slower * self.row.time_us)
        return Verdict.SKIP if self.expected.doubt(row) else self.expected.verdict(row)


@cache
def read() -> tuple[Published, ...]:
    """Return all figures of machines that have a profile."""
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
        expected = time_from_profile(profile, collective, row, nccl=None)
        assert expected is not None, line
        is_hopper = float(profile.gpu.compute_capability) >= 9 and profile.nvlink is not None
        has_nvls = is_hopper and bool(profile.nvlink and profile.nvlink.switches) and collective.name == "allreduce"
        in_switches = 2 * (ranks - 1) / (ranks + 1) if has_nvls else 1
        most = profile.carried_gb_s(collective.name, ranks) * max(1.0, in_switches)
        return Published(line["use"], line["state"], line["source"], profile.name, row, expected, most)
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
    """How far predictions are off, and the verdicts on healthy machines and on machines of half their speed.

    Verdicts are of tables: the gravest of a table's rows, as the last line of a report has it.
    """

    near: int
    figures: int
    false_fails: int
    false_warnings: int
    halves_seen: int
    tables: int

    @classmethod
    def of(cls, figures: Sequence[Published]) -> "Bounds":
        """Return the bounds over the healthy figures."""
        healthy = [figure for figure in figures if figure.state == "healthy"]
        tables = group_by(healthy, lambda figure: figure.source)
        verdicts = [worst_verdict(figure.verdict() for figure in table) for table in tables.values()]
        halves = [worst_verdict(figure.verdict(slower=2.0) for figure in table) for table in tables.values()]
        return cls(
            near=sum(figure.is_near for figure in healthy),
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


HOST_STAGED_GB_S = 28.4  # The fastest all-reduce of 2 H200s through host memory that was seen


@dataclass(frozen=True, slots=True)
class KindRates:
    """Healthy machines of one kind: how many tables get each verdict, unchanged and slowed down."""

    tables: int
    failed: int
    warned: int
    unjudged: int
    halves_passed: int
    staged_passed: int | None

    @classmethod
    def of(cls, figures: Sequence[Published]) -> "KindRates":
        """Return the rates of one kind's healthy figures; only tables of one node with NVLinks are staged through
        the host.
        """
        tables = group_by(figures, lambda figure: figure.source)
        unchanged = [_table_verdict(table, lambda _: 1.0) for table in tables.values()]
        halves = [_table_verdict(table, lambda _: 2.0) for table in tables.values()]
        is_staged = all(figure.row.nodes == 1 and load(figure.profile).nvlink is not None for figure in figures)
        staged = [
            _table_verdict(table, lambda figure: max(1.0, figure.row.reached_gb_s / HOST_STAGED_GB_S))
            for table in tables.values()
            if is_staged
        ]
        return cls(
            tables=len(tables),
            failed=unchanged.count(Verdict.FAIL),
            warned=unchanged.count(Verdict.WARN),
            unjudged=unchanged.count(Verdict.SKIP),
            halves_passed=halves.count(Verdict.PASS),
            staged_passed=staged.count(Verdict.PASS) if is_staged else None,
        )


def _table_verdict(table: Sequence[Published], slower: Callable[[Published], float]) -> Verdict:
    """Return the gravest verdict of the rows; if that is PASS, the verdict on the largest size."""
    found = worst_verdict(figure.verdict(slower(figure)) for figure in table)
    largest = max(table, key=lambda figure: figure.row.size_bytes)
    return largest.verdict(slower(largest)) if found is Verdict.PASS else found


def rates_by_kind(use: str) -> dict[tuple[str, bool], KindRates]:
    """Return the rates by profile and whether several nodes are joined."""
    healthy = [figure for figure in read() if figure.use == use and figure.state == "healthy"]
    kinds = group_by(healthy, lambda figure: (figure.profile, figure.row.nodes > 1))
    return {kind: KindRates.of(figures) for kind, figures in sorted(kinds.items())}


def main() -> None:
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
    ill = group_by([figure for figure in figures if figure.state == "ill"], lambda figure: figure.source)
    seen = [worst_verdict(figure.verdict() for figure in table) is not Verdict.PASS for table in ill.values()]
    print(f"ill: {sum(seen)} of {len(seen)} tables not PASS")


if __name__ == "__main__":
    main()
