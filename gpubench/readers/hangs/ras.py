"""An answer of NCCL's RAS (`ncclras`, or `VERBOSE STATUS` on port 28028), as text or, since NCCL 2.28.7, as JSON."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpubench.errors import UsageError
from gpubench.model.paths.hang import RasCommunicator, RasRank
from gpubench.readers.documents import load_json

_BEFORE = re.compile(r"(?:\s*(?:OK|SERVER PROTOCOL \d+|ERROR: [^\n]{0,200})\r?\n)*\s*")
"""What the service says before an answer: to the time-out and format that were asked for."""

_HEADER = re.compile(r"NCCL version \S+ compiled with CUDA")
_NO_COMMA = re.compile(r'("nvml_dev": -?\d+)(?=\s+"status")')
"""NCCL 2.28.7 to 2.28.9 leave a comma out of every missing rank (jsonWriteMissingRank); 2.29.2 has it."""

_JSON_WORDS = ('"nccl_version"', '"communicators')
_GROUP = re.compile(
    r"^(?P<group>\d+) +\d+ +\d+ +\d+(?:-\d+)? +(?P<size>\d+) +\d+"
    r" +(?:NOCOMM|INIT|RUNNING|FINALIZE|ABORT) +(?P<errors>[A-Z,]+)$"
)
_COMMUNICATOR = re.compile(r"^#(?P<group>\d+)-\d+ \((?P<id>[0-9a-f]{1,16})\) [A-Z]+")
_DIFFERENT = re.compile(r"^Communicator ranks have different (?:status|(?P<name>.+?) ?operation counts)")
_SEVERAL = re.compile(
    r"^\d+ ranks (?:have launched up to operation (?P<count>\d+)|(?P<none>have not launched any operations)"
    r"|have status (?P<status>\w+)|reported (?P<error>.+))"
)
_RANK = re.compile(
    r"^Rank (?P<rank>\d{1,7})(?: has launched up to operation (?P<count>\d+)|(?P<none> has not launched any operations)"
    r"| has status (?P<status>\w+)| reported (?P<error>[^-]+?))?(?= --|$)"
)
_MANAGED = re.compile(r" managed by process (?P<pid>\d+) on node (?P<host>\S+)")
_MISSING = re.compile(r"^The missing ranks?: (?P<ranks>[\d, -]+)")
_PROCESS = re.compile(r"^Process (?P<pid>\d+) on node (?P<host>\S+)")
_SECTION = re.compile(r"^(?P<kind>INCOMPLETE|DEAD|TIMEOUT)$")
_GONE = ("NOCOMM", "FINALIZE", "ABORT")
_ERRORS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
}
"""Values of ncclResult_t, in the words of the text."""


def recognises(beginning: bytes) -> bool:
    """True if a file begins as an answer of RAS."""
    text = _answer(beginning)
    return _HEADER.match(text) is not None or (text.startswith("{") and all(word in text for word in _JSON_WORDS))


def _answer(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    before = _BEFORE.match(text)
    return text[before.end() :] if before else text


def read(data: bytes, name: str) -> tuple[RasCommunicator, ...]:
    """The communicators of an answer; in text, those with which nothing is wrong have no ranks and no id.

    Raises UsageError for JSON that is damaged, or no answer of RAS.
    """
    text = _answer(data)
    if not text.startswith("{"):
        answer = _Text()
        for line in text.splitlines():
            answer.add(line.strip())
        return answer.communicators
    try:
        return tuple(_of_json(each) for each in load_json(_NO_COMMA.sub(r"\1,", text))["communicators"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{name} is no answer of NCCL's RAS that can be read: {error}",
            expected="the output of ncclras -f json",
            reason="a file that was cut off",
            next_step="ncclras -v -f json > ras.json",
        ) from None


def _of_json(found: Mapping[str, Any]) -> RasCommunicator:
    ranks = [
        RasRank(
            rank=int(each["rank"]),
            host=str(each["host"]),
            pid=int(each["pid"]),
            counts={str(name): int(count) for name, count in each["collective_counts"].items()},
            left=any(bool(each["status"][flag]) for flag in ("finalize_called", "destroy_flag", "abort_flag")),
            error=_ERRORS.get(each["status"].get("async_error"), _ERRORS.get(each["status"].get("init_state"), "")),
        )
        for each in found["ranks"]
    ]
    # A missing rank that does respond is not of this communicator any more.
    ranks += [
        RasRank(
            rank=int(each["rank"]),
            host=str(each["host"]),
            pid=int(each["pid"]),
            silent=bool(each["status"]["unresponsive"]),
            dead=bool(each["status"]["considered_dead"]),
            left=not each["status"]["unresponsive"],
        )
        for each in found["missing_ranks"]
    ]
    ranks.sort(key=lambda each: each.rank)
    return RasCommunicator(str(found["hash"]), int(found["size"]), tuple(ranks))


class _Text:
    """The groups of communicators in the table, and those that have a paragraph below Errors and Warnings."""

    def __init__(self) -> None:
        self._found: dict[str, RasCommunicator] = {}
        self._ranks: dict[str, dict[int, RasRank]] = {}
        self._sizes: dict[str, int] = {}
        self._id = self._section = self._function = ""
        self._of_several: Mapping[str, str | None] = {}
        self._dead: set[tuple[str, int | None]] = set()

    @property
    def communicators(self) -> tuple[RasCommunicator, ...]:
        """What was read."""
        return tuple(
            replace(each, ranks=tuple(ranks[number] for number in sorted(ranks)))
            for name, each in self._found.items()
            for ranks in [self._ranks.get(name, {})]
        )

    def add(self, line: str) -> None:
        """Take a line."""
        if group := _GROUP.match(line):
            self._sizes[group["group"]] = int(group["size"])
            if group["errors"] == "OK":
                name = f"group {group['group']}"
                self._found[name] = RasCommunicator(name, int(group["size"]), ())
        elif heading := _SECTION.match(line):
            self._section, self._id = heading["kind"], ""
        elif heading := _COMMUNICATOR.match(line):
            self._section, self._function, self._of_several = "", "", {}
            self._id = f"0x{heading['id']}"
            self._found.setdefault(self._id, RasCommunicator(self._id, self._sizes.get(heading["group"]), ()))
        elif self._section == "DEAD" and (process := _PROCESS.match(line)):
            self._dead.add((process["host"], int(process["pid"])))
        elif self._id:
            self._of_communicator(line)

    def _of_communicator(self, line: str) -> None:
        if heading := _DIFFERENT.search(line):
            self._function, self._of_several = heading["name"] or "", {}
        elif several := _SEVERAL.match(line):
            self._of_several = several.groupdict()
            if self._function and (several["count"] or several["none"]):
                found = self._found[self._id]
                launched = (*found.unnamed.get(self._function, ()), int(several["count"] or 0))
                self._found[self._id] = replace(found, unnamed={**found.unnamed, self._function: launched})
        elif missing := _MISSING.match(line):
            for number in _numbers(missing["ranks"]):
                self._add(RasRank(number, silent=True))
        elif rank := _RANK.match(line):
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
                )
            )

    def _add(self, rank: RasRank) -> None:
        """Join it with what other paragraphs say of the same rank."""
        own = self._ranks.setdefault(self._id, {})
        seen = own.get(rank.rank, rank)
        own[rank.rank] = replace(
            rank,
            counts={**seen.counts, **rank.counts},
            left=seen.left or rank.left,
            silent=seen.silent or rank.silent,
            dead=seen.dead or rank.dead,
            error=seen.error or rank.error,
        )


def _numbers(text: str) -> Iterator[int]:
    for each in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = each.partition("-")
        yield from range(int(first), min(int(last or first), int(first) + 2**16) + 1)
