"""Progress without a watchdog, which records what a rank reports."""

from collections.abc import Callable, Sequence

from gpubench.model.terms.ranks import Phase, RankState
from gpubench.ranks.watchdog.progress import ProgressBlock


class FakeProgress:
    def __init__(self, rank: int = 0) -> None:
        self.block = ProgressBlock()
        self.completed = self.block.completed
        self.phases: list[Phase] = []
        self.places: list[str] = []
        self.help: list[Callable[[], object]] = []
        self.rank = rank

    def enter(self, phase: Phase, label: str = "", operations: int = 0) -> None:
        self.phases.append(phase)
        self.block.enter(phase, label, operations)

    def name_ranks(self, places: Sequence[object]) -> None:
        self.places = [str(place) for place in places]

    def answer_watchdog(self, trouble: Callable[[], str], abort: Callable[[], object]) -> None:
        self.help = [trouble, abort]

    def state(self, idle_seconds: float = 0) -> RankState:
        """Return the state that a watchdog would see."""
        seen = self.block.read()
        return RankState(
            rank=self.rank, place=f"rank {self.rank}", pid=1, phase=seen.phase, label=seen.label, step=seen.step,
            done=seen.done, total=seen.total, idle_seconds=idle_seconds, process="S",
        )  # fmt: skip
