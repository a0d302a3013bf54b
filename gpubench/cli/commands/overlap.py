"""`gpubench overlap`: its options, and the run."""

import sys
from typing import ClassVar

from gpubench.cli.options import PresentationOptions, check_profile, parse_dtypes
from gpubench.cli.signature import HelpPage, app_of
from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.errors import UsageError
from gpubench.jobs.collective.plan import CollectivePlan, RankOptions, values_of
from gpubench.jobs.options import (
    MEASURE,
    NCCL,
    flag,
    option,
    parse_choices,
    read_from,
    step_timeout,
    strict_option,
    unknown_choice,
)
from gpubench.jobs.sources import Simulation, SimulationOptions, source_of
from gpubench.model.terms import overlap
from gpubench.model.terms.operation import DataType, Placement
from gpubench.model.terms.units import parse_sizes
from gpubench.records import dataclass

HELP = HelpPage(
    (
        ("Measure all-reduce beside a matrix product, on all GPUs of this host", "gpubench overlap"),
        ("Measure on two nodes of eight GPUs", "mpirun -n 16 gpubench overlap --sizes 256M"),
        (
            "Measure other computations, sizes and limits on NCCL's CTAs",
            "gpubench overlap --partner gemm,copy,chain --sizes 64M,256M --ctas own,8",
        ),
        (
            "Measure all-gather, and write a page",
            "gpubench overlap --collective allgather --gemm 4096 --output overlap.html",
        ),
        ("Try it without a GPU", "gpubench overlap --simulate hgx-h200-4"),
    ),
    """
Collective and computation run alone, then together, until clocks and power have settled. The report says how much
slower the collective is, how much of that it waited for SMs, how much slower computation is meanwhile, and how much of
the collective is hidden. This is repeated for several limits on NCCL's CTAs; the last line names the limit with the
shortest step. docs/overlap.md defines every figure.
""",
)

_LEAST_GEMM_SIDE, _MOST_GEMM_SIDE = 1024, 65536
"""A smaller one takes the host longer to launch than a GPU to compute."""


def _parse_collective(text: str) -> str:
    if text not in SUMMARIES:
        raise unknown_choice("--collective", text, tuple(SUMMARIES))
    return text


def _parse_dtype(text: str) -> tuple[DataType, ...]:
    dtypes = parse_dtypes([text])
    if len(dtypes) > 1:
        raise UsageError(f"--dtype {text}", expected="one type", next_step=f"--dtype {dtypes[0]}")
    return dtypes


@dataclass(frozen=True, kw_only=True)
class OverlapRankOptions(RankOptions):
    """What a rank is asked, with the words of this command where they differ."""

    ranks: int | None = option(
        "N", "Ranks to launch on this host (default: one per GPU).", name="--np", min=1, common=True
    )
    timeout_s: float = step_timeout("one step of collective and computation", default=60.0, least=1)
    strict: bool = strict_option()


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """The collective, its caps, and the computation beside it."""

    help_group: ClassVar = MEASURE

    collective: str = option(
        "NAME", f"Collective: {', '.join(SUMMARIES)}.", default="allreduce", read=_parse_collective, common=True
    )
    sizes: tuple[int, ...] = option(
        "SIZES",
        "Sizes in bytes: 1M:1G:4 (each four times the last), 1M:64M:+1M (steps), or 1M,64M.",
        default=overlap.DEFAULT_SIZES,
        read=parse_sizes,
        common=True,
    )
    ctas: tuple[int | None, ...] = option(
        "N",
        "Limits on NCCL's CTAs, several with commas; own is NCCL's own choice (default: own,16,8,4,2).",
        read=overlap.parse_ctas,
        several=True,
        without=overlap.DEFAULT_CTAS,
        group=NCCL,
        common=True,
    )
    partners: tuple[overlap.Partner, ...] = option(
        "|".join(overlap.Partner),
        "Computation: gemm (matrix product on Tensor Cores, default), copy (within GPU memory), chain (small kernels). "
        "Several with commas.",
        name="--partner",
        read=lambda texts: parse_choices("--partner", texts, overlap.Partner),
        several=True,
        without=(overlap.Partner.GEMM,),
        completed_as="partner",
        common=True,
    )
    gemm_side: int = option(
        "N",
        "Width N of the N × N matrices that gemm multiplies, 16 bits per number.",
        name="--gemm",
        default=overlap.DEFAULT_GEMM_SIDE,
        min=_LEAST_GEMM_SIDE,
        max=_MOST_GEMM_SIDE,
        common=True,
    )
    partner_count: int | None = option(
        "N",
        "Operations of the computation in a step (default: as many as take twice the collective's time, plus one).",
        min=1,
        max=100_000,
    )
    dtypes: tuple[DataType, ...] = option(
        "TYPE", f"Data type: {', '.join(DataType)}.", name="--dtype -d", default="bfloat16", read=_parse_dtype
    )
    root: int = option("RANK", "Root rank of a collective that has one.", name="--root -r", default=0)
    seconds: float = option(
        "S", "Seconds to measure each phase of a row, after it has settled.", default=overlap.DEFAULT_SECONDS, min=0.01
    )
    check: bool = flag("Verify the data on every rank, or not.", name="--check/--no-check", default=True)
    of_ranks: OverlapRankOptions
    simulation: Simulation | None = read_from(SimulationOptions, default=None)

    def plan(self, shown: PresentationOptions) -> CollectivePlan:
        """The plan of the collective and the computation beside it; UsageError for anything that cannot be."""
        from gpubench.collectives.record import Asked, SweepRequest
        from gpubench.model.results.overlap import SECTIONS

        self.of_ranks.check_evidence()
        check_profile(self.of_ranks.profile)
        plan = CollectivePlan(
            **values_of(RankOptions, self.of_ranks)
            | {
                "backend": None if self.simulation is not None else "nccl",
                "overlap": overlap.OverlapAsked(**values_of(overlap.OverlapAsked, self)),
            },
            request=SweepRequest(
                collective=collective_named(self.collective),
                placements=(Placement.OUT_OF_PLACE,),
                **values_of(Asked, self),
            ),
            source=source_of(self.of_ranks.timeout_s, simulation=self.simulation),
            presentation=shown.parse(SECTIONS),
        )
        if self.simulation is not None and plan.ranks_per_gpu > 1:
            plan.refuse_gpu_options("a simulated machine has no real GPUs")
        return plan


def _run(options: OverlapOptions, shown: PresentationOptions) -> int:
    from gpubench.jobs.collective import job

    return job.run_overlap(options.plan(shown), sys.argv[1:])


app = app_of(HELP, OverlapOptions, _run, without=("allocator", "expected_gpus", "split"))
