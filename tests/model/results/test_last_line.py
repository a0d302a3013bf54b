"""The last line of a report: its length, what is left out first, and the command that it ends with."""

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.conditions.registry import CONDITIONS
from gpubench.model.results.ending import LAST, MOST_CHARACTERS, last_line, part
from gpubench.model.results.figures import SpeedFigures
from gpubench.model.results.report import Report
from gpubench.model.results.sentence import sentence
from gpubench.model.terms.verdict import Finding, Verdict
from tests.cli.test_every_fault import COMMANDS, MACHINES
from tests.fakes.last_line import is_well_formed
from tests.fakes.planted import CHECKED, PLANTS, Plant
from tests.model.results.test_sentence import METADATA, SLOW


def test_a_first_part_that_is_too_long_ends_after_a_word() -> None:
    line = last_line(Verdict.FAIL, "measured", [part("word " * 50), part("more", importance=LAST)])
    assert (len(line) <= MOST_CHARACTERS, line[-6:]) == (True, "word …")


def line_of(found: Finding) -> str:
    figures = SpeedFigures()
    figures.add(SLOW)
    return sentence(METADATA, Report(verdict=found.severity, complete=True, findings=(found,)), figures)


@pytest.mark.parametrize("plant", [*PLANTS, *CHECKED], ids=lambda plant: plant.id)
def test_every_planted_condition_makes_a_line(plant: Plant) -> None:
    for found in plant.findings:
        assert is_well_formed(line_of(found)), line_of(found)


def test_every_cure_is_a_whole_command_or_left_out() -> None:
    for condition in CONDITIONS:
        found = Finding(
            condition.id,
            Verdict.FAIL,
            "node3 GPU0",
            condition.title,
            condition.expected,
            condition.likely,
            condition.cure,
        )
        assert is_well_formed(line_of(found)), line_of(found)


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            (command, "--simulate", MACHINES.get(command, "hgx-h200-4"), *options)
            for command, options in COMMANDS.items()
        ),
        ("plan", "--parameters", "7B", "--simulate", "hgx-h200-8"),
    ],
)
def test_every_command_ends_with_such_a_line(arguments: tuple[str, ...]) -> None:
    """With every fault too: tests/cli/test_every_fault.py."""
    ended = CliRunner().invoke(app, [*arguments, "--summary"])
    assert is_well_formed(ended.stdout.rstrip("\n")), ended.stdout
