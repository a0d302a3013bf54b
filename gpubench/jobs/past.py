"""This machine's past, from the folder that a run keeps its own result in."""

from pathlib import Path

from gpubench.errors import UsageError
from gpubench.measure.p2p.expected import PastBandwidth
from gpubench.model.results.past import PastFigures
from gpubench.model.results.report import Metadata, PairRow
from gpubench.readers.results.past_results import past_figures


def bandwidth_of(past: PastFigures | None) -> PastBandwidth:
    """The bandwidth of a pair in earlier results, for `gpubench p2p`."""

    def look_up(row: PairRow) -> tuple[float, str] | None:
        figure = None if past is None else past.copy_of(row)
        return None if figure is None or figure.gb_s is None else (figure.gb_s, figure.source)

    return look_up


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
