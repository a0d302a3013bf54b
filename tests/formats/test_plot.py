"""Curves in a terminal: what was measured is where it belongs, at any width, in any encoding."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpubench.formats.layout import plot_lines
from gpubench.model.results.compare import OPEN_ENDED, Chart, CurveLine, Points, charts
from tests.cli.running import ROOT, environment, gpubench
from tests.formats.sample import ROW

SWEEP = [
    replace(ROW, size_bytes=2**power, busbw_gb_s=power * 10.0, limit_gb_s=450.0, expected_gb_s=400.0)
    for power in range(10, 31)
]
points = st.lists(
    st.tuples(st.integers(1, 2**40), st.floats(0, 1e6)), min_size=1, max_size=40, unique_by=lambda each: each[0]
).map(lambda found: tuple(sorted(found)))


def test_marks_rise_and_the_limit_lies_above() -> None:
    lines = list(plot_lines(charts(SWEEP)[0], 80))
    assert lines[0] == "allreduce float32 sum: bus bandwidth, GB/s"
    picture = [line.partition("│")[2] for line in lines if "│" in line]
    assert set(picture[0]) == {"-"}
    columns = [line.index("o") for line in picture if "o" in line]
    assert columns == sorted(columns, reverse=True)
    assert sum(line.count("o") for line in picture) == len(SWEEP)
    assert any(set(line.replace("o", "")) == {"."} for line in picture)
    assert [line.strip() for line in lines[-3:]] == ["o out of place", "- limit", ". expected"]


def test_a_slow_machine_is_drawn_at_the_bottom() -> None:
    slow = [replace(row, busbw_gb_s=25.0, limit_gb_s=None) for row in SWEEP]
    picture = [line.partition("│")[2] for line in plot_lines(charts(slow)[0], 80) if "│" in line]
    assert [number for number, line in enumerate(picture) if "o" in line] == [13]
    unknown = [replace(row, expected_gb_s=None) for row in slow]
    assert OPEN_ENDED in " ".join(" ".join(plot_lines(charts(unknown)[0], 60)).split())


@given(points, points, st.integers(26, 200))
def test_a_picture_fits_whatever_was_measured(first: Points, second: Points, width: int) -> None:
    chart = Chart("t", "GB/s", (CurveLine("a", first), CurveLine("b", second)), limit=first, expected=second)
    assert max(map(len, plot_lines(chart, width))) <= max(width, 40)


PLOT = ("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1K:4G:4", "--plot", "--width")


def picture_of(shown: str, frame: str, width: int) -> list[str]:
    picture = [line for line in shown.splitlines() if line[10:11] == frame]
    assert len(picture) == 15
    assert max(map(len, picture)) <= width
    return picture


def test_a_plot_needs_neither_utf_8_nor_colours() -> None:
    plain = environment(LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0", NO_COLOR="1")
    command = [sys.executable, "-m", "gpubench", *PLOT, "40"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=plain, cwd=ROOT)
    assert result.stdout.isascii()
    assert "\x1b" not in result.stdout
    narrow = picture_of(result.stdout, "|", 40)
    wide = picture_of(gpubench(*PLOT, "80").stdout, "│", 80)
    assert max(map(len, wide)) > max(map(len, narrow))


def test_two_sizes_are_no_curve() -> None:
    result = gpubench("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1K,1M", "--plot")
    assert "no curve: fewer than three sizes were measured" in result.stdout


def test_a_plot_needs_a_table() -> None:
    result = gpubench("allreduce", "--simulate", "hgx-h200-4", "--plot", "--format", "csv")
    assert result.returncode == 2
    assert "--plot with --format csv" in result.stderr
