"""Findings on managed memory: what the driver did instead of what it was asked for."""

from collections.abc import Iterator, Mapping, Sequence

from gpubench.measure.p2p.machine import CopyMachine
from gpubench.measure.p2p.matrix import CopyMatrix
from gpubench.measure.p2p.request import ManagedCopy, P2pRequest
from gpubench.model.paths.p2p import MOVED_SHARE, Cell
from gpubench.model.terms.copies import Engine
from gpubench.model.terms.managed import ManagedWay
from gpubench.model.terms.units import BYTES_PER_GB, some_of
from gpubench.model.terms.verdict import Finding, Verdict

_MOST_SUBJECTS = 4

_NOT_THERE_SHARE = 0.5
"""A kernel that needs more than this part of the time that faults take finds pages that are not on its GPU: on H200 it
reads those of its own GPU in a twentieth of it."""

_FASTER_THAN_LINK = 1.3
"""A kernel that reads pages which shall stay elsewhere by so much faster than plain memory there reads its own."""


def managed_findings(
    request: P2pRequest, cells: Mapping[ManagedCopy, Cell], machine: CopyMachine, matrices: Sequence[CopyMatrix]
) -> tuple[Finding, ...]:
    """All of them; none where managed memory was not measured."""
    seen = _Observed(request, cells, machine, matrices)
    return (*seen.without_concurrent_access(), *seen.ignored_prefetch(), *seen.moved_anyway(), *seen.through_host())


class _Observed:
    """What was measured, and the findings that follow from it."""

    def __init__(
        self,
        request: P2pRequest,
        cells: Mapping[ManagedCopy, Cell],
        machine: CopyMachine,
        matrices: Sequence[CopyMatrix],
    ) -> None:
        self._request, self._machine, self._matrices = request, machine, matrices
        self._cells = {copy: cell for copy, cell in cells.items() if cell.seconds}

    def without_concurrent_access(self) -> Iterator[Finding]:
        lacking = [each for each in self._request.managed if each.lacks]
        if lacking:
            yield self._finding(
                "managed-without-concurrent-access",
                [each.device for each in lacking],
                seen="; ".join(each.lacks for each in lacking[:_MOST_SUBJECTS]),
                expected="concurrentManagedAccess 1, as of GPUs since Pascal under Linux",
                cause="Windows or WSL, a vGPU without unified memory, or an older GPU: whole allocations move at every "
                "launch of a kernel, and the host must not touch them meanwhile",
                next_command="cudaMemcpy between plain allocations; prefetch and advice do nothing here",
            )

    def ignored_prefetch(self) -> Iterator[Finding]:
        """GPUs whose pages were not there after a prefetch from the host had been accepted."""
        found = {}
        for copy, cell in self._cells.items():
            faults = self._cells.get(ManagedCopy(ManagedWay.FAULTS, copy.source, copy.destination))
            if copy.way is ManagedWay.RESIDENT and faults is not None:
                share = cell.typical_seconds / faults.typical_seconds
                if share > _NOT_THERE_SHARE:
                    found[self._ends(copy)] = f"{share:.0%} of what it takes by page faults"
        if found:
            yield self._finding(
                "managed-prefetch-ignored",
                list(found),
                seen=f"the driver accepted the prefetch, and a kernel then needed {next(iter(found.values()))}",
                expected="pages that are on the GPU when the prefetch is done",
                cause="memory of the GPU that is full, or a driver that pins the pages elsewhere",
                next_command="nvidia-smi; cudaMemRangeGetAttribute(cudaMemRangeAttributeLastPrefetchLocation)",
            )

    def moved_anyway(self) -> Iterator[Finding]:
        """Ends whose pages moved to the GPU that used them, although they were advised to stay."""
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
                cause="the driver migrates pages that are used often (access counters), whatever it was advised",
                next_command="modinfo nvidia-uvm | grep access_counter; plain memory where pages have to stay",
            )

    def through_host(self) -> Iterator[Finding]:
        """Pairs whose pages went through host memory although plain copies of theirs went over NVLink."""
        direct = {
            pair
            for matrix in self._matrices
            for pair, cell in matrix.cells.items()
            if matrix.series.peer and cell.is_staged is False and (cell.carried.nvlink_share or 0) >= MOVED_SHARE
        }
        found = {}
        for copy, cell in self._cells.items():
            share = cell.carried.nvlink_share
            if (copy.source, copy.destination) in direct and share is not None and share < MOVED_SHARE:
                found[f"{self._ends(copy)} ({copy.way})"] = f"{share:.0%} of the bytes went over NVLink"
        if found:
            yield self._finding(
                "managed-through-host",
                list(found),
                seen=next(iter(found.values())),
                expected="pages that go over NVLink, as plain copies between these GPUs do",
                cause="the driver migrates between GPUs through host memory",
                next_command="cudaMemcpyPeer between plain allocations, or prefetch to the host and back by design",
            )

    def _plain_seconds(self, copy: ManagedCopy) -> float | None:
        """The seconds of a kernel for the same bytes of plain memory at the same ends."""
        if copy.source is None or copy.destination is None:
            pinned = self._cells.get(ManagedCopy(ManagedWay.PINNED_KERNEL, copy.source, copy.destination))
            return None if pinned is None else pinned.typical_seconds
        pair = copy.source, copy.destination
        kernels = (each.cells.get(pair) for each in self._matrices if each.series.engine is Engine.SM)
        return next((cell.typical_seconds for cell in kernels if cell is not None and cell.seconds), None)

    def _gb_s(self, seconds: float) -> str:
        return f"{(self._request.managed_bytes or 0) / seconds / BYTES_PER_GB:.3g}"

    def _ends(self, copy: ManagedCopy) -> str:
        ends = ("host" if end is None else self._machine.label(end) for end in (copy.source, copy.destination))
        return " → ".join(ends)

    def _finding(
        self, name: str, subjects: Sequence[str], *, seen: str, expected: str, cause: str, next_command: str
    ) -> Finding:
        return Finding(
            id=name,
            severity=Verdict.WARN,
            subject=some_of(subjects, _MOST_SUBJECTS),
            subjects=tuple(subjects),
            seen=seen,
            expected=expected,
            cause=cause,
            next_command=next_command,
        )
