"""Run one rank of a collective during computation."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from gpubench.backends.nccl.backend import NcclBackend
from gpubench.backends.nccl.communicator import GroupCommunicator, takes_caps
from gpubench.backends.nccl.library import NcclLibrary
from gpubench.backends.overlap import GpuSteps
from gpubench.collectives.record import SweepRequest
from gpubench.errors import CouldNotMeasureError, UsageError, no_gpu
from gpubench.jobs.collective.opened import Opened
from gpubench.jobs.collective.rank_job import CollectiveRankJob
from gpubench.jobs.rank import agree, usable_driver
from gpubench.machine.environment import nccl_settings, set_environment
from gpubench.machine.traffic import NvmlLoad
from gpubench.measure.collective.cases import DescribedCollective
from gpubench.measure.collective.sweep import Issue, Observers
from gpubench.measure.collective.variants import SweepVariant
from gpubench.model.results.report import CollectiveRow, Metadata, Report
from gpubench.model.terms.overlap import DEFAULT_GEMM_SIDE, OVERLAP, describe_cap, partner_bytes
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.units import format_memory
from gpubench.ports.group import Group, Listener
from gpubench.ranks.launch import own_settings
from gpubench.ranks.watchdog.rank import RankProgress
from gpubench.training.overlap_options import OverlapPlan
from gpubench.training.overlap_steps import Cap, measure_overlap, overlap_metadata

if TYPE_CHECKING:
    from gpubench.model.results.overlap import OverlapRow
    from gpubench.ports.backend import CollectiveCalls
_CAPPING_VARIABLES = (
    *("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NRINGS"),
    "NCCL_MIN_NRINGS",
)
"""Variables that override the limits in a communicator's configuration. Source: NCCL's init.cc, envConfigOverride."""

_BY_ENVIRONMENT = "NCCL_MAX_NCHANNELS"
"""Limits the CTAs of NCCL versions that do not support a limit per communicator. The NCCL versions that were tried
read it only once, so a row shows how many CTAs were really used.
"""


def check_caps(ctas: Sequence[int | None], settings: Mapping[str, str], own: Collection[str] = ()) -> None:
    """Raise UsageError if --ctas has limits, but a variable already sets the number of CTAs. `own` has the
    variables that gpubench itself has set.
    """
    caps = [cta for cta in ctas if cta is not None]
    name = next((variable for variable in _CAPPING_VARIABLES if variable in settings), None)
    if caps and name is not None:
        raise UsageError(
            f"--ctas {','.join(map(str, caps))} with {name}={settings[name]}, which is already set",
            expected="an unset variable, so that NCCL's own number can be measured too",
            reason="the kernels of so many ranks fit on a GPU only with this variable, and it overrides a cap"
            if name in own
            else "it is set in the environment, or in a file such as /etc/nccl.conf, and overrides a cap",
            next_step="--ctas own, or fewer --ranks-per-gpu"
            if name in own
            else f"unset {name}, or --ctas own, which uses it",
        )


def check_ranks(ranks: int) -> None:
    """Raise UsageError for a job with a single rank."""
    if ranks == 1:
        raise UsageError(
            "overlap with one rank",
            expected="two ranks or more, each with a GPU",
            reason="a collective moves data between GPUs",
            next_step="mpirun -n 2 gpubench overlap, or gpubench overlap --simulate hgx-h200-4",
        )


def check_memory(plan: OverlapPlan, free_bytes: int) -> None:
    """Raise CouldNotMeasureError if the computations need more memory than is free on a GPU."""
    needed = sum(partner_bytes(partner, plan.gemm_side) for partner in plan.partners)
    if needed > free_bytes:
        raise CouldNotMeasureError(
            f"{', '.join(plan.partners)} and the collective together need {format_memory(needed)} of GPU memory",
            expected=f"at most {format_memory(free_bytes)}, which a rank can allocate here",
            next_step=f"--gemm {DEFAULT_GEMM_SIDE // 2}, or a smaller number. nvidia-smi shows what uses the memory",
        )


class OverlapRankJob(CollectiveRankJob):
    def __init__(self, group: Group, progress: RankProgress, plan: OverlapPlan, arguments: Sequence[str]) -> None:
        super().__init__(group, progress, plan.collective_plan, arguments)
        self._overlap = plan
        self._steps: GpuSteps | None = None
        self._load: NvmlLoad | None = None
        self._nccl: tuple[NcclBackend, NcclLibrary] | None = None

    def run(self, channel: str | None) -> int:
        """Measure and return the exit code.

        Raises AgreedError for a single rank, for a rank without a GPU, or if a variable already limits CTAs.
        """
        agree(self._group, lambda: check_ranks(self._group.size))
        agree(self._group, lambda: usable_driver(OVERLAP), place=str(self.identity))
        agree(self._group, lambda: check_caps(self._overlap.ctas, nccl_settings(os.environ), own_settings(os.environ)))
        return super().run(channel)

    def _before_sizes(self, opened: Opened) -> None:
        if opened.library is None or opened.device is None:
            raise no_gpu("this rank opened none", for_what=OVERLAP)
        backend = cast("NcclBackend", opened.backend)  # The only backend that overlap supports
        agree(self._group, lambda: check_memory(self._overlap, backend.free_bytes()), place=str(self.identity))
        self._nccl = backend, opened.library
        self._steps = steps = GpuSteps(opened.device, backend)
        for partner in self._overlap.partners:
            prepare = partial(steps.prepare, partner, self._overlap.gemm_side, self._plan.dtypes[0])
            agree(self._group, prepare, place=str(self.identity))
        self._load = NvmlLoad(str(self.identity.gpu_bus_id))

    def _metadata(self, described: DescribedCollective) -> Metadata:
        return overlap_metadata(self._overlap, described, self._plan.collective, self._arguments)

    def _rows(
        self,
        request: SweepRequest,
        variants: Sequence[SweepVariant],
        identities: Sequence[RankIdentity],
        listener: Listener[CollectiveRow],
        observers: Observers,
    ) -> Report:
        if self._steps is None or self._load is None or self._nccl is None:
            raise ValueError("partners come before sizes")
        caps = [Cap(None, variants[0])]
        caps += [_cap(cta, request, self._group, *self._nccl) for cta in self._overlap.ctas if cta is not None]
        shown: Listener[OverlapRow] = listener  # type: ignore[assignment]
        try:
            return measure_overlap(
                request, self._overlap, self._group, caps, identities, shown, observers, self._steps, self._load.read
            )
        finally:
            self._load.close()


def _cap(ctas: int, request: SweepRequest, group: Group, backend: NcclBackend, library: NcclLibrary) -> Cap:
    opened: list[CollectiveCalls] = []
    by_configuration = takes_caps(library)

    def open_() -> Issue:
        if by_configuration:
            opened.append(backend.adopt(GroupCommunicator(library, group, {"max_ctas": ctas})))
        else:
            with set_environment({_BY_ENVIRONMENT: str(ctas)}):
                opened.append(backend.open(group))
        return partial(request.collective.issue, opened[-1])

    drop: Callable[[Issue], None] = lambda _issue: backend.drop(opened.pop()) if opened else None  # noqa: E731
    variant = SweepVariant(
        setting=describe_cap(ctas),
        backend=backend,
        open=open_,
        drop=drop,
        refusals=(library.error,),
        explain=lambda error: library.last_error() or str(error),
        logs_choices=True,
    )
    return Cap(ctas, variant, "configuration" if by_configuration else "environment")
