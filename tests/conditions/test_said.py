"""The approved report of every planted condition (`pytest tests/conditions --golden` writes it)."""

from pathlib import Path

import pytest

from gpubench.model.results.report import CauseRow
from tests.fakes.planted import CHECKED, PLANTS, Plant

APPROVED = Path(__file__).parent / "said.txt"


def said(plant: Plant) -> list[str]:
    """Return findings, causes of paths and of the machines, and what was not read."""
    lines = [
        f"finding {finding.id} {finding.severity}: {finding.subject} | {finding.seen} | {finding.expected} | "
        f"{finding.cause} | {finding.cure.text} | {', '.join(finding.subjects)}"
        for finding in plant.findings
    ]
    named = plant.diagnosis.named
    lines += [
        f"cause {each.cause.id} {each.gravity} {each.confidence}, {'; '.join(each.effects)}: "
        f"{each.subject} | {each.seen} | {each.cure.text}"
        for top in named
        for each in (top, *top.implied)
    ]
    lines += [
        f"machine {row.id} {row.verdict} {row.confidence}: {row.subject} | {row.evidence}"
        for row in plant.report.rows(CauseRow)
    ]
    return lines


def test_everything_is_said_as_approved(request: pytest.FixtureRequest) -> None:
    text = "\n".join(line for plant in (*PLANTS, *CHECKED) for line in (f"# {plant.id}", *said(plant), ""))
    if request.config.getoption("--golden"):
        APPROVED.write_text(text, encoding="utf-8")
    assert text == APPROVED.read_text(encoding="utf-8")
