"""Build reports that compare two sets of results, two health checks, a history of dated results, or two machines.

Two machines are compared per collective: peak bandwidth, the size that reaches half of it, latency, and their ratios.
Bus bandwidth does not depend on the number of ranks, so it can be compared between jobs of any size. Times grow with
the number of ranks, so they are compared only between jobs with the same number.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.measure.compare.findings import (
    are_other_hosts,
    check_same_machine,
    circumstance_rows,
    find_changes,
    nothing_compared,
    worse_result,
)
from gpubench.measure.compare.judge import (
    NOT_IN_NEW,
    ComparedRows,
    JudgedRow,
    judge,
    judge_added,
    slower_ranges,
)
from gpubench.measure.compare.noise import ChangeNoise, RunsByRow, gather
from gpubench.model.results.compare import (
    CircumstanceRow,
    ComparisonRow,
    FindingChangeRow,
    FindingStatus,
    HistoryRow,
    MachineRow,
    RowKey,
    Status,
    Use,
    collective_key,
    pair_key,
)
from gpubench.model.results.history import CUT_SHORT, DatedName, ResultHead
from gpubench.model.results.report import FINDINGS_SECTION, PairRow, Report, Table, VerdictRow
from gpubench.model.results.result_file import ResultFile
from gpubench.model.terms.commands import find_command
from gpubench.model.terms.units import group_by, shorten
from gpubench.model.terms.verdict import Cure, Finding, Verdict, gravity, worst_verdict
from gpubench.readers.registry import read_results
from gpubench.readers.results.history import Kept, read_head

SECTIONS_OF_MACHINES = (MachineRow.section, CircumstanceRow.section, FINDINGS_SECTION)
_IN_PLACE = "in_place"


class MachineCurve(Struct, frozen=True):
    """Bandwidth and time by size for one collective or one type of copy. `gpus` and `nodes` are None if unknown."""

    gpus: int | None
    nodes: int | None
    gb_s: Mapping[int, float]
    time_us: Mapping[int, float]

    @property
    def peak_size(self) -> int:
        return max(sorted(self.gb_s), key=self.gb_s.__getitem__)

    @property
    def half_size(self) -> int:
        """The smallest measured size that reaches half of the peak bandwidth."""
        return min(size for size, value in self.gb_s.items() if value >= self.gb_s[self.peak_size] / 2)

    def node_bandwidth(self, size: int) -> float | None:
        return self.gb_s[size] * self.gpus / self.nodes if self.gpus and self.nodes else None


def compare_machines(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Report:
    """Return the report on two machines. It judges nothing, but its verdict is ERROR if nothing can be compared."""
    before, after = _curves(base), _curves(new)
    rows = [_machine_row(name, before[name], after[name]) for name in before if name in after]
    sections = Table.group_by_section({MachineRow: rows, CircumstanceRow: circumstance_rows(base, new)})
    findings = () if rows else (_no_common_collective(before, after),)
    verdict = Verdict.SKIP if rows else Verdict.ERROR
    return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=MachineRow.section)


def _machine_row(name: str, base: MachineCurve, new: MachineCurve) -> MachineRow:
    common = base.gb_s.keys() & new.gb_s.keys()
    sizes = (max(common),) * 2 if common else (base.peak_size, new.peak_size)
    figures = base.gb_s[sizes[0]], new.gb_s[sizes[1]]
    node_figures = base.node_bandwidth(sizes[0]), new.node_bandwidth(sizes[1])
    timed = base.time_us.keys() & new.time_us.keys()
    reason = None
    if base.gpus != new.gpus:
        reason = f"{new.gpus or '?'} ranks, not {base.gpus or '?'} (times grow with the number of ranks)"
    elif not timed:
        reason = "no size in common"
    latency = None if reason else min(timed)
    return MachineRow(
        what=name,
        base_gpus=base.gpus,
        new_gpus=new.gpus,
        base_nodes=base.nodes,
        new_nodes=new.nodes,
        size_bytes=max(common, default=None),
        base_gb_s=figures[0],
        new_gb_s=figures[1],
        ratio=figures[1] / figures[0],
        base_node_gb_s=node_figures[0],
        new_node_gb_s=node_figures[1],
        base_peak_gb_s=base.gb_s[base.peak_size],
        new_peak_gb_s=new.gb_s[new.peak_size],
        base_peak_bytes=base.peak_size,
        new_peak_bytes=new.peak_size,
        base_half_bytes=base.half_size,
        new_half_bytes=new.half_size,
        latency_bytes=latency,
        base_latency_us=None if latency is None else base.time_us[latency],
        new_latency_us=None if latency is None else new.time_us[latency],
        reason=reason,
    )


def _curves(files: Sequence[ResultFile]) -> dict[str, MachineCurve]:
    """Return curves by name. Values are medians over runs, and out of place if both placements were measured."""
    found = dict(_collectives(files))
    pairs = [
        row for file in files for row in file.pairs if pair_key(row).setting is None and row.bandwidth_gb_s is not None
    ]
    gpus = len({(node, end) for row in pairs for node, end in _ends(row)})
    nodes = len({node for row in pairs for node, _ in _ends(row)})
    for key, rows in group_by(pairs, lambda row: (row.direction, row.engine, row.peer)).items():
        direction, engine, peer = key
        name = f"copies {direction} {engine}" + (" peer off" if peer == "off" else "")
        gb_s = [(row.size_bytes, row.bandwidth_gb_s) for row in rows]
        found[name] = MachineCurve(
            gpus, nodes, _medians(gb_s), _medians([(row.size_bytes, row.latency_us) for row in rows])
        )
    return {name: curve for name, curve in found.items() if curve.gb_s}


def _collectives(files: Sequence[ResultFile]) -> Iterator[tuple[str, MachineCurve]]:
    rows = [row for file in files for row in file.rows if not row.wrong and row.group is None]

    def case(key: RowKey) -> RowKey:
        return replace(key, ranks=None, nodes=None, size_bytes=None)

    cases = group_by(rows, lambda row: case(collective_key(row)))
    for key, alike in cases.items():
        if key.placement == _IN_PLACE and replace(key, placement="out_of_place") in cases:
            continue
        largest = max(alike, key=lambda row: row.ranks)
        same = [row for row in alike if (row.ranks, row.nodes) == (largest.ranks, largest.nodes)]
        backend = "" if key.backend == "nccl" else f" {key.backend}"
        yield (
            key.name + backend,
            MachineCurve(
                largest.ranks,
                largest.nodes,
                _medians([(row.size_bytes, row.busbw_gb_s) for row in same]),
                _medians([(row.size_bytes, row.time_us) for row in same]),
            ),
        )


def _medians(points: Sequence[tuple[int | None, float | None]]) -> dict[int, float]:
    known = [(size, value) for size, value in points if size is not None and value]
    groups = group_by(known, lambda point: point[0])
    return {size: median(value for _, value in group) for size, group in groups.items()}


def _ends(row: PairRow) -> tuple[tuple[str, str], tuple[str, str]]:
    return (row.source_node, row.source), (row.destination_node, row.destination)


def _no_common_collective(before: Mapping[str, MachineCurve], after: Mapping[str, MachineCurve]) -> Finding:
    listed = [shorten(list(side)) if side else "no values" for side in (after, before)]
    return Finding(
        id="nothing-compared",
        severity=Verdict.ERROR,
        subject="the two machines",
        seen=f"nothing in common: {listed[0]}, not {listed[1]}",
        expected="the same collective, type and reduction on both machines",
        cause="other commands or options were run" if before and after else "one side has no values",
        cure=Cure(comment="Measure the new side with the options of the old one."),
    )


NEW, GRAVER, NOT_LOOKED_AT, GONE = "new-finding", "graver-finding", "not-looked-at", "device-gone"

_INDEX = re.compile(r"GPU\d+ (?=\()", re.ASCII)
"""The index of a GPU before its bus ID. If one GPU is missing, the indices of all later GPUs change."""

_FindingsBySubject = Mapping[tuple[str, str], Finding]
"""One finding per subject. The key is the finding's id, and the subject without GPU indices."""

