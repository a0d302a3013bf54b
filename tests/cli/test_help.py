"""The help of every command: short by default, whole with --help-all, and with examples that can be pasted."""

import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from typer.testing import CliRunner

from gpubench.cli.app import app, typer_command
from gpubench.cli.commands.profiles import HELP as HELP_OF_PROFILES
from gpubench.cli.process import COMMANDS, replace_other_name
from gpubench.model.profiles.fault import FAULT_KEYS, list_fault_keys
from gpubench.model.terms.commands import BARE, Command
from gpubench.model.terms.options import GROUPS
from tests.cli.running import gpubench

ENVIRONMENT = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
WITH_PAGES = [each for each in (BARE, *COMMANDS) if each.name != "profiles"]
MOST_LINES, MOST_OPTIONS = 60, 16
"""Of a short help; plan has the most, 14 beside -h and --help-all."""


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, words, env=ENVIRONMENT, prog_name="gpubench")
    assert result.exit_code == 0, result.output
    return result.output


def words_of(name: str) -> tuple[str, ...]:
    """The command without a name shows its help beside one of its options."""
    return (name,) if name else ("--quick",)


def options_in(text: str) -> list[str]:
    return re.findall(r"^  (-[^ ,]+)", text, re.MULTILINE)


def pasted(text: str) -> Iterator[str]:
    """The examples of a help, each with its lines joined as a shell joins them."""
    examples = re.sub(r"^  \S.*:$", "", text.partition("Examples:\n")[2].partition("\n\n")[0], flags=re.MULTILINE)
    yield from filter(None, (" ".join(each.split()) for each in examples.replace("\\\n", " ").splitlines()))


@pytest.mark.parametrize("command", WITH_PAGES, ids=lambda each: each.name)
def test_help_is_short_and_help_all_has_everything(command: Command) -> None:
    name = command.name
    short, whole = shown(*words_of(name), "--help"), shown(*words_of(name), "--help-all")
    assert command.summary in " ".join(short.split())
    assert len(short.splitlines()) <= MOST_LINES
    assert len(list(pasted(short))) == 2
    assert set(options_in(short)) < set(options_in(whole))
    assert len(options_in(short)) <= MOST_OPTIONS
    for text in (short, whole):
        assert max(map(len, text.splitlines())) <= 80
        assert not re.search(r"<\w+[\[>]", text)
        headings = [each for each in re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE) if each != "Examples"]
        assert headings == [each for each in (*GROUPS, "Help") if each in headings]
    every = typer_command(command).params
    assert {each.opts[0] for each in every if each.opts[0].startswith("-") and not each.hidden} <= {
        name for each in re.findall(r"^  (-.+?)(?:  |$)", whole, re.MULTILINE) for name in re.split(r"[ ,]+", each)
    }


@pytest.mark.parametrize("command", WITH_PAGES, ids=lambda each: each.name)
def test_examples_can_be_pasted_and_are_understood(command: Command) -> None:
    name = command.name
    examples = [example for _, example in typer_command(command).page.examples]
    assert list(pasted(shown(*words_of(name), "--help-all"))) == examples
    for example in examples:
        for part in re.findall(r"\bgpubench( [^&|>)]+|$)", example.split("  #")[0]):
            understood(part)


def understood(words: str) -> None:
    """Raises an error for words that the command does not know."""
    name, *rest = [*shlex.split(words.replace("*.log", "1.log")), ""]
    rest = [each for each in rest if each]
    if not name or name.startswith("-"):
        name, rest = "", [each for each in (name, *rest) if each]
    (command,) = (each for each in (BARE, *COMMANDS) if each.name == name)
    _of_its_own(command).make_context(name, rest)


@cache
def _of_its_own(command: Command) -> Any:
    """A command keeps the names of --help that its first context has: one without the program's would spoil others."""
    return typer_command.__wrapped__(command)


def test_examples_of_profiles_are_understood() -> None:
    for example in re.findall(r"^  gpubench (.+)$", HELP_OF_PROFILES, re.MULTILINE):
        name, *rest = shlex.split(example)
        assert name in {"profiles", "check"}
        if name == "profiles":
            (command,) = (each for each in COMMANDS if each.name == "profiles")
            _of_its_own(command).commands[rest[0]].make_context(rest[0], rest[1:])


