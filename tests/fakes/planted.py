"""Machines with one fault: every condition, planted into a healthy machine."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from itertools import permutations
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpubench import profiles
from gpubench.conditions.checks import CHECKS, run
from gpubench.conditions.circumstances import Circumstances, Facts, IssueTime, Together, user_settings
from gpubench.conditions.ranking import Diagnosis, diagnose
from gpubench.conditions.registry import CAUSES
from gpubench.measure.topo import examine
from gpubench.model.facts.health import REPLAYS
from gpubench.model.facts.process import CpuQuota, GpuCondition, GpuProcess, MpiFacts, RankFacts, TopologyFile
from gpubench.model.facts.snapshot import (
    AccessControl,
    ConfidentialComputing,
    Fabric,
    Gid,
    GpuDirectFacts,
    GpuFacts,
    GpuLimits,
    IommuFacts,
    NicFacts,
    NicKind,
    NvLink,
    NvlinkPeer,
    PairFacts,
    PciDevice,
    PcieErrors,
    PcieLink,
    PciKind,
    PciPlace,
    ProbeFailure,
    Service,
    Snapshot,
)
from gpubench.model.facts.traffic import GpuUse, IdleGpu, LinkRates
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import Pair, parse_transport
from gpubench.model.paths.ucx import Allocation, Transfer, UcxRoute
from gpubench.model.paths.wiring import Wiring
from gpubench.model.profiles.copies import CopyJudge
from gpubench.model.profiles.fault import parse_fault
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.figures import QUICK, Measurements, Need, host_copy_row
from gpubench.model.results.report import CollectiveRow, Report
from gpubench.model.terms.ranks import RankIdentity
from gpubench.model.terms.verdict import Finding
from gpubench.simulated.machine import parse_machine, snapshots
from tests.fakes.measured_rows import pair, row, slow_row

GIB = 2**30
RANKS_A_NODE = 2


class Job(Struct, frozen=True):
    """Nodes with ranks on their first GPUs, and host-staged paths. None: nothing was sent."""

    nodes: tuple[Snapshot, ...]
    ranks: tuple[RankFacts, ...]
    staged: Mapping[Pair, str] | None = None
    copied: Mapping[Pair, str] | None = None
    wrong: frozenset[Pair] = frozenset()
    together: tuple[Together, ...] = ()
    profile: Profile | None = None
    asked: bool = False
    measurements: Measurements = QUICK
    waited: Mapping[int, float] = field(default_factory=dict)
    at_work: Mapping[int, GpuCondition] = field(default_factory=dict)
    idle_gpus: Mapping[int, IdleGpu] = field(default_factory=dict)
    issued: tuple[IssueTime, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of checks. Every node matches the profile."""
        nodes = [Topology(node) for node in self.nodes]
        profiles = [self.profile] * len(nodes)
        return run(CHECKS, Facts(nodes, group_nodes(nodes), self.ranks, profiles, self.measurements, self.asked))

    def circumstances(self) -> Circumstances:
        """Return the circumstances in which causes are searched."""
        identities = [
            RankIdentity(
                rank=facts.rank,
                host=self.nodes[facts.node].host,
                node=facts.node,
                local_rank=facts.local_rank,
                pid=facts.pid,
                gpu_bus_id=self.nodes[facts.node].gpus[facts.local_rank].bus_id,
            )
            for facts in self.ranks
        ]
        staged = self.staged
        return Circumstances(
            wiring=Wiring(identities, {number: Topology(node) for number, node in enumerate(self.nodes)}),
            facts=self.ranks,
            settings=user_settings(self.ranks),
            staged=None if staged is None else {pair: (parse_transport(via),) for pair, via in staged.items()},
            copied=self.copied,
            wrong=self.wrong,
            together=self.together,
            waited=self.waited,
            at_work=self.at_work,
            idle_gpus=self.idle_gpus,
            slow=self.measurements.collectives,
            issued=self.issued,
            transfers=self.transfers,
        )

    def diagnosis(self) -> Diagnosis:
        return diagnose(CAUSES, self.circumstances())


def rank_on(rank: int, node: int, local: int, files: Sequence[str]) -> RankFacts:
    """Return a healthy process."""
    return RankFacts(
        rank=rank,
        host=f"node{node}",
        node=node,
        local_rank=local,
        pid=100 + rank,
        boot_id=f"boot-{node}",
        namespaces={"pid": 4026531836, "ipc": 4026531839},
        shm_device=27,
        shm_bytes=64 * GIB,
        shm_free_bytes=64 * GIB,
        device_files=tuple(files),
        memlock_bytes=-1,
        seccomp=0,
        ptrace_scope=1,
        capabilities=(),
        pidfd_getfd=True,
        libraries={"libnccl": "/usr/lib/libnccl.so.2"},
        loadable={"libibverbs.so.1": "/usr/lib/libibverbs.so.1", "libnccl-net.so": None},
        verbs_providers=("efa", "mlx5"),
    )


def job_of(*nodes: Snapshot) -> Job:
    """Return two healthy ranks on each node."""
    ranks: list[RankFacts] = []
    for number, node in enumerate(nodes):
        files = [f"/dev/nvidia{gpu.index}" for gpu in node.gpus]
        files += [port.device_file for port in node.rdma_ports if port.device_file]
        for local in range(min(RANKS_A_NODE, len(node.gpus))):
            ranks.append(rank_on(len(ranks), number, local, files))
    return Job(nodes, tuple(ranks))


@cache
def simulated(name: str, *faults: str) -> Job:
    """Return a job on a simulated machine. It is shared, so do not change it."""
    return job_of(*snapshots(parse_machine(name), [parse_fault(fault) for fault in faults]))


