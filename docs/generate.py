"""Write the parts of the documentation that the program knows: `python docs/generate.py`. A test finds stale parts.

A page has hand-written text and generated parts between marks. docs/gpubench.1, gpubench/__init__.pyi, the JSON Schema
of a report, the pictures and the reports of the gallery are generated as a whole.
"""

import inspect
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from msgspec import Struct
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text
from typer.testing import CliRunner

from gpubench import profiles
from gpubench.cli.app import app, typer_command
from gpubench.cli.functions import TYPE_NAMES, make_signature
from gpubench.cli.process import COMMANDS
from gpubench.cli.signature import option_help, option_names
from gpubench.collectives.registry import collective_named
from gpubench.conditions.checks import CHECKS
from gpubench.conditions.condition import Condition, nothing_in_facts
from gpubench.conditions.policy import SEVERITIES
from gpubench.conditions.registry import FAMILIES
from gpubench.formats.registry import FORMATS
from gpubench.jobs.collective.plan import BACKEND_SUMMARIES
from gpubench.measure.watch import signals
from gpubench.model.paths.transport import RULES
from gpubench.model.profiles.fault import FAULT_KEYS, FAULT_PARTS, Subject
from gpubench.model.results.report import SCHEMA_VERSION, SIGNED, Metadata
from gpubench.model.results.result_file import ALIKE, HOST_FIELDS, MATRICES, TABLES
from gpubench.model.terms.commands import BARE, Command
from gpubench.model.terms.options import GROUPS
from gpubench.model.terms.verdict import FINDING_COLUMNS, Finding, Verdict
from gpubench.readers import limits

FOLDER = Path(__file__).parent
_COLUMNS = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
_LEAST_PAGES = 3
"""An option with the same words on this many pages is a shared one."""


class Option(NamedTuple):
    """An option as --help-all shows it, under its heading there. `only` names the collectives that alone have it."""

    names: str
    help: str
    heading: str
    only: str = ""

    @property
    def text(self) -> str:
        return f"{self.help} Only {self.only}." if self.only else self.help

    @property
    def first_name(self) -> str:
        return next(name for name in re.split(r"[ ,/]+", self.names) if name.startswith("--"))


class Page(NamedTuple):
    """A command, or all collectives, with examples and options; `also` names the shared ones."""

    title: str
    text: str
    examples: Sequence[tuple[str, str]] = ()
    options: Sequence[Option] = ()
    also: str = ""


def help_of(*command: str) -> str:
    """Return what --help-all of a command prints on a terminal of 80 columns, or --help of the program."""
    words = [*command, "--help-all" if command else "--help"]
    lines = CliRunner().invoke(app, words, env=_COLUMNS, prog_name="gpubench").output.rstrip().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def commands() -> list[str]:
    """Return the subcommands, in the order in which --help lists them."""
    return [command.name for command in COMMANDS]


def _page_of(command: Command) -> Page:
    typed = typer_command(command)
    options = [
        Option(option_names(param), option_help(param), param.rich_help_panel or GROUPS[0])
        for param in typed.params
        if not param.hidden
    ]
    text = f"{command.summary} {' '.join(typed.page.about.split())}"
    return Page(f"gpubench {command.name}".strip(), text, typed.page.examples, options)


def _page_of_collectives() -> Page:
    """Return one page for all. An option that only some have names them."""
    pages = {command.name: _page_of(command) for command in COMMANDS if command.module == "collective"}
    names: dict[Option, list[str]] = {}
    for name, page in pages.items():
        for option in page.options:
            names.setdefault(option, []).append(name)
    options = [
        option._replace(only="" if len(having) == len(pages) else ", ".join(having)) for option, having in names.items()
    ]
    summaries = "".join(f"- `{name}`: {collective_named(name).description}\n" for name in pages)
    text = f"{summaries}\nBackends: {BACKEND_SUMMARIES}."
    return Page("gpubench allreduce and the other collectives", text, pages["allreduce"].examples, options)


