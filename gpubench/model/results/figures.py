"""The speeds that the last line of a report shows, and the measurements that `gpubench check` judges."""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.model.facts.snapshot import GpuFacts
from gpubench.model.paths.p2p import JUDGED_FROM_BYTES, Pair
from gpubench.model.paths.topology import Topology
from gpubench.model.results.compare import HOST
from gpubench.model.results.kv import KvRow
from gpubench.model.results.report import CollectiveRow, EvidenceRow, PairRow, PatternRow, Row, Verified
from gpubench.model.results.speed import LARGE_BYTES, is_judged
from gpubench.model.terms.operation import Direction, Engine, HostMemory
from gpubench.model.terms.ranks import DevicePlace, RankIdentity
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, group_by, percent
from gpubench.model.terms.verdict import Finding, Origin, Verdict, parse_doubt

PEER_COPIES, BOTH_WAYS, HOST_COPIES, TRANSFERS = "p2p", "p2p both ways", "host copies", "KV transfers"
COLLECTIVE_NAMES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "sendrecv": "send and receive",
}
_OWN_NAMES = {shown: name for name, shown in COLLECTIVE_NAMES.items()}
_PAIR = " → "  # Separates the two ends in the subject of a finding about pairs
_ROUNDING_PERCENT = 1.0  # Percentages in findings are rounded
_BAD = (Verdict.FAIL, Verdict.WARN)


class SpeedFigure(Struct, frozen=True):
    """A measured speed with its expected value. Below 64 MiB, the times matter more than the bandwidths."""

    what: str
    gb_s: float
    expected_gb_s: float | None
    limit_percent: float | None
    is_judged: bool
    hosts: tuple[str, ...] = ()
    size_bytes: int = LARGE_BYTES
    time_us: float | None = None
    expected_us: float | None = None
    shares_gpus: bool = False
    """Whether its ranks share GPUs. Then there is no expected speed."""
    doubt: str = ""
    """Why the speed is not judged although an expectation exists: it is much faster than expected."""
    ends: tuple[DevicePlace, ...] = ()
    """The two GPUs between which the data was copied."""
    ranks: int | None = None
    """The number of ranks, if the report also has a run with more ranks."""

    @property
    def is_small(self) -> bool:
        """Whether the size is so small that the time matters more than the bandwidth."""
        return self.size_bytes < LARGE_BYTES

    @property
    def expected_percent(self) -> float | None:
        return percent(self.gb_s, self.expected_gb_s)


