"""The html report: whole, self-contained, escaped; and looked at by a browser where there is one."""

import io
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpubench.formats.writer import Style, Target
from gpubench.model.results.curves import OPEN_ENDED, charts
from gpubench.model.results.report import COLLECTIVE_COLUMNS, Report, Row
from tests.cli.running import gpubench
from tests.formats.sample import FINDING, HTML, METADATA, REPORT, ROW

VOID = {"meta", "line"}
SWEEP = tuple(
    replace(
        ROW,
        size_bytes=2**power,
        busbw_gb_s=power * 10.0,
        time_us=2.0**power,
        limit_gb_s=450.0,
        expected_gb_s=400.0,
        expected_us=1.5**power,
    )
    for power in range(10, 31)
)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


class Balanced(HTMLParser):
    """Fails where elements do not nest, and collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "srcset", "onload"}, tag
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(rows: tuple[Row, ...] = SWEEP, report: Report = REPORT) -> str:
    stream = io.StringIO()
    writer = HTML.writer(Target(stream=stream), Style())
    writer.begin(METADATA, COLLECTIVE_COLUMNS)
    for row in rows:
        writer.row(row)
    writer.end(report)
    return stream.getvalue()


def parsed(text: str) -> Balanced:
    found = Balanced()
    found.feed(text)
    assert found.open == []
    return found


def test_the_page_is_whole_and_fetches_nothing() -> None:
    text = page()
    seen = parsed(text).seen
    assert {"svg", "polyline", "table"} <= set(seen)
    assert not {"script", "link", "img", "iframe"} & set(seen)
    assert "url(" not in text
    assert "@import" not in text


def test_the_page_forbids_scripts_and_whatever_is_elsewhere() -> None:
    policy = re.search('<head>.*<meta http-equiv="Content-Security-Policy" content="([^"]*)">.*<title>', page())
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules == {
        "default-src": "'none'", "style-src": "'unsafe-inline'", "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip


def test_what_was_seen_cannot_become_markup() -> None:
    finding = replace(FINDING, subject="<img src=x onerror=alert(1)>", seen="</style><b>")
    assert "img" not in parsed(page(report=replace(REPORT, findings=(finding,)))).seen


def test_curves_have_limit_and_expectation() -> None:
    bandwidth, time = charts(SWEEP)
    assert {value for _, value in bandwidth.limit} == {450.0}
    assert {value for _, value in bandwidth.expected} == {400.0}
    assert time.logarithmic
    assert [value for _, value in time.expected] == [1.5**power for power in range(10, 31)]
    text = page()
    assert 'class="limit"' in text
    assert "limit 450" in text
    assert 'class="expected"' in text


def test_the_axis_ends_at_what_is_known_and_not_at_a_slow_machine() -> None:
    slow = tuple(replace(row, busbw_gb_s=25.0, limit_gb_s=None, expected_gb_s=340.0) for row in SWEEP)
    assert charts(slow)[0].highest == 340.0
    heights = {float(y) for y in re.findall(r'<circle class="m k0" cx="[^"]+" cy="([^"]+)" r', page(rows=slow))}
    assert max(heights) > 225, "25 of 340 GB/s is drawn near the bottom"
    assert OPEN_ENDED not in page(rows=slow)
    assert OPEN_ENDED in page(rows=tuple(replace(row, expected_gb_s=None) for row in slow))


def test_a_few_sizes_are_no_curve() -> None:
    assert charts(SWEEP[:2]) == []
    parsed(page(rows=SWEEP[:1]))
    parsed(page(rows=()))


def test_points_lie_inside_the_picture() -> None:
    for points in re.findall(r'<polyline class="(?:curve|limit|expected)[^"]*" points="([^"]+)"', page()):
        for x, y in (map(float, point.split(",")) for point in points.split()):
            assert 0 <= x <= 480
            assert 0 <= y <= 290


@pytest.mark.parametrize(
    "arguments",
    [
        ("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1K:1G:8"),
        ("p2p", "--simulate", "hgx-h100-8", "--fault", "link0-3:staged=yes"),
        ("p2p", "--simulate", "hgx-h200-4", "--sizes", "8:64M:8"),
        ("topo", "--simulate", "hgx-h100-8*20", "--fault", "node3.gpu5:nvlink=12"),
        ("explain", "tests/logs/h200x4-p2p-disabled"),
    ],
    ids=["allreduce", "p2p", "p2p-sweep", "topo", "explain"],
)
def test_every_command_has_a_page(arguments: tuple[str, ...]) -> None:
    result = gpubench(*arguments, "--format", "html")
    assert parsed(result.stdout).seen.count("h1") == 1
    assert ("SIMULATED" in result.stdout) == ("--simulate" in arguments)


def test_a_staged_pair_is_marked_and_framed() -> None:
    text = gpubench("p2p", "--simulate", "hgx-h100-8", "--fault", "link0-3:staged=yes", "--format", "html").stdout
    cells = re.findall(r'<td class="h low" style="--s:0.10">[\d.]+ <b title="FAIL">', text)
    assert len(cells) >= 2


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1200, 1), (1200, 0), (500, 0)], ids=["light", "dark", "phone"])
def test_a_browser_draws_it(tmp_path: Path, width: int, scheme: int) -> None:
    """The picture is there and has both ink and paper; people looked at what it shows."""
    (tmp_path / "page.html").write_text(page(), encoding="utf-8")
    picture = tmp_path / "page.png"
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += [
        f"--blink-settings=preferredColorScheme={scheme}",
        f"--screenshot={picture}",
        f"--user-data-dir={tmp_path}",
    ]
    subprocess.run([*command, f"file://{tmp_path}/page.html"], capture_output=True, check=True, timeout=90)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


@needs_browser
def test_nothing_is_wider_than_a_phone(tmp_path: Path) -> None:
    """Tables scroll in boxes of their own: the page itself does not."""
    measuring = "<script>document.title = 'overflow ' + (document.documentElement.scrollWidth - innerWidth)</script>"
    frame = tmp_path / "frame.html"
    scripted = re.sub('<meta http-equiv="Content-Security-Policy" content="[^"]*">', "", page())
    (tmp_path / "page.html").write_text(scripted.replace("</body>", f"{measuring}</body>"), encoding="utf-8")
    frame.write_text(
        "<iframe src=page.html width=360 height=800></iframe><script>onload = () => document.body.append("
        "document.querySelector('iframe').contentDocument.title)</script>",
        encoding="utf-8",
    )
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--dump-dom",
    ]
    command += [f"--user-data-dir={tmp_path}/user", f"file://{frame}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    found = re.search(r"overflow (-?\d+)", result.stdout)
    assert found is not None, result.stdout
    assert int(found[1]) <= 0
