"""What the documentation lists is what the code has."""

import re
from pathlib import Path

from gpubench.causes import CAUSES
from gpubench.measure.explain import SECTIONS as EXPLAIN_SECTIONS
from gpubench.measure.topo import SECTIONS
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


def test_every_cause_is_named_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"^\| `([\w-]+)` \| ", text, re.MULTILINE) == [cause.id for cause in CAUSES]


def test_the_readme_shows_what_explain_prints() -> None:
    command = "gpubench explain tests/logs/h200x4-p2p-disabled"
    shown = (ROOT / "README.md").read_text().partition(f"$ {command}\n")[2].partition("```")[0]
    assert gpubench(*command.split()[1:]).stdout == shown
