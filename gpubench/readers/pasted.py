"""Splits pasted text into parts: commands, prose, and program output.

Each reader processes only the parts of its own kind. A reader of tables calls `blank_commands_and_prose` instead. Log
lines and tables are `OUTPUT`. Only formats with an unmistakable first line have a kind of their own.
"""

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a part of pasted text is."""

    OUTPUT = "output"
    """Log lines and tables, and everything that fits no other kind."""
    COMMAND = "command"
    """A shell command with its continuation lines, or code in a Markdown document."""
    PROSE = "prose"
    """The body text of a Markdown document."""
    RAS = "answer of NCCL's RAS"
    STACK = "stacks of py-spy"
    JSON = "JSON of NCCL's RAS or Inspector"


class PastedPart(NamedTuple):
    """Consecutive lines of the same kind. `first_line` is the line number of the first one, from 1."""

    kind: Kind
    first_line: int
    lines: list[str]

    @property
    def text(self) -> str:
        """The lines joined into one string."""
        return "".join(f"{line}\n" for line in self.lines)


_PROGRAMS = (
    r"(?:sudo |time |nohup |numactl \S+ )*(?:(?:\./|/|~/)\S+|mpirun|mpiexec(?:\.hydra)?|orterun|prterun|srun|sbatch"
    r"|torchrun|python3?|deepspeed|accelerate|horovodrun|docker|podman|apptainer|singularity|kubectl|vllm|ncclras|py-spy"
    r"|gpubench)"
)
_ASSIGNMENTS = r"(?:env )?(?:[A-Za-z_]\w*=(?:\"[^\"]*\"|'[^']*'|\S*) +)+"
_EXPORT = r"(?:export|setenv|unset) +[A-Z_]\w*\b"
_PROMPT = (
    r"(?:\([\w.-]{1,40}\) ?)?(?:"
    r"\[[\w.-]{1,60}@[\w.-]{1,80}[^\]]{0,200}\] ?[$#%]"  # [user@host folder]$
    r"|[\w.-]{1,60}@[\w.-]{1,80}(?:[: ][^$#%>]{0,200})?[$#%>]"  # user@host:folder$
    r"|[\w.-]{1,60}:[~/][^$#%>\s]{0,200} ?[$#%>]"  # host:folder #
    r"|(?:ba|z|k|da)?sh-[\d.]+[$#]|[\w.-]{0,60}\$|[❯➜%!]|In \[\d*\]: ?!|\++)"
)
_COMMAND = re.compile(
    rf"\s*(?:{_PROMPT}\s*(?=[\w./~(!\"'-])|(?:# )?(?={_ASSIGNMENTS}{_PROGRAMS}\b|{_ASSIGNMENTS}\w+ -|{_EXPORT})"
    rf"|(?:# )?(?={_PROGRAMS} +(?:(?:run|exec|launch|serve|logs|dump) +)?(?:-{{1,2}}\w|\./|/|\S+\.(?:py|sh)\b)))"
)
"""A command line.

