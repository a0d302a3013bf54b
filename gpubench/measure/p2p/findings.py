"""What a person should know of measured copies."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

from gpubench.model.paths.p2p import (
    FAILED_SHARE,
    JUDGED_FROM_BYTES,
    LATENCY_BYTES,
    MOVED_SHARE,
    Cell,
    Oddity,
    Pair,
    Series,
    looks_staged,
    odd_ones,
)
from gpubench.model.terms.copies import CopyGpu, Direction, Engine
from gpubench.model.terms.units import some_of
from gpubench.model.terms.verdict import WRONG_DATA, Finding, Verdict, overall

_MOST_PAIRS = 4

Cells = Mapping[Series, Mapping[Pair, Cell]]
Figures = Mapping[Series, Mapping[Pair, float]]
Verdicts = Mapping[Series, Mapping[Pair, tuple[Verdict | None, str]]]


def findings_of(
    figures: Figures, cells: Cells, verdicts: Verdicts, gpus: Sequence[CopyGpu], host_wrong: Sequence[str]
) -> tuple[Finding, ...]:
    """The findings, gravest first: wrong data, failed copies, who is slow, peer access that does not pay.

    What goes through host memory is said with the evidence on all paths.
    """
    return (
        *_wrong(cells, gpus, host_wrong),
        *_errors(cells, gpus),
        *_slow(figures, cells, verdicts, gpus),
        *_unprofitable(figures, gpus),
        *_noisy(verdicts, gpus),
    )


def _wrong(cells: Cells, gpus: Sequence[CopyGpu], host_wrong: Sequence[str]) -> Iterator[Finding]:
    found = {
        pair: f"{cell.wrong} elements, {series.name}"
        for series, row in cells.items()
        for pair, cell in row.items()
        if cell.wrong
    }
    subjects = [_pair(pair, gpus) for pair in found] + [f"host and {device}" for device in dict.fromkeys(host_wrong)]
    if subjects:
        yield Finding(
            id=WRONG_DATA,
            severity=Verdict.FAIL,
            **_subjects(subjects),
            seen=f"wrong data arrived: {next(iter(found.values()), 'copies with host memory')}",
            expected="what the source sent, as the destination reads it",
            cause="an IOMMU or ACS between the GPUs, a hypervisor that grants peer access it cannot give, or a damaged "
            "link or memory: however fast these copies are, they are worthless",
            next_command="NCCL_P2P_DISABLE=1 until it is repaired; dmesg | grep -i -E 'Xid|IO_PAGE_FAULT'",
        )


def _errors(cells: Cells, gpus: Sequence[CopyGpu]) -> Iterator[Finding]:
    by_error: dict[str, list[str]] = {}
    for row in cells.values():
        for pair, cell in row.items():
            if cell.error and _pair(pair, gpus) not in by_error.setdefault(cell.error, []):
                by_error[cell.error].append(_pair(pair, gpus))
    for error, subjects in by_error.items():
        yield Finding(
            id="copy-failed",
            severity=Verdict.ERROR,
            **_subjects(subjects),
            seen=error,
            expected="a copy that is made",
            cause="memory in use by others, or peer access that is granted and then fails",
            next_command="nvidia-smi; gpubench topo shows what the driver says of these GPUs",
        )


def staged_pairs(cells: Cells) -> dict[Pair, str]:
    """Pairs whose copies go through host memory although peer access is on, and what shows it.

    The NVLink counters prove it where they moved for others; else the same bandwidth and the same latency with peer
    access as without.
    """
    found: dict[Pair, str] = {}
    for series, row in cells.items():
        for pair, cell in row.items():
            if series.peer and cell.is_staged:
                found[pair] = _counted(cell)
    on, off = _written(cells, peer=True), _written(cells, peer=False)
    for size in sorted({size for size in on if size in off and size >= JUDGED_FROM_BYTES})[-1:]:
        soon, late = on.get(LATENCY_BYTES, {}), off.get(LATENCY_BYTES, {})
        for pair, cell in on[size].items():
            if (
                pair in off[size]
                and cell.is_staged is None
                and looks_staged(cell, off[size][pair], soon.get(pair), late.get(pair))
            ):
                found.setdefault(pair, "as slow as without peer access, in bandwidth and in latency")
    return found


def _counted(cell: Cell) -> str:
    """What the counters said of a copy that did not go over NVLink."""
    carried = cell.carried
    nvlink = f"{carried.nvlink_share:.0%} of the bytes went over NVLink, whose counters moved for other pairs"
    return f"{nvlink}; they went over PCIe" if (carried.pcie_share or 0) >= MOVED_SHARE else nvlink


def _written(cells: Cells, *, peer: bool) -> dict[int, Mapping[Pair, Cell]]:
    """What copy engines wrote, by size."""
    return {
        series.size_bytes: row
        for series, row in cells.items()
        if (series.engine, series.direction, series.peer) == (Engine.CE, Direction.WRITE, peer)
    }


def _slow(figures: Figures, cells: Cells, verdicts: Verdicts, gpus: Sequence[CopyGpu]) -> Iterator[Finding]:
    """Who is slow, each once with all ways of copying in which they are; host-staged pairs are said to be that."""
    staged = set(staged_pairs(cells))
    explained = {frozenset(pair) for pair in staged}
    slow: dict[tuple[str, ...], list[tuple[Series, str, Verdict]]] = {}
    for series, row in figures.items():
        if not series.peer or series.size_bytes < JUDGED_FROM_BYTES:
            continue
        judged = verdicts[series]
        # Both ways at once, a pair is as slow as its slower way, which was said already.
        known = {pair for pair in row if frozenset(pair) in explained} if series.direction is Direction.BOTH else staged
        bad = {pair for pair in row if judged[pair][0] in (Verdict.FAIL, Verdict.WARN) and pair not in known}
        direct = {pair: figure for pair, figure in row.items() if pair not in known}
        explained |= {frozenset(pair) for pair in bad}
        oddities = [each for each in odd_ones(direct, len(gpus)) if _touches(each, bad)]
        for oddity in oddities:
            share = oddity.figure / oddity.usual
            seen = f"{oddity.figure:.4g} GB/s, where others reach {oddity.usual:.4g} ({share:.0%})"
            verdict = Verdict.FAIL if share < FAILED_SHARE else Verdict.WARN
            slow.setdefault((_named(oddity, gpus),), []).append((series, seen, verdict))
        if bad and not oddities:
            worst_verdict, reason = judged[min(bad, key=row.__getitem__)]
            subjects = tuple(_pair(pair, gpus) for pair in sorted(bad))
            slow.setdefault(subjects, []).append((series, reason, worst_verdict or Verdict.WARN))
    for subjects, found in slow.items():
        yield Finding(
            id="p2p-slow",
            severity=overall(verdict for _, _, verdict in found),
            **_subjects(subjects),
            seen="; ".join(f"{series.name}: {seen}" for series, seen, _ in found),
            expected="what pairs wired alike reach, and healthy machines of this type",
            cause="links down or noisy, lanes lost, clocks held down, or somebody else's traffic",
            next_command="gpubench topo; nvidia-smi nvlink -e; nvidia-smi -q -d PERFORMANCE",
        )


def _touches(oddity: Oddity, bad: set[Pair]) -> bool:
    return any(set(oddity.gpus) <= set(pair) for pair in bad)


def _named(oddity: Oddity, gpus: Sequence[CopyGpu]) -> str:
    names = [f"{gpus[gpu].device} ({gpus[gpu].bus_id})" for gpu in oddity.gpus]
    return f"{names[0]} {oddity.role}" if oddity.role != "pair" else " → ".join(names)


def _unprofitable(figures: Figures, gpus: Sequence[CopyGpu]) -> Iterator[Finding]:
    """Pairs whose copies are slower with peer access than through host memory."""
    for series, row in figures.items():
        if series.engine is not Engine.CE or series.direction is not Direction.WRITE or not series.peer:
            continue
        off = next(
            (other for each, other in figures.items() if not each.peer and each.size_bytes == series.size_bytes), {}
        )
        slower = [pair for pair, figure in row.items() if pair in off and figure < 0.9 * off[pair]]
        if slower and series.size_bytes >= JUDGED_FROM_BYTES:
            worst = min(slower, key=lambda pair: row[pair] / off[pair])
            yield Finding(
                id="p2p-slower-than-staging",
                severity=Verdict.WARN,
                **_subjects([_pair(pair, gpus) for pair in slower]),
                seen=f"{row[worst]:.4g} GB/s with peer access, {off[worst]:.4g} through host memory",
                expected="peer access at least as fast",
                cause="ACS sends peer traffic up to the root port and back, or the path has a narrow hop",
                next_command="lspci -vvv | grep -i acsctl (as root); NCCL_P2P_LEVEL=PIX keeps NCCL off such pairs",
            )


def _noisy(verdicts: Verdicts, gpus: Sequence[CopyGpu]) -> Iterator[Finding]:
    noisy = [
        _pair(pair, gpus)
        for series, row in verdicts.items()
        for pair, (verdict, _) in row.items()
        if verdict is Verdict.INCONCLUSIVE and series.direction is not Direction.BOTH
    ]
    if noisy:
        yield Finding(
            id="p2p-noisy",
            severity=Verdict.INCONCLUSIVE,
            **_subjects(list(dict.fromkeys(noisy))),
            seen="samples differ by more than a tenth, near a threshold",
            expected="samples within a few percent",
            cause="somebody else's traffic, or clocks that change",
            next_command="again, when the machine is idle",
        )


def _pair(pair: Pair, gpus: Sequence[CopyGpu]) -> str:
    return f"{gpus[pair[0]].device} → {gpus[pair[1]].device}"


class _Subjects(TypedDict):
    subject: str
    subjects: tuple[str, ...]


def _subjects(named: Sequence[str]) -> _Subjects:
    """All that a finding is about, and the first few of them in words."""
    return {"subject": some_of(named, _MOST_PAIRS), "subjects": tuple(named)}
