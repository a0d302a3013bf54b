"""The measurements of a scan in memory and on disk, its rows, and its last line.

A leaf is a leaf switch. A rail is a GPU with the NIC that it uses. A cell is one rail of one node.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import StrEnum
from typing import Annotated, NamedTuple

from msgspec import Meta, field

from gpubench.errors import UsageError
from gpubench.model.results.ending import SOON, LinePart, part
from gpubench.model.results.report import (
    HIDDEN,
    Metadata,
    OnPage,
    Record,
    Report,
    make_record,
)
from gpubench.model.terms.plain import Rate, Seconds
from gpubench.model.terms.plain import StrictStruct as Struct
from gpubench.model.terms.units import plural, shorten
from gpubench.model.terms.verdict import Finding, Verdict, failing_hosts

# Bytes exchanged in each direction, and bytes reduced. On H200s with 400 Gbit/s NICs, larger exchanges are no faster
EXCHANGED_BYTES = 256 * 2**20
BOTH_WAYS = 2  # A pair's bandwidth is the sum of both directions


class ScanPhase(StrEnum):
    """The phases of a scan, in order. The first one, phase 0, and the last one have no rounds."""

    LOCAL = "local"
    SCREENING = "screening"
    SUSPECTS = "suspects"
    CONFIRMATION = "confirmation"
    COLLECTIVE = "collective"


ROUNDS: Mapping[ScanPhase, int] = {ScanPhase.SCREENING: 3, ScanPhase.SUSPECTS: 3, ScanPhase.CONFIRMATION: 5}
"""Number of rounds in each phase. It does not depend on the number of nodes."""


class NodeRail(NamedTuple):
    """One rail of one node: a GPU and its NIC."""

    node: int
    rail: int


class NodePair(NamedTuple):
    """Two nodes that measure each other in a round, on all rails at once."""

    first: int
    second: int


RANK_OF_HOST = ":rank"  # Separates host name and rank when each rank acts as a node


def login_name(node: str) -> str:
    """Return the host name of a node, quoted as an argument for `ssh`."""
    return shlex.quote(node.partition(RANK_OF_HOST)[0])


MOST_NODES, MOST_RAILS = 65_536, 64


class ScanFabric(Struct, frozen=True):
    """The nodes of a scan, with the leaf switch of each node and the NIC of each rail (None: unknown).

    A rail is the position of a GPU in its node, together with the NIC that the GPU uses. Rails may share a NIC. `rates`
    contains the NIC rate of each rail in GB/s per direction. It is empty if unknown or if no NIC moves the data.
    """

    hosts: tuple[str, ...]
    rails: Annotated[int, Meta(ge=1, le=MOST_RAILS)]
    leaves: tuple[str | None, ...]
    nics: tuple[str | None, ...] = ()
    rates: tuple[float | None, ...] = ()

    def inside(self, first: int, second: int) -> bool:
        """Return whether both nodes are known to be on the same leaf switch."""
        leaf = self.leaves[first]
        return leaf is not None and leaf == self.leaves[second]

    def nic(self, rail: int) -> str | None:
        """Return the NIC of a rail, or None if unknown."""
        return self.nics[rail] if rail < len(self.nics) else None


class PairSample(NamedTuple):
    """The measurement of one rail between two nodes in a round, or the failure.

    `gb_s` is the sum of both directions in GB/s. `culprit` is the node whose supervisor saw its own worker stop or die.
    It is None if unknown.
    """

    first: int
    second: int
    rail: int
    gb_s: float
    failure: str = ""
    culprit: int | None = None

    def partner(self, node: int) -> int:
        """Return the other node of the pair."""
        return self.second if node == self.first else self.first


class PlannedRound(Struct, frozen=True):
    """A round to measure. `number` counts from 1 over all phases. `retired` cells do not take part."""

    number: int
    phase: ScanPhase
    pairs: tuple[NodePair, ...]
    retired: frozenset[NodeRail] = frozenset()


class RoundOutcome(Struct, frozen=True):
    """The results of a round. `gone` contains the nodes that stopped responding in it, with the reasons."""

    number: int
    phase: ScanPhase
    samples: tuple[PairSample, ...]
    seconds: float
    gone: Mapping[int, str] = field(default_factory=dict)


class BeforeRounds(Struct, frozen=True):
    """The nodes lost and the rails whose worker died or hung before the first round, with the reasons."""

    gone: Mapping[int, str] = field(default_factory=dict)
    failed: Mapping[NodeRail, str] = field(default_factory=dict)

    def without(self, known: "BeforeRounds") -> "BeforeRounds":
        """Return the lost nodes and failed rails that `known` does not contain."""
        failed = {cell: seen for cell, seen in self.failed.items() if cell not in known.failed}
        return BeforeRounds({node: seen for node, seen in self.gone.items() if node not in known.gone}, failed)

    def beside(self, known: "BeforeRounds") -> "BeforeRounds":
        """Return the union with `known`. If both contain a reason, use the one from `known`."""
        return BeforeRounds({**self.gone, **known.gone}, {**self.failed, **known.failed})


WRONG_DATA_ARRIVED = "wrong data arrived"  # Prefix of the failure text for a pair that received wrong data


class LocalQuantity(StrEnum):
    """The quantities that each node measures by itself in phase 0."""

    PAIR = "copies inside the node"
    ALL_REDUCE = "all-reduce inside the node"
    TO_HOST = "copies to host memory"
    FROM_HOST = "copies from host memory"
    MEMORY = "copies in its memory"


class LocalFigure(NamedTuple):
    """A bandwidth in GB/s that a node measured by itself on one GPU (or rank, without GPUs), or the failure.

    For copies between two GPUs, `partner` is the other GPU, and `gb_s` is the sum of both directions. For an
    all-reduce, `gpu` is 0 and `gb_s` is the bus bandwidth.
    """

    node: int
    gpu: int
    quantity: LocalQuantity
    gb_s: float
    partner: int | None = None
    failure: str = ""

    @property
    def place(self) -> tuple[int, int, LocalQuantity, int | None]:
        """Node, GPU, quantity and partner, which identify the measurement in both passes."""
        return self.node, self.gpu, self.quantity, self.partner


class RingFailure(NamedTuple):
    """A failure of a ring: the observation from one node, and whether the fault is in that node."""

    node: int
    seen: str
    is_own: bool


class RingOutcome(Struct, frozen=True):
    """The bandwidth of a ring's slowest rail in GB/s, or the failures by rail."""

    gb_s: float
    failures: Mapping[NodeRail, RingFailure] = field(default_factory=dict)


