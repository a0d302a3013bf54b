"""The html report: whole, self-contained, escaped; and looked at by a browser where there is one."""

import html
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpubench.formats.blocks import MOST_LINES
from gpubench.formats.layout import number_texts
from gpubench.formats.registry import Presentation, Target
from gpubench.model.results.compare import OPEN_ENDED, charts
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
        elsewhere = {name for name, value in attrs if not (name == "href" and (value or "").startswith("#"))}
        assert not elsewhere & {"src", "href", "srcset", "onload"}, tag
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(rows: tuple[Row, ...] = SWEEP, report: Report = REPORT) -> str:
    stream = io.StringIO()
    writer = HTML.writer(Target(stream=stream), Presentation())
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


@pytest.mark.parametrize(
    "arguments",
    [
        ("allreduce", "--simulate", "hgx-h200-4", "--sizes", "1K:1G:8"),
        ("p2p", "--simulate", "hgx-h100-8", "--fault", "link0-3:staged=yes"),
        ("p2p", "--simulate", "hgx-h200-4", "--sizes", "8:64M:8"),
        ("topo", "--simulate", "hgx-h100-8*5", "--fault", "node3.gpu5:nvlink=12"),
        ("explain", "tests/logs/h200x4-p2p-disabled"),
    ],
    ids=["allreduce", "p2p", "p2p-sweep", "topo", "explain"],
)
def test_every_command_has_a_page(arguments: tuple[str, ...]) -> None:
    result = gpubench(*arguments, "--format", "html")
    assert parsed(result.stdout).seen.count("h1") == 1
    assert ("SIMULATED" in result.stdout) == ("--simulate" in arguments)


def test_figures_stand_below_each_other_with_and_without_a_mark() -> None:
    text = gpubench("check", "--simulate", "hgx-h100-8", "--fault", "link0-6:staged=yes", "--format", "html").stdout
    marked = re.findall(r"<td([^>]*)>[\d.]+[!*~]</td>", text)
    assert marked
    assert set(marked) == {' class="n"'}
    pairs = html.unescape(gpubench("p2p", "--simulate", "dgx-1-v100", "--format", "html").stdout)
    assert '<td class="n">–</td>' in pairs, "pairs without a value, below those with one"
    assert "<td>–</td>" not in pairs


def test_a_machine_of_staged_pairs_looks_like_none_that_is_healthy() -> None:
    """Copies that have only siblings to compare with are compared with the limit then. With peer access off none is."""
    pairs = [f"--fault=link{one}-{other}:staged=yes" for one in range(4) for other in range(one)]
    text = gpubench("p2p", "--simulate", "hgx-h100-4", *pairs, "--format", "html").stdout
    for title, table in maps(text).items():
        kind = "n" if "peer access off" in title or "faster" in title else "h" if "host" in title else "h far low"
        assert {*re.findall(r'<td class="([^"]+)"', table)} - {"own"} == {kind}, title
    drawn = text.partition('<h2 id="the-machine">')[2].partition("</svg>")[0]
    assert 'class="w s0' in drawn
    assert not re.search(r'<path class="w s[123][^"]*" [^>]*><title>GPU\d', drawn)


def test_advice_is_code_where_it_can_be_pasted_and_words_where_not() -> None:
    text = gpubench("p2p", "--simulate", "hgx-h100-8", "--fault", "link0-6:staged=yes", "--format", "html").stdout
    assert "<dd><code>systemctl status nvidia-fabricmanager</code></dd><dt></dt><dd>Run it, and look for" in text
    text = gpubench(
        "scan", "--simulate", "hgx-h100-8*4", "--fault", "node1.nic2:bandwidth=0.4", "--format", "html"
    ).stdout
    assert "<code>ssh node1 ibstat</code></dd><dt></dt><dd><code>gpubench topo</code> on the node shows" in text


BAD = ("check", "--simulate", "hgx-h100-8*4", "--fault", "node3.gpu5:nvlink=12")


def test_what_failed_is_on_a_page_that_has_no_room_for_all(tmp_path: Path) -> None:
    """292 verdicts of four nodes, of which a page has 200: the 16 that fail are on the last node."""
    files = [tmp_path / f"bad.{suffix}" for suffix in ("html", "md", "json")]
    gpubench(*BAD, "-q", *(word for file in files for word in ("-o", str(file))))
    page_, text, document = (file.read_text(encoding="utf-8") for file in files)
    verdicts = json.loads(document)["verdicts"]
    failed = [row["subject"] for row in verdicts if row["verdict"] == "FAIL"]
    assert len(verdicts) > MOST_LINES
    assert len(failed) > 10
    table = text.partition("## Verdicts")[2].partition("## ")[0]
    assert [line.split(" | ")[2] for line in table.splitlines() if " | FAIL | " in line] == failed
    assert table.splitlines()[4].startswith("| node | node3 | node3 | FAIL |"), "what fails comes first"
    left = len(verdicts) - MOST_LINES
    assert f"{left} more ({left} PASS) in --format csv --section verdicts" in table
    shown = page_.partition(">Verdicts</h2>")[2].partition("<details>")[0]
    assert shown.count('class="FAIL">FAIL') == len(failed)
    assert f"<summary>{MOST_LINES - len(failed)} passed of those shown</summary>" in page_


