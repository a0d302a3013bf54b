"""NICs that the profile has and the machine has not, where the profile was asked for by name."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL for fewer RDMA ports, or slower ones, than the profile has.

    Only of a profile that was asked for: an HGX board says nothing of the NICs around it, and clouds have others.
    """
    for node, profile in zip(facts.nodes, facts.profiles, strict=False):
        if profile is None or profile.match.generic is not None or not facts.asked:
            continue
        wanted = [nic.rate_gbit_s or 0.0 for nic in profile.nic if nic.kind is not NicKind.ETHERNET]
        have = [nic.rate_gbit_s or 0.0 for nic in node.nics if nic.rdma]
        if not wanted or (len(have) >= len(wanted) and min(sorted(have)[-len(wanted) :]) >= min(wanted)):
            continue
        yield Finding(
            id="nic-below-profile",
            severity=Verdict.FAIL,
            subject=facts.subject(node),
            seen=f"{len(have)} RDMA ports of {_rates(have)}",
            expected=f"{len(wanted)} of {_rates(wanted)}, as profile {profile.name} has it",
            cause="a NIC that is gone, a cable of a lower rate, or another machine than the profile's",
            next_command="ibstat; lspci -d 15b3:",
        )


def _rates(rates: list[float]) -> str:
    return f"{', '.join(f'{rate:g}' for rate in sorted(set(rates)))} Gb/s" if rates else "any rate"


NIC_PROFILE = Check(
    "nic_profile", "as many RDMA ports, as fast, as the profile that was asked for has", find, without_gpus=True
)
