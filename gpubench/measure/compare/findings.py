"""The findings of a comparison, one per cause with its rows, and the circumstances that changed between both sides."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.measure.compare import judge
from gpubench.measure.compare.noise import RunsByRow
from gpubench.model.paths.topology import is_gpu_link
from gpubench.model.paths.transport import Conclusion
from gpubench.model.results.compare import HOST, CircumstanceRow, ComparisonRow, RowKey
from gpubench.model.results.fallback import MOST_ROWS
from gpubench.model.results.report import EvidenceRow, RowsByColumn, column_values
from gpubench.model.results.result_file import FileCircumstances, ResultFile
from gpubench.model.results.speed import ABOVE_LIMIT
from gpubench.model.terms import verdict
from gpubench.model.terms.units import format_size, group_by, plural, shorten

TOPOLOGY = "topology"

_MOST_HOSTS = 2

Texts = Mapping[str, str | None]
"""The circumstances of one file by name."""


def check_same_machine(base: Sequence[ResultFile], new: Sequence[ResultFile], option: str) -> None:
    """Raise UsageError if the files are from machines with different GPUs, or if only some are simulated.

    A value that is missing in a file counts as equal. The message suggests `option` to compare them anyway.
    """
    first = base[0]
    for other in (*base[1:], *new):
        differences = list(_differences(first, other))
        if differences:
            raise UsageError(
                f"{other.name} is from a different machine than {first.name}: {'; '.join(differences)}",
                expected="results of the same kind of machine",
                reason="differences between machines are not a regression",
                next_step=f"{option} compares them anyway",
            )


def _differences(one: ResultFile, other: ResultFile) -> Iterator[str]:
    before, after = one.circumstances.gpus, other.circumstances.gpus
    if before and after and Counter(before) != Counter(after):
        yield f"{_counted(after)}, not {_counted(before)}"
    models = [file.circumstances.models for file in (one, other)]
    if all(models) and set(models[0]) != set(models[1]):
        yield f"{' and '.join(models[1])}, not {' and '.join(models[0])}"
    simulated = [_simulated(file) for file in (one, other)]
    if None not in simulated and simulated[0] != simulated[1]:
        yield "simulated, not measured" if simulated[1] else "measured, not simulated"


def _counted(models: Sequence[str]) -> str:
    return " and ".join(f"{count} × {model}" for model, count in Counter(models).items())


def _simulated(file: ResultFile) -> bool | None:
    origins = file.origins
    if not origins and file.circumstances.origin is not None:
        origins = {file.circumstances.origin}
    return verdict.Origin.SIMULATED in origins if origins else None


def are_other_hosts(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> bool:
    """True if both sides name their hosts and the hosts differ. The network between them may then differ too."""
    before, after = ({host for file in side for host in file.circumstances.hosts} for side in (base, new))
    return bool(before) and bool(after) and before != after


def describe_file(file: ResultFile) -> str:
    """Return a description of a file: the tool that wrote it, the NCCL version, GPUs and hosts."""
    known = file.circumstances
    nccl = known.libraries.get("NCCL")
    gpus = _counted(known.gpus) or " and ".join(known.models)
    machine = f"{gpus} on {', '.join(known.hosts[:_MOST_HOSTS])}" if gpus else ""
    more = f" and {len(known.hosts) - _MOST_HOSTS} hosts more" if len(known.hosts) > _MOST_HOSTS else ""
    parts = (known.tool, f"NCCL {nccl.partition(' from ')[0]}" if nccl else "", machine + more)
    return ", ".join(filter(None, parts)) + ("" if machine else "; without the names of the GPUs")


def circumstance_rows(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> list[CircumstanceRow]:
    """Return one row for each circumstance in the files, changed ones first."""
    kinds: tuple[tuple[Callable[[FileCircumstances], Texts | None], str | None], ...] = (
        (_machine_and_tool, None),
        (_libraries, None),
        (lambda known: known.options, None),
        (lambda known: known.environment, "not set"),
    )
    rows: list[CircumstanceRow] = []
    for read, absent in kinds:
        before, after = ([read(file.circumstances) for file in files] for files in (base, new))
        for name in dict.fromkeys(name for texts in (*before, *after) for name in texts or ()):
            old, now = (_joined_values(name, side, absent) for side in (before, after))
            rows.append(CircumstanceRow(name=name, base=old, new=now, changed=None not in (old, now) and old != now))
    return sorted(rows, key=lambda row: not row.changed)


def _joined_values(name: str, files: Iterable[Texts | None], absent: str | None) -> str | None:
    """Return the distinct values of a circumstance, joined by 'or'.

    `absent` is the value for files that list such circumstances, but not this one.
    """
    values = [texts.get(name, absent) for texts in files if texts is not None]
    return " or ".join(dict.fromkeys(value for value in values if value is not None)) or None


def _machine_and_tool(known: FileCircumstances) -> Texts:
    return {
        "GPUs": _counted(known.gpus) or None,
        "hosts": ", ".join(known.hosts) or None,
        TOPOLOGY: known.topology,
        "tool": known.tool if " " in known.tool else None,
        "profile": known.profile,
    }


def _libraries(known: FileCircumstances) -> Texts:
    """Return library versions without file paths, so that two environments with the same version are equal."""
    return {name: text.partition(" from ")[0] for name, text in known.libraries.items()}


_MOST_NAMED = 4
_ADVICE: Mapping[str, tuple[str, str, verdict.Cure]] = {
    judge.WRONG: (
        "every element correct",
        "data corrupted on the way",
        verdict.Cure.of("gpubench p2p", comment="It shows the faulty pair."),
    ),
    ABOVE_LIMIT: (
        "bandwidth within the links' limit",
        "a link reported narrower than it is, a link that was not found, or a wrong time",
        verdict.Cure.of("gpubench topo", comment="Check the links of that machine, then measure again."),
    ),
    judge.STAGED: (
        "a direct path, as before",
        "a setting, driver, container or GPU that refuses peer access",
        verdict.Cure.of("gpubench topo", comment="`gpubench explain` on NCCL's log shows the reason too."),
    ),
    judge.NARROWER: (
        "the same limit as before",
        "links that are down or slower",
        verdict.Cure.of("gpubench topo", comment="It shows the links."),
    ),
    judge.WORSE: (
        "the same verdict as before",
        "the reasons in the new results",
        verdict.Cure(comment="`gpubench compare --format csv` shows every row with its reason."),
    ),
    judge.SLOWER: (
        "the same times as before, within noise",
        "one of the changed circumstances, or a fault",
        verdict.Cure(comment="Measure again, and add the result to this comparison with `--new`."),
    ),
    judge.LOST: (
        "a measurement, as before",
        "the run was cut short, or a device is missing",
        verdict.Cure(comment="`gpubench report` shows the new result."),
    ),
    judge.PATH: ("the same path as before", "NCCL, a setting or the wiring changed", verdict.Cure.of("gpubench topo")),
    judge.UNVERIFIED: (
        "verified data, as before",
        "verification was switched off",
        verdict.Cure(comment="Measure again without `--no-check`."),
    ),
    judge.MISSING: (
        "every row of the old results",
        "fewer rows were requested, or the run ended early",
        verdict.Cure(comment="Measure them too."),
    ),
    judge.UNSURE: (
        "less noise",
        "single runs of short operations vary",
        verdict.Cure(comment="Add more runs with `--base` and `--new`."),
    ),
}
"""Expected value, likely cause and cure for each finding. Findings are shown in this order."""


def find_changes(
    judged: Sequence[judge.JudgedRow],
    compared: RowsByColumn[ComparisonRow],
    ranges: Sequence[verdict.Finding],
    sides: tuple[Sequence[ResultFile], Sequence[ResultFile]],
    circumstances: Sequence[CircumstanceRow],
    roots: list[verdict.Finding],
) -> list[verdict.Finding]:
    """Return the findings on rows, on ranges of rows, and on the files of both sides.

    `roots` are findings that only the new results have. A change that a root explains is added to the consequences of
    the root in `roots`, and not returned.
    """
    hosts = list(dict.fromkeys(host for file in sides[1] for host in file.circumstances.hosts))
    evidence = [
        finding for finding in _evidence_findings(*sides) if not _fold(finding, verdict.HOST_STAGED, roots, hosts)
    ]
    ranges = [finding for finding in ranges if not _fold(finding, verdict.SLOW_UNEXPLAINED, roots, hosts)]
    wiring = [row for row in circumstances if row.changed and row.name == TOPOLOGY]
    known = list(roots)
    stored = _new_cause(*sides)
    rows = [
        _add_cause(finding, wiring, stored)
        for finding in _row_findings(judged, compared, evidence, _Causes(roots, hosts))
    ]
    explained = any(finding.id in _BY_WIRING for finding in rows) or known != roots
    found = [*evidence, *_unseen_path_findings(*sides), *rows, *ranges, *_file_findings(*sides)]
    found += [
        verdict.Finding(
            id="topology-changed",
            severity=verdict.Verdict.WARN,
            subject="the machine's wiring",
            seen=f"fingerprint {row.new}",
            expected=f"{row.base}, as before",
            cause="a device or link changed, or the system shows them differently",
            cure=_COMPARE_WIRING,
        )
        for row in (() if explained else wiring)
    ]
    return sorted(found, key=lambda finding: (verdict.gravity(finding.severity), finding.id != judge.WRONG))


_COMPARE_WIRING = verdict.Cure.of("gpubench topo", comment="Compare its output on both machines.")
_GPUDIRECT = "/GDRDMA"  # In NCCL's log, a network transport with GPUDirect RDMA ends with this suffix
_WITHOUT_GPUDIRECT = (
    "a direct path, as before",
    "GPUDirect RDMA is off: NCCL_NET_GDR_LEVEL, no nvidia-peermem or DMA-BUF, or other NICs",
    verdict.Cure.of("gpubench topo --causes", comment="`gpubench explain` on NCCL's log shows the reason too."),
)
_BY_WIRING = (judge.SLOWER, judge.NARROWER)
"""The findings that a change in wiring explains."""

_FOLDS = {
    judge.SLOWER: (judge.STAGED, judge.NARROWER),
    judge.WORSE: (judge.WRONG, ABOVE_LIMIT, judge.STAGED, judge.NARROWER, judge.SLOWER, judge.LOST),
}
"""For each finding, the findings that explain it if they are about the same row."""


def _new_cause(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> verdict.Finding | None:
    """Return the first finding that only the new results contain and that names a cause and has consequences."""
    excluded = {finding.id for file in base for finding in file.stored}.union(_UNEXPLAINED)
    return next(
        (
            finding
            for file in reversed(new)
            if file.findings is None
            for finding in file.stored
            if finding.severity in (verdict.Verdict.FAIL, verdict.Verdict.WARN)
            and finding.id not in excluded
            and finding.consequences
        ),
        None,
    )


_UNEXPLAINED = tuple(id_ for id_ in verdict.FIGURES if id_ != verdict.HOST_STAGED)


def _add_cause(
    finding: verdict.Finding, wiring: Sequence[CircumstanceRow], stored: verdict.Finding | None
) -> verdict.Finding:
    """Return the finding with a better cause, if known: the new finding `stored`, or else a change in wiring."""
    if stored is not None and finding.id in (judge.SLOWER, judge.STAGED):
        return replace(finding, cause=f"{stored.id}: {stored.subject}: {stored.cause}", cure=stored.cure)
    if finding.id not in _BY_WIRING or not wiring:
        return finding
    changed = f"a device or link changed: topology {wiring[0].base} before, {wiring[0].new} now"
    return replace(finding, cause=changed, cure=_COMPARE_WIRING)


def _fold(finding: verdict.Finding, kind: str, roots: list[verdict.Finding], hosts: Sequence[str]) -> bool:
    """Add a finding to the consequences of the root that explains it. Return False if no root does.

    `kind` is the finding id with which the root is looked up.
    """
    subjects = () if kind == verdict.SLOW_UNEXPLAINED else finding.subjects
    figure = replace(finding, id=kind, subject=", ".join(subjects), subjects=subjects)
    number = _find_cause(figure, roots, hosts, nvlinked=True)
    if number is not None:
        line = f"{finding.id}: {finding.subject}: {finding.seen}"
        roots[number] = replace(roots[number], consequences=(*roots[number].consequences, line))
    return number is not None


class _Causes:
    """The findings that may explain changed rows. It collects the changed rows for each finding."""

    def __init__(self, roots: list[verdict.Finding], hosts: Sequence[str]) -> None:
        self._roots, self._hosts = roots, hosts
        self._known = tuple(roots)
        self._reasons: dict[int, list[judge.Reason]] = {}
        self._find_cached = cache(self._find)

    def take(self, judged: judge.JudgedRow) -> bool:
        """Add a changed row to the finding that explains it. Return False if no finding does."""
        if not any(reason.finding in _FOLLOWS for reason in judged.reasons):
            return False
        shows_bandwidth = (judged.key.size_bytes or 0) >= _LARGE_BYTES
        percent = round(100 / (1 + judged.slower)) if judged.slower is not None and shows_bandwidth else None
        path_class = next((run.path_class for run in (*judged.base, *judged.new) if run.path_class), "")
        nvlinked = is_gpu_link(path_class) and judged.key.peer != "off"
        number = self._find_cached(_finding_kind(judged), _pair_name(judged), percent, nvlinked)
        if number is not None:
            self._reasons.setdefault(number, []).extend(judged.reasons)
        return number is not None

    def fold(self) -> None:
        """Add the collected rows to the consequences of the findings that explain them."""
        for number, reasons in self._reasons.items():
            root = self._roots[number]
            lines = _consequences([reason for reason in reasons if reason.finding in _FOLLOWS])
            self._roots[number] = replace(root, consequences=(*root.consequences, *lines))

    def _find(self, kind: str, pair: str, percent: int | None, nvlinked: bool) -> int | None:  # noqa: FBT001
        if kind == judge.MISSING:
            return next((number for number, root in enumerate(self._known) if root.id in _GONE), None)
        figure = verdict.Finding(
            kind, verdict.Verdict.FAIL, pair, "", "", "", verdict.NO_CURE, expected_percent=percent
        )
        return _find_cause(figure, self._known, self._hosts, nvlinked=nvlinked)


def _find_cause(
    figure: verdict.Finding, roots: Sequence[verdict.Finding], hosts: Sequence[str], *, nvlinked: bool
) -> int | None:
    if not roots:
        return None
    # Import late: it takes a tenth of the start-up time, and healthy machines do not need it
    from gpubench.conditions.folding import cause_of

    return cause_of(figure, roots, hosts, nvlinked=nvlinked)


def _finding_kind(judged: judge.JudgedRow) -> str:
    """Return the id of the finding with which `gpubench check` would report such a row."""
    kinds = {reason.finding for reason in judged.reasons}
    if judge.MISSING in kinds:
        return judge.MISSING
    if judged.key.collective is not None:
        return verdict.SLOW_UNEXPLAINED
    if HOST in (judged.key.source, judged.key.destination):
        return _HOST_COPIES
    return verdict.HOST_STAGED if kinds & {judge.LOST, judge.STAGED} else _PAIR_SLOW


def _pair_name(judged: judge.JudgedRow) -> str:
    """Return a pair's name as in findings, for example 'GPU0 (0000:16:00.0) → GPU3 (0000:19:00.0)'.

    For a collective, return an empty string.
    """
    key = judged.key
    if key.collective is not None:
        return ""
    names = next((run.devices for run in (*judged.new, *judged.base) if run.devices), (key.source, key.destination))
    parts = (key.source_node, f"{names[0]} ({key.source})", "→", f"{names[1]} ({key.destination})")
    return " ".join(filter(None, parts))


_PAIR_SLOW, _HOST_COPIES = "p2p-slow", "host-copies-slow"
_LARGE_BYTES = 2**20
"""Smaller copies show latency, so a longer time does not mean that bandwidth was lost."""

_GONE = ("gpu-lost", "gpu-missing")
"""New findings that explain why rows are missing from the new results."""


def _row_findings(
    judged: Sequence[judge.JudgedRow],
    compared: RowsByColumn[ComparisonRow],
    evidence: list[verdict.Finding],
    causes: _Causes,
) -> Iterator[verdict.Finding]:
    """Yield one finding per cause with its rows, and with the consequences on the same rows.

    Rows that one of the `causes` explains are added to it and not returned. Rows on the paths of a finding in
    `evidence` are added to the consequences of that finding, in place.
    """
    folded: dict[str, list[judge.Reason]] = {}
    rows_by_finding: dict[str, list[tuple[ComparisonRow, judge.Reason]]] = {}
    paths = {path: number for number, finding in enumerate(evidence) for path in finding.subjects}
    below_evidence: dict[int, list[judge.Reason]] = {}
    numbers = [number for number, row in enumerate(judged) if row.reasons and not causes.take(row)]
    causes.fold()
    for place, row in zip(numbers, compared.made(numbers), strict=True):
        ids = {reason.finding for reason in judged[place].reasons}
        pair = " → ".join(map(str, row.ends))
        number = paths.get(pair) if row.collective is None else 0 if evidence else None
        for reason in judged[place].reasons:
            root = next((id_ for id_ in _FOLDS.get(reason.finding, ()) if id_ in ids), None)
            if number is not None and reason.finding in (judge.STAGED, judge.SLOWER, judge.WORSE):
                below_evidence.setdefault(number, []).append(reason)
            elif root is not None:
                folded.setdefault(root, []).append(reason)
            else:
                rows_by_finding.setdefault(reason.finding, []).append((row, reason))
    for number, reasons in below_evidence.items():
        evidence[number] = replace(evidence[number], consequences=_consequences(reasons))
    for finding, advice in _ADVICE.items():
        if worse := rows_by_finding.get(finding):
            first = worse[0][0]
            had_gpudirect = _GPUDIRECT in (first.base_transport or "")
            if finding == judge.STAGED and had_gpudirect and _GPUDIRECT not in (first.new_transport or ""):
                advice = _WITHOUT_GPUDIRECT
            if finding == judge.SLOWER:
                worse.sort(key=lambda item: -(item[0].slower_percent or 0))
            names = tuple(row.name for row, _ in worse)
            texts = list(dict.fromkeys(reason.text for _, reason in worse))
            subject = f"{plural(len(names), 'row')}: {shorten(names, _MOST_NAMED)}"
            seen = texts[0] + (" (first row)" if len(texts) > 1 else "")
            more = folded.get(finding, [])
            severity = verdict.worst_verdict(reason.verdict for reason in (*(reason for _, reason in worse), *more))
            consequences = _consequences(more)
            yield verdict.Finding(finding, severity, subject, seen, *advice, subjects=names, consequences=consequences)


_FOLLOWS = {
    judge.STAGED: "through host memory",
    judge.SLOWER: "slower",
    judge.NARROWER: "with a lower limit",
    judge.WORSE: "with a worse verdict",
    judge.PATH: "over another path",
    judge.LOST: "without a value",
    judge.MISSING: "missing",
}


def _consequences(reasons: Sequence[judge.Reason]) -> tuple[str, ...]:
    """Return one line for each type of change, for example '10 rows slower: 90.2 % slower (noise 2.0 %: …)'."""
    kinds = group_by(reasons, lambda reason: reason.finding)
    return tuple(f"{plural(len(alike), 'row')} {_FOLLOWS[kind]}: {alike[0].text}" for kind, alike in kinds.items())


def _evidence_findings(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Iterator[verdict.Finding]:
    before = {(row.source, row.destination): row for row in _evidence(base)}
    worse: dict[str, list[str]] = {}
    for row in _evidence(new):
        old = before.get((row.source, row.destination))
        if old is not None and old.conclusion == Conclusion.DIRECT and row.conclusion in _BAD:
            worse.setdefault(row.conclusion, []).append(f"{row.source} → {row.destination}")
    for conclusion, paths in worse.items():
        shown = ", ".join(paths[:_MOST_NAMED]) + (" …" if len(paths) > _MOST_NAMED else "")
        yield verdict.Finding(
            id="path-was-direct",
            severity=verdict.Verdict.FAIL,
            subject=shown,
            seen=f"{conclusion} according to all evidence",
            expected="direct, as before",
            cause=_ADVICE[judge.STAGED][1],
            cure=_ADVICE[judge.STAGED][2],
            subjects=tuple(paths),
        )


def _unseen_path_findings(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Iterator[verdict.Finding]:
    """Yield a finding if paths that were direct have no evidence in the new results.

    Ignore pairs that were not measured, unless the new results have no evidence at all.
    """
    direct = {(row.source, row.destination) for row in _evidence(base) if row.conclusion == Conclusion.DIRECT}
    seen = {(row.source, row.destination) for row in _evidence(new)}
    unseen = direct - seen
    if seen and unseen:
        unseen &= {
            (source, to)
            for file in new
            for source, to, gb_s in column_values(file.pairs, "source", "destination", "bandwidth_gb_s")
            if gb_s is not None
        }
    paths = [f"{source} → {to}" for source, to in sorted(unseen)]
    if paths and len(direct) < MOST_ROWS and all(file.evidence is not None for file in new):
        yield verdict.Finding(
            id="path-not-seen",
            severity=verdict.Verdict.WARN,
            subject=shorten(paths, _MOST_NAMED),
            seen="direct according to all evidence before, but no evidence of the path now",
            expected="evidence of the path, as before",
            cause="evidence that was switched off, or a different library",
            cure=verdict.Cure.of(
                "gpubench p2p", comment="Use the options of the old run, also for gpubench allreduce."
            ),
            subjects=tuple(paths),
        )


def _evidence(files: Sequence[ResultFile]) -> Iterator[EvidenceRow]:
    return (row for file in files for row in file.evidence or ())


_BAD = (Conclusion.STAGED, Conclusion.WRONG, Conclusion.IMPOSSIBLE)


def _file_findings(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Iterator[verdict.Finding]:
    for file in (*base, *new):
        if not file.complete:
            yield verdict.Finding(
                id="incomplete",
                severity=verdict.Verdict.WARN,
                subject=file.name,
                seen="; ".join(file.remarks) or "the run was cut short",
                expected="results of a finished run",
                cause="a time-out, a crash, a full disk, or a truncated file",
                cure=verdict.Cure(comment="Measure again."),
            )
    for file in new:
        wrong = file.circumstances.wrong_elements
        if wrong and not (any(row.wrong for row in file.rows) or any(row.wrong for row in file.latencies)):
            yield verdict.Finding(
                judge.WRONG, verdict.Verdict.FAIL, file.name, f"out of bounds values: {wrong}", *_ADVICE[judge.WRONG]
            )


def worse_result(
    base: Sequence[ResultFile], new: Sequence[ResultFile], others: Iterable[verdict.Finding]
) -> Iterator[verdict.Finding]:
    """Yield a finding if a new result failed, the old ones passed, and no other finding explains it."""
    known = [verdict.Verdict(file.verdict) for file in base if file.verdict] or [verdict.Verdict.PASS]
    least = min(map(verdict.gravity, [*known, *(finding.severity for finding in others)]))
    failed = [(verdict.gravity(file.verdict), file.name, file.verdict) for file in new if file.verdict]
    gravity, name, worst = min(failed, key=itemgetter(0), default=(least, "", ""))
    if gravity < least and gravity <= verdict.gravity(verdict.Verdict.ERROR):
        yield verdict.Finding(
            id=judge.WORSE,
            severity=verdict.Verdict(worst),
            subject=name,
            seen=f"the verdict of the new result is {worst}",
            expected="a verdict at least as good as that of the old results",
            cause="findings of the new result that the compared rows do not show",
            cure=verdict.Cure.of(f"gpubench report {name}"),
        )


def nothing_compared(base: RunsByRow, new: RunsByRow) -> verdict.Finding:
    """Return the finding for two sides without a common row. It names the columns that have no common value."""
    differ = []
    for name in RowKey.columns():
        before, after = ({getattr(key, name) for key in side} for side in (base, new))
        if before and after and not before & after:
            differ.append(f"{name} {_joined_cells(name, after)}, not {_joined_cells(name, before)}")
    without = "one side has no rows" if base or new else "neither side has rows of collectives or copies"
    return verdict.Finding(
        id="nothing-compared",
        severity=verdict.Verdict.ERROR,
        subject=f"{len(base)} old and {len(new)} new rows",
        seen="; ".join(differ) or "the two sides have no row in common",
        expected="at least one common row",
        cause="different sizes, types, ranks or collectives" if base and new else without,
        cure=verdict.Cure(comment="Measure the new side with the options of the old one.")
        if base or new
        else verdict.Cure(comment="compare reads rows of collectives and copies."),
    )


def _joined_cells(column: str, values: set[Any]) -> str:
    known = sorted(value for value in values if value is not None)
    texts = [format_size(value) if column == "size_bytes" else str(value) for value in known]
    texts += ["unknown"] if None in values else []
    return ", ".join(texts[:_MOST_NAMED]) + (" …" if len(texts) > _MOST_NAMED else "")
