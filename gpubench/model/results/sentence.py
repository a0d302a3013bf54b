"""The last line of a report, and the list of judged cases (rows, findings and the run)."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpubench.model.facts.health import HIDDEN_GPUS
from gpubench.model.facts.process import NCCL_LIB
from gpubench.model.paths.transport import Conclusion
from gpubench.model.results import ending
from gpubench.model.results.backends import BackendRow, LibraryRow, describe_paths, describe_speed
from gpubench.model.results.compare import Change, ComparisonRow, MachineRow, Status, bandwidth_lost
from gpubench.model.results.fallback import (
    NO_PAYLOAD_TABLES,
    NOT_JUDGED,
    CommunicatorRow,
    KvPathRow,
    OperationRow,
    PathRow,
    TransportRow,
)
from gpubench.model.results.figures import (
    BOTH_WAYS,
    COLLECTIVE_NAMES,
    HOST_COPIES,
    PEER_COPIES,
    TRANSFERS,
    SpeedFigure,
    SpeedFigures,
)
from gpubench.model.results.overlap import overlap_parts
from gpubench.model.results.report import (
    FINDINGS_SECTION,
    OVERLAP_SECTION,
    CheckRow,
    EvidenceRow,
    FallbackRow,
    Metadata,
    Report,
    Row,
    RowsByColumn,
    Table,
    VerdictRow,
)
from gpubench.model.results.scaling import ScalingRow, describe_efficiency
from gpubench.model.results.scan import ScanPartRow, scan_parts
from gpubench.model.results.speed import ONE_RANK
from gpubench.model.results.topo import GpuRow, NodeRow
from gpubench.model.results.watch import watch_part
from gpubench.model.terms.operation import NCCL as NCCL_BACKEND
from gpubench.model.terms.operation import NCCL_ALONE, TORCH, TORCH_NCCL, HostMemory
from gpubench.model.terms.overlap import describe_cap
from gpubench.model.terms.ranks import RANKS_SHARE_A_GPU, group_by_device, ranks_per_gpu, why_not_judged
from gpubench.model.terms.units import compress_names, format_bandwidth, format_size, format_time, plural, shorten
from gpubench.model.terms.verdict import (
    FIGURES,
    HOST_STAGED,
    PATH_REQUIRED,
    WRONG_DATA,
    Cure,
    Finding,
    Verdict,
    exit_code,
    gravity,
)

_ID = re.compile(r"^[a-z0-9-]+: ")
_LINES = re.compile(r" \(\d+ lines like this\)$")
_WITH_BUS_ID = re.compile(r"(?<=\w) \([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\)")
_ENDED_EARLY = "the run was cut short, so only some rows were measured"
_ENDED_AT_ONCE = "the run was cut short before its first row"
_PRESENT, _NIC_STATE, _BELOW_CARD = "gpu_present", "nic_state", "below the card's highest rate"
# If each row of a comparison has more noise than this, the last line mentions it. Jobs on other nodes differ by that
# much.
_COARSE_PERCENT = 10.0
# Findings about single slower rows, and about a range of sizes that is slower together
_SLOWER = ("slower", "slower-together")
_GOOD = (Verdict.PASS, Verdict.SKIP)
_GAPS = NO_PAYLOAD_TABLES, NOT_JUDGED  # Findings that say what a SKIP lacks
_VENDOR = "NVIDIA "


def sentence(
    metadata: Metadata,
    report: Report,
    figures: SpeedFigures,
    *,
    most: int | None = None,
    passes: Callable[[str], bool] = bool,
) -> str:
    """Return the last line of a report with at most `most` characters.

    `passes` returns whether a command may appear in the line.
    """
    interrupted = next((finding for finding in report.findings if finding.id == ending.JOB_INTERRUPTED), None)
    if not report.complete and interrupted is None:
        return ending.last_line(
            report.verdict, metadata.origin, [ending.part(_ENDED_EARLY if figures.rows else _ENDED_AT_ONCE)]
        )
    parts, root = list(_line_parts(metadata, report, figures)), find_worst(report.findings)
    if interrupted is not None and (root is not interrupted or report.verdict in _GOOD):
        parts.append(ending.part("the job was interrupted"))
    command = "" if root is None or report.verdict in _GOOD else root.next_command
    gap = next((finding for finding in report.findings if finding.id in _GAPS), None)
    if gap is not None and report.verdict is Verdict.SKIP:
        parts, root, command = [ending.part(gap.seen)], gap, gap.next_command
    ends = (f"Try: {command}" if command and passes(command) else "", f"See {root.id}" if root and command else "")
    return ending.last_line(report.verdict, metadata.origin, parts, ends, most)


def _line_parts(metadata: Metadata, report: Report, figures: SpeedFigures) -> Iterator[ending.LinePart]:
    root = find_worst(report.findings)
    if metadata.subject == "scan" and (report.verdict in _GOOD or report.rows(ScanPartRow)):
        yield from scan_parts(metadata, report)
    elif metadata.subject == "watch" and root is None:
        yield watch_part(report)
    elif report.verdict in _GOOD or (root is None and figures.slowest is None):
        yield from _healthy(metadata, report, figures)
    elif root is None:
        yield ending.part(_describe_speed(metadata, figures.slowest))
    else:
        yield from _finding_parts(metadata, report, root, figures)
        others = sum(finding.severity is root.severity for finding in report.findings) - 1
        # The other findings are mostly the reasons why pairs do not take a required path.
        yield ending.part(f"and {plural(others, 'more finding')}" if others and root.id != PATH_REQUIRED else "")


def _healthy(metadata: Metadata, report: Report, figures: SpeedFigures) -> Iterator[ending.LinePart]:
    yield from overlap_parts(report) if metadata.subject == OVERLAP_SECTION else ()
    lead = _describe_machine(metadata, report)
    yield ending.part(lead, importance=ending.SOON)
    yield from (ending.part(words, importance=ending.SOON) for words in _unjudged_checks(report))
    yield from (ending.part(words, importance=ending.LATER) for words in _healthy_details(report, figures))
    for number, words in enumerate(_compare_backends(metadata, report)):
        yield ending.part(words, words.partition("; ")[0], importance=ending.LATER if number else ending.SOON)
    yield ending.part(*_speed(metadata, figures))


def find_worst(findings: Sequence[Finding]) -> Finding | None:
    """Return the worst finding.

    Wrong data comes first, then a path that the user required, root causes by cost, other facts and measurements.
    """

    def place(finding: Finding) -> tuple[object, ...]:
        is_root, is_figure = bool(finding.consequences) or finding.expected_percent == 0, finding.id in FIGURES
        left = 100.0 if finding.expected_percent is None else finding.expected_percent
        cost = left if is_root or is_figure else 0.0
        first = finding.id != WRONG_DATA, finding.id != PATH_REQUIRED
        return gravity(finding.severity), *first, not is_root, is_figure and not is_root, cost

    return min((finding for finding in findings if finding.severity not in _GOOD), key=place, default=None)


def _finding_parts(
    metadata: Metadata, report: Report, root: Finding, figures: SpeedFigures
) -> Iterator[ending.LinePart]:
    is_figure, slow = root.id in FIGURES, figures.find_slowest(root)
    if metadata.subject == "compare" and root.id in _SLOWER:
        yield ending.part(_describe_slower_rows(report.by_column(ComparisonRow)) or root.subject)
    elif is_figure and slow is not None:
        yield ending.part(*_device_wordings(metadata, slow, root))
    elif root.id == PATH_REQUIRED:
        lead = root.subject.partition(": ")[0]
        yield ending.part(root.subject, f"{lead}: {shorten(root.subjects, 1)}", lead)
        yield ending.part(f"because {_ID.sub('', root.cause)}" if root.cause else "", importance=ending.SOON)
    elif metadata.subject == "explain" and root.id == HOST_STAGED:
        yield ending.part(*_describe_staged_paths(report))
    elif _UCX_PATH.search(root.seen) and (speed := figures.find_best(TRANSFERS)) is not None:
        what = f"{speed.what} reach {format_bandwidth(speed.gb_s)}, because {_UCX_PATH.sub('', root.seen)}"
        brief = what.partition(": ")[0]
        pairs = (root.subject, shorten(root.subjects, 1))
        yield ending.part(*(f"{_add_place(metadata, pair)}: {what}" for pair in pairs), what, brief)
    else:
        yield from _place_and_symptom(metadata, root)
    if is_figure:
        yield _cause_part(root)
    elif root.consequences and slow is not None:
        named = any(host in subject.split() for host in metadata.hosts for subject in (root.subject, *root.subjects))
        places = (len(set(metadata.hosts)) > 1 and not named, False)
        figure = (
            ending.NEXT if _IN_ENVIRONMENT in root.seen else ending.SOON
        )  # If a device is at fault, describe the device first
        yield ending.part(*(_describe_speed(metadata, slow, with_place=place) for place in places), importance=figure)


def _device_wordings(metadata: Metadata, slow: SpeedFigure, root: Finding) -> Iterator[str]:
    """Yield wordings that name the devices: 'node0 GPU2 → GPU5: p2p reaches 188 of 376 GB/s (50 %)'.

    If the finding has no devices, name the nodes.
    """
    staged_pairs = root.id == HOST_STAGED and " → " in root.subject
    # A setting disables peer access for all pairs, so do not name single pairs
    is_setting = "NCCL_" in root.cause
    if is_setting or not (staged_pairs or any(device in root.subject for device in root.devices)):
        yield _describe_speed(metadata, slow, root)
        return
    said = _describe_speed(metadata, slow, with_place=False)
    said = f"data go through host memory, {said}" if staged_pairs else said
    for named in (root.subject, shorten(root.subjects, 1), _shared_gpus(root.subjects)):
        yield f"{_add_place(metadata, named)}: {said}" if named else ""


def _cause_part(root: Finding) -> ending.LinePart:
    if root.id != HOST_STAGED:
        return ending.part(f"likely {root.cause}" if root.cause else "", importance=ending.SOON)
    if root.cause.startswith(("no setting", "no known", "not known", "unknown")):
        return ending.part("cause not found", importance=ending.SOON)
    # In findings from a log, the cause begins with its ID
    cause = _ID.sub("", root.cause)
    return ending.part(f"because {cause}", f"because {cause.partition('; ')[0]}", importance=ending.SOON)


_IN_ENVIRONMENT = " in the environment"
_NOBODY = "a program of the job"
_UCX_PATH = re.compile(r" \((?:host-staged|direct|GPUDirect RDMA|cause unknown)\b[^()]*\)$")
_CUT_AT = (120, 100, 80, 60)


def _cut_text(text: str, most: int) -> str:
    """Cut a text after a word, and add an ellipsis."""
    return text if len(text) <= most else f"{text[:most].rpartition(' ')[0].rstrip(',:;')} …"


def _place_and_symptom(metadata: Metadata, root: Finding) -> Iterator[ending.LinePart]:
    """Yield parts of the last line: the place of the fault with its symptom, then further details."""
    where = _add_place(metadata, root.subject)
    short = _add_place(metadata, shorten(root.subjects, 1)) if len(root.subjects) > 1 else where
    first, _, beside = root.seen.partition("; ")
    least = first.partition(": ")[0]
    # Devices, and the first rank with wrong data, are more specific than the job's ranks
    names_place = any(device in root.subject for device in root.devices) or root.id == WRONG_DATA
    if metadata.collective is not None and least != first and not names_place:
        named = f"{metadata.hosts[0]} {first}" if len(set(metadata.hosts)) == 1 else first
        yield ending.part(named, named.partition(" (")[0])
        return
    if metadata.subject == "explain":  # These texts come from other programs, and their colons do not separate details
        whole = _LINES.sub("", first)
        named = "" if short == _NOBODY else f"{short}: "
        brief = _UCX_PATH.sub("", whole)
        cut = [_cut_text(brief, most) for most in _CUT_AT]
        alone = () if brief == whole else (brief,)  # A cause of UCX's path is worth more than its place
        named_cut = [f"{named}{words}" for words in cut]
        yield ending.part(f"{where}: {first}", f"{named}{whole}", f"{named}{brief}", *alone, *named_cut, *cut)
    else:
        shorter = (_LINES.sub("", first), first.partition(" (")[0], first.partition(". ")[0], least)
        brief = min(*(first.partition(end)[0] for end in (": ", " (", ", and ", _IN_ENVIRONMENT)), key=len)
        shortest = [f"{short}: {words}" for words in (first, least, brief)]
        if shared := _shared_gpus(root.subjects):
            shortest.append(f"{_add_place(metadata, shared)}: {brief}")
        yield ending.part(*(f"{where}: {words}" for words in (first, *shorter)), *shortest)
    yield ending.part(beside, importance=ending.LATER)


def _shared_gpus(subjects: Sequence[str]) -> str:
    """Return the GPU that all pairs share, with its node: 'node0 GPU1'. Empty if there is none."""
    words = [_WITH_BUS_ID.sub("", subject).split() for subject in subjects]
    shared = [word for word in words[0] if all(word in others for others in words)] if len(words) > 1 else []
    gpus = " and ".join(word for word in shared if word.startswith("GPU"))
    return (
        " ".join([*(word for word in shared if word[0].isalnum() and not word.startswith("GPU")), gpus]) if gpus else ""
    )


def _describe_slower_rows(rows: RowsByColumn[ComparisonRow]) -> str:
    """Describe the rows that are slower by themselves. Empty if there are none.

    'all-reduce is slower in 34 of 60 rows, by up to 33 % (4G: 479 → 319 GB/s, noise 4 %)'. The percentage is lost
    bandwidth.
    """
    cells = enumerate(rows.cells("status", "change", "verdict"))
    compared = [cell for cell in cells if cell[1][0] == Status.COMPARED]
    slower = rows.made(number for number, judged in compared if judged[1:] == (Change.SLOWER, Verdict.FAIL))
    if not slower:
        return ""
    worst = max(slower, key=lambda row: row.slower_percent or 0.0)
    kinds = list(dict.fromkeys(row.collective or "copies" for row in slower))
    names = [COLLECTIVE_NAMES.get(kind, kind) for kind in kinds]
    what = " and ".join(names) if len(names) < 3 else f"{len(names)} collectives"
    lost = bandwidth_lost(worst.slower_percent or 0.0)
    place = format_size(worst.size_bytes) if worst.collective and worst.size_bytes is not None else worst.name
    both = worst.base_gb_s is not None and worst.new_gb_s is not None
    figures = _describe_change(worst.base_gb_s, worst.new_gb_s) if both else ""
    noise = "" if worst.noise_percent is None else f"noise {bandwidth_lost(worst.noise_percent):.0f} %"
    seen = ", ".join(filter(None, (f"{place}: {figures}" if figures else place, noise)))
    verb = "is" if len(kinds) == 1 and kinds[0] != "copies" else "are"
    of_rows = f"{len(slower)} of {plural(len(compared), 'row')}"
    return f"{what} {verb} slower in {of_rows}, by up to {lost:.0f} % ({seen})"


def _describe_change(base_gb_s: float | None, new_gb_s: float | None) -> str:
    base, new = (format_bandwidth(gb_s or 0, 3) for gb_s in (base_gb_s, new_gb_s))
    return f"{base.removesuffix(' GB/s') if new.endswith(' GB/s') else base} → {new}"


def _describe_staged_paths(report: Report) -> Iterator[str]:
    """Yield wordings such as 'all 4 GPU-to-GPU paths went through host memory (SHM/direct)', over all communicators
    in a log.
    """
    rows = report.rows(TransportRow)
    staged = [row for row in rows if row.host_staged]
    count, total = (sum(row.pairs for row in group) for group in (staged, rows))
    over = ", ".join(dict.fromkeys(row.transport for row in staged))
    of_all = f"{'all ' if total > 1 else ''}{total}" if count == total else f"{count} of {total}"
    said = f"{of_all} GPU-to-GPU {'path' if total == 1 else 'paths'} went through host memory"
    yield from (f"{said} ({over})", said)


def _add_place(metadata: Metadata, subject: str) -> str:
    hosts, subject = list(dict.fromkeys(metadata.hosts)), _WITH_BUS_ID.sub("", subject)
    named = not subject or len(hosts) != 1 or hosts[0] in subject or hosts[0] == "unknown"
    return subject if named else f"{hosts[0]} {subject}" if subject.startswith("GPU") else f"{subject} on {hosts[0]}"


def _describe_speed(
    metadata: Metadata, slow: SpeedFigure | None, root: Finding | None = None, *, with_place: bool = True
) -> str:
    if slow is None or slow.expected_gb_s is None:
        return ""
    hosts = list(slow.hosts or dict.fromkeys(metadata.hosts))
    if root is not None:
        words = " ".join((root.subject, *root.subjects)).replace(",", " ").split()
        hosts = [host for host in hosts if host in words] or hosts
    place = f" on {compress_names(hosts)}" if with_place else ""
    place += "" if slow.ranks is None else f" at {plural(slow.ranks, 'rank')}"
    if slow.is_small and slow.time_us is not None and slow.expected_us is not None:
        expected = f"{format_time(slow.expected_us)} expected ({slow.expected_percent:.0f} %)"
        took = f"takes {format_time(slow.time_us)}{place}, {expected}"
        size = format_size(slow.size_bytes)
        return f"{slow.what} of {f'{size} B' if size.isdigit() else size} {took}"
    seen, expected = format_bandwidth(slow.gb_s), format_bandwidth(slow.expected_gb_s)
    selected = f"{seen.removesuffix(' GB/s')} of {expected} ({slow.expected_percent:.0f} %)"
    return f"{slow.what} reaches {selected}{place}"


def _describe_machine(metadata: Metadata, report: Report) -> str:
    names = [ranks[0].gpu or "GPU" for ranks in group_by_device(metadata.ranks)]
    names += [rank.gpu for rank in metadata.ranks if rank.gpu and rank.device is None]
    names = names or [row.name or "GPU" for row in report.rows(GpuRow)]
    described = metadata.options.get("gpus")
    shared = ranks_per_gpu(metadata.ranks) or 1
    if not names and isinstance(described, dict):
        names = [str(text).partition(" ")[2] for text in described.values()]
    if not names:
        from gpubench.model.results.result_file import MODELS

        models = metadata.options.get(MODELS) or ["GPU"]
        names = [" and ".join(models) for row in report.rows(VerdictRow) if row.scope == "gpu"]
    if not names and any(not row.gpus and not row.failures for row in report.rows(NodeRow)):
        return "no GPU"
    if not names:
        dumps, of_ras = metadata.options.get("dumps"), metadata.options.get("ras")
        if timed := sum(row.operations for row in report.rows(OperationRow)):
            return f"no rank keeps the others waiting in {plural(timed, 'operation')}"
        answered = f"no rank lags behind in {plural(of_ras, 'communicator')} of NCCL's RAS" if of_ras else ""
        return _describe_job(report) or (
            f"no collective hangs in the dumps of {plural(dumps, 'rank')}" if dumps else answered
        )
    hidden = metadata.options.get(HIDDEN_GPUS)
    of_all = f" of {len(names) + hidden}" if isinstance(hidden, int) else ""
    gpus = ", ".join(f"{count}{of_all} × {model}" for model, count in Counter(map(_model, names)).items())
    return gpus if shared == 1 else f"{len(metadata.ranks)} ranks on {gpus}"


def _unjudged_checks(report: Report) -> Iterator[str]:
    notes = {row.check: row.note or "" for row in report.rows(CheckRow)}
    if notes.get(_PRESENT, "").startswith("GPU count"):
        yield notes[_PRESENT].partition(" (")[0]
    if "nvidia-peermem" in notes.get("gpudirect", ""):
        yield "GPUDirect RDMA not judged"
    if _BELOW_CARD in notes.get(_NIC_STATE, ""):
        yield notes[_NIC_STATE]


def _model(name: str) -> str:
    return name[name.find(_VENDOR) + len(_VENDOR) :] if _VENDOR in name else name


def _describe_job(report: Report) -> str:
    communicators = report.rows(CommunicatorRow)
    found = {finding.id for finding in report.findings}
    if ending.NOTHING_TO_CONNECT in found:
        return "nothing to connect with one rank"
    if communicators:
        pairs = plural(sum(communicator.pairs for communicator in communicators), "pair")
        if ending.EXCERPT in found:
            return f"{pairs} in this part of a log, which does not show the total"
        return f"{pairs} of {plural(len(communicators), 'communicator')}"
    libraries = [row for row in report.rows(LibraryRow) if row.found]
    if libraries:
        versions = dict.fromkeys(row.version or "?" for row in libraries if row.library == NCCL_LIB)
        nccl = f"NCCL {' and '.join(versions)}" if versions else "no NCCL"
        return f"{nccl}, {len(libraries)} libraries, packages and kernel modules found"
    machines = report.rows(MachineRow)
    if machines:
        row = machines[0]
        place = "" if row.size_bytes is None else f" at {format_size(row.size_bytes)}"
        name = COLLECTIVE_NAMES.get(row.what, row.what)
        return f"{name} reaches {row.ratio:.2f} × per GPU{place} ({_describe_change(row.base_gb_s, row.new_gb_s)})"
    cells = report.by_column(ComparisonRow).cells("status", "noise_percent")
    noise = [percent for status, percent in cells if status == Status.COMPARED]
    if not noise:
        return ""
    least = min((percent for percent in noise if percent is not None), default=0.0)
    coarse = least >= _COARSE_PERCENT
    blind = f", differences below {bandwidth_lost(least):.0f} % are not detected" if coarse else ""
    return f"{plural(len(noise), 'row')} compared{blind}"


def _healthy_details(report: Report, figures: SpeedFigures) -> Iterator[str]:
    known_unit, of_what = "", " of expected"
    for figure in sorted(figures.all(), key=lambda figure: not figure.is_judged):
        yield f"{figure.what} {format_bandwidth(figure.gb_s).removesuffix(known_unit)}{_format_share(figure, of_what)}"
        known_unit, of_what = " GB/s", "" if figure.expected_percent is not None else of_what
    yield describe_efficiency(report.rows(ScalingRow))
    if figures.checked:
        right = "data right where they were checked" if figures.unchecked else "data right"
        yield right if not figures.wrong else "data wrong"
    elif any(True for _ in figures.all()):
        yield "data not verified"
    yield from _paths(report)


def _compare_backends(metadata: Metadata, report: Report) -> list[str]:
    rows = report.rows(BackendRow)
    if not rows:
        return []
    named = next((row.backend for row in rows if row.backend.startswith(TORCH)), rows[0].backend)
    selected = [row for row in rows if row.backend == named]
    words = [describe_speed(selected, composed=False)]
    if named == TORCH_NCCL and rows[0].first == NCCL_BACKEND:
        own, library = metadata.libraries.get("torch's NCCL"), metadata.libraries.get("NCCL")
        words.append(
            f"with the same libnccl {own}" if own == library else f"with another libnccl: {own}, not {library}"
        )
        words.append(describe_paths(selected))
        version = metadata.libraries.get(NCCL_ALONE)
        words.append(f"although gpubench loads {version} without torch" if version else "")
    return words


def _format_share(figure: SpeedFigure, of_what: str) -> str:
    if figure.expected_percent is not None:
        return f" ({figure.expected_percent:.0f} %{of_what})"
    return "" if figure.limit_percent is None else f" ({figure.limit_percent:.0f} % of limit)"


def _paths(report: Report) -> Iterator[str]:
    staged = {row.host_staged for row in report.rows(TransportRow)}
    conclusions = {row.conclusion for row in report.rows(FallbackRow)}
    judged = any(row.check == "paths" and row.verdict == Verdict.PASS for row in report.rows(CheckRow))
    indirect = any("indirect" in row.transport for row in report.rows(TransportRow))
    if judged or staged == {False} or conclusions == {Conclusion.DIRECT}:
        yield "no path through host memory, some through another GPU" if indirect else "all paths direct"
    elif True in staged and None not in staged:
        yield f"{'some' if False in staged else 'all'} paths through host memory by design"
    elif conclusions == {Conclusion.POSSIBLE}:
        yield "all paths can be direct"
    elif conclusions & {Conclusion.STAGED, Conclusion.IMPOSSIBLE}:
        some = Conclusion.UNKNOWN in conclusions
        yield "some paths through host memory by design, others unknown" if some else "through host memory by design"
    elif Conclusion.UNKNOWN in conclusions:
        yield "paths unknown"
    if direct := [row.transport for row in report.rows(KvPathRow) if row.verdict == Verdict.PASS]:
        yield f"UCX moves GPU memory directly over {shorten(direct)}"


def _speed(metadata: Metadata, figures: SpeedFigures) -> Iterator[str]:
    measured = list(figures.all())
    not_judged = [figure for figure in measured if not figure.is_judged]
    unjudged = [figure.what for figure in not_judged]
    if not measured and metadata.collective is not None and len(metadata.ranks) == 1:
        yield ONE_RANK
        return
    if not unjudged:
        yield "" if measured or not metadata.command_record.measures else "speed not measured"
        return
    shared = all(figure.shares_gpus for figure in not_judged)
    why = why_not_judged(metadata.ranks) or (RANKS_SHARE_A_GPU if shared else "") or figures.doubt
    are_copies = {PEER_COPIES, BOTH_WAYS, HOST_COPIES}.issuperset(unjudged)
    nothing = f"no expected value for {'them' if are_copies else 'these sizes'}"
    why = why or ("no profile, no past results" if metadata.profile is None else nothing)
    if len(unjudged) < len(measured):
        yield f"speed of {' and '.join(unjudged)} not judged: {why}"
        yield f"speed of {len(unjudged)} of {len(measured)} operations not judged: {why}"
    else:
        yield f"speed not judged: {why}"


RUN = "run"
# Sections that may have millions of rows. `fallback` and `transports` summarize them
_CONDENSED_ELSEWHERE = (EvidenceRow.section, PathRow.section)
_SIZES_AND_NAMES = (
    *("collective", "dtype", "op", "placement", "setting", "group"),
    *("scope", "transport", "conclusion", "direction"),
)
_NOT_JUDGED = "not judged"


class JudgedCase(Struct, frozen=True):
    """A row, a finding or the run, with its verdict. `group` is its section, in which `name` is unique."""

    group: str
    name: str
    verdict: Verdict
    lines: Sequence[str]


def cases(metadata: Metadata, rows: Iterable[Row], report: Report) -> Iterator[JudgedCase]:
    """Yield rows, summarizing sections and findings, failures first. The run itself comes last.

    Each fault fails only one case. If a finding fails, the rows that show the same fault are skipped, with a remark. If
    the run does not fail, no case fails. The run itself fails only if it was cut short or if no other case fails.
    """
    found = [*_row_findings(metadata.rows_section, (row.to_record() for row in rows)), *_report_cases(report)]
    if report.verdict is not Verdict.FAIL:
        found = [replace(case, verdict=Verdict.WARN) if case.verdict is Verdict.FAIL else case for case in found]
    known = {case.verdict for case in found if case.group == FINDINGS_SECTION} & {Verdict.FAIL, Verdict.ERROR}
    found = [
        replace(case, verdict=Verdict.SKIP, lines=[f"{case.verdict}, counted with its finding", *case.lines])
        if case.verdict in known and case.group != FINDINGS_SECTION
        else case
        for case in found
    ]
    found.sort(key=lambda case: (min(gravity(case.verdict), gravity(Verdict.PASS)), case.group != FINDINGS_SECTION))
    counts: Counter[tuple[str, str]] = Counter()
    for case in found:
        counts[case.group, case.name] += 1
        number = counts[case.group, case.name]
        yield case if number == 1 else replace(case, name=f"{case.name} ({number})")
    yield _run_case(metadata, report, found)


def worst_first(found: Iterable[JudgedCase]) -> list[JudgedCase]:
    """Return the cases that did not pass, the worst first."""
    wrong = (case for case in found if gravity(case.verdict) < gravity(Verdict.PASS))
    return sorted(wrong, key=lambda case: gravity(case.verdict))


def _report_cases(report: Report) -> Iterator[JudgedCase]:
    for name, section in report.sections.items():
        if isinstance(section, Table) and "verdict" in section.columns and name not in _CONDENSED_ELSEWHERE:
            yield from _row_findings(name, (row.to_record() for row in section.rows()))
    for finding in report.findings:
        lines = list(finding.lines)
        yield JudgedCase(FINDINGS_SECTION, f"{finding.id}: {finding.subject}", finding.severity, lines)


def _row_findings(group: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[JudgedCase]:
    records = list(rows)
    some_judged = any(record.get("verdict") for record in records)
    for record in records:
        if "verdict" not in record:
            continue  # A single interval of `watch`, which judges whole jobs
        is_unjudged_pair = "path_class" in record and record["verdict"] is None
        if is_unjudged_pair and (some_judged or record.get("bandwidth_gb_s") is None):
            continue  # `topo` does not judge pairs
        verdict = Verdict.SKIP if record["verdict"] is None else Verdict(record["verdict"])
        seen = _describe_row(record) or ("" if record["verdict"] else _NOT_JUDGED)
        cure = Cure(tuple(record.get("commands") or ()), record.get("comment") or "")
        yield JudgedCase(group, _name_row(record), verdict, [*filter(None, (seen,)), *cure.text_lines])


def _name_row(record: Mapping[str, Any]) -> str:
    words = [str(record[name]) for name in ("node", "check", "id", "subject", "job", "way") if record.get(name)]
    naming: Sequence[Callable[[], str]] = (
        lambda: " ".join(words[1:] if len(words) > 1 and words[1].split(" ")[0] == words[0] else words),
        lambda: _name_ends(record),
        lambda: format_size(record["size_bytes"]) if record.get("size_bytes") is not None else "",
        lambda: " ".join(str(record[name]) for name in _SIZES_AND_NAMES if record.get(name) is not None),
        lambda: f"with {record['partner']}, {describe_cap(record['ctas'])}" if record.get("partner") else "",
        lambda: str(record["engine"]) if record.get("engine") else "",
        lambda: f"peer access {record['peer']}" if record.get("peer") else "",
        lambda: str(record["note"]) if HostMemory.parse_note(record.get("note")) else "",
        lambda: ", ".join(map(str, record["pairs"][:4])) if isinstance(record.get("pairs"), (list, tuple)) else "",
    )
    return ", ".join(filter(None, (name() for name in naming)))


def _name_ends(record: Mapping[str, Any]) -> str:
    if not record.get("source"):
        return ""
    source, destination = (str(record[name]) for name in ("source", "destination"))
    nodes = [record.get(f"{name}_node") for name in ("source", "destination")]
    if None in nodes:
        return f"{source} → {destination}"
    there = destination if nodes[0] == nodes[1] else f"{nodes[1]} {destination}"
    return f"{nodes[0]} {source} → {there}"


def _describe_row(record: Mapping[str, Any]) -> str:
    figures = (
        *(("busbw_gb_s", "GB/s busbw"), ("bandwidth_gb_s", "GB/s"), ("limit_gb_s", "GB/s limit")),
        ("step_us", "µs a step"),
    )
    words = [f"{record[name]:g} {unit}" for name, unit in figures if record.get(name) is not None]
    if isinstance(record.get("findings"), (list, tuple)):
        words.append(", ".join(map(str, record["findings"])))
    if record.get("wrong"):
        words.append(plural(record["wrong"], "wrong element"))
    remarks = (str(record[name]) for name in ("how", "seen", "cause_seen", "note", "meaning") if record.get(name))
    return "; ".join(filter(None, (*words, *remarks)))


def _run_case(metadata: Metadata, report: Report, found: Sequence[JudgedCase]) -> JudgedCase:
    if not report.complete:
        return JudgedCase(RUN, metadata.subject, report.verdict, [report.sentence or "the run was cut short"])
    in_a_case = exit_code(report.verdict) in {0, *(exit_code(case.verdict) for case in found)}
    verdict = Verdict.PASS if in_a_case else report.verdict
    return JudgedCase(RUN, metadata.subject, verdict, [report.sentence or f"verdict: {report.verdict}"])
