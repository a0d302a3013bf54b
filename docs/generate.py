"""Write what of the documentation is known to the program: `python docs/generate.py`; a test says when it is due.

docs/commands.md is what --help prints, docs/gpubench.1 the same as a man page; the tables of docs/formats.md are the
columns of the rows with the words of the JSON Schema.
"""

import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from gpubench.cli.app import app
from gpubench.formats.registry import FORMATS

FOLDER = Path(__file__).parent
_COLUMNS = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
_BEGIN, _END = "<!-- generated: {} -->", "<!-- end -->"


def commands() -> list[str]:
    """The subcommands, in the order in which --help lists them."""
    return re.findall(r"^  ([a-z0-9]+)  ", help_of().partition("Commands:")[2], re.MULTILINE)


def help_of(*command: str) -> str:
    """What --help prints on a terminal of 80 columns."""
    result = CliRunner().invoke(app, [*command, "--help"], env=_COLUMNS, prog_name="gpubench")
    return "\n".join(line.rstrip() for line in result.output.rstrip().splitlines()) + "\n"


def command_reference() -> str:
    """docs/commands.md."""
    parts = ["# Commands\n\nWhat `--help` prints, written by `python docs/generate.py`.\n"]
    parts += [
        f"## {f'gpubench {command}'.strip()}\n\n```text\n{help_of(*command.split())}```\n"
        for command in ("", *commands())
    ]
    return "\n".join(parts)


def man_page() -> str:
    """docs/gpubench.1."""
    lines = [
        '.\\" written by python docs/generate.py',
        ".TH GPUBENCH 1",
        ".SH NAME",
        "gpubench \\- what the links between GPUs should deliver, what they deliver, and why not",
        ".SH SYNOPSIS",
        ".B gpubench",
        "COMMAND [OPTIONS]",
        ".SH DESCRIPTION",
    ]
    lines += _verbatim(help_of())
    for command in commands():
        lines += [f".SH GPUBENCH {command.upper()}", *_verbatim(help_of(command))]
    lines += [".SH EXIT STATUS"]
    for code, meaning in _exit_codes():
        lines += [".TP", f".B {code}", _troff(meaning)]
    lines += [".SH SEE ALSO", "nvidia-smi(1), mpirun(1), srun(1)"]
    return "\n".join(lines) + "\n"


def _exit_codes() -> Iterator[tuple[str, str]]:
    """The table of the README."""
    text = (FOLDER.parent / "README.md").read_text(encoding="utf-8").partition("| exit code | |\n")[2]
    for code, meaning in re.findall(r"^\| (\d) \| (.+) \|$", text.partition("\n\n")[0], re.MULTILINE):
        yield code, meaning.replace("`", "")


def _verbatim(text: str) -> list[str]:
    return [".nf", *map(_troff, text.rstrip().splitlines()), ".fi"]


def _troff(line: str) -> str:
    escaped = line.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{escaped}" if escaped.startswith((".", "\\(aq")) else escaped


def format_table() -> str:
    """The formats, for docs/formats.md."""
    lines = ["| `--format` | `--output` | |", "|---|---|---|"]
    for each in FORMATS:
        suffix = "" if each.suffix is None else f" `{each.suffix}`"
        lines.append(f"| `{each.name}` |{suffix} | {each.summary} |")
    return "\n".join(lines) + "\n"


def column_tables() -> str:
    """Every section with its columns, for docs/formats.md."""
    schema = json.loads(files("gpubench.formats").joinpath("report.schema.json").read_text(encoding="utf-8"))
    parts: list[str] = []
    for name, section in schema["properties"].items():
        reference = section.get("items", {}).get("$ref")
        if reference is not None:
            definition = schema["$defs"][reference.rpartition("/")[2]]
            parts.append(f"### {name}\n")
            if "description" in definition:
                parts[-1] += f"{definition['description']}\n"
            parts.append("\n".join(_column_lines(definition["properties"])) + "\n")
        elif section.get("type") == "object" and "$ref" not in section:
            parts.append(f"### {name}\nA matrix: {section['description']}.\n")
    return "\n".join(parts)


def _column_lines(properties: Mapping[str, Any]) -> Iterator[str]:
    yield "| column | type | |"
    yield "|---|---|---|"
    for column, declared in properties.items():
        kinds = declared.get("type", "string" if "enum" in declared or "$ref" in declared else "any")
        names = [kinds] if isinstance(kinds, str) else list(kinds)
        unknown = ", or null" if "null" in names else ""
        words = " or ".join(name for name in names if name != "null")
        yield f"| `{column}` | {words}{unknown} | {declared.get('description', '').replace('|', chr(92) + '|')} |"


def with_generated(text: str) -> str:
    """docs/formats.md with what stands between its marks written anew."""
    for name, part in (("formats", format_table()), ("columns", column_tables())):
        begin = _BEGIN.format(name)
        before, _, rest = text.partition(f"{begin}\n")
        text = f"{before}{begin}\n{part}{_END}{rest.partition(_END)[2]}"
    return text


def generated() -> dict[Path, str]:
    """Every file that this writes, as it should be."""
    formats = FOLDER / "formats.md"
    return {
        FOLDER / "commands.md": command_reference(),
        FOLDER / "gpubench.1": man_page(),
        formats: with_generated(formats.read_text(encoding="utf-8")),
    }


def main() -> None:
    """Write them."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