_EXPECTED = f"rounds from gpubench scan, with at most {MOST_NODES} nodes and {MOST_RAILS} rails, each node once"


class StoredFabric(ScanFabric, frozen=True, kw_only=True):
    """The fabric of a scan in its stored form, with the seed and the backend."""

    seed: int
    backend: str
    origin: str

    @classmethod
    def of(cls, fabric: ScanFabric, seed: int, backend: str, origin: str) -> "StoredFabric":
        """Convert a fabric to its stored form."""
        return make_record(cls, fabric, seed=seed, backend=backend, origin=origin)

    def fabric(self) -> ScanFabric:
        """Return the fabric. Raise UsageError if the stored values contradict each other."""
        fits = len(self.leaves) == len(self.hosts) == len(set(self.hosts)) <= MOST_NODES
        if not self.hosts or not fits:
            raise UsageError(f"{len(self.hosts)} nodes with {len(self.leaves)} leaves", expected=_EXPECTED)
        return make_record(ScanFabric, self, rates=self.rates[: self.rails])


class StoredLocal(Struct, frozen=True):
    """The measurements of phase 0 in their stored form.

    `places` contains node and GPU, or node and two GPUs for a pair. `failures` are keyed by position in these lists.
    `findings` come from facts, clocks and profiles. They are None if an older gpubench wrote the file.
    """

    places: tuple[tuple[int, ...], ...]
    quantities: tuple[LocalQuantity, ...]
    gb_s: tuple[Rate, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] | None = None

    @classmethod
    def of(cls, figures: Sequence[LocalFigure], findings: Sequence[Finding] = ()) -> "StoredLocal":
        """Convert measurements to their stored form."""
        return cls(
            tuple(
                (figure.node, figure.gpu) if figure.partner is None else (figure.node, figure.gpu, figure.partner)
                for figure in figures
            ),
            tuple(figure.quantity for figure in figures),
            tuple(figure.gb_s for figure in figures),
            {str(n): figure.failure for n, figure in enumerate(figures) if figure.failure},
            tuple(findings),
        )

    def figures(self, fabric: ScanFabric) -> list[LocalFigure]:
        """Return the measurements. Raise UsageError for unknown nodes or GPUs."""
        figures = []
        for number, (place, quantity, gb_s) in enumerate(zip(self.places, self.quantities, self.gb_s, strict=False)):
            node, gpu = _checked(place[:2], 2, fabric)
            partner = _checked((node, *place[2:]), 2, fabric)[1] if len(place) > 2 else None
            failure = self.failures.get(str(number), "")
            figures.append(LocalFigure(node, gpu, quantity, gb_s, partner, failure))
        return figures


