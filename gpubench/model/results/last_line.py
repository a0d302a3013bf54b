"""The last line of a report, built within its length: `VERDICT: where, what, how much. Try: command`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpubench.model.terms.verdict import Origin, Verdict

MOST_CHARACTERS = 160
"""What a terminal, a chat and a monitoring system show of a line without cutting it."""

ALWAYS, SOON, LATER, LAST = range(4)
"""How important a part is: what is always said comes before the command, the rest after it."""


@dataclass(frozen=True, slots=True)
class LinePart:
    """A part of the line: its wordings, the fullest first, and how important it is."""

    wordings: tuple[str, ...]
    importance: int = ALWAYS


def part(*wordings: str, importance: int = ALWAYS) -> LinePart:
    """A part with these wordings; those that are empty count for nothing."""
    clean = (" ".join(each.replace("; ", ", ").split()).rstrip(".,:; ") for each in wordings)
    return LinePart(tuple(filter(None, clean)), importance)


def last_line(verdict: Verdict, origin: str, parts: Sequence[LinePart], command: str = "") -> str:
    """The line of these parts, in their order.

    A part has its fullest wording that fits, the most important part first. What does not fit is left out: no part and
    no command is cut, except a first part that is too long by itself, which ends after a word.
    """
    word = f"{verdict} (simulated)" if origin == Origin.SIMULATED else str(verdict)
    parts = [each for each in parts if each.wordings]
    chosen = {index: each.wordings[-1] for index, each in enumerate(parts) if each.importance == ALWAYS}

    def line(chosen: dict[int, str]) -> str:
        said = ", ".join(chosen[index] for index in sorted(chosen))
        return f"{word}: {said}" + (f". Try: {command}" if command else "") if said else word

    if len(line(chosen)) > MOST_CHARACTERS:
        command = ""
    for index in sorted(range(len(parts)), key=lambda each: parts[each].importance):
        for wording in parts[index].wordings:
            if len(line({**chosen, index: wording})) <= MOST_CHARACTERS:
                chosen[index] = wording
                break
    return _shortened(line(chosen))


def _shortened(line: str) -> str:
    if len(line) <= MOST_CHARACTERS:
        return line
    return line[: MOST_CHARACTERS - 1].rpartition(" ")[0].rstrip(",:") + " …"


_PLACEHOLDER = re.compile(
    r"\b(PID|BUSID|BUS_ID|GPU|DEVICE|INTERFACE|DIR|DIRECTORY|FILE|HOST|NAME|PROGRAM|RESULT|LOG|OLD|NEW|I-J\S*)(?![-\w])"
    r"|\.\.\.|…"
)
_PROSE = re.compile(r"[A-Z](?![A-Z0-9_]*=)")
_NEXT_SENTENCE = re.compile(r"\. (?=[^a-z])")


def first_command(advice: str) -> str:
    """The command that an advice begins with; empty where it has none, or one that nobody can type as it stands.

    Advice is a command, or a command and sentences after it, or sentences alone: those begin with a capital letter.
    """
    if _PROSE.match(advice):
        return ""
    command = _NEXT_SENTENCE.split(advice, maxsplit=1)[0].rstrip(".")
    return "" if _PLACEHOLDER.search(command) else command
