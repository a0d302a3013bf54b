"""The rows of `gpubench scan` and its sentence: rails, bad parts, rounds, collectives, and exclude lists."""

from collections.abc import Iterator, Mapping, Sequence, Set
from enum import StrEnum
from typing import Annotated, Any

from gpubench.model.results.ending import SOON, LinePart, part
from gpubench.model.results.report import (
    HIDDEN,
    Metadata,
    OnPage,
    Record,
    Report,
)
from gpubench.model.results.rounds import ScanPhase
from gpubench.model.terms.units import counted, some_of
from gpubench.model.terms.verdict import Verdict, drained_hosts
from gpubench.records import dataclass


class PartKind(StrEnum):
    """The kind of part that is bad."""

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
"""The kinds that make a node bad; the others are of the network between nodes."""


class Tool(StrEnum):
    """What an exclude list is for."""

    SLURM = "slurm"
    SLURM_DRAIN = "slurm drain"
    MPIRUN = "mpirun"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPartRow(Record, section="parts"):
    """A bad part; a suspect if the scan confirmed nothing."""

    kind: Annotated[str, PartKind]  #: what it is
    subject: str  #: node, rail, leaf by name
    nodes: tuple[str, ...]  #: hosts that it slows
    rail: int | None  #: null: all rails, or none
    leaf: str | None  #: null: of no leaf
    gpu: int | None  #: null: of no GPU
    partner_gpu: int | None = None  #: the other GPU of a pair; null: of none
    nic: str | None = None  #: name of the NIC on the rail; null: of none, or not known
    percent: float | None  #: what it delivers of what the others do; null: nothing
    seen: str  #: in words
    verdict: Annotated[str, Verdict]  #: FAIL: confirmed; WARN: a suspect that nobody confirmed
    origin: str  #: measured, simulated or recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCellRow(Record, section="cells", on_page=HIDDEN):
    """One rail of one node: its newest score and, if it is bad, the part that explains it."""

    node: str  #: host
    subject: str  #: the rail in words
    rail: int  #: position of the GPU in its node
    leaf: str | None  #: null: not known
    nic: str | None  #: NIC of the rail; null: not known
    score_percent: float | None  #: of what the others deliver; null: no figure
    both_ways_gb_s: float | None  #: both directions together, of the same rounds as the score
    figures: int  #: rounds that the score is of
    failures: int  #: rounds without a figure, over the whole scan
    phase: Annotated[str | None, ScanPhase]  #: that judged it; null: none could
    verdict: Annotated[str, Verdict]  #: PASS, FAIL, WARN (suspect, or its rail below the NICs), ERROR (no figure)
    part: str | None  #: the part that it belongs to; null where it is well
    origin: str  #: measured, simulated or recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRoundRow(Record, section="rounds"):
    """One round of a scan."""

    number: int  #: from 1
    phase: Annotated[str, ScanPhase]  #: screening, suspects or confirmation
    pairs: int  #: pairs of nodes
    figures: int  #: figures of rails of pairs
    failures: int  #: figures that are missing
    gone: tuple[str, ...]  #: hosts that stopped answering
    seconds: float  #: that it took
    origin: str  #: measured, simulated or recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCollectiveRow(Record, section="scan_collectives", on_page=OnPage("Rings of many nodes")):
    """A collective of many nodes beside what their parts predict."""

    subject: str  #: all, a half, a mixed half
    nodes: tuple[str, ...]  #: hosts that took part
    measured_gb_s: float | None  #: that a node sends on all its rails; null: not measured
    predicted_gb_s: float  #: what the slowest of its cells allows
    percent: float | None  #: measured of predicted
    note: str | None  #: why it was not measured
    verdict: Annotated[str, Verdict]  #: WARN below 90 % of what is predicted, ERROR where not measured
    origin: str  #: measured, simulated or recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusionRow(Record, section="exclusions", on_page=OnPage("Lists that leave the bad nodes out")):
    """A line of an exclude list, ready to be pasted."""

    tool: Annotated[str, Tool]  #: what it is for
    line: str  #: the line


_MOST_PARTS = 5

