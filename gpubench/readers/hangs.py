"""Reads diagnostic output of hanging jobs: Flight Recorder dumps, PyTorch watchdog lines, py-spy stacks and NCCL
RAS.

PyTorch's Flight Recorder writes dumps of version 2.x as JSON or pickle
(torch/csrc/distributed/c10d/FlightRecorder.hpp). A pickle may contain only plain data, so no code in it is executed.
NCCL's RAS service prints its report through `ncclras`, or for `VERBOSE STATUS` on port 28028. The report is text or,
since NCCL 2.28.7, JSON.
"""

import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.paths.hang import ProcessStack, RankRecord, RasCommunicator, RasRank, RecordedCall
from gpubench.readers.documents import load_json

_PICKLE = b"\x80"
_DAMAGED = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
"""Exceptions from a truncated or forged pickle, or from a dictionary with unexpected content."""

_DUMP_WORDS = (b'"pg_config"', b'"pg_status"', b'"entries"')
_EXPECTED_DUMP = "a dump of PyTorch's Flight Recorder, one file per rank, written with TORCH_NCCL_DUMP_ON_TIMEOUT=1"
_RANK_OF_FILE = re.compile(r"(\d{1,7})(?:\.\w+)*$")
_TORCH_FILES = ("-packages/torch/", "/torch/distributed/")
_PREFIX = re.compile(r"^[\w-]{1,20}:")


def is_recorder_dump(beginning: bytes) -> bool:
    """Return True if a file starts like a pickle or like a Flight Recorder dump in JSON."""
    text = beginning.lstrip()
    return beginning.startswith(_PICKLE) or (text.startswith(b"{") and any(word in text for word in _DUMP_WORDS))


