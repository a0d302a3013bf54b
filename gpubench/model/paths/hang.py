"""What ranks recorded of their collectives, and who keeps the others waiting."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field


class RecordedCall(Struct, frozen=True):
    """One collective as a rank called it. `place` is the line of the program, empty where it was not recorded.

    `sequence` counts the collectives of the group from 1. `called_ns` is the rank's clock.
    """

    group: str
    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...] = ()
    types: tuple[str, ...] = ()
    done: bool = False
    called_ns: int = 0
    place: str = ""


class RankRecord(Struct, frozen=True):
    """A rank's dump of PyTorch's Flight Recorder: its collectives, and the ranks of the groups where it lists them.

    `unfinished_sends` is the number of sends and receives that did not end.
    """

    rank: int
    calls: tuple[RecordedCall, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unfinished_sends: int = 0


class ProcessStack(Struct, frozen=True):
    """Where a process is, by py-spy: the innermost line of its main thread, then the innermost of the program's own.

    `rank` is None where the name of the file has no number.
    """

    pid: int
    rank: int | None
    places: tuple[str, ...]


class RasRank(Struct, frozen=True):
    """A rank in an answer of NCCL's RAS: how many of each collective it launched, and what is wrong with it.

    `error` is what NCCL reported in it, `status` is RAS's word for where it is, if the answer says it.
    """

    rank: int
    host: str = ""
    pid: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    left: bool = False
    silent: bool = False
    dead: bool = False
    error: str = ""
    status: str = ""


class RasCommunicator(Struct, frozen=True):
    """A communicator in an answer of NCCL's RAS: the ranks that it names, of `size`.

    `unnamed` are the numbers of a collective that ranks launched which are not named, those of most ranks first.
    `remarks` are problems that the answer reports for it, or for all, with or without the ranks.
    """

    id: str
    size: int | None
    ranks: tuple[RasRank, ...]
    unnamed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


class HangReason(StrEnum):
    """What is wrong with the ranks that keep others waiting."""

    ABSENT = "did not join"
    STARTING = "is still in its initialization (status INIT)"
    NOT_NAMED = "NCCL's RAS reports a problem without naming a rank"
    TYPE = "called something else: another operation"
    ORDER = "called something else: in another order, or left one out"
    SIZE = "called something else: another size"
    DTYPE = "called something else: another data type"
    LEFT = "left early"
    ERROR = "reported an error"
    DEAD = "is dead"
    NO_DUMP = "is dead or left early: there is no dump of it"
    ELSEWHERE = "waits in another group"
    SILENT = "does not answer: stopped, dead, or its host is cut off"
    SLOW = "is slow"
    TOGETHER = "everybody waits in the same operation"
    IDLE = "no rank launches an operation"
    UNKNOWN = "cannot tell which rank"


class Hang(Struct, frozen=True, kw_only=True):
    """A collective that did not end: in which group, what it is, who is to blame and why.

    `operation` has the type, the size and the data type that the waiting ranks called, `theirs` what the blamed ranks
    did instead or last. `since` is a time in UTC by a waiting rank's clock, empty where it is not known. `is_sure` is
    False where a job that makes progress may look like this for a moment. `process` is the host and process of the
    first rank to blame, where they are known. `now` is the line where that rank is, by py-spy.
    """

    group: str
    reason: HangReason
    ranks: tuple[str, ...]
    waiting: int
    operation: str
    place: str = ""
    theirs: str = ""
    since: str = ""
    is_sure: bool = True
    process: tuple[str, int] | None = None
    now: str = ""