@cache
def pages() -> Sequence[Page]:
    """Return the reference of the commands: shared options, bare `gpubench`, and each command."""
    whole = []
    for command in COMMANDS:
        if command.name == "allreduce":
            whole.append(_page_of_collectives())
        elif command.module != "collective" and command.writes_reports:
            whole.append(_page_of(command))
    counts = Counter(option for page in whole for option in page.options)
    shared = [option for option, number in counts.items() if number >= _LEAST_PAGES]
    shared.sort(key=lambda option: GROUPS.index(option.heading))
    some = [option for option in shared if counts[option] < len(whole)]
    bare, check = _page_of(BARE), next(page for page in whole if page.title == "gpubench check")
    missing = ", ".join(f"`{option.first_name}`" for option in check.options if option not in bare.options)
    everywhere = "Every command but `profiles` has these. A command lists those that only some have."
    found = [
        Page("Shared options", everywhere, (), [option for option in shared if option not in some]),
        Page("", "Several commands have these:", (), some),
        bare._replace(options=(), also=f"It has the options of `gpubench check`, but not {missing}."),
    ]
    for page in whole:
        names = [f"`{option.first_name}`" for option in some if option in page.options]
        also = f"Shared options: {', '.join((*names, 'those of every command'))}."
        found.append(page._replace(options=[option for option in page.options if option not in shared], also=also))
    return found


def option_pages() -> dict[str, str]:
    """Return the generated part of each page in docs/commands/, by the name of the page."""
    shared, some, *others = pages()
    commands = "".join(f"- `{command.name}`: {command.summary}\n" for command in COMMANDS)
    shared_text = f"## {shared.title}\n\n{_markdown(shared)}\n{_markdown(some)}"
    found = {"options": f"{commands}\n{shared_text}", "profiles": f"```text\n{help_of('profiles')}```\n"}
    return found | {_file_of(page): _markdown(page) for page in others}


def rare_options() -> str:
    """Return the options that --help-all leaves out, with the commands that have them.

    Options without a help text exist only to be refused with an explanation.
    """
    having: dict[tuple[str, str], list[Command]] = {}
    every = [BARE, *(command for command in COMMANDS if command.writes_reports)]
    for command in every:
        for param in typer_command(command).params:
            if param.hidden and param.help:
                having.setdefault((option_names(param), option_help(param)), []).append(command)
    lines = []
    for (names, text), commands in having.items():
        others = [f"`{command.name or 'gpubench'}`" for command in commands if command.module != "collective"]
        collectives = [f"`{command.name}`" for command in commands if command.module == "collective"]
        where = [*others, *(collectives if len(collectives) == 1 else ["collectives"][: len(collectives)])]
        lines.append(f"- `{names}` ({'every command' if commands == every else ', '.join(where)}): {text}\n")
    return "".join(lines)


def _file_of(page: Page) -> str:
    return "collectives" if "allreduce" in page.title else page.title.split()[-1]


def _markdown(page: Page) -> str:
    parts = [f"{page.text}\n"]
    if page.examples:
        examples = "\n".join(f"{command}  # {purpose}" for purpose, command in page.examples)
        parts.append(f"```sh\n{examples}\n```\n")
    if page.options:
        parts.append("".join(f"- `{option.names}`: {option.text}\n" for option in page.options))
    parts += [f"{page.also}\n"] if page.also else []
    return "\n".join(parts)


_MAN_PAGE = """\
.\\" written by python docs/generate.py
.TH GPUBENCH 1
.SH NAME
gpubench \\- find out why your GPUs talk slowly
.SH SYNOPSIS
.B gpubench
[COMMAND] [OPTIONS]
.SH DESCRIPTION
Measures the path that data takes between GPUs, the speed it reaches, and the speed it should reach.
Without a command, gpubench checks this machine. COMMAND \\-\\-help\\-all has more examples.
.SH COMMANDS
{commands}
{pages}
.SH EXIT STATUS
{codes}
.SH SEE ALSO
nvidia-smi(1), mpirun(1), srun(1)
"""


