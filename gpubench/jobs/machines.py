"""The machines of a run: nodes, processes, where they come from, and the metadata of a report on them."""

import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gpubench import __version__
from gpubench.errors import CouldNotMeasureError, no_gpu
from gpubench.hardware import launch
from gpubench.model.facts.environment import MPS, MPS_SETTINGS
from gpubench.model.facts.health import given
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.paths.nodes import topologies, with_own_names
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import Metadata
from gpubench.model.terms.verdict import Origin

if TYPE_CHECKING:
    from gpubench.profiles import ProfileMatch


_NEEDED = ("nvml", "cuda")  # Sources of facts without which nothing is measured
_NONE_FOUND = "the driver finds none on this host"


def check_drivers(nodes: Sequence[Snapshot], for_what: str, source: str) -> None:
    """Raise CouldNotMeasureError for a node without a driver, or with one that does not answer: nothing runs there."""
    for node in nodes:
        if node.driver.absent:
            raise no_gpu(f"{node.host}: {node.driver.absent}", for_what=for_what)
        silent = next((each for each in node.failures if each.stage in _NEEDED), None)
        if silent is not None:
            raise CouldNotMeasureError(
                f"the driver of {node.host} does not answer: {silent.stage}, {silent.error}",
                expected="an answer from NVML and CUDA",
                next_step=f"gpubench check {source}",
            )


def check_any_gpu(nodes: Sequence[Topology], expected_gpus: int | None, for_what: str, hidden: str = "") -> None:
    """Raise CouldNotMeasureError where GPUs are expected and no node has any; `hidden` says what was left out."""
    if expected_gpus is not None and not any(node.gpus or node.snapshot.failures for node in nodes):
        reason = hidden or nodes[0].snapshot.driver.absent or _NONE_FOUND
        raise no_gpu(f"{reason}, and --expect-gpus says {expected_gpus}", for_what=for_what)


@dataclass(frozen=True, slots=True)
class Machines:
    """Nodes by names, processes, and `environment`; `source` are the options that named them, None for here."""

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
        """Nodes with the same name get names of their own."""
        return cls(topologies(with_own_names(snapshots)), processes, source, environment or {})

    @property
    def origin(self) -> Origin:
        """The origin of all nodes; recorded, where they have several."""
        origins = {node.snapshot.origin for node in self.nodes}
        return origins.pop() if len(origins) == 1 else Origin.RECORDED

    def with_snapshots(self, snapshots: Sequence[Snapshot]) -> "Machines":
        """The same machines, their nodes read again."""
        return replace(self, nodes=topologies(snapshots))

    def given(self) -> "Machines":
        """The same without the GPUs that CUDA_VISIBLE_DEVICES hides from all processes of their node."""
        snapshots = [
            given(node, [each for each in self.processes if each.node == number])
            for number, node in enumerate(self.snapshots)
        ]
        changed = any(new is not old for new, old in zip(snapshots, self.snapshots, strict=True))
        return self.with_snapshots(snapshots) if changed else self

    @property
    def gpus(self) -> int:
        """The number of GPUs of all nodes."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def why_no_gpu(self) -> str:
        """The reason why the first node has no GPU that may be used."""
        node = self.nodes[0]
        if node.gpus:
            return f"CUDA_VISIBLE_DEVICES hides {'the GPU' if len(node.gpus) == 1 else f'all {len(node.gpus)} GPUs'}"
        return node.snapshot.driver.absent or _NONE_FOUND

    @property
    def snapshots(self) -> list[Snapshot]:
        """The facts of every node."""
        return [node.snapshot for node in self.nodes]


_SETTINGS = (
    *("NCCL_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "UCX_", "FI_", "MPI4PY_"),
    *(f"OMPI_MCA_{framework}" for framework in ("pml", "btl", "mtl", "coll", "smsc", "osc", "accelerator")),
    *("OMPI_MCA_opal_cuda", "OMPI_MCA_mpi_cuda", "MPIR_CVAR_ENABLE_GPU", "MPICH_GPU_", "MPICH_RDMA_ENABLED_CUDA"),
    *("MV2_USE_CUDA", "MVP_USE_CUDA", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OFI_NCCL_", "GGML_CUDA_"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"),
    MPS_SETTINGS,
)
"""What of the environment is recorded: settings that change results, never the whole. Open MPI's mpirun hands its ranks
many variables of its own, so of those only the frameworks that carry messages or know of GPUs count."""

_IMAGE_VERSION = "NCCL_VERSION"  # NVIDIA's container images set this to the version they ship; NCCL does not read it


def stamp(arguments: Sequence[str]) -> dict[str, Any]:
    """Version, run id, time and command line."""
    return {
        "gpubench_version": __version__,
        "run_id": str(uuid.uuid4()),
        "started_at": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        "command": ["gpubench", *arguments],
    }


def recorded_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of the user's that change results; what gpubench set for its own ranks is left out."""
    own = launch.own_settings(environment)
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_SETTINGS) and name not in (*own, _IMAGE_VERSION)
    }


def metadata_of(
    arguments: Sequence[str],
    subject: str,
    *,
    machines: "Machines | None" = None,
    matched: "ProfileMatch | None" = None,
    asked_profile: bool = False,
    **values: Any,
) -> Metadata:
    """Metadata with version, run id, time and command line, and what follows from machines and their profile.

    `values` are further fields of Metadata, and come before those of the machines, of which the fingerprint is that of
    most nodes.
    """
    known: dict[str, Any] = {}
    if machines is not None:
        from gpubench.model.facts.snapshot import mps_in_use

        driver = machines.nodes[0].snapshot.driver
        mps = mps_in_use((gpu for node in machines.nodes for gpu in node.gpus), machines.environment)
        known = {
            "origin": machines.origin,
            "hosts": [node.snapshot.host for node in machines.nodes],
            "libraries": {
                **({"driver": f"{driver.version} (runs CUDA {driver.cuda})"} if driver.version else {}),
                **({MPS: mps} if mps else {}),
            },
            "environment": machines.environment,
            "topology": Counter(node.fingerprint() for node in machines.nodes).most_common(1)[0][0],
            "source": machines.source,
        }
    if matched is not None:
        note = "asked for" if asked_profile else matched.note
        known["profile"] = {
            "name": matched.profile.name,
            "sha256": matched.profile.sha256,
            **({"note": note} if note else {}),
        }
    return Metadata(**{**stamp(arguments), "subject": subject, **known, **values})
