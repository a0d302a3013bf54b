"""The picture of a machine: what hangs where, how fast it is of what is expected, and what findings name."""

import re
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.formats.json import DocumentRun
from gpubench.formats.machine_picture import Machine, MachinePart, Reach, Wire, machine_figure, machines
from gpubench.model.facts.snapshot import is_amd
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.report import PairRow, Record, Report, Row, Table
from gpubench.model.results.topo import TreeRow
from gpubench.model.terms.verdict import NO_CURE, Finding, Verdict
from gpubench.profiles import all_profiles
from tests.cli.running import gpubench
from tests.formats.sample import METADATA

HOST = "node7"


def tree(*lines: tuple[int, str, str]) -> list[TreeRow]:
    return [
        TreeRow(node=HOST, depth=depth, element=name, what=what, link=None, gb_s=None) for depth, name, what in lines
    ]


FOUR = tree(
    (0, "NUMA node 0", "CPUs 0-3"),
    (1, "pci0000:00", "host bridge"),
    (2, "0000:05:00.0", "PCIe switch"),
    (3, "GPU0", "0000:00:00.0 NVIDIA H200"),
    (3, "mlx5_0", "0000:0a:00.0 infiniband 400 Gb/s"),
    (3, "GPU1", "0000:01:00.0 NVIDIA H200"),
    (0, "NUMA node 1", "CPUs 4-7"),
    (1, "pci0000:80", "host bridge"),
    (2, "GPU2", "0000:02:00.0 NVIDIA H200"),
    (2, "GPU3", "0000:03:00.0 NVIDIA H200"),
)


def copy(one: int, other: int, gb_s: float | None, *, path: str = "NV18", **changes: object) -> PairRow:
    values: dict[str, object] = {
        "source": f"GPU{one}",
        "destination": f"GPU{other}",
        "source_bus_id": f"0000:0{one}:00.0",
        "destination_bus_id": f"0000:0{other}:00.0",
        "source_node": HOST,
        "destination_node": HOST,
        "origin": "measured",
        "direction": "write",
        "engine": "ce",
        "peer": "on",
        "size_bytes": 2**28,
        "bandwidth_gb_s": gb_s,
        "limit_gb_s": 450.0,
        "path_class": path,
        "expected_gb_s": 390.0,
    }
    return PairRow(**{**values, **changes})  # type: ignore[arg-type]


def copies(slow: dict[tuple[int, int], float]) -> list[PairRow]:
    return [copy(a, b, slow.get((a, b), 390.0)) for a in range(4) for b in range(4) if a != b]


def table(kind: type[Record], rows: Sequence[Row]) -> Table:
    return Table(kind.columns(), lambda: rows)


def drawn(
    rows: Sequence[PairRow] = (), findings: Sequence[Finding] = (), of: Sequence[TreeRow] = tuple(FOUR)
) -> list[Machine]:
    sections = {TreeRow.section: table(TreeRow, of), PairRow.section: table(PairRow, rows)}
    return machines(
        DocumentRun(METADATA, (), Report(verdict=Verdict.PASS, complete=True, findings=findings, sections=sections))
    )


def finding(*subjects: str, severity: Verdict = Verdict.FAIL) -> Finding:
    return Finding(
        id="p2p-slow",
        severity=severity,
        subject=subjects[0],
        subjects=subjects,
        seen="",
        expected="",
        cause="",
        cure=NO_CURE,
    )


def svg(machine: Machine) -> str:
    return "".join(machine_figure(machine))


def test_devices_hang_below_switches_and_sockets() -> None:
    (machine,) = drawn()
    above = {part.name: None if part.above is None else machine.parts[part.above].name for part in machine.parts}
    assert above == {
        "NUMA node 0": None,
        "0000:05:00.0": "NUMA node 0",
        "GPU0": "0000:05:00.0",
        "mlx5_0": "0000:05:00.0",
        "GPU1": "0000:05:00.0",
        "NUMA node 1": None,
        "GPU2": "NUMA node 1",
        "GPU3": "NUMA node 1",
    }


def test_a_healthy_machine_is_one_colour_and_has_no_sign() -> None:
    (machine,) = drawn(copies({}))
    assert machine.fabric == "NV18"
    assert machine.median_reach("GPU2").share == 1.0
    text = svg(machine)
    assert set(re.findall(r'class="w (s\d?)', text)) == {"s3", "s"}
    assert not set("✗!~") & set(re.sub("<title>.*?</title>", "", text))
    assert "NVLink, NV18" in text