def man_page() -> str:
    """Return docs/gpubench.1."""
    lines = []
    for page in pages():
        if page.title and not page.title.endswith("gpubench"):
            lines.append(f".SH {page.title.upper()}")
            lines += [".nf", *(_troff(command) for _, command in page.examples[:2]), ".fi"] if page.examples else []
        if not page.examples:
            lines += [".PP", _troff(page.text)]
        for option in page.options:
            lines += _tagged(option.names, option.text)
        lines += [".PP", _troff(page.also)] if page.also and page.options else []
    summaries = [line for command in COMMANDS for line in _tagged(command.name, command.summary)]
    # The table of the README.
    text = (FOLDER.parent / "README.md").read_text(encoding="utf-8").partition("| exit code | |\n")[2]
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", text.partition("\n\n")[0], re.MULTILINE)
    codes = [line for row in rows for line in _tagged(*row)]
    return _MAN_PAGE.format(commands="\n".join(summaries), pages="\n".join(lines), codes="\n".join(codes))


def _tagged(name: str, text: str) -> tuple[str, ...]:
    return ".TP", f".B {_troff(name)}", _troff(text)


def _troff(line: str) -> str:
    escaped = line.replace("`", "").replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{escaped}" if escaped.startswith((".", "\\(aq")) else escaped


_PARTS = {
    Subject.GPU: ("A GPU", "node3.gpu5"),
    Subject.NIC: ("A NIC", "node3.nic2"),
    Subject.LINK: ("A pair of GPUs", "link0-3"),
    Subject.NODE: ("A node", "node3"),
    Subject.LEAF: ("A leaf switch", "leaf1"),
    Subject.RAIL: ("A rail of a leaf", "leaf1.rail2"),
}


def fault_tables() -> str:
    """Return every key of --fault by part, where it applies, with its values."""
    lines = []
    for subject, (title, part) in _PARTS.items():
        faults = [fault for fault in FAULT_KEYS if fault.subject is subject]
        example = f"--fault {part}:{faults[0].key}={faults[0].example}"
        lines += [f"## {title}", f"`{FAULT_PARTS[subject]}:KEY=VALUE`, e.g. `{example}`", ""]
        lines += ["| key | values | effect | changes |", "|---|---|---|---|"]
        for fault in faults:
            values = ", ".join(f"`{word}`" for word in fault.words) or f"{fault.kind}, e.g. `{fault.example}`"
            changes = f"`{fault.command}` only" if fault.command else ", ".join(fault.changes)
            lines.append(f"| `{fault.key}` | {values} | {fault.effect} | {changes} |")
        lines.append("")
    return "\n".join(lines)


def stub() -> str:
    """Return gpubench/__init__.pyi: the commands as functions, with the types of their options."""
    functions = [command for command in COMMANDS if command.name not in ("profiles", "run")]
    names = sorted(("__version__", "RunResult", "load", "run", *(command.name for command in functions)))
    lines = [
        "# Written by python docs/generate.py.",
        "import os",
        "from collections.abc import Sequence",
        "from typing import Literal",
        "",
        *(f"from gpubench.jobs.library import {name} as {name}" for name in ("RunResult", "load", "run")),
        "",
        "One = str | int | float | os.PathLike[str]",
        "Several = One | Sequence[One] | None",
        "",
        "__version__: str",
        "__all__ = [",
        *(f'    "{name}",' for name in names),
        "]",
        "",
    ]
    for command in functions:
        parameters = make_signature(command.name).parameters.values()
        lines.append(f"def {command.name}(")
        lines += ["    *,"] if all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters) else []
        for parameter in parameters:
            annotated = f"{parameter.name}: {TYPE_NAMES[parameter.annotation]}"
            default = f"{parameter.default!r}".replace("'", '"')
            is_list = parameter.kind is parameter.VAR_POSITIONAL
            lines.append(f"    *{annotated}," if is_list else f"    {annotated} = {default},")
        lines += [") -> RunResult:", f'    """{command.summary}"""', ""]
    return "\n".join(lines)


def format_table() -> str:
    rows = (f"| `{f.name}` |{f' `{f.suffix}`' if f.suffix else ''} | {f.summary} |\n" for f in FORMATS)
    return "| `--format` | `--output` | |\n|---|---|---|\n" + "".join(rows)


