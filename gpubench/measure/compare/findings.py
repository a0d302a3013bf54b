"""The findings of a comparison: one for each way in which rows got worse, the worst first."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpubench.measure.compare.circumstances import TOPOLOGY
from gpubench.measure.compare.judge import (
    LOST,
    MISSING,
    NARROWER,
    PATH,
    SLOWER,
    STAGED,
    UNSURE,
    UNVERIFIED,
    WORSE,
    WRONG,
    JudgedRow,
)
from gpubench.measure.compare.rows import RunsByRow
from gpubench.model.paths.evidence import Conclusion
from gpubench.model.results.above_limit import ABOVE_LIMIT
from gpubench.model.results.fallback import MOST_ROWS
from gpubench.model.results.result_file import ResultFile
from gpubench.model.results.rows.comparison import CircumstanceRow, RowKey
from gpubench.model.results.rows.evidence import EvidenceRow
from gpubench.model.terms.units import counted, format_size, some_of
from gpubench.model.terms.verdict import Finding, Verdict, gravity, overall

_MOST_NAMED = 4
_ADVICE: Mapping[str, tuple[str, str, str]] = {
    WRONG: (
        "every element as computed",
        "data were damaged on the way",
        "gpubench p2p names the pair",
    ),
    ABOVE_LIMIT: (
        "figures that links can carry",
        "a link that the driver reports as narrower than it is, a link that was not found, or a wrong time",
        "gpubench topo on that machine shows the links; then measure again",
    ),
    STAGED: (
        "the direct path that was there before",
        "a setting, a driver, a container or a GPU that refuses peer access",
        "gpubench topo, and gpubench explain on NCCL's log, say why",
    ),
    NARROWER: ("the limit of before", "links that are down or slower", "gpubench topo names them"),
    WORSE: ("the verdict of before", "what the new results say of them", "--format csv has every row with its reason"),
    SLOWER: (
        "times as before, within noise",
        "one of the changed circumstances, or a fault",
        "measure again and add it: --new AGAIN.json",
    ),
    LOST: ("a measurement, as before", "the run was cut short, or a device is gone", "the new file's own findings"),
    PATH: ("the path of before", "NCCL, a setting or the wiring changed", "gpubench topo; gpubench explain"),
    UNVERIFIED: ("verified data, as before", "checking was switched off", "leave --no-check out"),
    MISSING: ("every row of the old results", "fewer were asked for, or the run ended early", "measure them too"),
    UNSURE: ("less noise", "single runs of short operations vary", "more runs a side: --base FILE --new FILE"),
}
"""By finding what was expected, the likely cause, the next command; in the order in which findings are shown."""


def findings_of(
    judged: Sequence[JudgedRow],
    ranges: Sequence[Finding],
    sides: tuple[Sequence[ResultFile], Sequence[ResultFile]],
    circumstances: Sequence[CircumstanceRow],
) -> list[Finding]:
    """The findings of rows that were compared, of ranges of them, and of the files of both sides."""
    found = [*_of_evidence(*sides), *_of_unseen_paths(*sides), *_of_rows(judged), *ranges, *_of_files(*sides)]
    changed = [row for row in circumstances if row.changed and row.name == TOPOLOGY]
    found += [
        Finding(
            id="topology-changed",
            severity=Verdict.WARN,
            subject="the machine's wiring",
            seen=f"fingerprint {row.new}",
            expected=f"{row.base}, as before",
            cause="a device, a link or what the system shows of them changed",
            next_command="gpubench topo on both, side by side",
        )
        for row in changed
    ]
    return sorted(found, key=lambda each: (gravity(each.severity), each.id != WRONG))


def _of_rows(judged: Sequence[JudgedRow]) -> Iterator[Finding]:
    for finding, advice in _ADVICE.items():
        held = [(each.row, reason) for each in judged for reason in each.reasons if reason.finding == finding]
        if finding == SLOWER:
            held.sort(key=lambda each: -(each[0].slower_percent or 0))
        if held:
            names = tuple(row.name for row, _ in held)
            texts = list(dict.fromkeys(reason.text for _, reason in held))
            subject = f"{counted(len(names), 'row')}: {some_of(names, _MOST_NAMED)}"
            seen = texts[0] + (", the first of them" if len(texts) > 1 else "")
            severity = overall(reason.verdict for _, reason in held)
            yield Finding(finding, severity, subject, seen, *advice, subjects=names)


def _of_evidence(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Iterator[Finding]:
    """Paths that were direct by all evidence, and are not any more."""
    before = {(row.source, row.destination): row for row in _evidence(base)}
    worse: dict[str, list[str]] = {}
    for row in _evidence(new):
        old = before.get((row.source, row.destination))
        if old is not None and old.conclusion == Conclusion.DIRECT and row.conclusion in _BAD:
            worse.setdefault(row.conclusion, []).append(f"{row.source} → {row.destination}")
    for conclusion, paths in worse.items():
        shown = ", ".join(paths[:_MOST_NAMED]) + (" …" if len(paths) > _MOST_NAMED else "")
        yield Finding(
            id="path-was-direct",
            severity=Verdict.FAIL,
            subject=shown,
            seen=f"{conclusion} by all evidence",
            expected="direct, as before",
            cause=_ADVICE[STAGED][1],
            next_command=_ADVICE[STAGED][2],
            subjects=tuple(paths),
        )


def _of_unseen_paths(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Iterator[Finding]:
    """Paths that were direct, and of which the new results say nothing: of none at all, or not of pairs that copied."""
    direct = {(row.source, row.destination) for row in _evidence(base) if row.conclusion == Conclusion.DIRECT}
    seen = {(row.source, row.destination) for row in _evidence(new)}
    copied = {(row.source, row.destination) for file in new for row in file.pairs if row.bandwidth_gb_s is not None}
    paths = [f"{source} → {to}" for source, to in sorted(direct - seen) if not seen or (source, to) in copied]
    if paths and len(direct) < MOST_ROWS and all(file.evidence is not None for file in new):
        yield Finding(
            id="path-not-seen",
            severity=Verdict.WARN,
            subject=some_of(paths, _MOST_NAMED),
            seen="direct by all evidence before; nothing shows the path now",
            expected="evidence of the path, as before",
            cause="a listener that was switched off, or another library than before",
            next_command="gpubench p2p, or gpubench allreduce, with the options of the old run",
            subjects=tuple(paths),
        )


def _evidence(files: Sequence[ResultFile]) -> Iterator[EvidenceRow]:
    return (row for file in files for row in file.evidence or ())


_BAD = (Conclusion.STAGED, Conclusion.WRONG, Conclusion.IMPOSSIBLE)


def _of_files(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Iterator[Finding]:
    for file in (*base, *new):
        if not file.complete:
            yield Finding(
                id="incomplete",
                severity=Verdict.WARN,
                subject=file.name,
                seen="; ".join(file.remarks) or "the run was cut short",
                expected="results of a run that ended",
                cause="a time-out, a crash, a full disk, or a file that was cut off",
                next_command="measure again",
            )
    for file in new:
        wrong = file.circumstances.wrong_elements
        if wrong and not (any(row.wrong for row in file.rows) or any(row.wrong for row in file.latencies)):
            yield Finding(WRONG, Verdict.FAIL, file.name, f"out of bounds values: {wrong}", *_ADVICE[WRONG])


def worse_result(base: Sequence[ResultFile], new: Sequence[ResultFile], told: Iterable[Finding]) -> Iterator[Finding]:
    """A new result whose own verdict is FAIL or ERROR, where the old ones' is not and no row or finding says why."""
    before = min((gravity(each.verdict) for each in base if each.verdict), default=gravity(Verdict.PASS))
    worst = min((each for each in new if each.verdict), key=lambda each: gravity(each.verdict or ""), default=None)
    if worst is None or worst.verdict is None or gravity(worst.verdict) > gravity(Verdict.ERROR):
        return
    if gravity(worst.verdict) < min((before, *(gravity(each.severity) for each in told))):
        yield Finding(
            id=WORSE,
            severity=Verdict(worst.verdict),
            subject=worst.name,
            seen=f"the verdict of the new result itself is {worst.verdict}",
            expected="a verdict no worse than that of the old results",
            cause="its own findings, which are none of the rows that both sides have",
            next_command=f"gpubench report {worst.name}",
        )


def nothing_compared(base: RunsByRow, new: RunsByRow) -> Finding:
    """The finding that both sides have no row in common, with the columns in which no value is the same."""
    differ = []
    for name in RowKey.__dataclass_fields__:
        before, after = ({getattr(key, name) for key in side} for side in (base, new))
        if before and after and not before & after:
            differ.append(f"{name} {_listed(name, after)}, not {_listed(name, before)}")
    return Finding(
        id="nothing-compared",
        severity=Verdict.ERROR,
        subject=f"{len(base)} old and {len(new)} new rows",
        seen="; ".join(differ) or "no row of one side is one of the other's",
        expected="at least one row that both sides have",
        cause="other sizes, types, ranks or collectives were measured" if base and new else "a side has no rows",
        next_command="measure the new side with the options of the old one",
    )


def _listed(column: str, values: set[Any]) -> str:
    known = sorted(value for value in values if value is not None)
    texts = [format_size(value) if column == "size_bytes" else str(value) for value in known]
    texts += ["unknown"] if None in values else []
    return ", ".join(texts[:_MOST_NAMED]) + (" …" if len(texts) > _MOST_NAMED else "")
