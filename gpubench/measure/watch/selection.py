"""Whose traffic is watched: the jobs that have a process, or are of a Slurm job or a container."""

from dataclasses import dataclass, replace

from gpubench.measure.watch.jobs import groups_of
from gpubench.model.facts.traffic import NodeReading, TaskFacts

_SHORT_ID = 12
"""Digits of a container's id, as runtimes shorten it."""


@dataclass(frozen=True, slots=True)
class WatchedJobs:
    """The jobs to watch; all of them where neither is named. `job` is Slurm's number, or the beginning of a
    container's id.
    """

    pids: tuple[int, ...] = ()
    job: str | None = None

    @property
    def is_all(self) -> bool:
        """True where everything is watched."""
        return not self.pids and self.job is None

    @property
    def text(self) -> str:
        """In words."""
        named = [f"--pid {pid}" for pid in self.pids] + ([f"--job {self.job}"] if self.job is not None else [])
        return " ".join(named)

    def of(self, reading: NodeReading) -> NodeReading:
        """The reading with the GPUs and the processes of these jobs alone; NICs stay, which belong to nobody.

        So do GPUs that are lost: nobody says any more whose they were.
        """
        if self.is_all:
            return reading
        tasks = {task.pid: task for task in reading.tasks}
        chosen = {
            pid
            for group in groups_of(reading.tasks)
            if any(self._is_chosen(tasks[pid]) for pid in group)
            for pid in group
        }
        return replace(
            reading,
            tasks=tuple(task for task in reading.tasks if task.pid in chosen),
            gpus=tuple(
                gpu
                for gpu in reading.gpus
                if gpu.lost is not None or any(each.pid in chosen for each in gpu.processes or ())
            ),
        )

    def _is_chosen(self, task: TaskFacts) -> bool:
        if task.pid in self.pids:
            return True
        if self.job is None:
            return False
        if task.slurm_job == self.job:
            return True
        if self.job.isdecimal() and len(self.job) < _SHORT_ID:
            return False  # Slurm's number, with which a container's id may begin by chance
        return (task.container or "").rpartition(" ")[2].startswith(self.job[:_SHORT_ID].lower())
