"""Values that are read without pydantic are those that typer would have read."""

import subprocess
import sys
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperCommand

from gpubench.cli.signature import TYPERS_OWN, PlainValuesCommand, plain_value

ARGUMENTS = [
    [],
    ["--text", "host"],
    ["--text", ""],
    ["--text", " x "],
    ["--many", "a,b", "--many", "c"],
    *(
        ["--count", each]
        for each in ("0", "7", "007", "64", "65", " 7", "+7", "-1", "7.0", "7_0", "0x7", "٧", "", "7e1")
    ),
    *(
        ["--seconds", each]
        for each in ("0.5", "0", "2", "0.05", "1e1", ".5", "5.", "nan", "inf", "-1", "9" * 20, "x", "")
    ),
    ["--maybe"],
    ["--no-maybe"],
    ["--flag"],
]


def outcome(kind: type[TyperCommand], arguments: list[str]) -> tuple[int, str, Any]:
    """Exit code, message and values of a command of this class."""
    found: dict[str, Any] = {}
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command(cls=kind)
    def call(
        *,
        text: str | None = None,
        many: Annotated[list[str] | None, typer.Option()] = None,
        count: Annotated[int | None, typer.Option(min=1, max=64)] = None,
        seconds: Annotated[float, typer.Option(min=0.1)] = 20.0,
        maybe: Annotated[bool | None, typer.Option("--maybe/--no-maybe")] = None,
        flag: bool = False,
    ) -> None:
        found.update(text=text, many=many, count=count, seconds=seconds, maybe=maybe, flag=flag)

    try:
        typer.main.get_command(app).main(arguments, standalone_mode=False)
    except typer.TyperException as error:
        return error.exit_code, error.format_message(), None
    return 0, "", {name: (type(value), value) for name, value in found.items()}


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=" ".join)
def test_a_value_is_what_typer_makes_of_it(arguments: list[str]) -> None:
    assert outcome(PlainValuesCommand, arguments) == outcome(TyperCommand, arguments)


@pytest.mark.parametrize(
    ("kind", "given"), [(int, "65"), (int, "+7"), (int, True), (float, "nan"), (list[str], "ab"), (list[int], ("1",))]
)
def test_other_values_are_left_to_typer(kind: Any, given: object) -> None:
    assert plain_value(kind, given, 1, 64) is TYPERS_OWN


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("-N", "x"), ("--cycles/-N x", "a whole number of 0 or more", "it has other characters", "--cycles 1")),
        (("--graph", "2.5"), ("--graph 2.5", "a whole number of 0 or more", "it has a fraction", "--graph 1")),
        (("--np", "0"), ("--np 0", "a whole number of 1 or more", "", "--np 1")),
        (("--timeout", "5s"), ("--timeout 5s", "a number from 1 to 86400", "it has a unit", "--timeout 60")),
        (("--budget", "fast"), ("--budget fast", "a number of 0 or more", "it has other characters", "--budget 1")),
    ],
)
def test_what_is_no_number_is_told_as_everything_else(given: tuple[str, str], said: tuple[str, ...]) -> None:
    from tests.cli.running import gpubench

    result = gpubench("allreduce", *given)
    seen, expected, likely, next_step = said
    lines = [f"gpubench: error: {seen}", f"  expected: {expected}", f"  likely:   {likely}", f"  try:      {next_step}"]
    told = result.stderr.splitlines()
    assert (result.returncode, result.stdout, len(told)) == (2, "", 4 if likely else 3)
    for line in (each for each in lines if not each.endswith("likely:   ")):
        assert any(each.startswith(line) for each in told), result.stderr


def test_plain_options_load_no_pydantic() -> None:
    program = (
        "import sys; from gpubench.cli.app import main\n"
        "sys.argv = ['gpubench', 'topo', '--simulate', 'hgx-h100-4', '--timeout', '5', '--width', '90', '--summary']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    print(ended.code, 'pydantic' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0 False"
