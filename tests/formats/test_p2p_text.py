"""Copies for people: what pairs reach of what is expected of them, or else of the limit."""

import io
from collections.abc import Sequence

from msgspec.structs import replace

from gpubench.formats.blocks import blocks
from gpubench.formats.json import DocumentRun
from gpubench.formats.layout import Grid
from gpubench.formats.registry import TABLE, Presentation, Target
from gpubench.formats.text.p2p import expected_lines, limit_lines
from gpubench.model.results.report import PAIR_COLUMNS, PairRow, Report
from gpubench.model.terms.verdict import Verdict
from tests.formats.sample import METADATA, REPORT
from tests.formats.sample import PAIR as SAMPLE_PAIR

GPUS = {f"GPU{number}": f"0000:0{number}:00.0 NVIDIA H200" for number in range(4)}
PAIR = replace(
    SAMPLE_PAIR,
    bandwidth_gb_s=395.0,
    latency_us=680.0,
    limit_percent=87.8,
    verdict="PASS",
    expected_gb_s=395.0,
    expected_percent=100.0,
    expected_source="profile hgx-h200-4",
)
SLOW = replace(PAIR, source="GPU2", destination="GPU0", bandwidth_gb_s=25.0, expected_percent=6.33, verdict="FAIL")
UNKNOWN = replace(PAIR, expected_gb_s=None, expected_percent=None, expected_source=None)


def shown(rows: Sequence[PairRow], *, width: int = 80, verbose: bool = False) -> str:
    options = {
        "gpus": GPUS, "pairs": [[each.source, each.destination] for each in rows], "check": True,
        "repeats": None, "sample_seconds": 0.01, "samples": 3, "warmup": 4,
    }  # fmt: skip
    metadata = replace(METADATA, subject="p2p", collective=None, backend=None, ranks=(), options=options)
    stream = io.StringIO()
    writer = TABLE.writer(Target(stream=stream), Presentation(width=width, verbose=verbose))
    writer.begin(metadata, PAIR_COLUMNS)
    for row in rows:
        writer.row(row)
    writer.end(Report(verdict=Verdict.PASS, complete=True, main="pairs"))
    return stream.getvalue()


def test_the_limit_is_for_large_copies_that_go_straight_there() -> None:
    assert list(expected_lines([UNKNOWN])) == []
    assert list(limit_lines([UNKNOWN, replace(UNKNOWN, limit_percent=12.0)])) == ["% limit: 12 to 88"]
    assert list(limit_lines([PAIR])) == []
    assert list(limit_lines([replace(UNKNOWN, peer="off")])) == []
    assert list(limit_lines([replace(UNKNOWN, size_bytes=16)])) == []


def test_figures_are_held_against_what_is_expected_also_where_all_are_slow() -> None:
    slow = [replace(SLOW, source=f"GPU{number}") for number in (1, 2)]
    (grid,) = [block for block in blocks(DocumentRun(METADATA, slow, REPORT)) if isinstance(block, Grid)]
    assert {round(cell.share or 0, 3) for line in grid.lines.values() for cell in line.values()} == {0.063}
    assert (grid.title, grid.note.split(". ", 1)[1]) == (
        "Writes of 256M",
        "Expected: profile hgx-h200-4. Reached: 6.3 %.",
    )


def test_host_memory_says_what_is_expected_of_it() -> None:
    assert "% exp: 100; expected: profile hgx-h200-4" in shown([replace(PAIR, source="host", note="pinned")] * 4)


def test_the_header_has_alike_gpus_in_one_line() -> None:
    text = shown([PAIR])
    assert "  GPU0-3: NVIDIA H200\n" in text
    assert text.splitlines().index("") <= 10
    assert "  GPU2 0000:02:00.0 NVIDIA H200\n" in shown([PAIR], verbose=True)
