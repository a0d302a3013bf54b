"""Findings of two checks side by side: new, graver, milder or gone; and checks and devices that the new one lacks."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpubench.conditions.checks import merged
from gpubench.conditions.registry import ids_now
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.rows.checks import VerdictRow
from gpubench.model.results.rows.comparison import FindingChangeRow, FindingStatus
from gpubench.model.terms.units import some_of
from gpubench.model.terms.verdict import Finding, Verdict, gravity

NEW, GRAVER, NOT_LOOKED_AT, GONE = "new-finding", "graver-finding", "not-looked-at", "device-gone"

_INDEX = re.compile(r"GPU\d+ (?=\()", re.ASCII)
"""The number of a GPU before its bus id: with one GPU less, all after it are counted anew."""

_FindingsBySubject = Mapping[tuple[str, str], Finding]
"""Findings, one a subject, by id and subject without the numbers of GPUs."""

_LOOKED_AT = (Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.INCONCLUSIVE)
_STATUSES = tuple(FindingStatus)


def all_have_findings(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> bool:
    """True where every file of both sides has the findings of its run."""
    return all(file.findings is not None for file in (*base, *new))


def finding_changes(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> list[FindingChangeRow]:
    """A row a finding and thing that it is on, the gravest first; of several runs of a side the gravest counts."""
    before, after = _found(base), _found(new)
    before = {_key_now(key, after): finding for key, finding in before.items()}
    rows = [_row(before.get(key), after.get(key)) for key in {**after, **before}]
    return sorted(rows, key=lambda row: (gravity(row.verdict), _STATUSES.index(FindingStatus(row.status))))


def _found(files: Sequence[ResultFile]) -> _FindingsBySubject:
    found: dict[tuple[str, str], Finding] = {}
    for finding in (each for file in files for each in file.findings or ()):
        for subject in finding.subjects or (finding.subject,):
            known = found.setdefault(_key(finding.id, subject), finding)
            if known is finding or gravity(finding.severity) < gravity(known.severity):
                found[_key(finding.id, subject)] = replace(finding, subject=subject, subjects=())
    return found


def _key_now(key: tuple[str, str], after: _FindingsBySubject) -> tuple[str, str]:
    """Under what the new results have a finding of old ones: conditions were renamed, and some were split."""
    now = ((id_, key[1]) for id_ in ids_now(key[0]))
    return key if key in after else next((each for each in now if each in after), key)


def _key(finding: str, subject: str) -> tuple[str, str]:
    return finding, _INDEX.sub("", subject)


def _row(before: Finding | None, after: Finding | None) -> FindingChangeRow:
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
    named = next(each for each in (after, before) if each is not None)
    return FindingChangeRow(
        finding=named.id,
        subject=named.subject,
        status=status,
        verdict=_verdict(named.severity) if worse else Verdict.PASS,
        base_severity=before.severity if before is not None else None,
        new_severity=after.severity if after is not None else None,
        base_seen=before.seen if before is not None else None,
        new_seen=after.seen if after is not None else None,
    )


def _verdict(severity: Verdict) -> Verdict:
    """The verdict on a finding that was not there before: its own, but SKIP is no change."""
    return Verdict.PASS if severity is Verdict.SKIP else severity


def health_findings(
    base: Sequence[ResultFile], new: Sequence[ResultFile], rows: Sequence[FindingChangeRow]
) -> Iterator[Finding]:
    """Findings that are new or graver, in the words of the new results; devices that are gone; checks left out."""
    after = _found(new)
    for status, name in ((FindingStatus.NEW, NEW), (FindingStatus.GRAVER, GRAVER)):
        worse = [row for row in rows if row.status == status and row.verdict != Verdict.PASS]
        for found in merged(_as_now(after[_key(row.finding, row.subject)], row) for row in worse):
            yield replace(found, id=name, subject=f"{found.id}: {found.subject}")
    yield from _devices_gone(base, new)
    yield from _not_looked_at(base, new)


def _devices_gone(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Iterator[Finding]:
    """GPUs and NICs of the same hosts that no new result knows: no check finds them, for none knows they were there."""
    before, after = ({_place(row): row.subject for file in side for row in file.devices} for side in (base, new))
    hosts = [{host for file in side for host in file.circumstances.hosts} for side in (base, new)]
    gone = [subject for place, subject in before.items() if place not in after]
    if gone and hosts[0] == hosts[1]:
        yield Finding(
            id=GONE,
            severity=Verdict.FAIL,
            subject=some_of(gone),
            seen="was there before, and is not now" if len(gone) == 1 else "were there before, and are not now",
            expected="every GPU and NIC of the old results",
            cause="a device fell off the bus (Xid 79), was hidden from this process, or was taken out",
            next_command="lspci; dmesg | grep Xid; echo $CUDA_VISIBLE_DEVICES",
            subjects=tuple(gone),
        )


def _place(row: VerdictRow) -> tuple[str, str]:
    """The node and bus id of a device, else its name: its number changes when another device is gone."""
    return row.node, row.subject.rpartition("(")[2]


def _as_now(finding: Finding, row: FindingChangeRow) -> Finding:
    return replace(finding, severity=Verdict(row.verdict), seen=f"{finding.seen}; {_before(row)}")


def _before(row: FindingChangeRow) -> str:
    return "not found before" if row.base_severity is None else f"{row.base_severity} before, {row.base_seen}"


def _not_looked_at(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Iterator[Finding]:
    before = {name for file in base for name, verdict in file.checks.items() if verdict in _LOOKED_AT}
    after = {name for file in new for name, verdict in file.checks.items() if verdict in _LOOKED_AT}
    lost = sorted(before - after)
    if lost and all_have_findings(base, new):
        yield Finding(
            id=NOT_LOOKED_AT,
            severity=Verdict.WARN,
            subject=some_of(lost),
            seen="looked at before, and not now: what they found may be there still",
            expected="every check of the old results",
            cause="--quick, another launcher, or something that could not be measured any more",
            next_command="gpubench check with the options of the old run",
            subjects=tuple(lost),
        )
