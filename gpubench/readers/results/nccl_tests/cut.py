"""Reads tables of nccl-tests that a person shortened, renamed or retyped.

The header of such a table has any column names in any order, with optional units in brackets. Once ranks and collective
are known, the missing columns are computed from the others.
"""

import re
from collections.abc import Sequence

from msgspec import Struct

from gpubench.model.terms.operation import Placement, all_but_own_factor, ring_allreduce_factor, whole_factor
from gpubench.model.terms.units import BYTES_PER_GB, MICROSECONDS_PER_SECOND, SUFFIX_BYTES
from gpubench.readers.results.nccl_tests.table import OutputLine, Placed

_NAMES = re.compile(
    r"(?P<size>(?:message|msg|data|buffer)?[ _]?size|bytes)|(?P<time>(?:cpu[ _]?)?time|latency)"
    r"|(?P<algbw>alg(?:orithm)?[ _.]?(?:bw|bandwidth))|(?P<busbw>bus[ _.]?(?:bw|bandwidth))"
    r"|(?P<other>#?wrong|errors?|count|type|redop|root|out[- ]of[- ]place|in[- ]place)",
    re.IGNORECASE,
)
_UNIT = re.compile(r"\s*[(\[]\s*(?P<unit>[A-Za-zµμ/]{1,8})\s*[)\]]")
_SIZE = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,6})?)\s*(?P<unit>[KMGT]?i?B?)", re.IGNORECASE)
_FIGURE = re.compile(r"\d{1,12}(?:\.\d{1,6})?(?:e[+-]?\d{1,2})?")
_LIKE_A_FIGURE = re.compile(r"[-+]?\d[\d.e+-]*|[-+]?(?:nan|inf|infinity)|none|sum|float|N/A|-{1,3}|[xX]", re.IGNORECASE)
_NOT_GIVEN = ("-", "--", "---", "N/A")
_CELL = re.compile(r"\d[\d.]*\s+[KMGT]i?B\b|[^\s,;]+", re.IGNORECASE)

_MICROSECONDS = {"us": 1.0, "µs": 1.0, "μs": 1.0, "usec": 1.0, "ms": 1e3, "s": 1e6}
_GB_S = {
    **dict.fromkeys(("GB/s", "GBps", "gb/s", "GB/sec"), 1.0),
    **dict.fromkeys(("Gb/s", "Gbps", "gbps", "Gbit/s"), 0.125),
    "MB/s": 1e-3,
    "GiB/s": 2**30 / BYTES_PER_GB,
}

_FACTORS = {
    "allreduce": ring_allreduce_factor,
    **dict.fromkeys(("allgather", "reducescatter", "alltoall", "gather", "scatter"), all_but_own_factor),
    **dict.fromkeys(("broadcast", "reduce", "sendrecv"), whole_factor),
}


class CutColumns(Struct, frozen=True):
    """The columns of a shortened table. `scales` are the factors that convert their units to µs or GB/s."""

    names: tuple[str, ...]
    scales: tuple[float, ...]

    @classmethod
    def of(cls, line: str) -> "CutColumns | None":
        """Return the columns of a header line. None if the line is not a header."""
        names: list[str] = []
        scales: list[float] = []
        end, between = 0, ""
        for found in _NAMES.finditer(line):
            between += line[end : found.start()]
            unit = _UNIT.match(line, found.end())
            end = found.end() if unit is None else unit.end()
            names.append(str(found.lastgroup))
            scales.append(_scale(found.lastgroup, unit))
        rest = between + line[end:]
        figures = {"time", "algbw", "busbw"} & set(names)
        if names[:1] != ["size"] or not figures or re.search(r"\w{3}", rest) or 0.0 in scales:
            return None
        return cls(tuple(names), tuple(scales))

    def line(self, text: str) -> "CutLine | str | None":
        """Return the values of a row, or a text that describes its fault. None if the line is not a row."""
        cells = _CELL.findall(text.replace("|", " "))
        size = _SIZE.fullmatch(cells[0]) if cells else None
        if size is None or not all(map(_LIKE_A_FIGURE.fullmatch, cells[1:])):
            return None
        if len(cells) != len(self.names):
            return f"{len(cells)} of {len(self.names)} values" if 1 < len(cells) < len(self.names) else None
        halves: list[dict[str, float]] = [{}]
        for name, scale, cell in zip(self.names[1:], self.scales[1:], cells[1:], strict=True):
            if name == "other" or cell in _NOT_GIVEN:
                continue
            if _FIGURE.fullmatch(cell) is None or (name == "time" and float(cell) <= 0):
                return f"{cell!r} is not a valid value"
            if float(cell) == 0:
                continue  # For small sizes, the bandwidth may be rounded down to 0
            if name in halves[-1]:
                halves.append({})
            halves[-1][name] = scale * float(cell)
        size_bytes = int(float(size["number"]) * SUFFIX_BYTES[size["unit"].upper().rstrip("B").rstrip("I")])
        return CutLine(size_bytes, tuple(halves[:2])) if size_bytes > 0 and halves[0] else None


def _scale(name: str | None, unit: re.Match[str] | None) -> float:
    if unit is None or name not in ("time", "algbw", "busbw"):
        return 1.0
    return (_MICROSECONDS if name == "time" else _GB_S).get(unit["unit"], 0.0)


class CutLine(Struct, frozen=True):
    """One row of a shortened table: the message size, and the remaining values for each placement."""

    size_bytes: int
    halves: tuple[dict[str, float], ...]

    def whole(self, collective: str, ranks: int) -> OutputLine:
        """Compute the missing columns. algbw is size over time, and busbw is algbw times the collective's factor."""
        return OutputLine(
            size_bytes=self.size_bytes,
            count=self.size_bytes // 4,
            element_type="float",
            reduction="none",
            root=-1,
            placed=tuple(
                self._placed(half, placement, _FACTORS[collective](ranks))
                for half, placement in zip(self.halves, Placement, strict=False)
            ),
        )

    def _placed(self, half: dict[str, float], placement: Placement, factor: float) -> Placed:
        algbw = half.get("algbw") or (half["busbw"] / factor if "busbw" in half and factor else None)
        time_us = half.get("time")
        if time_us is None:
            time_us = self.size_bytes / ((algbw or 1.0) * BYTES_PER_GB) * MICROSECONDS_PER_SECOND
        algbw = algbw or self.size_bytes / time_us * MICROSECONDS_PER_SECOND / BYTES_PER_GB
        return Placed(
            placement=placement,
            time_us=time_us,
            algbw_gb_s=algbw,
            busbw_gb_s=half.get("busbw", algbw * factor),
            wrong=None,
        )


def cut_collectives(lines: Sequence[CutLine]) -> list[str]:
    """Return the collectives that fit these rows. If busbw clearly exceeds algbw, only all-reduce fits."""
    halves = [half for line in lines for half in line.halves if {"algbw", "busbw"} <= half.keys()]
    if any(half["busbw"] > 1.2 * half["algbw"] for half in halves):
        return ["allreduce"]
    return list(_FACTORS)