class SpeedFigures(Struct):
    """The best row of each collective, the slowest pair at the largest size, and all rows that are too slow.

    The best row has `least_ranks` ranks or more, so that a run over several numbers of ranks shows the largest.
    """

    slowest: SpeedFigure | None = None
    checked: bool = False
    unchecked: bool = False
    wrong: int = 0
    rows: int = 0
    least_ranks: int = 0
    _slow: dict[tuple[str, frozenset[str], int | None], SpeedFigure] = field(default_factory=dict)
    _best: dict[str, SpeedFigure] = field(default_factory=dict)
    _largest: dict[str, SpeedFigure] = field(default_factory=dict)
    _pairs: dict[tuple[bool, bool, int, bool], SpeedFigure] = field(default_factory=dict)
    _host: SpeedFigure | None = None
    _backend: str | None = None

    def add(self, row: Row) -> None:
        self.rows += 1
        if isinstance(row, CollectiveRow):
            self._add_collective(row)
        elif isinstance(row, PairRow):
            self._add_pair(row)
        elif isinstance(row, KvRow):
            self._add_transfer(row)

    @property
    def is_unjudged(self) -> bool:
        """Whether the speed of copies, or of a collective at its largest size, was not judged. Ignore shared GPUs."""
        every = list(self.all())
        collectives = [figure for figure in self._largest.values() if not figure.shares_gpus]
        copies = every[:1] if self._pairs or not collectives else []
        return bool(every) and not all(figure.is_judged for figure in (*copies, *collectives))

    @property
    def doubt(self) -> str:
        """Why the report's speed is not judged: it is much faster than expected. Empty if it is judged."""
        figures = (*self.all(), *self._largest.values())
        return next((figure.doubt for figure in figures if figure.doubt and not figure.is_judged), "")

    def all(self) -> Iterator[SpeedFigure]:
        """Yield the speed of copies between GPUs, then the speed of each collective in order of first appearance.

        Copies in both directions at once count only if there are no others.

        If no GPU pair has peer access, yield copies to host memory too.
        """
        best = max(self._pairs, default=None)
        if best is not None:
            yield self._pairs[best]
        if self._host is not None and (best is None or not best[1]):
            yield self._host
        yield from self._best.values()

    def find_best(self, what: str) -> SpeedFigure | None:
        """Return the speed that represents a collective or all transfers in the last line, or None."""
        return self._best.get(what)

    def _add_collective(self, row: CollectiveRow) -> None:
        self._note_data(are_verified=row.wrong is not None)
        self.wrong += row.wrong or 0
        self._backend = self._backend or row.backend
        if row.backend != self._backend or row.ranks == 1:
            return  # Judge only the first of several backends. A single rank has no bus bandwidth
        figure = SpeedFigure(
            what=COLLECTIVE_NAMES.get(row.collective, row.collective),
            gb_s=row.reached_gb_s,
            expected_gb_s=row.expected_gb_s,
            limit_percent=row.limit_percent,
            is_judged=row.expected_source is not None and is_judged(row),
            size_bytes=row.size_bytes,
            time_us=row.time_us,
            expected_us=row.expected_us,
            shares_gpus=(row.ranks_per_gpu or 1) > 1,
            doubt=parse_doubt(row.note),
            ranks=row.ranks if row.ranks < self.least_ranks else None,
        )
        self._note_slow(figure, row.verdict)
        if row.ranks < self.least_ranks:
            return
        largest = self._largest.get(figure.what)
        if largest is None or (figure.size_bytes, figure.is_judged) > (largest.size_bytes, largest.is_judged):
            self._largest[figure.what] = figure
        best = self._best.get(figure.what)
        if best is None or figure.gb_s > best.gb_s:
            judged_before = best is not None and best.is_judged
            is_judged_here = figure.is_judged or (judged_before and not figure.doubt)
            self._best[figure.what] = replace(figure, is_judged=is_judged_here)

    def _add_pair(self, row: PairRow) -> None:
        if row.bandwidth_gb_s is not None:
            self._note_data(are_verified=row.verified in (Verified.LAST, Verified.REPEAT))
        if HOST in (row.source, row.destination):
            self._add_host_copy(row)
            return
        if row.bandwidth_gb_s is None:
            return
        is_one_way = row.direction != Direction.BOTH
        figure = SpeedFigure(
            what=PEER_COPIES if is_one_way else BOTH_WAYS,
            gb_s=row.bandwidth_gb_s,
            expected_gb_s=row.expected_gb_s,
            limit_percent=row.limit_percent,
            is_judged=row.verdict not in (None, Verdict.SKIP),
            hosts=tuple(dict.fromkeys((row.source_node, row.destination_node))),
            size_bytes=row.size_bytes or 0,
            time_us=row.latency_us,
            expected_us=row.expected_us,
            doubt=parse_doubt(row.note),
            ends=(
                DevicePlace(row.source_node, row.source, row.source_bus_id),
                DevicePlace(row.destination_node, row.destination, row.destination_bus_id),
            ),
        )
        if is_one_way:
            self._note_slow(figure, row.verdict)
        is_usual = (row.engine, row.direction) == (Engine.CE, Direction.WRITE)
        key = is_one_way, row.peer != "off", row.size_bytes or 0, is_usual
        self._pairs[key] = _slower(self._pairs.get(key, figure), figure)

    def _add_host_copy(self, row: PairRow) -> None:
        if row.bandwidth_gb_s is None or row.source == row.destination or not is_pinned(row):
            return
        figure = SpeedFigure(
            what=HOST_COPIES,
            gb_s=row.bandwidth_gb_s,
            expected_gb_s=row.expected_gb_s,
            limit_percent=row.limit_percent,
            is_judged=row.verdict not in (None, Verdict.SKIP),
        )
        self._host = _slower(self._host or figure, figure)

    def _add_transfer(self, row: KvRow) -> None:
        """Keep the slowest transfer of one block between GPUs, at the largest size. Prefer those that are judged."""
        if row.bandwidth_gb_s is None:
            return
        self._note_data(are_verified=row.verified == Verified.LAST)
        if row.destination == HOST or row.blocks > 1:
            return
        is_judged = row.verdict not in (None, Verdict.SKIP)
        figure = SpeedFigure(
            what=TRANSFERS,
            gb_s=row.bandwidth_gb_s,
            expected_gb_s=row.expected_gb_s if is_judged else None,
            limit_percent=None,
            is_judged=is_judged,
            size_bytes=row.size_bytes,
            time_us=row.p50_us,
            doubt=(row.note or "").partition("not judged: ")[2],
            shares_gpus=row.source_bus_id == row.destination_bus_id,
        )
        known = self._best.get(TRANSFERS, figure)
        self._best[TRANSFERS] = min(known, figure, key=lambda one: (not one.is_judged, -one.size_bytes, one.gb_s))

    def _note_data(self, *, are_verified: bool) -> None:
        self.checked = self.checked or are_verified
        self.unchecked = self.unchecked or not are_verified

    def find_slowest(self, finding: Finding) -> SpeedFigure | None:
        """Return the slowest speed that belongs to a finding, or None.

        It was measured on the finding's devices, and is no slower than the finding reports.
        """
        return min((figure for figure in self._slow.values() if _is_about(figure, finding)), key=_rank, default=None)

    def _note_slow(self, figure: SpeedFigure, verdict: str | None) -> None:
        if verdict not in _BAD or figure.expected_percent is None:
            return
        key = figure.what, frozenset(map(_key, figure.ends)), figure.ranks
        known_slow = self._slow.get(key)
        if known_slow is None or _rank(figure) < _rank(known_slow):
            self._slow[key] = figure
        known = self.slowest
        if known is None or _rank(figure) < _rank(known):
            self.slowest = figure