class StoredRound(Struct, frozen=True):
    """A round in its stored form.

    `places` contains node, node and rail of each measurement. `failures` and `culprits` are keyed by position in these
    lists.
    """

    number: Annotated[int, Meta(ge=1)]
    phase: ScanPhase
    seconds: Seconds
    places: tuple[tuple[int, ...], ...]
    gb_s: tuple[Rate, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    culprits: Mapping[str, int] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, outcome: RoundOutcome) -> "StoredRound":
        """Convert a round to its stored form."""
        samples = outcome.samples
        return cls(
            outcome.number,
            outcome.phase,
            outcome.seconds,
            tuple(sample[:3] for sample in samples),
            tuple(sample.gb_s for sample in samples),
            {str(n): sample.failure for n, sample in enumerate(samples) if sample.failure},
            {str(n): sample.culprit for n, sample in enumerate(samples) if sample.culprit is not None},
            {str(node): seen for node, seen in outcome.gone.items()},
        )

    def outcome(self, fabric: ScanFabric) -> RoundOutcome:
        """Return the round. Raise UsageError for unknown nodes or rails."""
        samples = []
        for number, (place, gb_s) in enumerate(zip(self.places, self.gb_s, strict=False)):
            first, second, rail = _checked(place, 3, fabric)
            failure, culprit = self.failures.get(str(number), ""), self.culprits.get(str(number))
            samples.append(PairSample(first, second, rail, gb_s, failure, culprit))
        numbers = {str(node): node for node in range(len(fabric.hosts))}
        gone = {numbers[node]: seen for node, seen in self.gone.items() if node in numbers}
        return RoundOutcome(self.number, self.phase, tuple(samples), self.seconds, gone)


class StoredAbsent(Struct, frozen=True):
    """The nodes lost in phase 0 or missing in the resumed job, with the reasons, keyed by node number.

    `failed` contains the rails whose worker died or hung in phase 0, keyed by node and rail: '3/1'.
    """

    absent: Mapping[str, str]
    failed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: BeforeRounds) -> "StoredAbsent":
        """Convert lost nodes and failed rails to their stored form."""
        return cls(
            {str(node): seen for node, seen in found.gone.items()},
            {f"{node}/{rail}": seen for (node, rail), seen in found.failed.items()},
        )

    def rails(self, fabric: ScanFabric) -> dict[NodeRail, str]:
        """Return the failed rails, with the reasons. Raise UsageError for unknown rails."""
        found = {}
        for place, seen in self.failed.items():
            numbers = [int(text) if text.isdecimal() else -1 for text in place.split("/")]
            node, rail = _checked(numbers, 2, fabric)
            found[NodeRail(node, rail)] = seen
        return found

    def nodes(self, fabric: ScanFabric) -> dict[int, str]:
        """Return the lost nodes by number, with the reasons. Ignore unknown nodes."""
        numbers = {str(node): node for node in range(len(fabric.hosts))}
        return {numbers[node]: seen for node, seen in self.absent.items() if node in numbers}


def _checked(place: Sequence[int], count: int, fabric: ScanFabric) -> Sequence[int]:
    nodes, rail = place[: max(1, count - 1)], place[-1] if place else -1
    fits = len(place) == count and all(0 <= node < len(fabric.hosts) for node in nodes)
    if not fits or not 0 <= rail < max(fabric.rails, 1):
        raise UsageError(f"a value of {list(place)[:4]}", expected=f"{_EXPECTED}, of {len(fabric.hosts)} nodes")
    return place


class PartKind(StrEnum):
    """The types of faulty parts."""

    NODE_GONE = "node gone"
    NODE_HANGS = "node hangs"
    NODE = "node"
    GPU = "GPU"
    GPU_PAIR = "pair of GPUs"
    NIC = "NIC or cable"
    RAIL_HANGS = "rail hangs"
    RAIL = "rail"
    LEAF = "leaf"
    LEAF_RAIL = "rail of a leaf"
    UPLINK = "uplink"


