"""The machine of a run as a picture needs it: devices in their places, wires between GPUs, what is odd of either."""

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from gpubench.formats.document import DocumentRun
from gpubench.model.results.report import PAIRS_SECTION, PairRow
from gpubench.model.results.topo.rows import TREE_SECTION, TreeRow
from gpubench.model.terms.copies import Direction, HostMemory
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.units import format_size
from gpubench.model.terms.verdict import Finding, Verdict, gravity

_MOST_MACHINES = 2
_GOOD = (Verdict.PASS, Verdict.SKIP)
_GPU = re.compile(r"GPU\d+", re.ASCII)
_NVLINK = re.compile(r"NV\d+", re.ASCII)
_HOST = "host"
_SWITCH = "PCIe switch"
_LARGE_BYTES = 64 * 2**10
_ARROW = " → "

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Reach:
    """The speed of a wire, GB/s, and what it is held against; None where that is not known."""

    gb_s: float | None = None
    of_gb_s: float | None = None
    what: str = ""

    @property
    def share(self) -> float | None:
        """Reached of what it is held against."""
        return self.gb_s / self.of_gb_s if self.gb_s is not None and self.of_gb_s else None

    @property
    def words(self) -> str:
        """'392 of 393 GB/s expected'."""
        if self.gb_s is None:
            return "not measured"
        return f"{self.gb_s:.3g}" + (f" of {self.of_gb_s:.3g}" if self.of_gb_s else "") + f" GB/s {self.what}".rstrip()


@dataclass(frozen=True, slots=True)
class MachinePart:
    """A device, a switch or a NUMA node, below the one at the position `above` in its machine; None for the top."""

    name: str
    what: str
    above: int | None
    is_device: bool = True
    link: str = ""
    reach: Reach = Reach()
    verdict: Verdict | None = None
    told: str = ""

    @property
    def is_gpu(self) -> bool:
        """True if it is a GPU, by its name."""
        return _GPU.fullmatch(self.name) is not None


@dataclass(frozen=True, slots=True)
class Wire:
    """What joins two GPUs, by the slower way of the two."""

    ends: Pair
    path: str
    reach: Reach
    verdict: Verdict | None = None
    told: str = ""

    @property
    def is_nvlink(self) -> bool:
        """True if NVLinks join them."""
        return _NVLINK.fullmatch(self.path) is not None


@dataclass(frozen=True, slots=True)
class Machine:
    """One node: everything in it, parents first, and its wires. `fabric` is the path class that all GPUs share."""

    node: str
    parts: Sequence[MachinePart]
    wires: Sequence[Wire] = field(default=())
    fabric: str = ""

    def of_gpu(self, name: str) -> Reach:
        """What a GPU reaches with the others, in the middle."""
        own = [wire.reach for wire in self.wires if name in wire.ends and wire.reach.gb_s is not None]
        if not own:
            return Reach()
        gb_s = median(reach.gb_s for reach in own if reach.gb_s is not None)
        held = [reach.of_gb_s for reach in own if reach.of_gb_s]
        return Reach(gb_s, median(held) if held else None, own[0].what)


def machines(run: DocumentRun) -> list[Machine]:
    """The machines of a run, as far as it tells: none where it knows no tree of devices."""
    trees = grouped(run.report.rows(TREE_SECTION, TreeRow), lambda row: row.node)
    rows = [row for row in (*run.rows, *run.report.rows(PAIRS_SECTION, PairRow)) if isinstance(row, PairRow)]
    several = len(set(run.metadata.hosts)) > 1
    found = [_machine(node, tree, rows, run.report.findings, several=several) for node, tree in trees.items()]
    return [each for each in found[:_MOST_MACHINES] if any(part.is_gpu for part in each.parts)]


def _machine(
    node: str, tree: Sequence[TreeRow], rows: Sequence[PairRow], findings: Sequence[Finding], *, several: bool
) -> Machine:
    own = [row for row in rows if row.source_node == row.destination_node == node]
    names = {row.what.split(" ")[0]: row.element for row in tree if _GPU.fullmatch(row.element)}
    odd = _odd(findings, node, {row.element for row in tree}, several=several)
    host_reach = _with_host(own, names)
    parts = [
        replace(part, reach=host_reach.get(part.name, Reach()), verdict=found[0], told=found[1])
        for part in _parts(tree)
        for found in [odd.get((part.name, ""), (None, ""))]
    ]
    wires = list(_wires(own, names, odd))
    gpus = [part.name for part in parts if part.is_gpu]
    complete = len(wires) == len(gpus) * (len(gpus) - 1) // 2 and all(wire.is_nvlink for wire in wires)
    paths = sorted({wire.path for wire in wires}, key=lambda path: -int(path[2:])) if complete else []
    return Machine(node, parts, wires, paths[0] if len(gpus) > 2 and len(paths) in (1, 2) else "")


