"""Draw a machine as inline SVG: its devices by position in the PCIe tree, and the links between them.

The colour of a link shows its measured share of the expected bandwidth. Devices with findings also have a sign, so that
nothing depends on colour alone.
"""

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from html import escape
from statistics import median

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.formats.json import DocumentRun
from gpubench.formats.layout import four_digits, number_texts
from gpubench.model.paths.topology import XGMI, is_gpu_link
from gpubench.model.results.report import PairRow
from gpubench.model.results.topo import TreeRow
from gpubench.model.terms.operation import Direction, HostMemory
from gpubench.model.terms.units import format_size, group_by, plural, printable_line
from gpubench.model.terms.verdict import Finding, Verdict, gravity


def html_text(text: str) -> str:
    """Escape markup, control characters and CI runner commands in text for an HTML element or attribute."""
    return escape(printable_line(text))


_MOST_MACHINES = 2
_GOOD = (Verdict.PASS, Verdict.SKIP)
_GPU = re.compile(r"GPU\d+", re.ASCII)
_MODEL = re.compile(r"(?:NVIDIA )?(?:Tesla |GeForce |Quadro |RTX (?=PRO ))?(.*?\d\w*)", re.ASCII)
"""Matches the model in a GPU's name, up to the first word with a digit: 'V100', 'RTX 4090', 'PRO 6000'."""
_HOST = "host"
_SWITCH = "PCIe switch"
_LARGE_BYTES = 64 * 2**10
_ARROW = " → "

Pair = tuple[str, str]


class Reach(Struct, frozen=True):
    """The bandwidth of a link in GB/s, and the value that it is compared with. Both are None if unknown."""

    gb_s: float | None = None
    reference_gb_s: float | None = None
    what: str = ""

    @property
    def share(self) -> float | None:
        return self.gb_s / self.reference_gb_s if self.gb_s is not None and self.reference_gb_s else None

    @property
    def words(self) -> str:
        """Return a text such as '392 of 393 GB/s expected'."""
        if self.gb_s is None:
            return "not measured"
        return (
            four_digits(self.gb_s)
            + (f" of {self.reference_gb_s:.4g}" if self.reference_gb_s else "")
            + f" GB/s {self.what}".rstrip()
        )


class MachinePart(Struct, frozen=True):
    """A device, a switch or a NUMA node. `above` is the index of its parent in `Machine.parts`, or None at the top."""

    name: str
    what: str
    above: int | None
    is_device: bool = True
    link: str = ""
    reach: Reach = Reach()
    verdict: Verdict | None = None
    title: str = ""

    @property
    def is_gpu(self) -> bool:
        return _GPU.fullmatch(self.name) is not None


class Wire(Struct, frozen=True):
    """The connection between two GPUs, with the bandwidth of its slower direction. `cause` is the id of a finding."""

    ends: Pair
    path: str
    reach: Reach
    verdict: Verdict | None = None
    title: str = ""
    cause: str = ""

    @property
    def is_nvlink(self) -> bool:
        return is_gpu_link(self.path)


class Machine(Struct, frozen=True):
    """A node with its devices, parents first, and the connections between its GPUs.

    `fabric` is the path class with the most links, for example 'NV18', if NVLink connects all pairs of GPUs. It is
    empty for two GPUs or fewer, and if there are more than two path classes.
    """

    node: str
    parts: Sequence[MachinePart]
    wires: Sequence[Wire] = field(default=())
    fabric: str = ""

    def median_reach(self, name: str) -> Reach:
        """Return the median bandwidth between a GPU and the other GPUs."""
        own = [wire.reach for wire in self.wires if name in wire.ends and wire.reach.gb_s is not None]
        if not own:
            return Reach()
        gb_s = median(reach.gb_s for reach in own if reach.gb_s is not None)
        held = [reach.reference_gb_s for reach in own if reach.reference_gb_s]
        return Reach(gb_s, median(held) if held else None, own[0].what)


