"""Layouts of the same global batch compared: step, memory, and which of them fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpubench.errors import UsageError
from gpubench.measure.plan.program import StepJob
from gpubench.measure.plan.step import StepPrediction, predict
from gpubench.model.workload.layout import ParallelLayout, layouts_for
from gpubench.model.workload.memory import MemoryNeed, memory_need
from gpubench.model.workload.transformer import TransformerModel

_MOST_THAT_DO_NOT_FIT = 4
"""Of layouts that do not fit those that come nearest are simulated too."""

_MOST_DOUBLINGS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayout:
    """A layout with its predicted step and its need of memory."""

    prediction: StepPrediction
    need: MemoryNeed
    gpu_memory_bytes: int | None

    @property
    def layout(self) -> ParallelLayout:
        """The layout."""
        return self.prediction.job.layout

    @property
    def fits(self) -> bool | None:
        """Whether a GPU's memory is enough; None where it is not known."""
        return None if self.gpu_memory_bytes is None else self.need.total <= self.gpu_memory_bytes


def microbatches_of(layout: ParallelLayout, asked: int | None, sequences: int, batch: int) -> int | None:
    """Microbatches of a data-parallel rank in a step of so many sequences in all; None where they do not divide.

    An interleaved pipeline needs a multiple of its stages.
    """
    if asked is not None:
        count = asked
    else:
        whole, rest = divmod(sequences, layout.data * batch)
        if rest or not whole:
            return None
        count = whole
    if layout.stages_per_gpu > 1 and count % layout.pipeline:
        return None
    return count


def rank(
    job: StepJob,
    layouts: Sequence[ParallelLayout],
    *,
    sequences: int,
    microbatches: int | None,
    gpu_memory_bytes: int | None,
    optimizer_bytes: int,
    unknown: list[str] | None = None,
) -> list[RankedLayout]:
    """Every layout that the batch divides by, by the time of a token; of many, those that do not fit are left out.

    `unknown` gathers layouts whose collectives nothing is known of; where it is None, or all are, UsageError is raised.
    """
    fitting: list[tuple[ParallelLayout, int, MemoryNeed]] = []
    others: list[tuple[ParallelLayout, int, MemoryNeed]] = []
    for layout in layouts:
        count = microbatches_of(layout, microbatches, sequences, job.model.batch)
        if count is None:
            continue
        need = memory_need(job.model, layout, count, optimizer_bytes)
        fits = gpu_memory_bytes is None or need.total <= gpu_memory_bytes
        (fitting if fits else others).append((layout, count, need))
    others = sorted(others, key=lambda each: each[2].total)[: _MOST_THAT_DO_NOT_FIT if fitting else 1]
    found, last = list[RankedLayout](), None
    for layout, count, need in (*fitting, *others):
        own = replace(job, layout=layout, settings=replace(job.settings, microbatches=count))
        try:
            prediction = predict(own, with_range=False)
        except UsageError as error:
            if unknown is None:
                raise
            unknown.append(f"{layout}: {error.seen}")
            last = error
            continue
        found.append(RankedLayout(prediction=prediction, need=need, gpu_memory_bytes=gpu_memory_bytes))
    if not found and last is not None:
        raise last
    return sorted(found, key=lambda each: (each.fits is False, seconds_a_sequence(each.prediction), each.need.total))


def first_fit(
    model: TransformerModel, gpus_per_node: int, gpu_memory_bytes: int, optimizer_bytes: int
) -> tuple[int, ParallelLayout, MemoryNeed] | None:
    """The fewest nodes, doubled from one on, on which some layout fits, and the one that needs least; None: none."""
    for nodes in (1 << power for power in range(_MOST_DOUBLINGS)):
        gpus = nodes * gpus_per_node
        needs = [
            (layout, memory_need(model, layout, count, optimizer_bytes))
            for layout in layouts_for(model, gpus, gpus_per_node)
            if (count := microbatches_of(layout, None, model.batch * gpus, model.batch)) is not None
        ]
        layout, least = min(needs, key=lambda each: each[1].total)
        if least.total <= gpu_memory_bytes:
            return nodes, layout, least
    return None


def seconds_a_sequence(prediction: StepPrediction) -> float:
    """Of a step, over all sequences that it trains on."""
    job = prediction.job
    return prediction.seconds / (job.layout.data * job.settings.microbatches * job.model.batch)


def tokens_per_second(prediction: StepPrediction) -> float:
    """Of all GPUs."""
    return prediction.job.model.sequence / seconds_a_sequence(prediction)
