"""Nodes that differ from those they should equal."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.paths.nodes import MachineKind, condense
from gpubench.model.terms.units import compress_names
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for every node that differs from its kind, and for every further kind with the same GPU models."""
    sizes = {kind.name: len(kind.alike) for kind in facts.kinds}
    for kind in facts.kinds:
        if kind.differs_from is not None:
            hosts = [facts.nodes[position].snapshot.host for position in kind.alike]
            yield _finding(
                f"kind {kind.name}: {compress_names(hosts)}",
                "; ".join(condense(kind.differs)),
                f"what the {sizes[kind.differs_from]} nodes of kind {kind.differs_from} have, which have the same GPUs",
                subjects=tuple(hosts),
            )
        for position, found in kind.odd.items():
            subject = facts.subject(facts.nodes[position])
            yield _finding(subject, "; ".join(condense(found)), _expected(kind), subjects=(subject,))


def _expected(kind: MachineKind) -> str:
    count = len(kind.alike)
    return f"what {count} other nodes of kind {kind.name} have" if count > 1 else "what the other node has"


def _finding(subject: str, seen: str, expected: str, subjects: tuple[str, ...]) -> Finding:
    return Finding(
        id="node-differs",
        severity=Verdict.WARN,
        subject=subject,
        seen=seen,
        expected=expected,
        cause="a fault, or another image, firmware or setting than on the other nodes",
        next_command="gpubench topo on that node alone",
        subjects=subjects,
    )


NODES_ALIKE = Check("nodes_alike", "nodes of a kind are alike", find, without_gpus=True)
