"""Write what of the documentation is known to the program: `python docs/generate.py`; a test says when it is due.

docs/commands.md and docs/gpubench.1 are made from the options of the commands. The JSON Schema of a report, which is
part of the package, and the lists of docs/formats.md are made from the row types: their fields, and the comment `#:`
after or above each.
"""

import ast
import inspect
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from itertools import pairwise
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
from gpubench.cli.functions import TYPE_NAMES, signature_of
from gpubench.cli.process import COMMANDS
from gpubench.cli.signature import option_help, option_names
from gpubench.collectives.registry import collective_named
from gpubench.conditions.checks import CHECKS
from gpubench.conditions.condition import Condition, nothing_in_facts
from gpubench.conditions.policy import SEVERITIES
from gpubench.conditions.registry import FAMILIES
from gpubench.formats.registry import FORMATS
from gpubench.jobs.collective.plan import BACKEND_SUMMARIES
from gpubench.model.profiles.fault import FAULT_KEYS, FAULT_PARTS, Subject
from gpubench.model.results.report import SCHEMA_VERSION, SIGNED, Metadata
from gpubench.model.results.result_file import ALIKE, HOST_FIELDS, LEAST_ROWS, TABLES
from gpubench.model.terms.commands import BARE, Command
from gpubench.model.terms.options import GROUPS
from gpubench.model.terms.verdict import FINDING_COLUMNS, Finding, Verdict
from gpubench.readers import limits

FOLDER = Path(__file__).parent
_COLUMNS = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
_BEGIN, _END = "<!-- generated: {} -->", "<!-- end -->"


_COLLECTIVES = [each for each in COMMANDS if each.module == "collective"]
_HEAD_OF_COMMANDS = (
    "Written by `python docs/generate.py`. `gpubench COMMAND --help` shows the common options of a command, and "
    "`--help-all` all of them. Defaults can be [changed](defaults.md); [exit codes](exit-codes.md) and "
    "[keys of --fault](faults.md) have pages of their own."
)
_LEAST_PAGES = 3
"""An option with the same words on this many pages is a shared one."""


class Option(NamedTuple):
    """An option as --help-all shows it, under its heading there. `only` names the collectives that alone have it."""

    names: str
    help: str
    heading: str
    only: str = ""


class Page(NamedTuple):
    """A command, or all collectives, with examples and all options."""

    title: str
    text: str
    examples: Sequence[tuple[str, str]]
    options: Sequence[Option]


def help_of(*command: str) -> str:
    """What --help-all of a command prints on a terminal of 80 columns, or --help of the program."""
    wanted = "--help-all" if command else "--help"
    result = CliRunner().invoke(app, [*command, wanted], env=_COLUMNS, prog_name="gpubench")
    return "\n".join(line.rstrip() for line in result.output.rstrip().splitlines()) + "\n"


def commands() -> list[str]:
    """The subcommands, in the order in which --help lists them."""
    return re.findall(r"^  ([a-z0-9]+)  ", help_of().partition("Commands:")[2], re.MULTILINE)


def _options_of(command: Command) -> list[Option]:
    return [
        Option(option_names(each), option_help(each), each.rich_help_panel or GROUPS[0])
        for each in typer_command(command).params
        if not each.hidden
    ]


def _page_of(command: Command) -> Page:
    own = typer_command(command).page
    text = f"{command.summary} {' '.join(own.about.split())}"
    return Page(f"gpubench {command.name}".strip(), text, own.examples, _options_of(command))


def _page_of_collectives() -> Page:
    """One page for all: which of them have an option stands behind it."""
    having: dict[Option, list[str]] = {}
    for command in _COLLECTIVES:
        for option in _options_of(command):
            having.setdefault(option, []).append(command.name)
    options = [
        option._replace(only="" if len(names) == len(_COLLECTIVES) else ", ".join(names))
        for option, names in having.items()
    ]
    summaries = [f"- `{each.name}`: {collective_named(each.name).description}" for each in _COLLECTIVES]
    text = "\n".join((*summaries, "", f"Backends: {BACKEND_SUMMARIES}."))
    examples = typer_command(_COLLECTIVES[0]).page.examples
    return Page("gpubench allreduce and the other collectives", text, examples, options)


