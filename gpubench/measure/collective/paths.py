"""Judge the paths that a collective uses, from link counters and NCCL's log."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.collectives.record import SweepRequest, exchanges, least_moved
from gpubench.conditions.circumstances import Circumstances, IssueTime, user_settings
from gpubench.conditions.nccl_settings import split_by_design
from gpubench.conditions.ranking import UNKNOWN
from gpubench.measure.collective.cases import Case
from gpubench.measure.path_outcome import PathOutcome, report_on
from gpubench.measure.paths import Explained, Meter, NcclLogListener
from gpubench.model.facts.health import describe_mig_split
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.traffic import IdleGpu, combine_idle_gpus
from gpubench.model.paths.p2p import AS_SLOW_AS_STAGED, Carried, Flow, Speed, flow_evidence, most_share
from gpubench.model.paths.topology import Limit, Topology
from gpubench.model.paths.transport import (
    Conclusion,
    Evidence,
    Pair,
    PathEvidence,
    Selection,
    State,
    Transport,
    Tuning,
    Used,
    drop_idle_pairs,
    is_staged,
    join_names,
)
from gpubench.model.paths.wiring import (
    NVLS_ASSUMED,
    GpuLocation,
    Wiring,
    Work,
    busbw_limit,
    exchange_limit,
    internode_limit,
)
from gpubench.model.results.backends import differs_from_request
from gpubench.model.results.fallback import End, Explanation, KnownPath, fallback_rows
from gpubench.model.results.report import CollectiveRow
from gpubench.model.results.speed import ONE_RANK
from gpubench.model.terms.operation import DataType, ReduceOp
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.settings import AGAIN, format_choice
from gpubench.model.terms.units import plural
from gpubench.model.terms.verdict import Cure, Origin
from gpubench.ports.backend import LibraryLog
from gpubench.ports.copies import LinkCounters
from gpubench.ports.group import Group

COUNTED_BYTES = 64 * 2**20  # Count at least this much traffic, because other traffic increases the counters too
_MOST_OPERATIONS = 64  # Skip a size if it needs more operations than this to reach COUNTED_BYTES
_GPU = 0
_NOTHING = Carried()


class Traffic(Struct, frozen=True, forbid_unknown_fields=True):
    """The bytes that a rank's GPU sent and received in a batch. A direction without data is empty."""

    sent: Carried = _NOTHING
    received: Carried = _NOTHING

    def merged(self, earlier: "Traffic") -> "Traffic":
        """Fill missing values from an earlier batch, because the largest batches wrap the PCIe counters."""
        ends = ((self.sent, earlier.sent), (self.received, earlier.received))
        return Traffic(*(before if now.nvlink_share is now.pcie_share is None else now for now, before in ends))


