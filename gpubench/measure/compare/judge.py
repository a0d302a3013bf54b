"""Judgement of a comparison: circumstances of both sides, verdicts on rows and ranges of sizes, and findings.

Sixty rows that are 4 % slower each say more than one that is: their middle is known seven times as well. What a run as
a whole differs from another, no number of its rows shows; there the floor for single runs stands, or several runs.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from gpubench.errors import UsageError
from gpubench.measure.compare.noise import (
    FLOOR,
    LARGE_BYTES,
    LEAST_VALUES,
    OWN_SPREAD,
    REPEATED_RUNS,
    TESTS,
    ChangeNoise,
    NoiseBound,
    RunFigures,
    RunsByRow,
    logs_of,
)
from gpubench.model.paths.transport import Conclusion
from gpubench.model.results.compare import (
    Change,
    CircumstanceRow,
    ComparisonRow,
    RowKey,
    Status,
    bandwidth_lost,
)
from gpubench.model.results.fallback import MOST_ROWS
from gpubench.model.results.figures import ABOVE_LIMIT
from gpubench.model.results.report import EvidenceRow
from gpubench.model.results.result_file import FileCircumstances, ResultFile
from gpubench.model.terms.statistics import Noise
from gpubench.model.terms.units import counted, format_size, grouped, some_of
from gpubench.model.terms.verdict import Finding, Origin, Verdict, gravity, overall

TOPOLOGY = "topology"

_MOST_HOSTS = 2

Texts = Mapping[str, str | None]
"""Circumstances of one file, by name."""


def check_same_machine(base: Sequence[ResultFile], new: Sequence[ResultFile], option: str) -> None:
    """Raise UsageError where files are of machines with other GPUs, or a model stands against a measurement.

    What a file does not tell cannot differ. `option` is what asks for the comparison anyway.
    """
    first = base[0]
    for other in (*base[1:], *new):
        differences = list(_differences(first, other))
        if differences:
            raise UsageError(
                f"{other.name} is of another machine than {first.name}: {'; '.join(differences)}",
                expected="results of the same kind of machine",
                reason="differences between machines are no regression",
                next_step=f"{option} compares them all the same",
            )


def have_other_gpus(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> bool:
    """True where the sides have other GPU models, or another number of them."""
    return any(True for _ in _other_gpus(base[0], new[0]))


def _differences(one: ResultFile, other: ResultFile) -> Iterator[str]:
    yield from _other_gpus(one, other)
    simulated = [_simulated(file) for file in (one, other)]
    if None not in simulated and simulated[0] != simulated[1]:
        yield "simulated, and not measured" if simulated[1] else "measured, and not simulated"


def _other_gpus(one: ResultFile, other: ResultFile) -> Iterator[str]:
    before, after = one.circumstances.gpus, other.circumstances.gpus
    if before and after and Counter(before) != Counter(after):
        yield f"{_counted(after)}, and not {_counted(before)}"
    models = [file.circumstances.models for file in (one, other)]
    if all(models) and set(models[0]) != set(models[1]):
        yield f"{' and '.join(models[1])}, and not {' and '.join(models[0])}"


def _counted(models: Sequence[str]) -> str:
    """'4 × NVIDIA H200'."""
    return " and ".join(f"{count} × {model}" for model, count in Counter(models).items())


def _simulated(file: ResultFile) -> bool | None:
    origins = {row.origin for row in file.measured}
    if not origins and file.circumstances.origin is not None:
        origins = {file.circumstances.origin}
    return Origin.SIMULATED in origins if origins else None


def are_other_hosts(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> bool:
    """True where both sides name their hosts, and these are not the same: what lies between them may differ."""
    before, after = ({host for file in side for host in file.circumstances.hosts} for side in (base, new))
    return bool(before) and bool(after) and before != after


def describe_file(file: ResultFile) -> str:
    """A file in words: the tool that wrote it, NCCL's version, GPUs and hosts, or that these are not known."""
    known = file.circumstances
    nccl = known.libraries.get("NCCL")
    gpus = _counted(known.gpus) or " and ".join(known.models)
    machine = f"{gpus} on {', '.join(known.hosts[:_MOST_HOSTS])}" if gpus else ""
    more = f" and {len(known.hosts) - _MOST_HOSTS} hosts more" if len(known.hosts) > _MOST_HOSTS else ""
    parts = (known.tool, f"NCCL {nccl.partition(' from ')[0]}" if nccl else "", machine + more)
    return ", ".join(filter(None, parts)) + ("" if machine else "; does not say of which GPUs")


