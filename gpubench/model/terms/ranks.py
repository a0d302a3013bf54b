"""Ranks of a job: their identity, groups and progress, and errors for ranks that hang or are lost."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from signal import Signals
from typing import Any, Protocol, Self

from msgspec.structs import asdict

from gpubench.errors import CouldNotMeasureError, UsageError
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import format_ranges, group_by

RANKS_SHARE_A_GPU = "ranks share a GPU"  # Reason not to judge speeds: the expected speed of shared GPUs is unknown.
# Reason not to judge speeds: NCCL then connects ranks on one host over the network.
HOSTS_ARE_SPLIT = "NCCL_HOSTID splits a host"
# Reason not to judge speeds: MIG instances reach each other only through host memory.
GPUS_ARE_SPLIT = "MIG splits the GPUs"


class DevicePlace(Struct, frozen=True):
    """A node, or one device of a node."""

    node: str  #: host name of the node
    device: str | None = None  #: device name as in tables, such as GPU5 or mlx5_0; null for the node itself
    bus_id: str | None = None  #: PCI bus id of the device; null if unknown


class RankIdentity(Struct, frozen=True, kw_only=True):
    """A rank with its process and its GPU. The GPU fields are None on the host backend.

    `nccl_host` is the value of NCCL_HOSTID, None if it is unset. `sm_percent` is the share of the GPU's SMs that MPS
    grants to the process, None without MPS.
    """

    rank: int
    host: str
    node: int
    local_rank: int
    pid: int
    gpu: str | None = None
    gpu_index: int | None = None
    gpu_bus_id: str | None = None
    gpu_uuid: str | None = None
    nccl_host: str | None = None
    sm_percent: float | None = None

    def __str__(self) -> str:
        if self.gpu_bus_id is None:
            return f"rank {self.rank} on {self.host}"
        return f"rank {self.rank} on {self.host} (GPU {self.gpu_index}, {self.gpu_bus_id})"

    @property
    def place(self) -> DevicePlace:
        """The GPU of this rank, or its host if the rank has no GPU."""
        return DevicePlace(self.host, None if self.gpu_index is None else f"GPU{self.gpu_index}", self.gpu_bus_id)

    @property
    def device(self) -> tuple[int, str] | None:
        """The node and the UUID of the rank's GPU or MIG instance. None if the rank has no GPU."""
        return None if self.gpu_uuid is None else (self.node, self.gpu_uuid)


def group_by_device(ranks: Sequence[RankIdentity]) -> list[list[RankIdentity]]:
    """Group ranks by GPU, in the order of each GPU's first rank. Skip ranks without a GPU."""
    return list(group_by((rank for rank in ranks if rank.device is not None), lambda rank: rank.device).values())


def ranks_per_gpu(ranks: Sequence[RankIdentity]) -> int | None:
    """Return the largest number of ranks that share a GPU. None if no rank has a GPU."""
    return max(map(len, group_by_device(ranks)), default=None)


def count_nccl_hosts(ranks: Sequence[RankIdentity]) -> int:
    """Count hosts as NCCL does. Ranks with equal NCCL_HOSTID are on one host, and without NCCL_HOSTID the node
    decides.
    """
    return len({rank.node if rank.device is None else rank.nccl_host or rank.node for rank in ranks})


def why_not_judged(ranks: Sequence[RankIdentity]) -> str:
    """Return the reason why the speed of these ranks cannot be judged. '' if it can."""
    if (ranks_per_gpu(ranks) or 1) > 1:
        return RANKS_SHARE_A_GPU
    hosts = Counter(node for node, _ in {(rank.node, rank.nccl_host) for rank in ranks if rank.device is not None})
    return HOSTS_ARE_SPLIT if any(names > 1 for names in hosts.values()) else ""


def check_hosts(ranks: Sequence[RankIdentity], hosts: Sequence[str], where: str) -> None:
    """Raise UsageError if a rank's node number has no host name."""
    if not hosts or not all(0 <= rank.node < len(hosts) for rank in ranks):
        raise UsageError(f"{where}: ranks on more than {len(hosts)} nodes", expected="one host for each node")