class Counting:
    """Reads the link counters of this rank's GPU before and after operations of a sweep."""

    def __init__(self, counters: LinkCounters, request: SweepRequest, rank: int, ranks: int) -> None:
        self._meter, self._request, self._rank, self._ranks = Meter(counters), request, rank, ranks
        self._moved: tuple[int, int] | None = None

    def expected_bytes(self, case: Case) -> tuple[float, float]:
        """Return the minimum bytes that this rank sends and receives, per byte of message size."""
        sent, received = (blocks * case.layout.count / case.layout.largest for blocks in self._blocks(case))
        return sent, received

    def count(
        self, cases: Sequence[Case], run_once: Callable[[Case], object], barrier: Callable[[], object]
    ) -> Traffic:
        """Run a few untimed operations of each size, and return the traffic that the counters show."""
        found = Traffic()
        for size, case in {case.size_bytes: case for case in cases}.items():
            operations = -(-COUNTED_BYTES // size)
            if operations > _MOST_OPERATIONS:
                continue
            before = self._meter.read(_GPU)
            barrier()
            for _ in range(operations):
                run_once(case)
            block_bytes = case.layout.count * case.dtype.size_bytes
            sent, received = (blocks * block_bytes * operations for blocks in self._blocks(case))
            traffic = Traffic(
                sent=self._meter.since(before, sent) if sent else _NOTHING,
                received=self._meter.since(before, received, receives=True) if received else _NOTHING,
            )
            found = traffic.merged(found)
        return found

    def _blocks(self, case: Case) -> tuple[int, int]:
        """Return the minimum blocks that this rank sends and receives.

        A block is `count` elements, as in NCCL's calls.
        """
        if self._moved is None:
            layout = case.layout
            moved = least_moved(self._request.collective, layout, self._rank, self._ranks, self._request.root)
            self._moved = moved.sent // layout.count, moved.received // layout.count
        return self._moved


OperationKey = tuple[DataType, ReduceOp | None, int]
"""Data type, reduction and size, from which the library chooses algorithm and protocol."""


class Choice(Struct, frozen=True):
    """The connections that an operation uses. `tuning` is None if NCCL does not log the algorithm and protocol."""

    used: Used
    tuning: Tuning | None

    def fill_row(self, row: CollectiveRow) -> CollectiveRow:
        tuning = self.tuning
        return replace(
            row,
            algorithm=row.algorithm if tuning is None else tuning.algorithm,
            protocol=None if tuning is None else tuning.protocol,
            channels=None if tuning is None else tuning.channels,
            transport=self.used.transport,
            host_staged=self.used.host_staged,
        )


class LoggedChoices(Struct, frozen=True):
    """The library's choices for each operation, from the logs of all ranks.

    `no_log` is the reason why a log is missing, and `no_tuning` why algorithms are missing. Both are empty otherwise.
    """

    by_operation: Mapping[OperationKey, Choice] = field(default_factory=dict)
    no_log: str = ""
    no_tuning: str = ""


def operation_key(case: Case) -> OperationKey:
    """Return the key of a case's operation, which is the same in place and out of place."""
    return case.dtype, case.op, case.size_bytes


def read_choices(
    request: SweepRequest,
    group: Group,
    nodes: Sequence[int],
    log: LibraryLog,
    cases: Sequence[Case],
    try_once: Callable[[Case], object],
) -> LoggedChoices | None:
    """Run every operation once, and collect the library's choices from all logs on rank 0. Other ranks return None."""
    listener = NcclLogListener(log)
    listener.listen()
    tunings: dict[OperationKey, Tuning | None] = {}
    for case in cases:
        if operation_key(case) not in tunings:
            try_once(case)
            tunings[operation_key(case)] = listener.listen()
    collected = group.collect(listener.selection())
    if collected is None:
        return None
    selection = Selection(collected, nodes)
    pairs: Sequence[Pair] = ()
    if request.collective.point_to_point:
        pairs = tuple(exchanges(request.collective, cases[0].layout, group.size, request.root))

    @cache
    def find_used(algorithm: str | None) -> Used:
        if algorithm is None and pairs:
            return selection.send_connections(pairs)
        return selection.algorithm_connections(algorithm)

    return LoggedChoices(
        by_operation={
            key: Choice(find_used(None if tuning is None else tuning.algorithm), tuning)
            for key, tuning in tunings.items()
        },
        no_log=selection.no_log,
        no_tuning=log.no_tuning,
    )


def distinct_uses(choices: LoggedChoices) -> Iterator[Used]:
    """Yield each distinct set of connections that the operations use."""
    seen: list[Used] = []
    for choice in choices.by_operation.values():
        if choice.used not in seen:
            seen.append(choice.used)
            yield choice.used


# Whether a path is inside a node, whether it has NVLinks, and whether it is host-staged
_Kind = tuple[bool, bool, bool | None]
_MOST_NODES = 64  # Up to this many nodes, a simulated machine is read completely to find causes
_ANOTHER_BACKEND = Cure(comment="Use `--backend nccl` or `torch:nccl`, which copy from GPU to GPU.")

_OF_SEVERAL_KINDS = "these GPUs use several kinds of paths, which counters and times do not separate"


class PathObservations(Struct, frozen=True, kw_only=True):
    """All observations of paths from before the timing, on rank 0. `expected_bytes` are per byte of message size."""

    choices: LoggedChoices
    choices_by_setting: Mapping[str, LoggedChoices] = field(default_factory=dict)
    expected_bytes: Sequence[tuple[float, float]]
    traffic: Sequence[Traffic]
    circumstances: Circumstances
    idle: Sequence[IdleGpu] = ()
    by_design: str = ""

    def add_idle(self, later: Sequence[IdleGpu]) -> "PathObservations":
        return replace(self, idle=combine_idle_gpus(self.idle, later))

    @property
    def foreign_traffic(self) -> dict[int, float]:
        """Ranks whose NVLinks moved more bytes than the rank itself can have moved, with the ratio of the two."""
        found = {}
        for rank, (traffic, expected) in enumerate(zip(self.traffic, self.expected_bytes, strict=True)):
            ends = zip((traffic.sent, traffic.received), map(most_share, expected), strict=True)
            times = [end.nvlink_share / most for end, most in ends if end.nvlink_share is not None]
            if max(times, default=0.0) > 1:
                found[rank] = max(times)
        return found

    @property
    def contended(self) -> Circumstances:
        """The circumstances, extended by the load from other processes on GPUs and links."""
        at_work = {rank: gpu.at_work for rank, gpu in enumerate(self.idle) if gpu.at_work is not None}
        waited = {rank: gpu.waited for rank, gpu in enumerate(self.idle) if gpu.waited is not None}
        return replace(
            self.circumstances,
            idle_gpus=dict(enumerate(self.idle)),
            beyond=self.foreign_traffic,
            at_work=at_work,
            waited={**self.circumstances.waited, **waited},
        )


class RowObservations(Struct):
    """Evidence about paths from rows, on rank 0: wrong elements per rank, and the fastest row of the largest size."""

    wrong: dict[int, int] = field(default_factory=dict)
    checked: bool = False
    largest: CollectiveRow | None = None

    def add(self, row: CollectiveRow, wrong_by_rank: Sequence[int]) -> None:
        self.checked = self.checked or row.wrong is not None
        for rank, wrong in enumerate(wrong_by_rank):
            self.wrong[rank] = self.wrong.get(rank, 0) + wrong
        best = self.largest
        if best is None or (row.size_bytes, row.reached_gb_s) > (best.size_bytes, best.reached_gb_s):
            self.largest = row


def conclude(observed: PathObservations, rows: RowObservations, *, origin: Origin = Origin.MEASURED) -> PathOutcome:
    """Return the verdict on all paths."""
    choices = observed.choices
    paths = _Paths(observed, rows).known_paths()
    wiring = observed.circumstances.wiring
    leaves_a_gpu = not all(wiring.share_gpu((0, rank)) for rank in range(len(wiring.gpus)))
    no_log = f"NCCL's log was not captured: {choices.no_log}" if choices.no_log and leaves_a_gpu else ""
    wrong = frozenset(_ranks(path) for path in paths if path.judgement.conclusion is Conclusion.WRONG)
    explained = Explained(replace(observed.contended, staged=_staged(paths), wrong=wrong))
    by_backend = Explanation("by-design", observed.by_design, _ANOTHER_BACKEND, by_design=True)

    def find_cause(members: Sequence[KnownPath]) -> Explanation:
        return by_backend if observed.by_design else explained.first(_staged(members))

    if not observed.by_design:
        paths = explained.add_causes(paths, _ranks)
    unconnected = {rank for used in distinct_uses(choices) for rank in used.unconnected}
    names_of_unconnected = [] if choices.no_log else [str(rank) for rank in sorted(unconnected)]
    fallback = fallback_rows(paths, origin, find_cause, no_log, names_of_unconnected)
    if fallback and choices.no_tuning and not choices.no_log:
        fallback[0] = replace(fallback[0], how=f"{fallback[0].how}; algorithms unknown: {choices.no_tuning}")
    outcome = report_on(paths, fallback, origin, explained.rows(of_programs=bool(choices.no_log)))
    return replace(outcome, explained=explained)


def simulated(
    staged: Sequence[Pair],
    gpus: Sequence[GpuLocation],
    node: Callable[[int], Topology],
    facts: Sequence[RankFacts] = (),
) -> PathOutcome:
    """Return the verdict on the host-staged pairs of a simulated machine.

    If the machine has more than 64 nodes, read only the nodes with staged pairs and one node per set of NCCL variables.
    """
    numbers = {gpu.node for gpu in gpus}
    if len(numbers) > _MOST_NODES:
        node_by_settings = {tuple(rank.nccl_settings.items()): rank.node for rank in reversed(facts)}
        numbers = {*node_by_settings.values(), *(gpus[rank].node for pair in staged for rank in pair)}
    wiring = Wiring(gpus, {number: node(number) for number in sorted(numbers)})
    paths = [
        KnownPath(
            source=_end(pair[0], wiring.gpus[pair[0]]),
            destination=_end(pair[1], wiring.gpus[pair[1]]),
            evidence=PathEvidence(
                capability=wiring.capability(pair),
                selection=Evidence(State.CONTRADICTING, "the simulation goes through host memory"),
                by_design=describe_mig_split(map(wiring.gpu, pair)),
                in_doubt=wiring.is_refusal_doubtful(pair),
            ),
            path_class=wiring.path(pair),
            limit_gb_s=wiring.limit(pair).gb_s,
        )
        for pair in staged
    ]
    known = [rank for rank in facts if rank.node in wiring.nodes]
    explained = Explained(
        Circumstances(wiring=wiring, facts=known, settings=user_settings(known), staged=dict.fromkeys(staged, ()))
    )
    copied = Explained(replace(explained.circumstances, copied=dict.fromkeys(staged, AS_SLOW_AS_STAGED)))

    def find_cause(members: Sequence[KnownPath]) -> Explanation:
        """Return the cause found in the facts, or else the cause that `gpubench p2p` would report."""
        found = explained.first(_staged(members))
        by_design = any(path.evidence.by_design for path in members)
        return found if found is not UNKNOWN and found.by_design == by_design else copied.first(_staged(members))

    paths = explained.add_causes(paths, _ranks)
    rows = fallback_rows(paths, Origin.SIMULATED, find_cause)
    outcome = report_on(paths, rows, Origin.SIMULATED, explained.rows())
    return replace(outcome, explained=explained)


def _staged(paths: Sequence[KnownPath]) -> dict[Pair, Sequence[Transport]]:
    return {_ranks(path): path.transports for path in paths if path.judgement.conclusion is Conclusion.STAGED}


def _ranks(path: KnownPath) -> Pair:
    return int(path.source.short), int(path.destination.short)


def _design_reason(pair: Pair, transports: Sequence[Transport], run: Circumstances) -> str:
    """Return the reason why this path uses host memory by design, or an empty string."""
    if run.wiring.share_node(pair) and any(transport.network for transport in transports):
        return split_by_design(run, pair)
    return run.wiring.why_staged(pair)


class _Paths:
    def __init__(self, observed: PathObservations, rows: RowObservations) -> None:
        self._observed, self._rows = observed, rows
        self._wiring, self._expected_bytes = observed.circumstances.wiring, observed.expected_bytes
        self._chosen: dict[Pair, dict[Transport, None]] = {}
        for used in distinct_uses(observed.choices):
            for pair in drop_idle_pairs(used.pairs, self._expected_bytes):
                self._chosen.setdefault(pair, {}).update(dict.fromkeys(used.pairs[pair]))
        self._out: dict[int, set[_Kind]] = {}
        self._into: dict[int, set[_Kind]] = {}
        for pair in self._chosen:
            self._out.setdefault(pair[0], set()).add(self._kind(pair))
            self._into.setdefault(pair[1], set()).add(self._kind(pair))
        self._kinds = {kind for kinds in self._out.values() for kind in kinds}

    def known_paths(self) -> list[KnownPath]:
        """Return the paths in use.

        Without a log, return the pairs inside nodes for which counters or times are evidence.
        """
        pairs = set(self._chosen)
        if self._observed.choices.no_log:
            ranks = range(len(self._wiring.gpus))
            pairs |= {(one, other) for one in ranks for other in ranks if one != other}
            pairs = {pair for pair in pairs if self._wiring.share_node(pair)}
            if not self._observed.by_design:
                measured = {pair for pair in pairs if self._measurement(pair).state is not State.ABSENT}
                pairs &= self._chosen.keys() | measured
        return [self._path(pair) for pair in sorted(pairs)]

    def _path(self, pair: Pair) -> KnownPath:
        transports = tuple(self._chosen.get(pair, ()))
        source, destination = (_end(rank, self._wiring.gpus[rank]) for rank in pair)
        return KnownPath(
            source=source,
            destination=destination,
            evidence=PathEvidence(
                capability=self._wiring.capability(pair),
                selection=_selection(transports, self._observed.by_design),
                measurement=self._measurement(pair),
                correctness=self._correctness(pair),
                by_design=self._observed.by_design or _design_reason(pair, transports, self._observed.circumstances),
                in_doubt=self._wiring.is_refusal_doubtful(pair)
                and not any(transport.network for transport in transports),
            ),
            transports=transports,
            path_class=self._wiring.path(pair),
            bandwidth_gb_s=self._bandwidth_gb_s(transports),
            limit_gb_s=self._wiring.limit(pair).gb_s,
        )

    def _measurement(self, pair: Pair) -> Evidence:
        if not self._wiring.share_node(pair):
            return Evidence(seen="no counter on this node shows the traffic between nodes")
        if len(self._out.get(pair[0], set()) | self._into.get(pair[1], set())) > 1:
            return Evidence(seen=_OF_SEVERAL_KINDS)
        sent, received = self._expected_bytes[pair[0]][0], self._expected_bytes[pair[1]][1]
        source, destination = (self._observed.traffic[rank] for rank in pair)
        idle, foreign_gb_s = self._observed.idle, 0.0
        if idle:
            foreign_gb_s = max(idle[pair[0]].rates.nvlink_sent or 0.0, idle[pair[1]].rates.nvlink_received or 0.0)
        flow = Flow(
            ends=(*([source.sent] if sent else []), *([destination.received] if received else [])),
            most_shares=tuple(most_share(moved) for moved in (sent, received) if moved),
            foreign_gb_s=foreign_gb_s,
            speed=self._speed(pair),
            has_nvlinks=self._wiring.has_nvlinks(pair),
            limit_gb_s=self._wiring.limit(pair).gb_s,
            staged_gb_s=self._wiring.staged_gb_s(pair),
        )
        return flow_evidence(flow)

    def _kind(self, pair: Pair) -> _Kind:
        wiring = self._wiring
        return wiring.share_node(pair), wiring.has_nvlinks(pair), is_staged(tuple(self._chosen[pair]))

    def _speed(self, pair: Pair) -> Speed | None:
        row = self._rows.largest
        if row is None:
            return None
        expected = max(self._expected_bytes[pair[0]][0], self._expected_bytes[pair[1]][1])
        busbw = row.busbw_gb_s if len(self._kinds) <= 1 else None
        return Speed(size_bytes=row.size_bytes, passed_gb_s=row.algbw_gb_s * expected, busbw_gb_s=busbw)

    def _bandwidth_gb_s(self, transports: Sequence[Transport]) -> float | None:
        """Return the busbw in GB/s, or None if the paths are direct and other paths are staged.

        The slowest paths determine the busbw, so it does not apply to the faster, direct ones.
        """
        row = self._rows.largest
        some_staged = any(staged is not False for *_, staged in self._kinds)
        return None if row is None or (some_staged and is_staged(transports) is False) else row.busbw_gb_s

    def _correctness(self, pair: Pair) -> Evidence:
        if not self._rows.checked:
            return Evidence(seen="data were not verified")
        wrong = self._rows.wrong.get(pair[1], 0)
        if wrong:
            return Evidence(State.CONTRADICTING, f"{plural(wrong, 'wrong element')} at rank {pair[1]}")
        if pair not in self._chosen:
            return Evidence(seen="it is unknown over which pairs the data came")
        return Evidence(State.PRESENT, "every element that arrived is right")


def _selection(transports: Sequence[Transport], by_design: str) -> Evidence:
    if by_design:
        return Evidence(State.CONTRADICTING, by_design)
    if not transports:
        return Evidence(seen="NCCL's log names no connection")
    staged, said = is_staged(transports), f"NCCL chose {join_names(transports)}"
    if staged is None:
        return Evidence(seen=f"{said}, which gpubench does not know")
    return Evidence(State.CONTRADICTING if staged else State.PRESENT, said)


def _end(rank: int, gpu: GpuLocation) -> End:
    device = gpu.place.device if isinstance(gpu, RankIdentity) else None
    return End(f"rank {rank}", str(rank), gpu.host, gpu.gpu_bus_id, device)


class PathJudge:
    """Adds path columns to each row, and judges all paths at the end."""

    def __init__(
        self, request: SweepRequest, observations: PathObservations, *, origin: Origin = Origin.MEASURED
    ) -> None:
        self.observations = observations
        self._request = request
        self._origin = origin
        self._rows = RowObservations()
        self._limits: dict[tuple[str | None, str | None], Limit] = {}

    def row(self, case: Case, row: CollectiveRow, wrong_by_rank: Sequence[int]) -> CollectiveRow:
        """Return the row with its path columns, and keep the row as evidence."""
        if case.setting is None:
            self._rows.add(row, wrong_by_rank)
        return self.describe(case, row)

    def describe(self, case: Case, row: CollectiveRow) -> CollectiveRow:
        """Return the row with NCCL's choices, its limit, and a note if NCCL chose something other than the setting."""
        setting = None if case.setting == AGAIN else case.setting
        if setting is None and self.has_log_of(row.backend):
            setting = row.backend
        choices = self.observations.choices
        if setting is not None:
            choices = self.observations.choices_by_setting.get(setting, LoggedChoices())
        choice = choices.by_operation.get(operation_key(case))
        if choice is None:
            return row
        algorithm = None if choice.tuning is None else choice.tuning.algorithm
        if (setting, algorithm) not in self._limits:
            self._limits[setting, algorithm] = self._find_limit(algorithm, choice.used)
        row = add_limit(choice.fill_row(row), self._limits[setting, algorithm])
        if not differs_from_request(row):
            return row
        taken = f"{row.setting} was requested, but NCCL used {format_choice(row.algorithm, row.protocol)}"
        return replace(row, note="; ".join(filter(None, (taken, row.note))))

    def has_log_of(self, backend: str) -> bool:
        """True if the choices of this backend were logged separately from those of the first backend."""
        return backend in self.observations.choices_by_setting

    def _find_limit(self, algorithm: str | None, used: Used) -> Limit:
        collective, expected_bytes = self._request.collective, self.observations.expected_bytes
        wiring = self.observations.circumstances.wiring
        if len(expected_bytes) == 1:
            return Limit(None, ONE_RANK)
        if why := wiring.why_not_judged:
            return Limit(None, f"no limit: {why}")
        joined = wiring.networks
        if joined is not None and joined[0].nodes > 1:
            return internode_limit(algorithm, collective, joined[0])
        if collective.point_to_point:
            work = Work(collective.busbw_factor(len(expected_bytes)), expected_bytes)
            return exchange_limit(work, used.pairs, wiring)
        if algorithm is None:
            reason = self.observations.choices.no_tuning or "NCCL's log names none"
            return Limit(None, f"the algorithm is unknown: {reason}")
        return busbw_limit(algorithm, drop_idle_pairs(used.pairs, expected_bytes), wiring)

    def add_idle(self, after: Sequence[IdleGpu]) -> None:
        self.observations = self.observations.add_idle(after)

    def outcome(self, slow: Sequence[CollectiveRow] = ()) -> PathOutcome:
        """Return the verdict on all paths, with the causes of staged paths and of `slow` rows."""
        around = replace(self.observations.circumstances, issued=IssueTime.of(slow))
        observed = replace(self.observations, circumstances=around)
        return conclude(observed, self._rows, origin=self._origin)


def add_limit(row: CollectiveRow, limit: Limit) -> CollectiveRow:
    """Add the busbw limit to a row, and a note if the limit is unknown or assumed."""
    if limit.gb_s is None or limit.note == NVLS_ASSUMED:
        why = "" if limit.note in (row.note or "") else limit.note
        row = replace(row, note="; ".join(filter(None, (row.note, why))) or None)
    if limit.gb_s is None:
        return row
    return replace(row, limit_gb_s=limit.gb_s, limit_percent=100 * row.reached_gb_s / limit.gb_s)
