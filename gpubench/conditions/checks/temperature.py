"""GPUs that are hotter than their siblings."""

from collections.abc import Iterator
from statistics import median

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.terms.verdict import Finding, Verdict

MOST_ABOVE_SIBLINGS_C = 20
"""Idle GPUs of one server differ by some 10 °C from the first to the last in the air."""

HOT_C = 85
"""Below the slowdown of data centre GPUs, 87 to 93 °C (nvidia-smi -q -d TEMPERATURE)."""


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for a GPU far above the middle of its siblings, or near its slowdown."""
    for node in facts.nodes:
        for gpu in node.gpus:
            if gpu.temperature_c is None:
                continue
            others = [each.temperature_c for each in node.gpus if each.temperature_c is not None and each is not gpu]
            usual = median(others) if others else gpu.temperature_c
            above = gpu.temperature_c - usual
            if above > MOST_ABOVE_SIBLINGS_C or gpu.temperature_c >= HOT_C:
                yield Finding(
                    id="gpu-hot",
                    severity=Verdict.WARN,
                    subject=facts.subject(node, gpu),
                    seen=f"{gpu.temperature_c} °C",
                    expected=f"about {usual:g} °C, as its siblings have" if above > 0 else f"below {HOT_C} °C",
                    cause="a fan, a cold plate or its paste, a blocked duct; or it alone is at work",
                    next_command="nvidia-smi -q -d TEMPERATURE,PERFORMANCE -i INDEX",
                )


TEMPERATURE = Check("temperature", "no GPU is much hotter than its siblings", find)
