"""Findings on measured copies: wrong data, failed copies, slow GPUs and pairs, and misplaced managed memory."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

from gpubench.measure.p2p.request import CopyMachine, ManagedCopy, P2pRequest
from gpubench.measure.p2p.rows import CopyMatrix
from gpubench.model.paths import p2p
from gpubench.model.paths.topology import ACROSS_SOCKETS
from gpubench.model.terms.operation import CopyGpu, Direction, Engine, ManagedWay
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import BYTES_PER_GB, plural, shorten
from gpubench.model.terms.verdict import WRONG_DATA, Cure, Finding, Verdict

_MOST_PAIRS = 4

OutrunsHost = Callable[[p2p.Pair], bool]  # Whether a direct copy of a pair is faster than any through host memory


def _no_pair(_pair: p2p.Pair) -> bool:
    return False


def findings_of(
    matrices: Sequence[CopyMatrix],
    gpus: Sequence[CopyGpu],
    wrong_with_host: Sequence[str],
    others: Sequence[tuple[str, p2p.Cell]] = (),
    path_of: Callable[[p2p.Pair], str] = lambda _: "",
    places: Sequence[DevicePlace] = (),
) -> tuple[Finding, ...]:
    """Findings except slow copies, whose rows conditions judge, and host-staged paths, which follow from all evidence.

    `wrong_with_host` are GPUs with wrong data to or from host memory; `others` are copies outside the matrices;
    `places` are where the GPUs are.
    """
    return (
        *_wrong(matrices, gpus, wrong_with_host, others, places),
        *_errors(matrices, gpus, others, places),
        *_unprofitable(matrices, gpus, path_of, places),
        *_noisy(matrices, gpus, places),
    )


def _wrong(
    matrices: Sequence[CopyMatrix],
    gpus: Sequence[CopyGpu],
    wrong_with_host: Sequence[str],
    others: Sequence[tuple[str, p2p.Cell]],
    places: Sequence[DevicePlace],
) -> Iterator[Finding]:
    cells = [
        (cell.wrong, pair, matrix.series.name)
        for matrix in matrices
        for pair, cell in matrix.cells.items()
        if cell.wrong
    ]
    most = max((wrong for wrong, *_ in cells), default=0)
    where = next((name for wrong, _, name in cells if wrong == most), "")
    found = dict.fromkeys(pair for _, pair, _ in cells)
    with_host = [f"host and {device}" for device in dict.fromkeys(wrong_with_host)]
    # Several pairs at once have wrong data if one of them has: they are subjects only where no pair is.
    at_once = [name for name, cell in others if cell.wrong and not with_host and not found]
    subjects = [_pair(pair, gpus) for pair in found] + with_host + at_once
    if subjects:
        yield Finding(
            id=WRONG_DATA,
            severity=Verdict.FAIL,
            **_subjects(
                subjects, [*found, *((gpu,) for gpu, each in enumerate(gpus) if each.device in wrong_with_host)], places
            ),
            seen=f"wrong data arrived: {plural(most, 'wrong element')}, {where}" if found else "wrong data arrived",
            expected="the destination reads exactly what the source sent",
            cause="an IOMMU or ACS between the GPUs, a hypervisor that grants peer access without supporting it, or a "
            "faulty link or memory",
            cure=Cure.of(
                "dmesg | grep -i -E 'Xid|IO_PAGE_FAULT'", comment="Until it is repaired, run with NCCL_P2P_DISABLE=1."
            ),
        )


def _errors(
    matrices: Sequence[CopyMatrix],
    gpus: Sequence[CopyGpu],
    others: Sequence[tuple[str, p2p.Cell]],
    places: Sequence[DevicePlace],
) -> Iterator[Finding]:
    by_error: dict[str, dict[str, Collection[int]]] = {}
    for matrix in matrices:
        for pair, cell in matrix.cells.items():
            if cell.error:
                by_error.setdefault(cell.error, {})[_pair(pair, gpus)] = pair
    for name, cell in others:
        if cell.error:
            by_error.setdefault(cell.error, {})[name] = ()
    for error, subjects in by_error.items():
        yield Finding(
            id="copy-failed",
            severity=Verdict.ERROR,
            **_subjects(list(subjects), subjects.values(), places),
            seen=error,
            expected="a copy without errors",
            cause="GPU memory used by other jobs, or peer access that is granted but fails",
            cure=Cure.of("nvidia-smi", comment="`gpubench topo` shows the driver's facts about these GPUs."),
        )


def staged_pairs(matrices: Sequence[CopyMatrix], outruns_host: OutrunsHost = _no_pair) -> dict[p2p.Pair, str]:
    """Host-staged pairs with peer access on, by NVLink counters, else by times equal to those with it off."""
    found = {
        pair: _counted(cell)
        for matrix in matrices
        for pair, cell in matrix.cells.items()
        if matrix.series.peer and cell.is_staged
    }
    on, off = _written_cells(matrices, peer=True), _written_cells(matrices, peer=False)
    size_bytes = max((size for size in off if size in on and on[size].series.is_judged), default=None)
    if size_bytes is None:
        return found
    soon, late = (way[p2p.LATENCY_BYTES].cells if p2p.LATENCY_BYTES in way else {} for way in (on, off))
    for pair, cell in on[size_bytes].cells.items():
        without = off[size_bytes].cells.get(pair)
        if without is None or cell.is_staged is not None:
            continue
        latencies = soon.get(pair), late.get(pair)
        if p2p.looks_staged(cell, without, *latencies, outruns_host=outruns_host(pair)):
            found.setdefault(pair, p2p.AS_SLOW_AS_STAGED)
    return found


def _counted(cell: p2p.Cell) -> str:
    carried = cell.carried
    nvlink = f"{carried.nvlink_share:.0%} of the bytes went over NVLink, whose counters moved for other pairs"
    return f"{nvlink}; they went over PCIe" if (carried.pcie_share or 0) >= p2p.MOVED_SHARE else nvlink


def _written_cells(matrices: Sequence[CopyMatrix], *, peer: bool) -> dict[int, CopyMatrix]:
    wanted = (Engine.CE, Direction.WRITE, peer)
    return {
        matrix.series.size_bytes: matrix
        for matrix in matrices
        if (matrix.series.engine, matrix.series.direction, matrix.series.peer) == wanted
    }


def _unprofitable(
    matrices: Sequence[CopyMatrix],
    gpus: Sequence[CopyGpu],
    path_of: Callable[[p2p.Pair], str],
    places: Sequence[DevicePlace],
) -> Iterator[Finding]:
    """Pairs of one socket to which host memory is the faster way; NCCL does not use peer access across sockets."""
    off = _written_cells(matrices, peer=False)
    for size_bytes, matrix in _written_cells(matrices, peer=True).items():
        if not matrix.series.is_judged or size_bytes not in off:
            continue
        shares = {
            pair: gb_s / off[size_bytes].gb_s[pair]
            for pair, gb_s in matrix.gb_s.items()
            if pair in off[size_bytes].gb_s
        }
        slower = [pair for pair, share in shares.items() if share < p2p.SLOW_SHARE and path_of(pair) != ACROSS_SOCKETS]
        if slower:
            worst = min(slower, key=shares.__getitem__)
            yield Finding(
                id="p2p-slower-than-staging",
                severity=Verdict.WARN,
                **_subjects([_pair(pair, gpus) for pair in slower], slower, places),
                seen=f"{matrix.gb_s[worst]:.4g} GB/s with peer access, "
                f"{off[size_bytes].gb_s[worst]:.4g} through host memory",
                expected="peer access at least as fast as host memory",
                cause="ACS redirects peer traffic to the root port, or the path has a narrow hop",
                cure=Cure.of(
                    "sudo lspci -vvv | grep -i acsctl", comment="NCCL_P2P_LEVEL=PIX keeps NCCL off such pairs."
                ),
            )


def _noisy(matrices: Sequence[CopyMatrix], gpus: Sequence[CopyGpu], places: Sequence[DevicePlace]) -> Iterator[Finding]:
    noisy = {
        pair: None
        for matrix in matrices
        for pair, (verdict, _) in matrix.verdicts.items()
        if verdict is Verdict.INCONCLUSIVE and matrix.series.direction is not Direction.BOTH
    }
    if noisy:
        yield Finding(
            id="p2p-noisy",
            severity=Verdict.INCONCLUSIVE,
            **_subjects([_pair(pair, gpus) for pair in noisy], noisy, places),
            seen="samples differ by more than 10 %, close to a threshold",
            expected="samples within a few percent",
            cause="traffic of other jobs, or changing clocks",
            cure=Cure.of("gpubench p2p", comment="Run it again while the machine is idle."),
        )


def _pair(pair: p2p.Pair, gpus: Sequence[CopyGpu]) -> str:
    return f"{gpus[pair[0]].device} → {gpus[pair[1]].device}"


class _Subjects(TypedDict):
    subject: str
    subjects: tuple[str, ...]
    places: tuple[DevicePlace, ...]


def _subjects(named: Sequence[str], gpus: Iterable[Collection[int]], places: Sequence[DevicePlace]) -> _Subjects:
    """The names of some copies, and the places of the GPUs that took part in each."""
    at = tuple(dict.fromkeys(places[gpu] for each in gpus for gpu in each)) if places else ()
    return {"subject": shorten(named, _MOST_PAIRS), "subjects": tuple(named), "places": at}


_MOST_SUBJECTS = 4

_NOT_THERE_SHARE = 0.5
"""A kernel that needs more than this share of the page fault time reads pages that are not on its GPU: on H200, reading
local pages takes a twentieth of it."""

_FASTER_THAN_LINK = 1.3  # A kernel this much faster than plain remote memory reads pages that have moved


def managed_findings(
    request: P2pRequest, cells: Mapping[ManagedCopy, p2p.Cell], machine: CopyMachine, matrices: Sequence[CopyMatrix]
) -> tuple[Finding, ...]:
    """All findings about managed memory; none if it was not measured."""
    seen = _Observed(request, cells, machine, matrices)
    return (*seen.find_no_concurrent_access(), *seen.ignored_prefetch(), *seen.moved_anyway(), *seen.through_host())


class _Observed:
    def __init__(
        self,
        request: P2pRequest,
        cells: Mapping[ManagedCopy, p2p.Cell],
        machine: CopyMachine,
        matrices: Sequence[CopyMatrix],
    ) -> None:
        self._request, self._machine, self._matrices = request, machine, matrices
        self._cells = {copy: cell for copy, cell in cells.items() if cell.seconds}

    def find_no_concurrent_access(self) -> Iterator[Finding]:
        lacking = [each for each in self._request.managed if each.missing_feature]
        if lacking:
            yield self._finding(
                "managed-without-concurrent-access",
                [each.device for each in lacking],
                seen="; ".join(each.missing_feature for each in lacking[:_MOST_SUBJECTS]),
                expected="concurrentManagedAccess 1, as on Linux with GPUs since Pascal",
                cause="Windows or WSL, a vGPU without unified memory, or an older GPU: whole allocations move at every "
                "kernel launch, and the host must not use them meanwhile",
                cure=Cure(comment="Use cudaMemcpy between plain allocations: prefetch and advice have no effect here."),
            )

    def ignored_prefetch(self) -> Iterator[Finding]:
        """GPUs whose pages were missing after an accepted prefetch from the host."""
        found = {}
        for copy, cell in self._cells.items():
            faults = self._cells.get(ManagedCopy(ManagedWay.FAULTS, copy.source, copy.destination))
            if copy.way is ManagedWay.RESIDENT and faults is not None:
                share = cell.typical_seconds / faults.typical_seconds
                if share > _NOT_THERE_SHARE:
                    found[self._ends(copy)] = f"{share:.0%} of the page fault time"
        if found:
            yield self._finding(
                "managed-prefetch-ignored",
                list(found),
                seen=f"the driver accepted the prefetch, but a kernel then needed {next(iter(found.values()))}",
                expected="pages on the GPU after the prefetch",
                cause="full GPU memory, or a driver that pins the pages elsewhere",
                cure=Cure.of("nvidia-smi", comment="Or query cudaMemRangeAttributeLastPrefetchLocation in a program."),
            )

    def moved_anyway(self) -> Iterator[Finding]:
        """Ends whose pages moved to the GPU that used them, against the advice."""
        found = {}
        for copy, cell in self._cells.items():
            plain = self._plain_seconds(copy)
            if copy.way is ManagedWay.IN_PLACE and plain is not None and plain > _FASTER_THAN_LINK * min(cell.seconds):
                found[self._ends(copy)] = f"{self._gb_s(min(cell.seconds))} GB/s, plain memory {self._gb_s(plain)}"
        if found:
            yield self._finding(
                "managed-moved-anyway",
                list(found),
                seen=f"faster than the link between them: {next(iter(found.values()))}",
                expected="pages that stay at their preferred location, as fast as plain memory there",
                cause="the driver migrates frequently used pages (access counters) in spite of the advice",
                cure=Cure.of(
                    "modinfo nvidia-uvm | grep access_counter", comment="Use plain memory where pages must stay."
                ),
            )

    def through_host(self) -> Iterator[Finding]:
        direct = {
            pair
            for matrix in self._matrices
            for pair, cell in matrix.cells.items()
            if matrix.series.peer and cell.is_staged is False and (cell.carried.nvlink_share or 0) >= p2p.MOVED_SHARE
        }
        found = {}
        for copy, cell in self._cells.items():
            share = cell.carried.nvlink_share
            if (copy.source, copy.destination) in direct and share is not None and share < p2p.MOVED_SHARE:
                found[f"{self._ends(copy)} ({copy.way})"] = f"{share:.0%} of the bytes went over NVLink"
        if found:
            yield self._finding(
                "managed-through-host",
                list(found),
                seen=next(iter(found.values())),
                expected="pages over NVLink, like plain copies between these GPUs",
                cause="the driver migrates pages between GPUs through host memory",
                cure=Cure(
                    comment="Use cudaMemcpyPeer between plain allocations, or prefetch through the host on purpose."
                ),
            )

    def _plain_seconds(self, copy: ManagedCopy) -> float | None:
        if copy.source is None or copy.destination is None:
            pinned = self._cells.get(ManagedCopy(ManagedWay.PINNED_KERNEL, copy.source, copy.destination))
            return None if pinned is None else pinned.typical_seconds
        pair = copy.source, copy.destination
        kernels = (matrix.cells.get(pair) for matrix in self._matrices if matrix.series.engine is Engine.SM)
        return next((cell.typical_seconds for cell in kernels if cell is not None and cell.seconds), None)

    def _gb_s(self, seconds: float) -> str:
        return f"{(self._request.managed_bytes or 0) / seconds / BYTES_PER_GB:.3g}"

    def _ends(self, copy: ManagedCopy) -> str:
        ends = ("host" if end is None else self._machine.label(end) for end in (copy.source, copy.destination))
        return " → ".join(ends)

    def _finding(
        self, name: str, subjects: Sequence[str], *, seen: str, expected: str, cause: str, cure: Cure
    ) -> Finding:
        return Finding(
            id=name,
            severity=Verdict.WARN,
            subject=shorten(subjects, _MOST_SUBJECTS),
            subjects=tuple(subjects),
            seen=seen,
            expected=expected,
            cause=cause,
            cure=cure,
        )
