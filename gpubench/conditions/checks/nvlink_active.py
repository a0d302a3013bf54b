"""NVLinks that are down."""

from collections import Counter
from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.snapshot import GpuFacts, NvlinkPeer
from gpubench.model.paths.links import active_links
from gpubench.model.paths.topology import Topology
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL for a GPU with fewer active NVLinks than its siblings, or none where there are NVSwitches.

    Judged against siblings and not against the number of links a chip has: 12 of 18 are all there is on an H100 NVL.
    A GPU without any, whose siblings are joined by bridges, may just have no bridge: that is a warning.
    """
    for node in facts.nodes:
        counts = {gpu.index: active_links(gpu) for gpu in node.gpus}
        for gpu in node.gpus:
            active = counts[gpu.index]
            if active is None:
                continue
            siblings = [counts[each.index] for each in node.gpus if each.name == gpu.name]
            usual = _usual([count for count in siblings if count is not None])
            switched = bool(node.snapshot.nvswitches) or (gpu.fabric is not None and gpu.fabric.state == "completed")
            if active < usual or (active == 0 and gpu.nvlinks and switched):
                bridged = any(link.peer is NvlinkPeer.GPU for each in node.gpus for link in each.nvlinks or ())
                severity = Verdict.WARN if active == 0 and bridged else Verdict.FAIL
                yield _finding(facts, node, gpu, severity, f"{usual}, as its siblings have" if usual > active else "")


def _finding(facts: Facts, node: Topology, gpu: GpuFacts, severity: Verdict, expected: str) -> Finding:
    active = active_links(gpu)
    down = [str(link.number) for link in gpu.nvlinks or () if link.active is False]
    return Finding(
        id="nvlink-down",
        severity=severity,
        subject=facts.subject(node, gpu),
        seen=f"{active} NVLinks active; down: link {', '.join(down)}" if down else f"{active} NVLinks active",
        expected=expected or f"all {len(gpu.nvlinks or ())}",
        cause="this GPU has no bridge, or one that is not seated"
        if severity is Verdict.WARN
        else "a bridge or board not seated, a failed link (Xid 74), or a setting (NVreg_NvLinkDisable, "
        "NVreg_RmNvlinkBandwidth)",
        next_command="nvidia-smi nvlink -s, then nvidia-smi nvlink -e; dmesg | grep 'Xid.*74'",
    )


def _usual(counts: list[int]) -> int:
    """The most frequent count; between equally frequent ones the larger."""
    tally = Counter(counts)
    return max(tally, key=lambda count: (tally[count], count))


NVLINK_ACTIVE = Check("nvlink_active", "as many NVLinks are active as on sibling GPUs", find)
