"""The paths of a job's pairs in its log, for --require-path."""

import re
from collections.abc import Iterator, Mapping, Sequence

from gpubench.errors import UsageError
from gpubench.measure.explain import ucx
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.paths.nccl_log import LogFacts, RemarkKind
from gpubench.model.paths.transport import parse_transport
from gpubench.model.paths.wiring import MNNVL, NETWORK
from gpubench.model.results.ending import EXCERPT
from gpubench.model.results.fallback import PathRow
from gpubench.model.results.report import Report
from gpubench.model.results.required_path import TakenPath, require_paths
from gpubench.model.terms.options import REQUIRE_PATH, RequiredPath
from gpubench.model.terms.units import shorten
from gpubench.model.terms.verdict import Cure

_INSIDE = {"node": True, "network": False, "unknown": None}
_DEVICE = re.compile(r"\[(\d+)\]\S+?/(IB|RoCE)\b")
"""NCCL lists its devices as `[0]mlx5_0:1/RoCE [1]mlx5_1:1/IB [RO]`. RO stands for relaxed ordering."""

_KINDS = {"IB": NicKind.INFINIBAND, "RoCE": NicKind.ROCE, "efa": NicKind.EFA}
_GAPS = (
    *("ranks-missing", "ranks-silent", "ends-missing", "lines-unreadable", "lines-left-out", "log-cut-off"),
    *("log-limit", "no-connections", EXCERPT),
)
_TOPOLOGY = Cure.of(
    "gpubench topo", comment="UCX names neither NVLinks nor the link layer of a NIC. This command shows both."
)
_STARTS_INSIDE = ("SHM", "P2P/CUMEM", "P2P/IPC", "P2P/direct", "P2P/indirect")


def require_logged_paths(facts: LogFacts, report: Report, required: Sequence[RequiredPath]) -> Report:
    """Add a finding for each requirement that is not met.

    Raises UsageError if a complete log shows paths, but no pair to which a requirement applies.
    """
    of_ucx, gap = list(ucx.taken_paths(facts.ucx)), _find_gap(report)
    paths = [*_taken_paths(facts, report), *of_ucx]
    has_paths = bool(of_ucx) or bool(report.rows(PathRow))
    for kind in required:
        if has_paths and not gap and not any(path.is_judged_by(kind) for path in paths):
            used = ["+".join(path.transports) for path in paths] or [row.transport for row in report.rows(PathRow)]
            taken = dict.fromkeys(used)
            raise UsageError(
                f"{REQUIRE_PATH} {kind}: no pair in this log can take that path: all use {shorten(list(taken))}",
                expected="pairs inside a node for nvlink and p2p, pairs between nodes for the others",
                next_step="leave it out, or pass the logs of all ranks to explain",
            )
    if facts.nccl_lines:
        return require_paths(report, required, paths, gap=gap)
    return require_paths(report, required, paths, gap=gap, cure=_TOPOLOGY if of_ucx else ucx.TABLES)


def _taken_paths(facts: LogFacts, report: Report) -> Iterator[TakenPath]:
    networks, domains = _networks(facts), _domains(facts)
    for row in report.rows(PathRow):
        ends = (row.src_host, row.src_bus_id or row.src), (row.dst_host, row.dst_bus_id or row.dst)
        inside = True if row.transport.startswith(_STARTS_INSIDE) else _INSIDE[row.scope]
        if inside and ends[0] == ends[1]:
            continue  # Both ranks use one GPU
        processes = f"{row.src_host}:{row.src_pid}", f"{row.dst_host}:{row.dst_pid}"
        path_class = facts.paths.get((row.src_host or "", row.src_bus_id or "", row.dst_bus_id or ""))
        if not inside and domains.keys() >= {*processes}:
            path_class = MNNVL if domains[processes[0]] == domains[processes[1]] else NETWORK
        used = tuple(filter(None, (row.transport, row.transport_received)))
        yield TakenPath(
            name=f"rank {row.src} → {row.dst}",
            ends=ends if ends[0] != ends[1] else (row.src, row.dst),
            is_inside=inside,
            transports=tuple(parse_transport(transport).family for transport in used),
            path_class=path_class,
            host_staged=row.host_staged,
            networks=frozenset(
                _find_kinds(networks.get(row.src_host or "", {}), used[0])
                | _find_kinds(networks.get(row.dst_host or "", {}), used[-1])
            ),
        )


def _networks(facts: LogFacts) -> dict[str, dict[str, NicKind]]:
    """Return the kinds of NICs that NCCL lists on each host, by their numbers."""
    found: dict[str, dict[str, NicKind]] = {}
    for remark in facts.remarks:
        if remark.note.kind is RemarkKind.RDMA_DEVICES:
            devices = _DEVICE.findall(remark.note.text) or [("", about) for about in remark.note.about]
            kinds = {number: _KINDS[layer] for number, layer in devices if layer in _KINDS}
            for process in remark.processes:
                found.setdefault(process.rpartition(":")[0], {}).update(kinds)
    return found


def _find_kinds(devices: Mapping[str, NicKind], transport: str) -> set[NicKind]:
    """Return the kind of the device whose number the transport has, or all kinds on its host."""
    number = transport.removeprefix("NET/IB/").partition("/")[0]
    return {devices[number]} if number in devices else set(devices.values())


def _domains(facts: LogFacts) -> dict[str, tuple[str, ...]]:
    """Return the NVLink domain of each process. Without a cluster, whose UUID is 0, it is the host."""
    return {
        process: remark.note.about if remark.note.about[0].strip("0.") else (process.rpartition(":")[0],)
        for remark in facts.remarks
        if remark.note.kind is RemarkKind.FABRIC
        for process in remark.processes
    }


def _find_gap(report: Report) -> str:
    """Name the findings about paths that are missing in the log. Return an empty text if there are none."""
    found = dict.fromkeys(finding.id for finding in report.findings if finding.id in _GAPS)
    return f"the log is incomplete ({', '.join(found)})" if found else ""