def circumstance_rows(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> list[CircumstanceRow]:
    """Every circumstance that a file tells of, those that changed first."""
    parts: tuple[Callable[[FileCircumstances], Texts], ...] = (_single, _libraries, lambda each: each.options)
    rows: list[CircumstanceRow] = []
    for texts_of in parts:
        before, after = ([texts_of(file.circumstances) for file in files] for files in (base, new))
        rows += _rows(before, after, None)
    before_set, after_set = ([file.circumstances.environment for file in files] for files in (base, new))
    rows += _rows(before_set, after_set, "not set")
    return sorted(rows, key=lambda row: not row.changed)


def _rows(
    before: Sequence[Texts | None], after: Sequence[Texts | None], absent: str | None
) -> Iterator[CircumstanceRow]:
    """A row a name. `absent` is what it means that a file which tells of such things does not tell of this one."""
    for name in dict.fromkeys(name for each in (*before, *after) for name in each or ()):
        base, new = (_joined(name, [each for each in side if each is not None], absent) for side in (before, after))
        yield CircumstanceRow(name=name, base=base, new=new, changed=None not in (base, new) and base != new)


def _joined(name: str, texts: Sequence[Texts], absent: str | None) -> str | None:
    found = dict.fromkeys(text for each in texts if (text := each.get(name, absent)) is not None)
    return " or ".join(found) or None


def _single(each: FileCircumstances) -> Texts:
    return {
        "GPUs": _counted(each.gpus) or None,
        "hosts": ", ".join(each.hosts) or None,
        TOPOLOGY: each.topology,
        "tool": each.tool if " " in each.tool else None,
        "profile": each.profile,
    }


def _libraries(each: FileCircumstances) -> Texts:
    """Without the file that a library was loaded from: two environments with the same version are alike."""
    return {name: text.partition(" from ")[0] for name, text in each.libraries.items()}


WRONG, STAGED, SLOWER, WORSE, NARROWER, LOST, UNSURE, PATH, UNVERIFIED = (
    *("wrong-data", "now-staged", "slower", "worse-verdict", "lower-limit", "not-measured"),
    *("unsure", "other-path", "not-verified"),
)
MISSING = "missing-rows"

UNSURE_FROM = 0.1
"""A slowdown of more than this that noise hides, and that is more than half of it, is neither shown nor ruled out."""

UNSURE_AT_MOST = 0.25
"""So much is never passed for being less than half of the rows' own spread: else the noisier a run, the more passed."""

_LASTS_US, _NO_HICCUP = 10_000.0, 0.75
"""Neighbouring rows of 1 ms were seen half as long again in one hiccup of a run; an operation of 10 ms and more takes
most of a row's time, so that a hiccup that nearly doubles its mean would have to last as long as the row."""

_ROW_LASTS_US, _USUAL_ITERATIONS = 20_000.0, 20
"""That hiccup lasted 10 ms. On GPUs one of twice that, just in the last rows of a sweep, was not seen; CPU ranks wait
for others much longer. The iterations are nccl-tests', where a file does not tell them."""

_ON_CPUS = "host"
_LIMIT_FALLS = 0.99
_NVLINKS = re.compile(r"NV(\d+)", re.ASCII)
Runs = Sequence[RunFigures]
"""All runs of a side that have the row."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason for the verdict on a row, in words, with the finding that reports it."""

    finding: str
    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A row with all reasons for its verdict."""

    key: RowKey
    row: ComparisonRow
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """The option that decides verdicts: a fixed bound in percent of bandwidth, below 100, in the place of noise."""

    threshold_percent: float | None = None


def judge_missing(key: RowKey, base: Runs) -> JudgedRow:
    """A row that only the old side has."""
    reason = Reason(MISSING, Verdict.WARN, "not in the new results")
    return _judged(key, Status.MISSING, base, (), (reason,))


def judge_added(key: RowKey, new: Runs) -> JudgedRow:
    """A row that only the new side has: nothing to compare, but wrong data are wrong data."""
    reasons = (*_wrong(new), *_above(new))
    return _judged(key, Status.ADDED, (), new, reasons)


def judge(key: RowKey, base: Runs, new: Runs, noise: ChangeNoise, rules: Rules) -> JudgedRow:
    """A row that both sides have."""
    reasons = [*_wrong(new), *_above(new), *_path(base, new), *_limit(base, new), *_verdict(base, new)]
    if any(each.verified for each in base) and not any(each.verified for each in new):
        reasons.append(Reason(UNVERIFIED, Verdict.WARN, "its data are no longer verified"))
    change = noise.change(key)
    if change is None:
        reasons += _unmeasured(base, new)
        return _judged(key, Status.COMPARED, base, new, tuple(reasons))
    slower = math.expm1(change)
    bound = noise.bound(key)
    if rules.threshold_percent is not None:
        bound = NoiseBound(rules.threshold_percent / (100 - rules.threshold_percent), "--threshold")
    way = Change.SLOWER if slower > bound.share else Change.FASTER if math.expm1(-change) > bound.share else Change.SAME
    no_hiccup = slower > _NO_HICCUP and _lasts(base, is_last=noise.is_largest(key) and key.backend != _ON_CPUS)
    alone = way is Change.SLOWER and not no_hiccup and noise.is_isolated(key)
    reasons += _time(slower, bound, rules, alone=alone)
    times: dict[str, object] = {
        "slower_percent": 100 * slower,
        "noise_percent": 100 * bound.share,
        "noise_source": bound.source,
        "change": way.value,
    }
    return _judged(key, Status.COMPARED, base, new, tuple(reasons), times)


def _time(slower: float, bound: NoiseBound, rules: Rules, *, alone: bool) -> Iterator[Reason]:
    """The verdict on a time that is longer by a part of `slower`; `alone`: its neighbours are not longer."""
    how_much = f"{bandwidth_lost(100 * slower):.1f} % slower"
    figures = f"{how_much} (noise {bandwidth_lost(100 * bound.share):.1f} %: {bound.source})"
    if slower <= bound.share:
        most = UNSURE_AT_MOST if bound.source == OWN_SPREAD else math.inf
        if rules.threshold_percent is None and slower > max(UNSURE_FROM, min(bound.share / 2, most)):
            yield Reason(UNSURE, Verdict.INCONCLUSIVE, figures)
    elif rules.threshold_percent is not None:
        yield Reason(SLOWER, Verdict.FAIL, f"{how_much} than before")
    elif alone:
        # A run hiccups at times, by any factor: what one row alone shows in few runs is to be repeated.
        yield Reason(UNSURE, Verdict.INCONCLUSIVE, f"{figures}; its neighbours are not, and runs are few")
    else:
        yield Reason(SLOWER, Verdict.FAIL, figures)


def _lasts(runs: Runs, *, is_last: bool) -> bool:
    """True where one operation takes long, or, in the last rows of a sweep, all of them together."""
    if median(each.time_us or 0.0 for each in runs) >= _LASTS_US:
        return True
    whole = median((each.time_us or 0.0) * (each.iterations or _USUAL_ITERATIONS) for each in runs)
    return is_last and whole >= _ROW_LASTS_US


def _wrong(new: Runs) -> Iterator[Reason]:
    wrong = sum(each.wrong or 0 for each in new)
    if wrong:
        yield Reason(WRONG, Verdict.FAIL, f"{wrong} wrong elements")


def _above(new: Runs) -> Iterator[Reason]:
    """A figure that no link carries is of no use to compare with."""
    times = max((each.times_limit or 0.0 for each in new), default=0.0)
    if times:
        yield Reason(ABOVE_LIMIT, Verdict.ERROR, f"{times:.1f} times the limit")


def _path(base: Runs, new: Runs) -> Iterator[Reason]:
    before, after = staged(base), staged(new)
    if after and before is False:
        ways = [transport(base), transport(new)]
        which = f": {ways[1]}, not {ways[0]}" if all(ways) else ""
        yield Reason(STAGED, Verdict.FAIL, f"direct before, through host memory now{which}")
    elif after and before is None and any(each.host_staged is not None for each in new):
        yield Reason(PATH, Verdict.WARN, "through host memory now; nothing says whether it was before")
    for what, one, other in (
        ("transport", transport(base), transport(new)),
        ("path", _first(each.path_class for each in base), _first(each.path_class for each in new)),
    ):
        if one is not None and other is not None and one != other and not _more_links(one, other):
            yield Reason(PATH, Verdict.WARN, f"{what} {one} before, {other} now")


def _more_links(one: str, other: str) -> bool:
    """True where a path class became one with more NVLinks, NV12 → NV18: nobody has to look at that."""
    links = [_NVLINKS.fullmatch(path) for path in (one, other)]
    return links[0] is not None and links[1] is not None and int(links[1][1]) > int(links[0][1])


def _limit(base: Runs, new: Runs) -> Iterator[Reason]:
    before = [each.limit_gb_s for each in base if each.limit_gb_s is not None]
    after = [each.limit_gb_s for each in new if each.limit_gb_s is not None]
    if before and after and min(after) < _LIMIT_FALLS * min(before):
        yield Reason(NARROWER, Verdict.FAIL, f"limit {min(before):.4g} GB/s before, {min(after):.4g} now")


def _verdict(base: Runs, new: Runs) -> Iterator[Reason]:
    before, after = worst(base), worst(new)
    if before is None or after is None or gravity(after) >= min(gravity(before), gravity(Verdict.PASS)):
        return
    why = next((f": {each.note}" for each in new if each.verdict == after and each.note), "")
    yield Reason(WORSE, after, f"{before} before, {after} now{why}")


def _unmeasured(base: Runs, new: Runs) -> Iterator[Reason]:
    """The reason why a side has no time; none for rows that never have one, as those of topo."""
    if any(each.wrong for each in base):
        yield Reason(LOST, Verdict.INCONCLUSIVE, "the old data were wrong: their time is no baseline")
    elif logs_of(base) and not any(each.wrong for each in new):
        yield Reason(LOST, Verdict.ERROR, "measured before, and could not be now")


def staged(side: Runs) -> bool | None:
    """True where any run of a side went through host memory, None where no run says so or not."""
    known = [each.host_staged for each in side if each.host_staged is not None]
    return any(known) if known else None


def transport(side: Runs) -> str | None:
    """The transports of a side's runs."""
    return _first([each.transport for each in side])


def worst(side: Runs) -> Verdict | None:
    """The worst verdict of a side's runs."""
    verdicts = [Verdict(each.verdict) for each in side if each.verdict is not None]
    return min(verdicts, key=gravity, default=None)


def _first(texts: Iterable[str | None]) -> str | None:
    found = dict.fromkeys(texts)
    return " or ".join([text for text in found if text is not None]) or None


def _judged(
    key: RowKey,
    status: Status,
    base: Runs,
    new: Runs,
    reasons: tuple[Reason, ...],
    times: dict[str, object] | None = None,
) -> JudgedRow:
    quiet = Verdict.SKIP if status is Status.ADDED else Verdict.PASS
    columns: dict[str, object] = {}
    for name, side in (("base", base), ("new", new)):
        columns[f"{name}_time_us"] = _middle([each.time_us for each in side])
        columns[f"{name}_gb_s"] = _middle([each.gb_s for each in side])
        columns[f"{name}_runs"] = len(side)
        columns[f"{name}_origin"] = _first([each.origin for each in side])
        columns[f"{name}_transport"] = transport(side)
        columns[f"{name}_host_staged"] = staged(side)
        columns[f"{name}_verdict"] = worst(side)
    devices = next((each.devices for each in (*new, *base) if each.devices is not None), (None, None))
    columns["source_device"], columns["destination_device"] = devices
    row = ComparisonRow(
        **key.to_record(),
        status=status,
        verdict=overall([quiet, *(each.verdict for each in reasons)]),
        reason="; ".join(each.text for each in reasons) or None,
        **columns,  # type: ignore[arg-type]
        **(times or {}),  # type: ignore[arg-type]
    )
    return JudgedRow(key, row, reasons)


def _middle(figures: Sequence[float | None]) -> float | None:
    known = [each for each in figures if each]
    return median(known) if known else None


RANGE = "slower-together"

_MEDIAN_WIDTH = math.sqrt(math.pi / 2)
"""The standard error of a median over that of a mean."""


@dataclass(frozen=True, slots=True)
class Range:
    """Rows of one kind whose sizes are alike, the change in their middle, and what it has to exceed; both as logs."""

    keys: tuple[RowKey, ...]
    change: float
    bound: float


def slower_ranges(
    before: RunsByRow, after: RunsByRow, noise: ChangeNoise, judged: Iterable[JudgedRow], rules: Rules
) -> Iterator[Finding]:
    """A finding for each range that is slower as a whole, unless most of its rows are named, or a threshold judges."""
    named = {each.key for each in judged if each.row.change == Change.SLOWER}
    if rules.threshold_percent is not None:
        return
    families = [part for family in noise.families for part in _parts(family) if len(part) >= LEAST_VALUES]
    for keys in families:
        found = _range(keys, (before, after), noise, len(families))
        if found is not None and found.change > found.bound and 2 * len(named.intersection(keys)) <= len(keys):
            yield _finding(found)


def _parts(keys: Sequence[RowKey]) -> Iterator[list[RowKey]]:
    """Below 16 MiB, where latency decides, and from there on, where bandwidth does."""
    yield [key for key in keys if (key.size_bytes or 0) < LARGE_BYTES]
    yield [key for key in keys if (key.size_bytes or 0) >= LARGE_BYTES]


def _range(keys: Sequence[RowKey], sides: tuple[RunsByRow, RunsByRow], noise: ChangeNoise, ranges: int) -> Range | None:
    """A range with the smaller of two bounds: from its rows with the floor for single runs, and from its runs."""
    middle = median(change for key in keys if (change := noise.change(key)) is not None)
    bounds = []
    known = [deviation for key in keys if (deviation := noise.of_change(key)) is not None]
    if known:
        error = _MEDIAN_WIDTH * median(each.deviation for each in known) / math.sqrt(len(keys))
        typical = Noise(error, median(each.freedom for each in known))
        bounds.append(max(_floor(keys, noise), typical.bound(TESTS * ranges)))
    runs = [_run_middles(side, keys) for side in sides] if noise.shows_whole_runs(keys[0]) else []
    if runs and min(map(len, runs)) >= REPEATED_RUNS:
        freedom = sum(map(len, runs)) - len(runs)
        squares = sum((each - fmean(side)) ** 2 for side in runs for each in side)
        error = math.sqrt(squares / freedom * sum(1 / len(side) for side in runs))
        bounds.append(max(math.log1p(FLOOR), Noise(error, freedom).bound(TESTS * ranges)))
    return Range(tuple(keys), middle, min(bounds)) if bounds else None


def _floor(keys: Sequence[RowKey], noise: ChangeNoise) -> float:
    return math.log1p(noise.floor(keys[0], median(map(noise.time_us, keys))))


def _run_middles(side: RunsByRow, keys: Sequence[RowKey]) -> list[float]:
    """The middle of the logarithms of each run, where every row has all of them."""
    logs = [logs_of(side[key]) for key in keys]
    runs = min(map(len, logs))
    return [median(each[run] for each in logs) for run in range(runs)] if runs == max(map(len, logs)) else []


def _finding(found: Range) -> Finding:
    first = found.keys[0]
    sizes = sorted({key.size_bytes or 0 for key in found.keys})
    peer = f"peer {first.peer}" if first.peer else None
    what = first.collective or " ".join(filter(None, (first.direction, first.engine, peer)))
    span = " to ".join(dict.fromkeys(map(format_size, (sizes[0], sizes[-1]))))
    return Finding(
        id=RANGE,
        severity=Verdict.FAIL,
        subject=f"{what} {span}: {len(found.keys)} rows together",
        seen=f"{bandwidth_lost(100 * math.expm1(found.change)):.1f} % slower in their middle "
        f"(noise {bandwidth_lost(100 * math.expm1(found.bound)):.1f} %)",
        expected="times as before, within noise",
        cause="one of the changed circumstances, clocks, or a fault",
        next_command="Measure again and add it: --new AGAIN.json",
    )


_MOST_NAMED = 4
_ADVICE: Mapping[str, tuple[str, str, str]] = {
    WRONG: (
        "every element correct",
        "data corrupted on the way",
        "gpubench p2p. It shows the faulty pair",
    ),
    ABOVE_LIMIT: (
        "bandwidth within the links' limit",
        "a link reported narrower than it is, a link that was not found, or a wrong time",
        "gpubench topo. Check the links of that machine, then measure again",
    ),
    STAGED: (
        "a direct path, as before",
        "a setting, driver, container or GPU that refuses peer access",
        "gpubench topo. `gpubench explain` on NCCL's log shows the reason too",
    ),
    NARROWER: ("the same limit as before", "links that are down or slower", "gpubench topo. It shows the links"),
    WORSE: (
        "the same verdict as before",
        "the reasons in the new results",
        "gpubench compare --format csv. It shows every row with its reason",
    ),
    SLOWER: (
        "the same times as before, within noise",
        "one of the changed circumstances, or a fault",
        "Measure again and add it: --new AGAIN.json",
    ),
    LOST: ("a measurement, as before", "the run was cut short, or a device is missing", "gpubench report NEW.json"),
    PATH: ("the same path as before", "NCCL, a setting or the wiring changed", "gpubench topo"),
    UNVERIFIED: ("verified data, as before", "verification was switched off", "Measure again without --no-check"),
    MISSING: ("every row of the old results", "fewer rows were requested, or the run ended early", "Measure them too"),
    UNSURE: ("less noise", "single runs of short operations vary", "Add more runs: --base FILE --new FILE"),
}
"""By finding: expected, likely cause, next command; in the order in which findings are shown."""


def findings_of(
    judged: Sequence[JudgedRow],
    ranges: Sequence[Finding],
    sides: tuple[Sequence[ResultFile], Sequence[ResultFile]],
    circumstances: Sequence[CircumstanceRow],
) -> list[Finding]:
    """The findings about compared rows, ranges of rows, and the files of both sides."""
    evidence = list(_of_evidence(*sides))
    wiring = [row for row in circumstances if row.changed and row.name == TOPOLOGY]
    rows = [_with_cause(each, wiring) for each in _of_rows(judged, evidence)]
    explained = any(each.id in _BY_WIRING for each in rows)
    found = [*evidence, *_of_unseen_paths(*sides), *rows, *ranges, *_of_files(*sides)]
    found += [
        Finding(
            id="topology-changed",
            severity=Verdict.WARN,
            subject="the machine's wiring",
            seen=f"fingerprint {row.new}",
            expected=f"{row.base}, as before",
            cause="a device or link changed, or the system shows them differently",
            next_command=_COMPARE_WIRING,
        )
        for row in (() if explained else wiring)
    ]
    return sorted(found, key=lambda each: (gravity(each.severity), each.id != WRONG))


_COMPARE_WIRING = "gpubench topo. Compare its output on both machines"
_BY_WIRING = (SLOWER, NARROWER)
"""The findings that a changed wiring explains."""

_FOLDS = {SLOWER: (STAGED, NARROWER), WORSE: (WRONG, ABOVE_LIMIT, STAGED, NARROWER, SLOWER, LOST)}
"""Findings that follow from others on the same row, so that one cause is one finding."""


def _with_cause(finding: Finding, wiring: Sequence[CircumstanceRow]) -> Finding:
    """The finding of slower rows; where the wiring changed, this is the cause that is looked at first."""
    if finding.id not in _BY_WIRING or not wiring:
        return finding
    changed = f"a device or link changed: topology {wiring[0].base} before, {wiring[0].new} now"
    return replace(finding, cause=changed, next_command=_COMPARE_WIRING)


def _of_rows(judged: Sequence[JudgedRow], evidence: list[Finding]) -> Iterator[Finding]:
    """One finding for each cause, with the rows that it holds for; what follows from it on the same row is folded.

    Rows of paths in `evidence` are folded there.
    """
    folded: dict[str, list[Reason]] = {}
    held: dict[str, list[tuple[ComparisonRow, Reason]]] = {}
    paths = {path: number for number, finding in enumerate(evidence) for path in finding.subjects}
    of_paths: dict[int, list[Reason]] = {}
    for each in judged:
        ids = {reason.finding for reason in each.reasons}
        pair = " → ".join(map(str, each.row.ends))
        number = paths.get(pair) if each.row.collective is None else 0 if evidence else None
        for reason in each.reasons:
            root = next((one for one in _FOLDS.get(reason.finding, ()) if one in ids), None)
            if number is not None and reason.finding in (STAGED, SLOWER, WORSE):
                of_paths.setdefault(number, []).append(reason)
            elif root is not None:
                folded.setdefault(root, []).append(reason)
            else:
                held.setdefault(reason.finding, []).append((each.row, reason))
    for number, reasons in of_paths.items():
        evidence[number] = replace(evidence[number], consequences=_consequences(reasons))
    for finding, advice in _ADVICE.items():
        if own := held.get(finding):
            if finding == SLOWER:
                own.sort(key=lambda each: -(each[0].slower_percent or 0))
            names = tuple(row.name for row, _ in own)
            texts = list(dict.fromkeys(reason.text for _, reason in own))
            subject = f"{counted(len(names), 'row')}: {some_of(names, _MOST_NAMED)}"
            seen = texts[0] + (" (first row)" if len(texts) > 1 else "")
            more = folded.get(finding, [])
            severity = overall(reason.verdict for reason in (*(reason for _, reason in own), *more))
            consequences = _consequences(more)
            yield Finding(finding, severity, subject, seen, *advice, subjects=names, consequences=consequences)


_FOLLOWS = {STAGED: "through host memory", SLOWER: "slower", WORSE: "with a worse verdict"}


def _consequences(reasons: Sequence[Reason]) -> tuple[str, ...]:
    """'10 rows slower: 90.2 % slower (noise 2.0 %: …)', a line for each kind of finding."""
    kinds = grouped(reasons, lambda reason: reason.finding)
    return tuple(f"{counted(len(own), 'row')} {_FOLLOWS[kind]}: {own[0].text}" for kind, own in kinds.items())


def _of_evidence(base: Sequence[ResultFile], new: Sequence[ResultFile]) -> Iterator[Finding]:
    """Findings for paths that were direct by all evidence and no longer are."""
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
    """Findings for direct paths without new evidence: no path has evidence, or these pairs copied without it."""
    direct = {(row.source, row.destination) for row in _evidence(base) if row.conclusion == Conclusion.DIRECT}
    seen = {(row.source, row.destination) for row in _evidence(new)}
    copied = {(row.source, row.destination) for file in new for row in file.pairs if row.bandwidth_gb_s is not None}
    paths = [f"{source} → {to}" for source, to in sorted(direct - seen) if not seen or (source, to) in copied]
    if paths and len(direct) < MOST_ROWS and all(file.evidence is not None for file in new):
        yield Finding(
            id="path-not-seen",
            severity=Verdict.WARN,
            subject=some_of(paths, _MOST_NAMED),
            seen="direct by all evidence before; no evidence of the path now",
            expected="evidence of the path, as before",
            cause="evidence that was switched off, or a different library",
            next_command="gpubench p2p. Use the options of the old run, also for gpubench allreduce",
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
                expected="results of a finished run",
                cause="a time-out, a crash, a full disk, or a truncated file",
                next_command="Measure again",
            )
    for file in new:
        wrong = file.circumstances.wrong_elements
        if wrong and not (any(row.wrong for row in file.rows) or any(row.wrong for row in file.latencies)):
            yield Finding(WRONG, Verdict.FAIL, file.name, f"out of bounds values: {wrong}", *_ADVICE[WRONG])


def worse_result(base: Sequence[ResultFile], new: Sequence[ResultFile], told: Iterable[Finding]) -> Iterator[Finding]:
    """A finding for a new result with verdict FAIL or ERROR, if the old results passed and no finding says why."""
    before = min((gravity(each.verdict) for each in base if each.verdict), default=gravity(Verdict.PASS))
    worst = min((each for each in new if each.verdict), key=lambda each: gravity(each.verdict or ""), default=None)
    if worst is None or worst.verdict is None or gravity(worst.verdict) > gravity(Verdict.ERROR):
        return
    if gravity(worst.verdict) < min((before, *(gravity(each.severity) for each in told))):
        yield Finding(
            id=WORSE,
            severity=Verdict(worst.verdict),
            subject=worst.name,
            seen=f"the new result's own verdict is {worst.verdict}",
            expected="a verdict at least as good as that of the old results",
            cause="findings of the new result that the compared rows do not show",
            next_command=f"gpubench report {worst.name}",
        )


def nothing_compared(base: RunsByRow, new: RunsByRow) -> Finding:
    """The finding that both sides have no common row, with the columns without a common value."""
    differ = []
    for name in RowKey.__dataclass_fields__:
        before, after = ({getattr(key, name) for key in side} for side in (base, new))
        if before and after and not before & after:
            differ.append(f"{name} {_listed(name, after)}, not {_listed(name, before)}")
    return Finding(
        id="nothing-compared",
        severity=Verdict.ERROR,
        subject=f"{len(base)} old and {len(new)} new rows",
        seen="; ".join(differ) or "the two sides have no row in common",
        expected="at least one common row",
        cause="different sizes, types, ranks or collectives" if base and new else "one side has no rows",
        next_command="Measure the new side with the options of the old one",
    )


def _listed(column: str, values: set[Any]) -> str:
    known = sorted(value for value in values if value is not None)
    texts = [format_size(value) if column == "size_bytes" else str(value) for value in known]
    texts += ["unknown"] if None in values else []
    return ", ".join(texts[:_MOST_NAMED]) + (" …" if len(texts) > _MOST_NAMED else "")
