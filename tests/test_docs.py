"""What the documentation lists is what the code has."""

import re
from pathlib import Path

from gpubench.measure.topo import SECTIONS
from gpubench.model.fault import FAULT_KEYS

ROOT = Path(__file__).parents[1]


def test_every_fault_is_documented() -> None:
    text = (ROOT / "profiles" / "README.md").read_text()
    documented = re.findall(r"^\| (gpu|nic|link|node) \| `(\w+)` \| (.+?) \| (.+) \|$", text, re.MULTILINE)
    assert documented == [
        (key.subject.value, key.key, key.values.replace("|", "\\|"), key.effect) for key in FAULT_KEYS
    ]


def test_every_section_is_named_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [section for section in SECTIONS if f"`{section}`" not in text] == []
