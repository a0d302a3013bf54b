"""The words that the shell completes the value of an option with; imported when it asks for them."""

import os
from collections.abc import Iterable, Sequence
from itertools import islice

from gpubench.formats.exit_style import ExitStyle
from gpubench.formats.presentation import Color
from gpubench.formats.registry import FORMATS
from gpubench.profiles.files import names, own_folder
from gpubench.profiles.limits import MOST_FILES

_SEVERAL = ("dtype", "op", "algo", "proto", "backend", "partner")
"""Options that take several words with commas between."""


def words_for(option: str, incomplete: str) -> list[str]:
    """The values of an option, `dtype`, that continue a text; of several with commas, of the last one."""
    before, comma, last = incomplete.rpartition(",") if option in _SEVERAL else ("", "", incomplete)
    given = before.split(",")
    words = (each for each in _words(option) if each.startswith(last) and each not in given)
    return [f"{before}{comma}{word}" for word in words]


def _words(option: str) -> Iterable[str]:
    if option == "simulate":
        return names()
    if option == "profile":
        own = (path.stem for path in own_folder(os.environ).glob("*.toml"))
        return (*islice(own, MOST_FILES), *names())
    of_every_command: dict[str, Iterable[str]] = {
        "format": [each.name for each in FORMATS],
        "color": Color,
        "exit-style": ExitStyle,
    }
    return of_every_command.get(option) or _of_collectives(option)


def _of_collectives(option: str) -> Sequence[str]:
    from gpubench.jobs.collective.plan import BACKENDS
    from gpubench.model.terms.allocator import Allocator
    from gpubench.model.terms.nccl_choice import Algorithm, Protocol
    from gpubench.model.terms.operation import DataType, ReduceOp
    from gpubench.model.terms.overlap.asked import Partner
    from gpubench.model.terms.sampling import Mode

    words: dict[str, Iterable[str]] = {
        "dtype": DataType,
        "op": ReduceOp,
        "algo": Algorithm,
        "proto": Protocol,
        "backend": BACKENDS,
        "mode": Mode,
        "allocator": Allocator,
        "partner": Partner,
    }
    return tuple(words[option])
