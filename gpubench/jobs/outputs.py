"""Outputs are tried before anything is measured."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpubench.errors import unwritable_output
from gpubench.formats.presentation import Output
from gpubench.formats.registry import DATED


def check_writable(outputs: Sequence[Output], recording: Path | None = None) -> None:
    """Raise UsageError for what cannot be written, before anything is measured; no file is changed, a folder made.

    `recording` is the folder of --record, where that was given.
    """
    for output in outputs:
        try:
            (_try_folder if output.format is DATED else _try_file)(output.path)
        except OSError as error:
            raise unwritable_output(output.path, error) from error
    if recording is not None:
        from gpubench.hardware.recorded import check_recordable

        check_recordable(recording)


def _try_file(path: Path) -> None:
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.unlink()


def _try_folder(path: Path) -> None:
    """Make it, and a file in it that is gone at once: modes alone do not tell, of root or of a read-only disk."""
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        pass
