"""Nodes that differ from those they should equal."""

from collections.abc import Iterator

from gpubench.checks.check import Check, Facts
from gpubench.model.nodes import condense
from gpubench.model.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for every node that differs from its kind, with the difference."""
    for kind in facts.kinds:
        for position, found in kind.odd.items():
            yield Finding(
                id="node-differs",
                severity=Verdict.WARN,
                subject=facts.subject(facts.nodes[position]),
                seen="; ".join(condense(found)),
                expected=f"what {len(kind.alike)} other nodes of kind {kind.name} have",
                cause="a fault, or another image, firmware or setting than on the other nodes",
                next_command="gpubench topo on that node alone",
            )


NODES_ALIKE = Check("nodes_alike", "nodes of a kind are alike", find)
