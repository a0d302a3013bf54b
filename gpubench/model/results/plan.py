"""The rows of `gpubench plan`: layouts, exposed communication, costs of faults.

All times are predictions of an event simulation; `docs/plan.md` derives them.
"""

from typing import Annotated

from gpubench.model.results.report import (
    SIGNED,
    OnPage,
    Record,
)


class LayoutRow(Record, frozen=True, kw_only=True):
    """A layout of the model over the GPUs, sorted by predicted step time."""

    section = "layouts"

    place: int  #: 1 is the best
    #: tp tensor, sp sequence, pp pipeline, v stages a GPU, cp context, ep expert, dp data parallel
    layout: str
    gpus: int  #: GPUs in all
    microbatches: int  #: of a step, on one data-parallel rank
    step_ms: float  #: predicted time of forward, backward and optimizer
    step_least_ms: float  #: lower bound: fastest expected computation, minus noise
    step_most_ms: float  #: upper bound
    compute_ms: float  #: of it computing at full speed, on the GPU that ends last
    slowed_ms: float  #: time that concurrent communication adds to computation
    exposed_ms: float  #: waiting for communication
    bubble_ms: float  #: waiting for other stages of the pipeline
    tokens_per_second: float  #: of all GPUs
    bucket_mb: float | None  #: cap of a gradient bucket, MiB; null: the layout has none
    states_bytes: int  #: of weights, gradients and optimizer states on the fullest GPU; activations come to these
    gpu_memory_bytes: int | None  #: that a GPU has; null: not known
    #: of the step, in which a GPU has nothing to do because the host has not issued more; null: not measured
    host_ms: float | None = None


class ExposedRow(Record, frozen=True, kw_only=True):
    """The cost of one kind of communication in the chosen layout."""

    section = "exposed"
    on_page = OnPage("Communication of the best layout")

    source: str  #: what it is for
    collective: str  #: what is run
    operations: int  #: of a step on one GPU
    bytes: int  #: of all of them, in nccl-tests' size
    alone_ms: float  #: what they take with nothing beside them
    exposed_ms: float  #: of the step, in which nothing is computed because of them
    hidden_percent: float  #: of what they take alone, the share that costs the step nothing


class FaultCostRow(Record, frozen=True, kw_only=True):
    """The chosen layout on another fabric: with a fault, or as the profile expects it."""

    section = "fault_costs"
    on_page = OnPage("What faults cost")

    fault: str  #: as --fault writes it; none: the fabric that the profile expects
    what: str  #: description
    source: str  #: requested; usual: tried by default; or the file that describes it
    step_ms: float  #: predicted
    slower_percent: Annotated[float, SIGNED]  #: than without; negative: faster
    exposed_ms: float  #: waiting for communication
    communication_ms: float  #: what the step's collectives take then, nothing beside them
    slowed_ms: float  #: time that concurrent communication adds to computation
    note: str | None = None  #: why the step is not slower, where it is not
