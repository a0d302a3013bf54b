"""Print the topology: devices in columns, their links, matrices if pairs differ, and the PCI tree."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from gpubench.formats.layout import INDENT, Column, fitting_table, grid_of_words, or_dash
from gpubench.formats.table import ReportView, line_text, setting_lines
from gpubench.model.facts.environment import MPS
from gpubench.model.facts.snapshot import NicKind, PcieLink, is_amd
from gpubench.model.paths.topology import PATH_CLASSES, ROCM, XGMI, PeerAccess, describe_pcie
from gpubench.model.results.report import CauseRow, Report
from gpubench.model.results.topo import GpuRow, KindRow, NicRow, NodeRow, RankRow, TreeRow
from gpubench.model.terms.units import compress_names, format_memory, group_by, plural

if TYPE_CHECKING:
    from rich.tree import Tree

_UNKNOWN = "?"
_NONE = "-"
_COMMON = 3
"""Added to the `spare` of a column whose cells are equal. If the column is dropped, a sentence has the value."""


def _gpu_columns(gpus: Sequence[GpuRow], nearest_nics: Mapping[str, str], *, verbose: bool) -> list[Column]:
    """Return the columns of the GPU table. UUIDs need `verbose`, and values unknown for every GPU have no column."""
    return [
        Column("GPU", "gpu"),
        Column("bus id", lambda row: row.bus_id or _UNKNOWN, optional=True),
        _fact_column("name", gpus, 1),
        _fact_column("memory", gpus, 2),
        Column("PCIe", _pcie, optional=True),
        Column("NUMA", lambda row: _or_unknown(row.numa_node), optional=True),
        Column(_link_head(gpus), _nvlinks, optional=all(row.nvlinks is None for row in gpus)),
        Column("nearest NIC", lambda row: nearest_nics.get(row.gpu, _UNKNOWN), optional=True),
        Column("UUID", lambda row: (verbose and row.uuid) or _UNKNOWN, 9, optional=True),
    ]


def _link_head(gpus: Sequence[GpuRow]) -> str:
    return "xGMI links" if any(is_amd(row.name) for row in gpus) else "NVLinks"


def _fact_column(head: str, gpus: Sequence[GpuRow], spare: int) -> Column:
    """Return a column that is dropped early if all its cells are equal, because a sentence can replace it."""
    alike = len({_FACTS[head](row) for row in gpus if not row.lost}) == 1
    return Column(head, _FACTS[head], _COMMON + spare if alike else spare, optional=True)


def _gpu_sentences(gpus: Sequence[GpuRow], shown: Sequence[Column], *, verbose: bool) -> Iterator[str]:
    heads = {column.head for column in shown}
    common: dict[str, str] = {}
    peculiar: dict[str, list[str]] = {}
    hidden = _ONLY_NVIDIA if _link_head(gpus) != "NVLinks" else ()
    for head, describe in _FACTS.items():
        words = {row.gpu: describe(row) for row in gpus if not row.lost}
        known = Counter(word for word in words.values() if word != _UNKNOWN)
        if head in heads or head in hidden or not words:
            continue
        common[head] = known.most_common(1)[0][0] if known else _UNKNOWN
        for gpu, word in words.items():
            if word not in (common[head], _UNKNOWN, ""):
                peculiar.setdefault(gpu, []).append(_phrase(head, word))
    facts = [_phrase(head, value) for head, value in common.items() if value not in ("", _UNKNOWN)]
    if facts:
        yield f"{'usual' if peculiar else 'all' if len(gpus) > 1 else gpus[0].gpu}: {'; '.join(facts)}"
    for phrases, names in group_by(peculiar, lambda gpu: tuple(peculiar[gpu])).items():
        yield f"but {compress_names(names)}: {'; '.join(phrases)}"
    if verbose and "UUID" not in heads and any(row.uuid for row in gpus):
        yield "; ".join(f"{row.gpu} {row.uuid}" for row in gpus if row.uuid)
    yield from _unknown_sentences(gpus, [head for head, value in common.items() if value == _UNKNOWN])


def _unknown_sentences(gpus: Sequence[GpuRow], silent: Sequence[str]) -> Iterator[str]:
    explained = {field for row in gpus for field in row.unknown}
    unexplained = [head for head in silent if not _FIELDS.get(head, set()) & explained]
    if unexplained:
        yield f"not known: {', '.join(unexplained)}"
    reasons: dict[str, dict[str, list[str]]] = {}
    for row in gpus:
        if row.lost:
            reasons.setdefault(row.lost, {}).setdefault("everything", []).append(row.gpu)
            continue
        for field, reason in row.unknown.items():
            if is_amd(row.name) and field in _FIELDS_ONLY_NVIDIA:
                continue
            reasons.setdefault(reason, {}).setdefault(field, []).append(row.gpu)
    for reason, fields in reasons.items():
        everywhere = [field for field, names in fields.items() if len(names) == len(gpus)]
        some = [f"{field} of {compress_names(names)}" for field, names in fields.items() if len(names) < len(gpus)]
        yield f"not known ({reason}): {', '.join(everywhere + some).replace('_', ' ')}"


def _sharing_sentences(gpus: Sequence[GpuRow]) -> Iterator[str]:
    """Yield how processes can share GPU memory, and what does not work on GPUs that lack a way to do it."""
    for field, (name, supported, effect) in _SHARING.items():
        answers = group_by(gpus, attrgetter(field))
        for answer, rows in answers.items():
            some = f" on {compress_names([row.gpu for row in rows])}" if len(answers) > 1 else ""
            yield f"{name}{some}: {({True: supported, False: f'no, {effect}', None: 'not known'})[answer]}"


def _phrase(head: str, value: str) -> str:
    return value if head == "name" else f"{head} {value}"


def _nic_table(nics: Sequence[NicRow], *, verbose: bool) -> tuple[list[Column], list[NicRow]]:
    """Return the columns and the rows of the NIC table. Unless `verbose`, equal NICs share a row."""
    kinds = {row.nic: [row] for row in nics}
    if not verbose:
        alike = group_by(nics, lambda row: tuple(fact(row) for fact in _NIC_FACTS.values())).values()
        kinds = {rows[0].nic: list(rows) for rows in alike}
    columns = [Column("NIC", lambda row: compress_names([nic.nic for nic in kinds[row.nic]]))]
    for head, fact in _NIC_FACTS.items():
        columns.append(Column(head, fact, _NIC_SPARE.get(head, 0), right=head == "Gb/s", optional=head == "model"))
    if all(len(rows) == 1 for rows in kinds.values()):
        columns.insert(1, Column("bus id", lambda row: row.bus_id or _NONE, 1))
        numa = Column("NUMA", lambda row: _or_unknown(row.numa_node))
        columns[-2:-2] = [numa, Column("nearest GPUs", _nearest)]
    return columns, [rows[0] for rows in kinds.values()]


def _nearest_nics(kind: KindRow, rdma: Sequence[str]) -> dict[str, str]:
    """Return the RDMA NICs nearest to each GPU with their path class, for example 'mlx5_0 (PIX)'."""
    found = {}
    for gpu, row in kind.matrix.items():
        paths = {nic: row[nic] for nic in rdma if nic in row}
        nearest = next((path_class for path_class in PATH_CLASSES if path_class in paths.values()), None)
        if nearest is not None:
            found[gpu] = f"{compress_names([nic for nic in paths if paths[nic] == nearest])} ({nearest})"
    return found


def _pcie(row: GpuRow | NicRow) -> str:
    link = PcieLink(
        generation=row.pcie_generation,
        width=row.pcie_width,
        max_generation=row.pcie_max_generation,
        max_width=row.pcie_max_width,
    )
    return describe_pcie(link, idle=row.idle if isinstance(row, GpuRow) else None) or _UNKNOWN


def _nvlinks(row: GpuRow) -> str:
    if row.nvlinks is None or row.nvlinks_active is None:
        return _UNKNOWN
    if not row.nvlinks:
        return _NONE
    rate = f" × {row.nvlink_gb_s_per_link:g}" if row.nvlink_gb_s_per_link else ""
    return f"{row.nvlinks_active} of {row.nvlinks}{rate}"


def _nearest(row: NicRow) -> str:
    if not row.nearest_gpus:
        return _NONE
    shown = ",".join(name.removeprefix("GPU") for name in row.nearest_gpus[:4])
    return f"{shown}{'...' if len(row.nearest_gpus) > 4 else ''} ({row.nearest_path})"


_NIC_FACTS: dict[str, Callable[[NicRow], str]] = {
    "link": lambda row: row.link_layer,
    "state": lambda row: row.state or _UNKNOWN,
    "Gb/s": lambda row: _UNKNOWN if row.rate_gbit_s is None else f"{row.rate_gbit_s:g}",
    "PCIe": _pcie,
    "GPUDirect RDMA": lambda row: {True: "possible", False: "no", None: _UNKNOWN}[row.gpudirect_rdma],
    "model": lambda row: row.model or _NONE,
}
"""Columns of the NIC table. NICs with equal values share a row."""

_NIC_SPARE = {"PCIe": 2, "model": 3}


def _switch(value: bool | None) -> str:  # noqa: FBT001
    return {True: "on", False: "off", None: _UNKNOWN}[value]


def _fabric(row: GpuRow) -> str:
    if row.fabric_state is None:
        return _UNKNOWN
    clique = "" if row.fabric_clique is None or row.fabric_state != "completed" else f", clique {row.fabric_clique}"
    health = f", health {row.fabric_health}" if row.fabric_health and row.fabric_health != "not reported" else ""
    return row.fabric_state.replace("_", " ") + clique + health


def _rows(row: GpuRow) -> str:
    if row.remapped_rows_correctable is None:
        return _UNKNOWN
    count = row.remapped_rows_correctable + (row.remapped_rows_uncorrectable or 0)
    state = "failed" if row.remapped_rows_failure else "pending" if row.remapped_rows_pending else ""
    return " ".join(filter(None, (str(count) if count or not state else "", state)))


def _users(row: GpuRow) -> str:
    if row.users is None:
        return _UNKNOWN
    return f"{plural(len(row.users), 'process').replace('processs', 'processes')}" if row.users else "nobody"


def _or_unknown(value: object) -> str:
    return _UNKNOWN if value is None else str(value)


_FACTS: dict[str, Callable[[GpuRow], str]] = {
    "name": lambda row: row.name or _UNKNOWN,
    "memory": lambda row: _UNKNOWN if row.memory_bytes is None else format_memory(row.memory_bytes),
    "PCIe": _pcie,
    "NVLinks": _nvlinks,
    "compute capability": lambda row: _or_unknown(row.compute_capability),
    "SMs": lambda row: _or_unknown(row.multiprocessors),
    "ECC": lambda row: _switch(row.ecc),
    "MIG": lambda row: _switch(row.mig),
    "persistence": lambda row: _switch(row.persistence),
    "CPUs": lambda row: row.cpu_affinity or _UNKNOWN,
    "NVLink version": lambda row: "" if row.nvlinks == 0 else row.nvlink_version or _UNKNOWN,
    "to": lambda row: ", ".join(name for name in row.nvlink_peers if name != "unknown") or "",
    "NVLink errors": lambda row: "" if row.nvlinks == 0 else _or_unknown(row.nvlink_errors),
    "fabric": _fabric,
    "throttled": lambda row: (
        _UNKNOWN if row.throttle_reasons is None else ", ".join(row.throttle_reasons).replace("_", " ") or "none"
    ),
    "remapped rows": _rows,
    "used by": _users,
}
"""Values that a sentence states if the GPU table has no column for them."""

_FIELDS = {
    "PCIe": {"pcie"},
    "SMs": {"multiprocessors"},
    "NVLinks": {"nvlinks"},
    "memory": {"memory_bytes"},
    "fabric": {"fabric"},
    "throttled": {"throttle_reasons"},
    "remapped rows": {"remapped_rows"},
    "used by": {"processes"},
    "CPUs": {"cpu_affinity"},
    "ECC": {"ecc"},
    "MIG": {"mig"},
    "persistence": {"persistence"},
}
"""The fields behind each head in `_FACTS`. If the reason for an unknown field is recorded, a sentence gives it."""

_ONLY_NVIDIA = (
    *("NVLinks", "compute capability", "SMs", "MIG", "persistence", "NVLink version", "NVLink errors", "fabric"),
    *("throttled", "remapped rows", "used by"),
)
"""Heads of `_FACTS` that AMD GPUs do not have, or that no AMD program that gpubench reads prints."""

_FIELDS_ONLY_NVIDIA = {"bar1_bytes", "mig", "nvlinks"}


_SHARING = {
    "cuda_ipc": ("CUDA IPC", "yes", "so UCX and NIXL cannot use cuda_ipc for cudaMalloc memory"),
    "virtual_memory": (
        "VMM",
        "yes",
        "so NCCL runs without symmetric memory and NVLS, torch without symmetric memory and expandable segments",
    ),
    # The attribute is true on every H100 and H200, also without the IMEX channel that fabric handles need.
    "fabric_handles": (
        "fabric handles",
        "yes, IMEX untested",
        "so NCCL (MNNVL) and UCX cannot use NVLink between nodes",
    ),
    "multicast": ("multicast", "yes", "so NCCL runs without NVLS, torch symmetric memory without multimem"),
}
"""Columns of GpuRow with their name, what is printed if the driver supports them, and the effect if it does not. NCCL
checks them in cudawrap.cc, nvls.cc and mnnvl.cc, UCX in cuda_ipc_md.c, and PyTorch in CUDASymmetricMemory.cu.
"""


def draw(host: str, rows: Sequence[TreeRow]) -> "Tree":
    """Return the PCI tree of a host. Each device shows the rate of its link to its parent."""
    from rich.tree import Tree

    tree = Tree(line_text(host), guide_style="dim")
    branches = [tree]
    for row in rows:
        rate = None if row.gb_s is None else f"{row.gb_s:.4g} GB/s"
        link = ", ".join(filter(None, (row.link and f"PCIe {row.link}", rate)))
        text = "  ".join(filter(None, (row.element, row.what, f"[{link}]" if link else "")))
        del branches[row.depth + 1 :]
        line = line_text(text)
        line.overflow, line.no_wrap = "fold", False
        branches.append(branches[-1].add(line))
    return tree


_MOST_ODD = 20


class TopoView(ReportView):
    """Prints each kind of machine with its devices and matrices, or only the causes of slow paths."""

    def end(self, report: Report) -> None:
        """Print all sections, or only the verdict if the run was cut short."""
        if not report.sections:
            self._page.outcome(report)
            return
        nodes = {row.node: row for row in report.rows(NodeRow)}
        kinds = report.rows(KindRow)
        gpus = group_by(report.rows(GpuRow), lambda row: row.node)
        nics = group_by(report.rows(NicRow), lambda row: row.node)
        tree = group_by(report.rows(TreeRow), lambda row: row.node)
        total = sum(node.gpus for node in nodes.values())
        self._header(f"{plural(len(nodes), 'node')}  {plural(total, 'GPU')}")
        if self._metadata.options.get("causes"):
            self._page.print("")
            if not report.rows(CauseRow):
                self._page.wrap("no cause of a fallback or of slow paths was found")
            self._page.prospects(report)
            return
        for kind in kinds:
            self._kind(kind, nodes, several=len(nodes) > 1)
            own = nics.get(kind.node, [])
            rdma = [row.nic for row in own if row.link_layer != NicKind.ETHERNET]
            names = {row.nic for row in own}
            here = [name for name in kind.matrix if name not in names]
            self._paths_between_gpus(kind, here)
            self._devices(gpus.get(kind.node, []), own, _nearest_nics(kind, rdma))
            if self._page.verbose and here and rdma:
                self._page.print("")
                self._page.grid(grid_of_words("path", kind.matrix, here, rdma))
            parts = Counter(row.what for row in tree.get(kind.node, []))
            if self._page.verbose and (parts["PCIe switch"] or parts["host bridge"] > 1):
                self._page.print("")
                self._page.tree(draw(kind.node, tree[kind.node]))
        self._ranks(report.rows(RankRow))
        self._page.print("")
        self._page.outcome(report)

    def _header(self, counts: str) -> None:
        metadata = self._metadata
        self._page.heading(metadata, "topo", counts)
        profile = metadata.profile
        note = f": {profile['note']}" if profile and "note" in profile else ""
        names = [f"from {metadata.source}"] if metadata.source else []
        names += [f"profile {profile['name']}{note}"] if profile else []
        one_line = INDENT + "; ".join(names)
        for line in [one_line] if names and len(one_line) <= self._page.width else map(INDENT.__add__, names):
            self._page.wrap(line)
        if MPS in metadata.libraries:
            self._page.wrap(f"{INDENT}{MPS} {metadata.libraries[MPS]}")
        for line in setting_lines(metadata.environment, verbose=self._page.verbose):
            self._page.wrap(line)
        self._page.defaults(metadata)

    def _kind(self, kind: KindRow, nodes: Mapping[str, NodeRow], *, several: bool) -> None:
        node = nodes[kind.node]
        self._page.print("")
        if several:
            members = f"{plural(len(kind.nodes), 'node')} alike: {compress_names(kind.nodes)}"
            self._page.wrap(f"kind {kind.node_kind}  {members}", 8)
            if kind.differs_from:
                found = "; ".join(kind.differences)
                self._page.wrap(f"{INDENT}differs from kind {kind.differs_from}: {found}", 8)
            self._odd(kind, nodes)
            self._page.wrap(f"{INDENT}each: {'; '.join(_machine(node))}", 8)
        else:
            self._page.wrap(f"{INDENT}{kind.node}: {'; '.join(_machine(node))}", 6)
        if node.driver_absent:
            self._page.wrap(f"{INDENT}no driver: {node.driver_absent}. PCI devices are read from sysfs", 6)

    def _odd(self, kind: KindRow, nodes: Mapping[str, NodeRow]) -> None:
        same = group_by(kind.odd, lambda name: tuple(nodes[name].differences))
        for found, names in list(same.items())[:_MOST_ODD]:
            self._page.wrap(f"{INDENT}and {compress_names(names)}: {'; '.join(found)}", 8)
        if len(same) > _MOST_ODD:
            self._page.wrap(f"{INDENT}and {len(same) - _MOST_ODD} more differences in the section nodes")

    def _devices(self, gpus: Sequence[GpuRow], nics: Sequence[NicRow], nearest: Mapping[str, str]) -> None:
        verbose, width = self._page.verbose, self._page.width
        if gpus:
            columns = _gpu_columns(gpus, nearest, verbose=verbose)
            self._page.print("")
            self._page.table(columns, gpus)
            for sentence in _gpu_sentences(gpus, fitting_table(columns, gpus, width), verbose=verbose):
                self._page.wrap(f"{INDENT}{sentence}")
            if verbose:
                for sentence in _sharing_sentences([row for row in gpus if not row.lost]):
                    self._page.wrap(f"{INDENT}{sentence}")
        if nics:
            self._page.print("")
            self._page.table(*_nic_table(nics, verbose=verbose))

    def _paths_between_gpus(self, kind: KindRow, gpus: Sequence[str]) -> None:
        if len(gpus) > 1:
            self._page.print("")
            self._page.grid(grid_of_words("path", kind.matrix, gpus, gpus))
            self._peer_access(kind, gpus)
            self._limits(kind, gpus)
        self._network(kind, gpus)

    def _peer_access(self, kind: KindRow, gpus: Sequence[str]) -> None:
        words = {
            source: {destination: _access(cell).label for destination, cell in row.items()}
            for source, row in kind.peer_access.items()
        }
        seen = {status for row in words.values() for status in row.values()}
        cell = next(cell for row in kind.peer_access.values() for cell in row.values())
        if len(seen) > 1:
            self._page.print("")
            self._page.grid(grid_of_words("peer access", words, gpus, gpus))
            return
        if seen == {"?"}:
            self._page.wrap(f"peer access  not known: {cell['reason']}", 13)
            return
        pairs = plural(len(gpus) * (len(gpus) - 1), "ordered pair")
        self._page.wrap(f"peer access  all {pairs}: {seen.pop()}, {_whose(_access(cell))}", 13)

    def _limits(self, kind: KindRow, gpus: Sequence[str]) -> None:
        """Print the limits in GB/s per direction: one sentence if they are equal for all pairs, otherwise a matrix."""
        if all(value is None for gpu in gpus for value in kind.limits[gpu].values()):
            self._page.wrap("limit        not known, for the reasons in the section pairs", 13)
            return
        between = {kind.limits[source][other] for source in gpus for other in gpus if source != other}
        totals = [(kind.limits[gpu]["nvlink"], kind.limits[gpu]["pcie"]) for gpu in gpus]
        if len(between) == 1 and len(set(totals)) == 1:
            nvlink, pcie = totals[0]
            link = "xGMI" if XGMI in kind.matrix[gpus[0]].values() else "NVLink"
            ways = ((link, nvlink), ("PCIe", pcie))
            everybody = ", ".join(f"{_rounded(value)} over {name}" for name, value in ways if value is not None)
            single = between.pop()
            what = "not known" if single is None else f"{_rounded(single)} GB/s per direction"
            said = f"limit        {what} between two GPUs"
            self._page.wrap(said + (f"; per GPU in total {everybody}" if everybody else ""), 13)
            return
        cells = {
            source: {name: or_dash(value, ".4g") for name, value in row.items()} for source, row in kind.limits.items()
        }
        self._page.print("")
        self._page.grid(grid_of_words("GB/s limit", cells, gpus, [*gpus, "nvlink", "pcie"]))
        self._page.wrap(f"{INDENT}per direction. nvlink and pcie: total per GPU")

    def _network(self, kind: KindRow, gpus: Sequence[str]) -> None:
        """Print the limit towards other nodes in GB/s, per GPU and per node, if the rate of a nearby NIC is known."""
        rates = sorted({value for gpu in gpus if (value := kind.limits[gpu]["network"]) is not None})
        if not rates or kind.network_gb_s is None:
            return
        gpu_rates = " to ".join(_rounded(value) for value in dict.fromkeys((rates[0], rates[-1])))
        node = f"{_rounded(kind.network_gb_s)} GB/s per node"
        if len(gpus) == 1:
            self._page.print("")
        self._page.wrap(f"network      {gpu_rates} GB/s per direction from each GPU over its nearest NICs, {node}", 13)

    def _ranks(self, ranks: Sequence[RankRow]) -> None:
        if len(ranks) > 1:
            shm = {(rank.node, rank.shm_device) for rank in ranks}
            shared = (
                "one /dev/shm per node"
                if len(shm) == len({rank.node for rank in ranks})
                else "several /dev/shm per node"
            )
            self._page.print("")
            self._page.wrap(f"{plural(len(ranks), 'rank')}: {shared}. The section ranks has their facts")


def _machine(node: NodeRow) -> Iterator[str]:
    if node.driver:
        cuda = f" (runs CUDA {node.cuda})" if node.cuda else ""
        module = {True: ", open kernel module", False: ", closed kernel module", None: ""}[node.open_kernel_module]
        yield f"driver {node.driver}{cuda}{module}"
    cpus = [node.cpu, node.cpus and plural(node.cpus, "CPU"), node.sockets and plural(node.sockets, "socket")]
    if node.numa_nodes and node.numa_nodes != node.sockets:
        cpus.append(plural(node.numa_nodes, "NUMA node"))
    if any(cpus):
        yield ", ".join(str(part) for part in cpus if part)
    machine = [node.product, f"Linux {node.kernel}" if node.kernel else None]
    machine.append(node.place)
    machine.append(plural(node.nvswitches, "NVSwitch").replace("NVSwitchs", "NVSwitches") if node.nvswitches else None)
    if any(machine):
        yield ", ".join(str(part) for part in machine if part)


def _access(cell: Mapping[str, Any]) -> PeerAccess:
    return PeerAccess(cell["cuda"], cell["nvml"], cell["reason"])


def _whose(access: PeerAccess) -> str:
    if access.contradicts or ROCM in access.reason:
        return access.reason
    if access.cuda is not None and access.nvml is not None:
        return "CUDA and NVML agree" if access.possible else f"{access.reason}; CUDA and NVML agree"
    return f"as {'NVML' if access.cuda is None else 'CUDA'} says ({access.reason})"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.3g}"
