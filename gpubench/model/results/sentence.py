"""The last line of a report: one sentence that can be pasted to a colleague, with the verdict first."""

from collections import Counter
from collections.abc import Iterator, Sequence

from gpubench.model.facts.backends import NCCL as NCCL_BACKEND
from gpubench.model.facts.backends import NCCL_ALONE, TORCH, TORCH_NCCL
from gpubench.model.facts.libraries import NCCL
from gpubench.model.facts.visible_gpus import HIDDEN_GPUS
from gpubench.model.paths.evidence import Conclusion
from gpubench.model.results.ending import EXCERPT, NOTHING_TO_CONNECT, remark_on_code
from gpubench.model.results.figures import SpeedFigure, SpeedFigures
from gpubench.model.results.overlap.sentence import overlap_sentence
from gpubench.model.results.report import OVERLAP_SECTION, Metadata, Report
from gpubench.model.results.result_file import MODELS
from gpubench.model.results.rows.backend_speed import path_words, speed_words
from gpubench.model.results.rows.backends import BACKENDS_SECTION, BackendRow
from gpubench.model.results.rows.checks import CHECKS_SECTION, VERDICTS_SECTION, CheckRow, VerdictRow
from gpubench.model.results.rows.comparison import COMPARISON_SECTION, ComparisonRow, Status
from gpubench.model.results.rows.evidence import FALLBACK_SECTION, FallbackRow
from gpubench.model.results.rows.explain import CommunicatorRow, TransportRow
from gpubench.model.results.rows.libraries import LIBRARIES_SECTION, LibraryRow
from gpubench.model.results.rows.scan import PARTS_SECTION, ScanPartRow
from gpubench.model.results.scan_sentence import scan_sentence
from gpubench.model.results.speed import ONE_RANK
from gpubench.model.results.topo.rows import GpuRow, NodeRow
from gpubench.model.results.watch.sentence import watch_sentence
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.rank_identity import by_device, ranks_per_gpu, why_not_judged
from gpubench.model.terms.units import compress_names, counted, format_size
from gpubench.model.terms.verdict import FIGURES, WRONG_DATA, Finding, Verdict, gravity

_ENDED_EARLY = "the run was cut short, the rows before were measured"
_PRESENT, _NIC_STATE, _BELOW_CARD = "gpu_present", "nic_state", "below the card's highest rate"
_COARSE_PERCENT = 10.0
"""A comparison whose best row is no surer than that says so: jobs of several nodes differ by their place."""

_GOOD = (Verdict.PASS, Verdict.SKIP)
_VENDOR = "NVIDIA "
_OF_FILES = ("explain", "compare", "libraries")


def sentence(metadata: Metadata, report: Report, figures: SpeedFigures, *, remark: bool = True) -> str:
    """The sentence of a report; `remark` is whether to say where the exit code is not what the verdict says."""
    parts = [_said(metadata, report, figures)]
    parts += [metadata.origin] if metadata.origin == Origin.SIMULATED else []
    parts += [remark_on_code(metadata, report)] if remark and report.complete else []
    return " ".join(f"{report.verdict}: {'; '.join(filter(None, parts))}".split())


def _said(metadata: Metadata, report: Report, figures: SpeedFigures) -> str:
    if not report.complete:
        return _ENDED_EARLY
    if metadata.subject == "scan" and (report.verdict in _GOOD or report.rows(PARTS_SECTION, ScanPartRow)):
        return scan_sentence(metadata, report)
    root = worst(report.findings)
    if metadata.subject == "watch" and root is None:
        return watch_sentence(report)
    if report.verdict in _GOOD or (root is None and figures.slowest is None):
        beside = overlap_sentence(report) if metadata.subject == OVERLAP_SECTION else ""
        well, backends = ", ".join(_well(report, figures)), _beside(metadata, report)
        parts = _machine(metadata, report), *_open(report), beside, well, backends, _speed(metadata, figures)
        return "; ".join(filter(None, parts))
    if root is None:
        return _reached(metadata, figures)
    others = sum(each.severity is root.severity for each in report.findings) - 1
    said = _of_finding(metadata, root, figures)
    return f"{said}; and {counted(others, 'more finding')}" if others else said


def worst(findings: Sequence[Finding]) -> Finding | None:
    """The gravest finding: wrong data first, then what explains most."""
    wrong = [each for each in findings if each.severity not in _GOOD]
    return min(
        wrong,
        key=lambda each: (gravity(each.severity), each.id != WRONG_DATA, each.id in FIGURES, -len(each.consequences)),
        default=None,
    )


