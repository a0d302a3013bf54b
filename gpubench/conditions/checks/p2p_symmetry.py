"""Pairs that are slower in one direction than in the other."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.paths.p2p import FAILED_SHARE, SLOW_SHARE
from gpubench.model.results.measured_copies import peer_rows
from gpubench.model.results.measurements import Need
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning below 90 % of the other direction and FAIL below 75 %: of two GPUs that have no siblings, too."""
    for node in facts.nodes:
        rows = peer_rows(facts.measurements, node)
        for (source, destination), row in rows.items():
            back = rows.get((destination, source))
            if back is None or not back.bandwidth_gb_s or row.bandwidth_gb_s is None:
                continue
            share = row.bandwidth_gb_s / back.bandwidth_gb_s
            if share >= SLOW_SHARE:
                continue
            yield Finding(
                id="p2p-asymmetric",
                severity=Verdict.FAIL if share < FAILED_SHARE else Verdict.WARN,
                subject=facts.subject(node, node.gpus[source], node.gpus[destination]),
                seen=f"{row.bandwidth_gb_s:.4g} GB/s, and {back.bandwidth_gb_s:.4g} the other way",
                expected="the same both ways",
                cause="a link that repeats packets in one direction, or a port that sends them another way",
                next_command="gpubench p2p --pairs I-J,J-I; nvidia-smi nvlink -e",
            )


P2P_SYMMETRY = Check("p2p_symmetry", "copies are as fast there as back", find, Need.PEER_COPIES)
