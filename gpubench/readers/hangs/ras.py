"""An answer of NCCL's RAS (`ncclras`, or `VERBOSE STATUS` on port 28028), as text or, since NCCL 2.28.7, as JSON."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpubench.errors import UsageError
from gpubench.model.paths.hang import RasCommunicator, RasRank
from gpubench.readers.documents import load_json

_HEADER = re.compile(rb"\s*(?:OK\s+)?NCCL version \S+ compiled with CUDA")
_JSON_WORDS = (b'"nccl_version"', b'"communicators')
_COMMUNICATOR = re.compile(r"^#\d+-\d+ \((?P<id>[0-9a-f]{1,16})\) (?P<kind>[A-Z,]+)")
_DIFFERENT = re.compile(r"Communicator ranks have different (?:status|(?P<name>.+?) ?operation counts)")
_MOST = re.compile(r"^\d+ ranks have (?:launched up to operation (?P<count>\d+)|not launched any operations)")
_RANK = re.compile(
    r"^Rank (?P<rank>\d{1,7})(?: has (?:launched up to operation (?P<count>\d+)|(?P<none>not launched any operations)"
    r"|status (?P<status>\w+)))?"
)
_MANAGED = re.compile(r" managed by process (?P<pid>\d+) on node (?P<host>\S+)")
_MISSING = re.compile(r"^The missing ranks?: (?P<ranks>[\d, -]+)")
_PROCESS = re.compile(r"^Process (?P<pid>\d+) on node (?P<host>\S+)")
_SECTION = re.compile(r"^(?P<kind>INCOMPLETE|DEAD|TIMEOUT)$")
_GONE = ("NOCOMM", "FINALIZE", "ABORT", "UNKNOWN")


def recognises(beginning: bytes) -> bool:
    """True if a file begins as an answer of RAS."""
    text = beginning.lstrip()
    return _HEADER.match(beginning) is not None or (text.startswith(b"{") and all(word in text for word in _JSON_WORDS))


def read(data: bytes, name: str) -> tuple[RasCommunicator, ...]:
    """The communicators of an answer, of text those alone with which something is wrong.

    Raises UsageError for JSON that is damaged, or no answer of RAS.
    """
    text = data.decode("utf-8", "replace")
    if not text.lstrip().startswith("{"):
        answer = _Text()
        for line in text.splitlines():
            answer.add(line.strip())
        return tuple(
            RasCommunicator(f"0x{id_}", None, tuple(ranks.values())) for id_, ranks in answer.found.items() if ranks
        )
    try:
        return tuple(_of_json(each) for each in load_json(text)["communicators"])
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
            left=bool(each["status"]["finalize_called"] or each["status"]["destroy_flag"]),
            dead=bool(each["status"]["abort_flag"]),
        )
        for each in found["ranks"]
    ]
    ranks += [
        RasRank(
            rank=int(each["rank"]),
            host=str(each["host"]),
            pid=int(each["pid"]),
            silent=True,
            dead=bool(each["status"]["considered_dead"]),
        )
        for each in found["missing_ranks"]
    ]
    return RasCommunicator(str(found["hash"]), int(found["size"]), tuple(ranks))


class _Text:
    """The communicators below Errors and Warnings. What most ranks launched has the rank -1."""

    def __init__(self) -> None:
        self.found: dict[str, dict[tuple[int, str], RasRank]] = {}
        self._own: dict[tuple[int, str], RasRank] = {}
        self._section = self._function = self._kind = ""
        self._count: int | None = None
        self._dead: set[tuple[str, int]] = set()

    def add(self, line: str) -> None:
        """Take a line."""
        if heading := _SECTION.match(line):
            self._section, self._own = heading["kind"], {}
        elif heading := _COMMUNICATOR.match(line):
            self._section, self._kind, self._function = "", heading["kind"], ""
            self._own = self.found.setdefault(heading["id"], {})
        elif self._section == "DEAD" and (process := _PROCESS.match(line)):
            self._dead.add((process["host"], int(process["pid"])))
        elif not self._section:
            self._of_communicator(line)

    def _of_communicator(self, line: str) -> None:
        if heading := _DIFFERENT.search(line):
            self._function, self._count = heading["name"] or "", None
        elif heading := _MOST.match(line):
            self._count = int(heading["count"] or 0)
            self._own[-1 - self._count, self._function] = RasRank(-1, counts={self._function: self._count})
        elif heading := _MISSING.match(line):
            self._own |= {(number, self._kind): RasRank(number, silent=True) for number in _numbers(heading["ranks"])}
        elif rank := _RANK.match(line):
            self._add_rank(rank)

    def _add_rank(self, rank: re.Match[str]) -> None:
        process = _MANAGED.search(rank.string)
        host, pid = (process["host"], int(process["pid"])) if process else ("", None)
        launched = 0 if rank["none"] else self._count if rank["count"] is None else int(rank["count"])
        self._own[int(rank["rank"]), self._function or self._kind] = RasRank(
            int(rank["rank"]),
            host,
            pid,
            {self._function: launched} if self._function and launched is not None else {},
            left=rank["status"] in _GONE,
            silent="INCOMPLETE" in self._kind,
            dead=(host, pid) in self._dead,
        )


def _numbers(text: str) -> Iterator[int]:
    for each in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = each.partition("-")
        yield from range(int(first), min(int(last or first), int(first) + 2**16) + 1)
