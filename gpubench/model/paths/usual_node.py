"""The node to expect of two that differ: among two there is no majority.

A node with a GPU, a link or a NIC less is not what the other should be like; nor is one with an older driver.
"""

import re
from collections.abc import Callable, Mapping

Traits = Mapping[str, object]
"""Traits of a node by name; of pairs as 'GPU0 GPU1 path'."""

Place = tuple[int, ...]
"""The rank of a value among others of its trait: the higher, the more of a healthy machine."""

_NUMBER = re.compile(r"\d+", re.ASCII)


def _numbers(value: object) -> Place:
    """'580.159.04', '5 x16' and 400.0 by their numbers."""
    return tuple(int(each) for each in _NUMBER.findall(str(value)))


def _one_of(good: tuple[object, ...]) -> Callable[[object], Place]:
    return lambda value: (int(value in good),)


_COUNTS = ("GPUs", "NICs")
"""Traits that decide alone: with a device less, all that are counted after it seem to differ."""

_PLACES: Mapping[str, Callable[[object], Place]] = {
    **dict.fromkeys((*_COUNTS, "driver", "CUDA", "kernel", "firmware", "CPUs"), _numbers),
    **dict.fromkeys(("memory", "NVLinks", "NVLinks active", "PCIe", "PCIe at most", "PCIe width", "rate"), _numbers),
    **dict.fromkeys(("ECC", "persistence", "nvidia-peermem"), _one_of((True,))),
    **dict.fromkeys(("MIG", "row remapping pending", "row remapping failed"), _one_of((False, None))),
    "silent": _one_of((None,)),
    "state": _one_of(("present", "active")),
    "fabric": _one_of(("completed",)),
}
"""By trait, without its device, what the higher value is; of models and products none is better than another."""


def points(one: Traits, other: Traits) -> int:
    """By how many traits one node has more of a healthy machine than the other; below 0 the other has."""
    counts = [_compared(name, one, other) for name in _COUNTS]
    return next(filter(None, counts), 0) or sum(_compared(name, one, other) for name in one.keys() & other.keys())


def _compared(name: str, one: Traits, other: Traits) -> int:
    device, space, trait = name.partition(" ")
    place = _PLACES.get(trait if space and device[-1:].isdigit() else name)
    if place is None or one.get(name) == other.get(name):
        return 0
    mine, theirs = place(one.get(name)), place(other.get(name))
    return (mine > theirs) - (mine < theirs)
