"""Build the metadata of a run. Every command uses it."""

import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gpubench import __version__
from gpubench.model.facts.environment import MPS, MPS_PREFIX
from gpubench.model.results.report import Metadata
from gpubench.ranks import launch

if TYPE_CHECKING:
    from gpubench.jobs.machines import Machines
    from gpubench.profiles import ProfileMatch

_SETTINGS = (
    *("NCCL_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "UCX_", "FI_", "MPI4PY_"),
    *(f"OMPI_MCA_{framework}" for framework in ("pml", "btl", "mtl", "coll", "smsc", "osc", "accelerator")),
    *("OMPI_MCA_opal_cuda", "OMPI_MCA_mpi_cuda", "MPIR_CVAR_ENABLE_GPU", "MPICH_GPU_", "MPICH_RDMA_ENABLED_CUDA"),
    *("MV2_USE_CUDA", "MVP_USE_CUDA", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OFI_NCCL_", "GGML_CUDA_"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"),
    MPS_PREFIX,
)
"""Prefixes of the environment variables to record, because they can change results. Open MPI sets many variables
for its ranks, so only frameworks that move messages or handle GPU memory are recorded.
"""

# NVIDIA's container images set this variable to their NCCL version. NCCL does not read it.
_IMAGE_VERSION = "NCCL_VERSION"


def stamp(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the gpubench version, run ID, start time and command line."""
    return {
        "gpubench_version": __version__,
        "run_id": str(uuid.uuid4()),
        "started_at": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        "command": ["gpubench", *arguments],
    }


def recorded_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment variables that can change results. Leave out variables that gpubench set for
    its ranks.
    """
    own = launch.own_settings(environment)
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_SETTINGS) and name not in (*own, _IMAGE_VERSION)
    }


def build_metadata(
    arguments: Sequence[str],
    subject: str,
    *,
    machines: "Machines | None" = None,
    matched: "ProfileMatch | None" = None,
    asked_profile: bool = False,
    **values: Any,
) -> Metadata:
    """Return the metadata of a run, derived from its machines and their profile.

    `values` are additional fields, which override the fields from the machines. The topology fingerprint is the most
    common one among the nodes.
    """
    known: dict[str, Any] = {}
    if machines is not None:
        from gpubench.model.facts.process import mps_in_use

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
        note = "requested" if asked_profile else matched.note
        known["profile"] = {
            "name": matched.profile.name,
            "sha256": matched.profile.sha256,
            **({"note": note} if note else {}),
        }
    return Metadata(**{**stamp(arguments), "subject": subject, **known, **values})
