"""Figures that the last sentence and a gate go by."""

import pytest
from msgspec.structs import replace

from gpubench.model.paths.transport import Conclusion, Confidence
from gpubench.model.results.compare import HOST
from gpubench.model.results.ending import apply_gate, compute_exit_code
from gpubench.model.results.figures import SpeedFigures
from gpubench.model.results.report import FallbackRow, Table
from gpubench.model.results.sentence import sentence
from gpubench.model.results.speed import TOO_NOISY
from gpubench.model.terms.operation import HostMemory
from gpubench.model.terms.verdict import Cure, Finding, Origin, Verdict
from tests.formats.sample import PAIR, ROW
from tests.model.results.test_sentence import METADATA, report

JUDGED = replace(PAIR, verdict="PASS", verified="last")


@pytest.mark.parametrize("slowest_first", [True, False])
@pytest.mark.parametrize("verdict", [None, "SKIP"])
def test_one_pair_that_nobody_judged_is_no_gates_pass(verdict: str | None, *, slowest_first: bool) -> None:
    """Nor where a slower one, which the sentence tells, was judged."""
    pairs = [replace(JUDGED, bandwidth_gb_s=380.0), replace(PAIR, destination="GPU2", verdict=verdict)]
    figures = SpeedFigures()
    for each in pairs if slowest_first else pairs[::-1]:
        figures.add(each)
    (told,) = figures.all()
    assert (told.gb_s, told.is_judged, figures.is_unjudged) == (380.0, False, True)


@pytest.mark.parametrize(("options", "told"), [({"strict": True}, (Verdict.SKIP, 3)), ({}, (Verdict.INCONCLUSIVE, 0))])
def test_noise_that_nobody_judges_is_not_judged_in_a_gate(
    options: dict[str, object], told: tuple[Verdict, int]
) -> None:
    figures = SpeedFigures()
    figures.add(ROW)
    noise = Finding(
        TOO_NOISY, Verdict.INCONCLUSIVE, "all-reduce of 1K", "23 ms ±416 %", "", "", Cure.of("gpubench allreduce")
    )
    asked = replace(METADATA, options=options)
    seen = apply_gate(asked, report(Verdict.INCONCLUSIVE, noise), figures, exit_style=False)
    assert (seen.verdict, compute_exit_code(asked, seen)) == told
    other = apply_gate(asked, report(Verdict.INCONCLUSIVE, replace(noise, id="p2p-noisy")), figures, exit_style=False)
    assert other.verdict is Verdict.INCONCLUSIVE


def test_ranks_that_share_a_gpu_do_not_open_what_else_was_judged() -> None:
    """A check of one GPU whose ranks reduce for the sake of their data; a collective alone was judged by nobody."""
    host = replace(JUDGED, source=HOST, expected_gb_s=PAIR.bandwidth_gb_s, note=HostMemory.PINNED.full_name)
    shared = replace(ROW, ranks_per_gpu=2)
    asked = replace(METADATA, subject="check", ranks=(), options={})
    for rows, verdict in (((host, shared), Verdict.PASS), ((shared,), Verdict.SKIP), ((host, ROW), Verdict.SKIP)):
        figures = SpeedFigures()
        for row in rows:
            figures.add(row)
        told = apply_gate(asked, report(Verdict.PASS), figures, exit_style=False)
        assert told.verdict is verdict
        line = sentence(asked, told, figures)
        assert ("ranks share a GPU" in line) == (shared in rows)
        assert ("host copies" in line) == (host in rows)


@pytest.mark.parametrize("conclusion", [Conclusion.UNKNOWN, Conclusion.POSSIBLE])
def test_a_gate_passes_no_path_that_nobody_saw(conclusion: Conclusion) -> None:
    row = FallbackRow(
        conclusion=conclusion,
        verdict=Verdict.PASS,
        confidence=Confidence.WEAK,
        origin=Origin.MEASURED,
        count=1,
        pairs=("GPU0 → GPU1",),
        how="",
    )
    table = {FallbackRow.section: Table(FallbackRow.columns(), lambda: [row])}
    seen = replace(report(Verdict.PASS), sections=table)
    for strict in (True, False):
        asked = replace(METADATA, subject="topo", options={"strict": strict})
        told = apply_gate(asked, seen, SpeedFigures(), exit_style=False)
        open_ = strict and conclusion is Conclusion.UNKNOWN
        assert (told.verdict, compute_exit_code(asked, told)) == ((Verdict.SKIP, 3) if open_ else (Verdict.PASS, 0))


def test_a_pair_that_was_not_measured_has_no_data_to_check() -> None:
    figures = SpeedFigures()
    figures.add(JUDGED)
    figures.add(replace(PAIR, bandwidth_gb_s=None, verdict="ERROR"))
    assert (figures.checked, figures.unchecked, figures.is_unjudged) == (True, False, False)
