"""What ranks recorded about their collectives, and which ranks block the others in a hang."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field


class RecordedCall(Struct, frozen=True):
    """One collective that a rank called.

    - `sequence`: number of the collective within its group, from 1
    - `called_ns`: time of the call on the rank's clock
    - `place`: source line of the program that called it; '' if not recorded
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
    """One rank's dump of PyTorch's Flight Recorder.

    `groups` has the ranks of its process groups, as far as the dump lists them. `unfinished_sends` counts sends and
    receives that did not complete.
    """

    rank: int
    calls: tuple[RecordedCall, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unfinished_sends: int = 0


class ProcessStack(Struct, frozen=True):
    """The stack of a process, from py-spy.

    `places` has the innermost line of the main thread, followed by the innermost line of the user's program. `rank`
    comes from the file name, or is None.
    """

    pid: int
    rank: int | None
    places: tuple[str, ...]


class RasRank(Struct, frozen=True):
    """One rank in a response from NCCL's RAS: its number of launched operations per collective, and its problems."""

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
    """One communicator in a response from NCCL's RAS, with the ranks that the response lists.

    `unnamed` has the operation counts of all other ranks by collective, with the most frequent count first. `remarks`
    are problems of this communicator or of all communicators.
    """

    id: str
    size: int | None
    ranks: tuple[RasRank, ...]
    unnamed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


class HangReason(StrEnum):
    """Reasons why ranks block the other ranks."""

    ABSENT = "did not join"
    STARTING = "is still in its initialization (status INIT)"
    NOT_NAMED = "NCCL's RAS reports a problem without naming a rank"
    TYPE = "called another operation"
    ORDER = "called the operations in another order, or skipped one"
    SIZE = "called it with another size"
    DTYPE = "called it with another data type"
    LEFT = "left early"
    ERROR = "reported an error"
    DEAD = "is dead"
    NO_DUMP = "is dead or left early (it has no dump)"
    ELSEWHERE = "waits in another group"
    SILENT = "does not answer (stopped, dead, or its host is unreachable)"
    SLOW = "is slow"
    TOGETHER = "all ranks wait in the same operation"
    IDLE = "no rank launches an operation"
    UNKNOWN = "unknown which rank"


class Hang(Struct, frozen=True, kw_only=True):
    """A collective that did not complete, and the ranks that block the others.

    - `operation`: name, size and data type of the collective, according to the waiting ranks
    - `theirs`: the collective that `ranks` called instead, or called last
    - `since`: UTC time on the clock of a waiting rank; '' if unknown
    - `is_sure`: false if a healthy job may look the same for a short time
    - `process`: host and process id of the first blocking rank
    - `now`: the line that this process executes, from py-spy
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
