"""The trend on the html report: points with verdicts, inside the picture, and nothing where there is no folder."""

import io
import re
from pathlib import Path

import pytest

from gpubench.formats.html import trend_figure
from gpubench.formats.registry import DATED, Output, Presentation, Target
from gpubench.model.results.history import Trend, TrendPoint
from gpubench.model.results.report import COLLECTIVE_COLUMNS
from gpubench.model.terms.verdict import Verdict
from tests.cli.running import gpubench
from tests.formats.sample import HTML, METADATA, REPORT, ROW
from tests.formats.test_html import parsed
from tests.readers.results.test_past_runs import keep


def page(history: Path | None) -> str:
    stream = io.StringIO()
    outputs = () if history is None else (Output(history, DATED),)
    writer = HTML.writer(Target(stream=stream), Presentation(outputs=outputs))
    writer.begin(METADATA, COLLECTIVE_COLUMNS)
    writer.row(ROW)
    writer.end(REPORT)
    return stream.getvalue()


def trend(*values: float, verdict: Verdict = Verdict.PASS) -> str:
    points = [TrendPoint(f"2026-11-{day:02}T08:00:00+00:00", each, verdict) for day, each in enumerate(values, 1)]
    return "".join(trend_figure(Trend("allreduce: peak busbw", tuple(points))))


def test_runs_before_and_this_one(tmp_path: Path) -> None:
    for day in (1, 2, 3):
        keep(tmp_path, day)
    text = page(tmp_path)
    parsed(text)
    assert '<h2 id="trend-of-n1">Trend of n1</h2>' in text
    assert "median of 3 before" in text
    assert "2026-11-01T08:00:00+00:00: 0.15 GB/s, FAIL" in text
    assert "2026-11-20T08:00:00+00:00: 0.15 GB/s" in text


def test_a_folder_that_went_away_is_said_to_be_gone(tmp_path: Path) -> None:
    text = page(tmp_path / "<gone>")
    parsed(text)
    assert "there is no folder" in text


@pytest.mark.parametrize(
    "values", [(400.0,), (400.0, 38.0, 400.0), (0.0, 0.0), (1e-9, 1e5), (400.0, 400.0), tuple(range(1, 29))]
)
def test_points_lie_inside_the_picture(values: tuple[float, ...]) -> None:
    text = trend(*values)
    parsed(text)
    (points,) = re.findall(r'<polyline class="curve k0" points="([^"]+)"', text)
    assert len(points.split()) == len(values)
    for x, y in (map(float, point.split(",")) for point in points.split()):
        assert 0 <= x <= 480
        assert 0 <= y <= 150


def test_small_changes_are_not_magnified() -> None:
    (points,) = re.findall(r'<polyline class="curve k0" points="([^"]+)"', trend(400.0, 399.0, 400.0))
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert max(heights) - min(heights) < 20


def test_every_verdict_has_a_shape_and_a_word() -> None:
    shapes = {verdict: re.findall(rf'<(\w+) class="t {verdict}"', trend(1.0, verdict=verdict)) for verdict in Verdict}
    assert all(len(found) == 2 for found in shapes.values())
    assert len({found[0] for found in shapes.values()}) == 3
    assert "not judged" in trend(1.0, verdict=Verdict.SKIP)


def test_the_trend_as_a_user_gets_it(tmp_path: Path) -> None:
    run = ("p2p", "--simulate", "hgx-h200-4", "--output", f"{tmp_path}/results/", "--output", str(tmp_path / "p.html"))
    for fault in ((), ("--fault", "link0-1:staged=yes", "--strict"), ()):
        assert gpubench(*run, *fault).returncode == ("--strict" in fault)
    text = (tmp_path / "p.html").read_text()
    parsed(text)
    assert len(re.findall("<figcaption>[^<]*median of 2 before", text)) == 3
    assert "<figcaption>Slowest pair of p2p: 39" in text
    assert 'class="t FAIL"' in text
    assert len(list((tmp_path / "results").iterdir())) == 3