@pytest.mark.parametrize("words", [("help", "allreduce"), ("allreduce", "-h")])
def test_other_ways_to_ask_for_the_help_of_a_command(words: tuple[str, ...]) -> None:
    assert shown(*words) == shown("allreduce", "--help")


OTHER_NAMES = {
    "show": "report",
    "all-reduce": "allreduce",
    "all_reduce": "allreduce",
    "all_reduce_perf": "allreduce",
    "all_gather_perf": "allgather",
    "reduce_scatter_perf": "reducescatter",
    "broadcast_perf": "broadcast",
    "reduce_perf": "reduce",
    "alltoall_perf": "alltoall",
    "gather_perf": "gather",
    "scatter_perf": "scatter",
    "sendrecv_perf": "sendrecv",
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_of_a_command_are_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["gpubench", name, "-h"], ["gpubench", "help", name]):
        monkeypatch.setattr("sys.argv", words)
        assert replace_other_name() == name
        assert OTHER_NAMES[name] in sys.argv


@pytest.mark.parametrize(
    ("word", "instead"), [("version", "--version"), ("doctor", "check"), ("list", "profiles list")]
)
def test_a_word_that_is_no_command_gets_a_hint(word: str, instead: str) -> None:
    result = gpubench(word)
    assert (result.returncode, f"try:      gpubench {instead}" in result.stderr) == (2, True)


def test_the_first_page_has_five_groups_and_fits_a_screen() -> None:
    lines = shown("--help").splitlines()
    headings = [line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z][a-z]+:", line)]
    assert headings == ["Diagnose", "Measure", "Results", "Expert", "Setup", "Options"]
    assert len(lines) <= 50
    assert all(re.search(rf"\b{command.name}\b", shown("--help")) for command in COMMANDS)


def test_help_of_the_program_and_of_the_command_without_a_name() -> None:
    assert shown("help") == shown("--help") == shown("-h")
    assert shown("--help-all") == shown("--quick", "--help-all")
    assert gpubench("help", "alreduce").returncode == 2


def test_version_in_short() -> None:
    assert gpubench("-V").stdout == gpubench("--version").stdout


@pytest.mark.parametrize(("shell", "begins"), [("zsh", "#compdef gpubench"), ("bash", "_gpubench_completion() {")])
def test_the_completion_script_is_of_the_shell_that_is_named(shell: str, begins: str) -> None:
    assert shown("--show-completion", shell).startswith(begins)


def test_json_is_a_short_form_of_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ("topo", "--simulate", "hgx-h200-4")
    assert shown(*run, "--json").startswith('{\n  "schema_version"')
    monkeypatch.setenv("GPUBENCH_FORMAT", "csv")
    assert shown(*run, "--json").startswith('{\n  "schema_version"')
    monkeypatch.delenv("GPUBENCH_FORMAT")
    monkeypatch.setenv("GPUBENCH_JSON", "1")
    assert shown(*run).startswith('{\n  "schema_version"')
    for format_name in ("csv", "table"):
        assert not shown(*run, "--format", format_name).startswith("{")
    monkeypatch.delenv("GPUBENCH_JSON")
    refused = gpubench(*run, "--json", "--format", "csv")
    assert refused.returncode == 2
    assert "--json and --format exclude each other" in refused.stderr


@pytest.mark.parametrize("command", ["p2p", "kv", "scan", "watch"])
def test_every_key_of_faults_is_in_the_help_of_the_commands_that_know_it(command: str) -> None:
    text = shown(command, "--help-all")
    assert "the keys of --fault" in " ".join(shown("topo", "--help").split())
    told = " ".join(text.partition("\nKeys of --fault:\n")[2].split())
    for part, keys in list_fault_keys(command):
        assert f"{part} {keys}" in told
    known = {each.key for each in FAULT_KEYS if each.command in ("", command)}
    assert set(re.findall(r"(?<![=\w])(\w+)=", told)) == known
