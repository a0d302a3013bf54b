"""The faults that a stored check or scan tells of, as --fault writes them."""

import re
from collections.abc import Iterator
from pathlib import Path

from gpubench.model.results.rows.scan import PARTS_SECTION, PartKind, ScanPartRow
from gpubench.model.terms.verdict import HOST_STAGED, Finding
from gpubench.readers.results.stored import read_stored

_GPU = re.compile(r"\bGPU(\d{1,4})\b", re.ASCII)
_PAIR = re.compile(r"\bGPU(\d{1,4}) → GPU(\d{1,4})\b", re.ASCII)
_ACTIVE = re.compile(r"\b(\d{1,3}) NVLinks? active", re.ASCII)
_NVLINKS = ("nvlink-down", "nvlinks-all-down", "nvlink-disabled")
_MOST = 16


def faults_told(path: Path) -> list[str]:
    """Each once; of very many the first. UsageError where the file cannot be read, or is no result of gpubench's."""
    report = read_stored(path).report
    found = [each for finding in report.findings for each in _of_finding(finding)]
    found += [each for row in report.rows(PARTS_SECTION, ScanPartRow) for each in _of_part(row)]
    return list(dict.fromkeys(found))[:_MOST]


def _of_finding(finding: Finding) -> Iterator[str]:
    words = " ".join((finding.subject, *finding.subjects))
    if finding.id == HOST_STAGED:
        for first, second in _PAIR.findall(words):
            low, high = sorted((int(first), int(second)))
            yield f"link{low}-{high}:staged=yes"
    active = _ACTIVE.search(finding.seen)
    if finding.id in _NVLINKS and active is not None:
        for gpu in _GPU.findall(words):
            yield f"gpu{gpu}:nvlink={active[1]}"


def _of_part(row: ScanPartRow) -> Iterator[str]:
    """What a part still delivers, on node 0: a plan's nodes are all alike, and one slow one slows every collective."""
    share = None if row.percent is None else round(min(0.99, max(0.01, row.percent / 100)), 2)
    if share is None:
        return
    if row.kind in (PartKind.NIC, PartKind.RAIL, PartKind.LEAF_RAIL) and row.rail is not None:
        yield f"nic{row.rail}:bandwidth={share:g}"
    elif row.kind == PartKind.GPU and row.gpu is not None:
        yield f"gpu{row.gpu}:speed={share:g}"
