"""GitHub Actions annotations on stdout: the ten worst findings, then the verdict.

GitHub shows at most ten errors and ten warnings per step. The `markdown` format lists every finding.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpubench.formats.json import DocumentRun, documents
from gpubench.model.results.report import FINDINGS_SECTION
from gpubench.model.terms.units import printable_line
from gpubench.model.terms.verdict import Verdict

if TYPE_CHECKING:
    from gpubench.model.results.sentence import JudgedCase

_MOST = 10
_COMMANDS = {Verdict.FAIL: "error", Verdict.ERROR: "error"}


def render(run: DocumentRun) -> Iterator[str]:
    from gpubench.formats.blocks import outcome, title
    from gpubench.formats.table import fallback_lines
    from gpubench.model.results.sentence import worst_first

    name = title(run.metadata)
    worst = worst_first(_annotated(run))
    for case in worst[:_MOST]:
        yield _command(_COMMANDS.get(case.verdict, "warning"), f"{name}: {case.name}", (case.verdict, *case.lines))
    lines = [outcome(run), *fallback_lines(run.report)]
    if len(worst) > _MOST:
        cut = Counter(case.verdict for case in worst[_MOST:])
        verdict_counts = ", ".join(f"{many} {verdict}" for verdict, many in cut.items())
        lines.insert(1, f"{verdict_counts} more than the {_MOST} annotations shown. --output summary.md has all")
    yield _command("notice", name, lines)


def _annotated(run: DocumentRun) -> Iterator["JudgedCase"]:
    """Yield the findings. Also yield the judged rows if there are no findings or if the run was cut short."""
    from gpubench.model.results.sentence import JudgedCase, cases

    findings = run.report.findings
    for finding in findings:
        lines = [f"{label}: {text}" for label, text, _ in finding.details if label not in ("seen", "try")]
        explained = [line for line in lines if line.startswith("explains: ")]
        lines = [finding.seen, *lines[: len(lines) - len(explained)], *finding.cure.text_lines, *explained]
        yield JudgedCase(FINDINGS_SECTION, f"{finding.id}: {finding.subject}", finding.severity, lines)
    if not findings or not run.report.complete:
        yield from (case for case in cases(run.metadata, run.rows, run.report) if case.group != FINDINGS_SECTION)


def _command(kind: str, title_: str, lines: Sequence[str]) -> str:
    """Return a workflow command, with its text escaped so that GitHub finds no second command in it.

    GitHub requires that messages escape percent signs and line breaks. Properties also escape colons and commas.
    """
    title_ = printable_line(title_).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    message = "%0A".join(printable_line(line).replace("%", "%25") for line in lines)
    return f"::{kind} title={title_}::{message}\n"


writer = documents(render)
