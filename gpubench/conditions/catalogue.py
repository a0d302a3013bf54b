"""The catalogue of causes as a page: `python -m gpubench.conditions.catalogue > docs/causes.md`."""

import sys
from collections.abc import Iterable

from gpubench.conditions import FAMILIES
from gpubench.conditions.cause import Cause, Family, nothing_in_facts

_HEAD = """\
# Causes: why bytes go through host memory, or are slow

Written by `python -m gpubench.conditions.catalogue`; `tests/test_docs.py` keeps it equal to the code.

Every command ends with what explains the paths that it saw: the cause's id, how sure it is, and the cure.
`--evidence` shows all that hold, JSON has them in the section `causes`, and `gpubench topo --causes` looks for them
before anything is measured, and says of which it could not be known, and why. `gpubench explain` finds those that a
log shows (*log* below).

**Confidence.** *proven*: a setting, a refusal or a register says it. *likely*: facts agree with it and little else.
*weak*: it is there and may matter; a weak cause alone never makes `topo` expect a fallback. The surest come first; of
equally sure ones a refusal by the machine before a setting, since a setting is often somebody's answer to it, and the
special before the general. What follows from another cause is listed below it (*implies*). *By design* are policies
and hardware without a direct path: no fault, verdict SKIP; where there is something to override, the cure is the A/B
run that shows whether it pays. What gpubench sets itself is never blamed.

*Seen as* is what programs print where a cause holds, from their documentation, source and published reports; other
causes may have them print the same. *Found by* is what gpubench looks at.

The fallbacks by variables, separate /dev/shm and NCCL_HOSTID were provoked on four H200s, from which the logs in
tests/logs come; this catalogue itself was checked on recorded and simulated machines, on logs and on trees of files,
not on hardware that has what it names.
"""


def catalogue(families: Iterable[Family]) -> str:
    """The page, by family: each cause with what people see, how it is found, what settles a doubt, and the cure."""
    parts = [_HEAD]
    for family in families:
        parts.append(f"## {family.title}\n")
        parts += map(_entry, family.causes)
    return "\n".join(parts)


def _entry(cause: Cause) -> str:
    marks = [mark for mark, holds in (("by design", cause.by_design), ("log", cause.in_log is not None)) if holds]
    if cause.look is nothing_in_facts:
        marks.append("log alone")
    lines = [
        f"### `{cause.id}`",
        f"**{cause.title}**" + (f" ({', '.join(marks)})" if marks else ""),
        "",
        *([f"- *seen as*: {', '.join(f'`{each}`' for each in cause.seen_as)}"] if cause.seen_as else []),
        f"- *explains*: {'; '.join(cause.effects)}",
        f"- *found by*: {cause.detection}",
        f"- *settled by*: {cause.settles}",
        f"- *cure*: {cause.cure}",
    ]
    if cause.implies:
        lines.append(f"- *implies*: {', '.join(f'`{each}`' for each in cause.implies)}")
    return "\n".join([*lines, f"- *see*: <{cause.link}>", ""])


if __name__ == "__main__":
    sys.stdout.write(catalogue(FAMILIES))
