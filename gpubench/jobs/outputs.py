"""Check outputs before anything is measured, and listen to what is measured."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.errors import unwritable_output
from gpubench.formats.delivery import delivering
from gpubench.formats.registry import BASELINE, DATED, Output, Presentation

if TYPE_CHECKING:
    from gpubench.formats.presenter import Presenter
    from gpubench.model.results.report import CollectiveRow, Metadata, PairRow, Report, Row


@contextmanager
def presenting(
    shown: Presentation, recording: Path | None = None, *, is_rank: bool = False, progress: bool = False
) -> Iterator["Presenter"]:
    """Check the outputs and yield a presenter on stdout. The stdout of a rank never counts as a terminal."""
    from gpubench.formats.presenter import Presenter

    check_writable(shown.outputs, recording)
    presenter = Presenter(shown, progress=progress and shown.show_progress, is_rank=is_rank)
    with delivering(presenter):
        yield presenter


def check_writable(outputs: Sequence[Output], recording: Path | None = None) -> None:
    """Raise UsageError if an output cannot be written. No file is changed."""
    for output in outputs:
        try:
            if output.format is BASELINE:
                output.path.parent.mkdir(parents=True, exist_ok=True)
            (_try_folder if output.format is DATED else _try_file)(output.path)
        except OSError as error:
            raise unwritable_output(output.path, error) from error
    if recording is not None:
        from gpubench.machine.recorded import check_recordable

        check_recordable(recording)


def check_file_writable(path: Path) -> None:
    """Raise UsageError if a file cannot be written. It is not changed."""
    try:
        _try_file(path)
    except OSError as error:
        raise unwritable_output(path, error) from error


def _try_file(path: Path) -> None:
    if path.is_fifo():  # whose reader takes the end of a trial for the end of the data
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.unlink()


def _try_folder(path: Path) -> None:
    """Create the folder and a temporary file in it: for root, or on a read-only disk, modes are not enough."""
    import tempfile

    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        pass


class NullListener:
    """A listener that drops everything, for all ranks but the first."""

    def begin(self, metadata: "Metadata", columns: Sequence[str] | None = None) -> None: ...

    def progress(self, done: int, total: int, label: str) -> None: ...

    def row(self, row: "Row") -> None: ...

    def end(self, report: "Report") -> None: ...


class ReportCollector(NullListener):
    """A listener that keeps metadata, rows and report, for a measurement that is part of another command."""

    def __init__(self) -> None:
        self.metadata: Metadata | None = None
        self.pairs: list[PairRow] = []
        self.collectives: list[CollectiveRow] = []
        self.report: Report | None = None

    def begin(self, metadata: "Metadata", columns: Sequence[str] | None = None) -> None:  # noqa: ARG002
        self.metadata = metadata

    def row(self, row: "Row") -> None:
        from gpubench.model.results.report import CollectiveRow, PairRow

        if isinstance(row, PairRow):
            self.pairs.append(row)
        elif isinstance(row, CollectiveRow):
            self.collectives.append(row)

    def end(self, report: "Report") -> None:
        self.report = report
