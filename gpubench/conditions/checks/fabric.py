"""The NVLink fabric's own opinion of each GPU."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.facts.fabric_health import decode_health, describe_health
from gpubench.model.facts.snapshot import Fabric
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """FAIL for a GPU that has not joined its fabric, or whose fabric reports a fault."""
    for node in facts.nodes:
        for gpu in node.gpus:
            trouble = "" if gpu.fabric is None else _trouble(gpu.fabric)
            if trouble:
                yield Finding(
                    id="fabric-not-ready",
                    severity=Verdict.FAIL,
                    subject=facts.subject(node, gpu),
                    seen=trouble,
                    expected="state completed, status success, no bad health bit",
                    cause="the fabric manager is not running or is of another version than the driver; links may be "
                    "active all the same, and peer access is refused",
                    next_command="systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A 12 Fabric",
                )


def _trouble(fabric: Fabric) -> str:
    if fabric.state in (None, "not_supported"):
        return ""
    said = []
    if fabric.state != "completed":
        said.append(f"fabric state {str(fabric.state).replace('_', ' ')}")
    if fabric.status not in (None, "success"):
        said.append(f"status {fabric.status}")
    if fabric.health_mask is not None and any(decode_health(fabric.health_mask).values()):
        said.append(f"health: {describe_health(fabric.health_mask)}")
    return ", ".join(said)


FABRIC = Check("fabric", "every GPU has joined its NVLink fabric, which is healthy", find)