def check_table() -> str:
    rows = (f"| `{check.name}` | {check.summary} | {check.needs} |\n" for check in CHECKS)
    return "| check | expected | needs |\n|---|---|---|\n" + "".join(rows)


_STATES = {"P": "for", "A": "nothing", "C": "against", "PA": "for or nothing", "PAC": "any"}


def decision_table() -> str:
    """Return the rules that judge the evidence of a path, in their order."""
    columns = "capability", "selection", "measurement", "correctness", "conclusion", "verdict", "confidence", "meaning"
    rows: list[Sequence[str]] = [columns, ["---"] * len(columns)]
    for rule in RULES:
        states = (_STATES[letters] for letters in rule.states.split())
        rows.append(
            (*states, *(rule.judgement.conclusion, rule.judgement.verdict, rule.judgement.confidence), rule.meaning)
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def traffic_table() -> str:
    """Return the rules by which watch derives the path of a job from its traffic, in their order."""
    rows: list[Sequence[str]] = [("NVLinks", "PCIe", "network", "GPUs of the job", "way", "meaning"), ["---"] * 6]
    for rule in signals.RULES:
        cells = rule.nvlinks, rule.pcie, rule.network, rule.members
        rows.append((*(" or ".join(cell) if cell else "any" for cell in cells), rule.way, rule.meaning))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


_SCHEMA = FOLDER.parent / "gpubench" / "formats" / "report.schema.json"
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of a report. Matrices and the head of a report are written by hand in the file."""
    schema: dict[str, Any] = json.loads(_SCHEMA.read_text(encoding="utf-8"))
    properties = schema["properties"]
    properties |= {"schema_version": {"const": SCHEMA_VERSION}, "verdict": {"enum": list(Verdict)}}
    kinds: dict[str, type[Struct]] = {"metadata": Metadata}
    for section, kind in TABLES.items():
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
        kinds[name] = kind
        properties[section] = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}}
    for section in [name for name, value in properties.items() if value.get("type") == "array"]:
        if section not in TABLES:
            del properties[section]
    alike = properties[ALIKE]["properties"]
    properties[ALIKE]["properties"] = dict.fromkeys(HOST_FIELDS, next(iter(alike.values())))
    schema["$defs"] = {name: object_schema(kind) for name, kind in kinds.items()}
    return schema


def object_schema(kind: type[Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a record: every field is there, unknown ones as null."""
    descriptions, hints = column_descriptions(kind), get_type_hints(kind, include_extras=True)
    columns = list(FINDING_COLUMNS if kind is Finding else kind.__struct_fields__)
    for name in columns:
        if isinstance(derived := vars(kind).get(name), property):
            hints[name] = get_type_hints(derived.fget)["return"]
            text = str(derived.__doc__).rstrip(".")
            descriptions[name] = text[:1].lower() + text[1:]
    described = {name: {"description": descriptions[name]} if name in descriptions else {} for name in columns}
    return {
        "description": " ".join((kind.__doc__ or "").split()),
        "type": "object",
        "properties": {name: described[name] | value_schema(hints[name]) for name in columns},
        "required": columns,
    }


def column_descriptions(kind: type[Struct]) -> dict[str, str]:
    """Return the comments `#:` after or above the fields, by the name of the field."""
    found = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Struct) and base is not Struct:
            source = inspect.getsource(base)
            for above, name, behind in re.findall(r"((?:^ +#: .*\n)*)^ +(\w+): [^#\n]*(?:#: (.*))?$", source, re.M):
                if above or behind:
                    found[name] = behind or " ".join(above.replace("#:", "").split())
    return found


