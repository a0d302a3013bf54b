"""Machines that have less than healthy ones of their type, all GPUs alike, so that siblings do not tell."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.snapshot import GpuFacts
from gpubench.model.paths.links import active_links, pcie_gb_s
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL for links that the machine's profile has and no GPU of this model here; none without a profile."""
    for node, profile in zip(facts.nodes, facts.profiles, strict=False):
        if profile is None or profile.match.generic is not None:
            continue
        most = max((active_links(gpu) or 0 for gpu in node.gpus), default=0)
        for gpu in node.gpus:
            for seen, expected in _shortfalls(gpu, most, profile):
                yield Finding(
                    id="below-profile",
                    severity=Verdict.FAIL,
                    subject=facts.subject(node, gpu),
                    seen=seen,
                    expected=f"{expected}, as profile {profile.name} has it",
                    cause="a setting that limits the links (NVreg_NvLinkDisable, NVreg_RmNvlinkBandwidth, the slot's "
                    "generation in the BIOS), or another machine than the profile's",
                    next_command="grep -i nvlink /proc/driver/nvidia/params; nvidia-smi nvlink -s",
                )


def _shortfalls(gpu: GpuFacts, most: int, profile: Profile) -> Iterator[tuple[str, str]]:
    """What all GPUs lack; what only some of them lack is said by the checks that compare siblings."""
    if profile.nvlink is not None and active_links(gpu) == most < profile.nvlink.links:
        yield f"{most} NVLinks active on every GPU", f"{profile.nvlink.links} NVLinks"
    link = gpu.pcie
    reaches = pcie_gb_s(link.max_generation, link.max_width)
    if reaches is not None and reaches < profile.gpu.pcie_gb_s:
        expected = f"{profile.gpu.pcie_generation} x{profile.gpu.pcie_width}"
        yield f"PCIe at most {link.max_generation} x{link.max_width}", f"PCIe {expected}"


PROFILE = Check("profile", "links are as many and as fast as on healthy machines of this type", find)