def test_all_hosts_are_named() -> None:
    text = gpubench("check", "--quick", "--simulate", "hgx-h100-8*256", "--format", "markdown").stdout
    assert "256 hosts: node0-255\n" in text


def test_both_sides_of_a_comparison_are_in_one_picture(tmp_path: Path) -> None:
    sides = [tmp_path / "before.json", tmp_path / "after.json"]
    for side, faults in zip(sides, ((), ("--fault", "gpu3:speed=0.7")), strict=True):
        sizes = ("--sizes", "1M:1G:4", "-q", "-o", str(side))
        gpubench("allreduce", "--simulate", "hgx-h200-8", *faults, *sizes)
    text = gpubench("compare", *map(str, sides), "--format", "html").stdout
    parsed(text)
    assert text.count("before and after, GB/s</figcaption>") == 2
    assert re.search(r"<title>before: 1G, 4\d\d", text)
    assert re.search(r"<title>after: 1G, 3\d\d", text)
    assert OPEN_ENDED not in text


def browsed(page_: Path, *arguments: str) -> str:
    """What a browser says of a page in the dark; its picture has both ink and paper.

    People looked at what pictures show.
    """
    picture = page_.with_suffix(".png")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"]
    command += ["--blink-settings=preferredColorScheme=0", f"--user-data-dir={page_.parent}/user"]
    command += [f"--screenshot={picture}", *arguments, f"file://{page_}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
    return ended.stdout


@needs_browser
def test_nothing_is_wider_than_the_window(tmp_path: Path) -> None:
    """Tables scroll in boxes of their own: the page itself does not."""
    measuring = "<script>document.title = 'overflow ' + (document.documentElement.scrollWidth - innerWidth)</script>"
    checked = gpubench("check", "--simulate", "hgx-h100-8", "--fault", "gpu3:speed=0.5", "--format", "html").stdout
    for number, text in enumerate((page(), checked)):
        scripted = re.sub('<meta http-equiv="Content-Security-Policy" content="[^"]*">', "", text)
        own = tmp_path / f"page{number}.html"
        own.write_text(scripted.replace("</body>", f"{measuring}</body>"), encoding="utf-8")
    windows = [(number, width) for number in range(2) for width in (360, 1400)]
    frame = tmp_path / "frame.html"
    frame.write_text(
        "".join(f"<iframe src=page{number}.html width={width} height=800></iframe>" for number, width in windows)
        + "<script>onload = () => document.querySelectorAll('iframe').forEach(each => "
        "document.body.append(each.contentDocument.title + ';'))</script>",
        encoding="utf-8",
    )
    dumped = browsed(frame, "--allow-file-access-from-files", "--dump-dom")
    found = [int(number) for number in re.findall(r"overflow (-?\d+);", dumped)]
    assert len(found) == len(windows), dumped
    assert {window: wider for window, wider in zip(windows, found, strict=True) if wider > 0} == {}


def maps(text: str) -> dict[str, str]:
    """The maps of a page by title: tables whose rows begin with a head."""
    parts = [part.partition(">")[2] for part in text.split("<h2 ")[1:] if "<tr><th>GPU0</th><td" in part]
    return {html.unescape(part.partition("</h2>")[0]): part for part in parts}


@pytest.mark.parametrize("name", ["hgx-h100-8", "dgx-1-v100", "l40s-8", "rtx-4090-2", "hgx-a100-4"])
def test_a_healthy_machine_has_direct_copies_first(name: str) -> None:
    """The first map had peer access off, all orange with red frames, under a green PASS."""
    found = maps(gpubench("p2p", "--simulate", name, "--format", "html").stdout)
    title, first = next(iter(found.items()))
    assert title == "Writes of 256M" + (", peer access off" if name == "rtx-4090-2" else "")
    assert "GB/s" in first
    numbers = re.findall(r'<td class="h[^>]*>([\d.]+)', first)
    assert {len(number.replace(".", "")) for number in numbers} == {4}, numbers
    assert ("–: not measured (no peer access" in html.unescape("".join(found.values()))) == (
        '<td class="n">&#8211;' in "".join(found.values())
    )


HEALTHY = (
    "p2p --simulate hgx-h100-8", "p2p --simulate dgx-1-v100", "p2p --simulate l40s-8", "p2p --simulate rtx-4090-2",
    "topo --simulate hgx-h100-8", "topo --simulate dgx-1-v100", "check --simulate hgx-h100-8",
    "allreduce --simulate hgx-h100-8 --np 1,2,4,8", "scan --simulate hgx-h100-8*16", "kv --simulate hgx-h100-8",
    "overlap --simulate hgx-h100-8", "watch --simulate hgx-h100-8 --for 2s",
    "plan --parameters 7B --simulate hgx-h100-8",
)  # fmt: skip


@pytest.mark.parametrize("command", HEALTHY)
def test_a_healthy_page_has_nothing_orange_and_titles_as_titles(command: str) -> None:
    text = gpubench(*command.split(), "--format", "html").stdout
    assert not re.findall(r'<td class="h[^"]*far[^>]*>[^<]*', text)
    assert not re.findall(r'<path class="w s[01]', text), "a slow link in the picture of the machine"
    assert "<th></th>" not in text, "a column without a head"
    titles = re.findall(r"<(?:h2|figcaption)[^>]*>([^<]*)<", text)
    assert [title for title in titles if not title[0].isupper() or len(html.unescape(title)) > 70] == []


@pytest.mark.parametrize(
    ("command", "bad"),
    [
        (
            "p2p --simulate hgx-h100-8 --fault gpu5:nvlink=12",
            dict.fromkeys(
                ("Writes of 256M", "Reads of 256M", "Copies both ways at once of 256M", "Kernel writes of 256M"), 14
            ),
        ),
        (
            "p2p --simulate hgx-h100-8 --fault link0-6:staged=yes",
            dict.fromkeys(
                (
                    *("Writes of 256M", "Reads of 256M", "Copies both ways at once of 256M", "Kernel writes of 256M"),
                    "Latency of writes of 16 bytes",
                ),
                2,
            ),
        ),
        ("p2p --simulate hgx-h100-8 --fault gpu2:width=8", {"Copies with host memory, 64M": 2}),
    ],
)
def test_what_is_bad_is_orange_and_nothing_else(command: str, bad: dict[str, int]) -> None:
    found = maps(gpubench(*command.split(), "--format", "html").stdout)
    assert {title: count for title, part in found.items() if (count := part.count('<td class="h far'))} == bad
    marks = "".join(found.values()).count('<td class="h far'), "".join(found.values()).count('<b title="FAIL">')
    assert marks == (sum(bad.values()),) * 2


def test_a_scan_marks_the_node_of_a_bad_gpu_though_its_rails_are_fast() -> None:
    text = gpubench("scan", "--simulate", "hgx-h100-8*8", "--fault", "node3.gpu5:nvlink=12", "--format", "html").stdout
    assert html.unescape(re.findall(r"<tr><th>([^<]*)</th><td", text)[0]) == "node3 ✗ (leaf0)"


def test_the_figures_of_a_column_have_the_same_digits() -> None:
    assert number_texts([36.9, 36.91, 374.96]) == {36.9: "36.90", 36.91: "36.91", 374.96: "375.0"}
    assert number_texts([450.0, 50.0]) == {450.0: "450", 50.0: "50"}
    assert number_texts([0.0, 2899.4, 9999.9, 0.00125]) == {
        0.0: "0", 2899.4: "2899", 9999.9: "10000", 0.00125: "0.001250",
    }  # fmt: skip
    text = gpubench("p2p", "--simulate", "hgx-h100-8", "--fault", "link0-6:staged=yes", "--format", "html").stdout
    evidence = text.partition(">Evidence</h2>")[2].partition("</table>")[0]
    assert ">36.91<" in evidence or ">36.90<" in evidence
    drawn = text.partition('<h2 id="the-machine">')[2].partition("</svg>")[0]
    shown = re.findall(r"<text class=\"(?:f|tag)[^>]*>(?:✗ |&#10007; )?([\d.]+)<", drawn)
    assert len(shown) == 9
    assert {len(number.replace(".", "")) for number in shown} == {4}, shown


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("p2p --simulate dgx-1-v100", "not drawn: 12 pairs without NVLink"),
        ("p2p --simulate l40s-8", "not drawn: 28 pairs without NVLink"),
        ("p2p --simulate hgx-h100-8 --fault gpu5:nvlink=12", "not drawn: 7 bad pairs, as slow as the line of a GPU"),
        ("p2p --simulate hgx-h100-8", ""),
        (
            "check --simulate hgx-h100-8 --fault node0:env=NCCL_P2P_DISABLE=1",
            "not drawn: 28 bad pairs, nccl-p2p-disabled",
        ),
    ],
)
def test_the_picture_says_why_pairs_are_not_drawn(command: str, words: str) -> None:
    text = gpubench(*command.split(), "--format", "html").stdout
    assert re.findall("<li>(not drawn[^<]*)", text) == ([words] if words else [])
