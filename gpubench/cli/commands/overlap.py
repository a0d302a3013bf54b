"""`gpubench overlap`: its options, and the run."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.cli.options import (
    PROFILE,
    PresentationOptions,
    SimulationOptions,
    check_profile,
    parse_choices,
    parse_dtypes,
    unknown_word,
)
from gpubench.cli.signature import app_of, completed, flag, option, sharing_ranks
from gpubench.collectives.registry import SUMMARIES, collective_named
from gpubench.errors import UsageError
from gpubench.jobs.plans import CollectivePlan
from gpubench.model.paths.evidence import EvidenceUse
from gpubench.model.terms.operation import DataType, Placement
from gpubench.model.terms.overlap import (
    DEFAULT_CTAS,
    DEFAULT_GEMM_SIDE,
    DEFAULT_SECONDS,
    DEFAULT_SIZES,
    OverlapAsked,
    Partner,
    parse_ctas,
)
from gpubench.model.terms.units import parse_sizes

if TYPE_CHECKING:
    from gpubench.collectives.record import SweepRequest

HELP = """
What a collective and computation cost each other when both run: each alone, then together, sustained until clocks and
power have settled. How much the collective is slowed, and how much of that it waited for SMs; how much computation is
slowed meanwhile; what of the collective is hidden. For several caps on NCCL's CTAs, and at the end the cap with the
shortest step. docs/overlap.md defines every figure.

  gpubench overlap

  gpubench overlap --partner gemm,copy,chain --sizes 64M,256M --ctas own,8

  gpubench overlap --collective allgather --gemm 4096 --output overlap.html

  gpubench overlap --simulate hgx-h200-4

  mpirun -n 16 gpubench overlap --sizes 256M
"""

_LEAST_GEMM_SIDE, _MOST_GEMM_SIDE = 1024, 65536
"""A smaller one takes the host longer to launch than a GPU to compute."""


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """The collective, its caps, and the computation beside it."""

    collective: str = option("NAME", f"{', '.join(SUMMARIES)}.", default="allreduce")
    sizes: str = option("SIZES", "1M:1G:4 (x4), 1M:64M:+1M (steps), or 1M,64M.", default=DEFAULT_SIZES)
    ctas: list[str] | None = option(
        "N", "CTAs that NCCL may take at most; own: as many as it likes. Default own,16,8,4,2."
    )
    partner: list[str] | None = option(
        "|".join(Partner),
        "Beside it: a Tensor-Core GEMM, a copy within GPU memory, a chain of small kernels; several with commas. "
        "Default gemm.",
        autocompletion=completed("partner"),
    )
    gemm: int = option(
        "N", "N x N x N is the GEMM, in 16 bits.", default=DEFAULT_GEMM_SIDE, min=_LEAST_GEMM_SIDE, max=_MOST_GEMM_SIDE
    )
    partner_count: int | None = option(
        "N", "The partner's operations in a step. Default: twice the collective's time, and one.", min=1, max=100_000
    )
    dtype: str = option("TYPE", f"{', '.join(DataType)}.", name="--dtype -d", default="bfloat16")
    root: int = option("RANK", "The root rank of a collective that has one.", name="--root -r", default=0)
    seconds: float = option(
        "S", "Seconds that each phase of a row is measured, once it has settled.", default=DEFAULT_SECONDS, min=0.01
    )
    check: bool = flag("Verify every rank's data.", name="--check/--no-check", default=True)
    nccl_library: str | None = option("PATH", "Measure this libnccl.so.2, say a training framework's.")
    np: int | None = option("N", "Ranks to launch here. Default: one a GPU.", min=1)
    ranks_per_gpu: int = sharing_ranks()
    timeout: float = option(
        "S", "Seconds without one completed step after which a run that hangs is ended.", default=60.0, min=1
    )
    evidence: bool | None = flag(
        "Show what is known of every path; or do not listen to NCCL and count nothing.",
        name="--evidence/--no-evidence",
        default=None,
    )
    strict: bool = flag("Exit 1 for whatever is not PASS, 3 where speed was not judged.")
    profile: str | None = option("NAME|FILE", PROFILE, autocompletion=completed("profile"))
    simulation: SimulationOptions
    presentation: PresentationOptions

    def plan(self) -> tuple[CollectivePlan, OverlapAsked]:
        """The plan of the collective and the computation beside it; UsageError for anything that cannot be."""
        from gpubench.jobs.sources import source_of
        from gpubench.model.results.overlap import SECTIONS

        check_profile(self.profile)
        if self.nccl_library is not None and not Path(self.nccl_library).is_file():
            from gpubench.errors import unreadable_nccl_library

            raise unreadable_nccl_library(self.nccl_library, "there is no such file")
        if self.evidence is False and self.strict:
            raise UsageError(
                "--strict with --no-evidence",
                expected="one of them: --strict judges the paths that evidence shows",
                next_step="leave --no-evidence out",
            )
        asked = OverlapAsked(
            partners=parse_choices("--partner", self.partner or [Partner.GEMM], Partner),
            ctas=parse_ctas(self.ctas) if self.ctas else DEFAULT_CTAS,
            gemm_side=self.gemm,
            seconds=self.seconds,
            partner_count=self.partner_count,
        )
        plan = CollectivePlan(
            request=self._request(),
            backend=None if self.simulation.simulate is not None else "nccl",
            nccl_library=self.nccl_library,
            ranks=self.np,
            ranks_per_gpu=self.ranks_per_gpu,
            timeout_s=self.timeout,
            evidence={None: EvidenceUse.KEPT, True: EvidenceUse.SHOWN, False: EvidenceUse.OFF}[self.evidence],
            strict=self.strict,
            profile=self.profile,
            overlap=asked,
            source=source_of(self.timeout, simulation=self.simulation.parse()),
            presentation=self.presentation.parse(SECTIONS),
        )
        if self.simulation.simulate is not None and plan.ranks_per_gpu > 1:
            plan.refuse_gpu_options("a simulated machine has none")
        return plan, asked

    def _request(self) -> "SweepRequest":
        from gpubench.collectives.record import SweepRequest

        if self.collective not in SUMMARIES:
            raise unknown_word("--collective", self.collective, tuple(SUMMARIES))
        dtypes = parse_dtypes([self.dtype])
        if len(dtypes) > 1:
            raise UsageError(
                f"--dtype {self.dtype}", expected="one type: rows have one", next_step=f"--dtype {dtypes[0]}"
            )
        return SweepRequest(
            collective=collective_named(self.collective),
            sizes=parse_sizes(self.sizes),
            dtypes=dtypes,
            root=self.root,
            placements=(Placement.OUT_OF_PLACE,),
            check=self.check,
        )


def _run(options: OverlapOptions) -> int:
    from gpubench.jobs.collective import job

    plan, asked = options.plan()
    return job.run_overlap(plan, asked, sys.argv[1:])


app = app_of(HELP, OverlapOptions, _run)
