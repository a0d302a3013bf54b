"""The machines of a run: nodes, processes, and where their facts come from."""

from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.errors import LOAD_DRIVER, CouldNotMeasureError, no_gpu
from gpubench.model.facts.health import drop_hidden
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.nodes import build_topologies, rename_duplicates
from gpubench.model.paths.topology import Topology
from gpubench.model.terms.verdict import Origin

_NEEDED = ("nvml", "cuda")  # Without facts from NVML and CUDA, nothing can be measured
_NONE_FOUND = "the driver finds none on this host"


def check_drivers(nodes: Sequence[Snapshot], for_what: str, source: str) -> None:
    """Raise CouldNotMeasureError if the GPU driver of a node is missing or does not respond."""
    for node in nodes:
        if node.driver.absent:
            error = no_gpu(f"{node.host}: {node.driver.absent}", for_what=for_what)
            if node.gpus:
                error.next_step, error.comment = LOAD_DRIVER, ""
            raise error
        silent = next((failure for failure in node.failures if failure.stage in _NEEDED), None)
        if silent is not None:
            raise CouldNotMeasureError(
                f"the driver of {node.host} does not answer: {silent.stage}, {silent.error}",
                expected="an answer from NVML and CUDA",
                next_step=f"gpubench check {source}",
            )


def check_any_gpu(
    nodes: Sequence[Topology], expected_gpus: int | None, for_what: str, hidden: str = "", instead: str = ""
) -> None:
    """Raise CouldNotMeasureError if --expect-gpus is used and no node has a GPU. `hidden` is the reason why GPUs
    are hidden, if they are.
    """
    if expected_gpus is not None and not any(node.gpus or node.snapshot.failures for node in nodes):
        reason = hidden or nodes[0].snapshot.driver.absent or _NONE_FOUND
        error = no_gpu(f"{reason}, but --expect-gpus is {expected_gpus}", for_what, instead)
        error.blames_node = "CUDA_VISIBLE_DEVICES" not in reason
        raise error


class Machines(Struct, frozen=True):
    """Nodes, processes and environment of a run. `source` has the options that select the machines, or is None for
    this machine.
    """

    nodes: Sequence[Topology]
    processes: Sequence[RankFacts] = ()
    source: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        snapshots: Sequence[Snapshot],
        processes: Sequence[RankFacts] = (),
        source: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "Machines":
        """Build machines from snapshots, and rename nodes that have the same name."""
        return cls(build_topologies(rename_duplicates(snapshots)), processes, source, environment or {})

    @property
    def origin(self) -> Origin:
        """The origin that all nodes share, or RECORDED if their origins differ."""
        origins = {node.snapshot.origin for node in self.nodes}
        return origins.pop() if len(origins) == 1 else Origin.RECORDED

    def replace_snapshots(self, snapshots: Sequence[Snapshot]) -> "Machines":
        """Return a copy of the machines with new snapshots of the same nodes."""
        return replace(self, nodes=build_topologies(snapshots))

    def visible(self) -> "Machines":
        """Return the machines without the GPUs that CUDA_VISIBLE_DEVICES hides from all processes of a node."""
        snapshots = [
            drop_hidden(node, [process for process in self.processes if process.node == number])
            for number, node in enumerate(self.snapshots)
        ]
        changed = any(new is not old for new, old in zip(snapshots, self.snapshots, strict=True))
        return self.replace_snapshots(snapshots) if changed else self

    @property
    def gpus(self) -> int:
        """The total number of GPUs in all nodes."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def why_no_gpu(self) -> str:
        """The reason why processes cannot use any GPU of the first node."""
        node = self.nodes[0]
        if node.gpus:
            return f"CUDA_VISIBLE_DEVICES hides {'the GPU' if len(node.gpus) == 1 else f'all {len(node.gpus)} GPUs'}"
        return node.snapshot.driver.absent or _NONE_FOUND

    @property
    def snapshots(self) -> list[Snapshot]:
        return [node.snapshot for node in self.nodes]
