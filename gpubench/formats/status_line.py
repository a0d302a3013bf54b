"""One-line formats: `--exit-style` for monitoring, `--summary`, and `p2p --veto` for launchers.

The driver permits peer access by a list of GPU models and chipsets. On some platforms it reports support although the
fabric drops writes between GPUs (https://github.com/vllm-project/vllm/issues/51513). A launcher runs `eval "$(gpubench
p2p --veto)"`. This exports variables that disable peer access, or is only a comment if P2P works.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpubench.formats.json import DocumentRun, documents
from gpubench.formats.registry import NAGIOS_STATES, ExitStyle, Presentation, Target
from gpubench.model.paths.topology import is_gpu_link
from gpubench.model.paths.transport import Conclusion, State
from gpubench.model.results.report import CollectiveRow, EvidenceRow, Metadata, PairRow, Report, Row
from gpubench.model.terms.units import plural, printable_line, shorten
from gpubench.model.terms.verdict import Origin, Verdict

_MOST_CHARACTERS = 80
"""Number of characters that node-problem-detector keeps from a message, by default (`max_output_length`)."""

_MOST_BYTES = 1024
"""Longest line in bytes, including the line break, that every Nagios transport accepts (NRPE 2)."""

_MOST_BYTES_OF_REASON = 240
"""Longest drain reason in bytes. With the prefix 'gpubench: ' it fits the 255 bytes of slurmdbd's column (tinytext)."""

_SPELLED = str.maketrans({"|": "/", "\\": "/", "%": " percent", "`": "'", "$": "?"})
"""Replacements for '|', which begins Nagios performance data, and characters special in printf, shells or macros."""

_IN_ASCII = str.maketrans({"→": "->", "×": "x", "µ": "u", "·": ".", "−": "-", "–": "-", "±": "+-", "°": "", "…": "..."})


def line_without_report(style: ExitStyle, verdict: Verdict, text: str, *, drains: bool = False) -> str:
    """Return the line to print on stdout if a run has no report."""
    if style is ExitStyle.NAGIOS:
        return _nagios_line("gpubench", verdict, text)
    if style is ExitStyle.SLURM:
        return _slurm_line(style.code(verdict, drains=drains), text)
    return _npd_line(f"{verdict}: {text}")


def _nagios_line(subject: str, verdict: Verdict, text: str, figures: str = "") -> str:
    figures = f" | {figures}" if figures else ""
    line = _inert(f"{subject.upper()} {NAGIOS_STATES[verdict]} - {text}")
    return f"{_cut(line, _MOST_BYTES - len(figures) - 1)}{figures}\n"


def _npd_line(text: str) -> str:
    """Return a message of at most 80 ASCII characters, so that node-problem-detector does not cut it."""
    words = _inert(text.translate(_IN_ASCII)).encode("ascii", "replace").decode("ascii")
    return _cut(words, _MOST_CHARACTERS) + "\n"


def _slurm_line(code: int, text: str) -> str:
    """Return the drain decision and its reason in ASCII, for example 'drain: GPU3: 9 of 18 NVLinks down'."""
    words = printable_line(" ".join(text.translate(_IN_ASCII).split()))
    reason = _cut(words.encode("ascii", "replace").decode("ascii"), _MOST_BYTES_OF_REASON)
    return f"{('keep', 'drain', 'unknown')[code]}: {reason}\n"


def _is_inert(text: str) -> bool:
    """True if monitoring systems pass a text on unchanged."""
    return text.isascii() and _inert(text) == text


def _inert(text: str) -> str:
    """Replace characters that Nagios, a shell or printf would interpret."""
    return " ".join(printable_line(" ".join(text.split())).translate(_SPELLED).split())


def _cut(text: str, most_bytes: int) -> str:
    if len(text.encode()) <= most_bytes:
        return text
    return text.encode()[: most_bytes - 3].decode(errors="ignore") + "..."


class _Figure(NamedTuple):
    """A Nagios performance value. Its unit is part of the label, because Nagios has no unit for bandwidth."""

    label: str
    value: float
    most: float | None = None

    def __str__(self) -> str:
        return f"'{self.label}'={self.value:g};;;0;{'' if self.most is None else f'{self.most:g}'}"


def _nagios(run: DocumentRun) -> Iterator[str]:
    """Yield the Nagios line, or nothing after an interrupt, because the error handler then prints the only line."""
    if not run.report.complete:
        return
    from gpubench.formats.blocks import title

    figures = " ".join(map(str, _figures(run)))
    text = _summary(_sentence(run), run.report).removeprefix("(simulated) ")  # The title already has '(SIMULATED)'
    yield _nagios_line(title(run.metadata), run.report.verdict, text, figures)