class _PlainData(pickle.Unpickler):
    """Unpickles dictionaries, lists, numbers and strings, and rejects everything else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not plain data")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it refers to {str(pid)[:40]!r} outside the file")


def read_recorder_dump(data: bytes, name: str) -> RankRecord:
    """Read a Flight Recorder dump. The number at the end of the file name is the rank.

    Raises UsageError if the file is damaged, is not such a dump, or contains more than plain data.
    """
    found = _RANK_OF_FILE.search(name)
    try:
        plain = not data.startswith(_PICKLE)
        dump = load_json(data.decode("utf-8")) if plain else _PlainData(io.BytesIO(data)).load()
        if found is None:
            raise ValueError("its name does not end with the number of a rank")
        return _record(int(found[1]), dump)
    except _DAMAGED as error:
        raise UsageError(
            f"{name} is not a readable dump: {str(error) or type(error).__name__}",
            expected=_EXPECTED_DUMP,
            reason="the file is cut off, of another kind, or made to run code in its reader",
            next_step="ls -l. Use the files as PyTorch wrote them, with the rank at the end of the name",
        ) from None


def _record(rank: int, dump: Mapping[str, Any]) -> RankRecord:
    groups = {}
    for key, config in dump.get("pg_config", {}).items():
        ranks = config.get("ranks", [])
        listed = json.loads(ranks) if isinstance(ranks, str) and ranks else ranks
        if listed:
            groups[str(key)] = tuple(int(rank) for rank in listed)
    entries = list(dump.get("entries", ()))
    unfinished = sum(1 for entry in entries if entry.get("is_p2p") and not _is_done(entry))
    return RankRecord(rank, tuple(_calls(entries)), groups, unfinished)


def _is_done(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _calls(entries: list[Any]) -> Iterator[RecordedCall]:
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        group, _ = entry["process_group"]
        yield RecordedCall(
            group=str(group),
            sequence=int(entry["collective_seq_id"]),
            operation=_PREFIX.sub("", str(entry["profiling_name"])),
            sizes=tuple(tuple(int(side) for side in size) for size in entry.get("input_sizes", ())),
            types=tuple(str(kind) for kind in entry.get("input_dtypes", ())),
            done=_is_done(entry),
            called_ns=int(entry.get("time_created_ns") or 0),
            place=_place(entry.get("frames", ())),
        )


def _place(frames: Any) -> str:
    """Return the innermost source line outside PyTorch. '' if there is none."""
    for frame in frames:
        file = str(frame["filename"])
        if not any(library in file for library in _TORCH_FILES):
            return f"{file}:{int(frame['line'])} ({frame['name']})"
    return ""


_STACK_HEADER = re.compile(rb"\s*Process (\d{1,10}): ")
_PYTHON_VERSION = b"Python v"
_THREAD = re.compile(r'^Thread \S+ \([^)]*\)(?:: "(?P<name>[^"]*)")?')
_FRAME = re.compile(r"^\s+(?P<function>.{1,200}) \((?P<place>[^()]{1,300}:\d+)\)$")
_LIBRARY_FILES = re.compile(
    r"(?:^|/)(?:torch|site-packages|dist-packages|lib/python[\d.]+|multiprocessing|concurrent|asyncio|importlib)/"
    r"|^(?:threading|selectors|socket|ssl|queue|subprocess|contextlib|runpy|\w*_bootstrap\w*)\.py:|^<"
)


def is_stack(beginning: bytes) -> bool:
    """Return True if a file starts like a py-spy dump."""
    return _STACK_HEADER.match(beginning) is not None and _PYTHON_VERSION in beginning


def read_stack(data: bytes, name: str) -> ProcessStack:
    """Read two frames of the main thread: the innermost one, and the innermost one outside libraries.

    If the file name ends with a number, it is the rank.
    """
    header = _STACK_HEADER.match(data)
    frames: list[str] = []
    is_main = False
    for line in data.decode("utf-8", "replace").splitlines():
        if thread := _THREAD.match(line):
            is_main = thread["name"] in ("MainThread", None)
        elif is_main and (frame := _FRAME.match(line)):
            frames.append(f"{frame['place']} ({frame['function']})")
    own = [frame for frame in frames if not _LIBRARY_FILES.search(frame)][:1]
    rank = _RANK_OF_FILE.search(name)
    pid = int(header[1]) if header else 0
    return ProcessStack(pid, None if rank is None else int(rank[1]), tuple(dict.fromkeys([*frames[:1], *own])))


_RANK_OF_LINE = re.compile(rb"\brank(\d{1,7})\]:|\b(?:PG [^\]]{1,80} )?Rank (\d{1,7})\]", re.ASCII)
"""The pattern also matches a copied line whose beginning is missing."""
_CAUGHT = re.compile(
    rb"Watchdog caught collective operation timeout: WorkNCCL"
    rb"\(SeqNum=(\d{1,12}), OpType=(\w{1,40}), NumelIn=(\d{1,20})",
    re.ASCII,
)
_GROUP_OF_LINE = re.compile(rb"\bPG (?:ID \d+ PG GUID )?([^\]]{1,60}?) Rank \d{1,7}\]", re.ASCII)
_STATUS = re.compile(
    rb"(?:at work(?: sequence id)?: |Timeout at NCCL work: |dump signal)(\d{1,12})?\b.{0,200}?"
    rb"last enqueued (?:NCCL )?work: (-?\d{1,12}), last completed (?:NCCL )?work: (-?\d{1,12})",
    re.ASCII | re.IGNORECASE,
)
_FINGERPRINT = re.compile(
    rb"Rank (\d{1,7}) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(\d{1,12}), ?)?OpType=(\w{1,40})"
    rb"(?:, TensorShape=\[([\d, ]{0,200})\], TensorDtypes=(\w{1,40}))?",
    re.ASCII,
)
_BARRIER = re.compile(rb"Ranks? ([\d, ]{1,200}) failed to pass monitoredBarrier", re.ASCII)
_FEWEST_DIGITS_OF_NONE = 18
"""For coalesced operations of unknown size, the watchdog prints 2**64 - 1 elements. Real counts have fewer digits."""

_BETWEEN_TWO = ("SEND", "RECV")
_DEFAULT = ("0", "0 (default_pg)", "0(default_pg)", "0(default)", "default_pg")
WRAPPER, BARRIER = "wrapper", "monitoredBarrier"
"""Group names for watchdog lines without a process group."""


class WatchdogLines:
    """Collects the lines of PyTorch's watchdog, by rank."""

    def __init__(self) -> None:
        self._caught: dict[tuple[int, int], RecordedCall] = {}
        self._status: dict[tuple[int, str], tuple[int | None, int, int]] = {}
        self._fingerprints: dict[int, RecordedCall] = {}
        self.missed_barrier: dict[int, None] = {}

    def add(self, line: bytes) -> None:
        """Add a line of a log. Lines of other programs are ignored."""
        if missed := _BARRIER.search(line):
            self.missed_barrier |= {int(rank): None for rank in missed[1].replace(b",", b" ").split()}
        for found in _FINGERPRINT.finditer(line):
            shape = () if found[4] is None else (tuple(int(side) for side in found[4].split(b",") if side.strip()),)
            self._fingerprints[int(found[1])] = RecordedCall(
                WRAPPER,
                int(found[2] or 0),
                found[3].decode().lower(),
                shape,
                () if found[5] is None else (found[5].decode(),),
            )
        named = _RANK_OF_LINE.search(line)
        if named is None:
            return
        rank = int(named[1] or named[2])
        if caught := _CAUGHT.search(line):
            sizes = ((int(caught[3]),),) if len(caught[3]) < _FEWEST_DIGITS_OF_NONE else ()
            self._caught[rank, int(caught[1])] = RecordedCall(
                "", int(caught[1]), caught[2].decode().lstrip("_").lower(), sizes
            )
        elif (status := _STATUS.search(line)) and (group := _GROUP_OF_LINE.search(line)):
            place = rank, group[1].decode()
            waits = None if status[1] is None else int(status[1])
            self._status.setdefault(place, (waits, int(status[2]), int(status[3])))

    def records(self) -> tuple[RankRecord, ...]:
        """Return for each rank the operation in which it waits, and its last completed operation.

        A group consists of the ranks that logged it. The default group gets all lower ranks too, if only few of them
        logged nothing.
        """
        calls: dict[int, list[RecordedCall]] = {}
        members: dict[str, set[int]] = {}
        self._caught_alone(calls, members)
        for (rank, group), (waits, enqueued, completed) in self._status.items():
            own = list(self._calls(rank, group, waits, enqueued, completed))
            if all(call.operation.upper() not in _BETWEEN_TWO for call in own):
                calls.setdefault(rank, []).extend(own)
                members.setdefault(group, set()).add(rank)
        for group, ranks in members.items():
            waited = {call.sequence for rank in ranks for call in calls[rank] if call.group == group and not call.done}
            for rank in ranks:
                # A rank that completed a later operation has also passed the operations in which other ranks wait.
                passed = [number for number in waited if number < self._status.get((rank, group), (0, 0, 0))[2]]
                calls[rank] += [RecordedCall(group, number, "operation", done=True) for number in passed]
        if not self._status and len({number for _, number in self._caught}) == 1:
            # PyTorch before 2.3 does not print the group.
            for (rank, _), call in self._caught.items():
                calls.setdefault(rank, []).append(replace(call, group=_DEFAULT[0]))
                members.setdefault(_DEFAULT[0], set()).add(rank)
        for rank, call in self._fingerprints.items():
            calls.setdefault(rank, []).append(call)
            members.setdefault(WRAPPER, set()).add(rank)
        for group in _DEFAULT:
            spoke = members.get(group, set())
            silent = set(range(max(spoke, default=0))) - spoke
            if len(silent) * 2 < len(spoke):
                members[group] = spoke | silent
        groups = {group: tuple(sorted(ranks)) for group, ranks in members.items()}
        return tuple(RankRecord(rank, tuple(own), groups) for rank, own in sorted(calls.items()))

    def _caught_alone(self, calls: dict[int, list[RecordedCall]], members: dict[str, set[int]]) -> None:
        """Add ranks without a status line to the group, if the other ranks name only one group."""
        groups = {group for _, group in self._status}
        waited = {waits if waits is not None else done + 1 for waits, _, done in self._status.values()}
        have_status = {rank for rank, _ in self._status}
        for (rank, number), call in self._caught.items():
            if len(groups) == 1 and rank not in have_status and number in waited:
                group = next(iter(groups))
                calls.setdefault(rank, []).append(replace(call, group=group))
                members.setdefault(group, set()).add(rank)

    def _calls(self, rank: int, group: str, waits: int | None, enqueued: int, completed: int) -> Iterator[RecordedCall]:
        if completed > 0:
            yield RecordedCall(group, completed, "operation", done=True)
        first = waits if waits is not None else completed + 1
        if first <= enqueued:
            seen = self._caught.get((rank, first))
            yield RecordedCall(group, first, seen.operation if seen else "operation", seen.sizes if seen else ())