def below_a_switch(gpus: int = 2, *, virtual: bool = False, model: str = "NVIDIA L40S") -> Snapshot:
    """Return GPUs without NVLinks and a NIC below one PCIe switch, with peer access."""
    link = PcieLink(generation=4, width=16, max_generation=4, max_width=16)
    place = PciPlace(host_bridge="pci0000:00", root_port="0000:00:01.0", switches=("0000:01:00.0",), numa_node=0)
    devices = [
        PciDevice(bus_id="0000:00:01.0", kind=PciKind.ROOT_PORT, link=link, access_control=AccessControl()),
        PciDevice(
            bus_id="0000:01:00.0", kind=PciKind.UPSTREAM_PORT, above="0000:00:01.0", link=link,
            access_control=AccessControl(),
        ),
    ]  # fmt: skip
    cards = []
    for number in range(gpus + 1):
        kind, port, bus_id = PciKind.GPU, f"0000:02:{number:02x}.0", f"0000:{number + 3:02x}:00.0"
        if number == gpus:
            kind = PciKind.NIC
        devices.append(
            PciDevice(
                bus_id=port, kind=PciKind.DOWNSTREAM_PORT, above="0000:01:00.0", link=link,
                access_control=AccessControl(capable=("request_redirect",)),
            )
        )  # fmt: skip
        devices.append(
            PciDevice(bus_id=bus_id, kind=kind, above=port, link=link, iommu_group=number, errors=PcieErrors())
        )
        cards.append(bus_id)
    base = snapshots(parse_machine("rtx-4090-2"), [])[0]
    return replace(
        base,
        host="gpu0",
        machine=replace(base.machine, virtual_machine=virtual, cpu="Intel(R) Xeon(R)"),
        gpus=tuple(
            GpuFacts(
                index=number, bus_id=cards[number], name=model, memory_bytes=48 * GIB, bar1_bytes=64 * GIB, mig=False,
                pcie=link, place=place, nvlinks=(), idle=False,
            )
            for number in range(gpus)
        ),
        nics=(
            NicFacts(
                name="mlx5_0", kind=NicKind.INFINIBAND, state="active", rate_gbit_s=200.0, bus_id=cards[-1],
                model="ConnectX-6", driver="mlx5_core", pcie=link, place=place,
            ),
        ),
        gpudirect=GpuDirectFacts(peermem=True, peermem_registered=True, dma_buf=True),
        switches=(),
        pci_devices=tuple(devices),
        rdma_ports=(),
        kernel=replace(base.kernel, iommu=IommuFacts(units=("dmar0",), group_types=dict.fromkeys("0123", "identity"))),
        pairs=tuple(
            PairFacts(source=f"GPU{one}", destination=f"GPU{other}", cuda=True, read="OK", write="OK")
            for one in range(gpus)
            for other in range(gpus)
            if one != other
        ),
    )  # fmt: skip


def refused(node: Snapshot, status: str, *devices: str) -> Snapshot:
    """Return a node whose pairs, or those of these devices, have no peer access."""
    return replace(
        node,
        pairs=tuple(
            replace(pair, cuda=False, read=status, write=status)
            if not devices or {pair.source, pair.destination} & set(devices)
            else pair
            for pair in node.pairs
        ),
    )


def with_nodes(job: Job, edit: Callable[[Snapshot], Snapshot], *only: int) -> Job:
    """Edit all nodes of a job, or only some."""
    nodes = (edit(node) if not only or number in only else node for number, node in enumerate(job.nodes))
    return replace(job, nodes=tuple(nodes))


def with_ranks(job: Job, edit: Callable[[RankFacts], RankFacts], *only: int) -> Job:
    """Edit all ranks of a job, or only some."""
    ranks = (edit(each) if not only or each.rank in only else each for each in job.ranks)
    return replace(job, ranks=tuple(ranks))


def _gpu(node: Snapshot, number: int = 0, **facts: Any) -> Snapshot:
    gpus = tuple(replace(gpu, **facts) if gpu.index == number else gpu for gpu in node.gpus)
    return replace(node, gpus=gpus)


def _gpus(node: Snapshot, edit: Callable[[GpuFacts], GpuFacts]) -> Snapshot:
    return replace(node, gpus=tuple(map(edit, node.gpus)))


def _settings(node: Snapshot, **facts: Any) -> Snapshot:
    return replace(node, driver_settings=replace(node.driver_settings, **facts))


def _set(job: Job, **environment: str) -> Job:
    return with_ranks(job, lambda each: replace(each, environment={**each.environment, **environment}))


def _device(node: Snapshot, bus_id: str, **facts: Any) -> Snapshot:
    devices = tuple(replace(each, **facts) if each.bus_id == bus_id else each for each in node.pci_devices)
    return replace(node, pci_devices=devices)


def _fabric(node: Snapshot, **facts: Any) -> Snapshot:
    return _gpus(node, lambda gpu: replace(gpu, fabric=replace(gpu.fabric or Fabric(), **facts)))


def _elsewhere(node: Snapshot) -> Fabric:
    """Return the fabric of a GPU in another clique."""
    fabric = node.gpus[0].fabric
    assert fabric is not None
    return replace(fabric, clique=7)


def _with_second_port(node: Snapshot) -> Snapshot:
    """Add a second port without a cable to the first card."""
    second = replace(node.nics[0], name="mlx5_9", bus_id=str(node.nics[0].bus_id).replace(".0", ".1"), state="down")
    return replace(node, nics=(*node.nics, second))


def _without_nvlinks(node: Snapshot) -> Snapshot:
    return replace(_gpus(node, lambda gpu: replace(gpu, nvlinks=(), fabric=None)), nvswitches=())


def _mesh(node: Snapshot) -> Snapshot:
    link = NvLink(number=0, active=True, version="2.0", peer=NvlinkPeer.GPU, peer_bus_id="0000:ff:00.0")
    gpus = tuple(replace(gpu, nvlinks=(link,)) for gpu in node.gpus)
    return refused(replace(node, gpus=gpus), "TNS")


CLUSTER = "9d3f2a6e-8f0c-4c8e-9d2f-1a2b3c4d5e6f"
NO_CLUSTER = "00000000-0000-0000-0000-000000000000"
BOTH_WAYS: tuple[Pair, ...] = ((0, 1), (1, 0))
ACROSS: tuple[Pair, ...] = ((0, 2), (2, 0))