def _rank(figure: SpeedFigure) -> tuple[bool, bool, int, bool, float]:
    """Return a sort key: collectives before copies, large sizes before small ones, then the slowest first.

    If several numbers of ranks are equally slow, the most ranks come first.
    """
    left = figure.expected_percent or 0.0
    return figure.what == PEER_COPIES, figure.is_small, round(left), figure.ranks is not None, left


def _key(place: DevicePlace) -> str:
    return f"{place.node} {place.bus_id or place.device}"


def _is_about(figure: SpeedFigure, finding: Finding) -> bool:
    least = finding.expected_percent
    if least is not None and (figure.expected_percent or 0.0) < least - _ROUNDING_PERCENT:
        return False
    if figure.what != PEER_COPIES:
        told = " ".join((finding.subject, *finding.consequences))
        return not finding.consequences or _OWN_NAMES.get(figure.what, figure.what) in told
    places = {_key(place) for place in finding.places if place.device}
    named = [_key(end) in places for end in figure.ends]
    return not places or (all(named) if _PAIR in finding.subject else any(named))


def is_pinned(row: PairRow) -> bool:
    """Return whether a row is a large copy between a GPU and pinned host memory."""
    large = (row.size_bytes or 0) >= JUDGED_FROM_BYTES
    return row.bandwidth_gb_s is not None and large and HostMemory.parse_note(row.note) is HostMemory.PINNED


class Need(StrEnum):
    """The input that a check needs: facts about the machine, or one type of measurement."""

    FACTS = "facts"
    PEER_COPIES = "peer copies"
    HOST_COPIES = "host copies"
    HOST_MEMORY = "host memory"
    ALL_REDUCE = "all-reduce"
    VERIFIED_DATA = "verified data"


