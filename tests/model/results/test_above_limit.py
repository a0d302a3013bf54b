"""A figure that no link carries is an ERROR; no figure of a healthy machine, published or recorded, is one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.published_collectives import read
from gpubench.model.results.report import CollectiveRow, PairRow
from gpubench.model.results.speed import refuse_above_limit, times_limit
from gpubench.model.terms.verdict import Verdict
from gpubench.readers.registry import read_results
from tests.fakes.measured_rows import row

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize(
    ("figure", "changes", "times"),
    [
        (450.0, {}, None),
        (494.9, {}, None),
        (496.0, {}, 496 / 450),
        (1800.0, {}, 4.0),
        (500.0, {"ci95_percent": 5.0}, None),
        (1800.0, {"limit_gb_s": None}, None),
        (1800.0, {"nodes": 2}, None),
        (1800.0, {"nodes": 2, "algorithm": "RING"}, 4.0),
        (1800.0, {"nodes": 2, "collective": "alltoall"}, 4.0),
    ],
)
def test_a_figure_is_above_its_limit_beyond_what_measuring_errs(
    figure: float, changes: dict[str, object], times: float | None
) -> None:
    """Switches that reduce, of which nothing tells where the algorithm is not known, double what NICs allow."""
    found = replace(row(2**28, 1.0, figure), **changes)
    assert times_limit(found) == (None if times is None else pytest.approx(times))
    verdict = refuse_above_limit(found).verdict
    assert verdict == (Verdict.PASS if times is None else Verdict.ERROR)


def test_wrong_data_stay_wrong_and_the_row_says_why_its_figure_counts_for_nothing() -> None:
    refused = refuse_above_limit(row(2**28, 1.0, 1800.0, wrong=3, verdict=Verdict.FAIL, note="n"))
    assert (refused.verdict, refused.note) == (
        Verdict.FAIL,
        "n; above the limit: the links' facts or the time is wrong",
    )


def recorded() -> Iterator[CollectiveRow | PairRow]:
    for path in sorted(RESULTS.glob("*/*")):
        found = read_results(path)
        yield from found.rows
        yield from found.pairs


def test_no_figure_of_a_recorded_machine_is_above_its_limit() -> None:
    rows = list(recorded())
    assert sum(each.limit_gb_s is not None for each in rows) > 100
    assert not [each for each in rows if times_limit(each) is not None]


def test_no_published_figure_is_above_its_limit_reductions_in_switches_included() -> None:
    figures = read()
    assert any("SHARP" in figure.source for figure in figures)
    rows = [replace(figure.row, limit_gb_s=figure.limit_gb_s) for figure in figures]
    assert not [each for each in rows if times_limit(each) is not None]
