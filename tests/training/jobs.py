"""Small models on fabrics whose times are a formula."""

from dataclasses import dataclass

from gpubench.model.terms.verdict import Origin
from gpubench.profiles import load
from gpubench.training.cluster import PlannedMachine
from gpubench.training.events import ContentionTable
from gpubench.training.program import (
    CollectiveCurve,
    CollectiveTimesFound,
    CommunicatorRanks,
    ComputeTimes,
    CurvePoint,
    StepJob,
    StepSettings,
    build_curve,
)
from gpubench.training.workload import BlockKind, TransformerModel, parse_layout

SIZES = tuple(2**power for power in range(8, 34))


@dataclass(frozen=True, slots=True)
class LinearFabric:
    """Every collective takes a latency and its bytes over a bandwidth, whatever the ranks."""

    gb_s: float
    latency_seconds: float = 0.0
    spread: float = 0.0

    def curve(self, collective: str, group: CommunicatorRanks) -> CollectiveCurve:
        points = [CurvePoint(size, self.latency_seconds + size / (self.gb_s * 1e9), self.spread) for size in SIZES]
        return build_curve(points)


def mlp(layers: int = 4, hidden: int = 1024) -> TransformerModel:
    """Two tensors of 4·hidden² elements a layer, 8 MiB each in bfloat16 with the usual hidden size."""
    return TransformerModel(
        name="mlp", layers=layers, hidden=hidden, heads=16, sequence=512, batch=1, kind=BlockKind.MLP
    )


def gpt(layers: int = 4, *, sequence: int = 512, experts: int = 0, experts_per_token: int = 0) -> TransformerModel:
    return TransformerModel(
        name="gpt",
        layers=layers,
        hidden=1024,
        heads=16,
        sequence=sequence,
        experts=experts,
        experts_per_token=experts_per_token,
    )


def job(
    model: TransformerModel,
    layout: str,
    gpus: int,
    *,
    gb_s: float = 100.0,
    latency_seconds: float = 0.0,
    forward_ms: float = 8.0,
    backward_ms: float = 16.0,
    contention: ContentionTable | None = None,
    spread: float = 0.0,
    copy_gb_s: float | None = None,
    settings: StepSettings | None = None,
) -> StepJob:
    """A job whose computation takes 24 ms a microbatch, without copies, on a fabric without latency."""
    return StepJob(
        model=model,
        layout=parse_layout(layout, gpus),
        compute=ComputeTimes(
            forward_seconds=forward_ms / 1e3,
            backward_seconds=backward_ms / 1e3,
            source="test",
            spread=spread,
            copy_gb_s=copy_gb_s,
        ),
        times=CollectiveTimesFound(LinearFabric(gb_s, latency_seconds, spread).curve),
        contention=contention or ContentionTable(),
        settings=settings or StepSettings(),
        gpus_per_node=max(gpus, 1),
    )


def planned_machine(name: str, nodes: int = 1) -> PlannedMachine:
    """So many nodes of a profile."""
    profile = load(name)
    return PlannedMachine(
        gpu=profile.gpu.name,
        gpus_per_node=profile.match.visible,
        nodes=nodes,
        profile=profile,
        hosts=tuple(f"node{number}" for number in range(nodes)),
        origin=Origin.SIMULATED,
        memory_bytes=profile.gpu.memory_bytes,
    )