def _two() -> Job:
    return simulated("hgx-h100-8*2")


def _board() -> Job:
    return simulated("hgx-h200-4")


def _pcie(**facts: Any) -> Job:
    return job_of(below_a_switch(**facts))


def _clustered(**fabric: Any) -> Job:
    job = with_nodes(_two(), lambda node: _fabric(node, cluster_uuid=CLUSTER, clique=1, **fabric))
    job = with_nodes(job, lambda node: _settings(node, services={"nvidia-imex": Service(running=True)}))
    return with_ranks(job, lambda each: replace(each, imex_channels=("channel0",)))


def _racks(*sizes: int) -> list[Snapshot]:
    """Return the trays of racks of these sizes."""
    nodes = snapshots(parse_machine(f"gb200-nvl-4*{sum(sizes)}"))
    racks = [number for number, size in enumerate(sizes) for _ in range(size)]
    return [_fabric(node, cluster_uuid=f"{CLUSTER[:-1]}{rack}") for node, rack in zip(nodes, racks, strict=True)]


def _on_nics() -> Job:
    """Return two trays of a rack that reach only the bandwidth of their NICs."""
    row = replace(slow_row(2**30, 10000.0, 187.0), nodes=2, ranks=8, algbw_gb_s=107.0)
    return replace(job_of(*_racks(2)), measurements=Measurements(collectives=(row,)))


def _fabric_stopped(job: Job, service: Service) -> Job:
    job = with_nodes(job, lambda node: refused(_fabric(node, state="not_started", status=None), "NS"))
    return with_nodes(job, lambda node: _settings(node, services={"nv-fabricmanager": service}))


def _ranks_apart(**facts: Any) -> Job:
    return with_ranks(_board(), lambda each: replace(each, **facts), 1)


class Plant(Struct, frozen=True, dict=True):
    """A condition and how to plant it."""

    id: str
    make: Callable[[], Job]
    beside: tuple[str, ...] = field(default=())

    @cached_property
    def job(self) -> Job:
        return self.make()

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        return self.job.findings()

    @cached_property
    def diagnosis(self) -> Diagnosis:
        return self.job.diagnosis()

    @cached_property
    def report(self) -> Report:
        """Return the report of `gpubench topo`."""
        return examine([Topology(node) for node in self.job.nodes], self.job.ranks)


def _idle(**seen: IdleGpu) -> Job:
    """Return four H200s, two of them with ranks, with the use of GPUs while the job is idle."""
    gpus = {int(name.removeprefix("gpu")): gpu for name, gpu in seen.items()}
    return replace(simulated("hgx-h200-4"), idle_gpus=gpus)


def _copying() -> Job:
    """Let another process copy from the first GPU to the second."""
    user = GpuProcess(pid=8342, name="python")
    return _idle(
        gpu0=IdleGpu(rates=LinkRates(nvlink_sent=371.2, nvlink_received=0.0), use=GpuUse(users=(user,))),
        gpu1=IdleGpu(rates=LinkRates(nvlink_sent=0.0, nvlink_received=371.1)),
    )


def _transfer(route: UcxRoute = UcxRoute.EMULATED, transport: str = "tcp/lo", **facts: Any) -> Job:
    """Return two H200s with one transfer of GPU memory between two processes."""
    transfer = Transfer(name="GPU0 → GPU1", route=route, transport=transport, **{"same_node": True, **facts})
    return replace(simulated("hgx-h200-4"), transfers=(transfer,))


def _transfer_to_another_node(route: UcxRoute, transport: str, **facts: Any) -> Job:
    return _transfer(route, transport, same_node=False, **facts)