_BEFORE = re.compile(r"(?:\s*(?:OK|SERVER PROTOCOL \d+|ERROR: [^\n]{0,200})\r?\n)*\s*")
"""Replies of the RAS service to a requested timeout and format, which precede the report."""

_RAS_HEADER = re.compile(r"NCCL version \S+ compiled with CUDA")
_NO_COMMA = re.compile(r'("nvml_dev": -?\d+)(?=\s+"status")')
"""In NCCL 2.28.7 to 2.28.9, a comma is missing for every missing rank (jsonWriteMissingRank). 2.29.2 fixed this."""

_JSON_WORDS = ('"nccl_version"', '"communicators')
_RAS_GROUP = re.compile(
    r"^(?P<group>\d+) +\d+ +\d+ +\d+(?:-\d+)? +(?P<size>\d+) +\d+"
    r" +(?P<status>[A-Z]+) +(?P<errors>[A-Z,]+)$"
)
_COMMUNICATOR = re.compile(r"^#(?P<group>\d+)-\d+ \((?P<id>[0-9a-f]{1,16})\) (?P<problem>[A-Z,]+)")
_DIFFERENT = re.compile(r"^Communicator ranks have different (?:status|(?P<name>.+?) ?operation counts)")
_SEVERAL = re.compile(
    r"^(?P<ranks>\d+) ranks (?:have launched up to operation (?P<count>\d+)|(?P<none>have not launched any operations)"
    r"|have status (?P<status>\w+)|reported (?P<error>.+))"
)
_RAS_RANK = re.compile(
    r"^Rank (?P<rank>\d{1,7})(?: has launched up to operation (?P<count>\d+)|(?P<none> has not launched any operations)"
    r"| has status (?P<status>\w+)| reported (?P<error>[^-]+?))?(?= --|$)"
)
_MANAGED = re.compile(r" managed by process (?P<pid>\d+) on node (?P<host>\S+)")
_MISSING = re.compile(r"^The missing ranks?: (?P<ranks>[\d, -]+)")
_OF_ANSWER = re.compile(
    r"^(?:Encountered \d+ communication timeout|Missing (?:communicator )?data from \d+ job process).*"
)
_PROCESS = re.compile(r"^Process (?P<pid>\d+) on node (?P<host>\S+)")
_SECTION = re.compile(r"^(?P<kind>INCOMPLETE|DEAD|TIMEOUT)$")
_GONE = ("NOCOMM", "UNKNOWN", "FINALIZE", "ABORT")
_DOUBTFUL_OF_ALL = ("INIT", "ABORT")
"""States of a whole group that can be normal for a short time, or mean that the job hangs."""
_ERRORS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
}
"""Names of ncclResult_t values, as in the text report."""


