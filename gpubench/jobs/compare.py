"""Compare two sets of stored results, find past results of this machine, and learn a profile."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.backends.timing import no_garbage_collection
from gpubench.errors import UsageError
from gpubench.jobs.metadata import build_metadata
from gpubench.jobs.plans import ComparePlan
from gpubench.jobs.runner import presenting
from gpubench.measure.compare.findings import describe_file
from gpubench.measure.compare.report import SECTIONS as SECTIONS
from gpubench.measure.compare.report import SECTIONS_OF_HISTORY as SECTIONS_OF_HISTORY
from gpubench.measure.compare.report import SECTIONS_OF_MACHINES as SECTIONS_OF_MACHINES
from gpubench.measure.compare.report import choose, compare, compare_history, compare_machines
from gpubench.measure.p2p.rows import PastBandwidth
from gpubench.model.profiles.learning import collect_samples, format_toml, learn
from gpubench.model.profiles.profile import Expected, Profile, check_expected
from gpubench.model.results.history import PastFigures
from gpubench.model.results.report import Metadata, PairRow, Report
from gpubench.model.results.result_file import ResultFile, UserFacts
from gpubench.model.terms.plain import to_plain
from gpubench.model.terms.units import format_size, plural
from gpubench.model.terms.verdict import Origin, Verdict
from gpubench.profiles import find, match_whole_machine, read_profile, user_profiles
from gpubench.readers.registry import read_results
from gpubench.readers.results.history import list_results, past_figures


def past_bandwidth_finder(past: PastFigures | None) -> PastBandwidth:
    """Return a function that looks up the bandwidth of a pair in earlier results, for `gpubench p2p`."""

    def look_up(row: PairRow) -> tuple[float, str] | None:
        figure = None if past is None else past.pair_figure(row)
        return None if figure is None or figure.gb_s is None else (figure.gb_s, figure.source)

    return look_up


def find_past(folder: Path | None, metadata: Metadata) -> PastFigures | None:
    """Return the values that a run can expect, read from earlier results in the folder of `--output results/`.

    Call it before the first measurement, in the process that judges. An unreadable folder does not stop the run, but is
    reported in a `note`.
    """
    if folder is None:
        return None
    try:
        return past_figures(folder, metadata)
    except UsageError as error:
        return PastFigures(f"{folder}", problem=error.seen)


_SOURCE = "learned"
_EXPECTED = "results of gpubench allreduce, p2p or check with --output FILE.json, from a healthy machine"


def learned(
    results: Sequence[Path], *, name: str, like: str | None, environment: Mapping[str, str]
) -> tuple[str, list[str]]:
    """Return the text of the learned profile, and notes about outliers and the number of results.

    Raises UsageError if a file is not a complete measured result of a healthy machine. Also raises UsageError if the
    machines differ in GPU model or count, or if the profile is implausible.
    """
    files = [_healthy(path) for path in dict.fromkeys(results)]
    samples = [sample for file in files for sample in collect_samples(file)]
    if not samples:
        raise UsageError(
            "the results have no values for a profile",
            expected=_EXPECTED,
            reason="they are of CPU buffers, of one GPU, or only of facts",
            next_step="gpubench p2p --output p2p.json and gpubench allreduce --output allreduce.json, on that machine",
        )
    machine = find(like, environment) if like is not None else _matching(files, environment)
    found = learn(samples, _SOURCE)
    started = sorted((file.circumstances.started_at or "")[:10] for file in files)
    text = f"{files[0].circumstances.tool}, {plural(len(files), 'result')}, {started[0]} to {started[-1]}"
    bare = replace(machine, name=name, title=f"{machine.title}, learned", sources={_SOURCE: text}, curve=(), sha256="")
    # Without a number of GPUs, a value applies to all GPUs of the machine.
    visible = machine.match.visible
    values = [replace(value, gpus=None) if value.gpus == visible else value for value in found.expected]
    expected, refused = _believable(bare, values)
    if not expected:
        raise UsageError(
            "all values in the results are implausible",
            expected="values within the limits of the machine's links, and above those of a broken machine",
            reason="; ".join(refused),
        )
    profile = replace(bare, expected=tuple(expected))
    written = format_toml(to_plain(profile))
    read_profile(written.encode(), f"{name}.toml")
    notes = [
        (
            f"{plural(len(samples), 'measurement')} from {plural(len(files), 'result')} became "
            f"{plural(len(expected), 'value')}"
        )
    ]
    far = (
        f"left out: {outlier.key.quantity} {outlier.value:.4g}, {outlier.subject} of {outlier.file}, which is far "
        "from the median"
        for outlier in found.outliers
    )
    return written, [*notes, *far, *refused]


def _believable(profile: Profile, expected: Sequence[Expected]) -> tuple[list[Expected], list[str]]:
    """Return the plausible values, and why the others were rejected. Even a healthy machine has some implausible
    results.
    """
    kept, refused = [], []
    for value in expected:
        size = "" if value.size_bytes is None else f" of {format_size(value.size_bytes)}"
        try:
            check_expected(profile, value, f"{value.quantity}{size}")
        except UsageError as error:
            refused.append(f"left out: {error.seen}, but expected {error.expected}")
        else:
            kept.append(value)
    return kept, refused


def _healthy(path: Path) -> ResultFile:
    """Read a result of gpubench.

    Raises UsageError if the file is unreadable, incomplete, or written by another program or a newer version. Also
    raises UsageError if the machine was not healthy or not measured.
    """
    file = read_results(path)
    if file.verdict is None:
        raise UsageError(
            f"{path} is {file.kind}, which does not show whether the machine was healthy",
            expected=_EXPECTED,
            next_step="the same run with --output FILE.json",
        )
    if not file.complete or file.verdict in (Verdict.FAIL, Verdict.ERROR):
        how = f"ended with {file.verdict}" if file.complete else "was cut short"
        raise UsageError(
            f"{path} is the result of a run that {how}",
            expected="complete results of healthy machines",
            next_step="leave this result out, and run gpubench check on that machine",
        )
    origin = file.circumstances.origin
    if origin != Origin.MEASURED:
        raise UsageError(
            f"{path} was {origin}",
            expected="results that were measured on healthy machines",
            reason="a profile from simulated values would repeat their own profile",
            next_step="gpubench check -o node1.json on a machine with GPUs",
        )
    return file


def _matching(files: Sequence[ResultFile], environment: Mapping[str, str]) -> Profile:
    """Return the profile that matches the machine in these results.

    Raises UsageError if no profile matches, or if the machines differ in GPU model or count.
    """
    kinds = {_gpus(file) for file in files}
    if len(kinds) > 1:
        shown = "; ".join(f"{count} of {', '.join(names)}" for names, count in sorted(kinds))
        raise UsageError(
            f"the results are of several kinds of machine: {shown}",
            expected="one kind per profile",
            next_step="learn one profile per kind, or use --like NAME if they are one kind",
        )
    names, count = kinds.pop()
    found = match_whole_machine(names, count, among=user_profiles(environment)) or match_whole_machine(names, count)
    if found is None:
        raise UsageError(
            f"no profile has {plural(count, 'GPU')} of {', '.join(names) or 'a name'}",
            expected="a profile with the same machine",
            next_step="--like NAME, or --like FILE with the machine but without values",
        )
    return found.profile


def _gpus(file: ResultFile) -> tuple[tuple[str, ...], int]:
    known = file.circumstances
    names = tuple(sorted(set(known.gpus or known.models)))
    if file.rows:
        return names, max(row.ranks // row.nodes for row in file.rows)
    ends = {end for pair in file.pairs for end in (pair.source_bus_id, pair.destination_bus_id) if end}
    return names, len(known.gpus) or len(ends)


NAME = "compare"

_BYTES_A_SECOND = 6e6
"""Rate at which one core of 2026 reads, checks and compares JSON. Text tables take less time per byte."""

_SECONDS_WORTH_TELLING = 1.0


def run(plan: ComparePlan, arguments: Sequence[str]) -> int:
    """Compare both sides and return the exit code.

    Raises GpubenchError if a file or folder is unreadable, a file is from another machine, or an output cannot be
    written.
    """
    files = (*plan.base, *plan.new)
    if plan.last is not None:
        list_results(plan.folder)  # Raises UsageError before any output file is opened
    # Python's garbage collector would scan all rows repeatedly. For the results of a cluster, that takes a third of the
    # time.
    with no_garbage_collection():
        # A separate function, so that its rows are freed before garbage collection resumes
        return _run(plan, files, arguments)


def _run(plan: ComparePlan, files: Sequence[Path], arguments: Sequence[str]) -> int:
    with presenting(plan.presentation, progress=True) as presenter:
        seconds = sum(map(_size, files)) / _BYTES_A_SECOND
        if seconds >= _SECONDS_WORTH_TELLING:
            presenter.waiting(f"reading {plural(len(files), 'result')}", seconds)
        if plan.last is None:
            sides, report = _compare_files(plan)
        else:
            chosen = choose(list_results(plan.folder), plan.last)
            sides = [_Sides(series.name, series.base, [series.new]) for series in chosen.series]
            report = compare_history(chosen, plan.folder, plan.threshold_percent)
        presenter.begin(_metadata(plan, arguments, sides), ())
        presenter.end(report)
    return presenter.exit_code


def _size(path: Path) -> int:
    """Return the size of a file in bytes, or 0 if the file is unreadable. The error is raised when the file is read
    later.
    """
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


class _Sides(Struct, frozen=True):
    """The base and new files of one comparison. `series` is the name of the series, or None if there is only one
    comparison.
    """

    series: str | None
    base: Sequence[ResultFile]
    new: Sequence[ResultFile]


def _compare_files(plan: ComparePlan) -> tuple[list[_Sides], Report]:
    user_facts = UserFacts(collective=plan.collective)
    base, new = ([read_results(path, user_facts) for path in paths] for paths in (plan.base, plan.new))
    if plan.other_machine:
        return [_Sides(None, base, new)], compare_machines(base, new)
    return [_Sides(None, base, new)], compare(base, new, plan.threshold_percent)


def _metadata(plan: ComparePlan, arguments: Sequence[str], sides: Sequence[_Sides]) -> Metadata:
    files = [file for side in sides for file in (*side.base, *side.new)]
    hosts = dict.fromkeys(host for file in files for host in file.circumstances.hosts)
    origins = {origin for file in files for origin in file.origins}
    origins |= {file.circumstances.origin for file in files if file.circumstances.origin is not None}
    source = ", ".join(map(str, (*plan.base, *plan.new)))
    return build_metadata(
        arguments,
        NAME,
        origin=Origin.SIMULATED if Origin.SIMULATED in origins else Origin.RECORDED,
        hosts=list(hosts) or ["unknown"],
        options={
            "base": [_described(file, side.series) for side in sides for file in side.base],
            "new": [_described(file, side.series) for side in sides for file in side.new],
            "last": plan.last,
            "threshold": plan.threshold_percent,
            "strict": plan.strict,
            "other_machine": plan.other_machine,
            "collective": plan.collective,
        },
        source=source or str(plan.folder),
    )


def _described(file: ResultFile, series: str | None) -> dict[str, Any]:
    return {
        "file": file.name,
        "kind": file.kind,
        "told": describe_file(file),
        "rows": file.count,
        "complete": file.complete,
        "remarks": list(file.remarks),
        "series": series,
    }