def test_a_slow_gpu_has_a_slow_line_and_its_sign_and_no_arc_tells_it_again() -> None:
    slow = {(a, b): 195.0 for a in range(4) for b in range(4) if 3 in (a, b)}
    rows = [replace(row, verdict="FAIL") if "GPU3" in (row.source, row.destination) else row for row in copies(slow)]
    (machine,) = drawn(rows, [finding("GPU3 (0000:03:00.0) both ways")])
    assert {part.name: part.verdict for part in machine.parts if part.verdict} == {"GPU3": Verdict.FAIL}
    assert machine.median_reach("GPU3").share == 0.5
    assert machine.median_reach("GPU0").share == 1.0
    text = svg(machine)
    assert text.count("C4") == 0, "an arc beside the line of the GPU"
    assert "195" in text
    assert "✗" in text


def test_a_slow_gpu_is_slow_by_the_rows_that_fail_though_others_of_the_pair_are_as_slow() -> None:
    """Reads are compared with pairs wired alike, so they pass; by noise they were the slower rows, and 2 of 7 arcs."""
    slow = {(a, b): 260.0 for a in range(4) for b in range(4) if 3 in (a, b)}
    writes = [replace(row, verdict="FAIL") if row.bandwidth_gb_s == 260.0 else row for row in copies(slow)]
    reads = [
        replace(row, direction="read", bandwidth_gb_s=259.0, expected_gb_s=260.0, verdict="PASS")
        for row in writes
        if "GPU3" in (row.source, row.destination)
    ]
    (machine,) = drawn([*writes, *reads], [finding("GPU3 (0000:03:00.0)")])
    assert machine.median_reach("GPU3") == Reach(260.0, 390.0, "expected")
    assert machine.median_reach("GPU0").share == 1.0
    assert not re.search(r'<path[^>]* d="M[\d. ]+C', svg(machine)), "an arc beside the line of the GPU"


@pytest.mark.parametrize(
    ("ends", "gap"),
    [(("GPU0", "GPU6"), 1), (("GPU0", "GPU2"), 1), (("GPU0", "GPU1"), 0), (("GPU0", "GPU2"), 0), (("GPU0", "GPU7"), 0)],
)
def test_the_figure_of_an_arc_lies_on_no_line_of_a_gpu(ends: tuple[str, str], gap: int) -> None:
    parts = [MachinePart("NUMA node 0", "", None, is_device=False)]
    for number in range(8):
        parts += [MachinePart(f"GPU{number}", "", 0)] + [MachinePart(f"mlx5_{number}", "", 0)] * gap
    good = Wire(("", ""), "NV18", Reach(376.0, 376.0, "expected"))
    wires = [replace(good, ends=(f"GPU{a}", f"GPU{b}")) for a in range(8) for b in range(a + 1, 8)]
    slow = [replace(good, ends=ends, reach=Reach(36.9, 376.0, "expected"), verdict=Verdict.FAIL)]
    text = svg(Machine(HOST, parts, [wire for wire in wires if wire.ends != ends] + slow, "NV18"))
    ((baseline,),) = [re.findall(r'class="tag FAIL" x="\d+" y="([\d.]+)"', text)]
    lines = [float(y) for y in re.findall(r'd="M\d+ ([\d.]+)H504"', text)]
    assert len(lines) == 8
    assert all(not -2 < float(baseline) - y < 13 for y in lines), "thirteen pixels of text, two of a line's width"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "PRO 6000"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("Graphics Device of a new generation", ""),
    ],
)
def test_the_model_of_a_gpu_is_the_word_with_its_number_if_there_is_room(name: str, shown: str) -> None:
    (machine,) = drawn(of=tree((0, "NUMA node 0", ""), (1, "GPU0", f"0000:00:00.0 {name}")))
    assert re.findall(r'class="d" dx="6">([^<]*)<', svg(machine)) == [shown] * bool(shown)


def test_links_of_a_mesh_are_drawn_each() -> None:
    paths = {(0, 1): "NV2", (0, 2): "NV1", (1, 3): "NV1", (2, 3): "NV2", (0, 3): "SYS", (1, 2): "SYS"}
    rows = [copy(a, b, None, path=path, limit_gb_s=None, expected_gb_s=None) for (a, b), path in paths.items()]
    (machine,) = drawn(rows)
    assert machine.fabric == ""
    assert svg(machine).count("<path") - svg(machine).count('d="M0 6') == 6 + 4, "six lines up, four NVLinks"