def machines(run: DocumentRun) -> list[Machine]:
    """Return the machines to draw: the first two of the report that have a device tree and GPUs."""
    trees = group_by(run.report.rows(TreeRow), lambda row: row.node)
    pairs = run.report.rows(PairRow, trees)
    rows = [row for row in (*run.rows, *pairs) if isinstance(row, PairRow)]
    several = len(set(run.metadata.hosts)) > 1
    found = [_machine(node, tree, rows, run.report.findings, several=several) for node, tree in trees.items()]
    return [machine for machine in found[:_MOST_MACHINES] if any(part.is_gpu for part in machine.parts)]


def _machine(
    node: str, tree: Sequence[TreeRow], rows: Sequence[PairRow], findings: Sequence[Finding], *, several: bool
) -> Machine:
    own = [row for row in rows if row.source_node == row.destination_node == node]
    names = {row.what.split(" ")[0]: row.element for row in tree if _GPU.fullmatch(row.element)}
    odd = _named_in_findings(findings, node, {row.element for row in tree}, several=several)
    host_reach = _host_reach(own, names)
    parts = [
        replace(part, reach=host_reach.get(part.name, Reach()), verdict=found[0], title=found[1])
        for part in _parts(tree)
        for found in [odd.get((part.name, ""), (None, ""))]
    ]
    wires = list(_wires(own, names, odd))
    gpus = [part.name for part in parts if part.is_gpu]
    complete = len(wires) == len(gpus) * (len(gpus) - 1) // 2 and all(wire.is_nvlink for wire in wires)
    # NV18 comes before NV6, and XGMI has no number.
    paths = sorted({wire.path for wire in wires}, key=lambda path: (len(path), path), reverse=True) if complete else []
    return Machine(node, parts, wires, paths[0] if len(gpus) > 2 and len(paths) in (1, 2) else "")


def _parts(tree: Sequence[TreeRow]) -> Iterator[MachinePart]:
    """Yield the devices of a tree. Host bridges are omitted, and devices below them are attached to the NUMA node."""
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
    healthy = row.healthy_gb_s
    if healthy and healthy == row.expected_gb_s:
        return Reach(row.bandwidth_gb_s, healthy, "expected")
    return Reach(row.bandwidth_gb_s, row.limit_gb_s, "of the limit" if row.limit_gb_s else "")


def _host_reach(rows: Sequence[PairRow], names: dict[str, str]) -> dict[str, Reach]:
    found: dict[str, Reach] = {}
    for row in rows:
        bus_id = row.source_bus_id or row.destination_bus_id or ""
        ends = (row.source, row.destination)
        if _HOST not in ends or not _is_one_way(row) or bus_id not in names:
            continue
        if HostMemory.parse_note(row.note) is HostMemory.PINNED:
            reach, known = _reach(row), found.get(names[bus_id])
            found[names[bus_id]] = reach if known is None or (reach.gb_s or 0) < (known.gb_s or 0) else known
    return found


