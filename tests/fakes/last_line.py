"""What holds of the last line of every report."""

import re

from gpubench.model.results.last_line import MOST_CHARACTERS, first_command

LINE = re.compile(r"(PASS|WARN|FAIL|SKIP|ERROR|INCONCLUSIVE)( \(simulated\))?: \S")
AGAIN = "measure again, add --new AGAIN.json"
"""The one advice that is no command: of a comparison, which needs a run that is still to be made."""


def is_well_formed(line: str) -> bool:
    """One line, short enough, with a verdict in front, nothing glued on, and a whole command at its end or none."""
    said, _, command = line.partition(". Try: ")
    whole = not command or command == AGAIN or first_command(command) == command
    glued = "; " in line or "Try:" in said
    return line.isprintable() and len(line) <= MOST_CHARACTERS and bool(LINE.match(line)) and whole and not glued
