"""The sentence of a scan: how many nodes and leaves are bad, which, and how many are well."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from gpubench.model.results.report import Metadata, Report
from gpubench.model.results.rows.scan import (
    CELLS_SECTION,
    OF_ONE_NODE,
    PARTS_SECTION,
    PartKind,
    ScanCellRow,
    ScanPartRow,
)
from gpubench.model.terms.units import counted
from gpubench.model.terms.verdict import Verdict, drained_hosts

_MOST_PARTS = 5

_HANGING = (PartKind.NODE_HANGS, PartKind.RAIL_HANGS)
_OF_HANGING = ("deadline", "stopped", "kernel")
_JUDGED = (Verdict.PASS, Verdict.FAIL)


def scan_sentence(metadata: Metadata, report: Report) -> str:
    """'3 of 1,024 nodes are bad: node17 rail 3 at 41 % (NIC or cable), ...; 1,021 are well'."""
    rows = report.rows(PARTS_SECTION, ScanPartRow)
    bad = [row for row in rows if row.verdict == Verdict.FAIL]
    nodes = len(metadata.hosts)
    if bad:
        doubtful = {cell.node for cell in report.rows(CELLS_SECTION, ScanCellRow) if cell.verdict not in _JUDGED}
        return _of_bad(bad, nodes, doubtful, drained_hosts(report.findings, metadata.hosts))
    suspects = {node for row in rows for node in row.nodes if row.kind in OF_ONE_NODE}
    sure = _sure(metadata.options)
    if rows:
        named = _listed(rows)
        if len(suspects) == 1:
            return f"1 of {_number(nodes)} nodes is a suspect that nobody confirmed: {named}"
        count = f"{_number(len(suspects))} of {_number(nodes)} nodes" if suspects else "parts of the network"
        return f"{count} are suspects that nobody confirmed: {named}"
    return f"all {_number(nodes)} nodes are well{sure}"


def _of_bad(bad: Sequence[ScanPartRow], nodes: int, doubtful: Set[str], failing: Set[str]) -> str:
    """The bad parts first; `doubtful` are nodes of which some rail is a suspect, too noisy or without a figure, and
    `failing` those whose own facts fail, or whose driver did not answer.
    """
    of_nodes = {node for row in bad if row.kind in OF_ONE_NODE for node in row.nodes}
    between = [row for row in bad if row.kind not in OF_ONE_NODE]
    behind = {node for row in between for node in row.nodes}
    verb = "is" if len(of_nodes) == 1 and not between else "are"
    subjects = [f"{_number(len(of_nodes))} of {_number(nodes)} nodes"] if of_nodes else []
    subjects += [counted(len(between), "part") + " of the network"] if between else []
    if not of_nodes and len(between) == 1:
        verb = "is"
    unsure = len(doubtful - of_nodes - behind)
    ill = len(failing - of_nodes - behind - doubtful)
    well = nodes - len(of_nodes | behind) - unsure - ill
    slowed = len(behind - of_nodes)
    rest = [f"{_number(slowed)} are slowed by the network"] if slowed else []
    rest += [f"{_number(unsure)} could not be judged"] if unsure else []
    rest += [f"{_number(ill)} {'fails' if ill == 1 else 'fail'} by other findings"] if ill else []
    rest += [f"{_number(well)} {'is' if well == 1 else 'are'} well"] if well or not rest else []
    return f"{' and '.join(subjects)} {verb} bad: {_listed(bad)}; {', '.join(rest)}"


def _listed(rows: Sequence[ScanPartRow]) -> str:
    words = [part_words(row) for row in rows[:_MOST_PARTS]]
    more = f" and {len(rows) - _MOST_PARTS} more" if len(rows) > _MOST_PARTS else ""
    return ", ".join(words) + more


def part_words(row: ScanPartRow) -> str:
    """'node17 rail 3 at 41 % (NIC or cable)', 'node9 hangs'."""
    if row.kind == PartKind.NODE_GONE:
        return f"{row.subject} is gone"
    if row.kind in _HANGING:
        return f"{row.subject} {'hangs' if any(word in row.seen for word in _OF_HANGING) else 'fails'}"
    share = "" if row.percent is None else f" at {row.percent:.0f} %"
    return row.subject + share + (f" ({row.kind})" if row.kind in (PartKind.NIC, PartKind.UPLINK) else "")


def _sure(options: Mapping[str, Any]) -> str:
    sure = options.get("sure_loss_percent")
    if not isinstance(sure, (int, float)):
        return ""
    beside = "" if options.get("rates_known") else " beside the other nodes"
    return f": a loss of {sure:.0f} %{beside} would have been named"


def _number(value: int) -> str:
    return f"{value:,}"