def value_schema(hint: Any) -> dict[str, Any]:
    """Return the JSON Schema of a value of a type. Annotations add words or bounds, or allow negative numbers."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _narrowed(value_schema(arguments[0]), hint.__metadata__)
    if origin is UnionType:
        schema = value_schema(arguments[0])
        return schema | {"type": [schema["type"], "null"]}
    if origin in (tuple, Sequence):
        bounds = {"minItems": len(arguments), "maxItems": len(arguments)}
        is_open = origin is Sequence or Ellipsis in arguments
        return {"type": "array", "items": value_schema(arguments[0])} | ({} if is_open else bounds)
    if origin is Mapping:
        return {"type": "object", "additionalProperties": value_schema(arguments[1])}
    if hint is Any:
        return {}
    if issubclass(hint, Struct):
        return object_schema(hint)
    if issubclass(hint, StrEnum):
        return {"type": "string", "enum": list(hint)}
    return {"type": _JSON_TYPES[hint]} | ({"minimum": 0} if hint in (int, float) else {})


def _narrowed(schema: dict[str, Any], annotations: Iterable[Any]) -> dict[str, Any]:
    for annotation in annotations:
        if annotation is SIGNED:
            del schema["minimum"]
        elif isinstance(annotation, Mapping):
            schema |= annotation
        else:
            schema["enum"] = [*annotation, *([None] if "null" in schema["type"] else [])]
    return schema


def column_lists() -> str:
    """Return every section with its columns. A column of several sections is described once."""
    columns = {name: object_schema(kind)["properties"] for name, kind in TABLES.items()}
    counts = Counter((name, column.get("description", "")) for own in columns.values() for name, column in own.items())
    shared = {name: text for (name, text), count in reversed(counts.most_common()) if count > 1}
    lines = ["### Columns of several sections", *(f"- `{name}`: {shared[name]}" for name in sorted(shared))]
    for section, kind in TABLES.items():
        lines += ["", f"### {section}", " ".join((kind.__doc__ or "").split()), ""]
        known, others = [], []
        for name, column in columns[section].items():
            shown, text = f"`{name}`{'?' if isinstance(column['type'], list) else ''}", column.get("description", "")
            if shared.get(name) == text:
                known.append(shown)
            else:
                others.append(f"- {shown}: {text.removesuffix(' (null if unknown)')}")
        lines += [f"- as above: {', '.join(known)}"] if known else []
        lines += others
    properties = report_schema()["properties"]
    for name in MATRICES:
        lines += ["", f"### {name}", f"A matrix: {properties[name]['description']}."]
    return "\n".join(lines) + "\n"


def limit_table() -> str:
    """Return the limits of what is read, each with its value and the docstring below it."""
    lines = ["| reader | limit | most | why |", "|---|---|---|---|"]
    for module, reader in ((limits, "any file"), (profiles, "profiles")):
        for heading, assigned, why in re.findall(
            r'^# ([\w ]+)\.$|^((?:MOST|LONGEST|SECONDS)_[\w, ]+) = .*\n"""([^"]*)"""', inspect.getsource(module), re.M
        ):
            reader = heading.lower() or reader
            if assigned:
                values = [vars(module)[name] for name in assigned.split(", ")]
                most = " / ".join(f"{value:g} s" if isinstance(value, float) else f"{value:,}" for value in values)
                names = ", ".join(f"`{name}`" for name in assigned.split(", "))
                lines.append(f"| {reader} | {names} | {most} | {' '.join(why.split())} |")
    return "\n".join(lines) + "\n"


def condition_list() -> str:
    """Return by family what each condition means, how severe it is, and the cure."""
    parts = []
    for family in FAMILIES:
        parts += [f"## {family.title}\n", *map(_condition_entry, family.conditions)]
    return "\n".join(parts)


def _condition_entry(condition: Condition) -> str:
    known = {"by design": condition.by_design, "log only": condition.look is nothing_in_facts}
    marks = ", ".join(mark for mark, holds in known.items() if holds)
    title = f"{condition.title} ({marks})" if marks else condition.title
    sentences = [title]
    if grade := SEVERITIES.get(condition.id):
        reason = "; ".join(filter(None, (grade.source, grade.degrees)))
        sentences.append(f"{grade.severity}, {'drains' if grade.drains else 'keeps'} ({reason})")
    if condition.explains.slows:
        sentences.append(f"Slows down {', '.join(condition.explains.slows)}")
    if condition.aliases:
        sentences.append(f"Earlier: {_code(condition.aliases)}")
    cure = ". ".join(filter(None, (_code(condition.cure.commands), condition.cure.comment))).removesuffix(".")
    link = condition.link if "://" in condition.link else f"../{condition.link}"
    return f"### `{condition.id}`\n{'. '.join(sentences)}.\n\nCure: {cure}. [Source]({link})\n"


def _code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


_STAGED_RUN = str(FOLDER.parent / "tests/results/h200x2/gpubench-p2p-disabled.json")
_STAGED_KV = ("kv", "--simulate", "hgx-h200-2", "--fault", "node0:kv=expandable", "--sizes", "256M", "--blocks", "1")
_TERMINALS = {
    "staged": (
        ("report", _STAGED_RUN),
        "NCCL_P2P_DISABLE=1 gpubench",
        "two H200s: all-reduce eleven times slower, and why",
    ),
    "kv": (
        _STAGED_KV,
        " ".join(("gpubench", *_STAGED_KV)),
        "two simulated H200s: KV cache through host memory, and why",
    ),
}
"""The command, what the picture shows as typed, and the title of each picture of a terminal."""

_REPORTS = {
    "nvlink": ("p2p", "--simulate", "hgx-h100-8", "--fault", "gpu5:nvlink=12"),
    "nccl": ("report", _STAGED_RUN),
}
_THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
_WIDTH = 100
_SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Rich's picture of a terminal, without the fonts that it fetches."""


def terminal_picture(name: str, theme: str) -> str:
    """Return a run as a terminal shows it, as SVG: a picture of the README."""
    command, typed, title = _TERMINALS[name]
    words = [*command, "--width", str(_WIDTH), "--color", "always"]
    output = CliRunner().invoke(app, words, env=_COLUMNS, color=True).output
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(f"$ {typed}\n{output.rstrip()}"))
    return console.export_svg(title=title, theme=_THEMES[theme], code_format=_SVG, unique_id=f"gpubench-{theme}") + "\n"


