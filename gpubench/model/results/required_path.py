"""The paths that --require-path requires: whether pairs took them, and whether the hardware has them at all."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise

from msgspec import Struct
from msgspec.structs import replace

from gpubench.errors import UsageError
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.paths.topology import XGMI_LINK, Topology
from gpubench.model.paths.wiring import MNNVL, NETWORK, Wiring
from gpubench.model.results.report import EvidenceRow, FallbackRow, Report
from gpubench.model.terms.options import REQUIRE_PATH, RequiredPath
from gpubench.model.terms.units import group_by, plural, shorten
from gpubench.model.terms.verdict import HOST_STAGED, PATH_REQUIRED, Cure, Finding, Verdict

ANY_RDMA = "NET/RDMA"  # The network of a model
_OTHER = None  # Any path that nobody can require
_INSIDE = frozenset({RequiredPath.NVLINK, RequiredPath.P2P})
_NETWORK_OF = {
    NicKind.INFINIBAND: RequiredPath.IB,
    NicKind.ROCE: RequiredPath.ROCE,
    NicKind.EFA: RequiredPath.EFA,
}
_OVER_NVLINK = ("NVLS", "P2P/MNNVL", "P2P/indirect")  # NCCL routes through another GPU only over NVLinks
_OWN_NAMES = {NicKind.INFINIBAND: "InfiniBand", NicKind.ROCE: "RoCE", NicKind.EFA: "EFA", NicKind.ETHERNET: "Ethernet"}
_PEER = ("P2P/", "NVLS", "symmetric memory", "copy engine", "cuda_ipc")
_NETWORKS = ("NET/", "COLLNET/")
_VERBS = re.compile(r"g?IB|SHARP|\w+_mlx5/")  # NCCL's network, NVIDIA's IBext and SHARP, Google's gIB, and UCX's
_MOST_PAIRS = 3
_LOG_MORE = Cure.of(
    "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,NET",
    comment="`gpubench explain` then reads the paths from the job's log.",
)
MEASURE_PAIRS = Cure.of(
    "gpubench p2p --evidence", comment="It measures each pair separately and shows everything that is known."
)


class TakenPath(Struct, frozen=True):
    """The path that a pair took. `ends` identifies the pair, and `networks` are the kinds of its RDMA NICs.

    None means that a value is unknown.
    """

    name: str
    ends: tuple[object, object]
    is_inside: bool | None
    transports: tuple[str, ...] = ()
    path_class: str | None = None
    host_staged: bool | None = None
    networks: frozenset[NicKind] = frozenset()

    @property
    def words(self) -> str:
        """The pair and its path: 'rank 0 → 3 SHM/direct'."""
        unnamed = "host memory" if self.host_staged else self.path_class or "unknown path"
        is_rdma = self.is_inside is False and any(each == ANY_RDMA or _is_verbs(each) for each in self.transports)
        kinds = ", ".join(sorted(_OWN_NAMES[kind] for kind in self.networks)) if is_rdma else ""
        return f"{self.name} {'+'.join(dict.fromkeys(self.transports)) or unnamed}{kinds and f' ({kinds})'}"

    def is_judged_by(self, kind: RequiredPath) -> bool:
        """True if the requirement applies to this pair. Pairs that took NVLink between nodes need no network."""
        if kind in _INSIDE or self.is_inside:
            return kind in _INSIDE and self.is_inside is not False
        is_mnnvl = kind is RequiredPath.MNNVL
        return self._takes_nvlink or self.path_class != NETWORK if is_mnnvl else not self._takes_nvlink

    def fulfils(self, kind: RequiredPath) -> bool | None:
        """True if all transports of the pair are the required path. None if that is not proven."""
        if kind is RequiredPath.MNNVL and self.path_class is None and not self._takes_nvlink:
            return None  # Perhaps no NVLink domain joins the two nodes
        accepted = _INSIDE if kind is RequiredPath.P2P else {kind}
        find = self._kinds_inside if kind in _INSIDE else self._kinds_between
        possible = [find(transport) for transport in self.transports or ("",)]
        if any(accepted.isdisjoint(kinds) for kinds in possible):
            return False
        return True if all(kinds <= accepted for kinds in possible) else None

    @property
    def _takes_nvlink(self) -> bool:
        over_nvlink = _OVER_NVLINK if self.is_inside else (*_OVER_NVLINK, "cuda_ipc")
        return any(transport.startswith(over_nvlink) for transport in self.transports)

    def _kinds_inside(self, transport: str) -> set[RequiredPath | None]:
        """Return the paths that a transport inside a node may be. Several mean that it is not known which."""
        if self.is_inside is None:
            return {*_INSIDE, _OTHER}
        if self.host_staged or transport.startswith(("SHM", *_NETWORKS)):
            return {_OTHER}
        if self.host_staged is None:
            return {*_INSIDE, _OTHER}
        if transport and not transport.startswith(_PEER):
            return {_OTHER}  # For example a NIC that UCX uses inside a node
        if transport.startswith(_OVER_NVLINK) or (self.path_class or "").startswith("NV"):
            return {RequiredPath.NVLINK}
        return {*_INSIDE} if self.path_class in (None, "?") else {RequiredPath.P2P}

    def _kinds_between(self, transport: str) -> set[RequiredPath | None]:
        """Return the paths that a transport between nodes may be."""
        network = _network_of(transport)
        usable = {_NETWORK_OF[kind] for kind in self.networks}
        if transport.startswith((*_OVER_NVLINK, "cuda_ipc")):
            return {RequiredPath.MNNVL}
        if network.startswith("srd/"):  # UCX has names of its own for networks
            return {RequiredPath.EFA}
        if network.startswith(("Socket", "tcp/")):
            return {_OTHER}
        if _is_verbs(transport):
            return {*(usable - {RequiredPath.EFA} or {RequiredPath.IB, RequiredPath.ROCE})}
        # Without GPUDirect RDMA, libfabric may use TCP.
        if transport == ANY_RDMA or ("Libfabric" in network and transport.endswith("/GDRDMA")):
            return {*(usable or _NETWORK_OF.values())}
        return {*RequiredPath, _OTHER}


def _network_of(transport: str) -> str:
    return transport.split("/")[1] if transport.startswith(_NETWORKS) else transport


def _is_verbs(transport: str) -> bool:
    return _VERBS.match(_network_of(transport)) is not None


def rdma_kinds(nodes: Iterable[Topology]) -> dict[str, frozenset[NicKind]]:
    """Return the kinds of each host's RDMA NICs that are up, or whose state is unknown."""
    return {
        node.snapshot.host: frozenset(nic.kind for nic in node.nics if nic.rdma and nic.state in ("active", None))
        for node in nodes
    }


