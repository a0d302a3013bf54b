"""Topology for people: kind by kind the devices, their links, matrices where pairs differ, the tree if there is one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpubench.formats.text.columns import fitted_lines, fitting
from gpubench.formats.text.header import INDENT, setting_lines
from gpubench.formats.text.machine.devices import gpu_columns, gpu_sentences, nic_columns
from gpubench.formats.text.machine.tree import draw, is_worth_drawing
from gpubench.formats.text.matrices import matrix_lines
from gpubench.formats.text.page import ReportView
from gpubench.model.facts.gpu_process import MPS
from gpubench.model.facts.snapshot import NicKind
from gpubench.model.paths.topology import PeerAccess
from gpubench.model.results.report import Report
from gpubench.model.results.rows.causes import CAUSES_SECTION, CauseRow
from gpubench.model.results.topo.rows import GpuRow, KindRow, NicRow, NodeRow, RankRow, TreeRow
from gpubench.model.terms.grouping import grouped
from gpubench.model.terms.units import compress_names, counted

_MOST_ODD = 20


class TopoView(ReportView):
    """Machines by kind: devices and matrices, or the causes of slow paths."""

    def end(self, report: Report) -> None:
        """The whole; of a run that was cut short there is nothing but the verdict."""
        if not report.sections:
            self._page.outcome(report)
            return
        nodes = {row.node: row for row in report.rows("nodes", NodeRow)}
        kinds = report.rows("kinds", KindRow)
        gpus = grouped(report.rows("gpus", GpuRow), lambda row: row.node)
        nics = grouped(report.rows("nics", NicRow), lambda row: row.node)
        tree = grouped(report.rows("tree", TreeRow), lambda row: row.node)
        total = sum(node.gpus for node in nodes.values())
        self._header(f"{counted(len(nodes), 'node')}  {counted(total, 'GPU')}")
        if self._metadata.options.get("causes"):
            self._causes(report)
            return
        for kind in kinds:
            self._kind(kind, nodes, several=len(nodes) > 1)
            self._devices(gpus.get(kind.node, []), nics.get(kind.node, []))
            self._matrices(kind, nics.get(kind.node, []))
            if is_worth_drawing(tree.get(kind.node, [])):
                self._page.print("")
                self._page.tree(draw(kind.node, tree[kind.node]))
        self._ranks(report.rows("ranks", RankRow))
        self._page.print("")
        self._page.outcome(report)

    def _causes(self, report: Report) -> None:
        """Causes that would make bytes go through host memory, or slowly; shown in place of the devices."""
        self._page.print("")
        if not report.rows(CAUSES_SECTION, CauseRow):
            self._page.wrap("no cause of a fallback or of slow paths was found")
        self._page.prospects(report)

    def _header(self, counts: str) -> None:
        metadata = self._metadata
        origin = "" if metadata.origin == "measured" else f"  ({metadata.origin.upper()})"
        self._page.wrap(f"gpubench {metadata.gpubench_version}  topo  {counts}{origin}")
        if metadata.source:
            self._page.wrap(f"{INDENT}from {metadata.source}")
        if metadata.profile:
            note = f": {metadata.profile['note']}" if "note" in metadata.profile else ""
            self._page.wrap(f"{INDENT}profile {metadata.profile['name']}{note}")
        if MPS in metadata.libraries:
            self._page.wrap(f"{INDENT}{MPS} {metadata.libraries[MPS]}")
        for line in setting_lines(metadata.environment, verbose=self._page.verbose):
            self._page.wrap(line)
        self._page.defaults(metadata)

    def _kind(self, kind: KindRow, nodes: Mapping[str, NodeRow], *, several: bool) -> None:
        node = nodes[kind.node]
        self._page.print("")
        if several:
            members = f"{counted(len(kind.nodes), 'node')} alike: {compress_names(kind.nodes)}"
            self._page.wrap(f"kind {kind.node_kind}  {members}", 8)
            if kind.differs_from:
                found = "; ".join(kind.differences)
                self._page.wrap(f"{INDENT}differs from kind {kind.differs_from}: {found}", 8)
            self._odd(kind, nodes)
            self._page.wrap(f"{INDENT}each: {'; '.join(_machine(node))}", 8)
        else:
            self._page.wrap(f"{INDENT}{kind.node}: {'; '.join(_machine(node))}", 6)
        if node.driver_absent:
            self._page.wrap(f"{INDENT}no driver: {node.driver_absent}; PCI devices are read from sysfs", 6)

    def _odd(self, kind: KindRow, nodes: Mapping[str, NodeRow]) -> None:
        """Nodes that differ, those that differ alike in one line."""
        same = grouped(kind.odd, lambda name: tuple(nodes[name].differences))
        for found, names in list(same.items())[:_MOST_ODD]:
            self._page.wrap(f"{INDENT}and {compress_names(names)}: {'; '.join(found)}", 8)
        if len(same) > _MOST_ODD:
            self._page.wrap(f"{INDENT}and {len(same) - _MOST_ODD} more differences, in the section nodes")

    def _devices(self, gpus: Sequence[GpuRow], nics: Sequence[NicRow]) -> None:
        for columns in (gpu_columns(gpus), nic_columns(nics)):
            if columns:
                self._page.print("")
                self._page.table(fitted_lines(columns, self._page.width))
                if columns[0].head == "GPU":
                    for sentence in gpu_sentences(gpus, fitting(columns, self._page.width)):
                        self._page.wrap(f"{INDENT}{sentence}")

    def _matrices(self, kind: KindRow, nics: Sequence[NicRow]) -> None:
        """Paths between GPUs, and to the NICs that can reach them without the CPU; plain Ethernet is in JSON."""
        names = [row.nic for row in nics]
        rdma = [row.nic for row in nics if row.link_layer != NicKind.ETHERNET]
        gpus = [name for name in kind.matrix if name not in names]
        width = self._page.width
        if len(gpus) > 1:
            self._page.print("")
            self._page.table(matrix_lines("path", kind.matrix, gpus, gpus, width))
            self._peer_access(kind, gpus)
            self._limits(kind, gpus)
        if gpus and rdma:
            self._page.print("")
            self._page.table(matrix_lines("path", kind.matrix, gpus, rdma, width))

    def _peer_access(self, kind: KindRow, gpus: Sequence[str]) -> None:
        words = {
            source: {destination: _access(cell).word for destination, cell in row.items()}
            for source, row in kind.peer_access.items()
        }
        seen = {word for row in words.values() for word in row.values()}
        cell = next(cell for row in kind.peer_access.values() for cell in row.values())
        if len(seen) > 1:
            self._page.print("")
            self._page.table(matrix_lines("peer access", words, gpus, gpus, self._page.width))
            return
        if seen == {"?"}:
            self._page.wrap(f"peer access  not known: {cell['reason']}", 13)
            return
        pairs = counted(len(gpus) * (len(gpus) - 1), "ordered pair")
        self._page.wrap(f"peer access  all {pairs}: {seen.pop()}, {_whose(_access(cell))}", 13)

    def _limits(self, kind: KindRow, gpus: Sequence[str]) -> None:
        """GB/s per direction; one sentence where all pairs have the same."""
        if all(value is None for gpu in gpus for value in kind.limits[gpu].values()):
            self._page.wrap("limit        not known; the section pairs says why", 13)
            return
        between = {kind.limits[source][other] for source in gpus for other in gpus if source != other}
        totals = [(kind.limits[gpu]["nvlink"], kind.limits[gpu]["pcie"]) for gpu in gpus]
        if len(between) == 1 and len(set(totals)) == 1:
            nvlink, pcie = totals[0]
            everybody = ", ".join(
                f"{_gb_s(value)} by {name}" for name, value in (("NVLink", nvlink), ("PCIe", pcie)) if value is not None
            )
            single = between.pop()
            what = "not known" if single is None else f"{_gb_s(single)} GB/s per direction"
            said = f"limit        {what} between any two"
            self._page.wrap(said + (f"; of a GPU towards everybody {everybody}" if everybody else ""), 13)
            return
        cells = {source: {name: _gb_s(value) for name, value in row.items()} for source, row in kind.limits.items()}
        self._page.print("")
        self._page.table(matrix_lines("GB/s limit", cells, gpus, [*gpus, "nvlink", "pcie"], self._page.width))
        self._page.wrap(f"{INDENT}per direction; nvlink and pcie: of a GPU towards everybody")

    def _ranks(self, ranks: Sequence[RankRow]) -> None:
        if len(ranks) > 1:
            shm = {(rank.node, rank.shm_device) for rank in ranks}
            shared = (
                "one /dev/shm a node" if len(shm) == len({rank.node for rank in ranks}) else "several /dev/shm a node"
            )
            self._page.print("")
            self._page.wrap(f"{counted(len(ranks), 'rank')}: {shared}; the section ranks has their facts")


def _machine(node: NodeRow) -> Iterator[str]:
    if node.driver:
        cuda = f" (runs CUDA {node.cuda})" if node.cuda else ""
        module = {True: ", open kernel module", False: ", closed kernel module", None: ""}[node.open_kernel_module]
        yield f"driver {node.driver}{cuda}{module}"
    cpus = [node.cpu, node.cpus and counted(node.cpus, "CPU"), node.sockets and counted(node.sockets, "socket")]
    if node.numa_nodes:
        cpus.append(counted(node.numa_nodes, "NUMA node"))
    if any(cpus):
        yield ", ".join(str(each) for each in cpus if each)
    machine = [node.product, f"Linux {node.kernel}" if node.kernel else None]
    machine.append("virtual machine" if node.virtual_machine else None)
    machine.append(counted(node.nvswitches, "NVSwitch").replace("NVSwitchs", "NVSwitches") if node.nvswitches else None)
    if any(machine):
        yield ", ".join(str(each) for each in machine if each)


def _access(cell: Mapping[str, Any]) -> PeerAccess:
    return PeerAccess(cell["cuda"], cell["nvml"], cell["reason"])


def _whose(access: PeerAccess) -> str:
    if access.contradicts:
        return access.reason
    if access.cuda is not None and access.nvml is not None:
        return "CUDA and NVML agree" if access.possible else f"{access.reason}; CUDA and NVML agree"
    return f"as {'NVML' if access.cuda is None else 'CUDA'} says ({access.reason})"


def _gb_s(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