PLANTS: tuple[Plant, ...] = (
    Plant("kv-memory-expandable", lambda: _transfer(allocation=Allocation.EXPANDABLE)),
    Plant(
        "kv-memory-expandable",
        lambda: _transfer(remote="cuda", variables={"PYTORCH_ALLOC_CONF": "a:1,expandable_segments:True"}),
    ),
    Plant("kv-memory-pool", lambda: _transfer(allocation=Allocation.ASYNC)),
    Plant("kv-memory-pool", lambda: _transfer(local="cuda-managed/GPU0", remote="cuda-managed")),
    Plant("kv-memory-managed", lambda: _transfer(local="cuda-managed memory", remote="cuda-managed")),
    Plant("kv-pid-namespaces", lambda: _transfer(same_pid_namespace=False)),
    Plant("kv-pid-namespaces", lambda: _transfer(UcxRoute.RDMA, "rc_mlx5/mlx5_0:1", same_pid_namespace=False)),
    Plant("kv-get-without-nvlink", lambda: _transfer(get_disabled=True)),
    Plant("kv-no-peer-access", lambda: _transfer(peer_access=False, allocation=Allocation.EXPANDABLE)),
    Plant("kv-nic-inside-node", lambda: _transfer(UcxRoute.RDMA, "rc_mlx5/mlx5_0:1", peer_access=True)),
    Plant("kv-no-rdma-device", lambda: _transfer_to_another_node(UcxRoute.STAGED, "tcp/eth0")),
    Plant("kv-no-gpudirect", lambda: _transfer_to_another_node(UcxRoute.STAGED, "rc_mlx5/mlx5_0:1")),
    Plant("kv-staged-unexplained", _transfer),
    Plant("foreign-nvlink-traffic", _copying),
    Plant("foreign-pcie-traffic", lambda: _idle(gpu1=IdleGpu(rates=LinkRates(pcie_sent=0.01, pcie_received=59.0)))),
    Plant("gpu-in-use", lambda: _h100("gpu1:busy=4711")),
    Plant("memory-in-use", lambda: _h100(memory_used_bytes=4 * GIB)),
    Plant("host-bound", lambda: replace(simulated("hgx-h200-4"), issued=(IssueTime("1K out of place", 480.0, 490.0),))),
    Plant("mig-on", lambda: simulated("hgx-h200-4", "gpu0:mig=on")),
    Plant(
        "confidential-computing",
        lambda: with_nodes(
            _board(),
            lambda node: refused(
                _settings(node, confidential_computing=ConfidentialComputing(enabled=True, multi_gpu="none")), ""
            ),
        ),
    ),
    Plant("gpu-without-pcie-p2p", lambda: simulated("rtx-4090-2")),
    Plant("nvlink-mesh", lambda: with_nodes(_pcie(), _mesh)),
    Plant("p2p-registry-key", lambda: with_nodes(_board(), lambda node: refused(node, "DR"))),
    Plant("p2p-virtual-machine", lambda: with_nodes(_pcie(virtual=True), lambda node: refused(node, "CNS"))),
    Plant("p2p-chipset", lambda: with_nodes(_pcie(), lambda node: refused(node, "CNS"))),
    Plant("p2p-across-sockets", lambda: with_nodes(_pcie(), lambda node: refused(node, "TNS"))),
    Plant(
        "mixed-gpu-models",
        lambda: with_ranks_on_all(
            with_nodes(_pcie(gpus=3), lambda node: refused(_gpu(node, 2, name="NVIDIA RTX 6000 Ada"), "NS", "GPU2"))
        ),
    ),
    Plant(
        "bar1-small",
        lambda: with_nodes(_pcie(), lambda node: refused(_gpus(node, lambda gpu: _small_window(gpu)), "NS")),
    ),
    Plant("cuda-nvml-disagree", lambda: simulated("hgx-h200-4", "gpu0:cuda_peer=no")),
    Plant("peer-access-corrupts", lambda: replace(_board(), staged={}, wrong=frozenset(BOTH_WAYS))),
    Plant(
        "staged-despite-grant",
        lambda: replace(
            _board(), staged=dict.fromkeys(BOTH_WAYS, "SHM/direct"), copied=dict.fromkeys(BOTH_WAYS, "counters stood")
        ),
    ),
    Plant("peer-access-refused", lambda: with_nodes(_pcie(), lambda node: refused(node, "NS"))),
    Plant(
        "nvlink-disabled",
        lambda: with_nodes(
            _board(),
            lambda node: _settings(
                _gpus(node, lambda gpu: replace(gpu, nvlinks=_all_down(gpu))), parameters={"NvLinkDisable": "1"}
            ),
        ),
    ),
    Plant("fabric-manager-stopped", lambda: _fabric_stopped(_two(), Service(running=False))),
    Plant("fabric-manager-version", lambda: _fabric_stopped(_two(), Service(running=True, version="535.1"))),
    Plant("fabric-not-ready", lambda: simulated("hgx-h200-4", "gpu0:fabric=in_progress")),
    Plant("fabric-not-ready", lambda: simulated("hgx-a100-8", "link0-1:p2p=NS")),
    Plant("nvlink-down", lambda: simulated("hgx-h200-4", "gpu0:nvlink=12")),
    Plant(
        "nvlinks-all-down",
        lambda: with_nodes(_two(), lambda node: _gpus(node, lambda gpu: replace(gpu, nvlinks=_all_down(gpu)))),
    ),
    Plant("fabric-differs", lambda: with_nodes(_board(), lambda node: _gpu(node, fabric=_elsewhere(node)))),
    Plant("fabric-unhealthy", lambda: simulated("hgx-h200-4", "gpu0:health=route_unhealthy")),
    Plant(
        "nvlink-errors", lambda: with_nodes(_board(), lambda node: _growing(node, "GPU1", **{"recovery on link 3": 1}))
    ),
    Plant("nvlink-errors", lambda: with_nodes(_board(), lambda node: _gpu(node, nvlinks=_with_errors(node.gpus[0])))),
    Plant(
        "imex-service-stopped",
        lambda: with_nodes(
            _clustered(), lambda node: _settings(node, services={"nvidia-imex": Service(running=False)}), 1
        ),
    ),
    Plant("imex-channel-missing", lambda: with_ranks(_clustered(), lambda each: replace(each, imex_channels=()), 3)),
    Plant("mnnvl-clique-differs", lambda: with_nodes(_clustered(), lambda node: _fabric(node, clique=2), 1)),
    Plant("nccl-ib-hca-half-port", lambda: _set(simulated("dgx-spark*2"), NCCL_IB_HCA="rocep1s0f1")),
    Plant("mnnvl-no-domain", lambda: job_of(*(_fabric(node, cluster_uuid=NO_CLUSTER) for node in _racks(2)))),
    Plant("mnnvl-unused", _on_nics),
    Plant("nccl-mnnvl-disabled", lambda: _set(_clustered(), NCCL_MNNVL_ENABLE="0")),
    Plant("nccl-mnnvl-disabled", lambda: _set(_clustered(), NCCL_CUMEM_ENABLE="0")),
    Plant("nccl-p2p-disabled", lambda: _set(_board(), NCCL_P2P_DISABLE="1")),
    Plant("nccl-p2p-disabled", lambda: _set(_board(), NCCL_P2P_LEVEL="LOC")),
    Plant(
        "nccl-p2p-disabled",
        lambda: with_ranks(
            _board(), lambda each: replace(each, nccl_files={"/etc/nccl.conf": {"NCCL_P2P_DISABLE": "1"}})
        ),
    ),
    Plant("nccl-shm-disabled", lambda: _set(_board(), NCCL_SHM_DISABLE="1")),
    Plant(
        "nccl-hostid",
        lambda: with_ranks(_board(), lambda each: replace(each, environment={"NCCL_HOSTID": f"n{each.rank}"})),
    ),
    Plant("nccl-default-level", lambda: with_nodes(_board(), _far_apart)),
    Plant("nccl-net-in-node", lambda: replace(_board(), staged=dict.fromkeys(BOTH_WAYS, "NET/Socket/0"))),
    Plant("nccl-few-channels", lambda: _set(_board(), NCCL_MAX_NCHANNELS="1")),
    Plant("nccl-few-channels", lambda: _set(_board(), NCCL_MAX_CTAS="1", NCCL_NVLS_ENABLE="0")),
    Plant(
        "nccl-few-channels",
        lambda: with_ranks(
            _board(), lambda each: replace(each, nccl_files={"~/.nccl.conf": {"NCCL_MAX_P2P_NCHANNELS": "2"}})
        ),
    ),
    Plant("nccl-p2p-memcpy", lambda: _set(_board(), NCCL_P2P_USE_CUDA_MEMCPY="1")),
    Plant("nccl-small-buffers", lambda: _set(_board(), NCCL_BUFFSIZE="32768")),
    Plant("nccl-algorithm-forced", lambda: _set(_board(), NCCL_PROTO="LL")),
    Plant("nccl-algorithm-forced", lambda: _set(_board(), NCCL_ALGO="ring;allreduce:tree")),
    Plant("nccl-few-threads", lambda: _set(_board(), NCCL_NTHREADS="64")),
    Plant("nccl-plugin", lambda: _set(_board(), NCCL_TUNER_PLUGIN="libnccl-tuner-example.so")),
    Plant(
        "nccl-plugin",
        lambda: with_ranks(
            _board(), lambda each: replace(each, libraries={"libnccl-tuner": "/opt/tuner/libnccl-tuner.so"})
        ),
    ),
    Plant(
        "nccl-nvls-off",
        lambda: _set(
            with_nodes(_board(), lambda node: _gpus(node, lambda gpu: replace(gpu, cuda_features={"multicast": True}))),
            NCCL_NVLS_ENABLE="0",
        ),
    ),
    Plant("cuda-launch-blocking", lambda: _set(_board(), CUDA_LAUNCH_BLOCKING="1")),
    Plant("cuda-max-connections", lambda: _set(_board(), CUDA_DEVICE_MAX_CONNECTIONS="1")),
    Plant(
        "cores-shared",
        lambda: replace(with_ranks(_board(), lambda each: replace(each, affinity="0")), waited={0: 0.5, 1: 0.5}),
    ),
    Plant(
        "cpu-quota",
        lambda: with_ranks(
            _board(), lambda each: replace(each, cpu_quota=CpuQuota(cpus=1.5, by="/sys/fs/cgroup/cpu.max"))
        ),
    ),
    Plant("cpu-oversubscribed", lambda: replace(_board(), waited={0: 0.02, 1: 0.75})),
    Plant("shm-not-shared", lambda: _ranks_apart(shm_device=28)),
    Plant("shm-too-small", lambda: _ranks_apart(shm_bytes=2**20)),
    Plant("gpus-not-visible", lambda: _ranks_apart(device_files=("/dev/nvidia1",))),
    Plant("device-file-denied", lambda: _ranks_apart(denied_device_files=("/dev/nvidia1",))),
    Plant("memlock-limited", lambda: with_ranks(_two(), lambda each: replace(each, memlock_bytes=65536), 2)),
    Plant(
        "namespaces-differ",
        lambda: with_ranks(
            _board(),
            lambda each: replace(each, libraries={"libucp": "/usr/lib/libucp.so.0"}, namespaces={"pid": each.rank}),
        ),
    ),
    Plant(
        "ptrace-blocked",
        lambda: with_ranks(
            _board(),
            lambda each: replace(
                each, environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, pidfd_getfd=False
            ),
        ),
    ),
    Plant(
        "visible-devices-differ",
        lambda: with_ranks(
            _board(), lambda each: replace(each, libraries={"libucp": "/libucp.so.0"}, visible_devices=str(each.rank))
        ),
    ),
    Plant("nccl-ib-disabled", lambda: _set(_two(), NCCL_IB_DISABLE="1")),
    Plant("nccl-ib-disabled", lambda: _set(_two(), NCCL_NET="Socket")),
    Plant("nccl-ib-hca", lambda: _set(_two(), NCCL_IB_HCA="ib9")),
    Plant(
        "libibverbs-missing",
        lambda: with_ranks(_two(), lambda each: replace(each, loadable={"libibverbs.so.1": None}), 1),
    ),
    Plant(
        "verbs-provider-missing",
        lambda: with_ranks(
            with_nodes(
                _two(), lambda node: replace(node, nics=tuple(replace(n, driver="mlx5_core") for n in node.nics))
            ),
            lambda each: replace(each, verbs_providers=("efa",)),
        ),
    ),
    Plant(
        "infiniband-files-missing",
        lambda: with_ranks(
            _two(),
            lambda each: replace(each, device_files=tuple(f for f in each.device_files if "infiniband" not in f)),
            2,
            3,
        ),
    ),
    Plant(
        "rdma-file-denied",
        lambda: with_ranks(_two(), lambda each: replace(each, denied_device_files=("/dev/infiniband/uverbs3",)), 2),
    ),
    Plant("efa-plugin-missing", lambda: with_nodes(_two(), _on_efa)),
    Plant("no-rdma-nic", lambda: with_nodes(_two(), lambda node: replace(node, nics=(), rdma_ports=()))),
    Plant("sockets-despite-rdma", lambda: replace(_two(), staged=dict.fromkeys(ACROSS, "NET/Socket/0"))),
    Plant("rdma-port-down", lambda: simulated("hgx-h100-8*2", "node1.nic2:state=down")),
    Plant("rdma-port-unused", lambda: with_nodes(_two(), _with_second_port)),
    Plant("nic-below-card", lambda: simulated("hgx-h100-8*2", *(f"node1.nic{nic}:rate=40" for nic in range(8)))),
    Plant("rdma-port-slow", lambda: simulated("hgx-h100-8*2", "node1.nic2:rate=100")),
    Plant(
        "rdma-port-errors",
        lambda: with_nodes(
            _two(),
            lambda node: replace(
                node, rdma_ports=(replace(node.rdma_ports[0], counters={"symbol_error": 7000}), *node.rdma_ports[1:])
            ),
            1,
        ),
    ),
    Plant("rdma-port-errors", lambda: with_nodes(_two(), lambda node: _growing(node, "mlx5_0", link_downed=1), 1)),
    Plant("roce-mtu-small", lambda: with_nodes(_two(), lambda node: _on_roce(node, mtu=1500))),
    Plant(
        "roce-gid-index", lambda: _set(with_nodes(_two(), lambda node: _on_roce(node, mtu=9000)), NCCL_IB_GID_INDEX="0")
    ),
    Plant("nic-absent", lambda: simulated("hgx-h100-8*2", "node1.nic2:missing=yes")),
    Plant("nics-differ", lambda: simulated("hgx-h100-8*2", *(f"node1.nic{nic}:missing=yes" for nic in range(3)))),
    Plant("nccl-gdr-disabled", lambda: _set(_two(), NCCL_NET_GDR_LEVEL="LOC")),
    Plant("nccl-gdr-disabled", lambda: _set(_two(), NCCL_NET_GDR_READ="0")),
    Plant("nccl-gdr-disabled", lambda: _set(job_of(*_racks(2)), NCCL_NET_GDR_C2C="0")),
    Plant(
        "nccl-gdr-disabled",
        lambda: _set(
            with_nodes(_two(), lambda node: replace(node, gpudirect=GpuDirectFacts(peermem=False, dma_buf=True))),
            NCCL_DMABUF_ENABLE="0",
        ),
    ),
    Plant(
        "gpudirect-module-missing",
        lambda: with_nodes(_two(), lambda node: replace(node, gpudirect=GpuDirectFacts(peermem=False, dma_buf=False))),
    ),
    Plant(
        "peermem-not-registered",
        lambda: with_nodes(
            _two(),
            lambda node: replace(node, gpudirect=GpuDirectFacts(peermem=True, peermem_registered=False, dma_buf=False)),
        ),
    ),
    Plant("gb10-no-gpudirect", lambda: with_nodes(_two(), _gb10)),
    Plant("gpudirect-too-far", lambda: with_nodes(_two(), _far_nics)),
    Plant(
        "gpudirect-one-side",
        lambda: with_nodes(_two(), lambda node: replace(node, gpudirect=GpuDirectFacts(peermem=False)), 1),
    ),
    Plant(
        "acs-redirect",
        lambda: with_nodes(_pcie(), lambda node: _acs(node, "0000:02:00.0", "0000:02:01.0")),
        beside=("acs-nic-redirect",),
    ),
    Plant(
        "acs-redirect",
        lambda: with_nodes(
            _pcie(),
            lambda node: replace(
                node, pci_devices=tuple(replace(each, access_control=None) for each in node.pci_devices), nics=()
            ),
        ),
    ),
    Plant("acs-nic-redirect", lambda: with_nodes(_pcie(gpus=1), lambda node: _acs(node, "0000:02:01.0"))),
    Plant(
        "iommu-translating",
        lambda: with_nodes(
            _pcie(),
            lambda node: replace(
                node, kernel=replace(node.kernel, iommu=IommuFacts(group_types=dict.fromkeys("0123", "DMA-FQ")))
            ),
        ),
    ),
    Plant("pcie-width", lambda: simulated("hgx-h200-4", "gpu0:width=8")),
    Plant("pcie-generation", lambda: simulated("hgx-h200-4", "gpu0:generation=3")),
    Plant(
        "pcie-uplink",
        lambda: with_nodes(
            _pcie(),
            lambda node: _device(
                node, "0000:01:00.0", link=PcieLink(generation=4, width=8, max_generation=4, max_width=16)
            ),
        ),
    ),
    Plant(
        "pcie-errors",
        lambda: with_nodes(
            _pcie(), lambda node: _device(node, "0000:03:00.0", errors=PcieErrors(correctable=2, nonfatal=1, fatal=1))
        ),
    ),
    Plant("pcie-errors", lambda: with_nodes(_pcie(), lambda node: _growing(node, "0000:03:00.0", nonfatal=1))),
    Plant("pcie-errors", lambda: with_nodes(_board(), lambda node: _growing(node, "GPU0", **{REPLAYS: 300}))),
    Plant(
        "staging-shares-uplink",
        lambda: replace(
            with_nodes(_pcie(), lambda node: refused(node, "GNS")), staged=dict.fromkeys(BOTH_WAYS, "SHM/direct")
        ),
        beside=("gpu-without-pcie-p2p",),
    ),
    Plant(
        "posted-write-collapse",
        lambda: replace(_roots(), together=(Together("all to all", tuple(permutations(range(6), 2)), 31.0, 240.0),)),
        beside=("nccl-default-level",),
    ),
    Plant("peer-access-not-enabled", lambda: _set(_board(), GGML_CUDA_DISABLE_GRAPHS="1")),
    Plant("mpi-cuda-off", lambda: _set(_board(), MPICH_GPU_SUPPORT_ENABLED="0")),
    Plant("ucx-tls", lambda: _set(_board(), UCX_TLS="rc,sm,self")),
    Plant("ucx-tls", lambda: _set(_board(), UCX_TLS="^cuda_ipc")),
    Plant("ucx-tls", lambda: _transfer(variables={"UCX_TLS": "tcp,cuda_copy"})),
    Plant("ucx-without-cuda", lambda: _transfer(missing_transports=("cuda_copy", "cuda_ipc"))),
    Plant("ucx-without-cuda", lambda: with_ranks(_board(), lambda each: replace(each, ucx_cuda=False))),
    Plant(
        "mpi-not-cuda-aware", lambda: with_ranks(_board(), lambda each: replace(each, mpi=MpiFacts(cuda_aware=False)))
    ),
    Plant(
        "wsl",
        lambda: with_nodes(_pcie(), lambda node: refused(replace(node, kernel=replace(node.kernel, wsl=True)), "NS")),
    ),
    Plant("vm-flat-topology", lambda: with_nodes(_two(), _flat), beside=("nccl-default-level",)),
    Plant(
        "topology-file-wrong",
        lambda: with_ranks(
            _board(),
            lambda each: replace(
                each, topology_file=TopologyFile(path="/t.xml", by="NCCL_TOPO_FILE", links={"00ff:01:00.0": "x16"})
            ),
        ),
    ),
    Plant("gpu-throttled", lambda: simulated("hgx-h200-4", "gpu0:throttle=sw_thermal_slowdown")),
    Plant("gpu-hw-slowdown", lambda: simulated("hgx-h200-4", "gpu0:throttle=hw_slowdown")),
    Plant(
        "clocks-held-down",
        lambda: with_nodes(_board(), lambda node: _gpu(node, limits=GpuLimits(clock_mhz=600, default_clock_mhz=1980))),
    ),
    Plant(
        "power-limited",
        lambda: with_nodes(_board(), lambda node: _gpu(node, limits=GpuLimits(power_w=200.0, default_power_w=700.0))),
    ),
    Plant("gpu-hot", lambda: simulated("hgx-h200-4", "gpu1:temperature=88")),
    Plant("clocks-capped", lambda: simulated("hgx-h200-4", "gpu0:throttle=sw_power_cap")),
    Plant(
        "nvlink-bandwidth-limited",
        lambda: with_nodes(_board(), lambda node: _settings(node, nvlink_bandwidth_mode="half")),
    ),
    Plant("row-remap-pending", lambda: simulated("hgx-h200-4", "gpu0:rows=pending")),
    Plant("row-remap-pending", lambda: _h100(retirement_pending=True)),
    Plant("row-remap-failed", lambda: simulated("hgx-h200-4", "gpu0:rows=failure")),
    Plant("numa-far", lambda: with_ranks(_two(), lambda each: replace(each, affinity="112-113"), 1)),
)
"""Conditions that explain paths. `beside` are causes that such a machine also has, before this one."""


