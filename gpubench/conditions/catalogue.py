"""All conditions as a page: `python -m gpubench.conditions.catalogue > docs/conditions.md`."""

import sys
from collections.abc import Iterable

from gpubench.conditions.definition.condition import Condition, Family, nothing_in_facts
from gpubench.conditions.definition.policy import SEVERITIES
from gpubench.conditions.registry import FAMILIES

_HEAD = """\
# Conditions: everything that can be wrong, and why bytes go through host memory or are slow

Written by `python -m gpubench.conditions.catalogue`; `tests/test_docs.py` keeps it equal to the code.

Every command uses the same list. A condition with a *check* is a finding of `gpubench check`, and some are findings of
`gpubench topo` too. `p2p` and collectives report what fails in `topo`. A condition that *explains* something is a
cause: each command ends with the causes of the paths it saw, with id, confidence and cure. `--evidence` shows all
causes, JSON has them in the section `causes`, and `gpubench topo --causes` predicts them before anything is measured.
`gpubench explain` finds those marked *log*.
A condition without a check that prevents a direct path is still a finding of `topo` and `check`.

**Confidence.** *proven*: a setting, a refusal or a register shows it. *likely*: facts agree with it, and with little
else. *weak*: it is there and may matter; `topo` never predicts a fallback from a weak cause alone. The most certain
cause comes first; between equally certain ones a refusal by the machine comes before a setting, since a setting is
often an answer to it. Consequences of another cause stand below it (*implies*). *By design* marks policies and hardware
without a direct path: no fault, verdict SKIP. Where they can be overridden, the cure is the run that shows whether that
pays. Settings that gpubench makes are never blamed.

*Slows down* names the part of an operation that a condition makes slower; without it, any part. Small sizes are
explained by causes of slow launches first, large sizes by causes of slow links.

*Seen as* is what programs print when the condition holds, from documentation, source code and published reports; other
conditions may print the same. *Found by* is what gpubench examines. *Once* lists ids from earlier versions, which
`gpubench compare` still accepts.

The fallbacks caused by variables, a separate /dev/shm and NCCL_HOSTID were provoked on four H200s, where the logs in
tests/logs come from. The rest was checked on recorded and simulated machines, logs and file trees, not on faulty
hardware.
"""

_SEVERITY_HEAD = """\
## Severity

A condition has the same severity in every command. `gpubench check`, `--exit-style` and JUnit follow it. What a
condition explains is listed below it, as its consequences, and the condition is as severe as the worst of them. For
example, a PCIe link of a lower generation is WARN in `gpubench topo`, and FAIL once `gpubench p2p` measures slow
copies. A cause that is not listed is FAIL if it prevents a direct path, and WARN if it slows one down.

*A gate* says whether the [recipes](check.md#which-nodes-a-gate-drains) take a node with the condition out of service.
A FAIL, or an ERROR of the driver, drains the node if its hardware, driver or fabric is at fault. WARN, faults of a job
and causes that are not listed keep it. So does an ERROR because something could not be measured. A FAIL in the last
column drains as well.

Sources: DCGM's words are from its [table of errors](https://github.com/NVIDIA/DCGM/blob/master/dcgmlib/src/dcgm_errors.c)
(monitor: can work; triage; configuration; drain and reset; isolate: cannot work); AzNHC is
[Azure's node health checks](https://github.com/Azure/azurehpc-health-checks); NVML is
[its reference](https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html). Other rows give gpubench's
own reason.

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


_GRAVEST_FIRST = ("FAIL", "ERROR", "INCONCLUSIVE", "WARN", "SKIP")
_GATE = {True: "drains", False: "keeps"}


def _severities(conditions: Iterable[Condition]) -> list[str]:
    graded = [each for each in conditions if each.id in SEVERITIES]
    graded.sort(key=lambda each: _GRAVEST_FIRST.index(SEVERITIES[each.id].severity))
    rows = [
        f"| {' | '.join((f'`{each.id}`', grade.severity, _GATE[grade.drains], grade.source, grade.degrees))} |"
        for each in graded
        for grade in (SEVERITIES[each.id],)
    ]
    return [_SEVERITY_HEAD, *rows, ""]


def _entry(condition: Condition) -> str:
    known = {"by design": condition.by_design, "log": condition.in_log is not None}
    marks = [mark for mark, holds in known.items() if holds]
    if condition.look is nothing_in_facts:
        marks.append("log alone")
    grade = SEVERITIES.get(condition.id)
    lines = {
        "check": f"`{condition.check}`" if condition.check else "",
        "severity": "" if grade is None else "; ".join(filter(None, (grade.severity, grade.degrees))),
        "seen as": ", ".join(f"`{each}`" for each in condition.seen_as),
        "explains": "; ".join(condition.effects),
        "slows down": ", ".join(condition.explains.slows),
        "found by": condition.detection,
        "likely": condition.likely,
        "settled by": condition.settles,
        "cure": ". ".join(
            filter(None, (", ".join(f"`{each}`" for each in condition.cure.commands), condition.cure.comment))
        ),
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
