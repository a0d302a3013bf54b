"""All conditions as a page: `python -m gpubench.conditions.catalogue > docs/conditions.md`."""

import sys
from collections.abc import Iterable

from gpubench.conditions.definition.condition import Condition, Family, nothing_in_facts
from gpubench.conditions.definition.policy import SEVERITIES
from gpubench.conditions.registry import FAMILIES

_HEAD = """\
# Conditions: everything that can be wrong, and why bytes go through host memory or are slow

Written by `python -m gpubench.conditions.catalogue`; `tests/test_docs.py` keeps it equal to the code.

Each condition has one id, one detector and one cure, whoever reports it. Those with a *check* are findings of
`gpubench check`, and some of them of `gpubench topo`. Those that *explain* something are causes: every command ends
with what explains the paths that it saw, by the condition's id, how sure it is, and the cure. `--evidence` shows all
that hold, JSON has them in the section `causes`, and `gpubench topo --causes` looks for them before anything is
measured, and says of which it could not be known, and why. `gpubench explain` finds those that a log shows (*log*
below). A condition without a check that takes a direct path away is a finding of `topo` and `check` all the same.

**Confidence.** *proven*: a setting, a refusal or a register says it. *likely*: facts agree with it and little else.
*weak*: it is there and may matter; a weak cause alone never makes `topo` expect a fallback. The surest come first; of
equally sure ones a refusal by the machine before a setting, since a setting is often somebody's answer to it, and the
special before the general. What follows from another cause is listed below it (*implies*). *By design* are policies
and hardware without a direct path: no fault, verdict SKIP; where there is something to override, the cure is the A/B
run that shows whether it pays. What gpubench sets itself is never blamed.

*Slows down* says of which part of a slow operation a condition is the cause; without it, of any. Rows of a small size
are held against those of launches first, those of a large size against those of the links that carry them.

*Seen as* is what programs print where a condition holds, from their documentation, source and published reports; other
conditions may have them print the same. *Found by* is what gpubench looks at. *Once* are ids that reports of earlier
versions have; `gpubench compare` takes them for the same.

The fallbacks by variables, separate /dev/shm and NCCL_HOSTID were provoked on four H200s, from which the logs in
tests/logs come; this catalogue itself was checked on recorded and simulated machines, on logs and on trees of files,
not on hardware that has what it names.
"""

_SEVERITY_HEAD = """\
## Severity

A condition has one severity, in every command. `gpubench check`, the prolog and node gates of
[recipes](recipes/README.md), `--exit-style` and JUnit follow it: FAIL and ERROR drain a node (exit code 1 and 3), WARN
keeps it in service (exit code 0, and 1 with `--strict`). A finding that a condition explains is as grave as the
condition, or as the figure where that is graver. A cause without a row is FAIL where it takes a direct path away, and
WARN where it makes a path slower.

Sources: DCGM's words are those of its [table of errors](https://github.com/NVIDIA/DCGM/blob/master/dcgmlib/src/dcgm_errors.c)
(monitor: can work; triage; configuration; drain and reset; isolate: cannot work); AzNHC is
[Azure's node health checks](https://github.com/Azure/azurehpc-health-checks); NVML is
[its reference](https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html). A row without one of them
says gpubench's own reason.

| condition | severity | a gate | source | other severities |
|---|---|---|---|---|"""


def catalogue(families: Iterable[Family]) -> str:
    """The page, by family: each condition with what people see, how it is found, what settles a doubt, and the cure."""
    families = tuple(families)
    parts = [_HEAD, *_severities(each for family in families for each in family.conditions)]
    for family in families:
        parts.append(f"## {family.title}\n")
        parts += map(_entry, family.conditions)
    return "\n".join(parts)


_GRAVEST_FIRST = ("FAIL", "ERROR", "WARN", "SKIP")
_GATE = {True: "drains", False: "keeps"}


def _severities(conditions: Iterable[Condition]) -> list[str]:
    """The table of severities, the gravest first."""
    graded = [each for each in conditions if each.id in SEVERITIES]
    graded.sort(key=lambda each: _GRAVEST_FIRST.index(SEVERITIES[each.id].severity))
    rows = [
        f"| {' | '.join((f'`{each.id}`', grade.severity, _GATE[grade.drains], grade.source, grade.degrees))} |"
        for each in graded
        for grade in (SEVERITIES[each.id],)
    ]
    return [_SEVERITY_HEAD, *rows, ""]


def _severity(condition: Condition) -> str:
    grade = SEVERITIES.get(condition.id)
    return "" if grade is None else "; ".join(filter(None, (grade.severity, grade.degrees)))


def _entry(condition: Condition) -> str:
    known = {"by design": condition.by_design, "log": condition.in_log is not None}
    marks = [mark for mark, holds in known.items() if holds]
    if condition.look is nothing_in_facts:
        marks.append("log alone")
    lines = {
        "check": f"`{condition.check}`" if condition.check else "",
        "severity": _severity(condition),
        "seen as": ", ".join(f"`{each}`" for each in condition.seen_as),
        "explains": "; ".join(condition.effects),
        "slows down": ", ".join(condition.explains.slows),
        "found by": condition.detection,
        "likely": condition.likely,
        "settled by": condition.settles,
        "cure": condition.cure,
        "implies": ", ".join(f"`{each}`" for each in condition.implies),
        "once": ", ".join(f"`{each}`" for each in condition.aliases),
        "see": f"<{condition.link}>"
        if condition.link.startswith("https:")
        else f"[{condition.link}]({condition.link})",
    }
    title = f"**{condition.title}**" + (f" ({', '.join(marks)})" if marks else "")
    shown = [f"- *{name}*: {text}" for name, text in lines.items() if text]
    return "\n".join([f"### `{condition.id}`", title, "", *shown, ""])


if __name__ == "__main__":
    sys.stdout.write(catalogue(FAMILIES))
