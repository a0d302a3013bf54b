"""The watchdog aborts the communicators of all backends of a run."""

from types import SimpleNamespace
from typing import Any, cast

from gpubench.jobs.collective.opened import answer_for_all


class Waiting:
    def __init__(self, said: str) -> None:
        self.said = said
        self.aborted = 0

    def trouble(self) -> str:
        return self.said

    def abort(self) -> None:
        self.aborted += 1


def test_all_backends_answer_and_are_aborted() -> None:
    answers: list[Any] = []
    progress = cast("Any", SimpleNamespace(answer_watchdog=lambda *given: answers.extend(given)))
    first, second = Waiting(""), Waiting("NCCL's asynchronous error: unhandled system error")
    blocking = SimpleNamespace(name="host")
    answer_for_all(progress, cast("Any", [first, blocking]))
    assert answers == [], "a single one answers by itself since it was opened"
    answer_for_all(progress, cast("Any", [first, second, blocking]))
    trouble, abort = answers
    assert trouble() == second.said
    abort()
    assert (first.aborted, second.aborted) == (1, 1)
