"""Whether what is usual of a rail is what its NICs carry: comparing nodes shows nothing that slows all alike."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from gpubench.measure.scan.rounds import ScanCourse
from gpubench.model.results.above_limit import ABOVE_LIMIT, MOST_PERCENT
from gpubench.model.results.scan_rounds import BOTH_WAYS
from gpubench.model.terms.units import compress_names
from gpubench.model.terms.verdict import Finding, Verdict

SLOW_SHARE, FAILED_SHARE = 0.8, 0.5
"""Of the rate of the NICs. Others' figures, one way, are 90 to 98 % of it: Azure's health checks ask for 380 of 400
Gb/s with GPUDirect RDMA, and RoCE was seen at 180 of 200 (NVIDIA/nccl-tests#112).
What both ways at once reach was not measured here."""

_BETWEEN = {True: " inside leaves", False: " between leaves", None: ""}


@dataclass(frozen=True, slots=True)
class RailLevel:
    """What is usual of a rail, GB/s both ways together, in its slower class of pairs, and its share of the NICs' rate.

    `inside` says whether that class is of pairs on one leaf, None where there is one leaf or none is known; `best` is
    the share of the faster class.
    """

    gb_s: float
    share: float
    inside: bool | None
    best: float

    @property
    def severity(self) -> Verdict:
        """A spine that carries less than the leaves may be meant so: what fails is slow everywhere.

        More than NICs carry is an ERROR: their rates, or the times, are wrong.
        """
        if 100 * self.best > MOST_PERCENT:
            return Verdict.ERROR
        if self.best < FAILED_SHARE:
            return Verdict.FAIL
        return Verdict.WARN if self.share < SLOW_SHARE else Verdict.PASS


def rail_levels(course: ScanCourse) -> Mapping[int, RailLevel]:
    """The levels of the rails of which the NICs' rate is known and something was measured."""
    found: dict[int, RailLevel] = {}
    several_leaves = len({*course.fabric.leaves}) > 1
    for rail, rate in enumerate(course.fabric.rates):
        own = [(gb_s, inside) for (of, inside), gb_s in course.yardstick.centres.items() if of == rail]
        if rate is None or not rate > 0 or not own:
            continue
        gb_s, inside = min(own)
        carried = BOTH_WAYS * rate
        found[rail] = RailLevel(gb_s, gb_s / carried, inside if several_leaves else None, max(own)[0] / carried)
    return found


def slow_levels(course: ScanCourse, told: Set[int]) -> Mapping[int, RailLevel]:
    """Those below what NICs carry, or well above it; not of rails that are `told`: slow, or without a usual level."""
    levels = rail_levels(course)
    return {rail: each for rail, each in levels.items() if rail not in told and each.severity is not Verdict.PASS}


def least_percent(course: ScanCourse, without_level: Set[int]) -> float | None:
    """What the slowest rail delivers of the NICs' rate; None where no rate is known, or no rail has a usual level."""
    levels = rail_levels(course)
    return min((100 * each.share for rail, each in levels.items() if rail not in without_level), default=None)


def all_rates_known(course: ScanCourse) -> bool:
    """True where every rail was held against the rate of its NICs, and not only nodes against each other."""
    return len(rail_levels(course)) == course.fabric.rails


def rate_findings(course: ScanCourse, told: Set[int]) -> Iterator[Finding]:
    """That rails deliver less than their NICs carry, or more, the same on all nodes; `told` as above."""
    by_severity: dict[Verdict, dict[int, RailLevel]] = {}
    for rail, level in slow_levels(course, told).items():
        by_severity.setdefault(level.severity, {})[rail] = level
    for severity, levels in by_severity.items():
        if severity is Verdict.ERROR:
            yield _above_rate(course, levels)
            continue
        rail, worst = min(levels.items(), key=lambda each: each[1].share)
        carried = BOTH_WAYS * (course.fabric.rates[rail] or 0.0)
        share = FAILED_SHARE if severity is Verdict.FAIL else SLOW_SHARE
        yield Finding(
            "below-nic-rate",
            severity,
            f"{_rails(list(levels), course.fabric.rails)} between nodes",
            f"{worst.gb_s:.4g} GB/s both ways{_BETWEEN[worst.inside]}, {worst.share:.0%} of what the NICs carry",
            f"at least {share:.0%} of {carried:.4g} GB/s both ways, which the NICs and their slots carry",
            "what all nodes share: sockets for RDMA, no GPUDirect RDMA, a setting of NCCL's, switches, other jobs",
            "gpubench allreduce --sizes 256M on two of these nodes shows transport and GPUDirect RDMA of every pair",
        )


def _above_rate(course: ScanCourse, levels: Mapping[int, RailLevel]) -> Finding:
    rail, most = max(levels.items(), key=lambda each: each[1].best)
    carried = BOTH_WAYS * (course.fabric.rates[rail] or 0.0)
    return Finding(
        ABOVE_LIMIT,
        Verdict.ERROR,
        f"{_rails(list(levels), course.fabric.rails)} between nodes",
        f"{most.best * carried:.4g} GB/s both ways, {most.best:.1f} times the limit",
        f"at most {carried:.4g} GB/s both ways: what the NICs and their slots carry, as the driver reports them",
        "NICs that were not found, a rate that is not the port's, or NVLinks that join these nodes",
        "gpubench topo on one of these nodes shows its NICs; gpubench allreduce --evidence shows the paths taken",
    )


def _rails(slow: Sequence[int], rails: int) -> str:
    if len(slow) == rails:
        return "all rails" if rails > 1 else "the rail"
    return compress_names([f"rail{rail}" for rail in slow])