After a prompt, any text is a command. Without a prompt, a command starts with variable assignments, or with a launcher
and options.
"""

_RAS_HEADER = re.compile(r"NCCL version \S+ compiled with CUDA")
_RAS_TITLES = r"Job summary|Communicators\.\.\.|Group +Comms +Nodes +Ranks|# +in group +per comm"
_RAS_COMMUNICATOR = r"#\d+-\d+ \([0-9a-f]{1,16}\) [A-Z]+$"
_RAS_BEGINS = re.compile(rf"\s*(?:{_RAS_TITLES}|{_RAS_COMMUNICATOR})")
_RAS_CONTINUES = re.compile(
    rf"\s*(?:$|={{3,}}$|CUDA runtime version |{_RAS_TITLES}|{_RAS_COMMUNICATOR}|Nodes +Processes|\(total\) "
    r"|[\d -]+$|\d+ +\d+ +\d+ +\S+ +\d+ +\d+ +[A-Z]+ +[A-Z,]+$|Errors$|Warnings$|INCOMPLETE$|DEAD$|TIMEOUT$"
    r"|Missing (?:communicator )?data |\d+ job process(?:es)? |Encountered \d+ communication timeout"
    r"|Communicator ranks have |\d+ ranks (?:have|reported) |Rank \d+ (?:--|has |reported )|The missing ranks?: "
    r"|(?:Initialization|Asynchronous) errors? on |Process \d+ on node |Node \S+ running process|The outlier nodes"
    r"|No communicator data|\[could not find information|OK$|SERVER PROTOCOL )"
)
_STACK_BEGINS = re.compile(r"\s*Process \d{1,10}: ")
_PYTHON_VERSION = "Python v"
_STACK_CONTINUES = re.compile(
    r"\s*$|Python v|Thread (?:0x)?[0-9A-Fa-f]+ \(|\s+\S.* \(\S+:\d+\)$|\s+(?:Arguments|Locals):|\s{8,}\w+: "
)
_JSON_WORDS = re.compile(
    r'"(?:coll_perf|p2p_perf|dump_stats|inspector_output_format_version|nccl_version|communicators\w*)"'
)
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MOST_JSON_LINES = 2**16
_OF_JSON = re.compile(r'\s*(?:["{}\[\],]|-?\d|true|false|null|$)')
_JSON_FILLING = re.compile(r"\s*[\[\],]?\s*$")

_MARKS = (
    *(b"compiled with CUDA", b"Communicators...", b"in group  per", b") MISMATCH", b") INCOMPLETE", b") ERROR"),
    *(b"Python v", b'"coll_perf"', b'"dump_stats"', b'"nccl_version"', b'"n_ranks"', b"env NCCL_", b"\n```", b"]("),
    b"\n## ",
)
_ASSIGNED = re.compile(rb"NCCL_[A-Z0-9_]{2,40}=")


def may_hold_parts(block: bytes) -> bool:
    """Return False if a block of a log can only be `OUTPUT`. This is quick, and true for most blocks of a long log."""
    return any(mark in block for mark in _MARKS) or block.startswith(b"```") or _ASSIGNED.search(block) is not None


def split(lines: Sequence[str]) -> Iterator[PastedPart]:
    """Yield the parts of a text in order. Every line is in exactly one part."""
    has_prose = is_markdown(lines)
    fence, kind, held, first = "", Kind.OUTPUT, list[str](), 1
    at = 0
    while at < len(lines):
        line, count, begins = lines[at], 1, False
        if has_prose and (mark := _FENCE.match(line)):
            fence = "" if fence else mark[1].lower() or "text"
            new = Kind.PROSE
        elif json_lines := _json_lines(lines, at):
            new, count, begins = Kind.JSON, json_lines, True
        elif fence in _CODE:
            new = Kind.COMMAND
        else:
            new = _kind_of(line, kind, lines[at + 1 : at + 3], held)
            if new is Kind.OUTPUT and has_prose and not fence and not _is_program_output(line):
                new = Kind.PROSE
            begins = (new is Kind.COMMAND and not _is_continued(held)) or _begins_again(line, new)
        if (new is not kind or begins) and held:
            yield PastedPart(kind, first, held)
            held = []
        if not held:
            kind, first = new, at + 1
        held.extend(lines[at : at + count])
        at += count
    if held:
        yield PastedPart(kind, first, held)


def _kind_of(line: str, before: Kind, following: Sequence[str], held: Sequence[str]) -> Kind:
    if before is Kind.COMMAND and _is_continued(held):
        return Kind.COMMAND
    if begins_ras_answer(line) or _RAS_BEGINS.match(line):
        return Kind.RAS
    if before is Kind.RAS and _RAS_CONTINUES.match(line):
        return Kind.RAS
    if _STACK_BEGINS.match(line) and any(after.lstrip().startswith(_PYTHON_VERSION) for after in following):
        return Kind.STACK
    if before is Kind.STACK and _STACK_CONTINUES.match(line):
        return Kind.STACK
    if before is Kind.JSON and _JSON_FILLING.match(line):
        return Kind.JSON
    return Kind.COMMAND if _COMMAND.match(line) else Kind.OUTPUT


def _is_continued(held: Sequence[str]) -> bool:
    return bool(held) and held[-1].rstrip().endswith("\\")


def _begins_again(line: str, kind: Kind) -> bool:
    """Return True if a line starts a new part, although the part before it has the same kind."""
    return (kind is Kind.RAS and begins_ras_answer(line)) or (
        kind is Kind.STACK and _STACK_BEGINS.match(line) is not None
    )


def _json_lines(lines: Sequence[str], at: int) -> int:
    """Return the number of lines of a JSON object that starts here. 0 unless it is from NCCL's RAS or Inspector.

    A truncated object ends before the next object, or before a line that is not JSON.
    """
    if not lines[at].lstrip().startswith("{"):
        return 0
    depth, known, count = 0, False, 0
    for line in lines[at : at + _MOST_JSON_LINES]:
        if count and (line.startswith("{") or not _OF_JSON.match(line)):
            break
        known = known or _JSON_WORDS.search(line) is not None
        bare = _JSON_STRING.sub("", line)
        depth += bare.count("{") - bare.count("}")
        count += 1
        if depth <= 0:
            break
    return count if known else 0


_FENCE = re.compile(r" {0,3}(?:```|~~~)+\s*([\w.+-]*)")
_CODE = ("bash", "sh", "shell", "zsh", "python", "py", "yaml", "yml", "toml", "dockerfile", "c", "cpp", "rust", "go")
"""Languages of Markdown code blocks that do not contain program output."""

_HEADING = re.compile(r"#{1,6} [A-Z0-9`*][^:]*$")
_LINK = re.compile(r"\]\([^()\s]+\)")
_FEWEST_SIGNS = 2
_CODE_SPAN = re.compile(r"`[^`]*`")
_OF_PROGRAMS = re.compile(
    r"NCCL (?:INFO|WARN|DIAG) |^\W{0,3}(?:\[?rank ?\d|\[\d{4}-|\d{4}-\d\d-\d\d[T ]"
    r"|\[[EWIF ]\w*\]?|[EWIF]\d{4} |Traceback"
    r"|(?:srun|slurmstepd|mpirun|mpiexec|prterun|torchrun|bash|kernel|python3?)(?:\[\d+\])?: )"
    r"|\b[\w/-]+\.(?:cc|cpp|cu|h|c|py):\d+\b|ProcessGroupNCCL|NVRM: |\bSXid\b|^\s*(?:\w+\.)*\w+(?:Error|Exception): "
    r"|^\S+:\d+:\d+ \[\d+\]|^\([\w ]{0,60}\bpid=\d"
)
"""Program output, also in Markdown outside of code blocks."""


def _is_program_output(line: str) -> bool:
    return _OF_PROGRAMS.search(_CODE_SPAN.sub("", line)) is not None


_FIRST_PERSON = re.compile(
    r"^\W*(?:[Ww]e|[Oo]ur|[Mm]y|[Hh]ello|[Hh]i|[Tt]hanks?|[Aa]ny(?:one| idea)|[Ii]s (?:this|it))\b"
    r"|\b(?:we|our|my)\b|\bI(?:'\w+)? (?:have|am|was|r[au]n|see|saw|g[eo]t|think|tr[iy]\w*|used?|did|had|c\w+|w\w+)\b"
)
"""First-person phrases, which only people write. If a user writes that "we killed" a job last week, this job was
not killed.
"""


def is_told_by_person(line: str) -> bool:
    """Return True if a person wrote this line about a job, for example 'we killed it', in text that is not Markdown."""
    return _FIRST_PERSON.search(line) is not None and not _is_program_output(line)


_PLAIN_WORD = re.compile(r"[a-z]{1,20}[,;:.?!]?")
_FIRST_WORD = re.compile(r"[A-Za-z][a-z']*,?")
_OF_SENTENCES = frozenset(("the", "a", "an", "that", "this", "if", "it", "and", "to", "of", "does", "do"))
_FEWEST_PLAIN_WORDS, _FEWEST_JOINING_WORDS, _PLAIN_SHARE, _FEWEST_SENTENCES = 5, 2, 0.6, 2


def is_sentence(line: str) -> bool:
    """Return True if most words of a line are plain words, and nothing in it looks like program output."""
    words = line.split() or [""]
    plain = sum(1 for word in words if _PLAIN_WORD.fullmatch(word))
    joining = sum(1 for word in words if word.lower() in _OF_SENTENCES)
    is_plain = plain >= max(_FEWEST_PLAIN_WORDS, _PLAIN_SHARE * len(words)) and joining >= _FEWEST_JOINING_WORDS
    return is_plain and _FIRST_WORD.fullmatch(words[0]) is not None and not _is_program_output(line)


def is_prose(lines: Sequence[str]) -> bool:
    """Return True if at least half of the lines are sentences, and none is program output."""
    written = [line for line in lines if line.strip()]
    sentences = sum(map(is_sentence, written))
    return sentences >= max(_FEWEST_SENTENCES, len(written) / 2) and not any(map(_is_program_output, written))


def begins_ras_answer(line: str) -> bool:
    """Return True for the first line of a RAS report."""
    return _RAS_HEADER.match(line.strip()) is not None


def is_markdown(lines: Sequence[str]) -> bool:
    """Return True if a text has Markdown headings together with code blocks or links.

    Headings with a single # do not suffice, because nccl-tests starts lines with one.
    """
    headings = [line for line in lines if _HEADING.match(line)]
    others = sum(1 for line in lines if _FENCE.match(line) or _LINK.search(line))
    below = sum(1 for line in headings if line.startswith("##"))
    return below >= _FEWEST_SIGNS or (bool(headings) and others > 0 and len(headings) + others > _FEWEST_SIGNS)


def blank_commands_and_prose(lines: Sequence[str]) -> list[str]:
    """Replace commands and prose by empty lines, so that line numbers stay the same."""
    kept: list[str] = []
    for part in split(lines):
        is_left_out = part.kind in (Kind.COMMAND, Kind.PROSE)
        kept += [""] * len(part.lines) if is_left_out else part.lines
    return kept
