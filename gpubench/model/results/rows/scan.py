"""The rows of `gpubench scan`: every rail of every node, the parts that are bad, rounds, collectives, exclude lists."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from gpubench.model.results.report import Record
from gpubench.model.results.scan_rounds import ScanPhase
from gpubench.model.terms.verdict import Verdict

PARTS_SECTION, CELLS_SECTION, ROUNDS_SECTION = "parts", "cells", "rounds"
SCAN_COLLECTIVES_SECTION, EXCLUSIONS_SECTION = "scan_collectives", "exclusions"


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
class ScanPartRow(Record):
    """A part that is bad, or a suspect where nothing was confirmed."""

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
class ScanCellRow(Record):
    """One rail of one node: its newest score, and the part that explains it where it is bad."""

    node: str  #: host
    subject: str  #: the rail in words
    rail: int  #: position of the GPU in its node
    leaf: str | None  #: null: not known
    nic: str | None  #: NIC of the rail; null: not known
    score_percent: float | None  #: of what the others deliver; null: no figure
    median_gb_s: float | None  #: both ways together, over all its rounds
    figures: int  #: rounds that the score is of
    failures: int  #: rounds without a figure, over the whole scan
    phase: Annotated[str | None, ScanPhase]  #: that judged it; null: none could
    verdict: Annotated[str, Verdict]  #: PASS, FAIL, WARN (suspect, or its rail below the NICs), ERROR (no figure)
    part: str | None  #: the part that it belongs to; null where it is well
    origin: str  #: measured, simulated or recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRoundRow(Record):
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
class ScanCollectiveRow(Record):
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
class ExclusionRow(Record):
    """A line of an exclude list, ready to be pasted."""

    tool: Annotated[str, Tool]  #: what it is for
    line: str  #: the line
