"""Do something on every rank, and have every rank know when it failed on any."""

from collections.abc import Callable
from typing import TypeVar, cast

from gpubench.errors import GpubenchError
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
