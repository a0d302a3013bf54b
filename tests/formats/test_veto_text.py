"""The line of `p2p --veto`: what a launcher is told, and what a shell makes of it."""

import os
import shlex
import subprocess
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from gpubench.formats.registry import Presentation, Target
from gpubench.formats.status_line import OFF, OFF_OVER_PCIE, VetoWriter, veto_line
from gpubench.model.paths.transport import Conclusion, State
from gpubench.model.results.report import EvidenceRow, Report, Table
from gpubench.model.terms.verdict import Verdict


def path(source: int, destination: int, conclusion: Conclusion, **facts: Any) -> EvidenceRow:
    """A path with nothing said of it but this."""
    usual: dict[str, Any] = dict.fromkeys(EvidenceRow.columns(), "")
    named = {"source": f"GPU{source}", "destination": f"GPU{destination}", "conclusion": conclusion}
    return EvidenceRow(**usual | {"correctness": State.PRESENT, "path_class": "PHB"} | named | facts)


def test_what_works_needs_no_environment() -> None:
    both = [path(0, 1, Conclusion.DIRECT), path(1, 0, Conclusion.DIRECT)]
    assert veto_line(both) == "# P2P works: 2 pairs direct, data verified"
    unseen = [path(0, 1, Conclusion.DIRECT, correctness=State.ABSENT)]
    assert veto_line(unseen) == "# P2P works: 1 pair direct, data not verified"
    assert veto_line([]).startswith("# P2P: this machine has only one GPU")


@pytest.mark.parametrize(
    ("conclusion", "said"),
    [
        (Conclusion.WRONG, "P2P corrupts data"),
        (Conclusion.STAGED, "P2P drops to host memory"),
        (Conclusion.UNKNOWN, "P2P is not known to work"),
    ],
)
def test_what_does_not_work_is_switched_off(conclusion: Conclusion, said: str) -> None:
    found = veto_line([path(0, 1, conclusion), path(1, 0, Conclusion.DIRECT)])
    assert found == f"export {OFF}  # {said} on 1 of 2 pairs: GPU0 → GPU1"


def test_wrong_data_is_graver_than_host_memory() -> None:
    found = veto_line([path(0, 1, Conclusion.STAGED), path(1, 0, Conclusion.WRONG, correctness_seen="5 wrong")])
    assert "corrupts data on 1 of 2 pairs: GPU1 → GPU0 (5 wrong)" in found


def test_pairs_with_nvlinks_are_kept_where_only_others_fail() -> None:
    found = veto_line([path(0, 1, Conclusion.DIRECT, path_class="NV4"), path(0, 2, Conclusion.STAGED)])
    assert found.startswith(f"export {OFF_OVER_PCIE}  #")


def test_a_run_that_was_cut_short_vouches_for_nothing() -> None:
    assert veto_line([path(0, 1, Conclusion.DIRECT)], complete=False).startswith(f"export {OFF}  #")


def test_the_shell_takes_the_variables_and_nothing_of_foreign_text(tmp_path: Path) -> None:
    foreign = "NVML\ntouch hacked; $(touch hacked)"
    rows = [path(0, 1, Conclusion.STAGED, selection_seen=foreign)]
    out = StringIO()
    writer = VetoWriter(Target(stream=out), Presentation())
    report = Report(
        verdict=Verdict.FAIL, complete=True, sections={EvidenceRow.section: Table(EvidenceRow.columns(), lambda: rows)}
    )
    writer.end(report)
    script = f'eval {shlex.quote(out.getvalue())}; echo "$NCCL_P2P_DISABLE ${{GGML_CUDA_P2P-unset}}"'
    settings = {**os.environ, "GGML_CUDA_P2P": "1"}
    found = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=settings, capture_output=True, text=True, check=True)
    assert found.stdout == "1 unset\n", "in llama.cpp, 0 switches peer access on"
    assert not (tmp_path / "hacked").exists()
