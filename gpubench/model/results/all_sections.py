"""Every section that a report may have, and what its rows are."""

from collections.abc import Mapping

from gpubench.model.results.rank_times import RankTimeRow
from gpubench.model.results.report import (
    FINDINGS_SECTION,
    OVERLAP_SECTION,
    PAIRS_SECTION,
    TRAFFIC_SECTION,
    CollectiveRow,
    PairRow,
)
from gpubench.model.results.rows.backends import BACKENDS_SECTION, MPI_SUPPORT_SECTION, BackendRow, MpiTrialRow
from gpubench.model.results.rows.causes import CauseRow, UnreadRow
from gpubench.model.results.rows.checks import CheckRow, VerdictRow
from gpubench.model.results.rows.comparison import (
    COMPARISON_SECTION,
    CircumstanceRow,
    ComparisonRow,
    FindingChangeRow,
    HistoryRow,
)
from gpubench.model.results.rows.evidence import EvidenceRow, FallbackRow
from gpubench.model.results.rows.explain import PATHS_SECTION, CommunicatorRow, MemberRow, PathRow, TransportRow
from gpubench.model.results.rows.libraries import LIBRARIES_SECTION, LibraryRow
from gpubench.model.results.rows.overlap import SHORTEST_STEPS_SECTION, OverlapRow, ShortestStepRow
from gpubench.model.results.rows.patterns import PatternRow
from gpubench.model.results.rows.scan import (
    CELLS_SECTION,
    EXCLUSIONS_SECTION,
    PARTS_SECTION,
    ROUNDS_SECTION,
    SCAN_COLLECTIVES_SECTION,
    ExclusionRow,
    ScanCellRow,
    ScanCollectiveRow,
    ScanPartRow,
    ScanRoundRow,
)
from gpubench.model.results.rows.watch import JOBS_SECTION, JobRow, TrafficRow
from gpubench.model.results.topo.rows import GpuRow, KindRow, NicRow, NodeRow, NvlinkRow, RankRow, TreeRow
from gpubench.model.results.winners import RefusedRow, WinnerRow
from gpubench.model.terms.verdict import Finding

TABLES: Mapping[str, type] = {
    "rows": CollectiveRow,
    "gpus": GpuRow,
    "nvlinks": NvlinkRow,
    "nics": NicRow,
    "nodes": NodeRow,
    "kinds": KindRow,
    "pairs": PairRow,
    "ranks": RankRow,
    "tree": TreeRow,
    "findings": Finding,
    "patterns": PatternRow,
    LIBRARIES_SECTION: LibraryRow,
    "evidence": EvidenceRow,
    "fallback": FallbackRow,
    "rank_times": RankTimeRow,
    "paths": PathRow,
    "causes": CauseRow,
    "causes_unread": UnreadRow,
    "transports": TransportRow,
    "communicators": CommunicatorRow,
    "members": MemberRow,
    "checks": CheckRow,
    "verdicts": VerdictRow,
    "comparison": ComparisonRow,
    "finding_changes": FindingChangeRow,
    "circumstances": CircumstanceRow,
    "history": HistoryRow,
    "winners": WinnerRow,
    "refused": RefusedRow,
    BACKENDS_SECTION: BackendRow,
    MPI_SUPPORT_SECTION: MpiTrialRow,
    PARTS_SECTION: ScanPartRow,
    CELLS_SECTION: ScanCellRow,
    ROUNDS_SECTION: ScanRoundRow,
    SCAN_COLLECTIVES_SECTION: ScanCollectiveRow,
    EXCLUSIONS_SECTION: ExclusionRow,
    TRAFFIC_SECTION: TrafficRow,
    JOBS_SECTION: JobRow,
    OVERLAP_SECTION: OverlapRow,
    SHORTEST_STEPS_SECTION: ShortestStepRow,
}
"""The row type of every section that is a table."""

MATRICES = ("matrix", "peer_access", "limits", "matrices", "ratios")
"""The sections that are matrices."""

MAIN_SECTIONS: Mapping[str, str] = {
    "topo": PAIRS_SECTION,
    "p2p": PAIRS_SECTION,
    "libraries": LIBRARIES_SECTION,
    "check": FINDINGS_SECTION,
    "explain": PATHS_SECTION,
    "compare": COMPARISON_SECTION,
    "scan": CELLS_SECTION,
    "watch": JOBS_SECTION,
    OVERLAP_SECTION: OVERLAP_SECTION,
}
"""By command: the section that formats show which show only one. Of a collective these are its rows."""
