"""Lists the file formats that gpubench reads, for machines and for results.

To add a format, add a module and a line here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpubench.errors import IncompleteResultError, UsageError, add_advice
from gpubench.model.facts.snapshot import Snapshot
from gpubench.model.results.result_file import NO_USER_FACTS, ResultFile, UserFacts
from gpubench.model.terms.verdict import Cure
from gpubench.readers import limits
from gpubench.readers.documents import Wanted, read_text, result_path
from gpubench.readers.pasted import is_markdown, is_prose
from gpubench.readers.programs import find_program

T = TypeVar("T")


class FileKind(Struct, Generic[T], frozen=True):
    """A file format. Its module is imported when a file may match. `summary` completes "a file may be ...".

    The module has a function `recognises(text)` that checks the text, and a function `read(text, name)` that parses it.
    `read` raises a UsageError that starts with `name`. `takes` lists the further arguments of `read`, which a user
    supplies. `is_certain` is true if `recognises` matches no other program's text, and `is_whole` if nothing else can
    stand in such a file. If `read` reads one run, `begins` matches where output of the program begins, and `once` what
    a run prints once.
    """

    module: str
    summary: str
    takes: tuple[str, ...] = ()
    is_certain: bool = False
    is_whole: bool = False
    begins: str = ""
    once: str = ""

    def recognises(self, text: str) -> bool:
        """Return True if a text looks like this format."""
        return bool(import_module(self.module).recognises(text))

    def read(self, text: str, name: str, user_facts: Mapping[str, Any]) -> T:
        """Parse the text of the file `name`. Pass those of the user's facts that the module accepts."""
        value: T = import_module(self.module).read(text, name, **{key: user_facts.get(key) for key in self.takes})
        return value

    def split_runs(self, text: str) -> Iterator[str]:
        """Yield a text for each run. Empty lines replace the runs before it, so that line numbers stay the same.

        Several outputs are one run, such as the tests of nvbandwidth one after another, until one of them repeats.
        """
        starts = [found.start() for found in re.finditer(self.begins, text, re.MULTILINE)] if self.begins else []
        first, seen = 0, set[str]()
        for start, end in pairwise([0, *starts[1:], len(text)]):
            printed = set(re.findall(self.once, text[start:end])) if self.once else set()
            if seen & printed:
                yield "\n" * text.count("\n", 0, first) + text[first:start]
                first, seen = start, set()
            seen |= printed
        yield "\n" * text.count("\n", 0, first) + text[first:]


def _read_text_of(kinds: Sequence[FileKind[T]], text: str, name: str, wanted: Wanted, **user_facts: Any) -> T:
    try:
        for kind in kinds:
            if kind.recognises(text):
                return kind.read(text, name, user_facts)
        raise wanted.unknown(text, name)
    except IncompleteResultError:
        raise
    except UsageError:
        # A reader can match the table of another program. nvidia-smi's reader, for example, matches rocm-smi's tables.
        is_read = any(kind.is_certain and kind.recognises(text) for kind in READERS)
        program = None if is_read else find_program(text)
        if program is None or (program.reads and any(kind.recognises(text) for kind in kinds)):
            raise
        raise program.refusal(name, wanted.kinds) from None


READERS: tuple[FileKind[Snapshot], ...] = (
    FileKind("gpubench.readers.machines.nccl_topology", "NCCL's topology XML"),
    FileKind("gpubench.readers.machines.snapshot", "a snapshot that gpubench recorded"),
    FileKind(
        "gpubench.readers.machines.amd_topology",
        "the text of rocm-smi --showtopo or amd-smi topology",
        is_certain=True,
    ),
    FileKind("gpubench.readers.machines.topo_matrix", "the text of nvidia-smi topo -m"),
)

_WANTED = Wanted(
    kinds=", or ".join(reader.summary for reader in READERS),
    how_to_make_one="nvidia-smi topo -m > topo.txt, or NCCL_TOPO_DUMP_FILE=topo.xml set for any NCCL program",
    most_bytes=limits.MOST_MACHINE_BYTES,
    example="topo.txt",
)


def read_file(path: Path) -> Snapshot:
    """Read a machine from a file, or from standard input ('-'). If the text has no host name, use the file name.

    Raises UsageError if the file is missing, has an unknown format, or contains an error.
    """
    path = result_path(path)
    snapshot = _read_text_of(READERS, read_text(path, _WANTED), str(path), _WANTED)
    return snapshot if snapshot.host else replace(snapshot, host=path.stem)


