"""The number of GPUs that every node of a collective has, beside the one that was asked for."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpubench.errors import no_gpu
from gpubench.jobs.plans import CollectivePlan
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import overall

if TYPE_CHECKING:
    from gpubench.model.paths.topology import Topology
    from gpubench.model.results.report import Report

_LOST = ("gpu-lost", "gpu-missing")


def gpus_by_host(identities: Sequence[RankIdentity], listed: Sequence[int]) -> dict[str, int]:
    """GPUs by host: as many as the driver lists to any of its ranks, or as they drive where each is shown its own."""
    found: dict[str, int] = {}
    for identity, gpus in zip(identities, listed, strict=True):
        driven = {each.gpu_uuid for each in identities if each.host == identity.host and each.gpu_uuid}
        found[identity.host] = max(found.get(identity.host, 0), gpus, len(driven))
    return found


def check_any(listed: Sequence[int], plan: CollectivePlan) -> None:
    """Raise CouldNotMeasureError where GPUs were asked for and no rank sees one."""
    if plan.expected_gpus is not None and not any(listed):
        raise no_gpu(f"--expect-gpus says {plan.expected_gpus}, and there is none", for_what="--expect-gpus")


def with_presence(report: "Report", nodes: Sequence["Topology"], plan: CollectivePlan) -> "Report":
    """The report with findings on GPUs of the nodes that are lost, or missing beside their siblings or a profile."""
    from gpubench.conditions.checks import on_presence
    from gpubench.conditions.definition.circumstances import Facts
    from gpubench.model.paths.nodes import group
    from gpubench.profiles import profiles_for

    asked = plan.profile is not None
    matches = profiles_for(nodes, os.environ, plan.profile)
    profiles = [None if each is None else each.profile for each in matches]
    found = on_presence(Facts(nodes, group(nodes), profiles=profiles, asked=asked))
    graver = [each for each in found if each.id in _LOST]
    verdict = overall([report.verdict, *(each.severity for each in graver)])
    return replace(report, verdict=verdict, findings=(*report.findings, *graver))


def with_gpu_count(report: "Report", gpus: Mapping[str, int], plan: CollectivePlan) -> "Report":
    """The report with a finding on the hosts that have fewer or more GPUs than were asked for."""
    if plan.expected_gpus is None:
        return report
    from gpubench.conditions.checks import on_count

    found = on_count(gpus, plan.expected_gpus)
    verdict = overall([report.verdict, *(each.severity for each in found)])
    return replace(report, verdict=verdict, findings=(*report.findings, *found))
