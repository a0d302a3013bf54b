"""Who started this process: a person, or a launcher of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

CHANNEL_VARIABLE = "GPUBENCH_CHANNEL"
"""Set by a gpubench that relaunched itself: the socket on which it listens to its ranks."""

SECONDS_FOR_THE_FIRST_RANK = 1.0
"""How long other ranks wait before they end with an error that the first is to report: launchers kill all ranks as soon
as one has failed, also the one that is about to speak."""

_PMI = "a PMI launcher (mpiexec or srun)"

_SLURM_INTERACTIVE_STEP = 0xFFFFFFF0
"""Step numbers from here on are Slurm's own (batch, interactive, external): no job step of the user's."""


@dataclass(frozen=True, slots=True)
class LaunchedBy:
    """What the environment claims: the launcher's name, this process's rank, and how many processes there are."""

    launcher: str
    rank: int
    size: int


def launched_by(environment: Mapping[str, str]) -> LaunchedBy | None:
    """The launcher that started this process as one of its ranks, or None for a process started alone.

    A shell that `srun --pty` opened inside an allocation is not a rank, and neither is one task, also where srun speaks
    PMI to it: there, gpubench launches itself.
    """
    claims = (
        ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        (_PMI, "PMI_RANK", "PMI_SIZE"),
        ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    )
    for launcher, rank_variable, size_variable in claims:
        rank, size = _number(environment, rank_variable), _number(environment, size_variable)
        if rank is None or size is None:
            continue
        if size == 1 and launcher in (_PMI, "srun") and environment.get("SLURM_STEP_NUM_TASKS") == "1":
            continue
        if launcher == "srun" and (_number(environment, "SLURM_STEP_ID") or 0) >= _SLURM_INTERACTIVE_STEP:
            continue
        return LaunchedBy(launcher, rank, size)
    return None


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None
