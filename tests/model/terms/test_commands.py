"""The record of every command names what there is."""

from importlib import import_module

import pytest

from gpubench.cli.process import COMMANDS
from gpubench.model.results.result_file import TABLES
from gpubench.model.terms.commands import COLLECTIVE, TOPO, Command, find_command


@pytest.mark.parametrize("command", [*COMMANDS, COLLECTIVE], ids=lambda command: command.name or "collective")
def test_modules_and_sections_of_a_command_exist(command: Command) -> None:
    assert callable(import_module(f"gpubench.cli.commands.{command.module}").app)
    page = import_module(f"gpubench.formats.text.{command.page}")
    assert hasattr(page, f"{command.page.capitalize()}View")
    assert command.main_section in TABLES
    assert not command.streamed_section or command.streamed_section in TABLES


def test_a_report_knows_its_command_by_subject_and_collective() -> None:
    for each in COMMANDS:
        is_collective = each.module == "collective"
        found = find_command(each.name, each.name if is_collective else None)
        assert found == (COLLECTIVE if is_collective else each)
    assert find_command("of another version") is TOPO