def paths_of_evidence(rows: Iterable[EvidenceRow], nodes: Iterable[Topology]) -> Iterator[TakenPath]:
    """Yield the paths of evidence rows. Skip ranks that share a GPU."""
    kinds, none = rdma_kinds(nodes), frozenset[NicKind]()
    for row in rows:
        hosts = row.source_node, row.destination_node
        ends = (hosts[0], row.source_bus_id or row.source), (hosts[1], row.destination_bus_id or row.destination)
        transports = tuple(row.transport.split("+")) if row.transport else ()
        to_switch = any(transport.startswith("COLLNET/") for transport in transports)  # It has no second rank
        if ends[0] != ends[1] or to_switch:
            there = "" if hosts[0] == hosts[1] or row.source.startswith("rank ") else f"{hosts[1]} "
            here = f"{hosts[0]} " if there else ""
            yield TakenPath(
                name=f"{here}{row.source} → {there}{row.destination.removeprefix('rank ')}",
                ends=ends,
                is_inside=hosts[0] == hosts[1] and not to_switch,
                transports=transports,
                path_class=row.path_class,
                host_staged=row.host_staged,
                networks=kinds.get(hosts[0], none) | kinds.get(hosts[1], none),
            )


def paths_of_model(staged: Iterable[Sequence[int]], wiring: Wiring) -> Iterator[TakenPath]:
    """Yield the paths of a simulated collective, which sends over NVLinks, PCIe and NICs unless a fault stages it.

    These are the pairs inside nodes, and each rank with its peer on the next node. Rings avoid pairs without NVLinks if
    both GPUs have NVLinks to others.
    """
    through_host, kinds = {tuple(pair) for pair in staged}, rdma_kinds(wiring.nodes.values())
    ranks = list(group_by(range(len(wiring.gpus)), lambda rank: wiring.gpus[rank].node).values())
    pairs = [pair for own in ranks for pair in combinations(own, 2)]
    linked = {rank for pair in pairs if wiring.has_nvlinks(pair) for rank in pair}
    pairs = [pair for pair in pairs if wiring.has_nvlinks(pair) or not linked.issuperset(pair)]
    pairs += [pair for own, others in pairwise(ranks) for pair in zip(own, others, strict=False)]
    for pair in (ordered for one, other in pairs for ordered in ((one, other), (other, one))):
        networks = kinds[wiring.host(pair[0])] | kinds[wiring.host(pair[1])]
        ends = [(wiring.host(rank), wiring.gpus[rank].gpu_bus_id) for rank in pair]
        across = {MNNVL: MNNVL, NETWORK: ANY_RDMA if networks else "NET/Socket"}.get(wiring.path(pair))
        yield TakenPath(
            name=f"rank {pair[0]} → {pair[1]}",
            ends=(ends[0], ends[1]),
            is_inside=wiring.share_node(pair),
            transports=() if across is None else (across,),
            path_class=wiring.path(pair),
            host_staged=pair in through_host,
            networks=networks,
        )