_HANGING = (PartKind.NODE_HANGS, PartKind.RAIL_HANGS)
_OF_HANGING = ("deadline", "stopped", "kernel")
_JUDGED = (Verdict.PASS, Verdict.FAIL)


def scan_parts(metadata: Metadata, report: Report) -> Iterator[LinePart]:
    """'3 of 1,024 nodes are bad: node17 rail 3 at 41 % (NIC or cable), …', '1,021 are healthy'."""
    rows = report.rows(ScanPartRow)
    bad = [row for row in rows if row.verdict == Verdict.FAIL]
    nodes = len(metadata.hosts)
    if bad:
        doubtful = {cell.node for cell in report.rows(ScanCellRow) if cell.verdict not in _JUDGED}
        yield from _of_bad(bad, nodes, doubtful, drained_hosts(report.findings, metadata.hosts))
        return
    suspects = {node for row in rows for node in row.nodes if row.kind in OF_ONE_NODE}
    if rows:
        count = f"{len(suspects):,} of {nodes:,} nodes" if suspects else "parts of the network"
        verb = "is suspect but not confirmed" if len(suspects) == 1 else "are suspect but not confirmed"
        yield _listed(f"{count} {verb}", rows)
    else:
        yield part(f"all {nodes:,} nodes are healthy{_sure(metadata.options)}")


def _of_bad(bad: Sequence[ScanPartRow], nodes: int, doubtful: Set[str], failing: Set[str]) -> Iterator[LinePart]:
    """The bad parts first; `doubtful` are nodes of which some rail is a suspect, too noisy or without a figure, and
    `failing` those whose own facts fail, or whose driver did not answer.
    """
    of_nodes = {node for row in bad if row.kind in OF_ONE_NODE for node in row.nodes}
    between = [row for row in bad if row.kind not in OF_ONE_NODE]
    behind = {node for row in between for node in row.nodes}
    subjects = [f"{len(of_nodes):,} of {nodes:,} nodes"] if of_nodes else []
    subjects += [counted(len(between), "part") + " of the network"] if between else []
    is_one = len(of_nodes) + len(between) == 1
    yield _listed(f"{' and '.join(subjects)} {'is' if is_one else 'are'} bad", bad)
    unsure = len(doubtful - of_nodes - behind)
    ill = len(failing - of_nodes - behind - doubtful)
    healthy = nodes - len(of_nodes | behind) - unsure - ill
    slowed = len(behind - of_nodes)
    yield part(f"{slowed:,} {_are(slowed)} slowed by the network" if slowed else "", importance=SOON)
    yield part(f"{unsure:,} could not be judged" if unsure else "")
    yield part(f"{ill:,} {'fails' if ill == 1 else 'fail'} for other reasons" if ill else "", importance=SOON)
    counts_healthy = healthy or not (slowed or unsure or ill)
    yield part(f"{healthy:,} {_are(healthy)} healthy" if counts_healthy else "", importance=SOON)


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _listed(lead: str, rows: Sequence[ScanPartRow]) -> LinePart:
    words = [_part_words(row) for row in rows]
    return part(*(f"{lead}: {some_of(words, most)}" for most in range(min(len(words), _MOST_PARTS), 0, -1)), lead)


def _part_words(row: ScanPartRow) -> str:
    """'node17 rail 3 at 41 % (NIC or cable)', 'node9 hangs'."""
    if row.kind == PartKind.NODE_GONE:
        return f"{row.subject} is gone"
    if row.kind in _HANGING:
        return f"{row.subject} {'hangs' if any(word in row.seen for word in _OF_HANGING) else 'fails'}"
    share = "" if row.percent is None else f" at {row.percent:.0f} %"
    return row.subject + share + (f" ({row.kind})" if row.kind in (PartKind.NIC, PartKind.UPLINK) else "")


def _sure(options: Mapping[str, Any]) -> str:
    sure = options.get("sure_loss_percent")
    if not isinstance(sure, (int, float)):
        return ""
    slower = f"{sure:.0f} % slow" if options.get("rates_known") else f"{sure:.0f} % slower than the others"
    return f" (a node {slower} would have been detected)"