def _wires(rows: Sequence[PairRow], names: dict[str, str], odd: dict[Pair, tuple[Verdict, str]]) -> Iterator[Wire]:
    rows_by_ends: dict[Pair, list[PairRow]] = {}
    for row in rows:
        if (row.source_bus_id or "") in names and (row.destination_bus_id or "") in names:
            one, other = sorted((names[row.source_bus_id or ""], names[row.destination_bus_id or ""]), key=_number)
            rows_by_ends.setdefault((one, other), []).append(row)
    is_measured = any(_is_one_way(row) for members in rows_by_ends.values() for row in members)
    best = max((row.limit_gb_s or 0 for members in rows_by_ends.values() for row in members), default=0)
    for ends, members in sorted(rows_by_ends.items(), key=lambda item: tuple(map(_number, item[0]))):
        measured = [row for row in members if _is_one_way(row)]
        largest = max((row.size_bytes or 0 for row in measured), default=0)
        slowest = min(
            (row for row in measured if row.size_bytes == largest),
            key=lambda row: (row.verdict is None or row.verdict in _GOOD, row.bandwidth_gb_s or 0),
            default=None,
        )
        path = members[0].path_class or "?"
        if slowest is not None:
            reach = _reach(slowest)
            title = f"{slowest.source}{_ARROW}{slowest.destination}, {format_size(largest)}: {reach.words}"
            verdict = _worse(*(Verdict(row.verdict) for row in measured if row.verdict))
        elif is_measured:
            reach, title, verdict = Reach(), f"{_ARROW.join(ends)}: not measured", None
        else:
            limit = members[0].limit_gb_s
            is_odd = any(key in odd for key in (ends, *((end, "") for end in ends)))
            reach = Reach(limit, (best if is_odd else limit) if is_gpu_link(path) else None, "possible")
            title, verdict = f"{_ARROW.join(ends)}: {reach.words}", None
        found = odd.get(ends)
        verdict = _worse(*filter(None, (verdict, None if found is None else found[0])))
        cause = "" if found is None else found[1]
        yield Wire(ends, path, reach, verdict, "; ".join(filter(None, (path, title, cause))), cause)


def _worse(*verdicts: Verdict) -> Verdict | None:
    """Return the worst verdict, or None if no verdict is worse than PASS or SKIP."""
    bad = [verdict for verdict in verdicts if verdict not in _GOOD]
    return min(bad, key=gravity) if bad else None


def _named_in_findings(
    findings: Sequence[Finding], node: str, devices: Container[str], *, several: bool
) -> dict[Pair, tuple[Verdict, str]]:
    found: dict[Pair, tuple[Verdict, str]] = {}
    for finding in findings:
        for subject in finding.subjects or (finding.subject,):
            words = re.split(r"[\s,]+", subject.replace(_ARROW, " "))
            if finding.severity in _GOOD or (several and node not in words and node not in finding.subject.split()):
                continue
            named = [device for device in words if device in devices]
            key = tuple(sorted(named[:2], key=_number)) if _ARROW in subject and len(named) > 1 else (*named[:1], "")
            if len(key) == 2 and key[0]:
                one: Pair = (key[0], key[1])
                known = found.get(one)
                if known is None or gravity(finding.severity) < gravity(known[0]):
                    found[one] = finding.severity, finding.id
    return found


def _number(name: str) -> tuple[int, str]:
    digits = "".join(character for character in name if character.isdigit())
    return int(digits or 0), name


_WIDTH, _ROW, _BOX = 540, 34, 26
_TOP, _BOTTOM = 10, 10
_SOCKET, _SWITCH_KIND, _DEVICE, _FABRIC = 4, 86, 250, 504
_SOCKET_WIDTH, _DEVICE_WIDTH, _FABRIC_WIDTH = 68, 132, 34
_SWITCH_GAP, _WIDEST_SWITCH, _NAMED_SWITCH = 8, 76, 54
_ARCS, _WIDEST_ARC = 394, 60.0
_CHARACTER = 7
"""Width of a bold character."""
_MOST_ROWS = 64
_MOST_WORDS = 15

_SHARES = (
    (0.95, "s3", "95 % or more"),
    (0.9, "s2", "90 to 95 %"),
    (0.75, "s1", "75 to 90 %"),
    (0.0, "s0", "below 75 %"),
)
"""CSS classes by measured share of the reference bandwidth. They include the thresholds of the verdicts for copies."""

_FAST = ("s3", "s2")
_ORDER = ("s", *(kind for _, kind, _ in _SHARES))

_SIGNS = {Verdict.FAIL: "✗", Verdict.WARN: "!", Verdict.ERROR: "?", Verdict.INCONCLUSIVE: "~"}


class _Spot(Struct, frozen=True):
    """The position of a box in the picture: the middle of its height, its left edge and its right edge."""

    y: float
    left: float
    right: float