class FailedOnNode(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A measurement that failed on one of several nodes, with the reason."""

    node: str
    need: Need
    reason: str


class Transferred(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The outcome of `gpubench kv` in a check. `note` is the reason if nothing was measured."""

    verdict: Verdict
    rows: tuple[KvRow, ...] = ()
    note: str = ""


class Measurements(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The measurements of a run, and the findings made while measuring: wrong data, failed copies, host-staged
    paths.

    `left_out` contains the reason for each skipped measurement (--quick, a single GPU). `failed` contains the reason
    for each measurement that failed on all nodes, and `failed_on` those that failed on single nodes. `transferred` is
    None without --kv. `evidence` is about the paths of copies, and `collective_evidence` about those of collectives.
    """

    pairs: tuple[PairRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    ranks: tuple[RankIdentity, ...] = ()
    evidence: tuple[EvidenceRow, ...] = ()
    collective_evidence: tuple[EvidenceRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    patterns: tuple[PatternRow, ...] = ()
    transferred: Transferred | None = None
    left_out: Mapping[Need, str] = field(default_factory=dict)
    failed: Mapping[Need, str] = field(default_factory=dict)
    failed_on: tuple[FailedOnNode, ...] = ()

    def pairs_from(self, host: str) -> Sequence[PairRow]:
        """Return the copies whose source is on a node. The grouping is cached, because each check of each node
        needs it.
        """
        return self._pairs_by_node.get(host, ())

    @cached_property
    def _pairs_by_node(self) -> Mapping[str, Sequence[PairRow]]:
        return group_by(self.pairs, lambda row: row.source_node)

    @cached_property
    def staged(self) -> frozenset[tuple[str, str | None, str | None]]:
        """Host-staged pairs: the node of the source, and the PCI addresses of both GPUs."""
        return frozenset(
            (row.source_node, row.source_bus_id, row.destination_bus_id) for row in self.evidence if row.host_staged
        )


QUICK = Measurements(left_out=dict.fromkeys([need for need in Need if need is not Need.FACTS], "--quick"))
"""The empty measurements of `gpubench check --quick`."""

BY_CPU = "cpu"  # The engine in rows of copies within host memory


def peer_rows(measured: Measurements, node: Topology) -> dict[Pair, PairRow]:
    """Return a node's large copies between two GPUs, keyed by the positions of the GPUs.

    Skip GPUs that other processes use, and pairs that are host-staged although peer access is possible.
    """
    positions = {gpu.bus_id: position for position, gpu in enumerate(node.gpus) if gpu.bus_id and not is_busy(gpu)}
    staged = measured.staged
    host = node.snapshot.host
    return {
        (positions[row.source_bus_id], positions[row.destination_bus_id]): row
        for row in measured.pairs_from(host)
        if row.destination_node == host
        and row.source_bus_id in positions
        and row.destination_bus_id in positions
        and (row.engine, row.direction) == (Engine.CE, Direction.WRITE)
        and row.bandwidth_gb_s is not None
        and (row.size_bytes or 0) >= JUDGED_FROM_BYTES
        and (is_by_design(row) or row.peer == "on")
        and (is_by_design(row) or (host, row.source_bus_id, row.destination_bus_id) not in staged)
    }


def is_by_design(row: PairRow) -> bool:
    """Return whether a copy without peer access is judged.

    It is judged if healthy machines have no other path for this pair.
    """
    return row.peer == "off" and row.verdict is not None


def host_rows(measured: Measurements, node: Topology, *, to_gpu: bool) -> list[tuple[GpuFacts, PairRow]]:
    """Return a node's large copies between pinned host memory and a GPU, without GPUs that other processes use."""
    gpus = {gpu.bus_id: gpu for gpu in node.gpus if gpu.bus_id and not is_busy(gpu)}
    found = []
    for row in measured.pairs_from(node.snapshot.host):
        own, other = (
            (row.destination_bus_id, row.source_bus_id) if to_gpu else (row.source_bus_id, row.destination_bus_id)
        )
        if other is not None or own not in gpus or not is_pinned(row):
            continue
        found.append((gpus[own], row))
    return found


def host_copy_row(host: str, size_bytes: int, seconds: float) -> PairRow:
    """Make the row for a copy within a node's host memory."""
    return PairRow(
        source=HOST,
        destination=HOST,
        source_bus_id=None,
        destination_bus_id=None,
        source_node=host,
        destination_node=host,
        scope="process",
        origin=Origin.MEASURED,
        engine=BY_CPU,
        size_bytes=size_bytes,
        bandwidth_gb_s=size_bytes / seconds / BYTES_PER_GB,
        latency_us=seconds * MICROSECONDS_PER_SECOND,
        limit_gb_s=None,
        path_class=None,
    )


def memory_row(measured: Measurements, host: str) -> PairRow | None:
    """Return the row for the copy within a node's host memory, or None."""
    return next((row for row in measured.pairs_from(host) if row.engine == BY_CPU), None)


def is_busy(gpu: GpuFacts) -> bool:
    """Return whether other processes use a GPU. Measurements of such a GPU do not count.

    A process that only has a context keeps an H200 at its full clock, which is not called idle, with a utilization of
    0. Kernels that run 0.1 % of the time read 3 %.
    """
    if not gpu.processes or gpu.idle:
        return False
    return gpu.utilization_percent is None or gpu.utilization_percent > 0


def _slower(known: SpeedFigure, figure: SpeedFigure) -> SpeedFigure:
    """Return the slower of two speeds. Mark it as judged only if both are."""
    slower = figure if figure.gb_s < known.gb_s else known
    return slower if known.is_judged == figure.is_judged else replace(slower, is_judged=False)
