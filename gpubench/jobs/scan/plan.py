"""The plan of a scan: which nodes, how they are to be measured, and what is kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpubench.formats.presentation import Presentation
from gpubench.jobs.simulation import Simulation

NAME = "scan"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPlan:
    """`leaves` are names by host, as `leaves_file` has them, None where none was given.

    `rounds` is the folder that rounds are kept in, `resume` one whose rounds are gone on with; `hostfile` takes the
    good nodes, and `ranks_as_nodes` makes every rank a node. More than one `ranks_per_gpu` are launched here. `backend`
    is what moves the data of real nodes, None for NCCL where they have GPUs; `round_timeout_s` the deadline of a round.
    """

    simulation: Simulation | None
    backend: str | None
    quick: bool
    leaves: Mapping[str, str] | None
    leaves_file: str | None
    rounds: Path | None
    resume: Path | None
    replay: Path | None
    hostfile: Path | None
    ranks_as_nodes: bool
    ranks_per_gpu: int
    seed: int
    strict: bool
    round_timeout_s: float
    presentation: Presentation