def machine_figure(machine: Machine) -> Iterator[str]:
    spots = _spots(machine.parts)
    height = _TOP + _BOTTOM + _ROW * max(1, sum(part.is_device for part in machine.parts[:_MOST_ROWS]))
    words = f"Sockets, PCIe switches, GPUs and NICs of {machine.node}"
    yield f'<figure class="machine"><figcaption>{html_text(words)}</figcaption>'
    yield f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{html_text(words)}">'
    yield from _lines(machine, spots)
    lines = {part.name: machine.median_reach(part.name).gb_s for part in machine.parts if part.is_gpu}
    shown = [*lines.values(), *(wire.reach.gb_s for wire in machine.wires if _is_odd(machine, wire))]
    numbers = number_texts([value for value in shown if value is not None])
    if machine.fabric:
        yield from _fabric(machine, spots, numbers)
    yield from _arcs(machine, spots, numbers)
    for part, spot in zip(machine.parts, spots, strict=False):
        yield from _part(part, spot)
    yield '</svg><ul class="legend">'
    yield from _legend(machine)
    yield "</ul></figure>\n"


def _spots(parts: Sequence[MachinePart]) -> list[_Spot]:
    """Place one device per row from the top, and centre each parent on the rows of its devices."""
    lines: dict[int, float] = {}
    for number, part in enumerate(parts[:_MOST_ROWS]):
        if part.is_device:
            lines[number] = _TOP + _ROW * (len(lines) + 0.5)
    spots = []
    levels = max((_depth(parts, number) for number, part in enumerate(parts) if not part.is_device), default=0)
    room = _DEVICE - _SWITCH_KIND - _SWITCH_GAP
    wide = min(_WIDEST_SWITCH, room // max(1, levels) - _SWITCH_GAP)
    for number, part in enumerate(parts[:_MOST_ROWS]):
        below = [y for child, y in lines.items() if _is_below(parts, child, number)]
        y = lines.get(number, sum(below) / len(below) if below else float(_TOP))
        if part.is_device:
            left, width = float(_DEVICE), _DEVICE_WIDTH
        elif part.above is None:
            left, width = float(_SOCKET), _SOCKET_WIDTH
        else:
            left, width = _SWITCH_KIND + (wide + _SWITCH_GAP) * (_depth(parts, number) - 1), wide
        spots.append(_Spot(y, left, left + width))
    return spots


def _is_below(parts: Sequence[MachinePart], child: int, number: int) -> bool:
    above = parts[child].above
    while above is not None and above != number:
        above = parts[above].above
    return above == number


def _depth(parts: Sequence[MachinePart], number: int) -> int:
    above = parts[number].above
    return 0 if above is None else 1 + _depth(parts, above)


def _class(reach: Reach) -> str:
    share = reach.share
    return "s" if share is None else next(kind for least, kind, _ in _SHARES if share >= least)


def _lines(machine: Machine, spots: Sequence[_Spot]) -> Iterator[str]:
    """Draw the PCIe links: a line from each device to its parent, coloured by its bandwidth to pinned host memory."""
    placed = list(zip(machine.parts, spots, strict=False))
    # Draw the slowest links last, so that they stay visible if lines overlap.
    for part, spot in sorted(placed, key=lambda item: _ORDER.index(_class(item[0].reach))):
        if part.above is None:
            continue
        up = spots[part.above]
        bend = up.right + _SWITCH_GAP / 2
        title = "; ".join(filter(None, (f"PCIe {part.link}" if part.link else "", _host_words(part))))
        path = f"M{up.right:.0f} {up.y:.1f}H{bend:.0f}V{spot.y:.1f}H{spot.left:.0f}"
        yield f'<path class="w {_class(part.reach)}" d="{path}"><title>{html_text(title)}</title></path>'


def _host_words(part: MachinePart) -> str:
    return f"with pinned host memory {part.reach.words}" if part.reach.gb_s is not None else ""


def _fabric(machine: Machine, spots: Sequence[_Spot], numbers: Mapping[float, str]) -> Iterator[str]:
    gpus = [(part, spot) for part, spot in zip(machine.parts, spots, strict=False) if part.is_gpu]
    top, bottom = gpus[0][1].y - _BOX / 2, gpus[-1][1].y + _BOX / 2
    for part, spot in gpus:
        reach = machine.median_reach(part.name)
        title = f"{part.name} with the others, in the middle: {reach.words}"
        yield f'<path class="w {_class(reach)}" d="M{spot.right:.0f} {spot.y:.1f}H{_FABRIC}">'
        yield f"<title>{html_text(title)}</title></path>"
        if reach.gb_s is not None:
            words = numbers[reach.gb_s]
            yield f'<text class="f" x="{_FABRIC - 5}" y="{spot.y - 5:.1f}" text-anchor="end">{words}</text>'
    middle = (top + bottom) / 2
    yield f'<rect class="box" x="{_FABRIC}" y="{top:.1f}" width="{_FABRIC_WIDTH}" height="{bottom - top:.1f}" rx="5"/>'
    x = _FABRIC + _FABRIC_WIDTH / 2 + 5
    yield f'<text class="b" transform="translate({x:.0f} {middle:.1f}) rotate(-90)" text-anchor="middle">'
    yield f"{html_text(machine.fabric if machine.fabric == XGMI else f'NVLink, {machine.fabric}')}</text>"


def _arcs(machine: Machine, spots: Sequence[_Spot], numbers: Mapping[float, str]) -> Iterator[str]:
    """Draw connections between two GPUs: every NVLink if there is no fabric, otherwise only the marked ones."""
    places = {part.name: spot for part, spot in zip(machine.parts, spots, strict=False) if part.is_gpu}
    lines = [spot.y for spot in places.values()]
    for wire in machine.wires:
        is_odd = _is_odd(machine, wire)
        if all(end in places for end in wire.ends) and _is_drawn(machine, wire):
            one, other = (places[end] for end in wire.ends)
            named = any(part.verdict is not None for part in machine.parts if part.name in wire.ends)
            words = "" if wire.reach.gb_s is None or not is_odd else numbers[wire.reach.gb_s]
            words = wire.cause if _is_elsewhere(wire) else words
            room = _FABRIC if machine.fabric else _WIDTH
            yield from _arc(wire, one, other, [] if named else lines, words, room, odd=is_odd)


def _is_drawn(machine: Machine, wire: Wire) -> bool:
    return _is_odd(machine, wire) or (wire.is_nvlink and not machine.fabric)


def _is_elsewhere(wire: Wire) -> bool:
    """True if a finding names a pair whose copies are fast, for example because NCCL takes another path."""
    return bool(wire.cause) and _class(wire.reach) in _FAST


def _is_odd(machine: Machine, wire: Wire) -> bool:
    """True if a connection gets a mark. With a fabric, it needs none if it is as slow as the median of one of its
    GPUs.
    """
    if wire.verdict is None:
        return False
    return not any(_class(machine.median_reach(end)) == _class(wire.reach) for end in wire.ends) or not machine.fabric


def _arc(
    wire: Wire, one: _Spot, other: _Spot, lines: Sequence[float], number: str, room: int, *, odd: bool
) -> Iterator[str]:
    """Draw a connection as a curve. If it is marked, print its bandwidth next to it, between the rows in `lines`."""
    away = _ARCS + min(_WIDEST_ARC, abs(other.y - one.y) / 3)
    path = (
        f"M{one.right:.0f} {one.y:.1f}C{away:.0f} {one.y:.1f} {away:.0f} {other.y:.1f} {other.right:.0f} {other.y:.1f}"
    )
    kind = f"w {_class(wire.reach)}" + (" odd" if odd else "")
    yield f'<path class="{kind}" d="{path}"><title>{html_text(wire.title)}</title></path>'
    if odd and lines and wire.verdict is not None:
        x, y = one.right + 0.75 * (away - one.right), (one.y + other.y) / 2
        if any(abs(y - line) < _ROW / 2 for line in lines):
            y += _ROW / 2
        words = f"{_SIGNS[wire.verdict]} {number}".rstrip()
        if x + _CHARACTER * len(words) > room:
            words = _SIGNS[wire.verdict]
        kind = "tag f" if wire.cause and number == wire.cause else "tag"
        yield f'<text class="{kind} {wire.verdict}" x="{x + 4:.0f}" y="{y + 4:.1f}">{html_text(words)}</text>'


def _part(part: MachinePart, spot: _Spot) -> Iterator[str]:
    kind = "gpu" if part.is_gpu else "nic" if part.is_device else "box"
    mark = f" {part.verdict} odd" if part.verdict else ""
    title = "; ".join(filter(None, (part.name, part.what, _host_words(part), part.title)))
    sign = f" {_SIGNS[part.verdict]}" if part.verdict else ""
    name = _short(part, spot)
    yield f"<g><title>{html_text(title)}</title>"
    yield f'<rect class="{kind}{mark}" x="{spot.left:.0f}" y="{spot.y - _BOX / 2:.1f}" '
    yield f'width="{spot.right - spot.left:.0f}" height="{_BOX}" rx="5"/>'
    x = spot.left + 7
    yield f'<text class="b" x="{x:.0f}" y="{spot.y + 5:.1f}">{html_text(name)}'
    if sign:
        yield f'<tspan class="tag {part.verdict}">{sign}</tspan>'
    detail = _detail(part)
    if detail:
        yield f'<tspan class="d" dx="6">{html_text(detail)}</tspan>'
    yield "</text></g>"


def _short(part: MachinePart, spot: _Spot) -> str:
    if part.is_device:
        return part.name
    if part.above is None:
        return part.name.replace("NUMA node unknown", "host").replace("NUMA node", "NUMA")
    sign = 3 * _CHARACTER if part.verdict else 0
    return "switch" if spot.right - spot.left >= _NAMED_SWITCH + sign else ""


def _detail(part: MachinePart) -> str:
    """Return the model of a GPU without the vendor, or the rate of a NIC. Return '' if the box is too small."""
    if not part.is_device:
        return ""
    words = part.what.partition(" ")[2]
    if part.is_gpu:
        model = _MODEL.match(words)
        shown = words if model is None else model[1]
    else:
        shown = words.partition(" ")[2] or words
    return shown if len(part.name) + len(shown) <= _MOST_WORDS else ""


def _legend(machine: Machine) -> Iterator[str]:
    reaches = [part.reach for part in machine.parts] + [wire.reach for wire in machine.wires]
    used = {_class(reach) for reach in reaches if reach.gb_s is not None}
    for _, kind, words in _SHARES:
        if kind in used:
            yield _key(kind, words)
    if any(part.reach.gb_s is None and part.above is not None for part in machine.parts):
        yield _key("s", "not measured")
    whats = sorted({reach.what for reach in reaches if reach.gb_s is not None and reach.share is not None})
    if whats:
        to = ", median to the other GPUs" if machine.fabric else ""
        yield f"<li>GB/s{to}; colours: share of what is {html_text(', or '.join(whats))}; hover for more</li>"
    hidden = [wire for wire in machine.wires if not _is_drawn(machine, wire)]
    if machine.fabric:
        slow = "as slow as the line of a GPU"
        bad = (wire for wire in hidden if wire.verdict is not None)
        for reason, count in Counter(wire.cause if _is_elsewhere(wire) else slow for wire in bad).items():
            yield f"<li>not drawn: {plural(count, 'bad pair')}, {html_text(reason)}</li>"
    elif hidden:
        yield f"<li>not drawn: {plural(len(hidden), 'pair')} without NVLink</li>"


def _key(kind: str, words: str) -> str:
    sample = f'<svg viewBox="0 0 34 12" aria-hidden="true"><path class="w {kind}" d="M0 6H34"/></svg>'
    return f"<li>{sample}{words}</li>"
