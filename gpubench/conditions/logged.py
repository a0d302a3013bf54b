"""Evidence from NCCL's log: why two ranks communicate through host memory, and what ended a job."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpubench.conditions.circumstances import Sighting, joined
from gpubench.conditions.policy import Medium, PathKind, Relation
from gpubench.model.paths.nccl_log import Complaint, FailedCall, LogFacts, Note, RemarkKind
from gpubench.model.terms.verdict import NO_CURE, Cure, Verdict

SOCKET = "Socket"

ASK_FOR_MORE = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,GRAPH,NET,P2P,SHM"


class ProcessLog(Struct, frozen=True):
    """NCCL settings of one process, and log lines of this process that explain a path."""

    settings: tuple[tuple[str, str], ...] = ()
    notes: tuple[Note, ...] = ()

    def setting(self, name: str) -> str | None:
        """Return the value of a setting, or None if it is not set."""
        return dict(self.settings).get(name)


class Staged(Struct, frozen=True, kw_only=True):
    """Two ranks that communicate through host memory, with everything that the log shows about them."""

    one_node: bool  # NCCL treats both ranks as ranks of one node
    same_machine: bool  # The log shows that both ranks run on one machine
    network: str | None  # Name of the network that carries the data. None for shared memory.
    path: str | None = None  # NCCL's path type between the GPUs, such as 'PIX' or 'SYS'. None if unknown.
    gpus: int = 0  # Number of GPUs that NCCL found on the host. 0 if unknown.
    notes: tuple[Note, ...] = ()  # Log lines about these two GPUs
    source: ProcessLog = ProcessLog()
    destination: ProcessLog = ProcessLog()
    bus_ids: tuple[str, ...] = ()
    nvlinks: bool = False  # The log shows NVLinks on this machine
    models: tuple[str, ...] = ()  # Models of the two GPUs, if the log names them
    listed_models: tuple[str, ...] = ()  # Other GPU models that the log names
    interfaces: tuple[str, ...] = ()  # Network interfaces that NCCL's bootstrap uses
    one_per_host: bool = False  # Every rank of the job runs on a different host
    rdma: bool = False  # A process of the job found an RDMA device
    plugin: bool = False  # A process of the job loaded a network plugin
    peers_elsewhere: bool = False  # Both GPUs use peer access to other GPUs of the machine

    @property
    def is_local(self) -> bool:
        """True if both ranks run on one machine."""
        return self.one_node or self.same_machine

    @property
    def through_shm(self) -> bool:
        """True if both ranks run on one machine and communicate through shared memory."""
        return self.is_local and self.network is None

    @property
    def through_local_network(self) -> bool:
        """True if both ranks run on one machine and communicate over a network."""
        return self.is_local and self.network is not None

    @property
    def kinds(self) -> tuple[PathKind, ...]:
        """Possible kinds of this path: several, since a log does not show whether NVLinks join two machines."""
        local = [Relation.ONE_GPU if self.one_gpu else Relation.ONE_NODE]
        relations = local if self.is_local else [Relation.ONE_DOMAIN, Relation.TWO_NODES]
        medium = Medium.SHM if self.network is None else Medium.SOCKET if self.network == SOCKET else Medium.RDMA
        return tuple(PathKind(relation, medium) for relation in relations)

    @property
    def one_gpu(self) -> bool:
        """True if both ranks use the same GPU."""
        return self.is_local and len(self.bus_ids) > 1 and len(set(self.bus_ids)) == 1

    @property
    def is_virtual(self) -> bool:
        """True if a GPU is on PCI bus 0, as in virtual machines. Slots of physical servers are on other buses."""
        return any(bus_id[5:7] == "00" for bus_id in self.bus_ids)

    def settings(self, name: str) -> tuple[str, ...]:
        """Return the distinct values of a setting in the two processes."""
        values = (process.setting(name) for process in (self.source, self.destination))
        return tuple(dict.fromkeys(value for value in values if value is not None))

    def find_notes(self, *kinds: RemarkKind) -> tuple[Note, ...]:
        """Return log lines of these kinds. Lines about the two GPUs come first."""
        notes = (*self.notes, *self.source.notes, *self.destination.notes)
        return tuple(dict.fromkeys(note for kind in kinds for note in notes if note.kind is kind))


class LoggedReason(NamedTuple):
    """Evidence for a condition in a log, with the cure."""

    evidence: str
    cure: Cure = NO_CURE
    is_proven: bool = True
    by_design: bool = False


def uses_sockets(staged: Staged) -> bool:
    """True if the ranks run on different machines and communicate over sockets."""
    return not staged.is_local and staged.network == SOCKET


def uses_rdma(staged: Staged) -> bool:
    """True if the ranks run on different machines and communicate over RDMA or a plugin."""
    return not staged.is_local and staged.network not in (None, SOCKET)


def remark_detector(
    kind: RemarkKind,
    cure: Cure,
    applies: Callable[[Staged], bool] = lambda staged: staged.through_shm,
    evidence: str = "NCCL's log: {.gist}",
) -> Callable[[Staged], LoggedReason | None]:
    """Return a detector that looks for one kind of NCCL log line, if `applies` is true for the two ranks."""

    def find(staged: Staged) -> LoggedReason | None:
        notes = staged.find_notes(kind) if applies(staged) else ()
        return LoggedReason(evidence.format(notes[0]), cure) if notes else None

    return find


_LONGEST_SEEN = 200

_HANDLED = re.compile(
    r"gdrwrap|(?:^|/)gdr\w*\.(?:cc|h):|include/net\.h:|ibvwrap|nvmlwrap|net_ib"
    r"|(?:^|/)plugin/|(?:^|/)ras/|socket\.cc:"
)
"""Source files whose errors NCCL may handle itself: plugins, GDRCopy, missing verbs, and sockets at the end of a
job.

