"""One rank of a collective beside computation."""

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
from gpubench.jobs.collective.metadata import (
    overlap_metadata,
)
from gpubench.jobs.collective.opened import (
    Opened,
)
from gpubench.jobs.collective.plan import CollectivePlan
from gpubench.jobs.rank import agree, usable_driver
from gpubench.machine.environment import environment_set, nccl_settings
from gpubench.machine.traffic import NvmlLoad
from gpubench.measure.collective.cases import DescribedCollective
from gpubench.measure.collective.sweep import Issue, Observers
from gpubench.measure.collective.variants import SweepVariant
from gpubench.measure.overlap import Cap, OverlapMeans, measure_overlap
from gpubench.model.results.report import CollectiveRow, Metadata, Report
from gpubench.model.terms.overlap import DEFAULT_GEMM_SIDE, OVERLAP, OverlapAsked, cap_name, partner_bytes
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.units import format_memory
from gpubench.ports.group import Group, Listener
from gpubench.ranks.launch import own_settings
from gpubench.ranks.watchdog.rank import RankProgress

if TYPE_CHECKING:
    from gpubench.model.results.overlap import OverlapRow
    from gpubench.ports.backend import CollectiveCalls
from gpubench.jobs.collective.rank_job import CollectiveRankJob

_CAPPING_VARIABLES = (
    *("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NRINGS"),
    "NCCL_MIN_NRINGS",
)
"""They count more than what a communicator is asked for (init.cc, envConfigOverride)."""

_BY_ENVIRONMENT = "NCCL_MAX_NCHANNELS"
"""Of an NCCL that takes no caps: read anew for a communicator by none that was tried, so a row says what it took."""


def check_caps(asked: OverlapAsked, settings: Mapping[str, str], own: Collection[str] = ()) -> None:
    """Raise UsageError for caps where other variables than gpubench's `own` set the number of CTAs."""
    caps = [cta for cta in asked.ctas if cta is not None]
    name = next((variable for variable in _CAPPING_VARIABLES if variable in settings), None)
    if caps and name is not None:
        raise UsageError(
            f"--ctas {','.join(map(str, caps))} with {name}={settings[name]} set already",
            expected="NCCL's own number to compare with, and caps that count",
            reason="the kernels of so many ranks fit on a GPU at once only with it, and it counts more than a cap"
            if name in own
            else "it stands in the environment, or in a file as /etc/nccl.conf, and counts more than a cap",
            next_step="--ctas own, or fewer --ranks-per-gpu"
            if name in own
            else f"unset {name}, or --ctas own, which then measures under it",
        )


def check_ranks(ranks: int) -> None:
    """Raise UsageError for a job of one rank."""
    if ranks == 1:
        raise UsageError(
            "overlap with one rank",
            expected="two ranks or more, each with a GPU",
            reason="a collective moves data between GPUs",
            next_step="mpirun -n 2 gpubench overlap, or gpubench overlap --simulate hgx-h200-4",
        )


def check_memory(asked: OverlapAsked, free_bytes: int) -> None:
    """Raise CouldNotMeasureError where the partners need more memory than a GPU has left."""
    needed = sum(partner_bytes(partner, asked) for partner in asked.partners)
    if needed > free_bytes:
        raise CouldNotMeasureError(
            f"{' and '.join(asked.partners)} beside the collective need {format_memory(needed)} of GPU memory",
            expected=f"at most {format_memory(free_bytes)}, which a rank can take here",
            next_step=f"--gemm {DEFAULT_GEMM_SIDE // 2}, or a smaller one; nvidia-smi shows who holds memory",
        )


class OverlapRankJob(CollectiveRankJob):
    """One rank of an overlap: the collective's, with computation beside it."""

    def __init__(
        self,
        group: Group,
        progress: RankProgress,
        plan: CollectivePlan,
        arguments: Sequence[str],
        asked: OverlapAsked,
    ) -> None:
        super().__init__(group, progress, plan, arguments)
        self._asked = asked
        self._steps: GpuSteps | None = None
        self._load: NvmlLoad | None = None
        self._nccl: tuple[NcclBackend, NcclLibrary] | None = None

    def run(self, channel: str | None) -> int:
        """As of a collective. Raises AgreedError: one rank, no GPU, or caps that the environment sets."""
        agree(self._group, lambda: check_ranks(self._group.size))
        agree(self._group, lambda: usable_driver(OVERLAP), place=str(self.identity))
        agree(self._group, lambda: check_caps(self._asked, nccl_settings(os.environ), own_settings(os.environ)))
        return super().run(channel)

    def _before_sizes(self, opened: Opened) -> None:
        if opened.library is None or opened.device is None:
            raise no_gpu("this rank opened none", for_what=OVERLAP)
        backend = cast("NcclBackend", opened.backend)  # of the only kind that overlap asks for
        agree(self._group, lambda: check_memory(self._asked, backend.free_bytes()), place=str(self.identity))
        self._nccl = backend, opened.library
        self._steps = steps = GpuSteps(opened.device, backend)
        for partner in self._asked.partners:
            prepare = partial(steps.prepare, partner, self._asked.gemm_side, self._plan.dtypes[0])
            agree(self._group, prepare, place=str(self.identity))
        self._load = NvmlLoad(str(self.identity.gpu_bus_id))

    def _metadata(self, described: DescribedCollective) -> Metadata:
        return overlap_metadata(described, self._plan.collective, self._asked, self._arguments)

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
        caps += [_cap(cta, request, self._group, *self._nccl) for cta in self._asked.ctas if cta is not None]
        means = OverlapMeans(self._steps, self._load.read)
        shown: Listener[OverlapRow] = listener  # type: ignore[assignment]
        try:
            return measure_overlap(request, self._asked, self._group, caps, identities, shown, observers, means)
        finally:
            self._load.close()


def _cap(ctas: int, request: SweepRequest, group: Group, backend: NcclBackend, library: NcclLibrary) -> Cap:
    opened: list[CollectiveCalls] = []
    by_configuration = takes_caps(library)

    def open_() -> Issue:
        if by_configuration:
            opened.append(backend.adopt(GroupCommunicator(library, group, {"max_ctas": ctas})))
        else:
            with environment_set({_BY_ENVIRONMENT: str(ctas)}):
                opened.append(backend.open(group))
        return partial(request.collective.issue, opened[-1])

    drop: Callable[[Issue], None] = lambda _issue: backend.drop(opened.pop()) if opened else None  # noqa: E731
    variant = SweepVariant(
        setting=cap_name(ctas),
        backend=backend,
        open=open_,
        drop=drop,
        refusals=(library.error,),
        explain=lambda error: library.last_error() or str(error),
        logs_choices=True,
    )
    return Cap(ctas, variant, "configuration" if by_configuration else "environment")
