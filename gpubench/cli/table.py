"""The commands, in the order of --help, with a command for each collective."""

from gpubench.collectives.registry import SUMMARIES
from gpubench.model.terms.commands import AFTER_COLLECTIVES, BEFORE_COLLECTIVES, COLLECTIVE

COMMANDS = (
    *BEFORE_COLLECTIVES,
    *(COLLECTIVE._replace(name=name, summary=summary) for name, summary in SUMMARIES.items()),
    *AFTER_COLLECTIVES,
)
