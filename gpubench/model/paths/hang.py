"""Records of ranks about their collectives, and the ranks that keep others waiting."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field


class RecordedCall(Struct, frozen=True):
    """One collective as a rank called it.

    `sequence` counts the collectives of the group from 1. `called_ns` is on the rank's clock. `place` is the line of
    the program, '' if not recorded.
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
    """A rank's dump of PyTorch's Flight Recorder: its collectives, and the ranks of its groups if listed.

    `unfinished_sends` counts unfinished sends and receives.
    """

    rank: int
    calls: tuple[RecordedCall, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unfinished_sends: int = 0


class ProcessStack(Struct, frozen=True):
    """The stack of a process by py-spy: the innermost line of its main thread, then that of the program.

    `rank` is the number in the file name, or None.
    """

    pid: int
    rank: int | None
    places: tuple[str, ...]


class RasRank(Struct, frozen=True):
    """A rank in an answer of NCCL's RAS: the operations that it launched per collective, and its problems."""

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
    """A communicator in an answer of NCCL's RAS, with the ranks that the answer lists.

    `unnamed` has the operation counts of other ranks by collective, the most frequent count first. `remarks` are
    problems of this or of all communicators.
    """

    id: str
    size: int | None
    ranks: tuple[RasRank, ...]
    unnamed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


class HangReason(StrEnum):
    """Why ranks keep others waiting."""

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
    """A collective that did not end, with the ranks that keep others waiting.

    `operation` has name, size and data type according to the waiting ranks. `theirs` is what `ranks` called instead or
    last. `since` is UTC on a waiting rank's clock, '' if unknown. `is_sure` is false if a working job may briefly look
    like this. `process` is host and pid of the first of `ranks`, and `now` its current line by py-spy.
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
