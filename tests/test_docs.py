"""What the documentation lists is what the code has."""

import re
from pathlib import Path

from gpubench.causes import FAMILIES
from gpubench.causes.catalogue import catalogue
from gpubench.measure.explain import SECTIONS as EXPLAIN_SECTIONS
from gpubench.measure.topo import SECTIONS
from gpubench.model.evidence import RULES
from gpubench.model.fault import FAULT_KEYS
from tests.cli.running import gpubench

ROOT = Path(__file__).parents[1]


def test_every_fault_is_documented() -> None:
    text = (ROOT / "profiles" / "README.md").read_text()
    documented = re.findall(r"^\| (gpu|nic|link|node) \| `(\w+)` \| (.+?) \| (.+) \|$", text, re.MULTILINE)
    assert documented == [
        (key.subject.value, key.key, key.values.replace("|", "\\|"), key.effect) for key in FAULT_KEYS
    ]


def test_every_section_is_named_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [section for section in (*SECTIONS, *EXPLAIN_SECTIONS) if f"`{section}`" not in text] == []


def test_the_decision_table_is_documented() -> None:
    words = {"P": "for", "A": "nothing", "C": "against"}

    def cell(letters: str) -> str:
        return "any" if letters == "PAC" else " or ".join(words[letter] for letter in letters)

    lines = (ROOT / "docs" / "evidence.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| capability | selection |"))
    for rule, line in zip(RULES, lines[start + 2 :], strict=False):
        judgement = rule.judgement
        cells = (rule.capability, rule.selection, rule.measurement, rule.correctness)
        follows = (judgement.conclusion, judgement.verdict, judgement.confidence, rule.meaning)
        assert line == "| " + " | ".join([*map(cell, cells), *follows]) + " |"
    assert not lines[start + 2 + len(RULES)].startswith("|")


def test_the_catalogue_of_causes_is_the_code_s() -> None:
    assert (ROOT / "docs" / "causes.md").read_text() == catalogue(FAMILIES), "python -m gpubench.causes.catalogue"


def test_the_readme_shows_what_explain_prints() -> None:
    command = "gpubench explain tests/logs/h200x4-p2p-disabled"
    shown = (ROOT / "README.md").read_text().partition(f"$ {command}\n")[2].partition("```")[0]
    assert gpubench(*command.split()[1:]).stdout == shown


def test_the_readme_shows_what_evidence_looks_like() -> None:
    command = "gpubench allreduce --simulate hgx-h200-4 --sizes 1G --fault link0-1:staged=yes --evidence"
    shown = (ROOT / "README.md").read_text().partition(f"$ {command}\n...\n")[2].partition("```")[0]
    assert shown
    assert shown in gpubench(*command.split()[1:]).stdout