_LOOKED_AT = (Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.INCONCLUSIVE)
_STATUSES = tuple(FindingStatus)


def _all_have_findings(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> bool:
    return all(file.findings is not None for file in (*base, *new))


def finding_changes(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> list[FindingChangeRow]:
    """Return one row per finding and subject, most severe first. Of several runs, use the most severe finding."""
    before, after = _findings_by_subject(base), _findings_by_subject(new)
    if not before and not after:
        return []
    # Import late: it takes a tenth of the start-up time, and healthy machines do not need it.
    from gpubench.conditions.registry import current_ids

    def now(key: tuple[str, str]) -> tuple[str, str]:
        """Return the key in the new results for an old finding, because conditions may have been renamed."""
        ids = ((id_, key[1]) for id_ in current_ids(key[0]))
        return key if key in after else next((candidate for candidate in ids if candidate in after), key)

    before = {now(key): finding for key, finding in before.items()}
    rows = [_finding_change(before.get(key), after.get(key)) for key in {**after, **before}]
    return sorted(rows, key=lambda row: (gravity(row.verdict), _STATUSES.index(FindingStatus(row.status))))


def _findings_by_subject(files: Sequence[ResultFile]) -> _FindingsBySubject:
    found: dict[tuple[str, str], Finding] = {}
    for finding in (finding for file in files for finding in file.findings or ()):
        for subject in finding.subjects or (finding.subject,):
            known = found.setdefault(_finding_key(finding.id, subject), finding)
            if known is finding or gravity(finding.severity) < gravity(known.severity):
                found[_finding_key(finding.id, subject)] = replace(finding, subject=subject, subjects=())
    return found


def _finding_key(finding: str, subject: str) -> tuple[str, str]:
    return finding, _INDEX.sub("", subject)


def _finding_change(before: Finding | None, after: Finding | None) -> FindingChangeRow:
    if after is None:
        status = FindingStatus.GONE
    elif before is None:
        status = FindingStatus.NEW
    elif after.severity == before.severity:
        status = FindingStatus.SAME
    else:
        graver = gravity(after.severity) < gravity(before.severity)
        status = FindingStatus.GRAVER if graver else FindingStatus.MILDER
    worse = after is not None and status in (FindingStatus.NEW, FindingStatus.GRAVER)
    named = next(finding for finding in (after, before) if finding is not None)
    return FindingChangeRow(
        finding=named.id,
        subject=named.subject,
        status=status,
        verdict=named.severity if worse and named.severity is not Verdict.SKIP else Verdict.PASS,
        base_severity=before.severity if before is not None else None,
        new_severity=after.severity if after is not None else None,
        base_seen=before.seen if before is not None else None,
        new_seen=after.seen if after is not None else None,
    )


def _worse_findings(new: Sequence[ResultFile], rows: Sequence[FindingChangeRow]) -> tuple[list[str], list[Finding]]:
    """Return the findings that are new or more severe in the new results.

    The first list has the name NEW or GRAVER for each finding.
    """
    after = _findings_by_subject(new)
    names: list[str] = []
    findings: list[Finding] = []
    for status, name in ((FindingStatus.NEW, NEW), (FindingStatus.GRAVER, GRAVER)):
        if worse := [row for row in rows if row.status == status and row.verdict != Verdict.PASS]:
            from gpubench.conditions.checks import merged

            renewed = []
            for row in worse:
                finding = after[_finding_key(row.finding, row.subject)]
                before = (
                    "not found before" if row.base_severity is None else f"{row.base_severity} before, {row.base_seen}"
                )
                renewed.append(replace(finding, severity=Verdict(row.verdict), seen=f"{finding.seen}; {before}"))
            found = merged(renewed)
            findings += found
            names += [name] * len(found)
    return names, findings


def _devices_gone(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Iterator[Finding]:
    before, after = ({_place(row): row.subject for file in side for row in file.devices} for side in (base, new))
    hosts = [{host for file in side for host in file.circumstances.hosts} for side in (base, new)]
    gone = [subject for place, subject in before.items() if place not in after]
    if gone and hosts[0] == hosts[1]:
        yield Finding(
            id=GONE,
            severity=Verdict.FAIL,
            subject=shorten(gone),
            seen="missing from the new results",
            expected="every GPU and NIC of the old results",
            cause="a device fell off the bus (Xid 79), is hidden from this process, or was removed",
            cure=Cure.of("dmesg | grep Xid", comment="Check `lspci` and CUDA_VISIBLE_DEVICES too."),
            subjects=tuple(gone),
        )


def _place(row: VerdictRow) -> tuple[str, str]:
    """Return the node and bus ID of a device, or its name if it has no bus ID.

    Device indices are not used, because they change if another device is missing.
    """
    return row.node, row.subject.rpartition("(")[2]


def _lost_checks(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Iterator[Finding]:
    before = {name for file in base for name, verdict in file.checks.items() if verdict in _LOOKED_AT}
    after = {name for file in new for name, verdict in file.checks.items() if verdict in _LOOKED_AT}
    lost = sorted(before - after)
    if lost and _all_have_findings(base, new):
        yield Finding(
            id=NOT_LOOKED_AT,
            severity=Verdict.WARN,
            subject=shorten(lost),
            seen="checked before, but not now (their old findings may still apply)",
            expected="every check of the old results",
            cause="--quick, another launcher, or a measurement that is no longer possible",
            cure=Cure.of("gpubench check", comment="Use the options of the old run."),
            subjects=tuple(lost),
        )


OTHER_MACHINE = "--other-machine"
SECTIONS = ("comparison", "finding_changes", "circumstances", "findings")


def compare(
    base: Sequence[ResultFile],
    new: Sequence[ResultFile],
    threshold_percent: float | None = None,
    *,
    other_machine: bool = False,
) -> Report:
    """Return the report that compares new results with old ones, worst row first. Each file of a side is one run.

    Raises: UsageError if the GPUs differ or only one side is simulated, unless `other_machine` is set.
    """
    if not other_machine:
        check_same_machine(base, new, OTHER_MACHINE)
    before, after = gather(base, new)
    noise = ChangeNoise(before, after, other_hosts=are_other_hosts(base, new), files=(len(base), len(new)))
    judged = sorted(
        _judge_rows(before, after, noise, threshold_percent),
        key=lambda row: (gravity(row.verdict), row.status is not Status.COMPARED, -100 * (row.slower or 0.0)),
    )
    circumstances = circumstance_rows(base, new)
    ranges = list(slower_ranges(before, after, noise, judged)) if threshold_percent is None else []
    rows = ComparedRows(judged)
    have_findings = _all_have_findings(base, new)
    changes = finding_changes(base, new) if have_findings else []
    names, roots = _worse_findings(new, changes)
    findings = find_changes(judged, rows, ranges, (base, new), circumstances, roots)
    shown = [
        replace(root, id=name, subject=f"{root.id}: {root.subject}") for name, root in zip(names, roots, strict=True)
    ]
    findings = [*shown, *_devices_gone(base, new), *_lost_checks(base, new), *findings]
    findings = sorted([*worse_result(base, new, findings), *findings], key=lambda finding: gravity(finding.severity))
    if before.keys().isdisjoint(after) and not have_findings:
        findings = [nothing_compared(before, after)]
        verdict = Verdict.ERROR
    else:
        verdicts = {row.verdict for row in judged} - {Verdict.SKIP}
        verdict = worst_verdict([Verdict.PASS, *verdicts, *(finding.severity for finding in findings)])
    sections = Table.group_by_section({ComparisonRow: rows, FindingChangeRow: changes, CircumstanceRow: circumstances})
    return Report(verdict=verdict, complete=True, findings=findings, sections=sections, main=ComparisonRow.section)


def _judge_rows(
    before: RunsByRow, after: RunsByRow, noise: ChangeNoise, threshold_percent: float | None
) -> list[JudgedRow]:
    both, missing = list[JudgedRow](), list[JudgedRow]()
    for key, base in before.items():
        if (new := after.get(key)) is not None:
            both.append(judge(key, base, new, noise, threshold_percent))
        else:
            missing.append(JudgedRow(key, Status.MISSING, Verdict.WARN, base, (), NOT_IN_NEW))
    added = after.items() if len(both) < len(after) else ()
    return [*both, *missing, *(judge_added(key, new) for key, new in added if key not in before)]


MOST_LOOKED_AT = 5000
"""Read the metadata of this many results, newest first. More would take longer than two seconds."""

MOST_SERIES = 64
"""Limit on the kinds of results that are compared. With more kinds, the folder mixes machines, so use one per
machine.
"""


class ResultSeries(Struct, frozen=True):
    """The newest result of a kind, and the results before it, oldest first. `name` is the name of the newest one."""

    name: str
    base: tuple[ResultFile, ...]
    new: ResultFile


class HistorySelection(Struct, frozen=True):
    """The comparisons for a folder, and how each of its files is used, newest first.

    `doubts` are files that users would expect in a comparison but that are left out, with the reason.
    """

    series: tuple[ResultSeries, ...]
    files: tuple[HistoryRow, ...]
    doubts: tuple[tuple[str, str], ...]


Kind = list[tuple[DatedName, ResultHead]]
"""Results of one kind (same command, machine and options), newest first."""


class _Folder(Struct):
    kept: Kept
    heads: dict[DatedName, ResultHead] = field(default_factory=dict)
    uses: dict[DatedName, HistoryRow] = field(default_factory=dict)
    unfit: dict[DatedName, str] = field(default_factory=dict)
    doubts: list[tuple[str, str]] = field(default_factory=list)

    def note(self, name: DatedName, use: Use, series: str | None = None, reason: str | None = None) -> None:
        head = self.heads.get(name)
        self.uses[name] = HistoryRow(
            file=str(name),
            started_at=head.started_at if head else None,
            command=name.command,
            host=name.host,
            run_verdict=head.verdict if head else None,
            use=use,
            series=series,
            reason=reason,
        )

    def leave_out(self, name: DatedName, reason: str) -> None:
        self.note(name, Use.LEFT_OUT, reason=reason)

    def reject(self, name: DatedName, reason: str) -> None:
        self.unfit[name] = reason
        self.leave_out(name, reason)


def choose(kept: Kept, last: int) -> HistorySelection:
    """Select the newest result of every kind in a folder, and the `last` results before it.

    Leave out unusable files.
    """
    folder = _Folder(kept)
    kinds = _kinds(folder)
    series = tuple(_series(folder, kinds, last))
    _doubt_unfit(folder)
    dated = [folder.uses[name] for name in sorted(folder.uses, reverse=True)]
    others = [HistoryRow(file=name, use=Use.LEFT_OUT, reason="not named like a dated result") for name in kept.others]
    return HistorySelection(series, (*dated, *others), tuple(folder.doubts))


def _kinds(folder: _Folder) -> list[Kind]:
    """Group comparable results by kind. The kind with the newest result comes first."""
    kinds: dict[object, Kind] = {}
    for number, name in enumerate(folder.kept.names):
        if not find_command(name.command).measures:
            folder.leave_out(name, f"{name.command} measures nothing")
        elif number >= MOST_LOOKED_AT:
            folder.leave_out(name, f"older than the newest {MOST_LOOKED_AT}, and not opened")
        else:
            head = _read_metadata(folder, name)
            if head is not None:
                kinds.setdefault(head.kind, []).append((name, head))
    return list(kinds.values())


def _read_metadata(folder: _Folder, name: DatedName) -> ResultHead | None:
    try:
        head = folder.heads[name] = read_head(folder.kept.path(name))
    except UsageError as error:
        folder.reject(name, _strip_folder(folder, error))
        return None
    if not head.complete:
        folder.reject(name, CUT_SHORT)
        return None
    return head


def _strip_folder(folder: _Folder, error: UsageError) -> str:
    """Return the error message without the file's path, because the table already shows the file name."""
    return error.seen.removeprefix(f"{folder.kept.folder}/").partition(" ")[2]


def _series(folder: _Folder, kinds: Sequence[Kind], last: int) -> Iterator[ResultSeries]:
    several = [kind for kind in kinds if len(kind) > 1]
    for kind in kinds:
        if len(kind) == 1:
            _leave_out_single(folder, kind[0], kinds)
    for kind in several[MOST_SERIES:]:
        for name, _ in kind:
            folder.leave_out(name, f"not among the newest {MOST_SERIES} kinds (use one folder per machine)")
    for kind in several[:MOST_SERIES]:
        files = _readable(folder, _drop_unusual(folder, kind, last), last + 1)
        if len(files) > 1:
            (newest, new), *before = files
            series = str(newest).removesuffix(".json")
            folder.note(newest, Use.NEW, series)
            for name, _ in before:
                folder.note(name, Use.BASE, series)
            yield ResultSeries(series, tuple(file for _, file in reversed(before)), new)
        elif files:
            folder.leave_out(files[0][0], "no result before it can be read")


def _drop_unusual(folder: _Folder, kind: Kind, last: int) -> Kind:
    """Return the newest result, and the earlier results whose verdict is not worse than the median verdict.

    One bad result in a small baseline would make every change look like noise.
    """
    newest, *before = kind
    goodness = sorted(_verdict_place(head) for _, head in before[: 2 * last + 1])
    usual = goodness[len(goodness) // 2]
    for name, head in before:
        if _verdict_place(head) < usual:
            folder.leave_out(name, f"its run ended with {head.verdict}, and most others ended better")
    return [newest, *(result for result in before if _verdict_place(result[1]) >= usual)]


def _verdict_place(head: ResultHead) -> int:
    """Return the severity rank of a run's verdict, 0 for the worst. A run that judged nothing ranks like PASS."""
    return min(gravity(head.verdict), gravity(Verdict.PASS))


def _readable(folder: _Folder, kind: Kind, count: int) -> list[tuple[DatedName, ResultFile]]:
    files: list[tuple[DatedName, ResultFile]] = []
    for name, _ in kind:
        if len(files) == count:
            folder.leave_out(name, f"older than the last {count - 1}")
            continue
        try:
            file = read_results(folder.kept.path(name))
        except UsageError as error:
            folder.reject(name, _strip_folder(folder, error))
            continue
        if file.rows or file.pairs or file.findings is not None:
            files.append((name, file))
        else:
            folder.leave_out(name, "has no rows to compare")
    return files


def _leave_out_single(folder: _Folder, result: tuple[DatedName, ResultHead], kinds: Sequence[Kind]) -> None:
    """Leave out the only result of its kind. The reason lists its differences from the most similar result.

    If the same machine ran the same command before, add the file to the doubts, because its options or GPUs changed.
    """
    name, head = result
    others = [
        other_head
        for kind in kinds
        for other, other_head in kind
        if other != name and other_head.command == head.command
    ]
    nearest = min(others, key=lambda other: (other.machine != head.machine, other.models != head.models), default=None)
    if nearest is None:
        folder.leave_out(name, f"the only result of {head.command}")
        return
    reason = "; ".join(head.find_differences(nearest))
    folder.leave_out(name, reason)
    same = [other for other in others if other.machine == head.machine]
    if same and all(other.started_at < head.started_at for other in same):
        folder.doubts.append((str(name), reason))


def _doubt_unfit(folder: _Folder) -> None:
    """Add unusable files to the doubts if they are newer than all usable results of the same command and host."""
    usable = {name for name, row in folder.uses.items() if name not in folder.unfit and row.run_verdict is not None}
    for name, reason in folder.unfit.items():
        if all(other < name for other in usable if (other.command, other.host) == (name.command, name.host)):
            folder.doubts.append((str(name), reason))


SECTIONS_OF_HISTORY = (*SECTIONS, HistoryRow.section)

R = TypeVar("R", ComparisonRow, CircumstanceRow, FindingChangeRow)


def compare_history(chosen: HistorySelection, folder: Path, threshold_percent: float | None = None) -> Report:
    """Compare the result files in a folder, and list the files that were left out."""
    reports = {
        series.name: compare(series.base, [series.new], threshold_percent, other_machine=True)
        for series in chosen.series
    }
    again = Cure(comment=f"Run the same command again with `--output {folder}/`.")
    findings = [
        replace(
            finding,
            subject=f"{name}: {finding.subject}" if len(reports) > 1 else finding.subject,
            cure=again if "`--new`" in finding.comment else finding.cure,
        )
        for name, report in reports.items()
        for finding in report.findings
    ]
    findings = sorted([*findings, *_doubts(chosen)], key=lambda finding: gravity(finding.severity))
    if not reports:
        findings.append(_nothing_to_compare(chosen, folder))
    verdicts = [report.verdict for report in reports.values()]
    return Report(
        verdict=worst_verdict([*verdicts, *(finding.severity for finding in findings)]),
        complete=True,
        findings=findings,
        sections=Table.group_by_section(
            {
                ComparisonRow: _collect_rows(reports, ComparisonRow),
                FindingChangeRow: _collect_rows(reports, FindingChangeRow),
                CircumstanceRow: _collect_rows(reports, CircumstanceRow),
                HistoryRow: chosen.files,
            }
        ),
        main=ComparisonRow.section,
    )


def _doubts(chosen: HistorySelection) -> Iterator[Finding]:
    for name, reason in chosen.doubts:
        yield Finding(
            id="newest-left-out",
            severity=Verdict.WARN,
            subject=name,
            seen=reason,
            expected="a complete result with the same GPUs and options as those before it",
            cause="the run was killed or is still running, or had other options",
            cure=Cure(comment="Run the command again as before, and look at this file."),
        )


def _nothing_to_compare(chosen: HistorySelection, folder: Path) -> Finding:
    return Finding(
        id="nothing-before",
        severity=Verdict.ERROR,
        subject=f"{folder}",
        seen="no two results with the same command, machine and options"
        if chosen.files
        else "no results: the folder is empty",
        expected="a newest result and one before it",
        cause="this is the first run, or runs have different options (the section history shows each run)",
        cure=Cure(comment="Run the same command again, with the same --output."),
    )


def _collect_rows(reports: Mapping[str, Report], kind: type[R]) -> list[R]:
    return [replace(row, series=name) for name, report in reports.items() for row in report.rows(kind)]