def html_report(*command: str) -> str:
    """Return the html page of a command for the gallery. A page of a simulation has no time."""
    page = CliRunner().invoke(app, [*command, "--format", "html"], env=_COLUMNS).stdout
    if "--simulate" in command:
        page = page.replace("<dt>command</dt><dd>", f"<dt>command</dt><dd>gpubench {' '.join(command)}<!--", 1)
        page = re.sub(r"<!--.*?(?=</dd>)|<dt>began</dt><dd>.*?</dd>", "", page)
    return page


def _page_with(name: str, **parts: str) -> tuple[Path, str]:
    """Return a page with the parts between its marks written anew."""
    page = FOLDER / name
    text = page.read_text(encoding="utf-8")
    for part, content in parts.items():
        mark = f"<!-- generated: {part} -->\n"
        before, _, rest = text.partition(mark)
        text = f"{before}{mark}{content}<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page, text


def generated() -> dict[Path, str]:
    """Return every file that this writes, as it should be."""
    tables = {
        "check": {"checks": check_table()},
        "watch": {"rules": traffic_table()},
        "options": {"rare": rare_options()},
    }
    return {
        _SCHEMA: json.dumps(report_schema(), indent=2, ensure_ascii=False) + "\n",
        FOLDER.parent / "gpubench" / "__init__.pyi": stub(),
        FOLDER / "gpubench.1": man_page(),
        **{
            FOLDER / f"pictures/{name}-{theme}.svg": terminal_picture(name, theme)
            for name in _TERMINALS
            for theme in _THEMES
        },
        **{FOLDER / f"pictures/{name}.html": html_report(*command) for name, command in _REPORTS.items()},
    } | dict(
        (
            *(
                _page_with(f"commands/{name}.md", options=text, **tables.get(name, {}))
                for name, text in option_pages().items()
            ),
            _page_with("explanation/evidence.md", decisions=decision_table()),
            _page_with("reference/conditions.md", conditions=condition_list()),
            _page_with("reference/faults.md", faults=fault_tables()),
            _page_with("reference/formats.md", formats=format_table(), columns=column_lists()),
            _page_with("reference/security.md", limits=limit_table()),
        )
    )


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