def require_evidence(
    report: Report, required: Sequence[RequiredPath], nodes: Iterable[Topology], cure: Cure = _LOG_MORE
) -> Report:
    """Judge the paths in the evidence section. Pairs that are only in the fallback section are not proven."""
    rows = report.rows(EvidenceRow)
    missing = sum(row.count for row in report.rows(FallbackRow)) - len(rows)
    gap = f"{plural(missing, 'pair')} without evidence" if missing > 0 else ""
    return require_paths(report, required, paths_of_evidence(rows, nodes), gap=gap, cure=cure)


def require_paths(
    report: Report,
    required: Sequence[RequiredPath],
    paths: Iterable[TakenPath],
    what: str = "pair",
    gap: str = "",
    cure: Cure = _LOG_MORE,
) -> Report:
    """Add a finding for each requirement that is not met: FAIL for another path, ERROR if it is not proven.

    A pair is judged by the worst of its paths, for example over all communicators. `gap` describes missing paths, and
    `cure` shows how to prove the path.
    """
    taken, findings = list(paths) if required else [], list[Finding]()
    for kind in required:
        pairs = group_by((path for path in taken if path.is_judged_by(kind)), lambda path: path.ends)
        by_answer: dict[bool | None, list[TakenPath]] = {True: [], None: [], False: []}
        for own in pairs.values():
            answers = {path.fulfils(kind): replace(path, name=own[0].name) for path in reversed(own)}
            worst = next(answer for answer in (False, None, True) if answer in answers)
            by_answer[worst].append(answers[worst])
        if by_answer[False] or by_answer[None] or gap or not pairs:
            found = _finding(kind, by_answer[False], by_answer[None], plural(len(pairs), what), gap)
            found = found if by_answer[False] else replace(found, cure=cure)
            findings.append(_explain(found, by_answer[False], report.findings))
    return report.add_findings(first=findings)


def _finding(
    kind: RequiredPath, wrong: Sequence[TakenPath], doubtful: Sequence[TakenPath], total: str, gap: str
) -> Finding:
    shown = wrong or doubtful
    how = f"used a path other than {kind}" if wrong else f"not proven to use {kind}"
    subject = f"{len(shown)} of {total} {how}: {shorten([path.words for path in shown], _MOST_PAIRS)}"
    unproven = f"{len(doubtful)} more not proven" if wrong and doubtful else ""
    return Finding(
        id=PATH_REQUIRED,
        severity=Verdict.FAIL if wrong else Verdict.ERROR,
        subject=subject if shown else f"{kind} not proven: {gap or 'no pair of this run can take that path'}",
        seen="; ".join(filter(None, (unproven, gap if shown else ""))),
        expected=f"{kind} everywhere, as {REQUIRE_PATH} requires",
        cause="",
        cure=Cure.of("gpubench topo --causes"),
        subjects=tuple(path.words for path in shown),
    )


