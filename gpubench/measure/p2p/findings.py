"""Findings on measured copies: wrong data, failed copies, slow pairs, noise, and managed memory on the wrong device."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

from gpubench.measure.p2p.request import CopyMachine, ManagedCopy, P2pRequest
from gpubench.measure.p2p.rows import CopyMatrix
from gpubench.model.paths import p2p
from gpubench.model.paths.topology import ACROSS_SOCKETS
from gpubench.model.terms.operation import CopyGpu, Direction, Engine, ManagedWay
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import BYTES_PER_GB, format_bandwidth, plural, shorten
from gpubench.model.terms.verdict import WRONG_DATA, Cure, Finding, Verdict

_MOST_PAIRS = 4

OutrunsHost = Callable[[p2p.Pair], bool]
"""True if a direct copy between two GPUs is faster than any copy through host memory."""


def copy_findings(
    matrices: Sequence[CopyMatrix],
    gpus: Sequence[CopyGpu],
    wrong_with_host: Sequence[str],
    others: Sequence[tuple[str, p2p.Cell]] = (),
    find_path_class: Callable[[p2p.Pair], str] = lambda _: "",
    places: Sequence[DevicePlace] = (),
) -> tuple[Finding, ...]:
    """Return the findings on copies that are wrong, failed, noisy, or slower than through host memory.

    `wrong_with_host` are GPUs with wrong data to or from host memory. `others` are copies outside the matrices. Other
    slow copies and host-staged paths are reported elsewhere.
    """
    return (
        *_find_wrong_data(matrices, gpus, wrong_with_host, others, places),
        *_find_failed_copies(matrices, gpus, others, places),
        *_find_slower_than_staging(matrices, gpus, find_path_class, places),
        *_find_noisy_copies(matrices, gpus, places),
    )


def _find_wrong_data(
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
    # A pattern has wrong data if one of its pairs has. Name the pattern only if no single pair has wrong data.
    at_once = [name for name, cell in others if cell.wrong and not with_host and not found]
    subjects = [_pair(pair, gpus) for pair in found] + with_host + at_once
    if subjects:
        yield Finding(
            id=WRONG_DATA,
            severity=Verdict.FAIL,
            **_subjects(
                subjects,
                [*found, *((number,) for number, gpu in enumerate(gpus) if gpu.device in wrong_with_host)],
                places,
            ),
            seen=f"wrong data arrived: {plural(most, 'wrong element')}, {where}" if found else "wrong data arrived",
            expected="the destination reads exactly the data that the source sent",
            cause="an IOMMU or ACS between the GPUs, a hypervisor that grants peer access without supporting it, or a "
            "faulty link or memory",
            cure=Cure.of(
                "dmesg | grep -i -E 'Xid|IO_PAGE_FAULT'", comment="Until it is repaired, run with NCCL_P2P_DISABLE=1."
            ),
        )


def _find_failed_copies(
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
            cure=Cure.of("nvidia-smi", comment="`gpubench topo` shows what the driver reports about these GPUs."),
        )


def staged_pairs(
    matrices: Sequence[CopyMatrix], outruns_host: OutrunsHost = lambda _pair: False
) -> dict[p2p.Pair, str]:
    """Return the pairs that are host-staged although peer access is on, with the evidence as text.

    The evidence is link counters, or copies that take as long as without peer access.
    """
    found = {
        pair: _counter_text(cell)
        for matrix in matrices
        for pair, cell in matrix.cells.items()
        if matrix.series.peer and cell.is_staged
    }
    on, off = _written_cells(matrices, peer=True), _written_cells(matrices, peer=False)
    size_bytes = max((size for size in off if size in on and on[size].series.is_judged), default=None)
    if size_bytes is None:
        return found
    latencies_on, latencies_off = (
        matrices_by_size[p2p.LATENCY_BYTES].cells if p2p.LATENCY_BYTES in matrices_by_size else {}
        for matrices_by_size in (on, off)
    )
    for pair, cell in on[size_bytes].cells.items():
        without = off[size_bytes].cells.get(pair)
        if without is None or cell.is_staged is not None:
            continue
        latencies = latencies_on.get(pair), latencies_off.get(pair)
        if p2p.looks_staged(cell, without, *latencies, outruns_host=outruns_host(pair)):
            found.setdefault(pair, p2p.AS_SLOW_AS_STAGED)
    return found


def _counter_text(cell: p2p.Cell) -> str:
    carried = cell.carried
    nvlink = f"{carried.nvlink_share:.0%} of the bytes went over NVLink, although its counters work for other pairs"
    return f"{nvlink}; PCIe carried the rest" if (carried.pcie_share or 0) >= p2p.MOVED_SHARE else nvlink


def _written_cells(matrices: Sequence[CopyMatrix], *, peer: bool) -> dict[int, CopyMatrix]:
    wanted = (Engine.CE, Direction.WRITE, peer)
    return {
        matrix.series.size_bytes: matrix
        for matrix in matrices
        if (matrix.series.engine, matrix.series.direction, matrix.series.peer) == wanted
    }


def _find_slower_than_staging(
    matrices: Sequence[CopyMatrix],
    gpus: Sequence[CopyGpu],
    find_path_class: Callable[[p2p.Pair], str],
    places: Sequence[DevicePlace],
) -> Iterator[Finding]:
    """Find pairs that are faster through host memory.

    Skip pairs across sockets, where NCCL does not use peer access.
    """
    off = _written_cells(matrices, peer=False)
    for size_bytes, matrix in _written_cells(matrices, peer=True).items():
        if not matrix.series.is_judged or size_bytes not in off:
            continue
        shares = {
            pair: gb_s / off[size_bytes].gb_s[pair]
            for pair, gb_s in matrix.gb_s.items()
            if pair in off[size_bytes].gb_s
        }
        slower = [
            pair for pair, share in shares.items() if share < p2p.SLOW_SHARE and find_path_class(pair) != ACROSS_SOCKETS
        ]
        if slower:
            worst = min(slower, key=shares.__getitem__)
            yield Finding(
                id="p2p-slower-than-staging",
                severity=Verdict.WARN,
                **_subjects([_pair(pair, gpus) for pair in slower], slower, places),
                seen=f"{format_bandwidth(matrix.gb_s[worst], 4)} with peer access, "
                f"{format_bandwidth(off[size_bytes].gb_s[worst], 4)} through host memory",
                expected="peer access at least as fast as host memory",
                cause="ACS redirects peer traffic to the root port, or the path has a narrow hop",
                cure=Cure.of(
                    "sudo lspci -vvv | grep -i acsctl",
                    comment="With NCCL_P2P_LEVEL=PIX, NCCL does not use peer access for such pairs.",
                ),
            )


def _find_noisy_copies(
    matrices: Sequence[CopyMatrix], gpus: Sequence[CopyGpu], places: Sequence[DevicePlace]
) -> Iterator[Finding]:
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
    """Return the subject fields of a finding. `named` are the names of copies, and `gpus` the GPUs of each copy."""
    known = tuple(dict.fromkeys(places[gpu] for copy_gpus in gpus for gpu in copy_gpus)) if places else ()
    return {"subject": shorten(named, _MOST_PAIRS), "subjects": tuple(named), "places": known}


_MOST_SUBJECTS = 4

_REMOTE_SHARE = 0.5
"""If a kernel takes more than this share of the page fault time, its pages are not on its GPU. On an H200, local
pages take a twentieth of that time.
"""

_FASTER_THAN_LINK = 1.3  # If a kernel is this much faster than plain remote memory, its pages have migrated


def managed_findings(
    request: P2pRequest, cells: Mapping[ManagedCopy, p2p.Cell], machine: CopyMachine, matrices: Sequence[CopyMatrix]
) -> tuple[Finding, ...]:
    """Return the findings on managed memory. There are none if it was not measured."""
    judge = _ManagedJudge(request, cells, machine, matrices)
    return (
        *judge.find_missing_access(),
        *judge.find_ignored_prefetches(),
        *judge.find_ignored_advice(),
        *judge.find_staged_copies(),
    )


class _ManagedJudge:
    def __init__(
        self,
        request: P2pRequest,
        cells: Mapping[ManagedCopy, p2p.Cell],
        machine: CopyMachine,
        matrices: Sequence[CopyMatrix],
    ) -> None:
        self._request, self._machine, self._matrices = request, machine, matrices
        self._cells = {copy: cell for copy, cell in cells.items() if cell.seconds}

    def find_missing_access(self) -> Iterator[Finding]:
        lacking = [gpu for gpu in self._request.managed if gpu.missing_feature]
        if lacking:
            yield self._finding(
                "managed-without-concurrent-access",
                [gpu.device for gpu in lacking],
                seen="; ".join(gpu.missing_feature for gpu in lacking[:_MOST_SUBJECTS]),
                expected="concurrentManagedAccess 1, as on Linux with Pascal or newer GPUs",
                cause="Windows or WSL, a vGPU without unified memory, or an older GPU (each kernel launch moves "
                "whole allocations, which the host must not use meanwhile)",
                cure=Cure(comment="Use cudaMemcpy between plain allocations: prefetch and advice have no effect here."),
            )

    def find_ignored_prefetches(self) -> Iterator[Finding]:
        """Find GPUs that do not have the pages although the driver accepted a prefetch from the host."""
        found = {}
        for copy, cell in self._cells.items():
            faults = self._cells.get(ManagedCopy(ManagedWay.FAULTS, copy.source, copy.destination))
            if copy.way is ManagedWay.RESIDENT and faults is not None:
                share = cell.typical_seconds / faults.typical_seconds
                if share > _REMOTE_SHARE:
                    found[self._name(copy)] = f"{share:.0%} of the page fault time"
        if found:
            yield self._finding(
                "managed-prefetch-ignored",
                list(found),
                seen=f"the driver accepted the prefetch, but a kernel then needed {next(iter(found.values()))}",
                expected="pages on the GPU after the prefetch",
                cause="full GPU memory, or a driver that pins the pages elsewhere",
                cure=Cure.of("nvidia-smi", comment="Or query cudaMemRangeAttributeLastPrefetchLocation in a program."),
            )

    def find_ignored_advice(self) -> Iterator[Finding]:
        """Find copies whose pages migrated to the GPU that used them, although the advice was to keep them in place."""
        found = {}
        for copy, cell in self._cells.items():
            plain = self._plain_seconds(copy)
            if copy.way is ManagedWay.IN_PLACE and plain is not None and plain > _FASTER_THAN_LINK * min(cell.seconds):
                found[self._name(copy)] = f"{self._gb_s(min(cell.seconds))} GB/s, plain memory {self._gb_s(plain)}"
        if found:
            yield self._finding(
                "managed-moved-anyway",
                list(found),
                seen=f"faster than the link between them: {next(iter(found.values()))}",
                expected="pages that stay at their preferred location, as fast as plain memory there",
                cause="the driver migrates frequently used pages (access counters) despite the advice",
                cure=Cure.of(
                    "modinfo nvidia-uvm | grep access_counter", comment="Use plain memory where pages must stay."
                ),
            )

    def find_staged_copies(self) -> Iterator[Finding]:
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
                found[f"{self._name(copy)} ({copy.way})"] = f"{share:.0%} of the bytes went over NVLink"
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

    def _name(self, copy: ManagedCopy) -> str:
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