def _h100(*faults: str, asked: bool = False, **facts: Any) -> Job:
    """Return a machine with its matching profile. `facts` change GPU 1."""
    job = replace(simulated("hgx-h100-8", *faults), profile=profiles.load("hgx-h100-8"), asked=asked)
    return with_nodes(job, lambda node: _gpu(node, 1, **facts)) if facts else job


def _one_unknown(gpu: GpuFacts) -> tuple[NvLink, ...]:
    first, *others = gpu.nvlinks or ()
    return replace(first, active=None), *others


def _failing(error: str) -> Job:
    return with_nodes(_h100(), lambda node: replace(node, failures=(ProbeFailure(stage="cuda", error=error),)))


def _measured(job: Job, **rows: Any) -> Job:
    """Add measured rows to a job, so that copies are judged."""
    nodes = {node.host: Topology(node) for node in job.nodes}
    copies = CopyJudge(job.profile, nodes).judge(rows.pop("pairs", ()))
    return replace(job, measurements=Measurements(pairs=tuple(copies), **rows))


def _copies(slow: Mapping[Pair, float]) -> Job:
    job = _h100()
    pairs = permutations(range(8), 2)
    return _measured(job, pairs=tuple(pair(job.nodes[0], *ends, slow.get(ends, 376.0)) for ends in pairs))


