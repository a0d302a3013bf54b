"""Judge transfers between two ends that another program measured: perftest, OSU, ucx_perftest or nixlbench.

None of them names GPUs or a path. Between nodes, a NIC's rate is the limit. Inside a node whose NVLinks outrun host
memory, the bandwidth shows whether the data went through host memory.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpubench.measure.path_outcome import report_on, unwatched
from gpubench.model.paths.p2p import ABOVE_HOST, JUDGED_FROM_BYTES, LIMIT_WARN_SHARE
from gpubench.model.paths.transport import Evidence, PathEvidence, State
from gpubench.model.paths.wiring import Wiring
from gpubench.model.results.fallback import NOT_JUDGED, End, Explanation, KnownPath, fallback_rows
from gpubench.model.results.report import PairRow, Report
from gpubench.model.terms.operation import Direction
from gpubench.model.terms.units import format_bandwidth, format_size, group_by, percent, shorten
from gpubench.model.terms.verdict import (
    SLOW_UNEXPLAINED,
    Cure,
    Finding,
    Origin,
    Verdict,
    worst_row_verdict,
    worst_verdict,
)

ENGINES = ("rdma", "mpi", "ucx", "nixl")

_NIC_SHARES = {"nixl": (0.4, 0.25)}
_USUAL_NIC_SHARES = 0.8, 0.5
"""Shares of a NIC's rate to warn and fail below. Healthy ports reach 92 to 98 % with perftest, by MTU. NIXL's own
progress thread costs up to 42 % (measure/kv.py), so its transfers below 80 % are not judged unless they are far slower.
"""

_LEAST_BYTES = {"rdma": 2**16, "nixl": JUDGED_FROM_BYTES}
_USUAL_LEAST_BYTES = 4 * 2**20
"""Smallest transfers that are judged. OSU and UCX keep 32 to 64 of them in flight: 4 MiB reached 94 % of the bandwidth
of 32 MiB between two A100s. perftest's default is 64 KiB.
"""

_FASTER_THAN_NIC = 1.05  # Then several NICs share a transfer, or the rate is another one


class TransferMachine(Struct, frozen=True):
    """What joins the two ends: the `nic_gb_s` of a NIC between nodes, or the `wiring` of the GPUs of one node.

    They are None if that is not known. `missing` says why the wiring is no limit.
    """

    nic_gb_s: float | None = None
    wiring: Wiring | None = None
    missing: str = ""


def judge_transfers(rows: Sequence[PairRow], machine: TransferMachine, name: str) -> tuple[list[PairRow], Report]:
    """Return the rows with limits and verdicts, and the report on them. `name` is the file's."""
    largest = {kind: max(row.size_bytes or 0 for row in alike) for kind, alike in group_by(rows, _kind).items()}
    found = [_judge(row, machine, is_largest=row.size_bytes == largest[_kind(row)]) for row in rows]
    judged, paths = [row for row, _ in found], [path for _, path in found if path is not None]
    fallback = fallback_rows(paths, Origin.RECORDED, lambda _: _UNEXPLAINED)
    outcome = report_on(paths, fallback, Origin.RECORDED, ())
    staged = {path.pair for path in paths if path.evidence.measurement.state is State.CONTRADICTING}
    findings = [*outcome.findings, *_slow(judged, staged)] or list(_not_judged(judged, machine, name))
    verdicts = [Verdict(row.verdict) for row in judged if row.verdict] or [Verdict.SKIP]
    report = Report(
        verdict=worst_verdict([worst_row_verdict(verdicts), *(finding.severity for finding in findings)]),
        complete=True,
        findings=tuple(findings),
        sections=outcome.sections,
        main=PairRow.section,
    )
    return judged, report if paths else unwatched(report, "the text does not name the path", Origin.RECORDED)


def _kind(row: PairRow) -> tuple[object, ...]:
    return row.source, row.destination, row.engine, row.direction


def _judge(row: PairRow, machine: TransferMachine, *, is_largest: bool) -> tuple[PairRow, KnownPath | None]:
    """Return the row with its limit. The largest row of its kind also gets a verdict, and its path if that is known."""
    rate = row.bandwidth_gb_s
    if rate is None or row.verdict is not None:
        return row, None
    both = 2 if row.direction == Direction.BOTH else 1
    is_between_gpus = "(device)" in row.source and "(device)" in row.destination and row.scope != "network"
    wiring = machine.wiring if is_between_gpus else None
    by_nic = row.scope == "network" or machine.wiring is None
    limit = wiring.limit((0, 1)).gb_s if wiring is not None else machine.nic_gb_s if by_nic else None
    if limit is not None:
        row = replace(row, limit_gb_s=both * limit, limit_percent=percent(rate, both * limit))
    if not is_largest:
        return row, None
    if why := _why_not_judged(row, machine):
        return replace(row, verdict=Verdict.SKIP, note=_note(row, f"not judged: {why}")), None
    return (_judge_by_nic(row), None) if wiring is None else _judge_inside_node(row, wiring, rate / both)


def _why_not_judged(row: PairRow, machine: TransferMachine) -> str:
    least, ends = _LEAST_BYTES.get(row.engine or "", _USUAL_LEAST_BYTES), f"{row.source} {row.destination}"
    if "storage" in ends:
        return "the limit of storage is not known"
    if "blocks" in ends:
        return "every block costs time"
    if (row.size_bytes or 0) < least:
        return f"smaller than {format_size(least)}"
    if row.scope == "network":
        return "" if row.limit_gb_s is not None else "the rate of the NIC is not known"
    if machine.missing or row.limit_gb_s is not None:
        return machine.missing
    if machine.wiring is None:
        return "neither the machine nor the NIC is known"
    return "not between two GPUs" if "(host)" in ends else "the text does not show whether it used GPU memory"


