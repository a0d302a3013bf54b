"""The plan of a collective on its way to the ranks that are launched for it, and one of these ranks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.collectives.registry import collective_named
from gpubench.collectives.request import Asked
from gpubench.jobs.collective.plan import CollectivePlan, RankOptions
from gpubench.jobs.recording import Recording
from gpubench.model.facts.backends import HOST, TORCH
from gpubench.model.terms.plain import from_plain, to_plain

if TYPE_CHECKING:
    from gpubench.hardware.watchdog.rank import RankProgress
    from gpubench.model.facts.launched_by import LaunchedBy
    from gpubench.ports.group import Group

_TORCH = ("torch", "torch.distributed")
ON_GPUS = ("cupy", "gpubench.jobs.collective.opening_gpu")
ON_HOSTS = ("numpy", "gpubench.hardware.mpi.host")
"""The modules that backends need, imported once MPI has started, beside what a rank does next."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The plan of a launched rank as plain data; what it measures is presented by the process that launched it.

    `history` is the folder of dated results of that process, whose working directory ranks share.
    """

    arguments: tuple[str, ...]
    collective: str
    asked: Asked
    options: RankOptions
    record: str | None
    history: str | None = None

    def plan(self) -> CollectivePlan:
        """The plan that it was made of, without its presentation."""
        return CollectivePlan(
            request=self.asked.request(collective_named(self.collective)),
            recording=Recording(None if self.record is None else Path(self.record)),
            results_folder=None if self.history is None else Path(self.history),
            **{each.name: getattr(self.options, each.name) for each in fields(RankOptions)},
        )


def write_plan(channel: str, plan: CollectivePlan, arguments: Sequence[str]) -> None:
    """Write the plan beside the socket of the channel, in its private directory, for the ranks that are launched."""
    record, history = plan.recording.record, plan.history
    of_rank = RankPlan(
        arguments=tuple(arguments),
        collective=plan.collective.name,
        asked=plan.request.asked,
        options=plan.rank_options,
        record=None if record is None else str(record),
        history=None if history is None else str(history),
    )
    _beside(channel).write_text(json.dumps(to_plain(of_rank)))


def run_launched(channel: str, launch: "LaunchedBy") -> int:
    """Be a rank with the plan that the gpubench at the other end of the channel wrote; the exit code."""
    of_rank = from_plain(RankPlan, json.loads(_beside(channel).read_text()))
    return run_as_rank(of_rank.plan(), of_rank.arguments, launch)


def run_as_rank(plan: CollectivePlan, arguments: Sequence[str], launch: "LaunchedBy") -> int:
    """Be a rank of a collective; the exit code."""
    from gpubench.hardware.node.gpu_count import gpus_of_host
    from gpubench.jobs import rank
    from gpubench.jobs.collective.rank_job import CollectiveRankJob

    def make_job(group: "Group", progress: "RankProgress") -> CollectiveRankJob:
        if plan.overlap is not None:
            from gpubench.jobs.collective.overlap.rank_job import OverlapRankJob

            return OverlapRankJob(group, progress, plan, arguments, plan.overlap)
        return CollectiveRankJob(group, progress, plan, arguments)

    imports = ON_GPUS if plan.backend != HOST and gpus_of_host() else ON_HOSTS
    defaults, rendezvous = plan.presentation.job_defaults, rank.rendezvous_of(launch, plan.timeout_s)
    return rank.run(make_job, launch, plan.timeout_s, defaults, _of_torch(plan) + imports, rendezvous)


def _of_torch(plan: CollectivePlan) -> tuple[str, ...]:
    """What comes before CuPy where torch is measured: the first libnccl.so.2 of a process is everybody's."""
    asked = (plan.backend or "", *plan.variants.beside)
    return _TORCH if any(each.startswith(TORCH) for each in asked) and plan.nccl_library is None else ()


def _beside(channel: str) -> Path:
    return Path(channel).with_name("plan")