OF_ONE_NODE = (
    PartKind.NODE_GONE,
    PartKind.NODE_HANGS,
    PartKind.NODE,
    PartKind.GPU,
    PartKind.GPU_PAIR,
    PartKind.NIC,
    PartKind.RAIL_HANGS,
)
"""The types of faults inside a node. Other types are in the network between nodes."""


class Tool(StrEnum):
    """The tools for which a scan prints exclude lists."""

    SLURM = "slurm"
    SLURM_DRAIN = "slurm drain"
    MPIRUN = "mpirun"
    KUBERNETES = "kubernetes"


class ScanPartRow(Record, frozen=True, kw_only=True):
    """A faulty part of a node or of the network. The verdict is WARN if the scan did not confirm the fault."""

    section = "parts"
    on_page = OnPage("Bad parts")

    part_kind: Annotated[str, PartKind]  #: type of the faulty part
    subject: str  #: name of the node, rail or leaf
    nodes: tuple[str, ...]  #: host names of the nodes that the part slows
    rail: int | None  #: number of the rail (null for all rails or no rail)
    leaf: str | None  #: name of the leaf switch (null if none)
    gpu: int | None  #: number of the GPU (null if none)
    partner_gpu: int | None = None  #: number of the other GPU in a pair (null if none)
    nic: str | None = None  #: NIC on the rail (null if none or unknown)
    percent: float | None  #: bandwidth as a percentage of that of the others (null if not measured)
    seen: str  #: description of the fault
    verdict: Annotated[str, Verdict]  #: FAIL if confirmed, WARN if only suspected
    origin: str  #: origin of the values: measured, simulated or recorded


class ScanCellRow(Record, frozen=True, kw_only=True):
    """One cell, which is one rail of one node: its latest score and, if it is slow, the faulty part that explains
    it.
    """

    section = "cells"
    on_page = HIDDEN

    node: str  #: host name of the node
    subject: str  #: name of the rail
    rail: int  #: position of the GPU in its node
    leaf: str | None  #: leaf switch of the node (null if unknown)
    nic: str | None  #: NIC of the rail (null if unknown)
    score_percent: float | None  #: bandwidth as a percentage of that of the other nodes (null if not measured)
    both_ways_gb_s: float | None  #: sum of both directions in GB/s, in the rounds that count towards the score
    figures: int  #: number of rounds in the score
    failures: int  #: number of rounds without a value in the whole scan
    phase: Annotated[str | None, ScanPhase]  #: phase in which the cell was judged (null if not judged)
    #: PASS, FAIL, WARN (suspect, or below the rate of its NICs) or ERROR (not measured)
    verdict: Annotated[str, Verdict]
    part: str | None  #: faulty part that explains the verdict (null if none)
    origin: str  #: origin of the values: measured, simulated or recorded


class ScanRoundRow(Record, frozen=True, kw_only=True):
    """One round of a scan."""

    section = "rounds"

    number: int  #: number of the round, from 1
    phase: Annotated[str, ScanPhase]  #: phase of the scan: screening, suspects or confirmation
    pairs: int  #: number of node pairs
    figures: int  #: number of measurements: one per rail of each pair
    failures: int  #: number of missing measurements
    gone: tuple[str, ...]  #: hosts that stopped responding in this round
    seconds: float  #: duration of the round in seconds
    origin: str  #: origin of the values: measured, simulated or recorded


class ScanCollectiveRow(Record, frozen=True, kw_only=True):
    """A ring over many nodes, compared with the bandwidth predicted from its cells."""

    section = "scan_collectives"
    on_page = OnPage("Rings over many nodes")

    subject: str  #: group of nodes: all, a half, or a mixed half
    nodes: tuple[str, ...]  #: host names of the nodes in the group
    measured_gb_s: float | None  #: data sent per node over all rails in GB/s (null if not measured)
    predicted_gb_s: float  #: bandwidth in GB/s predicted from the slowest rail of the group's nodes
    percent: float | None  #: measured bandwidth as a percentage of the prediction
    note: str | None  #: why the bandwidth was not measured (null if it was)
    verdict: Annotated[str, Verdict]  #: WARN below 90 % of the prediction, ERROR if not measured
    origin: str  #: origin of the values: measured, simulated or recorded