def _of_finding(metadata: Metadata, root: Finding, figures: SpeedFigures) -> str:
    """What it is, where, why, and what to do."""
    is_figure = root.id in FIGURES
    if figures.slowest is not None and (is_figure or root.consequences):
        what, why = _reached(metadata, figures, root), root.cause if is_figure else root.seen
    else:
        what, why = f"{_with_place(metadata, root.subject)}: {root.seen}", root.cause if is_figure else ""
    return "; ".join(filter(None, (f"{what}: {why}" if why else what, root.next_command.partition("; ")[0])))


def _with_place(metadata: Metadata, subject: str) -> str:
    hosts = list(dict.fromkeys(metadata.hosts))
    named = not subject or len(hosts) != 1 or hosts[0] in subject
    return subject if named else f"{subject} on {hosts[0]}"


def _reached(metadata: Metadata, figures: SpeedFigures, root: Finding | None = None) -> str:
    """'all-reduce reaches 25 of 340 GB/s (7 %) on node3', of a small size the time that it takes."""
    slow = figures.slowest
    if slow is None or slow.expected_gb_s is None:
        return ""
    hosts = list(slow.hosts or dict.fromkeys(metadata.hosts))
    if root is not None:
        words = " ".join((root.subject, *root.subjects)).replace(",", " ").split()
        hosts = [host for host in hosts if host in words] or hosts
    if slow.is_small and slow.time_us is not None and slow.expected_us is not None:
        took = f"takes {slow.time_us:.3g} µs, {slow.expected_us:.3g} expected ({slow.expected_percent:.0f} %),"
        return f"{slow.what} of {format_size(slow.size_bytes)} {took} on {compress_names(hosts)}"
    of_it = f"{_gb_s(slow.gb_s)} of {_gb_s(slow.expected_gb_s)} GB/s ({slow.expected_percent:.0f} %)"
    return f"{slow.what} reaches {of_it} on {compress_names(hosts)}"


def _machine(metadata: Metadata, report: Report) -> str:
    """'4 × H200', 'no GPU' where it is known that there is none; nothing where it is not known."""
    names = [each[0].gpu or "GPU" for each in by_device(metadata.ranks)]
    names += [rank.gpu for rank in metadata.ranks if rank.gpu and rank.device is None]
    names = names or [row.name or "GPU" for row in report.rows("gpus", GpuRow)]
    described = metadata.options.get("gpus")
    shared = ranks_per_gpu(metadata.ranks) or 1
    if not names and isinstance(described, dict):
        names = [str(each).partition(" ")[2] for each in described.values()]
    if not names:
        names = _checked(metadata, report)
    if not names and any(not row.gpus and not row.failures for row in report.rows("nodes", NodeRow)):
        return "no GPU"
    if not names:
        return _job(report)
    hidden = metadata.options.get(HIDDEN_GPUS)
    of_all = f" of {len(names) + hidden}" if isinstance(hidden, int) else ""
    gpus = ", ".join(f"{count}{of_all} × {model}" for model, count in Counter(map(_model, names)).items())
    return gpus if shared == 1 else f"{len(metadata.ranks)} ranks on {gpus}"


def _open(report: Report) -> Iterator[str]:
    """That `check` had nothing to compare the number of GPUs with, or that NICs run at less than their cards can."""
    notes = {row.check: row.note or "" for row in report.rows(CHECKS_SECTION, CheckRow)}
    if notes.get(_PRESENT, "").startswith("GPU count"):
        yield notes[_PRESENT].partition(" (")[0]
    if _BELOW_CARD in notes.get(_NIC_STATE, ""):
        yield notes[_NIC_STATE]


def _checked(metadata: Metadata, report: Report) -> list[str]:
    """The model of every GPU that `check` judged."""
    models = metadata.options.get(MODELS) or ["GPU"]
    return [" and ".join(models) for row in report.rows(VERDICTS_SECTION, VerdictRow) if row.scope == "gpu"]


def _model(name: str) -> str:
    return name[name.find(_VENDOR) + len(_VENDOR) :] if _VENDOR in name else name


