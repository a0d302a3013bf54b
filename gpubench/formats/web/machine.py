"""A picture of a machine as inline SVG: sockets, switches, GPUs and NICs from left to right, NVLink at the right.

Lines are coloured by what was measured over what is expected; what findings name is marked with a sign, for nothing is
told by colour alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpubench.formats.web.html_text import html_text
from gpubench.formats.web.wiring import Machine, MachinePart, Reach, Wire
from gpubench.model.terms.verdict import Verdict

_WIDTH, _ROW, _BOX = 540, 34, 26
_TOP, _BOTTOM = 10, 10
_SOCKET, _SWITCH, _DEVICE, _FABRIC = 4, 86, 250, 504
_SOCKET_WIDTH, _DEVICE_WIDTH, _FABRIC_WIDTH = 68, 132, 34
_SWITCH_GAP, _WIDEST_SWITCH, _NAMED_SWITCH = 8, 76, 54
_ARCS = 394
_MOST_ROWS = 64
_MOST_WORDS = 17

_SHARES = ((0.95, "s3", "95 % and more"), (0.9, "s2", "90 to 95 %"), (0.75, "s1", "75 to 90 %"), (0.0, "s0", "less"))
"""Classes of the style sheet by the share that is reached, the thresholds of the verdicts on copies among them."""

_ORDER = ("s", *(kind for _, kind, _ in _SHARES))

_SIGNS = {Verdict.FAIL: "✗", Verdict.WARN: "!", Verdict.ERROR: "?", Verdict.INCONCLUSIVE: "~"}


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a part is drawn: its middle from above, and its left and right edge."""

    y: float
    left: float
    right: float


def figure(machine: Machine) -> Iterator[str]:
    """The picture with its caption and legend."""
    spots = _spots(machine.parts)
    height = _TOP + _BOTTOM + _ROW * max(1, sum(part.is_device for part in machine.parts[:_MOST_ROWS]))
    words = f"{machine.node}: sockets, PCIe switches, GPUs, NICs"
    yield f'<figure class="machine"><figcaption>{html_text(words)}</figcaption>'
    yield f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{html_text(words)}">'
    yield from _lines(machine, spots)
    if machine.fabric:
        yield from _fabric(machine, spots)
    yield from _arcs(machine, spots)
    for part, spot in zip(machine.parts, spots, strict=False):
        yield from _part(part, spot)
    yield '</svg><ul class="legend">'
    yield from _legend(machine)
    yield "</ul></figure>\n"


