"""All conditions as a page: `python -m gpubench.conditions.catalogue > docs/conditions.md`."""

import sys
from collections.abc import Iterable

from gpubench.conditions.condition import Condition, Family, nothing_in_facts
from gpubench.conditions.policy import SEVERITIES
from gpubench.conditions.registry import FAMILIES

_HEAD = """\
# Conditions: everything that can be wrong, and why bytes go through host memory or are slow

Written by `python -m gpubench.conditions.catalogue`.

Every command uses the same list: `check`, `topo` and `p2p` report conditions as findings, `explain` finds those of a
log, and every report ends with the conditions that explain slow or host-staged paths. Each finding adds what was seen,
where, and the likely reason. `--evidence` and the JSON section `causes` add the confidence and what would settle a
doubt.

**Confidence.** *proven*: a setting, a refusal or a register shows it. *likely*: facts agree with it, and with little
else. *weak*: it is there and may matter; `topo` never predicts a fallback from a weak cause alone. The most certain
cause comes first, with its consequences below it. *By design* marks policies and hardware without a direct path: no
fault, verdict SKIP. Settings that gpubench makes are never blamed.

*Slows down* names the part of an operation that a condition makes slower. *Once* is an earlier id, which `gpubench
compare` still accepts.

## Severity

A condition has the same severity in every command, with the reason in parentheses. A cause without one is FAIL if it
prevents a direct path, and WARN if it slows one down. A condition is as severe as the worst of its consequences: a PCIe
link of a lower generation is WARN in `gpubench topo`, and FAIL once `gpubench p2p` measures slow copies.

*Drains* says that the [recipes](check.md#which-nodes-a-gate-drains) take a node with the condition out of service: its
hardware, driver or fabric is at fault. *Keeps* leaves it in service.

Words of DCGM are from its [table of errors](https://github.com/NVIDIA/DCGM/blob/master/dcgmlib/src/dcgm_errors.c)
(monitor: can work; triage; configuration; drain and reset; isolate: cannot work). AzNHC is
[Azure's node health checks](https://github.com/Azure/azurehpc-health-checks). NVML is
[its reference](https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html).
"""


def catalogue(families: Iterable[Family]) -> str:
    """Return the page: by family, what each condition means, how severe it is, what people see, and the cure."""
    parts = [_HEAD]
    for family in families:
        parts.append(f"## {family.title}\n")
        parts += map(_entry, family.conditions)
    return "\n".join(parts)


def _entry(condition: Condition) -> str:
    known = {"by design": condition.by_design, "log only": condition.look is nothing_in_facts}
    marks = ", ".join(mark for mark, holds in known.items() if holds)
    cure = ". ".join(filter(None, (_code(condition.cure.commands), condition.cure.comment)))
    sentences = (
        ("", f"{condition.title} ({marks})" if marks else condition.title),
        ("", _severity(condition)),
        ("Slows down ", ", ".join(condition.explains.slows)),
        ("Once ", _code(condition.aliases)),
    )
    text = " ".join(f"{label}{text}." for label, text in sentences if text)
    return f"### `{condition.id}`\n{text}\n\nCure: {cure.removesuffix('.')}. [Source]({condition.link})\n"


def _severity(condition: Condition) -> str:
    grade = SEVERITIES.get(condition.id)
    if grade is None:
        return ""
    reason = "; ".join(filter(None, (grade.source, grade.degrees)))
    return f"{grade.severity}, {'drains' if grade.drains else 'keeps'} ({reason})"


def _code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


if __name__ == "__main__":
    sys.stdout.write(catalogue(FAMILIES))