def _job(report: Report) -> str:
    """What `explain` read, or how much `compare` compared."""
    communicators = report.rows("communicators", CommunicatorRow)
    found = {each.id for each in report.findings}
    if NOTHING_TO_CONNECT in found:
        return "nothing to connect: one rank"
    if communicators:
        pairs = counted(sum(each.pairs for each in communicators), "pair")
        if EXCERPT in found:
            return f"{pairs} in this part of a log, of how many it does not say"
        return f"{pairs} of {counted(len(communicators), 'communicator')}"
    libraries = [row for row in report.rows(LIBRARIES_SECTION, LibraryRow) if row.found]
    if libraries:
        versions = dict.fromkeys(row.version or "?" for row in libraries if row.library == NCCL)
        nccl = f"NCCL {' and '.join(versions)}" if versions else "no NCCL"
        return f"{nccl}; {len(libraries)} libraries, packages and kernel modules found"
    compared = [each for each in report.rows(COMPARISON_SECTION, ComparisonRow) if each.status == Status.COMPARED]
    if not compared:
        return ""
    least = min((each.noise_percent for each in compared if each.noise_percent is not None), default=0.0)
    blind = f"; differences below {least:.0f} % are not told apart" if least >= _COARSE_PERCENT else ""
    return f"{counted(len(compared), 'row')} compared{blind}"


def _well(report: Report, figures: SpeedFigures) -> Iterator[str]:
    """The figures, then data and paths."""
    unit = " GB/s"
    of_what = " of expected"
    for figure in figures.all():
        yield f"{figure.what} {_gb_s(figure.gb_s)}{unit}{_share(figure, of_what)}"
        unit, of_what = "", "" if figure.expected_percent is not None else of_what
    if figures.checked:
        right = "data right where they were checked" if figures.unchecked else "data right"
        yield right if not figures.wrong else "data wrong"
    elif any(True for _ in figures.all()):
        yield "data not checked"
    yield from _paths(report)


def _beside(metadata: Metadata, report: Report) -> str:
    """Of several backends, whether the framework is as fast as its library, with the same one and on the same path."""
    rows = report.rows(BACKENDS_SECTION, BackendRow)
    if not rows:
        return ""
    named = next((row.backend for row in rows if row.backend.startswith(TORCH)), rows[0].backend)
    of_it = [row for row in rows if row.backend == named]
    words = [speed_words(of_it, composed=False)]
    if named == TORCH_NCCL and rows[0].first == NCCL_BACKEND:
        own, library = metadata.libraries.get("torch's NCCL"), metadata.libraries.get("NCCL")
        words.append(
            f"with the same libnccl {own}" if own == library else f"with another libnccl: {own}, not {library}"
        )
        words.append(path_words(of_it))
        alone = metadata.libraries.get(NCCL_ALONE)
        words.append(f"though CuPy alone loads {alone}" if alone else "")
    return ", ".join(filter(None, words))


def _share(figure: SpeedFigure, of_what: str) -> str:
    if figure.expected_percent is not None:
        return f" ({figure.expected_percent:.0f} %{of_what})"
    return "" if figure.limit_percent is None else f" ({figure.limit_percent:.0f} % of limit)"


def _paths(report: Report) -> Iterator[str]:
    """What is known of paths: one word where all fare alike."""
    staged = {row.host_staged for row in report.rows("transports", TransportRow)}
    conclusions = {row.conclusion for row in report.rows(FALLBACK_SECTION, FallbackRow)}
    judged = any(row.check == "paths" and row.verdict == Verdict.PASS for row in report.rows(CHECKS_SECTION, CheckRow))
    if judged or staged == {False} or conclusions == {Conclusion.DIRECT}:
        yield "all direct"
    elif conclusions == {Conclusion.POSSIBLE}:
        yield "all paths can be direct"
    elif conclusions & {Conclusion.STAGED, Conclusion.IMPOSSIBLE}:
        yield "host memory by design"
    elif Conclusion.UNKNOWN in conclusions:
        yield "paths not seen"


def _speed(metadata: Metadata, figures: SpeedFigures) -> str:
    """That speed was not judged, and why; nothing where all of it was."""
    measured = list(figures.all())
    unjudged = [figure.what for figure in measured if not figure.is_judged]
    if not measured and metadata.collective is not None and len(metadata.ranks) == 1:
        return ONE_RANK
    if not unjudged:
        return "" if measured or metadata.subject in _OF_FILES else "speed not measured"
    why = why_not_judged(metadata.ranks)
    why = why or ("no profile, no past results" if metadata.profile is None else "nothing is expected of these sizes")
    of_what = "" if len(unjudged) == len(measured) else f" of {' and '.join(unjudged)}"
    return f"speed{of_what} not judged: {why}"


def _gb_s(value: float) -> str:
    """Two digits, whole from ten on."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
