"""What a person sees of a comparison."""

import io

import pytest
from msgspec.structs import replace

from gpubench.formats.registry import TABLE, Presentation, Target
from gpubench.model.results.compare import CircumstanceRow, ComparisonRow
from gpubench.model.results.report import Report, Table
from gpubench.model.terms.verdict import Verdict
from tests.formats.sample import METADATA

FILE = {
    "file": "base.json",
    "kind": "gpubench JSON",
    "rows": 2,
    "told": "gpubench 0.1.0",
    "remarks": ["cut short"],
    "series": None,
}
OPTIONS = {"base": [FILE] * 6, "new": [FILE], "threshold": 5.0}
SLOW = ComparisonRow(
    collective="allreduce",
    size_bytes=2**30,
    dtype="bfloat16",
    op="max",
    placement="in_place",
    mode="throughput",
    status="compared",
    change="slower",
    verdict="FAIL",
    slower_percent=12.34,
    noise_percent=2.0,
    base_time_us=4000.0,
    new_time_us=4493.6,
    base_gb_s=470.0,
    new_gb_s=418.4,
)
SAME = replace(SLOW, change="same", verdict="PASS", slower_percent=0.5, size_bytes=1024)
FASTER = replace(SAME, change="faster", slower_percent=-20.0)


def shown(rows: list[ComparisonRow], width: int = 80, circumstances: tuple[CircumstanceRow, ...] = ()) -> str:
    stream = io.StringIO()
    writer = TABLE.writer(Target(stream=stream), Presentation(width=width))
    writer.begin(replace(METADATA, subject="compare", collective=None, origin="recorded", options=OPTIONS), ())
    sections = {
        "comparison": Table(ComparisonRow.columns(), lambda: rows),
        "circumstances": Table(CircumstanceRow.columns(), lambda: circumstances),
    }
    writer.end(Report(verdict=Verdict.FAIL, complete=True, sections=sections, main="comparison"))
    return stream.getvalue()


def test_small_rows_show_times() -> None:
    assert "4000.0 → 4493.6 µs" in shown([replace(SLOW, size_bytes=1024)])


def test_of_many_rows_the_worst() -> None:
    text = shown([SLOW] * 30 + [FASTER] * 9)
    assert "and 20 more rows that got worse" in text
    assert "and 4 more rows that got faster" in text


def test_what_changed() -> None:
    rows = tuple(CircumstanceRow(name=f"n{number}", base="a", new="b", changed=True) for number in range(14))
    text = shown([SAME], circumstances=rows)
    assert "changed: n0: a → b" in text
    assert "and 2 more: --format csv --section circumstances" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_every_width(width: int) -> None:
    pair = replace(SLOW, collective=None, source="0000:01:00.0", source_device="GPU0", direction="write", engine="ce")
    pair = replace(pair, destination="0000:02:00.0", destination_device="GPU1")
    untimed = replace(pair, slower_percent=None, base_gb_s=None, new_gb_s=None, reason="limit lower")
    for rows in ([SLOW, SAME], [pair], [untimed]):
        lines = shown(rows, width).splitlines()
        assert max(map(len, lines)) <= max(width, 62)
    assert "GPU0 → GPU1 write ce" in shown([pair])
    assert "limit lower" in shown([untimed])


def test_added_rows_are_counted() -> None:
    assert "1 row only in the new results" in shown([SAME, replace(SLOW, status="added", verdict="SKIP")])
