"""GPUs whose clocks may not go as high as those of their siblings."""

from collections import Counter
from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for another highest clock than GPUs of the same model have, over all nodes."""
    every = [gpu for node in facts.nodes for gpu in node.gpus if gpu.most_clock_mhz]
    tally = {
        name: Counter(gpu.most_clock_mhz for gpu in every if gpu.name == name).most_common(1)[0][0]
        for name in {gpu.name for gpu in every}
    }
    for node in facts.nodes:
        for gpu in node.gpus:
            usual = tally.get(gpu.name)
            if gpu.most_clock_mhz and usual and gpu.most_clock_mhz < usual:
                yield Finding(
                    id="clock-limited",
                    severity=Verdict.WARN,
                    subject=facts.subject(node, gpu),
                    seen=f"at most {gpu.most_clock_mhz} MHz",
                    expected=f"{usual} MHz, as GPUs of its model have",
                    cause="another VBIOS or power limit",
                    next_command="nvidia-smi -q -d CLOCK,POWER -i INDEX; nvidia-smi -q | grep VBIOS",
                )


CLOCKS = Check("clocks", "GPUs of one model have the same highest clock", find)