def _explain(found: Finding, wrong: Sequence[TakenPath], known: Iterable[Finding]) -> Finding:
    """Add the cause and the commands of the finding that explains the first wrong path."""
    is_other_network = bool(wrong) and not (wrong[0].is_inside or "Socket" in wrong[0].words)
    for finding in () if is_other_network or not wrong else known:
        is_staged, name = finding.id == HOST_STAGED, wrong[0].name.removeprefix("rank ")
        is_alike = finding.subject.startswith(name) or any(kind in finding.seen for kind in wrong[0].transports)
        if (is_staged and is_alike) or ((is_staged or "path" in finding.expected) and name in finding.subjects):
            cause = finding.cause if is_staged else f"{finding.id}: {finding.seen}"
            return replace(found, cause=cause, cure=Cure(finding.cure.commands) or finding.cure)
    return found


def check_possible(required: Sequence[RequiredPath], wiring: Wiring, *, sees_all_nodes: bool = True) -> None:
    """Raise UsageError if this hardware lacks a required path, or the run has no pair for it.

    A watched node may belong to a job of several nodes, so then `sees_all_nodes` is false. Unknown facts refuse
    nothing.
    """
    for kind in required:
        nodes = {gpu.node: gpu.host for gpu in wiring.gpus}
        if kind in _INSIDE:
            missing = _why_not_inside(kind, wiring)
        elif sees_all_nodes and len(nodes) < 2:
            missing = (
                f"it applies between nodes, but there is only one node: {', '.join(nodes.values()) or 'without GPUs'}"
            )
        else:
            missing = _why_not_between(kind, wiring)
        if missing:
            raise UsageError(
                f"{REQUIRE_PATH} {kind}: {missing}",
                expected="a path that this hardware has between the measured GPUs",
                next_step="gpubench topo shows the links and NICs",
            )


def _why_not_inside(kind: RequiredPath, wiring: Wiring) -> str:
    nodes = group_by(range(len(wiring.gpus)), lambda gpu: wiring.gpus[gpu].node)
    pairs = [pair for own in nodes.values() for pair in combinations(own, 2) if not wiring.share_gpu(pair)]
    if not pairs:
        hosts = list(dict.fromkeys(gpu.host for gpu in wiring.gpus))
        return (
            f"it applies between GPUs of one node, but there is {f'only one on {shorten(hosts)}' if hosts else 'none'}"
        )
    if kind is RequiredPath.P2P:
        refused = [wiring.why_refused(pair) for pair in pairs]
        return f"no peer access between GPUs: {refused[0]}" if all(refused) else ""
    gpus = [wiring.gpu(gpu) for gpu in range(len(wiring.gpus))]
    paths = {*map(wiring.path, pairs)}
    may_be_linked = any(
        gpu is None or gpu.nvlinks is None or any(link.version != XGMI_LINK for link in gpu.nvlinks) for gpu in gpus
    )
    linked = may_be_linked or any(path.startswith("NV") for path in paths)
    return "" if linked else f"there are no NVLinks, and the paths are {shorten(sorted(paths))}"


def _why_not_between(kind: RequiredPath, wiring: Wiring) -> str:
    if kind is RequiredPath.MNNVL:
        gpus = [wiring.gpu(gpu) for gpu in range(len(wiring.gpus))]
        spans = any(gpu is None or "fabric" in gpu.unknown or (gpu.fabric and gpu.fabric.spans_nodes) for gpu in gpus)
        return "" if spans else "no GPU belongs to an NVLink domain of several nodes"
    for node in wiring.nodes.values():
        if kind not in {_NETWORK_OF[nic.kind] for nic in node.nics if nic.rdma}:
            nics = shorten([f"{nic.name} ({nic.kind})" for nic in node.nics]) or "no NIC"
            return f"{node.snapshot.host} has {nics}"
    return ""
