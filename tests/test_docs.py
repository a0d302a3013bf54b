"""What the documentation lists is what the code has."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Struct

from docs import generate
from gpubench.cli.app import typer_command
from gpubench.cli.process import COMMANDS
from gpubench.collectives import expected
from gpubench.measure.check.health import SECTIONS as CHECK_SECTIONS
from gpubench.measure.compare.report import SECTIONS as COMPARE_SECTIONS
from gpubench.measure.explain.report import SECTIONS as EXPLAIN_SECTIONS
from gpubench.measure.scan.report import SECTIONS as SCAN_SECTIONS
from gpubench.model.paths import p2p
from gpubench.model.paths.topology import PCIE_GB_S_PER_LANE
from gpubench.model.profiles import copies
from gpubench.model.results.backends import CaseKey
from gpubench.model.results.compare import RowKey
from gpubench.model.results.report import SIGNED, Metadata, Record
from gpubench.model.results.result_file import MATRICES, TABLES
from gpubench.model.results.topo import TOPO_SECTIONS
from gpubench.model.terms.commands import BARE
from gpubench.model.terms.operation import algbw_gb_s, ring_allreduce_factor
from gpubench.model.terms.verdict import Finding, Verdict
from tests.cli.running import gpubench

ROOT = Path(__file__).parents[1]


def test_every_section_of_a_command_is_named() -> None:
    text = (ROOT / "docs/reference/formats.md").read_text().partition("## Sections and columns")[2].partition("<!--")[0]
    every = (*TOPO_SECTIONS, *CHECK_SECTIONS, *EXPLAIN_SECTIONS, *COMPARE_SECTIONS, *SCAN_SECTIONS)
    assert [section for section in every if f"`{section}`" not in text] == []


def test_the_readme_stays_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert "## Why this and not …" in lines


def test_the_docs_show_what_evidence_looks_like() -> None:
    command = "gpubench allreduce --simulate hgx-h200-4 --sizes 1G --fault link0-1:staged=yes --evidence"
    shown = (ROOT / "docs/explanation/evidence.md").read_text().partition(f"$ {command}\n...\n")[2].partition("```")[0]
    assert shown
    assert shown in gpubench(*command.split()[1:]).stdout


def test_what_is_generated_is_up_to_date() -> None:
    stale = [path for path, text in generate.generated().items() if text != path.read_text(encoding="utf-8")]
    assert stale == [], "type python docs/generate.py"


def test_pages_that_the_program_prints_stay_short() -> None:
    """An option, a column or a condition is described once, so that these pages can be read."""
    docs = ROOT / "docs"
    pages = [
        *(docs / "commands").glob("*.md"),
        *(docs / "reference" / f"{name}.md" for name in ("conditions", "faults", "formats")),
    ]
    texts = {page.name: _generated(page) for page in pages}
    texts["gpubench.1"] = (docs / "gpubench.1").read_text(encoding="utf-8")
    words = {name: len(text.split()) for name, text in texts.items()}
    assert sum(words.values()) <= 30_000, words


_GENERATED = re.compile(r"<!-- generated: \w+ -->\n(.*?)<!-- end -->", re.DOTALL)


def _generated(page: Path) -> str:
    return "\n".join(_GENERATED.findall(page.read_text(encoding="utf-8")))


MOST_WRITTEN_WORDS = 22_000


def test_hand_written_pages_stay_short() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "internals"]
    words = {str(page): len(_GENERATED.sub("", page.read_text(encoding="utf-8")).split()) for page in pages}
    assert sum(words.values()) <= MOST_WRITTEN_WORDS, words


def test_every_command_has_a_page_with_its_options() -> None:
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/commands").glob("*.md")}
    assert sorted(pages) == sorted(generate.option_pages())
    together = {command.name for command in COMMANDS if command.module == "collective"}
    assert [name for name in generate.commands() if name not in {*pages, *together}] == []


def test_every_option_with_a_help_text_is_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/commands").glob("*.md"))
    listed = set(re.findall(r"(?<=[`/ ])--?[a-zA-Z][\w-]*", text))
    options = {param.opts[-1] for command in (BARE, *COMMANDS) for param in typer_command(command).params if param.help}
    assert {name for name in options if name.startswith("-")} - listed == set()


def test_every_row_type_is_a_section_and_every_column_is_described() -> None:
    names = {kind.__name__ for kind in _row_types(Record)} - {CaseKey.__name__, RowKey.__name__}
    listed = {kind.__name__ for kind in TABLES.values()} - {Finding.__name__}
    assert names == listed, f"_MODULES in model/results/result_file.py: {sorted(names ^ listed)}"
    kinds: tuple[type[Struct], ...] = (Metadata, *TABLES.values())
    for kind in kinds:
        described = generate.column_descriptions(kind)
        assert [name for name in kind.__struct_fields__ if name not in described and name != "cure"] == [], kind


def _row_types(kind: type[Record]) -> Iterator[type[Record]]:
    for each in kind.__subclasses__():
        if each.__module__.startswith("gpubench."):
            yield each
        yield from _row_types(each)


def test_the_schema_of_a_type_has_its_words_bounds_and_null() -> None:
    properties = generate.object_schema(_Example)["properties"]
    assert properties == {
        "size": {"description": "bytes (null if unknown)", "type": ["integer", "null"], "minimum": 0},
        "change": {"description": "a long story, told above", "type": "number"},
        "word": {"type": ["string", "null"], "enum": ["a", "b", None]},
        "pair": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2},
        "verdict": {"type": "string", "enum": list(Verdict)},
        "cells": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "boolean"}}},
    }


class _Example(Struct, kw_only=True):
    size: int | None  #: bytes (null if unknown)
    #: a long story,
    #: told above
    change: Annotated[float, SIGNED]
    word: Annotated[str | None, ("a", "b")]
    pair: tuple[int, int]
    verdict: Verdict
    cells: Mapping[str, Sequence[bool]]


def test_help_fits_eighty_columns_and_has_examples() -> None:
    for command in ("", *generate.commands()):
        text = generate.help_of(*command.split())
        assert max(map(len, text.splitlines())) <= 80, command
        assert f"  gpubench {command or '--simulate'}" in text, command


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="no mandoc on this machine")
def test_the_man_page_is_one() -> None:
    result = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", str(ROOT / "docs" / "gpubench.1")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    complaints = [line for line in result.stdout.splitlines() if "missing date" not in line]
    assert complaints == []


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in _anchors(path), f"{page.name}: {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_has_its_place_on_the_site() -> None:
    configuration = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    places = re.findall(r'"([\w/-]+\.md)"', configuration)
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(places) == sorted(pages)


def test_expected_speeds_have_the_thresholds_of_the_code() -> None:
    text = (ROOT / "docs/internals/expected-speed.md").read_text(encoding="utf-8")
    for reference in ("for one bad GPU of four spoils half of all pairs", "what the profile expects"):
        assert f"{reference} | {p2p.SLOW_SHARE:.0%} | {p2p.FAILED_SHARE:.0%} |".replace("%", " %") in text
    assert f"neither is known | {p2p.LIMIT_WARN_SHARE:.0%} | {p2p.LIMIT_FAIL_SHARE:.0%} |".replace("%", " %") in text
    assert f"wider than ±{copies.NOISY_PERCENT:.0f} %" in text
    for what, (warn, fail) in {
        "0.2 µs | latency and bandwidth of the profile, siblings": copies.LATE_SHARES,
        "| | likewise for a path across sockets, which differs by board": copies.ACROSS_SHARES,
        "| pinned host memory | GPUs of the same NUMA node": copies.HOST_SHARES,
        "| | the profile": copies.HOST_PROFILE_SHARES,
        "| pageable host memory | GPUs of the same NUMA node": copies.PAGEABLE_SHARES,
        "| patterns | the pairs alone, one after another on each link that they share": copies.PATTERN_SHARES,
    }.items():
        assert f"{what} | {warn:.0%} | {fail:.0%} |".replace("%", " %") in text
    assert f"less than {p2p.STILL_SHARE * 100:.0f} % of what was copied" in text
    assert f"by more than {p2p.MOVED_SHARE * 100:.0f} % is on the path" in text
    assert f"η = {expected.NIC_EFFICIENCY}" in text
    assert f"reaches {expected.NVLS_BETWEEN_NODES}" in text


def test_the_limits_of_pcie_are_those_of_the_code() -> None:
    text = (ROOT / "docs/explanation/limits.md").read_text(encoding="utf-8")
    lanes = re.findall(r"^\| (\d) \| [\d.]+ \| \d+/\d+ \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert {int(generation): float(whole) for generation, _, whole in lanes} == {
        generation: round(gb_s * 16, 2) for generation, gb_s in PCIE_GB_S_PER_LANE.items()
    }


def test_the_example_of_a_busbw_adds_up() -> None:
    algbw = algbw_gb_s(2 * 2**30, 10364.8e-6)
    text = (ROOT / "docs/explanation/limits.md").read_text(encoding="utf-8")
    assert f"{algbw:.2f} GB/s algbw" in text
    assert f"{algbw * ring_allreduce_factor(8):.1f} GB/s busbw" in text


def test_examples_for_newcomers_are_python_that_works() -> None:
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        exec(compile(example, "extending.md", "exec"), {})


def test_every_matrix_is_described() -> None:
    properties = generate.report_schema()["properties"]
    assert [name for name in MATRICES if "description" not in properties[name]] == []
