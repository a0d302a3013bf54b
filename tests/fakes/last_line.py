"""What the last line of every report must satisfy."""

import re

from gpubench.model.results.ending import MOST_CHARACTERS

LINE = re.compile(r"(PASS|WARN|FAIL|SKIP|ERROR|INCONCLUSIVE)( \(simulated\))?: \S")
_PROSE = re.compile(r", | (a|after|again|an|and|as|because|before|if|it|of|or|the|then|to|which|with)( |$)")
"""Words that no command has outside of quotes"""


def is_well_formed(line: str) -> bool:
    """True for one short line that begins with a verdict, and ends with a complete command or none."""
    said, _, command = line.partition(". Try: ")
    bare = re.sub(r"'[^']*'", "", command)
    whole = not command or not (_PROSE.search(bare) or (command[0].isupper() and "=" not in command.split()[0]))
    glued = "; " in said or "Try:" in said
    return line.isprintable() and len(line) <= MOST_CHARACTERS and bool(LINE.match(line)) and whole and not glued


def is_command(line: str) -> bool:
    """True for a table line that is a command or continues one. It is not wrapped, so that it can be copied."""
    return line.startswith(("  try:      ", " " * 12))
