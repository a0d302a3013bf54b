"""The loud line, and the table of evidence."""

from gpubench.formats.layout import table_lines
from gpubench.formats.table import EVIDENCE_COLUMNS, evidence_notes, fallback_lines
from gpubench.model.paths.transport import Evidence, State
from gpubench.model.results.fallback import KnownPath, evidence_rows, fallback_rows
from gpubench.model.results.report import EvidenceRow, FallbackRow, Report, Table
from gpubench.model.terms.verdict import Verdict
from tests.model.results.test_fallback import DIRECT, DISPUTED, STAGED, UNKNOWN, cause_of, path


def report(*paths: KnownPath, origin: str = "measured", unheard: str = "") -> Report:
    rows = fallback_rows(paths, origin, cause_of, unheard)
    seen = evidence_rows(paths, origin)
    sections = {
        EvidenceRow.section: Table(EvidenceRow.columns(), lambda: seen),
        FallbackRow.section: Table(FallbackRow.columns(), lambda: rows),
    }
    return Report(verdict=Verdict.PASS, complete=True, sections=sections)


def test_the_disputed_and_the_unknown() -> None:
    assert "fallback: disputed: ranks 0 → 1" in fallback_lines(report(path(0, 1, DISPUTED)))[0]
    assert "fallback: not known for ranks 0 → 1" in fallback_lines(report(path(0, 1, UNKNOWN)))[0]
    assert fallback_lines(report(unheard="rank 0: silent")) == ["fallback: not known: rank 0: silent"]


def test_what_is_simulated_or_wrong_is_said_so() -> None:
    assert fallback_lines(report(path(0, 1, STAGED), origin="simulated"))[0].startswith("fallback (simulated): HOST")
    wrong = STAGED.__class__(correctness=Evidence(State.CONTRADICTING, "3 wrong elements"))
    assert "wrong data arrived" in fallback_lines(report(path(0, 1, wrong)))[0]


def test_a_run_without_paths_says_nothing() -> None:
    assert fallback_lines(Report(verdict=Verdict.PASS, complete=True)) == []


def test_the_table_of_evidence() -> None:
    both = report(path(0, 1, DIRECT), path(1, 0, STAGED, 28.9))
    lines = list(table_lines(EVIDENCE_COLUMNS, both.rows(EvidenceRow), 100, keys=2))
    assert lines[0].split() == [
        *("from", "to", "path", "could", "chosen", "moved", "right", "over", "GB/s"),
        "limit",
        "verdict",
    ]
    assert " ".join(lines[1].split()) == "rank 0 rank 1 NV18 + + + + P2P/CUMEM 340.0 450 direct, proven"
    assert " ".join(lines[2].split()) == "rank 1 rank 0 NV18 + - - + SHM/direct 28.9 450 staged, proven"
    assert max(map(len, table_lines(EVIDENCE_COLUMNS, both.rows(EvidenceRow), 80, keys=2))) <= 80
    notes = evidence_notes(both)
    assert "  capability: NV18 [all]" in notes
    assert "  measurement: PCIe moved [rank 1 → rank 0]" in notes
