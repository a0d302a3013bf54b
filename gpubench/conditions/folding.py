"""Folds findings under their root cause. One function decides for every command which finding explains which."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf, log

from msgspec import Struct
from msgspec.structs import replace

from gpubench.conditions.ranking import MOST_TIMES, distance
from gpubench.conditions.registry import CONDITIONS, FAMILIES
from gpubench.model.paths.topology import Topology
from gpubench.model.results.report import Effect
from gpubench.model.terms.units import shorten
from gpubench.model.terms.verdict import (
    FIGURES,
    HOST_STAGED,
    SLOW_UNEXPLAINED,
    STRAGGLER,
    Finding,
    Verdict,
    worst_verdict,
)

# A copy is only as fast as its path, so both reach the same share of the expected bandwidth, within about a quarter
_MOST_TIMES_OF_COPIES = 1.3

_PAIR_SLOW, _HOST_COPIES, _STAGING_FASTER = "p2p-slow", "host-copies-slow", "p2p-slower-than-staging"
_NODE_DIFFERS, _LINKS_DOWN, _RANKS = "node-differs", "nvlink-down", "ranks "
_NCCL_FIGURES = (HOST_STAGED, SLOW_UNEXPLAINED, STRAGGLER)  # Findings from measurements that NCCL settings can explain
_RANK_FIGURES = (SLOW_UNEXPLAINED, STRAGGLER)
_MNNVL_UNUSED = "mnnvl-unused"
_SLOWING = ("gpu-in-use", "gpu-hot", "below-profile")
"""Conditions that slow a GPU down but do not explain a host-staged path."""

_WEAK = ("row-remap-pending", "row-remap-failed")  # Conditions that rarely reduce performance
_NCCL_SETTINGS, _PCIE = ("nccl_settings", "nccl_tuning"), "pcie"
_BETWEEN_NODES = ("network", "rdma_ports", "gpudirect", "mnnvl")
_ROOT_VERDICTS = (Verdict.FAIL, Verdict.WARN)
_GPU = re.compile(r"\bGPU\d+\b")
_DEVICE = re.compile(rf"{_GPU.pattern}|\b[0-9a-f]{{4,8}}:[0-9a-f]{{2}}:[0-9a-f]{{2}}\.[0-7]\b")
_PAIR = 2
_NO_ENDS: Mapping[str, str] = {}
_BY_ID = {condition.id: condition for condition in CONDITIONS}
_FAMILY: Mapping[str, str] = {condition.id: family.name for family in FAMILIES for condition in family.conditions}


class _NamedDevices(Struct, frozen=True):
    """The host, GPUs and PCI addresses that one subject of a finding names. The host may be empty."""

    host: str
    devices: frozenset[str]
    gpus: frozenset[str]

    @property
    def pair(self) -> frozenset[str] | None:
        return self.gpus if len(self.gpus) == _PAIR else None

    def meets(self, other: "_NamedDevices") -> bool:
        if self.host and other.host and self.host != other.host:
            return False
        if self.pair and other.gpus:
            return self.pair == other.gpus
        return not self.devices or not other.devices or bool(self.devices & other.devices)


class _NamedPlaces:
    """A finding with the hosts and devices that it names. A finding that names none applies to all hosts or devices."""

    def __init__(self, finding: Finding, all_hosts: Sequence[str], ends: Mapping[str, str] = _NO_ENDS) -> None:
        self.finding, self._all_hosts, self._ends = finding, all_hosts, ends

    @cached_property
    def subjects(self) -> tuple[_NamedDevices, ...]:
        return tuple(map(self._subject, self.finding.subjects or (self.finding.subject,)))

    @cached_property
    def hosts(self) -> frozenset[str]:
        words = frozenset(re.split(r"[\s,]+", ", ".join((self.finding.subject, *self.finding.subjects))))
        return frozenset(host for host in self._all_hosts if host in words) or frozenset(self._all_hosts)

    @cached_property
    def gpus(self) -> frozenset[str]:
        return frozenset(name for subject in self.subjects for name in subject.gpus)

    def _subject(self, text: str) -> _NamedDevices:
        text = self._ends.get(text, text)
        gpus = frozenset(_GPU.findall(text))
        words = re.split(r"[\s,]+", text)
        host = next((word for word in words if word in self._all_hosts), "")
        return _NamedDevices(host, frozenset(_DEVICE.findall(text)), gpus)

    def names(self, subject: _NamedDevices) -> bool:
        """True if this finding names the subject's devices, or no devices at all.

        A single GPU also counts as named if several pairs in this finding contain it.
        """
        pairs = {
            own.pair for own in self.subjects if own.pair and own.host == subject.host and subject.gpus <= own.pair
        }
        return (len(subject.gpus) == 1 and len(pairs) > 1) or any(own.meets(subject) for own in self.subjects)

    def covers(self, other: "_NamedPlaces") -> bool:
        """True if this finding names every subject of the other one. For findings on all ranks, one subject is
        enough.
        """
        enough = any if other.finding.id in (*_RANK_FIGURES, _MNNVL_UNUSED) else all
        return bool(self.hosts & other.hosts) and enough(map(self.names, other.subjects))

    def shares_device(self, other: "_NamedPlaces") -> bool:
        return any(one.devices & two.devices for one in self.subjects for two in other.subjects)


def fold(
    findings: Sequence[Finding],
    nodes: Sequence[Topology],
    perhaps: Iterable[Finding] = (),
    ends: Mapping[str, str] = _NO_ENDS,
) -> tuple[Finding, ...]:
    """Fold findings under their root causes. If there are several nodes, prefix commands with ssh.

    `ends` maps rank pairs to their GPUs, for example '0 → 5' to 'node0 GPU0 → GPU5'.
    """
    hosts = [node.snapshot.host for node in nodes]
    nvlinked = any(gpu.nvlinks for node in nodes for gpu in node.gpus)
    found = _fold_known_differences(folded(findings, hosts, nvlinked=nvlinked, perhaps=perhaps, ends=ends))
    return add_ssh(found) if len(hosts) > 1 else found


_HARDWARE_PROGRAMS = (
    "nvidia-smi",
    "dmesg",
    "systemctl",
    "lspci",
    "sudo",
    "ibstat",
    "mlxlink",
    "modprobe",
    "grep",
    "ls",
    "ip",
)
"""Programs that must run on the affected node, because they show or change that machine."""
_PLAIN = re.compile(r"[\w@%+=:,./ -]+")
_CHANGED_IN_QUOTES = re.compile(r'["$`\\!]')


def add_ssh(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Prefix commands with ssh to the affected node, since bus ids are the same on every node."""
    return tuple(
        replace(
            finding,
            cure=replace(finding.cure, commands=tuple(_ssh_command(line, finding) for line in finding.commands)),
        )
        for finding in findings
    )


