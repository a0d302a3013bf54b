"""What could not be measured: neither healthy nor faulty."""

from collections.abc import Iterator

from gpubench.conditions.checks.check import Check, Facts
from gpubench.model.terms.verdict import Finding, Verdict


def find(facts: Facts) -> Iterator[Finding]:
    """ERROR for every copy that failed, and for what was to be measured and was not."""
    yield from (each for each in facts.measurements.findings if each.severity is Verdict.ERROR)
    for need, reason in facts.measurements.failed.items():
        yield Finding(
            id="not-measured",
            severity=Verdict.ERROR,
            subject=str(need),
            seen=reason,
            expected=f"{need}, measured",
            cause="the driver, a library or a rank kept it from happening: that says nothing of the links",
            next_command="gpubench allreduce, or gpubench p2p, shows it alone",
        )


MEASURED = Check("measured", "all that was to be measured was", find, without_gpus=True)
