"""GPUs that are slowed down to protect themselves."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.terms.verdict import Finding, Verdict

HARMFUL = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake")
"""Reasons that mean trouble; a power cap is how a busy GPU runs."""


def find(facts: Facts) -> Iterator[Finding]:
    """A warning for a GPU that is throttled by heat or power supply."""
    for node in facts.nodes:
        for gpu in node.gpus:
            reasons = [reason for reason in gpu.throttle_reasons or () if reason in HARMFUL]
            if reasons:
                yield Finding(
                    id="gpu-throttled",
                    severity=Verdict.WARN,
                    subject=facts.subject(node, gpu),
                    seen=f"clocks are lowered: {', '.join(reasons).replace('_', ' ')}",
                    expected="no slowdown by heat or power",
                    cause="cooling, or the power supply's brake signal",
                    next_command="nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
                )


THROTTLE = Check("throttle", "no GPU is slowed down by heat or power supply", find)
