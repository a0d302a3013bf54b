"""What holds of the last line of every report."""

import re

from gpubench.model.results.ending import MOST_CHARACTERS, first_command

LINE = re.compile(r"(PASS|WARN|FAIL|SKIP|ERROR|INCONCLUSIVE)( \(simulated\))?: \S")
AGAIN = "Measure again, add --new AGAIN.json"
"""The one advice that is no command: of a comparison, which needs a run that is still to be made."""
_PROSE = re.compile(r", | (a|after|again|an|and|as|because|before|if|it|of|or|the|then|to|which|with)( |$)")
"""What no command has outside of its quotes."""


def is_well_formed(line: str) -> bool:
    """One line, short enough, with a verdict in front, nothing glued on, and a whole command at its end or none."""
    said, _, command = line.partition(". Try: ")
    bare = re.sub(r"'[^']*'", "", command)
    whole = not command or command == AGAIN or (first_command(command) == command and not _PROSE.search(bare))
    glued = "; " in said or "Try:" in said
    return line.isprintable() and len(line) <= MOST_CHARACTERS and bool(LINE.match(line)) and whole and not glued
