"""Every command of a cure can be pasted unchanged, and every comment consists of sentences."""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpubench
from gpubench.conditions.registry import CONDITIONS
from gpubench.model.terms.verdict import Cure
from tests.cli.running import gpubench as run
from tests.cli.test_help import understood
from tests.fakes.planted import CHECKED, PLANTS, Plant

PACKAGE = Path(gpubench.__file__).parent
FILLED_LATER = re.compile(r"(?<=-i )GPU\b|(?<=-d )DEVICE\b|(?<=-s )BUS_ID\b")
PLACEHOLDER = re.compile(
    r"\b(PID|BUSID|BUS_ID|GPU|DEVICES?|INTERFACE|DIR|DIRECTORY|FOLDER|FILE|HOSTS?|NAME|PROGRAM|RESULT|LOG|PORT|I-J)\b"
    r"|\.\.\.|…|`"
)
PROSE = re.compile(r"\. [A-Z]|\.$|\b(?:run it|then|if it|or use)\b", re.IGNORECASE)


def cures_in_code() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield place, commands and comment of every `Cure.of(...)` and `Cure(comment=...)` in the code."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Cure.of", "Cure"):
                commands = tuple(map(text_of, node.args)) if ast.unparse(node.func) == "Cure.of" else ()
                comment = next((text_of(keyword.value) for keyword in node.keywords if keyword.arg == "comment"), "")
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", commands, comment


def text_of(node: ast.expr) -> str:
    """Return a text of the code, with 1 for variable parts: it is valid as a number, a name and a path."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) for value in values)
        case _:
            return "1"


CODE = [
    *((condition.id, condition.cure.commands, condition.cure.comment) for condition in CONDITIONS),
    *(each for each in cures_in_code() if each[1] or each[2]),
]


@pytest.mark.parametrize(("place", "commands", "comment"), CODE)
def test_every_command_can_be_pasted_as_it_stands(place: str, commands: tuple[str, ...], comment: str) -> None:
    del comment
    for command in commands:
        bare = FILLED_LATER.sub("1", command)
        assert not PLACEHOLDER.search(bare), place
        assert not PROSE.search(re.sub(r"'[^']*'|; then\b", "", bare)), place
        assert subprocess.run(["bash", "-n", "-c", bare], capture_output=True, check=False).returncode == 0, place


@pytest.mark.parametrize("plant", [*PLANTS, *CHECKED], ids=lambda plant: plant.id)
def test_no_command_of_a_planted_machine_has_a_placeholder_or_prose(plant: Plant) -> None:
    for command in (command for found in plant.findings for command in found.commands):
        assert not PLACEHOLDER.search(command), command
        assert not PROSE.search(re.sub(r"'[^']*'|; then\b", "", command)), command


@pytest.mark.parametrize(("place", "commands", "comment"), CODE)
def test_every_comment_is_made_of_sentences(place: str, commands: tuple[str, ...], comment: str) -> None:
    del commands
    assert not comment or re.match(r"[A-Z`1].*(?:[.!]| 1)$|1$", comment, re.DOTALL), place


@pytest.mark.parametrize("cure", [condition.cure for condition in CONDITIONS], ids=lambda each: each.text)
def test_options_of_gpubench_in_a_cure_exist(cure: Cure) -> None:
    for command in cure.commands:
        for words in re.findall(r"(?<!ssh 1 )\bgpubench( [^&|>;)]+|$)", command):
            understood(words)


SHOWN = ("check", "--simulate", "hgx-h100-8", "--fault", "gpu3:nvlink=9", "--fault", "node0:acs=on")


def test_every_format_has_every_command_whole() -> None:
    document = json.loads(run(*SHOWN, "--format", "json").stdout)
    commands = [command for finding in document["findings"] for command in finding["commands"]]
    assert len(commands) >= 3
    assert all(finding["next_command"] == finding["commands"][0] for finding in document["findings"])
    for width in ("40", "80", "160"):
        lines = run(*SHOWN, "--width", width).stdout.splitlines()
        assert set(commands) <= {line.removeprefix("  try:").strip() for line in lines}, width
    text = run(*SHOWN, "--format", "markdown").stdout
    assert all(f"`{command}`\n" in text for command in commands)
    for form in ("html", "junit", "github"):
        text = run(*SHOWN, "--format", form).stdout.replace("&amp;", "&").replace("%0A", "\n").replace("%25", "%")
        assert [command for command in commands if command not in text] == [], form


def test_findings_name_their_node_and_devices() -> None:
    document = json.loads(run(*SHOWN, "--format", "json").stdout)
    (down,) = (each for each in document["findings"] if each["id"] == "nvlink-down")
    assert (down["node"], down["devices"]) == ("node0", ["GPU3"])
    assert down["places"] == [{"node": "node0", "device": "GPU3", "bus_id": "0000:19:00.0"}]


def test_a_line_for_monitoring_never_cuts_a_command() -> None:
    said = run(*SHOWN, "--exit-style", "npd").stdout.rstrip("\n")
    assert len(said) <= 80
    assert not said.endswith("...")
    assert said.endswith("See nvlink-down")