@cache
def _pages() -> tuple[Page, ...]:
    pages = []
    for command in COMMANDS:
        if command == _COLLECTIVES[0]:
            pages.append(_page_of_collectives())
        elif command.writes_reports and command not in _COLLECTIVES:
            pages.append(_page_of(command))
    return tuple(pages)


def _shared() -> list[Option]:
    """The options that mean the same on several pages, in the order of the headings."""
    counts = Counter(option for page in _pages() for option in page.options)
    return sorted(
        (option for option, pages in counts.items() if pages >= _LEAST_PAGES),
        key=lambda option: GROUPS.index(option.heading),
    )


def _first_name(option: Option) -> str:
    return next(each for each in re.split(r"[ ,/]+", option.names) if each.startswith("--"))


def _everywhere() -> list[Option]:
    return [each for each in _shared() if all(each in page.options for page in _pages())]


def _also(page: Page) -> str:
    """The shared options of a page that not every page has."""
    names = [f"`{_first_name(each)}`" for each in _shared() if each in page.options and each not in _everywhere()]
    return f"Shared options: {', '.join((*names, 'those of every command'))}."


def command_reference() -> str:
    """docs/commands.md."""
    bare, own = typer_command(BARE).page, _options_of(BARE)
    check = _options_of(next(each for each in COMMANDS if each.name == "check"))
    missing = ", ".join(f"`{_first_name(each)}`" for each in check if each not in own)
    parts = [
        "# Commands",
        "",
        _HEAD_OF_COMMANDS,
        "",
        *(f"- `{each.name}`: {each.summary}" for each in COMMANDS),
        "",
        "## Shared options",
        "",
        "Every command but `profiles` has these. A command lists those that only some have.",
        "",
        *_listed(_everywhere()),
        "",
        "Several commands have these:",
        "",
        *_listed(each for each in _shared() if each not in _everywhere()),
        "",
        "## gpubench",
        "",
        f"{BARE.summary} {' '.join(bare.about.split())}",
        "",
        *_pasted(bare.examples),
        "",
        f"It has the options of `gpubench check`, but not {missing}.",
    ]
    for page in _pages():
        options = [each for each in page.options if each not in _shared()]
        parts += ["", f"## {page.title}", "", page.text, "", *_pasted(page.examples), "", *_listed(options)]
        parts += ["", _also(page)]
    parts += ["", "## gpubench profiles", "", "```text", help_of("profiles").rstrip(), "```", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def _listed(options: Iterable[Option]) -> Iterator[str]:
    return (f"- `{each.names}`: {_text_of(each)}" for each in options)


def _text_of(option: Option) -> str:
    return f"{option.help} Only {option.only}." if option.only else option.help


def _pasted(examples: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield "```bash"
    for purpose, command in examples:
        yield f"{command}  # {purpose}"
    yield "```"


def man_page() -> str:
    """docs/gpubench.1."""
    lines = [
        '.\\" written by python docs/generate.py',
        ".TH GPUBENCH 1",
        ".SH NAME",
        "gpubench \\- find out why your GPUs talk slowly",
        ".SH SYNOPSIS",
        ".B gpubench",
        "[COMMAND] [OPTIONS]",
        ".SH DESCRIPTION",
        "Measures the path that data takes between GPUs, the speed it reaches, and the speed it should reach.",
        "Without a command, gpubench checks this machine. COMMAND \\-\\-help\\-all has more examples.",
        ".SH COMMANDS",
    ]
    for command in COMMANDS:
        lines += [".TP", f".B {command.name}", _troff(command.summary)]
    lines += [".SH SHARED OPTIONS", "Every command but profiles has these:", *_troff_options(_everywhere())]
    lines += [".PP", "Several commands have these:"]
    lines += _troff_options(each for each in _shared() if each not in _everywhere())
    for page in _pages():
        own = [each for each in page.options if each not in _shared()]
        lines += [f".SH {page.title.upper()}", ".nf", *(_troff(command) for _, command in page.examples[:2]), ".fi"]
        lines += _troff_options(own)
        lines += [".PP", _troff(_also(page).replace("`", ""))]
    lines += [".SH EXIT STATUS"]
    for code, meaning in _exit_codes():
        lines += [".TP", f".B {code}", _troff(meaning)]
    lines += [".SH SEE ALSO", "nvidia-smi(1), mpirun(1), srun(1)"]
    return "\n".join(lines) + "\n"


def _troff_options(options: Iterable[Option]) -> Iterator[str]:
    for each in options:
        yield from (".TP", f".B {_troff(each.names)}", _troff(_text_of(each)))


def _troff(line: str) -> str:
    escaped = line.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{escaped}" if escaped.startswith((".", "\\(aq")) else escaped


def _exit_codes() -> Iterator[tuple[str, str]]:
    """The table of the README."""
    text = (FOLDER.parent / "README.md").read_text(encoding="utf-8").partition("| exit code | |\n")[2]
    for code, meaning in re.findall(r"^\| (\d+) \| (.+) \|$", text.partition("\n\n")[0], re.MULTILINE):
        yield code, meaning.replace("`", "")


_PARTS = {
    Subject.GPU: ("A GPU", "node3.gpu5"),
    Subject.NIC: ("A NIC", "node3.nic2"),
    Subject.LINK: ("A pair of GPUs", "link0-3"),
    Subject.NODE: ("A node", "node3"),
    Subject.LEAF: ("A leaf switch", "leaf1"),
    Subject.RAIL: ("A rail of a leaf", "leaf1.rail2"),
}


_NCCL_VARIABLES = """## NCCL variables
A simulated job has the NCCL variables of your environment on all its nodes, as in
`NCCL_P2P_DISABLE=1 gpubench --simulate hgx-h100-8`. `--fault node3:env=NCCL_P2P_DISABLE=1` sets one for the ranks of
one node. Only variables with a known effect count. The others are ignored, and one line on stderr names them. A fault
with such a variable is refused.

| variable | effect | known from |
|---|---|---|
| `NCCL_P2P_DISABLE=1`, a low `NCCL_P2P_LEVEL` | NCCL uses host memory; copies do not change | 2, 4 and 8 H200s |
| `NCCL_MAX_NCHANNELS`, `NCCL_MAX_CTAS`, minimums | a channel carries 24 GB/s on H100 and H200 | 4 H200s |
| `NCCL_ALGO`, `NCCL_PROTO` on one node of H100s or H200s | the best that is left, by NCCL's own latencies | 4 H200s |
| `NCCL_NVLS_ENABLE=0` | NVSwitches do not reduce | the rows of a profile without NVLS |
"""


def fault_page() -> str:
    """docs/faults.md: every key of --fault, where it applies, with its values."""
    lines = [
        "# Faults of simulated machines",
        "",
        "`--fault WHERE:KEY=VALUE` breaks a part of the machine of `--simulate`. Parts are counted from 0, on node0",
        "unless another is named. Commas separate several keys of one part (`gpu5:nvlink=12,width=8`), and the option",
        "can be repeated. Written by `python docs/generate.py`.",
        "",
        "A fault changes what it names and nothing else. A fault of a pair slows the collectives whose path uses that",
        "pair: rings use neighbours (or every NVLink, if NVLinks join pairs), all-to-all uses all pairs, and a",
        "reduction in NVSwitches uses none. Every command takes every fault without a command of its own. `p2p` and",
        "the collectives name those that change nothing that they measure: `topo` and `check` show such facts.",
        "",
    ]
    lines += [*_NCCL_VARIABLES.splitlines(), ""]
    for subject, (title, example) in _PARTS.items():
        grammar = FAULT_PARTS[subject]
        keys = [each for each in FAULT_KEYS if each.subject is subject]
        value = keys[0].example
        lines += [f"## {title}", f"`{grammar}:KEY=VALUE`, e.g. `--fault {example}:{keys[0].key}={value}`", ""]
        lines += ["| key | values | effect | changes | where |", "|---|---|---|---|---|"]
        for each in keys:
            values = ", ".join(f"`{word}`" for word in each.words) or f"{each.kind}: {each.form}, e.g. `{each.example}`"
            where = f"`{each.command}` only" if each.command else "every command"
            changes = f"what `{each.command}` measures" if each.command else ", ".join(each.changes)
            lines.append(f"| `{each.key}` | {values} | {each.effect} | {changes} | {where} |")
        lines.append("")
    return "\n".join(lines)


def stub() -> str:
    """gpubench/__init__.pyi: the commands as functions, with the types of their options."""
    names = [command.name for command in COMMANDS if command.name != "profiles"]
    lines = [
        "# Written by python docs/generate.py.",
        "import os",
        "from collections.abc import Sequence",
        "from typing import Literal",
        "",
        "from gpubench.jobs.library import RunResult as RunResult",
        "from gpubench.jobs.library import load as load",
        "from gpubench.jobs.library import run as run",
        "",
        "One = str | int | float | os.PathLike[str]",
        "Several = One | Sequence[One] | None",
        "",
        "__version__: str",
        "__all__ = [",
        *(f'    "{name}",' for name in sorted(("__version__", "RunResult", "load", "run", *names))),
        "]",
        "",
    ]
    for command in COMMANDS:
        if command.name != "profiles":
            lines += _function(command)
    return "\n".join(lines)


def _function(command: Command) -> Iterator[str]:
    yield f"def {command.name}("
    parameters = signature_of(command.name).parameters.values()
    if all(each.kind is each.KEYWORD_ONLY for each in parameters):
        yield "    *,"
    for each in parameters:
        annotated = f"{each.name}: {TYPE_NAMES[each.annotation]}"
        default = f"{each.default!r}".replace("'", '"')
        yield f"    *{annotated}," if each.kind is each.VAR_POSITIONAL else f"    {annotated} = {default},"
    yield ") -> RunResult:"
    yield f'    """{command.summary}"""'
    yield ""


def format_table() -> str:
    """The formats, for docs/formats.md."""
    lines = ["| `--format` | `--output` | |", "|---|---|---|"]
    for each in FORMATS:
        suffix = "" if each.suffix is None else f" `{each.suffix}`"
        lines.append(f"| `{each.name}` |{suffix} | {each.summary} |")
    return "\n".join(lines) + "\n"


def check_table() -> str:
    """The checks, for docs/check.md."""
    rows = (f"| `{each.name}` | {each.summary} | {each.needs} |\n" for each in CHECKS)
    return "| check | expected | needs |\n|---|---|---|\n" + "".join(rows)


MATRICES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "matrix": (
        "path classes by device name, of the largest kind of node",
        {"type": "string", "pattern": r"^(X|NV[0-9]+|PIX|PXB|PHB|NODE|SYS|\?)$"},
    ),
    "peer_access": (
        "peer access between GPUs",
        {
            "type": "object",
            "properties": {
                "cuda": {"type": ["boolean", "null"]},
                "nvml": {"type": ["string", "null"]},
                "reason": {"type": "string"},
            },
            "required": ["cuda", "nvml", "reason"],
        },
    ),
    "limits": (
        "GB/s per direction to other devices; nvlink and pcie: of the GPU towards everybody",
        {"type": ["number", "null"]},
    ),
    "matrices": (
        "GB/s by way of copying, source and destination",
        {"type": "object", "additionalProperties": {"type": "number"}},
    ),
    "ratios": ("bandwidth with peer access over that without", {"type": "number"}),
}
"""Every section that is a matrix: its description, and what a cell holds."""

_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}


def report_schema() -> dict[str, Any]:
    """gpubench/formats/report.schema.json."""
    kinds: tuple[type[Struct], ...] = (Metadata, *TABLES.values())
    definitions = {_definition_name(kind): object_schema(kind) for kind in kinds}
    properties: dict[str, Any] = {
        "schema_version": {"const": SCHEMA_VERSION},
        "complete": {"description": "false while the run goes on, and when it was cut short", "type": "boolean"},
        "verdict": {"enum": list(Verdict)},
        "sentence": {"description": "the last line of the report, with its worst root cause", "type": "string"},
        "duration_s": {
            "description": "seconds from the command's begin to its end; null where it did not end by itself",
            "type": ["number", "null"],
        },
        "metadata": {"$ref": "#/$defs/metadata"},
    }
    for name, kind in TABLES.items():
        properties[name] = {"type": "array", "items": {"$ref": f"#/$defs/{_definition_name(kind)}"}}
    for name, (description, cell) in MATRICES.items():
        row = {"type": "object", "additionalProperties": cell}
        properties[name] = {"description": description, "type": "object", "additionalProperties": row}
    properties[ALIKE] = alike_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpubench report",
        "description": "What `gpubench --format json` writes: the sections of a command. A later version only adds.",
        "type": "object",
        "required": ["schema_version", "complete", "verdict", "metadata", "findings"],
        "properties": properties,
        "$defs": definitions,
    }


