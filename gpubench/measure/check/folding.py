"""Findings folded under their root cause: what follows from a condition is a line below it, no finding of its own."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gpubench.conditions.registry import CONDITIONS, FAMILIES
from gpubench.model.results.rows.causes import Effect
from gpubench.model.terms.verdict import (
    FIGURES,
    HOST_STAGED,
    SLOW_UNEXPLAINED,
    STRAGGLER,
    Finding,
    Verdict,
    gravity,
    overall,
)

_OF_NCCL = (HOST_STAGED, SLOW_UNEXPLAINED, STRAGGLER)
"""Figures of what NCCL does; its settings explain no others."""

_SLOWING = ("gpu-in-use", "clock-limited", "gpu-hot", "below-profile")
"""Conditions of a GPU that make it slow; they are causes of no path."""

_WEAK = ("row-remap-pending", "row-remap-failed")
"""Conditions that may be, and seldom are, why something is slow."""

_NCCL_SETTINGS, _PCIE = ("nccl_settings", "nccl_tuning"), "pcie"
_BETWEEN_NODES = ("network", "rdma_ports", "gpudirect", "mnnvl")
_ROOT_VERDICTS = (Verdict.FAIL, Verdict.WARN)
_DEVICE = re.compile(r"\bGPU\d+\b|\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")
_BY_ID = {each.id: each for each in CONDITIONS}
_FAMILY: Mapping[str, str] = {each.id: family.name for family in FAMILIES for each in family.conditions}


@dataclass(frozen=True)
class _FindingPlace:
    """The hosts and GPUs that a finding names; none of a kind stands for all."""

    finding: Finding
    all_hosts: tuple[str, ...]

    @cached_property
    def hosts(self) -> frozenset[str]:
        words = frozenset(re.split(r"[\s,]+", self._text))
        return frozenset(host for host in self.all_hosts if host in words) or frozenset(self.all_hosts)

    @cached_property
    def devices(self) -> frozenset[str]:
        return frozenset(_DEVICE.findall(self._text))

    @property
    def _text(self) -> str:
        return ", ".join((self.finding.subject, *self.finding.subjects))

    def touches(self, other: "_FindingPlace") -> bool:
        """True if both are about a host, and where both name GPUs, about one of them."""
        shared = not self.devices or not other.devices or bool(self.devices & other.devices)
        return shared and bool(self.hosts & other.hosts)


def folded(findings: Sequence[Finding], hosts: Sequence[str], *, nvlinked: bool) -> tuple[Finding, ...]:
    """The findings without those that follow from others, which are told as consequences of these.

    `hosts` are all of the run; `nvlinked` is whether its GPUs have NVLinks, where PCIe explains copies with host memory
    alone. A root cause is as grave as the gravest of its consequences. Wrong data are always a finding of their own.
    """
    places = {number: _FindingPlace(each, tuple(hosts)) for number, each in enumerate(findings)}
    root_of = {number: _root(number, places, nvlinked=nvlinked) for number in places}
    below: dict[int, list[Finding]] = {}
    for number, each in enumerate(findings):
        top = _topmost(number, root_of)
        if top != number:
            below.setdefault(top, []).append(each)
    return tuple(_with(each, below.get(number, ())) for number, each in enumerate(findings) if root_of[number] is None)


def _topmost(number: int, root_of: Mapping[int, int | None]) -> int:
    seen = {number}
    while (above := root_of[number]) is not None and above not in seen:
        number = above
        seen.add(number)
    return number


def _root(number: int, places: Mapping[int, _FindingPlace], *, nvlinked: bool) -> int | None:
    """The finding that explains another: a setting or device before a figure, the gravest first."""
    place = places[number]
    roots = [
        other
        for other, above in places.items()
        if other != number and _explains(above, place, nvlinked=nvlinked) and above.touches(place)
    ]
    return min(roots, key=lambda each: _first_choice(places[each], place), default=None)


def _first_choice(root: _FindingPlace, place: _FindingPlace) -> tuple[bool, int, bool]:
    is_figure = root.finding.id in FIGURES
    return is_figure, gravity(root.finding.severity), not (root.devices & place.devices)


def _explains(root: _FindingPlace, place: _FindingPlace, *, nvlinked: bool) -> bool:
    cause, told = root.finding, place.finding
    if cause.severity not in _ROOT_VERDICTS or told.severity in (Verdict.SKIP, Verdict.ERROR):
        return False
    condition = _BY_ID.get(cause.id)
    if condition is not None and told.id in condition.implies:
        return True
    if told.id not in FIGURES or cause.id == told.id:
        return False
    if cause.id == "p2p-slow" and told.id in (SLOW_UNEXPLAINED, STRAGGLER):
        return True
    if cause.id in FIGURES:
        return cause.id == HOST_STAGED and _is_nccl_s(cause) == (told.id in _OF_NCCL) and told.id != HOST_STAGED
    return _does(cause.id, place, nvlinked=nvlinked)


def _does(id_: str, place: _FindingPlace, *, nvlinked: bool) -> bool:
    """True if a condition makes what it touches do this."""
    told, family = place.finding, _FAMILY.get(id_, "")
    effects = frozenset(_BY_ID[id_].effects) if id_ in _BY_ID else frozenset()
    if told.id == HOST_STAGED:
        of_nccl = family not in _NCCL_SETTINGS or _is_nccl_s(told)
        return of_nccl and bool(effects & {Effect.STAGED, Effect.NETWORK_INSIDE})
    slows = id_ in _SLOWING or bool(effects & {Effect.STAGED, Effect.NETWORK_INSIDE, Effect.SLOW})
    if not slows or id_ in _WEAK:
        return False
    if family in _NCCL_SETTINGS:
        return told.id in _OF_NCCL
    if family == _PCIE and nvlinked:
        return told.id == "host-copies-slow"
    if family in _BETWEEN_NODES:
        return told.id in _OF_NCCL and len(place.hosts) > 1
    return told.id != "host-copies-slow" or family in (_PCIE, "gpu")


def _is_nccl_s(staged: Finding) -> bool:
    """True if it is NCCL that goes through host memory, between ranks, and not a copy between GPUs."""
    return "GPU" not in staged.subject


def _with(root: Finding, below: Sequence[Finding]) -> Finding:
    if not below:
        return root
    lines = [line for each in below for line in _lines(each, root)]
    severity = overall([root.severity, *(each.severity for each in below)])
    return replace(root, severity=severity, consequences=tuple(dict.fromkeys((*root.consequences, *lines))))


def _lines(below: Finding, root: Finding) -> tuple[str, ...]:
    """A finding below another in words: what is slow is explained by now, and said once."""
    if below.id != SLOW_UNEXPLAINED:
        return f"{below.id}: {below.subject}: {below.seen}", *below.consequences
    return () if root.consequences else (f"{below.subject}: {below.seen}", *below.consequences)