def _memory_copies() -> Job:
    job = simulated("hgx-h100-8*3")
    seconds = zip(job.nodes, (1.0, 1.0, 1.5), strict=True)
    return _measured(job, pairs=tuple(host_copy_row(node.host, 2**26, each) for node, each in seconds))


CHECKED: tuple[Plant, ...] = (
    Plant("network-down", lambda: simulated("l40s-8", "nic0:state=down")),
    Plant("driver-silent", lambda: _h100("node0:silent=nvml")),
    Plant("cuda-refuses", lambda: _failing("cuInit answered CUDA_ERROR_SYSTEM_NOT_READY (802)")),
    Plant("probe-failed", lambda: _failing("killed by SIGSEGV")),
    Plant("topology-text-cut", lambda: with_nodes(_h100(), lambda node: replace(node, completed="NIC0"))),
    Plant("driver-missing", lambda: _h100("node0:driver_missing=yes")),
    Plant("node-differs", lambda: simulated("hgx-h100-8*4", "node2:cuda=12.8")),
    Plant(
        "settings-differ",
        lambda: with_ranks(_board(), lambda each: replace(each, environment={"NCCL_ALGO": "Ring"}), 1),
    ),
    Plant("driver-differs", lambda: simulated("hgx-h100-8*4", "node2:driver=570.1")),
    Plant("library-differs", lambda: _ranks_apart(libraries={"libnccl": "/opt/old.so"})),
    Plant("gpu-lost", lambda: _h100("gpu6:lost=yes")),
    Plant("nvlink-doubtful", lambda: _h100(nvlinks=_one_unknown(_board().nodes[0].gpus[0]))),
    Plant("ecc-off", lambda: _h100("gpu6:ecc=off")),
    Plant("memory-errors", lambda: _h100("gpu3:errors=2")),
    Plant("gpu-missing", lambda: _h100("gpu6:missing=yes")),
    Plant("gpu-model", lambda: _h100(name="NVIDIA H200")),
    Plant("gpu-differs", lambda: with_nodes(_h100(), lambda node: _gpu(node, 3, memory_bytes=42_949_672_960))),
    Plant("profile-unknown", lambda: replace(_h100(), profile=profiles.load("generic-nvlink"))),
    Plant("below-profile", lambda: _h100(pcie=PcieLink(generation=3, width=16, max_generation=3, max_width=16))),
    Plant("nics-missing", lambda: _h100(*(f"nic{nic}:missing=yes" for nic in range(8)))),
    Plant("nic-below-profile", lambda: _h100("nic2:missing=yes", asked=True)),
    Plant("p2p-slow", lambda: _copies({(0, 3): 200.0, (3, 0): 200.0})),
    Plant("p2p-asymmetric", lambda: _one_way()),
    Plant("host-copies-slow", lambda: _host_copies()),
    Plant("host-memory-slow", _memory_copies),
    Plant("slow-unexplained", lambda: _measured(_h100(), collectives=(slow_row(2**28, 13570.0, 10.0),))),
    Plant("wrong-data", lambda: _measured(_h100(), collectives=(row(2**28, 1.0, 480.0, wrong=7),))),
    Plant(
        "straggler", lambda: _measured(_h100(), collectives=(row(2**28, 1357.0, 346.1, time_us_slowest_rank=1700.0),))
    ),
    Plant("slow-range", lambda: _measured(_h100(), collectives=_sweep(slow=(2**26, 2**27)))),
    Plant(
        "figures-too-noisy",
        lambda: _measured(_h100(), collectives=(replace(slow_row(2**28, 1357.0, 346.1), **_NOISE),)),
    ),
    Plant("above-limit", lambda: _measured(_h100(), collectives=(row(2**28, 1.0, 4000.0),))),
    Plant("not-measured", lambda: _measured(_h100(), failed={Need.PEER_COPIES: "did not end within 120 s"})),
)
"""Conditions that only checks report."""


