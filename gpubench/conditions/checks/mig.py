"""GPUs that are split into instances."""

from collections.abc import Iterator
from itertools import zip_longest

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for MIG that is on where the profile or a sibling has it off: the driver then offers no peer access."""
    for node, profile in zip_longest(facts.nodes, facts.profiles[: len(facts.nodes)]):
        by_profile = profile is not None and profile.match.generic is None and profile.gpu.mig is False
        sibling = any(gpu.mig is False for gpu in node.gpus)
        for gpu in node.gpus:
            if gpu.mig and (by_profile or sibling):
                yield Finding(
                    id="mig-on",
                    severity=Verdict.WARN,
                    subject=facts.subject(node, gpu),
                    seen="MIG is on",
                    expected="off, as its siblings have it" if sibling else "off, as the profile has it",
                    cause="somebody split it; its instances reach no other GPU but through host memory",
                    next_command="nvidia-smi -i INDEX -mig 0, where it should be whole",
                )


MIG = Check("mig", "no GPU is split that should be whole", find)
