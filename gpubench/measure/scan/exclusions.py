"""Exclude lists: the nodes to leave out, as Slurm, mpirun and Kubernetes take them."""

import re
import shlex
from collections.abc import Iterator, Sequence

from gpubench.model.results.rows.scan import ExclusionRow, Tool
from gpubench.model.terms.units import spans

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d{1,9})", re.ASCII | re.DOTALL)


def exclusions(bad: Sequence[str], good: Sequence[str], ranks_per_node: int) -> Iterator[ExclusionRow]:
    """The bad hosts for Slurm and Kubernetes; for mpirun the good ones, as it has no list of hosts to leave out."""
    yield from (ExclusionRow(tool=Tool.MPIRUN, line=f"{host} slots={ranks_per_node}") for host in good)
    if not bad:
        return
    listed = slurm_hostlist(bad)
    yield ExclusionRow(tool=Tool.SLURM, line=shlex.join([f"--exclude={listed}"]))
    drain = ["scontrol", "update", f"nodename={listed}", "state=drain", "reason=gpubench scan"]
    yield ExclusionRow(tool=Tool.SLURM_DRAIN, line=shlex.join(drain))
    yield ExclusionRow(tool=Tool.KUBERNETES, line=shlex.join(["kubectl", "cordon", "--", *bad]))


def slurm_hostlist(hosts: Sequence[str]) -> str:
    """Host names in Slurm's brackets: 'node[3,17-19],login'; numbers keep their leading zeros."""
    stems: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for host in sorted(set(hosts)):
        match = _NUMBERED.fullmatch(host)
        if match is None:
            plain.append(host)
        else:
            padded = len(match["number"]) if match["number"].startswith("0") else 0
            stems.setdefault((match["stem"], padded), []).append(int(match["number"]))
    parts = [_bracketed(stem, padded, sorted(numbers)) for (stem, padded), numbers in stems.items()]
    return ",".join([*parts, *plain])


def _bracketed(stem: str, padded: int, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{stem}{numbers[0]:0{padded}d}" if padded else f"{stem}{numbers[0]}"
    listed = spans(numbers)
    if padded:
        listed = re.sub(r"\d+", lambda found: found[0].zfill(padded), listed)
    return f"{stem}[{listed}]"
