"""This machine's past, from the folder that a run keeps its own result in."""

from pathlib import Path

from gpubench.errors import UsageError
from gpubench.model.results.past import PastFigures
from gpubench.model.results.report import Metadata
from gpubench.readers.results.past_results import past_figures


def past_of(folder: Path | None, metadata: Metadata) -> PastFigures | None:
    """What earlier results in the folder of `--output results/` let a run expect; None without such a folder.

    To be called before the first measurement, by the process that judges. A folder that cannot be read stops no run:
    `note` of what is returned says so.
    """
    if folder is None:
        return None
    try:
        return past_figures(folder, metadata)
    except UsageError as error:
        return PastFigures(f"{folder}", problem=error.seen)
