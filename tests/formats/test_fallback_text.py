"""The loud line, and the table of evidence."""

from dataclasses import replace

from gpubench.formats.layout import table_lines
from gpubench.formats.table import EVIDENCE_COLUMNS, evidence_notes, fallback_lines
from gpubench.measure.topo import examine
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import Evidence, State
from gpubench.model.results.fallback import KnownPath, evidence_rows, fallback_rows
from gpubench.model.results.report import EvidenceRow, FallbackRow, Report, Table
from gpubench.model.terms.verdict import Verdict
from gpubench.simulated.machine import parse_machine, snapshots
from tests.model.results.test_fallback import DIRECT, DISPUTED, STAGED, UNKNOWN, cause_of, path


def report(*paths: KnownPath, origin: str = "measured", unheard: str = "") -> Report:
    rows = fallback_rows(paths, origin, cause_of, unheard)
    seen = evidence_rows(paths, origin)
    sections = {
        EvidenceRow.section: Table(EvidenceRow.columns(), lambda: seen),
        FallbackRow.section: Table(FallbackRow.columns(), lambda: rows),
    }
    return Report(verdict=Verdict.PASS, complete=True, sections=sections)


def test_none_and_how_it_is_known() -> None:
    (line,) = fallback_lines(report(path(0, 1, DIRECT), path(1, 0, DIRECT)))
    assert line.startswith("fallback: none. Both pairs are direct over P2P/CUMEM (proven): the library chose")
    assert "counters moved" in line


def test_none_may_be_known_of_some_paths_better_than_of_others() -> None:
    unchecked = DIRECT.__class__(capability=DIRECT.capability, selection=DIRECT.selection)
    (line,) = fallback_lines(report(path(0, 1, DIRECT), path(1, 0, DIRECT), path(0, 2, unchecked)))
    assert line.startswith("fallback: none. All 3 pairs are direct over P2P/CUMEM (likely): the library chose")


def test_which_pairs_how_slow_and_why() -> None:
    paths = [path(0, n, STAGED, 28.9) for n in range(1, 11)]
    staged, direct = fallback_lines(report(*paths, path(1, 0, DIRECT)))
    assert staged == (
        "fallback: HOST-STAGED: ranks 0 → 1, 0 → 2, 0 → 3, 0 → 4, 0 → 5, 0 → 6, 0 → 7, 0 → 8 and 2 more through host "
        "memory over SHM/direct: 28.9 of 450 GB/s, 15.6 times slower than the limit; NCCL_P2P_DISABLE=1 in "
        "the environment"
    )
    assert direct == "fallback: not for ranks 1 → 0, direct over P2P/CUMEM (proven)"


def test_a_single_pair_is_named() -> None:
    assert "none. ranks 0 → 1 is direct" in fallback_lines(report(path(0, 1, DIRECT)))[0]


def test_the_disputed_and_the_unknown() -> None:
    assert "fallback: disputed: ranks 0 → 1" in fallback_lines(report(path(0, 1, DISPUTED)))[0]
    assert "fallback: not known for ranks 0 → 1" in fallback_lines(report(path(0, 1, UNKNOWN)))[0]
    assert fallback_lines(report(unheard="rank 0: silent")) == ["fallback: not known: rank 0: silent"]


def test_what_was_only_looked_at_is_to_be_expected() -> None:
    node = snapshots(parse_machine("hgx-h200-2"))[0]
    (line,) = fallback_lines(examine([Topology(node)]))
    assert line == (
        "fallback (simulated): no pair would fall back: direct possible for all 2 pairs (NV18; peer access possible). "
        "Try: gpubench p2p"
    )
    refused = tuple(replace(pair, cuda=False, read="CNS", write="CNS") for pair in node.pairs)
    pcie = tuple(replace(gpu, nvlinks=()) for gpu in node.gpus)
    (line,) = fallback_lines(examine([Topology(replace(node, pairs=refused, gpus=pcie))]))
    assert line.startswith(
        "fallback (simulated): all 2 pairs would fall back, because NVML reports CNS: chipset not supp"
    )
    assert "HOST-STAGED, p2p-virtual-machine (PHB; peer access chipset not supported)" in line


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
