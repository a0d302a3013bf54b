"""The rows of the sections `evidence` and `fallback`: what is known of each path, and the verdict on all of them."""

from dataclasses import dataclass

from gpubench.model.results.report import Record

EVIDENCE_SECTION, FALLBACK_SECTION = "evidence", "fallback"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRow(Record):
    """All evidence on the path from one end to another, and what follows from it.

    Ends are ranks ('rank 0') or devices ('GPU0'). Of each kind of evidence there is its state (present, absent,
    contradicting: of the claim that the path is direct) and what was seen. `by_design` says why host memory is no fault
    here. `bandwidth_gb_s` is what the path delivered, its `limit_gb_s` per direction.
    """

    source: str
    destination: str
    source_node: str
    destination_node: str
    source_bus_id: str | None
    destination_bus_id: str | None
    origin: str
    path_class: str | None
    transport: str | None
    host_staged: bool | None
    bandwidth_gb_s: float | None
    limit_gb_s: float | None
    capability: str
    capability_seen: str
    selection: str
    selection_seen: str
    measurement: str
    measurement_seen: str
    correctness: str
    correctness_seen: str
    by_design: str | None
    conclusion: str
    confidence: str
    verdict: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackRow(Record):
    """The verdict on paths that fare alike: direct, staged, wrong data, disputed or unknown.

    `pairs` are ordered ('0 → 1'): the first thousand of `count`. `times_slower` is their limit over what they
    delivered. The cause is the first that is known: a stable id, what was seen, what to do; None where none is asked
    for. `how` says how all this is known.
    """

    conclusion: str
    verdict: str
    confidence: str
    origin: str
    count: int
    pairs: tuple[str, ...]
    transport: str | None
    bandwidth_gb_s: float | None
    limit_gb_s: float | None
    times_slower: float | None
    cause: str | None
    cause_seen: str | None
    advice: str | None
    how: str