class ExclusionRow(Record, frozen=True, kw_only=True):
    """A line of an exclude list, ready to paste."""

    section = "exclusions"
    on_page = OnPage("Lists without the bad nodes")

    tool: Annotated[str, Tool]  #: tool that reads the list
    line: str  #: line to paste into the tool's command or file


_MOST_PARTS = 5

_HANGING = (PartKind.NODE_HANGS, PartKind.RAIL_HANGS)
_OF_HANGING = ("deadline", "stopped", "kernel")
_JUDGED = (Verdict.PASS, Verdict.FAIL)


def scan_parts(metadata: Metadata, report: Report) -> Iterator[LinePart]:
    """Yield the parts of the last line, for example '3 of 1,024 nodes are bad: node17 rail 3 at 41 % (NIC or
    cable), …'.
    """
    rows = report.rows(ScanPartRow)
    bad = [row for row in rows if row.verdict == Verdict.FAIL]
    nodes = len(metadata.hosts)
    if bad:
        doubtful = {cell.node for cell in report.rows(ScanCellRow) if cell.verdict not in _JUDGED}
        yield from _bad_parts(bad, nodes, doubtful, failing_hosts(report.findings, metadata.hosts))
        return
    suspects = {node for row in rows for node in row.nodes if row.part_kind in OF_ONE_NODE}
    sure = metadata.options.get("sure_loss_percent")
    if rows:
        count = f"{len(suspects):,} of {nodes:,} nodes" if suspects else "parts of the network"
        yield _listed(f"{count} may be slow", rows)
    elif isinstance(sure, (int, float)):
        than = "" if metadata.options.get("rates_known") else "er than the others"
        yield part(f"all {nodes:,} nodes are healthy (a node {sure:.0f} % slow{than} would have been detected)")
    else:
        yield part(f"all {nodes:,} nodes are healthy")


def _bad_parts(bad: Sequence[ScanPartRow], nodes: int, doubtful: Set[str], failing: Set[str]) -> Iterator[LinePart]:
    """Yield the faulty parts first, then the numbers of other nodes.

    `doubtful` are nodes with a rail that is a suspect, too noisy or not measured. `failing` are nodes with a failing
    finding from their facts, or with a driver that did not respond.
    """
    bad_nodes = {node for row in bad if row.part_kind in OF_ONE_NODE for node in row.nodes}
    between = [row for row in bad if row.part_kind not in OF_ONE_NODE]
    behind = {node for row in between for node in row.nodes}
    subjects = [f"{len(bad_nodes):,} of {nodes:,} nodes"] if bad_nodes else []
    subjects += [plural(len(between), "part") + " of the network"] if between else []
    is_one = len(bad_nodes) + len(between) == 1
    yield _listed(f"{' and '.join(subjects)} {'is' if is_one else 'are'} bad", bad)
    unsure = len(doubtful - bad_nodes - behind)
    ill = len(failing - bad_nodes - behind - doubtful)
    healthy = nodes - len(bad_nodes | behind) - unsure - ill
    slowed = len(behind - bad_nodes)
    yield part(f"{slowed:,} {_are(slowed)} slowed by the network" if slowed else "", importance=SOON)
    yield part(f"{unsure:,} could not be judged" if unsure else "")
    yield part(f"{ill:,} {'fails' if ill == 1 else 'fail'} for other reasons" if ill else "", importance=SOON)
    counts_healthy = healthy or not (slowed or unsure or ill)
    yield part(f"{healthy:,} {_are(healthy)} healthy" if counts_healthy else "", importance=SOON)


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _listed(lead: str, rows: Sequence[ScanPartRow]) -> LinePart:
    words = [_describe_part(row) for row in rows]
    return part(*(f"{lead}: {shorten(words, most)}" for most in range(min(len(words), _MOST_PARTS), 0, -1)), lead)


def _describe_part(row: ScanPartRow) -> str:
    """Describe a faulty part: 'node17 rail 3 at 41 % (NIC or cable)', 'node9 hangs'."""
    if row.part_kind == PartKind.NODE_GONE:
        return f"{row.subject} is gone"
    if row.part_kind in _HANGING:
        return f"{row.subject} {'hangs' if any(word in row.seen for word in _OF_HANGING) else 'fails'}"
    share = "" if row.percent is None else f" at {row.percent:.0f} %"
    return row.subject + share + (f" ({row.part_kind})" if row.part_kind in (PartKind.NIC, PartKind.UPLINK) else "")
