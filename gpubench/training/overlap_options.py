"""The options of `gpubench overlap`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from gpubench.collectives.registry import SUMMARIES
from gpubench.errors import UsageError
from gpubench.jobs.collective.plan import CollectivePlan, evidence_option, nccl_library_option, parse_dtypes
from gpubench.jobs.plans import CommandPlan, Targets
from gpubench.jobs.sources import Simulation, SimulationOptions
from gpubench.model.terms.operation import DataType
from gpubench.model.terms.options import (
    MEASURE,
    NCCL,
    flag,
    judging_profile,
    option,
    parse_choices,
    rank_counts,
    read_from,
    sharing_ranks,
    step_timeout,
    unknown_choice,
)
from gpubench.model.terms.overlap import (
    DEFAULT_CTAS,
    DEFAULT_GEMM_SIDE,
    DEFAULT_SECONDS,
    DEFAULT_SIZES,
    OVERLAP,
    Partner,
    parse_ctas,
)
from gpubench.model.terms.statistics import DEFAULT_ITERATIONS, Mode
from gpubench.model.terms.units import parse_sizes

_LEAST_GEMM_SIDE, _MOST_GEMM_SIDE = 1024, 65536
"""The host takes longer to launch a smaller GEMM than a GPU takes to compute it."""


def _parse_collective(text: str) -> str:
    if text not in SUMMARIES:
        raise unknown_choice("--collective", text, tuple(SUMMARIES))
    return text


def _parse_dtype(text: str) -> tuple[DataType, ...]:
    dtypes = parse_dtypes([text])
    if len(dtypes) > 1:
        raise UsageError(f"--dtype {text}", expected="one type", next_step=f"--dtype {dtypes[0]}")
    return dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapPlan(CommandPlan):
    """Options of `overlap`: the collective, limits on its CTAs, and the computation. `gemm_side` is n of an n × n ×
    n GEMM.
    """

    help_group: ClassVar = MEASURE

    collective: str = option(
        "NAME", f"Collective: {', '.join(SUMMARIES)}.", default="allreduce", read=_parse_collective, common=True
    )
    sizes: tuple[int, ...] = option(
        "SIZES",
        "Sizes in bytes: 1M:1G:4 (factor 4), 1M:64M:+1M (steps of 1M), or 1M,64M.",
        default=DEFAULT_SIZES,
        read=parse_sizes,
        common=True,
    )
    ctas: tuple[int | None, ...] = option(
        "N",
        "Limits on NCCL's CTAs, separated by commas. own is NCCL's choice (default: own,16,8,4,2).",
        read=parse_ctas,
        several=True,
        without=DEFAULT_CTAS,
        group=NCCL,
        common=True,
    )
    partners: tuple[Partner, ...] = option(
        "|".join(Partner),
        "Computation: gemm (matrix product on Tensor Cores, default), copy (within GPU memory), chain (small kernels). "
        "Several with commas.",
        name="--partner",
        read=lambda texts: parse_choices("--partner", texts, Partner),
        several=True,
        without=(Partner.GEMM,),
        completed_as="partner",
        common=True,
    )
    gemm_side: int = option(
        "N",
        "Width N of the N × N matrices that gemm multiplies, with 16 bits per element.",
        name="--gemm",
        default=DEFAULT_GEMM_SIDE,
        min=_LEAST_GEMM_SIDE,
        max=_MOST_GEMM_SIDE,
        hidden=True,
    )
    dtypes: tuple[DataType, ...] = option(
        "TYPE", f"Data type: {', '.join(DataType)}.", name="--dtype -d", default="bfloat16", read=_parse_dtype
    )
    root: int = option("RANK", "Root rank of a collective that has one.", name="--root -r", default=0)
    seconds: float = option(
        "S",
        "Seconds to measure each phase of a row, after it has settled.",
        default=DEFAULT_SECONDS,
        min=0.01,
        hidden=True,
    )
    check: bool = flag("Verify the data on every rank.", name="--check/--no-check", default=True)
    nccl_library: str | None = nccl_library_option()
    rank_counts: tuple[int, ...] = rank_counts(
        "Ranks to launch on this host (default: one per GPU). 2,4,8 shows how the step scales."
    )
    targets: Targets = field(default_factory=Targets)
    ranks_per_gpu: int = sharing_ranks()
    timeout_s: float = step_timeout("one step of collective and computation", default=60.0, least=1)
    shows_evidence: bool | None = evidence_option()
    profile: str | None = judging_profile()
    simulation: Simulation | None = read_from(SimulationOptions, default=None)
    typed: Mapping[str, Any] = field(default_factory=dict)
    results_folder: str | None = None

    @property
    def collective_plan(self) -> CollectivePlan:
        """The plan of the collective that runs during the computation."""
        alike = {own.name for own in fields(CollectivePlan)} & {own.name for own in fields(OverlapPlan)}
        return CollectivePlan(
            **{name: getattr(self, name) for name in alike},
            command=self.collective,
            out_of_place=True,
            iters=str(DEFAULT_ITERATIONS[Mode.THROUGHPUT]),
            backends=() if self.simulation is not None else ("nccl",),
            kernels_at_once=2,
            needs_gpus=OVERLAP,
        )
