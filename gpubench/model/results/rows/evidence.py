"""The rows of the sections `evidence` and `fallback`: what is known of each path, and the verdict on all of them."""

from dataclasses import dataclass
from typing import Annotated

from gpubench.model.paths.evidence import Conclusion, Confidence, State
from gpubench.model.results.report import Record
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.verdict import Verdict

EVIDENCE_SECTION, FALLBACK_SECTION = "evidence", "fallback"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRow(Record):
    """All evidence on one path: each kind is for, silent on, or against the claim that it is direct.

    docs/evidence.md has the decision table. Of more than ten thousand paths, those that are not direct.
    """

    source: str  #: where the bytes come from: a GPU, a rank, host
    destination: str  #: where they go
    source_node: str  #: host of the source
    destination_node: str  #: host of the destination
    source_bus_id: str | None  #: PCI address of the source
    destination_bus_id: str | None  #: PCI address of the destination
    origin: Annotated[str, Origin]  #: measured, simulated or recorded
    path_class: str | None  #: wiring, as nvidia-smi topo -m: NV18, PIX, PXB, PHB, NODE, SYS; NET between nodes
    transport: str | None  #: what carries it, as NCCL prints it: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    host_staged: bool | None  #: whether bytes pass through host memory
    bandwidth_gb_s: float | None  #: GB/s of 1e9 bytes
    limit_gb_s: float | None  #: GB/s per direction that the links carry at most
    capability: Annotated[str, State]  #: present, absent or contradicting, of the claim that the path is direct
    capability_seen: str  #: what was seen of it
    selection: Annotated[str, State]  #: present, absent or contradicting, of the claim that the path is direct
    selection_seen: str  #: what was seen of it
    measurement: Annotated[str, State]  #: present, absent or contradicting, of the claim that the path is direct
    measurement_seen: str  #: what was seen of it
    correctness: Annotated[str, State]  #: present, absent or contradicting, of the claim that the path is direct
    correctness_seen: str  #: what was seen of it
    by_design: str | None  #: why host memory is no fault here
    conclusion: Annotated[str, Conclusion]  #: direct, staged, wrong data, disputed or unknown
    confidence: Annotated[str, Confidence]  #: proven, likely, weak or none
    verdict: Annotated[str, Verdict]  #: PASS, WARN, FAIL, SKIP, ERROR or INCONCLUSIVE
    meaning: str  #: the rule of docs/evidence.md


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackRow(Record):
    """The verdict on paths that fare alike; the gravest come first."""

    conclusion: Annotated[str, Conclusion]  #: the last two are of `topo`, which sends nothing
    verdict: Annotated[str, Verdict]  #: PASS, WARN, FAIL, SKIP, ERROR or INCONCLUSIVE
    confidence: Annotated[str, Confidence]  #: proven, likely, weak or none
    origin: Annotated[str, Origin]  #: measured, simulated or recorded
    count: int  #: ordered pairs that fare alike
    pairs: tuple[str, ...]  #: the first thousand of `count`
    transport: str | None = None  #: what carries it, as NCCL prints it: P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA
    bandwidth_gb_s: float | None = None  #: GB/s of 1e9 bytes
    limit_gb_s: float | None = None  #: GB/s per direction that the links carry at most
    times_slower: float | None = None  #: limit over what was delivered
    cause: str | None = None  #: stable id of the first known cause
    cause_seen: str | None = None  #: what shows it
    advice: str | None = None  #: what to do
    how: str  #: how all this is known
