"""What ended a job, as its log shows it: the first reason, and what followed from it."""

from dataclasses import replace

from gpubench.conditions.definition.complaints import Complained
from gpubench.conditions.registry import CONDITIONS
from gpubench.model.paths.nccl_log import LogFacts
from gpubench.model.terms.verdict import Finding, gravity


def failures_of(facts: LogFacts) -> tuple[Finding, ...]:
    """The findings on what ended the job: special reasons, else the first of the general ones, with the rest below.

    A complaint is of one condition, the first whose it is.
    """
    special, general = list[Finding](), list[Finding]()
    for condition in sorted(CONDITIONS, key=lambda each: each.general):
        found = list(condition.findings_in_log(facts))
        (general if condition.general else special).extend(found)
        if found and isinstance(condition.in_job, Complained):
            facts = condition.in_job.without(facts)
    reasons, others = (special, general) if special else (general[:1], general[1:])
    if not reasons:
        return ()
    lines = tuple(f"{each.id}: {each.seen}" for each in others)
    worst = min((each.severity for each in (*special, *general)), key=gravity)
    # What is a doubt by itself is the reason where the job failed of nothing else that is known.
    return (replace(reasons[0], severity=worst, consequences=lines), *reasons[1:])
