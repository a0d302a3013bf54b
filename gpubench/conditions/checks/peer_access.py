"""GPU pairs that cannot reach each other's memory, and pairs of which CUDA and NVML disagree."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts, join_subjects
from gpubench.model.facts.snapshot import GpuFacts
from gpubench.model.paths.peer_policy import Refusal, refusal_of
from gpubench.model.paths.topology import P2P_STATUS, PeerAccess, Topology
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """One finding a node for each reason of refusal, and one for each contradiction."""
    for node in facts.nodes:
        refused: dict[Refusal, list[tuple[GpuFacts, GpuFacts]]] = {}
        for source in node.gpus:
            for destination in node.gpus:
                if source is destination:
                    continue
                access = node.peer_access(source, destination)
                if access.contradicts:
                    yield _contradiction(facts, node, source, destination, access)
                elif access.possible is False:
                    refusal = refusal_of(node, source, destination, access)
                    refused.setdefault(refusal, []).append((source, destination))
        for refusal, pairs in refused.items():
            yield _refusal(facts, node, refusal, pairs)


def _refusal(facts: Facts, node: Topology, refusal: Refusal, pairs: list[tuple[GpuFacts, GpuFacts]]) -> Finding:
    status, by_design = refusal.status, refusal.by_design
    cause, advice = refusal.cause_and_advice
    everybody = len(pairs) == len(node.gpus) * (len(node.gpus) - 1)
    named = [f"{source.device} → {destination.device}" for source, destination in pairs]
    where = facts.subject(node) if len(facts.nodes) > 1 else ""
    said = f"NVML says {status} ({P2P_STATUS.get(status, status)})" if status else "CUDA refuses it"
    return Finding(
        id="peer-access-refused",
        severity=Verdict.SKIP if by_design else Verdict.FAIL if refusal.wired else Verdict.WARN,
        subject=f"{where} all {len(pairs)} GPU pairs".strip()
        if everybody
        else f"{where} {join_subjects(named)}".strip(),
        seen=f"peer access refused: {said}; copies between them go through host memory",
        expected="peer access" if not by_design else "host memory, by design",
        cause=cause,
        next_command=advice,
        subjects=tuple(f"{where} {name}".strip() for name in named),
    )


def _contradiction(
    facts: Facts, node: Topology, source: GpuFacts, destination: GpuFacts, access: PeerAccess
) -> Finding:
    return Finding(
        id="peer-access-contradiction",
        severity=Verdict.WARN,
        subject=facts.subject(node, source, destination),
        seen=access.reason,
        expected="CUDA and NVML agree",
        cause="a container or virtual machine shows another topology than the driver has, a fabric that is not ready, "
        "or a driver bug: believe neither before data has arrived",
        next_command="gpubench allreduce --np 2 on these two GPUs: it verifies every byte",
    )


PEER_ACCESS = Check("peer_access", "every GPU pair has peer access, and CUDA and NVML agree on it", find)