_NOISE: dict[str, Any] = {"ci95_percent": 416.0, "verdict": "INCONCLUSIVE"}


def _sweep(slow: Sequence[int]) -> tuple[CollectiveRow, ...]:
    """Return all-reduces of 16 MiB to 1 GiB at 350 GB/s, some of which take a third longer."""
    times = {
        size: size * 1.75 / 350e3 * (4 / 3 if size in slow else 1) for size in (2**power for power in range(24, 31))
    }
    return tuple(row(size, time_us, size * 1.75 / time_us / 1e3) for size, time_us in times.items())


def _one_way() -> Job:
    """Return a pair whose one direction is faster than all others, so that only the way back shows the fault."""
    job = simulated("hgx-h200-4")
    figures = {ends: 340.0 if ends == (0, 1) else 300.0 for ends in permutations(range(4), 2)}
    return _measured(job, pairs=tuple(pair(job.nodes[0], *ends, figures[ends], limit_gb_s=None) for ends in figures))


def _host_copies() -> Job:
    job = _h100()
    node = job.nodes[0]
    rows = (
        pair(
            node,
            each,
            (each + 1) % 8,
            26.0 if each == 2 else 52.0,
            size_bytes=2**26,
            note="pinned host memory",
            peer=None,
        )
        for each in range(8)
    )
    return _measured(job, pairs=tuple(replace(each, destination="host", destination_bus_id=None) for each in rows))