def alike_schema() -> dict[str, Any]:
    """The member that says which nodes have the rows of which."""
    texts = {"type": "array", "items": {"type": "string"}}
    told = {
        "nodes": texts | {"description": "nodes, in the order of the rows"},
        "as": {"description": "the node whose rows they have; not there: theirs are written out", "type": "string"},
        "values": {
            "description": "by column, where they differ from those rows: a value a row",
            "type": "object",
            "additionalProperties": {"type": "array"},
        },
    }
    each = {"type": "object", "required": ["nodes"], "properties": told, "additionalProperties": False}
    sections = {name: {"type": "array", "items": each} for name in HOST_FIELDS}
    return {
        "description": f"of sections of {LEAST_ROWS} rows and more: which nodes have the rows of which",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def _definition_name(kind: type) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def object_schema(kind: type[Struct]) -> dict[str, Any]:
    """The JSON Schema of a dataclass: every field is there, unknown ones as null."""
    descriptions = column_descriptions(kind)
    hints = get_type_hints(kind, include_extras=True)
    columns = list(kind.__struct_fields__)
    if kind is Finding:
        columns = list(FINDING_COLUMNS)
        derived = {name: vars(Finding)[name] for name in columns if isinstance(vars(Finding).get(name), property)}
        hints |= {name: get_type_hints(each.fget)["return"] for name, each in derived.items()}
        texts = {name: each.__doc__.rstrip(".") for name, each in derived.items()}
        descriptions = descriptions | {name: text[:1].lower() + text[1:] for name, text in texts.items()}
    described = {name: {"description": descriptions[name]} if name in descriptions else {} for name in columns}
    return {
        "description": " ".join((kind.__doc__ or "").split()),
        "type": "object",
        "properties": {name: described[name] | value_schema(hints[name]) for name in columns},
        "required": columns,
    }


@cache
def column_descriptions(kind: type[Struct]) -> dict[str, str]:
    """What stands behind `#:` after or above a field, by the name of the field."""
    found = {}
    for each in reversed(kind.__mro__):
        if issubclass(each, Struct) and each is not Struct:
            source = inspect.getsource(each)
            for above, name, behind in re.findall(r"((?:^ +#: .*\n)*)^ +(\w+): [^#\n]*(?:#: (.*))?$", source, re.M):
                if above or behind:
                    found[name] = behind or " ".join(above.replace("#:", "").split())
    return found


def value_schema(hint: Any) -> dict[str, Any]:
    """The JSON Schema of a value of a type; beside the type stand its words, its bounds, or that it may be negative."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _narrowed(value_schema(arguments[0]), hint.__metadata__)
    if origin is UnionType:
        schema = value_schema(arguments[0])
        return schema | {"type": [schema["type"], "null"]}
    if origin is tuple and Ellipsis not in arguments:
        bounds = {"minItems": len(arguments), "maxItems": len(arguments)}
        return {"type": "array", "items": value_schema(arguments[0]), **bounds}
    if origin in (tuple, Sequence):
        return {"type": "array", "items": value_schema(arguments[0])}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": value_schema(arguments[1])}
    if hint is Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, Struct):
        return object_schema(hint)
    if issubclass(hint, StrEnum):
        return {"type": "string", "enum": list(hint)}
    return {"type": _JSON_TYPES[hint]} | ({"minimum": 0} if hint in (int, float) else {})


def _narrowed(schema: dict[str, Any], narrowings: Sequence[Any]) -> dict[str, Any]:
    for each in narrowings:
        if each is SIGNED:
            del schema["minimum"]
        elif isinstance(each, Mapping):
            schema |= each
        else:
            schema["enum"] = [*each, *([None] if "null" in schema["type"] else [])]
    return schema


def column_lists() -> str:
    """Every section with its columns, for docs/formats.md; a column of several sections is described once."""
    columns = {name: tuple(_columns_of(kind)) for name, kind in TABLES.items()}
    counts = Counter((each.name, each.description) for own in columns.values() for each in own)
    shared = {name: text for (name, text), count in reversed(counts.most_common()) if count > 2}
    lines = ["### Columns of several sections", *(f"- `{name}`: {shared[name]}" for name in sorted(shared))]
    for name, kind in TABLES.items():
        lines += ["", f"### {name}", " ".join((kind.__doc__ or "").split()), ""]
        known = [str(each) for each in columns[name] if shared.get(each.name) == each.description]
        lines += [f"- as above: {', '.join(known)}"] if known else []
        lines += [f"- {each}: {each.description}" for each in columns[name] if str(each) not in known]
    for name, (text, _) in MATRICES.items():
        lines += ["", f"### {name}", f"A matrix: {text}."]
    return "\n".join(lines) + "\n"


class _Column(NamedTuple):
    name: str
    description: str
    is_nullable: bool

    def __str__(self) -> str:
        return f"`{self.name}`{'?' if self.is_nullable else ''}"


def _columns_of(kind: type) -> Iterator[_Column]:
    for name, declared in object_schema(kind)["properties"].items():
        yield _Column(name, declared.get("description", ""), isinstance(declared["type"], list))


def with_generated(page: Path, **parts: str) -> str:
    """A page with the parts between its marks written anew."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin = _BEGIN.format(name)
        before, _, rest = text.partition(f"{begin}\n")
        text = f"{before}{begin}\n{part}{_END}{rest.partition(_END)[2]}"
    return text


_READER = re.compile(r"^# Of ([a-z ]+)\.$")


def limit_table() -> str:
    """The limits of what is read: each with its value and the reason that stands below it in the code."""
    lines = ["| reader | limit | most | why |", "|---|---|---|---|"]
    for module, reader in ((limits, "any file"), (profiles, "profiles")):
        source = inspect.getsource(module)
        text = source.splitlines()
        reasons = {
            before.lineno: (before, after.value.value)
            for before, after in pairwise(ast.parse(source).body)
            if isinstance(before, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        }
        for number, line in enumerate(text, start=1):
            reader = found[1] if (found := _READER.match(line)) else reader
            if number in reasons and re.match(r"(MOST|LONGEST|SECONDS)_", line):
                assigned, why = reasons[number]
                names = [each.id for each in ast.walk(assigned.targets[0]) if isinstance(each, ast.Name)]
                most = " / ".join(map(_limit, (vars(module)[name] for name in names)))
                shown = ", ".join(f"`{name}`" for name in names)
                lines.append(f"| {reader} | {shown} | {most} | {' '.join(str(why).split())} |")
    return "\n".join(lines) + "\n"


def _limit(value: float | int) -> str:
    return f"{value:g} s" if isinstance(value, float) else f"{value:,}"


_STAGED_RUN = FOLDER.parent / "tests/results/h200x2/gpubench-p2p-disabled.json"
_THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
_WIDTH = 100
_SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Rich's picture of a terminal, without the fonts that it fetches."""


def terminal_picture(theme: str) -> str:
    """A measured run on two H200s as a terminal shows it, as SVG: the picture of the README."""
    words = ["report", str(_STAGED_RUN), "--width", str(_WIDTH), "--color", "always"]
    output = CliRunner().invoke(app, words, env=_COLUMNS, color=True).output
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(f"$ NCCL_P2P_DISABLE=1 gpubench\n{output.rstrip()}"))
    title = "two H200s: all-reduce eleven times slower, and why"
    return console.export_svg(title=title, theme=_THEMES[theme], code_format=_SVG, unique_id=f"gpubench-{theme}") + "\n"


_HEAD_OF_CONDITIONS = """\
# Conditions: everything that can be wrong, and why bytes go through host memory or are slow

Written by `python docs/generate.py`.

Every command uses the same list: `check`, `topo` and `p2p` report conditions as findings, `explain` finds those of a
log, and every report ends with the conditions that explain slow or host-staged paths. Each finding adds what was seen,
where, and the likely reason. `--evidence` and the JSON section `causes` add the confidence and what would settle a
doubt.

**Confidence.** *proven*: a setting, a refusal or a register shows it. *likely*: facts agree with it, and with little
else. *weak*: it is there and may matter; `topo` never predicts a fallback from a weak cause alone. The most certain
cause comes first, with its consequences below it. *By design* marks policies and hardware without a direct path: no
fault, verdict SKIP. Settings that gpubench makes are never blamed.

*Slows down* names the part of an operation that a condition makes slower. *Once* is an earlier id, which `gpubench
compare` still accepts.

## Severity

A condition has the same severity in every command, with the reason in parentheses. A cause without one is FAIL if it
prevents a direct path, and WARN if it slows one down. A condition is as severe as the worst of its consequences: a PCIe
link of a lower generation is WARN in `gpubench topo`, and FAIL once `gpubench p2p` measures slow copies.

*Drains* says that the [recipes](check.md#which-nodes-a-gate-drains) take a node with the condition out of service: its
hardware, driver or fabric is at fault. *Keeps* leaves it in service.

Words of DCGM are from its [table of errors](https://github.com/NVIDIA/DCGM/blob/master/dcgmlib/src/dcgm_errors.c)
(monitor: can work; triage; configuration; drain and reset; isolate: cannot work). AzNHC is
[Azure's node health checks](https://github.com/Azure/azurehpc-health-checks). NVML is
[its reference](https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html).
"""


def condition_page() -> str:
    """Return docs/conditions.md: by family, what each condition means, how severe it is, and the cure."""
    parts = [_HEAD_OF_CONDITIONS]
    for family in FAMILIES:
        parts.append(f"## {family.title}\n")
        parts += map(_condition_entry, family.conditions)
    return "\n".join(parts)


def _condition_entry(condition: Condition) -> str:
    known = {"by design": condition.by_design, "log only": condition.look is nothing_in_facts}
    marks = ", ".join(mark for mark, holds in known.items() if holds)
    cure = ". ".join(filter(None, (_code(condition.cure.commands), condition.cure.comment)))
    sentences = (
        ("", f"{condition.title} ({marks})" if marks else condition.title),
        ("", _grade_words(condition)),
        ("Slows down ", ", ".join(condition.explains.slows)),
        ("Once ", _code(condition.aliases)),
    )
    text = " ".join(f"{label}{text}." for label, text in sentences if text)
    return f"### `{condition.id}`\n{text}\n\nCure: {cure.removesuffix('.')}. [Source]({condition.link})\n"


def _grade_words(condition: Condition) -> str:
    grade = SEVERITIES.get(condition.id)
    if grade is None:
        return ""
    reason = "; ".join(filter(None, (grade.source, grade.degrees)))
    return f"{grade.severity}, {'drains' if grade.drains else 'keeps'} ({reason})"


def _code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def generated() -> dict[Path, str]:
    """Every file that this writes, as it should be."""
    formats, checks, security = FOLDER / "formats.md", FOLDER / "check.md", FOLDER / "security.md"
    schema = FOLDER.parent / "gpubench" / "formats" / "report.schema.json"
    return {
        schema: json.dumps(report_schema(), indent=2, ensure_ascii=False) + "\n",
        FOLDER.parent / "gpubench" / "__init__.pyi": stub(),
        FOLDER / "commands.md": command_reference(),
        FOLDER / "conditions.md": condition_page(),
        FOLDER / "gpubench.1": man_page(),
        FOLDER / "faults.md": fault_page(),
        formats: with_generated(formats, formats=format_table(), columns=column_lists()),
        checks: with_generated(checks, checks=check_table()),
        security: with_generated(security, limits=limit_table()),
        **{FOLDER / f"pictures/staged-{theme}.svg": terminal_picture(theme) for theme in _THEMES},
    }


def main() -> None:
    """Write them."""
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