def _note(row: PairRow, words: str) -> str:
    return "; ".join(filter(None, (row.note, words)))


def _judge_by_nic(row: PairRow) -> PairRow:
    share = (row.limit_percent or 0.0) / 100
    warn, fail = _NIC_SHARES.get(row.engine or "", _USUAL_NIC_SHARES)
    if share > _FASTER_THAN_NIC:
        note = "not judged: faster than one NIC, so several carry it, or --nics is wrong"
        return replace(row, verdict=Verdict.SKIP, limit_percent=None, note=_note(row, note))
    if share >= _USUAL_NIC_SHARES[0]:
        return replace(row, verdict=Verdict.PASS)
    if share >= warn:
        note = "speed not judged: NIXL's progress thread takes part"
        return replace(row, verdict=Verdict.SKIP, note=_note(row, note))
    return replace(row, verdict=Verdict.FAIL if share < fail else Verdict.WARN)


def _judge_inside_node(row: PairRow, wiring: Wiring, rate: float) -> tuple[PairRow, KnownPath | None]:
    """Judge a transfer between two GPUs whose NVLinks are faster than host memory. `rate` is in one direction."""
    staged, limit = wiring.staged_gb_s((0, 1)) or 0.0, wiring.limit((0, 1)).gb_s or 0.0
    most = f"host memory carries at most {format_bandwidth(staged, 3)}"
    seen = (
        f"{format_bandwidth(rate, 3)} at {format_size(row.size_bytes or 0)}, but NVLinks carry "
        f"{format_bandwidth(limit, 3)}; {most}"
    )
    if rate > ABOVE_HOST * staged:
        evidence, is_staged = Evidence(State.PRESENT, f"{format_bandwidth(rate, 3)}, but {most}"), False
    elif rate < staged:
        evidence, is_staged = Evidence(State.CONTRADICTING, seen), True
    else:
        return replace(row, verdict=Verdict.SKIP, note=_note(row, f"may be either path: {most}")), None
    verdict = Verdict.FAIL if is_staged else Verdict.PASS if rate >= LIMIT_WARN_SHARE * limit else Verdict.SKIP
    note = "speed not judged: below 60 % of the limit" if verdict is Verdict.SKIP else ""
    path = KnownPath(
        source=End(row.source, row.source, row.source_node, None),
        destination=End(row.destination, row.destination, row.destination_node, None),
        evidence=PathEvidence(
            capability=Evidence(),
            selection=Evidence(seen="the text does not name the path"),
            measurement=evidence,
            correctness=Evidence(seen="data were not verified"),
        ),
        path_class=wiring.path((0, 1)),
        bandwidth_gb_s=rate,
        limit_gb_s=limit,
    )
    return replace(
        row, verdict=verdict, host_staged=is_staged, note=_note(row, note) or None, path_class=path.path_class
    ), path


_UNEXPLAINED = Explanation(
    "unknown",
    "not known: cuda_ipc is missing or disabled, or the processes cannot see each other's GPU",
    Cure.of("gpubench kv", comment="It measures GPU memory between two processes, and names UCX's path and its cause."),
)


def _slow(rows: Sequence[PairRow], staged: set[str]) -> Iterator[Finding]:
    slow = [row for row in rows if row.verdict in (Verdict.WARN, Verdict.FAIL) and row.limit_percent]
    slow = [row for row in slow if f"{row.source} → {row.destination}" not in staged]
    if slow:
        worst = min(slow, key=lambda row: row.limit_percent or 0.0)
        on_gpu = "(device)" in f"{worst.source}{worst.destination}"
        cause = "a narrow PCIe link, a small MTU, or a slow or busy link"
        yield Finding(
            id=SLOW_UNEXPLAINED,
            severity=worst_verdict([Verdict(row.verdict) for row in slow if row.verdict]),
            subject=shorten([f"{row.source} → {row.destination}" for row in slow]),
            seen=f"{format_bandwidth(worst.bandwidth_gb_s or 0.0, 3)} at {format_size(worst.size_bytes or 0)}",
            expected=f"at least 80 % of the NIC's {format_bandwidth(worst.limit_gb_s or 0.0, 3)}",
            cause=f"a GPU far from the NIC, no GPUDirect RDMA, {cause}" if on_gpu else cause,
            cure=Cure.of("gpubench topo", comment="Run it on both hosts. It shows each NIC's PCIe link and its GPUs."),
            expected_percent=worst.limit_percent,
        )


def _not_judged(rows: Sequence[PairRow], machine: TransferMachine, name: str) -> Iterator[Finding]:
    skipped = [row for row in rows if row.verdict == Verdict.SKIP]
    if not skipped or any(row.verdict == Verdict.PASS for row in rows):
        return
    lacks_nic = skipped[0].scope == "network" and machine.nic_gb_s is None
    option = "--nics 1x400" if lacks_nic else "--machine hgx-h100-8"
    again = Cure.of(f"gpubench report {name} {option}", comment="Use the values of your machine.")
    measure = Cure.of(
        "gpubench kv", comment="Run it on that machine. It measures such transfers, and names their path."
    )
    yield Finding(
        id=NOT_JUDGED,
        severity=Verdict.SKIP,
        subject=name,
        seen=(skipped[-1].note or "").rpartition("; ")[2],
        expected="large transfers of one block, over links whose limit is known",
        cause="the program prints neither GPUs nor a NIC's rate",
        cure=again if lacks_nic or machine == TransferMachine() else measure,
    )