def _roots() -> Job:
    """Return six GPUs: two below a switch of each of three root complexes."""

    def places(node: Snapshot) -> Snapshot:
        gpus = (
            replace(
                gpu,
                place=PciPlace(
                    host_bridge=f"pci0000:{gpu.index // 2}0",
                    root_port=f"0000:{gpu.index // 2}0:01.0",
                    switches=(f"0000:{gpu.index // 2}1:00.0",),
                    numa_node=0,
                ),
            )
            for gpu in node.gpus
        )
        return replace(node, gpus=tuple(gpus), nics=(), pci_devices=())

    job = with_ranks_on_all(job_of(below_a_switch(gpus=6)))
    return with_nodes(job, places)


def with_ranks_on_all(job: Job) -> Job:
    """Add a rank on every GPU of the job's only node."""
    (node,) = job.nodes
    first = job.ranks[0]
    ranks = tuple(replace(first, rank=gpu.index, local_rank=gpu.index, pid=100 + gpu.index) for gpu in node.gpus)
    return replace(job, ranks=ranks)


def _small_window(gpu: GpuFacts) -> GpuFacts:
    return replace(gpu, bar1_bytes=2**28)


def _all_down(gpu: GpuFacts) -> tuple[NvLink, ...]:
    return tuple(replace(link, active=False) for link in gpu.nvlinks or ())


def _with_errors(gpu: GpuFacts) -> tuple[NvLink, ...]:
    first, *others = gpu.nvlinks or ()
    return replace(first, errors={"replay": 5000}), *others


def _growing(node: Snapshot, device: str, **counts: int) -> Snapshot:
    """Return a node with a device whose error counts grew during a run."""
    return replace(node, errors_grown={device: counts})


def _far_apart(node: Snapshot) -> Snapshot:
    return _without_nvlinks(node)


def _on_efa(node: Snapshot) -> Snapshot:
    nics = tuple(replace(nic, kind=NicKind.EFA, driver="efa") for nic in node.nics)
    return replace(node, nics=nics, gpudirect=GpuDirectFacts(efa_peermem=True, dma_buf=True))


def _on_roce(node: Snapshot, mtu: int) -> Snapshot:
    gids = (Gid(index=0, kind="IB/RoCE v1", address="ipv4"), Gid(index=3, kind="RoCE v2", address="ipv4"))
    return replace(
        node,
        nics=tuple(replace(nic, kind=NicKind.ROCE, mtu=mtu) for nic in node.nics),
        rdma_ports=tuple(replace(port, gids=gids) for port in node.rdma_ports),
    )


def _gb10(node: Snapshot) -> Snapshot:
    named = _gpus(node, lambda gpu: replace(gpu, name="NVIDIA GB10"))
    return replace(named, gpudirect=GpuDirectFacts(peermem=False))


def _far_nics(node: Snapshot) -> Snapshot:
    place = PciPlace(host_bridge="pci0000:f0", numa_node=1)
    return replace(node, nics=(replace(node.nics[0], place=place),), rdma_ports=node.rdma_ports[:1])


def _acs(node: Snapshot, *ports: str) -> Snapshot:
    control = AccessControl(capable=("request_redirect",), enabled=("request_redirect", "upstream_forwarding"))
    for port in ports:
        node = _device(node, port, access_control=control)
    return node


def _flat(node: Snapshot) -> Snapshot:
    place = PciPlace(host_bridge="pci0000:00")
    return replace(
        node,
        machine=replace(node.machine, virtual_machine=True, numa_nodes=()),
        gpus=tuple(replace(gpu, place=place) for gpu in node.gpus),
        nics=tuple(replace(nic, place=place) for nic in node.nics),
        switches=(),
        pci_devices=(),
    )