Errors that NCCL does not handle also appear on other lines of the log.
"""

_RAS = re.compile(r"(?:^|/)ras/")  # NCCL's RAS service reports peers that exit when a job ends normally
REMOTE = 6  # ncclRemoteError: another process exited, so this process is not at fault
_CODES = {
    1: "a CUDA call failed",
    2: "a system call failed",
    3: "an internal check failed",
    4: "an argument is invalid",
    5: "the program calls NCCL wrongly",
    REMOTE: "a remote process exited, or the network to it failed",
}
"""Meanings of the ncclResult_t error codes."""


class Complained(Struct, frozen=True):
    """A detector for a job's log. It returns one sighting for all complaints and failed NCCL calls that match.

    A complaint matches `pattern`, ignoring case. A failed call matches one of the error `codes`. Patterns are compiled
    on first use, because every command imports all conditions, but few commands read a log.
    """

    pattern: str
    codes: frozenset[int] = frozenset()
    severity: Verdict | None = None
    of_programs: bool = False  # Skip complaints that NCCL wrote
    refine: Callable[[Sighting, LogFacts], Sighting] | None = None  # Adds other evidence from the log to the sighting
    preferred: str = ""  # If a complaint also matches this pattern, show it instead of the first one

    def __call__(self, facts: LogFacts) -> Iterator[Sighting]:
        """Yield one sighting if the log has matching complaints or failed calls."""
        complaints = [complaint for complaint in facts.complaints if self._matches(complaint)]
        calls = self._unhandled_calls(facts)
        if not complaints and not calls:
            return
        writers = [*(complaint.processes for complaint in complaints), *(call.processes for call in calls)]
        if complaints:
            count = sum(complaint.count for complaint in complaints)
            preferred = (
                complaint
                for complaint in complaints
                if self.preferred and re.search(self.preferred, complaint.text, re.IGNORECASE)
            )
            seen = next(preferred, complaints[0]).text[:_LONGEST_SEEN]
            seen += f" ({count} lines like this)" if count > 1 else ""
        else:
            call = calls[0]
            meaning = call.warning[:_LONGEST_SEEN] or _CODES.get(call.code, "the call failed")
            place = f"{call.place} -> {call.code}"
            seen = f"{meaning} ({place})" if call.warning else f"{place}: {meaning}"
        subject = joined(name for names in writers for name in names) or "a program of the job"
        sighting = Sighting(subject=subject, seen=seen, severity=self.severity)
        yield sighting if self.refine is None else self.refine(sighting, facts)

    def _unhandled_calls(self, facts: LogFacts) -> list[FailedCall]:
        """Return failed calls with one of these error codes. Return none if NCCL handled all of them itself."""
        calls = [call for call in facts.failed_calls if call.code in self.codes]
        by_ras = any(_RAS.search(call.place) for call in calls)
        if all(_HANDLED.search(call.place) for call in calls) and (by_ras or REMOTE not in self.codes):
            return []
        return calls

    def without(self, facts: LogFacts) -> LogFacts:
        """Return the log without the complaints that match."""
        others = tuple(complaint for complaint in facts.complaints if not self._matches(complaint))
        return replace(facts, complaints=others)

    def _matches(self, complaint: Complaint) -> bool:
        if self.of_programs and complaint.processes:
            return False
        return re.search(self.pattern, complaint.text, re.ASCII | re.IGNORECASE) is not None


def doubted(pattern: str) -> Complained:
    """Return a WARN detector for warnings after which some NCCL releases continue and others end the job."""
    return Complained(pattern, severity=Verdict.WARN)
