"""One line for a launcher: whether peer access between GPUs works, and the environment that avoids it where not.

The driver's word is a list of models and chipsets: platforms exist on which it says yes and the fabric drops what GPUs
write to each other (https://github.com/vllm-project/vllm/issues/51513). The line is shell, so that a launcher takes it
with `eval "$(gpubench p2p --veto)"`: an export, or a comment alone where nothing has to be avoided.
"""

from collections.abc import Sequence

from gpubench.formats.writer import Style, Target
from gpubench.model.paths.evidence import Conclusion, State
from gpubench.model.results.report import Metadata, Report, Row
from gpubench.model.results.rows.evidence import EVIDENCE_SECTION, EvidenceRow
from gpubench.model.terms.foreign_text import printable_line
from gpubench.model.terms.origin import Origin
from gpubench.model.terms.units import counted, some_of

OFF = "NCCL_P2P_DISABLE=1 VLLM_SKIP_P2P_CHECK=0"
"""NCCL goes through shared memory, and vLLM looks for itself before it uses peer access."""

OFF_OVER_PCIE = "NCCL_P2P_LEVEL=NVL VLLM_SKIP_P2P_CHECK=0"
"""The same where only pairs without NVLinks are to be avoided."""

_MOST_PAIRS = 3
_NVLINK = "NV"

_SAID = {
    Conclusion.WRONG: "P2P corrupts data",
    Conclusion.STAGED: "P2P drops to host memory",
    Conclusion.DISPUTED: "P2P is not known to work",
    Conclusion.UNKNOWN: "P2P is not known to work",
}
"""What is said of the gravest, in this order."""


class VetoWriter:
    """Prints the line at the end, and nothing before."""

    def __init__(self, target: Target, _style: Style) -> None:
        self._target = target
        self._simulated = False

    def begin(self, metadata: Metadata, columns: Sequence[str]) -> None:  # noqa: ARG002
        """Nothing is written yet."""
        self._simulated = metadata.origin == Origin.SIMULATED

    def row(self, row: Row) -> None:
        """Nothing."""

    def end(self, report: Report) -> None:
        """The line."""
        line = veto_line(report.rows(EVIDENCE_SECTION, EvidenceRow), complete=report.complete)
        # A line break in foreign text would end the comment, and the shell would run what follows.
        self._target.open().write(printable_line(line + ("; simulated" if self._simulated else "")) + "\n")


def veto_line(paths: Sequence[EvidenceRow], *, complete: bool = True) -> str:
    """The line on these paths; a run that was cut short knows no path that works."""
    if not complete:
        return f"export {OFF}  # P2P was not measured to the end"
    for conclusion, said in _SAID.items():
        found = [path for path in paths if path.conclusion == conclusion]
        if found:
            names = some_of([f"{path.source} → {path.destination}" for path in found], _MOST_PAIRS)
            first = found[0]
            seen = first.correctness_seen if conclusion is Conclusion.WRONG else first.selection_seen
            reason = first.by_design or seen or first.measurement_seen
            told = f"{said} on {len(found)} of {counted(len(paths), 'pair')}: {names}"
            return f"export {_avoiding(found, paths)}  # {told}{f' ({reason})' if reason else ''}"
    if not paths:
        return "# P2P: one GPU, which has no other to reach"
    verified = all(path.correctness == State.PRESENT for path in paths)
    return f"# P2P works: {counted(len(paths), 'pair')} direct, data {'' if verified else 'not '}verified"


def _avoiding(found: Sequence[EvidenceRow], paths: Sequence[EvidenceRow]) -> str:
    has_nvlinks = [path for path in paths if (path.path_class or "").startswith(_NVLINK)]
    return OFF_OVER_PCIE if has_nvlinks and not any(path in has_nvlinks for path in found) else OFF
