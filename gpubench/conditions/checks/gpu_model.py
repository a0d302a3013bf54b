"""GPUs of a model that the machine should not have, or not beside others."""

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.units import counted
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL for another number or model than a profile that was asked for; a warning for the odd model among siblings.

    And a warning where no profile names the GPUs: shares of limits and siblings judge them, and that is less.
    """
    for node, profile in zip_longest(facts.nodes, facts.profiles[: len(facts.nodes)]):
        if profile is not None and profile.match.generic is not None and not facts.asked and node.gpus:
            yield _unknown(facts, node, profile)
        if profile is not None and profile.match.generic is None and facts.asked:
            yield from _other_than_asked(facts, node, profile)
        usual = Counter(gpu.name for gpu in node.gpus if gpu.name).most_common(1)
        for gpu in node.gpus:
            if gpu.name and gpu.name != usual[0][0]:
                yield _finding(facts.subject(node, gpu), Verdict.WARN, gpu.name, f"{usual[0][0]}, as its siblings are")


def _other_than_asked(facts: Facts, node: Topology, profile: Profile) -> Iterator[Finding]:
    expected = f"{counted(profile.match.visible, 'GPU')}, as profile {profile.name} has it"
    if len(node.gpus) != profile.match.visible:
        yield _finding(facts.subject(node), Verdict.FAIL, counted(len(node.gpus), "GPU"), expected)
    for gpu in node.gpus:
        if gpu.name and gpu.name not in profile.match.gpus:
            yield _finding(facts.subject(node, gpu), Verdict.FAIL, gpu.name, " or ".join(profile.match.gpus))


def _finding(subject: str, severity: Verdict, seen: str, expected: str) -> Finding:
    return Finding(
        id="gpu-model",
        severity=severity,
        subject=subject,
        seen=seen,
        expected=expected,
        cause="another machine than was thought, a GPU that was replaced by another model, or one that is gone",
        next_command="nvidia-smi -L; gpubench profiles match",
    )


def _unknown(facts: Facts, node: Topology, profile: Profile) -> Finding:
    names = ", ".join(sorted({gpu.name or "?" for gpu in node.gpus}))
    return Finding(
        id="profile-unknown",
        severity=Verdict.WARN,
        subject=facts.subject(node),
        seen=f"no profile names {len(node.gpus)} of {names}",
        expected="a profile of this machine: only siblings and shares of the limits judge it without one",
        cause=f"profile {profile.name} stands in",
        next_command="gpubench profiles learn RESULT... on healthy machines, then check --profile FILE",
    )


GPU_MODEL = Check("gpu_model", "GPUs are of one model, and of the profile's", find)
