"""What a log tells of a fault of the network although it has no connection, as the beginning of one that was pasted."""

from collections.abc import Iterator, Mapping, Sequence

from gpubench.conditions.definition.condition import joined
from gpubench.conditions.registry import CAUSES
from gpubench.model.paths.nccl_log import LogFacts, Note, RemarkKind
from gpubench.model.terms.verdict import Finding, Verdict

_DIRECT = "RDMA into GPU memory (GDRDMA)"
_ASKED_FOR = ("NCCL_IB_HCA",)
"""Variables of no use where there is no RDMA device."""


def said_without_connections(facts: LogFacts) -> Iterator[Finding]:
    """Findings on RDMA that a job between nodes cannot use; doubts where the text does not say how many there are."""
    if facts.communicators and all(each.nodes == 1 for each in facts.communicators):
        return
    notes: dict[RemarkKind, list[Note]] = {}
    for remark in facts.remarks:
        notes.setdefault(remark.note.kind, []).append(remark.note)
    severity = Verdict.FAIL if facts.communicators else Verdict.WARN
    if refused := notes.get(RemarkKind.GDR_DISABLED):
        subjects = [note.about[1] for note in refused]
        yield _finding("gpudirect-refused", severity, subjects, f"NCCL says: {refused[0].text}", _DIRECT)
    elif far := _far(notes):
        yield _finding("gpudirect-too-far", Verdict.WARN, [], f"NCCL says: {far.text}", _DIRECT)
    if notes.get(RemarkKind.NO_RDMA_DEVICE) and (reason := _expects_rdma(facts, notes)):
        seen = f"NCCL found no RDMA device to use, and {reason}"
        yield _finding("sockets-despite-rdma", severity, [], seen, "an RDMA device that opens")


def _far(notes: Mapping[RemarkKind, Sequence[Note]]) -> Note | None:
    """The first line of a NIC that is too far, where none is near."""
    far = [*notes.get(RemarkKind.GDR_DISTANT, ()), *notes.get(RemarkKind.GDR_FAR, ())]
    return far[0] if far and not notes.get(RemarkKind.GDR_NEAR) else None


def _expects_rdma(facts: LogFacts, notes: Mapping[RemarkKind, Sequence[Note]]) -> str:
    """What in the text says that there are RDMA devices; empty where nothing does."""
    if devices := notes.get(RemarkKind.RDMA_DEVICES):
        return devices[0].text
    return next((f"{each.name}={each.value}" for each in facts.settings if each.name in _ASKED_FOR), "")


def _finding(id_: str, severity: Verdict, subjects: Sequence[str], seen: str, expected: str) -> Finding:
    condition = next(each for each in CAUSES if each.id == id_)
    return Finding(
        id=id_,
        severity=severity,
        subject=joined(subjects) or "the network between nodes",
        seen=seen,
        expected=expected,
        cause=condition.title,
        next_command=condition.cure,
    )
