"""The sentence of an overlap: what the two cost each other at the largest size, and what a cap gains."""

from gpubench.model.results.report import Report
from gpubench.model.results.rows.overlap import SHORTEST_STEPS_SECTION, ShortestStepRow
from gpubench.model.terms.overlap.asked import Partner, cap_name
from gpubench.model.terms.units import format_size

_BESIDE = {Partner.GEMM: "GEMMs", Partner.COPY: "copies", Partner.CHAIN: "small kernels"}


def overlap_sentence(report: Report) -> str:
    """'allreduce of 256M takes 2.4 times as long beside GEMMs, which slow down by 21 %; 8 CTAs ...'; '' of one cap."""
    rows = report.rows(SHORTEST_STEPS_SECTION, ShortestStepRow)
    known = [row for row in rows if row.own_communication_slowdown is not None]
    if not known:
        return ""
    shown = max(known, key=lambda row: row.size_bytes)
    beside = _BESIDE[Partner(shown.partner)]
    slowed = "" if shown.own_compute_slowdown is None else f", which slow down by {_more(shown.own_compute_slowdown)}"
    said = (
        f"{shown.collective} of {format_size(shown.size_bytes)} takes {shown.own_communication_slowdown:.2g} times "
        f"as long beside {beside}{slowed}"
    )
    gains = [row for row in known if row.beyond_noise and row.partner == shown.partner]
    best = max(gains, key=lambda row: row.gain_percent or 0, default=None)
    if best is None:
        return f"{said}; no cap makes a step shorter"
    at = f" at {format_size(best.size_bytes)}"
    return f"{said}; {cap_name(best.ctas)} make the step {best.gain_percent:.1f} % shorter{at}"


def _more(slowdown: float) -> str:
    return f"{100 * (slowdown - 1):.0f} %"