def _ssh_command(command: str, finding: Finding) -> str:
    named_nodes = (place.node for place in finding.places if place.bus_id and place.bus_id in command)
    node = finding.node or next(named_nodes, None)
    if node is None or command.split(" ", 1)[0] not in _HARDWARE_PROGRAMS:
        return command
    if not _PLAIN.fullmatch(command):
        command = shlex.quote(command) if _CHANGED_IN_QUOTES.search(command) else f'"{command}"'
    return f"ssh {shlex.quote(node)} {command}"


def _fold_known_differences(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Move a difference between nodes below the condition that already reports it."""
    found = list(findings)
    for place, finding in enumerate(findings):
        if finding.id != _NODE_DIFFERS or len(finding.subjects) != 1:
            continue
        rest = []
        for difference in finding.seen.split("; "):
            number = _naming_condition(difference, finding.subjects[0], findings)
            if number is None:
                rest.append(difference)
                continue
            line = f"{_NODE_DIFFERS}: {difference}"
            found[number] = replace(found[number], consequences=(*found[number].consequences, line))
        found[place] = replace(finding, seen="; ".join(rest))
    return tuple(finding for finding in found if finding.seen or finding.id != _NODE_DIFFERS)


def _naming_condition(difference: str, host: str, findings: Sequence[Finding]) -> int | None:
    """Return the index of the first condition on this host that names the differing device. None if there is none."""
    word = re.compile(rf"\b{re.escape(difference.split(' ', 1)[0])}\b")
    for number, finding in enumerate(findings):
        text = ", ".join((finding.subject, *finding.subjects))
        is_condition = finding.id not in (*FIGURES, _NODE_DIFFERS) and finding.severity in _ROOT_VERDICTS
        renumbers = finding.id == "gpu-missing" and difference.startswith("GPU")
        names_it = renumbers or word.search(f"{text}; {finding.seen}")
        if is_condition and names_it and host in re.split(r"[\s,]+", text):
            return number
    return None


def folded(
    findings: Sequence[Finding],
    hosts: Sequence[str],
    *,
    nvlinked: bool,
    perhaps: Iterable[Finding] = (),
    ends: Mapping[str, str] = _NO_ENDS,
) -> tuple[Finding, ...]:
    """Move consequences below their root cause, and return the remaining findings.

    A root cause gets the worst severity and the lowest remaining bandwidth of its consequences. Findings in `perhaps`
    are reported only if they explain another finding.
    """
    known = {finding.id for finding in findings}
    more = [finding for finding in perhaps if finding.id not in known]
    unsplit = [_NamedPlaces(finding, hosts, ends) for finding in (*more, *findings)]
    places = [_NamedPlaces(finding, hosts, ends) for finding in _split(unsplit, nvlinked=nvlinked)]
    roots = [_root(place, places, nvlinked=nvlinked) for place in places]
    below: dict[int, list[Finding]] = {}
    for number, place in enumerate(places):
        top = _topmost(number, roots)
        if top != number:
            below.setdefault(top, []).append(place.finding)
    return tuple(
        _add_consequences(place.finding, below.get(number, ()))
        for number, place in enumerate(places)
        if roots[number] is None and (number in below or place.finding not in more)
    )


def cause_of(effect: Finding, causes: Sequence[Finding], hosts: Sequence[str], *, nvlinked: bool) -> int | None:
    """Return the index of the most likely cause of a slow result. None if no cause explains it."""
    place, places = _NamedPlaces(effect, hosts), [_NamedPlaces(cause, hosts) for cause in causes]
    able = [
        number
        for number, other in enumerate(places)
        if (other.finding.id == effect.id or _explains(other, place, nvlinked=nvlinked)) and other.covers(place)
    ]
    return min(able, key=lambda number: _choice(places[number], place), default=None)


def _split(places: Sequence[_NamedPlaces], *, nvlinked: bool) -> list[Finding]:
    """Split a finding on several subjects if a cause explains only some of its subjects."""
    found: list[Finding] = []
    for place in places:
        finding = place.finding
        able = [other for other in places if other is not place and _explains(other, place, nvlinked=nvlinked)]
        if finding.id not in FIGURES or len(finding.subjects) < _PAIR or any(other.covers(place) for other in able):
            found.append(finding)
            continue
        rest = dict(zip(finding.subjects, place.subjects, strict=True))
        for cause in able:
            own = [name for name, subject in rest.items() if subject.devices and cause.names(subject)]
            if own:
                part = _restrict(place, own)
                found.append(part if len(own) == len(rest) else replace(part, consequences=()))
                rest = {name: subject for name, subject in rest.items() if name not in own}
        if rest:
            found.append(finding if len(rest) == len(finding.subjects) else _restrict(place, list(rest)))
    return found


def _restrict(place: _NamedPlaces, names: Sequence[str]) -> Finding:
    finding = place.finding
    subjects = zip(finding.subjects, place.subjects, strict=True)
    devices = frozenset(device for name, subject in subjects if name in names for device in subject.devices)
    places = tuple(device for device in finding.places if device.device is None or device.device in devices)
    lead = _RANKS if finding.subject.startswith(_RANKS) else ""
    return replace(finding, subject=lead + shorten(names), subjects=tuple(names), places=places)


def _topmost(number: int, roots: Sequence[int | None]) -> int:
    seen = {number}
    while (above := roots[number]) is not None and above not in seen:
        number = above
        seen.add(number)
    return number


def _root(place: _NamedPlaces, places: Sequence[_NamedPlaces], *, nvlinked: bool) -> int | None:
    able = (
        number
        for number, other in enumerate(places)
        if other is not place
        and _explains(other, place, nvlinked=nvlinked)
        and other.covers(place)
        and _are_all_slow(other, place, places)
    )
    return min(able, key=lambda number: _choice(places[number], place), default=None)


def _are_all_slow(root: _NamedPlaces, place: _NamedPlaces, places: Sequence[_NamedPlaces]) -> bool:
    """True if every GPU that the cause names has this measured finding.

    If a cause affects all GPUs but only one GPU is slow, it does not explain the slow GPU.
    """
    if place.finding.id not in FIGURES or not place.gpus or _is_implied(root.finding, place.finding):
        return True
    alike = (other.gpus for other in places if other.finding.id == place.finding.id)
    return root.gpus <= frozenset[str]().union(*alike)


def _choice(root: _NamedPlaces, place: _NamedPlaces) -> tuple[object, ...]:
    """Return a sort key for the causes of a slow result, most likely cause first.

    1. Causes that imply the result by definition. 2. Causes that leave about the measured bandwidth: host-staged paths,
    then measured causes, then facts. 3. Causes that leave far less than the measured bandwidth, so the operation must
    have avoided them. 4. Causes with an unknown loss of bandwidth.
    """
    finding, far = root.finding, _distance(root.finding, place.finding) or 0.0
    is_near = far <= log(MOST_TIMES) or (far == inf and finding.id == HOST_STAGED)
    return (
        not _is_implied(finding, place.finding),
        place.finding.id == STRAGGLER and not root.shares_device(place),
        not is_near,
        far == inf,
        finding.id != HOST_STAGED,
        finding.id not in FIGURES,
        far,
        finding.severity is not Verdict.FAIL,
        not root.shares_device(place),
    )


def _distance(cause: Finding, effect: Finding) -> float | None:
    """Return the log ratio between the bandwidth that a cause leaves and the measured one (see `distance`).

    A host-staged pair may explain any slow ring. In a mesh, a pair uses few NVLinks but a ring uses all. So host
    staging leaves 36 % of the pair's bandwidth and 6 % of the ring's.
    """
    most = MOST_TIMES if effect.id in _RANK_FIGURES else _MOST_TIMES_OF_COPIES
    if cause.id == HOST_STAGED and effect.id in _RANK_FIGURES:
        most = inf
    return distance(cause.expected_percent, effect.expected_percent, most)


def _is_implied(cause: Finding, effect: Finding) -> bool:
    condition = _BY_ID.get(cause.id)
    return condition is not None and effect.id in condition.implies


def _explains(root: _NamedPlaces, place: _NamedPlaces, *, nvlinked: bool) -> bool:
    cause, effect = root.finding, place.finding
    # A finding by design explains only host staging by design, unless it implies the other finding
    if cause.severity is Verdict.SKIP and effect.severity is Verdict.SKIP:
        explains_path = effect.id == HOST_STAGED and _fact_explains(cause.id, place, nvlinked=nvlinked)
        return explains_path or _is_implied(cause, effect)
    if cause.severity is Verdict.ERROR and effect.severity is Verdict.ERROR:
        return _is_implied(cause, effect)
    if cause.severity not in _ROOT_VERDICTS or effect.severity in (Verdict.SKIP, Verdict.ERROR):
        return False
    if _is_implied(cause, effect):
        return True
    if effect.id not in FIGURES or _distance(cause, effect) is None:
        return False
    if cause.id in FIGURES:
        return _figure_explains(root, place, nvlinked=nvlinked)
    # If some NVLinks remain, the path stays direct, but is slower.
    is_direct = cause.id == _LINKS_DOWN and cause.expected_percent is not None
    return not (is_direct and effect.id == HOST_STAGED) and _fact_explains(cause.id, place, nvlinked=nvlinked)


def _figure_explains(root: _NamedPlaces, place: _NamedPlaces, *, nvlinked: bool) -> bool:
    """True if a slow path or pair that was measured may explain another slow result."""
    cause, effect = root.finding, place.finding
    if cause.id == HOST_STAGED:
        return effect.id in _RANK_FIGURES or (effect.id not in _NCCL_FIGURES and not _is_staged_by_nccl(cause))
    if cause.id == _PAIR_SLOW:
        explains_pattern = effect.id == _PAIR_SLOW and bool(root.gpus) and not place.gpus
        return explains_pattern or effect.id in (*_RANK_FIGURES, _STAGING_FASTER)
    # One slow PCIe link slows copies to host memory as well as copies to other GPUs.
    slows = effect.id in _RANK_FIGURES or (effect.id == _PAIR_SLOW and bool(place.gpus))
    return cause.id == _HOST_COPIES and slows and _is_over_pcie(effect, nvlinked)


def _fact_explains(id_: str, place: _NamedPlaces, *, nvlinked: bool) -> bool:
    effect, family = place.finding, _FAMILY.get(id_, "")
    effects = frozenset(_BY_ID[id_].effects) if id_ in _BY_ID else frozenset[Effect]()
    if effect.id == HOST_STAGED:
        is_possible = family not in _NCCL_SETTINGS or _is_staged_by_nccl(effect)
        return is_possible and bool(effects & {Effect.STAGED, Effect.NETWORK_INSIDE})
    # A different GPU model explains why the profile's expected bandwidth is not reached.
    is_other_model = id_ == "gpu-model" and "profile " in effect.expected
    slows = is_other_model or id_ in _SLOWING or bool(effects & {Effect.STAGED, Effect.NETWORK_INSIDE, Effect.SLOW})
    if not slows or id_ in _WEAK:
        return False
    if family in _NCCL_SETTINGS:
        return effect.id in _NCCL_FIGURES
    if family == _PCIE and not _is_over_pcie(effect, nvlinked):
        return False
    if family in _BETWEEN_NODES:
        return effect.id in _NCCL_FIGURES and len(place.hosts) > 1
    return effect.id != _HOST_COPIES or family in (_PCIE, "gpu")


def _is_over_pcie(effect: Finding, nvlinked: bool) -> bool:  # noqa: FBT001 - a fact about the machine
    return not nvlinked or effect.id == _HOST_COPIES or " peer off" in effect.seen


def _is_staged_by_nccl(staged: Finding) -> bool:
    """True if NCCL stages data in host memory between ranks. False for a copy between GPUs."""
    return "GPU" not in staged.subject


def _add_consequences(root: Finding, below: Sequence[Finding]) -> Finding:
    if not below:
        return root
    lines = [line for finding in below for line in _lines(finding, root)]
    shares = [finding.expected_percent for finding in (root, *below) if finding.expected_percent is not None]
    return replace(
        root,
        severity=worst_verdict([root.severity, *(finding.severity for finding in below)]),
        consequences=tuple(dict.fromkeys((*root.consequences, *lines))),
        expected_percent=min(shares, default=None),
    )


def _lines(below: Finding, root: Finding) -> tuple[str, ...]:
    """Describe a consequence in one line, followed by its own consequences. Skip a slow result if the cause already
    has other consequences.
    """
    if below.id != SLOW_UNEXPLAINED:
        return f"{below.id}: {below.subject}: {below.seen}", *below.consequences
    return () if root.consequences else (f"{below.subject}: {below.seen}", *below.consequences)