def _parts(tree: Sequence[TreeRow]) -> Iterator[MachinePart]:
    """Without host bridges, which every device has: what hangs on one hangs on its NUMA node here."""
    above: list[tuple[int, int]] = []
    position = 0
    for row in tree:
        while above and above[-1][0] >= row.depth:
            above.pop()
        if row.what == "host bridge":
            continue
        is_device = row.depth > 0 and row.what != _SWITCH
        parent = above[-1][1] if above else None
        yield MachinePart(row.element, row.what, parent, is_device=is_device, link=row.link or "")
        if not is_device:
            above.append((row.depth, position))
        position += 1


def _is_one_way(row: PairRow) -> bool:
    return (
        row.bandwidth_gb_s is not None
        and row.direction != Direction.BOTH
        and row.peer != "off"
        and row.engine in ("ce", "nccl")
        and (row.size_bytes or 0) >= _LARGE_BYTES
    )


def _reach(row: PairRow) -> Reach:
    if row.expected_gb_s:
        return Reach(row.bandwidth_gb_s, row.expected_gb_s, "expected")
    return Reach(row.bandwidth_gb_s, row.limit_gb_s, "of the limit" if row.limit_gb_s else "")


def _with_host(rows: Sequence[PairRow], names: dict[str, str]) -> dict[str, Reach]:
    """What each GPU's way to pinned host memory reaches, by the slower way of the two."""
    found: dict[str, Reach] = {}
    for row in rows:
        bus_id = row.source_bus_id or row.destination_bus_id or ""
        ends = (row.source, row.destination)
        if _HOST not in ends or not _is_one_way(row) or bus_id not in names:
            continue
        if HostMemory.of_note(row.note) is HostMemory.PINNED:
            reach, known = _reach(row), found.get(names[bus_id])
            found[names[bus_id]] = reach if known is None or (reach.gb_s or 0) < (known.gb_s or 0) else known
    return found


def _wires(rows: Sequence[PairRow], names: dict[str, str], odd: dict[Pair, tuple[Verdict, str]]) -> Iterator[Wire]:
    by_ends: dict[Pair, list[PairRow]] = {}
    for row in rows:
        if (row.source_bus_id or "") in names and (row.destination_bus_id or "") in names:
            one, other = sorted((names[row.source_bus_id or ""], names[row.destination_bus_id or ""]), key=_number)
            by_ends.setdefault((one, other), []).append(row)
    best = max((row.limit_gb_s or 0 for members in by_ends.values() for row in members), default=0)
    for ends, members in sorted(by_ends.items(), key=lambda item: tuple(map(_number, item[0]))):
        measured = [row for row in members if _is_one_way(row)]
        largest = max((row.size_bytes or 0 for row in measured), default=0)
        slowest = min(
            (row for row in measured if row.size_bytes == largest),
            key=lambda row: row.bandwidth_gb_s or 0,
            default=None,
        )
        path = members[0].path_class or "?"
        if slowest is not None:
            reach = _reach(slowest)
            told = f"{slowest.source}{_ARROW}{slowest.destination}, {format_size(largest)}: {reach.words}"
            verdict = _worse(*(Verdict(row.verdict) for row in measured if row.verdict))
        else:
            limit = members[0].limit_gb_s
            reach = Reach(limit, best if path.startswith("NV") else None, "possible")
            told, verdict = f"{_ARROW.join(ends)}: {reach.words}", None
        found = odd.get(ends)
        verdict = _worse(*filter(None, (verdict, None if found is None else found[0])))
        yield Wire(ends, path, reach, verdict, f"{path}; {told}")


def _worse(*verdicts: Verdict) -> Verdict | None:
    """The gravest of those that are not good; None where all are."""
    bad = [each for each in verdicts if each not in _GOOD]
    return min(bad, key=gravity) if bad else None


def _odd(
    findings: Sequence[Finding], node: str, devices: Container[str], *, several: bool
) -> dict[Pair, tuple[Verdict, str]]:
    """What findings name of a node: a pair of names, or a name and nothing, with severity and id."""
    found: dict[Pair, tuple[Verdict, str]] = {}
    for finding in findings:
        for subject in finding.subjects or (finding.subject,):
            words = re.split(r"[\s,]+", subject.replace(_ARROW, " "))
            if finding.severity in _GOOD or (several and node not in words and node not in finding.subject.split()):
                continue
            named = [word for word in words if word in devices]
            key = tuple(sorted(named[:2], key=_number)) if _ARROW in subject and len(named) > 1 else (*named[:1], "")
            if len(key) == 2 and key[0]:
                one: Pair = (key[0], key[1])
                known = found.get(one)
                if known is None or gravity(finding.severity) < gravity(known[0]):
                    found[one] = finding.severity, finding.id
    return found


def _number(name: str) -> tuple[int, str]:
    digits = "".join(each for each in name if each.isdigit())
    return int(digits or 0), name