def _spots(parts: Sequence[MachinePart]) -> list[_Spot]:
    """Devices in lines of their own, from above; what holds them beside the middle of them."""
    lines: dict[int, float] = {}
    for number, part in enumerate(parts[:_MOST_ROWS]):
        if part.is_device:
            lines[number] = _TOP + _ROW * (len(lines) + 0.5)
    spots = []
    levels = max((_depth(parts, number) for number, part in enumerate(parts) if not part.is_device), default=0)
    room = _DEVICE - _SWITCH - _SWITCH_GAP
    wide = min(_WIDEST_SWITCH, room // max(1, levels) - _SWITCH_GAP)
    for number, part in enumerate(parts[:_MOST_ROWS]):
        below = [y for child, y in lines.items() if _is_below(parts, child, number)]
        y = lines.get(number, sum(below) / len(below) if below else float(_TOP))
        if part.is_device:
            left, width = float(_DEVICE), _DEVICE_WIDTH
        elif part.above is None:
            left, width = float(_SOCKET), _SOCKET_WIDTH
        else:
            left, width = _SWITCH + (wide + _SWITCH_GAP) * (_depth(parts, number) - 1), wide
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
    """PCIe: a line from each part to what is above it; that of a GPU by its copies with host memory."""
    placed = list(zip(machine.parts, spots, strict=False))
    # The worst last: where lines share a way, it is the one that is seen.
    for part, spot in sorted(placed, key=lambda each: _ORDER.index(_class(each[0].reach))):
        if part.above is None:
            continue
        up = spots[part.above]
        bend = up.right + _SWITCH_GAP / 2
        told = "; ".join(filter(None, (f"PCIe {part.link}" if part.link else "", _host_words(part))))
        path = f"M{up.right:.0f} {up.y:.1f}H{bend:.0f}V{spot.y:.1f}H{spot.left:.0f}"
        yield f'<path class="w {_class(part.reach)}" d="{path}"><title>{html_text(told)}</title></path>'


def _host_words(part: MachinePart) -> str:
    return f"with pinned host memory {part.reach.words}" if part.reach.gb_s is not None else ""


def _fabric(machine: Machine, spots: Sequence[_Spot]) -> Iterator[str]:
    """One box for links that join all GPUs, with a line from each of them."""
    gpus = [(part, spot) for part, spot in zip(machine.parts, spots, strict=False) if part.is_gpu]
    top, bottom = gpus[0][1].y - _BOX / 2, gpus[-1][1].y + _BOX / 2
    for part, spot in gpus:
        reach = machine.of_gpu(part.name)
        told = f"{part.name} with the others, in the middle: {reach.words}"
        yield f'<path class="w {_class(reach)}" d="M{spot.right:.0f} {spot.y:.1f}H{_FABRIC}">'
        yield f"<title>{html_text(told)}</title></path>"
        if reach.gb_s is not None:
            yield f'<text class="f" x="{_FABRIC - 5}" y="{spot.y - 4:.1f}" text-anchor="end">{reach.gb_s:.3g}</text>'
    middle = (top + bottom) / 2
    yield f'<rect class="box" x="{_FABRIC}" y="{top:.1f}" width="{_FABRIC_WIDTH}" height="{bottom - top:.1f}" rx="5"/>'
    x = _FABRIC + _FABRIC_WIDTH / 2 + 5
    yield f'<text class="b" transform="translate({x:.0f} {middle:.1f}) rotate(-90)" text-anchor="middle">'
    yield f"NVLink, {html_text(machine.fabric)}</text>"


def _arcs(machine: Machine, spots: Sequence[_Spot]) -> Iterator[str]:
    """Wires between two GPUs: all NVLinks where no fabric joins them; with one, or without any, those that are odd."""
    places = {part.name: spot for part, spot in zip(machine.parts, spots, strict=False) if part.is_gpu}
    lines = [spot.y for spot in places.values()]
    for wire in machine.wires:
        if all(end in places for end in wire.ends) and (_is_odd(machine, wire) or _is_drawn(machine, wire)):
            one, other = (places[end] for end in wire.ends)
            named = any(part.verdict is not None for part in machine.parts if part.name in wire.ends)
            yield from _arc(wire, one, other, [] if named else lines, odd=_is_odd(machine, wire))


def _is_drawn(machine: Machine, wire: Wire) -> bool:
    return wire.is_nvlink and not machine.fabric


def _is_odd(machine: Machine, wire: Wire) -> bool:
    """True if a wire is marked: unless one of its GPUs is slow with all, whose own line tells it."""
    if wire.verdict is None:
        return False
    return not any(_class(machine.of_gpu(end)) == _class(wire.reach) for end in wire.ends) or not machine.fabric


def _arc(wire: Wire, one: _Spot, other: _Spot, lines: Sequence[float], *, odd: bool) -> Iterator[str]:
    """A curve; the figure of an odd one stands beside it, off the `lines` of GPUs, where there are any."""
    away = _ARCS + min(72.0, abs(other.y - one.y) / 3)
    path = (
        f"M{one.right:.0f} {one.y:.1f}C{away:.0f} {one.y:.1f} {away:.0f} {other.y:.1f} {other.right:.0f} {other.y:.1f}"
    )
    kind = f"w {_class(wire.reach)}" + (" odd" if odd else "")
    yield f'<path class="{kind}" d="{path}"><title>{html_text(wire.told)}</title></path>'
    if odd and lines and wire.verdict is not None:
        x, y = one.right + 0.75 * (away - one.right), (one.y + other.y) / 2
        if any(abs(y - line) < _ROW / 2 for line in lines):
            y += _ROW / 2
        x, anchor = (_FABRIC - 4.0, "end") if x > _FABRIC - 52 else (x + 4, "start")
        words = f"{_SIGNS[wire.verdict]} {wire.reach.gb_s:.3g}" if wire.reach.gb_s is not None else _SIGNS[wire.verdict]
        yield f'<text class="tag {wire.verdict}" x="{x:.0f}" y="{y + 4:.1f}" text-anchor="{anchor}">{words}</text>'


def _part(part: MachinePart, spot: _Spot) -> Iterator[str]:
    """A box with a name, and a second line of words where it is a device."""
    kind = "gpu" if part.is_gpu else "nic" if part.is_device else "box"
    mark = f" {part.verdict} odd" if part.verdict else ""
    told = "; ".join(filter(None, (part.name, part.what, _host_words(part), part.told)))
    sign = f" {_SIGNS[part.verdict]}" if part.verdict else ""
    name = _short(part, spot)
    yield f"<g><title>{html_text(told)}</title>"
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
    return "switch" if spot.right - spot.left >= _NAMED_SWITCH else ""


def _detail(part: MachinePart) -> str:
    """The model of a GPU without its maker, the rate of a NIC; nothing that has no room."""
    if not part.is_device:
        return ""
    words = part.what.partition(" ")[2].removeprefix("NVIDIA ")
    room = _MOST_WORDS - len(part.name)
    if part.is_gpu:
        return words.split(" ")[0][:room]
    rate = words.partition(" ")[2] or words
    return rate if len(rate) <= room else ""


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
        yield f"<li>GB/s; colours: reached of what is {html_text(', or '.join(whats))}; hover for more</li>"


def _key(kind: str, words: str) -> str:
    sample = f'<svg viewBox="0 0 34 12" aria-hidden="true"><path class="w {kind}" d="M0 6H34"/></svg>'
    return f"<li>{sample}{words}</li>"
