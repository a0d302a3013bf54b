"""The sections of `gpubench topo`, which an option names before anything is read."""

from gpubench.model.results.report import FINDINGS_SECTION, PAIRS_SECTION
from gpubench.model.results.rows.causes import CAUSES_SECTION, UNREAD_SECTION
from gpubench.model.results.rows.evidence import FALLBACK_SECTION

SECTIONS = (
    *("gpus", "nvlinks", "nics", "nodes", "kinds", "matrix", "peer_access", "limits", PAIRS_SECTION, "ranks", "tree"),
    *(FALLBACK_SECTION, CAUSES_SECTION, UNREAD_SECTION, FINDINGS_SECTION),
)
