"""Values of NCCL's variables, as NCCL reads them."""

import re
from collections.abc import Mapping

Chosen = Mapping[str, frozenset[str]]
"""The names that a list leaves to NCCL, by the collective that it is for; '' is for all."""

_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]{1,15}|[0-9]{1,18})")


def number(value: str) -> int | None:
    """The number at the beginning, hexadecimal after 0x and octal after 0 as in C: '4M' is 4.

    What begins with no number is 0, and what is empty counts as not set: None.
    """
    if not value:
        return None
    match = _NUMBER.match(value)
    if match is None:
        return 0
    sign, digits = match.groups()
    return (-1 if sign == "-" else 1) * _unsigned(digits)


def _unsigned(digits: str) -> int:
    if digits[:2].lower() == "0x":
        return int(digits, 16)
    octal = re.match(r"0[0-7]*", digits)
    return int(octal[0], 8) if octal else int(digits)


def chosen(value: str, known: frozenset[str]) -> Chosen:
    """The names that a list of NCCL_ALGO or NCCL_PROTO leaves: 'ring,tree', '^ll', 'ring;allreduce:tree'.

    What names nothing that is known is passed over.
    """
    found: dict[str, frozenset[str]] = {}
    for part in value.lower().split(";"):
        collective, _, names = part.rpartition(":")
        named = frozenset(each.strip() for each in names.strip().removeprefix("^").split(",")) & known
        if named:
            found[collective.strip()] = known - named if names.strip().startswith("^") else named
    return found