_KEYS: Mapping[str, Callable[[RankIdentity], tuple[int, str]]] = {
    "node": lambda rank: (rank.node, f"node {rank.host}"),
    "rail": lambda rank: (rank.local_rank, f"rail {rank.local_rank}"),
    "pairs": lambda rank: (rank.rank // 2, ""),
}
"""For each kind of split, the number that ranks of a group share, and the name of that group."""

_WHY_ALONE = {
    "node": "its node has only one rank",
    "rail": "no other node has a rank at its position, and rails need several nodes",
    "pairs": "the number of ranks is odd",
}

SPLITS = (*_KEYS, "N")  # The values of --split. N stands for a number of consecutive ranks.


class RankGroup(Struct, frozen=True):
    """A named group of a job's ranks, in ascending order of rank."""

    name: str
    ranks: tuple[int, ...]


def check_split(text: str) -> None:
    """Raise UsageError for an invalid value of `--split`."""
    if text not in _KEYS and not (text.isdecimal() and int(text) > 1):
        raise UsageError(
            f"--split {text}",
            expected=f"one of {', '.join(_KEYS)}, or the number of ranks per group (at least 2)",
            next_step="--split node",
        )


def split_ranks(text: str, identities: Sequence[RankIdentity]) -> tuple[RankGroup, ...]:
    """Split ranks into groups, in the order of each group's first rank. Raises UsageError if a group has only one
    rank.
    """
    key = _KEYS.get(text) or (lambda rank: (rank.rank // int(text), ""))
    members = group_by(identities, lambda identity: key(identity)[0])
    groups = []
    for ranks in members.values():
        numbers = tuple(rank.rank for rank in ranks)
        if len(numbers) < 2:
            raise UsageError(
                f"--split {text} leaves {ranks[0]} alone",
                expected="at least two ranks in every group",
                reason=_WHY_ALONE.get(text, "the number of ranks is not a multiple of the group size"),
                next_step=f"a number of ranks other than {len(identities)}, or another split",
            )
        groups.append(RankGroup(key(ranks[0])[1] or f"ranks {format_ranges(numbers)}", numbers))
    return tuple(groups)


SECONDS_TO_START = 300.0
"""Maximum time without progress during launch, initialization and output.

Connecting many nodes takes minutes, and the output waits while a user pages through it.
"""

# A short --timeout also shortens the time limit for startup, to 5 timeouts but at least 60 s.
LEAST_SECONDS_TO_START, TIMES_TO_START = 60.0, 5
_MOST_NAMED = 8  # Maximum number of ranks or groups in an error message


class Phase(StrEnum):
    """The phases of a rank, in order."""

    LAUNCH = "launch"
    MPI_INIT = "MPI_Init"
    SET_UP = "set-up"
    OPENING = "opening the GPU"
    CONNECTING = "connecting"
    TRY_OUT = "try-out"
    WARM_UP = "warm-up"
    OPERATION = "operation"
    VERIFICATION = "verification"
    OUTPUT = "output"
    MPI_FINALIZE = "MPI_Finalize"


PHASES = tuple(Phase)

_PATIENT_PHASES = frozenset({*PHASES[: PHASES.index(Phase.WARM_UP)], Phase.OUTPUT})


def limit_seconds(phase: Phase, timeout_s: float) -> float:
    """Return the maximum time without progress in a phase, in seconds. For startup and output it is at least 2 ×
    `timeout_s`.
    """
    if phase not in _PATIENT_PHASES:
        return timeout_s
    usual = SECONDS_TO_START
    if phase is not Phase.OUTPUT:
        usual = min(usual, max(LEAST_SECONDS_TO_START, TIMES_TO_START * timeout_s))
    return max(usual, 2 * timeout_s)


class RankState(Struct, frozen=True, kw_only=True):
    """The state of a rank, as its watchdog reads it.

    - `step`: number of phases that the rank has entered
    - `done`, `total`: completed and planned operations of the current phase
    - `process`: the state letter from `/proc/PID/stat`, '' if unknown
    - `trouble`: an error that the library reported
    """

    rank: int
    place: str
    pid: int
    phase: Phase
    label: str
    step: int
    done: int
    total: int
    idle_seconds: float
    process: str = ""
    trouble: str = ""

    @property
    def stopped(self) -> bool:
        """True if SIGSTOP, Ctrl-Z or a debugger has stopped the process."""
        return self.process in ("T", "t")

    def seconds_left(self, timeout_s: float) -> float:
        """Return the time in seconds after which the rank counts as hung if it still makes no progress."""
        idles = self.stopped or (self.phase is Phase.OUTPUT and self.rank > 0)
        return (timeout_s if idles else limit_seconds(self.phase, timeout_s)) - self.idle_seconds

    @property
    def where(self) -> str:
        """Describe the phase and its progress: 'operation 64K out of place, 12 of 20 done'."""
        words = f"{self.phase} {self.label}".strip()
        if self.done or self.total:
            words += f", {self.done} of {self.total} done" if self.total else f", {self.done} done"
        return words

    def to_record(self) -> dict[str, Any]:
        """Convert the state to plain data."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Convert plain data from `to_record` back to a state."""
        return cls(**(dict(record) | {"phase": Phase(record["phase"])}))


def is_suspended(states: Sequence[RankState]) -> bool:
    """True if all ranks are stopped, for example by Ctrl-Z under mpirun. Such a job does not hang."""
    return bool(states) and all(state.stopped for state in states)


def hang_error(
    states: Sequence[RankState], silent: Mapping[int, str], seconds: float, remarks: Sequence[str] = ()
) -> CouldNotMeasureError:
    """Return the error for a job without progress.

    `silent` maps a rank to its description if neither its process nor its watchdog answers.
    """
    missing, cause, reason, next_step = _blame(states, silent)
    lines = [f"  missing:  {missing[rank]}" for rank in sorted(missing)[:_MOST_NAMED]]
    if len(missing) > _MOST_NAMED:
        lines.append(f"            and ranks {format_ranges(sorted(missing)[_MOST_NAMED:])}")
    arrived = [state for state in states if state.rank not in missing]
    lines += [f"  arrived:  {text}" for text in _describe_groups(arrived)]
    lines += [f"  library:  {state.place}: {state.trouble}" for state in states if state.trouble][:_MOST_NAMED]
    error = CouldNotMeasureError(
        f"no progress for {seconds:g} s{cause}",
        expected="a completed operation or a new step within that time",
        reason=reason,
        next_step=next_step,
    )
    error.details = (*lines, *remarks)
    return error


class LostRank(Struct, frozen=True):
    """A rank that ended without reporting an error.

    - `state`: its last known state
    - `end_seconds`: time of its end on the host's monotonic clock
    - `status`: status from wait(2), a signal number or 256 times an exit code; 0 if unknown
    """

    state: RankState
    end_seconds: float
    status: int

    @property
    def exited(self) -> bool:
        """True if the process called exit. A library may have done so after printing the reason."""
        return self.status > 0xFF

    @property
    def asked_to_end(self) -> bool:
        """True if SIGINT or SIGTERM ended the process. Launchers send these signals to all ranks after one is lost."""
        return self.status in (Signals.SIGINT, Signals.SIGTERM)

    def error(self, end: str) -> CouldNotMeasureError:
        """Return the error for the lost rank. `end` completes its message."""
        number = self.status & 0x7F
        how = "was killed or crashed"
        if self.exited:
            how = f"ended with exit code {self.status >> 8}"
        elif number:
            names = {signal.value: signal.name for signal in Signals}
            how = f"was killed by {names.get(number, f'signal {number}')}"
        return CouldNotMeasureError(
            f"{self.state.place} (pid {self.state.pid}) {how} in {self.state.where}{end}",
            expected="every rank to run until the last row",
            reason="a crash in a library or driver, a lack of memory, or a user who ended it",
            next_step="dmesg shows out-of-memory kills and Xid errors. NCCL_DEBUG=WARN shows NCCL's warnings.",
        )


def first_lost(losses: Iterable[LostRank], ended_first: int | None = None) -> LostRank | None:
    """Return the rank whose loss ended the job, or None. Prefer ranks that neither SIGINT nor SIGTERM ended.

    `ended_first` is the rank that mpirun names as the first one to exit. It outweighs the times, because a watchdog
    that is still starting notices late that its rank is lost.
    """
    return min(
        losses,
        key=lambda lost: (lost.state.rank != ended_first, lost.asked_to_end, lost.end_seconds),
        default=None,
    )


def killed_before(losses: Iterable[LostRank], error_seconds: float, ended_first: int | None = None) -> LostRank | None:
    """Return the rank that was killed before another rank reported an error at `error_seconds`, or None.

    Under MPS, the death of a rank breaks CUDA for other ranks on the same GPU. If a rank was lost after the error, the
    launcher killed it.
    """
    first = first_lost(losses, ended_first)
    if first is None or first.exited or first.asked_to_end:
        return None
    return first if first.end_seconds < error_seconds else None


def not_started_error(states: Sequence[RankState], ranks: int, seconds: float) -> CouldNotMeasureError:
    """Return the error for a job whose ranks did not connect. `states` contains the ranks on this host."""
    stopped = [state for state in states if state.stopped]
    here = {state.rank for state in states}
    others = [rank for rank in range(ranks) if rank not in here]
    lines = [f"  missing:  {state.place} (pid {state.pid}): its process is stopped" for state in stopped]
    if others:
        lines.append(f"  missing:  rank {format_ranges(others)}: never started, or on another host")
    lines += [f"  arrived:  {text}" for text in _describe_groups(state for state in states if not state.stopped)]
    place = next((state.label for state in states if state.label), "")
    what, who = "MPI_Init, or a step before it, did not finish", "MPI"
    next_step = f"`mpirun -n {ranks} hostname` with the same options shows whether MPI works here"
    if place:
        what, who = f"ranks did not connect through {place}", "Gloo"
        next_step = "set GLOO_SOCKET_IFNAME=lo for one host, or to the interface that connects the hosts"
    error = CouldNotMeasureError(
        f"{what} within {seconds:g} s",
        expected=f"all {ranks} ranks to start and connect",
        reason=f"a rank was stopped or could not be started, or {who} cannot connect two hosts",
        next_step=next_step,
    )
    error.details = lines
    return error


def _blame(states: Sequence[RankState], silent: Mapping[int, str]) -> tuple[dict[int, str], str, str, str]:
    """Return descriptions of the ranks that others wait for, the end of the headline, the likely reason and the
    next step.
    """
    if silent:
        missing = {rank: f"{place}: neither it nor its watchdog answers" for rank, place in silent.items()}
        missing |= {state.rank: f"{_named(state)}: its process is stopped" for state in states if state.stopped}
        reason = "its host is dead or unreachable from this one, or all its processes were killed"
        return missing, _name_missing(silent), reason, "ping the host. `ip link` shows whether its port is up."
    stopped = [state for state in states if state.stopped]
    if stopped:
        missing = {state.rank: f"{_named(state)}: its process is stopped" for state in stopped}
        reason = "SIGSTOP, Ctrl-Z in its shell, or a debugger"
        return (
            missing,
            _name_missing(missing),
            reason,
            ("run it again. If jobs are suspended on this system, set a longer --timeout."),
        )
    front = max((state.step, state.done) for state in states)
    behind = [state for state in states if (state.step, state.done) < front]
    missing = {state.rank: _named(state) + _stuck(state) for state in behind}
    reason = "a GPU, a link or a driver does not answer, or two ranks wait for each other"
    next_step = (
        "run `dmesg | grep -e Xid -e mlx5`, or run gpubench with NCCL_DEBUG=INFO. A slow machine needs a "
        "longer --timeout."
    )
    if missing:
        return missing, _name_missing(missing), reason, next_step
    return {}, ": all ranks are inside the same operation", reason, next_step


def _stuck(state: RankState) -> str:
    return ", in a system call that does not return (state D: driver or file system)" if state.process == "D" else ""


def _named(state: RankState) -> str:
    return f"{state.place} (pid {state.pid}), in {state.where}, for {state.idle_seconds:.0f} s"


def _name_missing(missing: Iterable[int]) -> str:
    return f": the others wait for rank {format_ranges(missing)}"


def _describe_groups(states: Iterable[RankState]) -> list[str]:
    groups = group_by(states, lambda state: state.where + _stuck(state))
    lines = []
    for where, members in groups.items():
        named = len(members) <= _MOST_NAMED
        who = (
            ", ".join(member.place for member in members)
            if named
            else f"rank {format_ranges(member.rank for member in members)}"
        )
        lines.append(f"{who}: in {where}")
    shown = lines[:_MOST_NAMED]
    return shown if len(lines) <= _MOST_NAMED else [*shown, f"and {len(lines) - _MOST_NAMED} more groups"]


class Progress(Protocol):
    """Interface for reporting a rank's progress to its watchdog process. No call takes longer than 1 µs."""

    def enter(self, phase: Phase, label: str = "", operations: int = 0) -> None:
        """Report that a phase starts. `label` appears in messages, and `operations` is the number of operations if
        known.
        """

    def completed(self, operations: int = 1) -> None:
        """Report that operations of the current phase have completed."""


class Unwatched:
    """Ignores reports of progress. For tests, scripts and single processes."""

    def enter(self, phase: Phase, label: str = "", operations: int = 0) -> None: ...

    def completed(self, operations: int = 1) -> None: ...


UNWATCHED: Progress = Unwatched()
