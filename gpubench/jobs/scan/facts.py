"""What is wrong with the nodes of a scan by their facts, before anything is measured."""

from collections.abc import Mapping, Sequence

from gpubench.conditions.definition.circumstances import Facts
from gpubench.measure.check.health import judge
from gpubench.model.facts.rank_facts import RankFacts
from gpubench.model.paths.nodes import group
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.measurements import QUICK
from gpubench.model.terms.verdict import Finding, Verdict

_WRONG = (Verdict.FAIL, Verdict.ERROR, Verdict.WARN)


def of_whole_node(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment to read a node by: one of its ranks, which may be shown one GPU, reads it for all of them."""
    return {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}


def fact_findings(
    nodes: Sequence[Topology], profiles: Sequence[Profile | None], ranks: Sequence[RankFacts] = ()
) -> list[Finding]:
    """What `gpubench check --quick` finds wrong with these nodes, where they have GPUs; profiles are by node."""
    if not any(node.gpus for node in nodes):
        return []
    found = judge(Facts(nodes, group(nodes), ranks, profiles, QUICK)).findings
    return [each for each in found if each.severity in _WRONG]
