"""Do something on every rank, and have every rank know when it failed on any."""

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from gpubench.errors import GpubenchError, UsageError
from gpubench.ports.group import Group

T = TypeVar("T")


class AgreedError(Exception):
    """An error that every rank of the job has raised alike, so that all can end in order."""

    def __init__(self, error: GpubenchError) -> None:
        super().__init__(str(error))
        self.error = error


def agree(group: Group, action: Callable[[], T], place: str = "") -> T:
    """The outcome of `action` on this rank, once it has succeeded on all.

    `place` names this rank, for errors that may be one rank's own. Raises AgreedError: on every rank, the error of the
    lowest rank on which it failed.
    """
    outcome: T | None = None
    error: GpubenchError | None = None
    try:
        outcome = action()
    except GpubenchError as raised:
        error = raised
        error.where = error.where or place
    errors = [record for record in group.gather(error.to_record() if error else None) if record]
    if errors:
        raise AgreedError(GpubenchError.from_record(errors[0]))
    return cast("T", outcome)


def agree_on_defaults(group: Group, defaults: Mapping[str, str]) -> None:
    """Raise AgreedError where ranks have other options than the first, from the environment or a file of their host."""
    first, *others = group.gather(dict(defaults))
    for rank, other in enumerate(others, 1):
        differing = next((each for each in {**first, **other} if first.get(each) != other.get(each)), None)
        if differing is not None:
            had = [f"rank {number}: {each.get(differing, 'not set')}" for number, each in ((0, first), (rank, other))]
            raise AgreedError(
                UsageError(
                    f"ranks do not agree on {differing}: {', '.join(had)}",
                    expected="the same option on every rank",
                    reason="a launcher hands variables on to other hosts only where it is told to, and a file of the "
                    "current folder is read on each host",
                    next_step=f"give {differing} on the command line",
                )
            )
