"""The rows of `gpubench plan`: layouts, exposed communication and the cost of faults.

All times are predictions from an event simulation. docs/internals/plan-model.md derives them.
"""

from typing import Annotated

from gpubench.model.results.report import (
    SIGNED,
    OnPage,
    Record,
)


class LayoutRow(Record, frozen=True, kw_only=True):
    """A layout of the model on the GPUs. The layout with the shortest predicted step comes first."""

    section = "layouts"

    place: int  #: rank of the layout by predicted step time, 1 for the fastest
    #: parallelism of the layout: tp tensor, sp sequence, pp pipeline, v stages per GPU, cp context, ep expert, dp data
    layout: str
    gpus: int  #: number of GPUs
    microbatches: int  #: number of microbatches per step on one data-parallel rank
    step_ms: float  #: predicted step time in milliseconds: forward, backward and optimizer
    step_least_ms: float  #: lower bound of the step time in milliseconds: fastest expected computation, minus noise
    step_most_ms: float  #: upper bound of the step time in milliseconds
    compute_ms: float  #: time per step spent computing, at full speed, on the GPU that ends last
    slowed_ms: float  #: time per step that concurrent communication adds to computation
    exposed_ms: float  #: time per step spent waiting for communication
    bubble_ms: float  #: time per step spent waiting for other pipeline stages
    tokens_per_second: float  #: predicted throughput of all GPUs in tokens per second
    bucket_mb: float | None  #: maximum size of a gradient bucket in MiB (null if the layout has none)
    states_bytes: int  #: bytes for weights, gradients and optimizer states on the fullest GPU, without activations
    gpu_memory_bytes: int | None  #: memory of one GPU in bytes (null if unknown)
    #: time per step in which a GPU is idle because the host has not issued work (null if not measured)
    host_ms: float | None = None


class ExposedRow(Record, frozen=True, kw_only=True):
    """The time that one type of communication costs in the fastest layout."""

    section = "exposed"
    on_page = OnPage("Communication of the best layout")

    source: str  #: purpose of the communication
    collective: str  #: name of the collective
    operations: int  #: number of operations per step on one GPU
    bytes: int  #: total size of these operations in bytes, as nccl-tests defines it
    alone_ms: float  #: time of these operations without concurrent work
    exposed_ms: float  #: time per step in which a GPU waits for these operations
    hidden_percent: float  #: percent of alone_ms that does not lengthen the step


class FaultCostRow(Record, frozen=True, kw_only=True):
    """The fastest layout on another fabric: with a fault, or as the profile expects it."""

    section = "fault_costs"
    on_page = OnPage("Cost of faults")

    fault: str  #: fault in the syntax of --fault; none: the fabric that the profile expects
    what: str  #: description of the fault
    source: str  #: why the fault is listed: requested, usual (included by default), or the file that describes it
    step_ms: float  #: predicted step time with the fault in milliseconds
    #: how much longer the step is with the fault, in percent (negative if shorter)
    slower_percent: Annotated[float, SIGNED]
    exposed_ms: float  #: time per step spent waiting for communication
    communication_ms: float  #: time of the step's collectives with the fault, without concurrent work
    slowed_ms: float  #: time per step that concurrent communication adds to computation
    note: str | None = None  #: why the fault does not make the step slower