def _npd(run: DocumentRun) -> Iterator[str]:
    """Yield the longest sentence that fits in 80 ASCII characters. '→' and '±' become two characters in ASCII."""
    if run.report.complete:
        lines = (_npd_line(_sentence(run, most)) for most in range(_MOST_CHARACTERS, _MOST_CHARACTERS // 2, -1))
        yield next((line for line in lines if not line.endswith("...\n")), _npd_line(run.report.sentence))


def _slurm(run: DocumentRun) -> Iterator[str]:
    from gpubench.conditions.policy import drains
    from gpubench.model.results.ending import is_strict
    from gpubench.model.results.sentence import find_worst

    if not run.report.complete:
        return
    blamed = find_worst([finding for finding in run.report.findings if drains(finding)])
    code = ExitStyle.SLURM.code(run.report.verdict, strict=is_strict(run.metadata.options), drains=blamed is not None)
    text = _summary(run.report.sentence, run.report)
    if blamed is not None and blamed != find_worst(run.report.findings):
        text = f"{blamed.subject}: {blamed.seen}"
    yield _slurm_line(code, text)


def _summary(sentence: str, report: Report) -> str:
    """Return the sentence without its verdict, because the line has it elsewhere: '(simulated) 8 × H100, …'."""
    head, _, said = sentence.partition(": ")
    return f"{head.removeprefix(report.verdict)} {said}".strip()


def _sentence(run: DocumentRun, most: int | None = None) -> str:
    """Return the last line of the report, without commands that monitoring systems would alter."""
    from gpubench.model.results.figures import SpeedFigures
    from gpubench.model.results.sentence import sentence

    figures = SpeedFigures()
    for row in (*run.rows, *run.report.rows(PairRow), *run.report.rows(CollectiveRow)):
        figures.add(row)
    return sentence(run.metadata, run.report, figures, most=most, passes=_is_inert)


def _figures(run: DocumentRun) -> Iterator[_Figure]:
    from gpubench.model.results.compare import HOST

    rows = [row for row in run.rows if isinstance(row, CollectiveRow)]
    if rows:
        peak = max(rows, key=lambda row: row.reached_gb_s)
        if peak.busbw_gb_s is not None:
            yield _Figure("peak_busbw_gb_s", round(peak.busbw_gb_s, 3), peak.limit_gb_s)
        yield _Figure("time_us_smallest", round(min(rows, key=lambda row: (row.size_bytes, row.time_us)).time_us, 3))
        if any(row.wrong is not None for row in rows):
            yield _Figure("wrong_elements", sum(row.wrong or 0 for row in rows))
    pairs = [row for row in run.rows if isinstance(row, PairRow) and HOST not in (row.source, row.destination)]
    reached = [row for row in pairs if row.peer != "off" and row.bandwidth_gb_s is not None]
    largest = max((row.size_bytes or 0 for row in reached), default=0)
    slowest = min(
        (row for row in reached if row.size_bytes == largest), key=lambda row: row.bandwidth_gb_s or 0.0, default=None
    )
    if slowest is not None and slowest.bandwidth_gb_s is not None:
        yield _Figure("slowest_pair_gb_s", round(slowest.bandwidth_gb_s, 3), slowest.limit_gb_s)
    yield _Figure("findings", len(run.report.findings))


nagios_writer, npd_writer, slurm_writer = documents(_nagios), documents(_npd), documents(_slurm)
summary_writer = documents(lambda run: [printable_line(run.report.sentence or run.report.verdict) + "\n"])


OFF = "NCCL_P2P_DISABLE=1 VLLM_SKIP_P2P_CHECK=0; unset GGML_CUDA_P2P"
"""Arguments for `export` that avoid peer access. NCCL then uses shared memory, and vLLM tests peer access first.

llama.cpp enables peer access for any value of its variable, even 0, so the variable is unset.
"""

OFF_OVER_PCIE = "NCCL_P2P_LEVEL=NVL VLLM_SKIP_P2P_CHECK=0; unset GGML_CUDA_P2P"
"""Arguments for `export` that avoid peer access except between GPUs connected by NVLink."""

_MOST_PAIRS = 3

_SAID = {
    Conclusion.WRONG: "P2P corrupts data",
    Conclusion.STAGED: "P2P drops to host memory",
    Conclusion.DISPUTED: "P2P is not known to work",
    Conclusion.UNKNOWN: "P2P is not known to work",
}
"""Words for each conclusion that vetoes peer access, worst first."""


class VetoWriter:
    """Prints the shell line for `eval` when the run ends."""

    def __init__(self, target: Target, _shown: Presentation) -> None:
        self._target = target
        self._simulated = False

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:  # noqa: ARG002
        self._simulated = metadata.origin == Origin.SIMULATED

    def row(self, row: Row) -> None: ...
    def end(self, report: Report) -> None:
        line = veto_line(report.rows(EvidenceRow), complete=report.complete)
        # A line break in text from outside would end the shell comment, and the shell would run the rest.
        self._target.open().write(printable_line(line + (" (simulated)" if self._simulated else "")) + "\n")


def veto_line(paths: Sequence[EvidenceRow], *, complete: bool = True) -> str:
    """Return a shell line that disables peer access, unless all paths were measured and work."""
    if not complete:
        return f"export {OFF}  # the P2P measurement is incomplete"
    for conclusion, said in _SAID.items():
        found = [path for path in paths if path.conclusion == conclusion]
        if found:
            names = shorten([f"{path.source} → {path.destination}" for path in found], _MOST_PAIRS)
            first = found[0]
            seen = first.correctness_seen if conclusion is Conclusion.WRONG else first.selection_seen
            reason = first.by_design or seen or first.measurement_seen
            findings = f"{said} on {len(found)} of {plural(len(paths), 'pair')}: {names}"
            nvlink_pairs = [path for path in paths if is_gpu_link(path.path_class or "")]
            off = OFF_OVER_PCIE if nvlink_pairs and not any(path in nvlink_pairs for path in found) else OFF
            return f"export {off}  # {findings}{f' ({reason})' if reason else ''}"
    if not paths:
        return "# P2P: this machine has only one GPU"
    verified = all(path.correctness == State.PRESENT for path in paths)
    return f"# P2P works: {plural(len(paths), 'pair')} direct, data {'' if verified else 'not '}verified"