RESULT_READERS: tuple[FileKind[ResultFile], ...] = (
    FileKind("gpubench.readers.results.gpubench_json", "gpubench's JSON, or its JSON Lines", is_whole=True),
    FileKind("gpubench.readers.results.gpubench_csv", "its CSV", is_whole=True),
    FileKind("gpubench.readers.results.nccl_tests.json", "nccl-tests' JSON", takes=("user_facts",), is_whole=True),
    FileKind("gpubench.readers.results.nccl_tests.text", "nccl-tests' text", takes=("user_facts",)),
    FileKind("gpubench.readers.results.nccl_inspector", "the JSON of NCCL's Inspector", is_whole=True),
    FileKind("gpubench.readers.results.nccl_inspector_metrics", "its Prometheus metrics"),
    FileKind(
        "gpubench.readers.results.nvbandwidth",
        "nvbandwidth's text or JSON",
        begins=r"^.*nvbandwidth Version",
        once=r"Running \w+\.",
    ),
    FileKind(
        "gpubench.readers.results.p2p_bandwidth_latency",
        "p2pBandwidthLatencyTest's text",
        begins=r"^.*\[P2P \(Peer-to-Peer\) GPU Bandwidth",
        once=r"\[P2P \(Peer-to-Peer\)",
    ),
    FileKind("gpubench.readers.results.osu", "OSU's text of a collective, or of osu_bw", takes=("user_facts",)),
    FileKind(
        "gpubench.readers.results.ml_engineering",
        "all_reduce_bench.py's table",
        takes=("user_facts",),
        begins=r"^.*- software: torch=",
        once=r"- software: torch=",
    ),
    FileKind("gpubench.readers.results.perftest", "perftest's bandwidths"),
    FileKind("gpubench.readers.results.ucx_perftest", "ucx_perftest's bandwidths"),
    FileKind("gpubench.readers.results.nixlbench", "nixlbench's table"),
)

_LOOKED_AT_CHARACTERS = 2**18  # Characters in which to look for known formats. A table is near the start of a text
WANTED = Wanted(
    kinds=", or ".join(reader.summary for reader in RESULT_READERS),
    how_to_make_one="gpubench allreduce --output base.json",
    most_bytes=limits.MOST_RESULT_BYTES,
    example="results.txt",
)


def read_results(path: Path, user_facts: UserFacts = NO_USER_FACTS) -> ResultFile:
    """Read the rows of a result file. `user_facts` supplies facts that the file lacks, such as the number of ranks.

    Raises UsageError if the file is missing, has an unknown format, or contains an error.
    """
    return parse_results(read_text(path, WANTED), str(path), user_facts)


def parse_results(text: str, name: str, user_facts: UserFacts = NO_USER_FACTS) -> ResultFile:
    """Read the rows of a result from a text. Raises the same errors as `read_results`."""
    with _ADVICE():
        return _limited(_read_text_of(RESULT_READERS, text, name, WANTED, user_facts=user_facts), name)


_ADVICE = partial(
    add_advice, reason="the file was cut off, or edited by hand", next_step="the same command again, with --output"
)


def _limited(file: ResultFile, name: str) -> ResultFile:
    if file.count > limits.MOST_ROWS:
        raise UsageError(
            f"{name} has {file.count} rows",
            expected=f"at most {limits.MOST_ROWS}",
            reason="it has many runs, or it was crafted to block its reader",
            next_step="one file per run",
        )
    return file


def parse_all_results(
    text: str, name: str, user_facts: UserFacts = NO_USER_FACTS
) -> tuple[list[ResultFile], list[UsageError]]:
    """Read the runs of all programs in a text, and return them with the errors of those that cannot be read.

    Raises the error of `read_results` if none can be read.
    """
    kinds = [kind for kind in RESULT_READERS if kind.recognises(text)]
    if (len(kinds) > 1 and not kinds[0].is_whole) or any(kind.begins for kind in kinds):
        files: list[ResultFile] = []
        errors: list[UsageError] = []
        for kind in kinds:
            for part in filter(kind.recognises, kind.split_runs(text)):
                try:
                    with _ADVICE():
                        files.append(_limited(kind.read(part, name, {"user_facts": user_facts}), name))
                except UsageError as error:
                    errors.append(error)
        if files:
            return files, errors
    return [parse_results(text, name, user_facts)], []


STANDARD_INPUT = "standard input"


PROSE = "prose"


class OtherText(NamedTuple):
    """A text without NCCL log lines: what it contains, and the command to use for it."""

    name: str
    what: str
    cure: Cure


def other_text(text: str, name: str) -> OtherText | None:
    """Identify a text without NCCL log lines, from its start. Return None if no format and no program matches."""
    text, file = text[:_LOOKED_AT_CHARACTERS], "FILE" if name == STANDARD_INPUT else name
    if not text.strip():
        return None
    if any(kind.recognises(text) for kind in RESULT_READERS):
        return OtherText(
            name, "a table of results", Cure.of(f"gpubench report {file}", comment="It judges the results.")
        )
    if is_markdown(text.splitlines()):
        return OtherText(
            name, "a Markdown document", Cure(comment="Use `gpubench explain` with the output of the job itself.")
        )
    if program := find_program(text):
        return OtherText(name, f"{program.name}'s output: {program.output}", program.instead)
    if kind := next((kind for kind in READERS if kind.recognises(text)), None):
        return OtherText(
            name, kind.summary, Cure.of(f"gpubench topo --from {file}", comment="It shows and judges the machine.")
        )
    if is_prose(text.splitlines()):
        return OtherText(name, PROSE, Cure(comment="Use `gpubench explain` with the output of the job itself."))
    return None
