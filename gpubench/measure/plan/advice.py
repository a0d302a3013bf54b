"""The best settings of a layout, and how far one may go from them: buckets, prefetch, NCCL's cap on thread blocks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpubench.measure.plan.buckets import DEFAULT_CAP_BYTES
from gpubench.measure.plan.program import StepJob
from gpubench.measure.plan.step import StepPrediction, predict
from gpubench.model.workload.layout import Sharding

MEGABYTE = 2**20
BUCKETS_MB = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000)

FLAT_PERCENT = 1.0
"""A setting whose step is within this of the best is as good: single steps of DDP differ by 0.5 to 1 % between runs."""

OWN_CTAS = "own"
"""NCCL's own number of thread blocks, in the words of gpubench overlap."""

_EQUAL = 1.001
"""Predictions that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class TriedSetting:
    """A value of a setting, and the step that it gives."""

    setting: str
    value: str
    prediction: StepPrediction


@dataclass(frozen=True, slots=True)
class Advice:
    """What was tried of a layout; `best` is the fastest of all."""

    tried: Sequence[TriedSetting]
    best: StepPrediction

    def of(self, setting: str) -> list[TriedSetting]:
        """What was tried of one setting."""
        return [each for each in self.tried if each.setting == setting]

    def flat(self, setting: str) -> list[TriedSetting]:
        """The values that are as good as the best of this setting."""
        tried = self.of(setting)
        least = min((each.prediction.seconds for each in tried), default=0.0)
        return [each for each in tried if each.prediction.seconds <= least * (1 + FLAT_PERCENT / 100)]


def has_buckets(job: StepJob) -> bool:
    """True where gradients are reduced by buckets."""
    return job.layout.gradient_ranks > 1 and not job.layout.sharding.gathers_parameters


def gathers_blocks(job: StepJob) -> bool:
    """True where parameters are gathered block by block."""
    return job.layout.gradient_ranks > 1 and job.layout.sharding in (Sharding.FSDP, Sharding.ZERO3)


def advise(job: StepJob, capped: Mapping[int, StepJob] | None = None) -> Advice:
    """Try every setting that the layout has; `capped` are the same job by NCCL's cap on thread blocks, where known."""
    tried = list(_buckets(job)) + list(_prefetch(job))
    best = best_of(tried).prediction if tried else predict(job, with_range=False)
    if capped:
        tried.append(TriedSetting("ctas", OWN_CTAS, best))
        for ctas, other in sorted(capped.items()):
            same = replace(other, settings=best.job.settings)
            tried.append(TriedSetting("ctas", str(ctas), predict(same, with_range=False)))
    return Advice(tried, predict(best.job))


def best_of(tried: Sequence[TriedSetting]) -> TriedSetting:
    """The fastest; of those that are within 0.1 % of it the one nearest to what PyTorch does by itself."""
    least = min(each.prediction.seconds for each in tried)
    equal = [each for each in tried if each.prediction.seconds <= least * _EQUAL]
    return min(equal, key=lambda each: abs(math.log(each.prediction.job.settings.bucket_bytes / DEFAULT_CAP_BYTES)))


def _buckets(job: StepJob) -> Iterator[TriedSetting]:
    if not has_buckets(job):
        return
    for size in BUCKETS_MB:
        other = replace(job, settings=replace(job.settings, bucket_bytes=size * MEGABYTE))
        yield TriedSetting("bucket_mb", str(size), predict(other, with_range=False))


def _prefetch(job: StepJob) -> Iterator[TriedSetting]:
    if not gathers_blocks(job):
        return
    for wanted in (True, False):
        other = replace(job, settings=replace(job.settings, prefetch=wanted))
        yield TriedSetting("prefetch", "yes" if wanted else "no", predict(other, with_range=False))