def test_good_findings_mark_nothing_and_names_are_escaped() -> None:
    odd = tree((0, "NUMA node <b>", ""), (1, "GPU0", "0000:00:00.0 <script>"))
    (machine,) = drawn(of=odd, findings=[finding("GPU0", severity=Verdict.SKIP)])
    assert not any(part.verdict for part in machine.parts)
    text = svg(machine)
    assert "<script>" not in text
    assert "<b>" not in text


def test_everything_lies_inside_the_picture() -> None:
    wires = [Wire(("GPU0", "GPU63"), "NV1", Reach(1.0, 10.0, "expected"), Verdict.FAIL)]
    parts = [MachinePart("NUMA node 0", "", None, is_device=False)]
    parts += [MachinePart(f"GPU{n}", "0000:00:00.0 NVIDIA H200", 0) for n in range(80)]
    text = svg(Machine(HOST, parts, wires))
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)" role', text)[0])
    for x, y in re.findall(r'<(?:rect|text)[^>]* x="([\d.]+)" y="([\d.]+)"', text):
        assert 0 <= float(x) <= width
        assert 0 <= float(y) <= height


@pytest.mark.parametrize(
    ("arguments", "sign"),
    [
        (("check", "--simulate", "hgx-h100-8", "--fault", "gpu3:speed=0.5"), "GPU3"),
        (("p2p", "--simulate", "hgx-h100-8", "--fault", "link0-3:staged=yes"), ""),
        (("topo", "--simulate", "hgx-h100-8", "--fault", "gpu5:nvlink=12"), "GPU5"),
        (("topo", "--replay", "tests/machines/l40s-pcie-switches"), "GPU6"),
    ],
)
def test_commands_that_know_a_machine_draw_it(arguments: tuple[str, ...], sign: str) -> None:
    page = gpubench(*arguments, "--format", "html").stdout
    assert page.count('<figure class="machine">') == 1
    assert len(page.encode()) < 1_000_000
    marked = re.findall(r'<text class="b"[^>]*>(GPU\d+)<tspan class="tag FAIL">', page)
    assert marked == ([sign] if sign else [])


@pytest.mark.parametrize("machine", [profile.name for profile in all_profiles() if profile.match.visible])
def test_topo_writes_a_picture_of_every_machine(machine: str, tmp_path: Path) -> None:
    page = tmp_path / "topo.html"
    result = CliRunner().invoke(app, ["topo", "--simulate", machine, "-o", str(page)], catch_exceptions=False)
    assert (result.exit_code, "Traceback" in result.output) == (0, False)
    text = page.read_text()
    assert '<figure class="machine">' in text
    assert (">XGMI</text>" in text, ">NVLink, XGMI" in text) == (machine.startswith("mi3"), False)


@pytest.mark.parametrize(
    "profile", [profile for profile in all_profiles() if profile.match.visible], ids=attrgetter("name")
)
def test_every_command_that_simulates_a_machine_writes_its_page(profile: Profile, tmp_path: Path) -> None:
    ours = () if is_amd(profile.gpu.name) else ("check --quick", "p2p", "kv --blocks 1 --sizes 64M")
    for command in (*ours, *(["allreduce --sizes 64M"] if profile.match.visible > 1 else ())):
        page = tmp_path / f"{command.split()[0]}.html"
        words = [*command.split(), "--simulate", profile.name, "-o", str(page)]
        CliRunner().invoke(app, words, catch_exceptions=False)
        assert "</html>" in page.read_text(), command


def test_a_pair_whose_copies_are_fast_has_the_finding_next_to_it() -> None:
    page = gpubench("report", "tests/results/h200x2/gpubench-p2p-disabled.json", "--format", "html").stdout
    assert re.findall(r'<text class="tag f FAIL"[^>]*>(?:✗|&#10007;) ([^<]*)<', page) == ["nccl-p2p-disabled"]


@pytest.mark.parametrize("fabric", ["", "NV18"])
def test_the_id_of_a_finding_of_a_stored_result_cannot_become_markup(fabric: str) -> None:
    parts = [MachinePart("NUMA node 0", "", None, is_device=False), *(MachinePart(f"GPU{n}", "", 0) for n in range(2))]
    wire = Wire(("GPU0", "GPU1"), "NV18", Reach(376.0, 376.0, "expected"), Verdict.FAIL, cause="<i>")
    text = svg(Machine(HOST, parts, [wire], fabric))
    assert "&lt;i&gt;" in text
    assert "<i>" not in text
