"""What holds in a recorded snapshot beyond the types of its fields: everything after relies on it."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from gpubench.errors import UsageError
from gpubench.model.snapshot import PciPlace, Snapshot
from gpubench.model.topology import PATH_CLASSES, SELF
from gpubench.readers.reader import MOST_GPUS, MOST_NICS, MOST_SWITCHES

MOST_SWITCHES_ABOVE = 64
"""Of one device."""

_NVLINK_PATH = re.compile(r"NV\d{1,3}", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_text(plain: Any, where: str) -> None:
    """Refuse half characters anywhere in a document: JSON can spell them, and no output can hold them.

    Raises:
        UsageError: there is one; `where` leads to it.
    """
    if isinstance(plain, str) and _SURROGATE.search(plain):
        raise UsageError(f"{where} has half a character in it: {plain[:40]!a}", expected="text that UTF-8 can hold")
    if isinstance(plain, dict):
        for key, held in plain.items():
            check_text(key, f"a name in {where}")
            check_text(held, f"{where}.{key}")
    if isinstance(plain, list):
        for number, held in enumerate(plain):
            check_text(held, f"{where}[{number}]")


def check_snapshot(snapshot: Snapshot) -> None:
    """Refuse a snapshot that contradicts itself, or is none of a machine.

    Raises:
        UsageError: names that are not unique or cannot be printed, a path that is none, more devices than a node has.
    """
    for name, most in (("gpus", MOST_GPUS), ("nics", MOST_NICS), ("switches", MOST_SWITCHES)):
        count = len(getattr(snapshot, name))
        if count > most:
            raise UsageError(f"snapshot.{name} has {count} entries", expected=f"one node, with {most} {name} at most")
    for where, name in _names(snapshot):
        if not name.isprintable():
            raise UsageError(f"{where} is {name[:40]!a}", expected="printable characters")
    _check_unique("gpus", [gpu.device for gpu in snapshot.gpus], set())
    _check_unique("nics", [nic.device for nic in snapshot.nics], {gpu.device for gpu in snapshot.gpus})
    for where, place in _places(snapshot):
        if len(place.switches) > MOST_SWITCHES_ABOVE:
            raise UsageError(
                f"{where}.switches has {len(place.switches)} entries", expected=f"at most {MOST_SWITCHES_ABOVE}"
            )
    for number, pair in enumerate(snapshot.pairs):
        where = f"snapshot.pairs[{number}]"
        if pair.path is not None and not (pair.path in (*PATH_CLASSES, SELF) or _NVLINK_PATH.fullmatch(pair.path)):
            raise UsageError(f"{where}.path is {pair.path!a}", expected=f"NV18, {', '.join(PATH_CLASSES)} or {SELF}")
        if pair.pcie_path is not None and pair.pcie_path not in PATH_CLASSES:
            raise UsageError(f"{where}.pcie_path is {pair.pcie_path!a}", expected=f"one of {', '.join(PATH_CLASSES)}")


def _check_unique(field: str, names: Sequence[str], others: set[str]) -> None:
    taken = set(others)
    for number, name in enumerate(names):
        if name in taken:
            raise UsageError(f"snapshot.{field}[{number}] is a second {name}", expected="a name of its own")
        taken.add(name)


def _names(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """What outputs call the machine and its devices."""
    yield "snapshot.host", snapshot.host
    for number, gpu in enumerate(snapshot.gpus):
        yield f"snapshot.gpus[{number}].name", gpu.name or ""
        yield f"snapshot.gpus[{number}].bus_id", gpu.bus_id or ""
    for number, nic in enumerate(snapshot.nics):
        yield f"snapshot.nics[{number}].name", nic.name
        yield f"snapshot.nics[{number}].bus_id", nic.bus_id or ""
        yield f"snapshot.nics[{number}].model", nic.model or ""
    for number, switch in enumerate(snapshot.switches):
        yield f"snapshot.switches[{number}].bus_id", switch.bus_id
    for where, place in _places(snapshot):
        yield f"{where}.host_bridge", place.host_bridge or ""
        for switch_above in place.switches:
            yield f"{where}.switches", switch_above


def _places(snapshot: Snapshot) -> Iterator[tuple[str, PciPlace]]:
    places = {
        "gpus": [gpu.place for gpu in snapshot.gpus],
        "nics": [nic.place for nic in snapshot.nics],
        "switches": [switch.place for switch in snapshot.switches],
    }
    for name, held in places.items():
        for number, place in enumerate(held):
            yield f"snapshot.{name}[{number}].place", place