def is_ras_answer(beginning: bytes) -> bool:
    """Return True if a file starts like a RAS report."""
    text = _ras_text(beginning)
    return _RAS_HEADER.match(text) is not None or (text.startswith("{") and all(word in text for word in _JSON_WORDS))


def _ras_text(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    before = _BEFORE.match(text)
    return text[before.end() :] if before else text


def read_ras_answer(data: bytes, name: str) -> tuple[RasCommunicator, ...]:
    """Read the communicators in a RAS report. In a text report, healthy communicators have no ranks and no ID.

    Raises UsageError for JSON that is damaged or from another program.
    """
    text = _ras_text(data)
    if not text.startswith("{"):
        answer = RasText()
        for line in text.splitlines():
            answer.add(line.strip())
        return answer.communicators
    try:
        return tuple(
            _read_json_communicator(communicator)
            for communicator in load_json(_NO_COMMA.sub(r"\1,", text))["communicators"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{name} is not a readable answer of NCCL's RAS: {error}",
            expected="the output of ncclras -f json",
            reason="the file is cut off",
            next_step="ncclras -v -f json > ras.json",
        ) from None


def _read_json_communicator(found: Mapping[str, Any]) -> RasCommunicator:
    ranks = [
        RasRank(
            rank=int(rank["rank"]),
            host=str(rank["host"]),
            pid=int(rank["pid"]),
            counts={str(name): int(count) for name, count in rank["collective_counts"].items()},
            left=any(bool(rank["status"][flag]) for flag in ("finalize_called", "destroy_flag", "abort_flag")),
            error=_ERRORS.get(rank["status"].get("async_error"), _ERRORS.get(rank["status"].get("init_state"), "")),
        )
        for rank in found["ranks"]
    ]
    # If a missing rank still responds, it has left this communicator.
    ranks += [
        RasRank(
            rank=int(rank["rank"]),
            host=str(rank["host"]),
            pid=int(rank["pid"]),
            silent=bool(rank["status"]["unresponsive"]),
            dead=bool(rank["status"]["considered_dead"]),
            left=not rank["status"]["unresponsive"],
        )
        for rank in found["missing_ranks"]
    ]
    ranks.sort(key=lambda rank: rank.rank)
    return RasCommunicator(str(found["hash"]), int(found["size"]), tuple(ranks))


class RasText:
    """Reads a RAS report in text form: the table of communicators, and the paragraphs under Errors and Warnings."""

    def __init__(self) -> None:
        self._found: dict[str, RasCommunicator] = {}
        self._ranks: dict[str, dict[int, RasRank]] = {}
        self._sizes: dict[str, int] = {}
        self._id = self._section = self._function = ""
        self._of_several: Mapping[str, str | None] = {}
        self._dead: set[tuple[str, int | None]] = set()
        self._problems: dict[str, tuple[int, str]] = {}
        self._paragraphs: list[str] = []
        self._remarks: list[str] = []

    @property
    def communicators(self) -> tuple[RasCommunicator, ...]:
        explained = {paragraph.partition("-")[0] for paragraph in self._paragraphs}
        cut = [
            RasCommunicator(
                f"group {group}", size, (), remarks=(f"{problem} in the table, but the lines about it are missing",)
            )
            for group, (size, problem) in self._problems.items()
            if group not in explained
        ]
        whole = [RasCommunicator("all", None, (), remarks=tuple(self._remarks))] if self._remarks else []
        named = tuple(
            replace(communicator, ranks=tuple(ranks[number] for number in sorted(ranks)))
            for name, communicator in self._found.items()
            for ranks in [self._ranks.get(name, {})]
        )
        return (*named, *cut, *whole)

    def add(self, line: str) -> None:
        if group := _RAS_GROUP.match(line):
            self._group(group)
        elif heading := _SECTION.match(line):
            self._section, self._id = heading["kind"], ""
        elif heading := _COMMUNICATOR.match(line):
            self._section, self._function, self._of_several = "", "", {}
            self._id = f"0x{heading['id']}"
            self._paragraphs.append(line[1:])
            found = RasCommunicator(self._id, self._sizes.get(heading["group"]), ())
            found = self._found.setdefault(self._id, found)
            self._found[self._id] = replace(found, remarks=(*found.remarks, heading["problem"]))
        elif self._section == "DEAD" and (process := _PROCESS.match(line)):
            self._dead.add((process["host"], int(process["pid"])))
        elif self._section and (remark := _OF_ANSWER.match(line)):
            self._remarks.append(remark[0])
        elif self._id:
            self._read_communicator_line(line)

    def _group(self, group: re.Match[str]) -> None:
        """Add a row from the table of communicators."""
        size, name = int(group["size"]), f"group {group['group']}"
        self._sizes[group["group"]] = size
        if group["errors"] != "OK":
            self._problems[group["group"]] = size, group["errors"]
            return
        status = group["status"]
        remarks = (f"all ranks have status {status}",) if status in _DOUBTFUL_OF_ALL else ()
        self._found[name] = RasCommunicator(name, size, (), remarks=remarks)

    def _read_communicator_line(self, line: str) -> None:
        if heading := _DIFFERENT.search(line):
            self._function, self._of_several = heading["name"] or "", {}
        elif several := _SEVERAL.match(line):
            self._of_several = several.groupdict()
            found = self._found[self._id]
            if several["status"]:
                self._found[self._id] = replace(found, remarks=(*found.remarks, line))
            if self._function and (several["count"] or several["none"]):
                launched = (*found.unnamed.get(self._function, ()), int(several["count"] or 0))
                self._found[self._id] = replace(found, unnamed={**found.unnamed, self._function: launched})
        elif missing := _MISSING.match(line):
            for number in _numbers(missing["ranks"]):
                self._add(RasRank(number, silent=True))
        elif rank := _RAS_RANK.match(line):
            process = _MANAGED.search(line)
            host, pid = (process["host"], int(process["pid"])) if process else ("", None)
            said = rank.groupdict() if any(rank.group("count", "none", "status", "error")) else self._of_several
            counts = {self._function: int(said["count"] or 0)} if said and (said["count"] or said["none"]) else {}
            self._add(
                RasRank(
                    int(rank["rank"]),
                    host,
                    pid,
                    counts,
                    left=bool(said) and said["status"] in _GONE,
                    silent=not said,
                    dead=(host, pid) in self._dead,
                    error=(said["error"] or "") if said else "",
                    status=(said["status"] or "") if said else "",
                )
            )

    def _add(self, rank: RasRank) -> None:
        """Merge the facts about a rank from several paragraphs."""
        own = self._ranks.setdefault(self._id, {})
        seen = own.get(rank.rank, rank)
        own[rank.rank] = replace(
            rank,
            counts={**seen.counts, **rank.counts},
            left=seen.left or rank.left,
            silent=seen.silent or rank.silent,
            dead=seen.dead or rank.dead,
            error=seen.error or rank.error,
            status=seen.status or rank.status,
        )


def _numbers(text: str) -> Iterator[int]:
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        yield from range(int(first), min(int(last or first), int(first) + 2**16) + 1)
