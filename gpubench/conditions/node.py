"""Nodes: drivers that are missing or broken, what hides or binds GPUs, and differences between nodes and ranks."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import (
    Condition,
    Family,
    Found,
    Look,
    Sighting,
    complained,
    in_each_node,
    joined,
    of_every_node,
    of_gpu,
    of_node,
    rdma_nics,
    unread,
)
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import ProbeFailure, Snapshot
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.nodes import Difference, condense
from gpubench.model.paths.topology import Topology
from gpubench.model.terms.units import compress_names
from gpubench.model.terms.verdict import Verdict

_NOT_READY = "CUDA_ERROR_SYSTEM_NOT_READY"
_KERNEL_LOG = "dmesg | grep -i -E 'NVRM|Xid'"

_BROKEN: Mapping[str, tuple[str, str]] = {
    "sysfs": ("a /sys or /proc that is not mounted, or a bug in gpubench", "ls /sys/bus/pci/devices /proc/driver"),
    "nvml": ("libnvidia-ml crashed, belongs to another driver, or may not open /dev/nvidia*", ""),
    "cuda": (
        "libcuda crashed, belongs to another driver, or is missing: NVIDIA_DRIVER_CAPABILITIES=utility hides it",
        f"nvidia-smi; ldconfig -p | grep libcuda; {_KERNEL_LOG}",
    ),
}
"""What is likely where a source of facts broke, and the next command where it is a special one."""


def _missing(node: Topology) -> str:
    absent = node.snapshot.driver.absent
    return f"{len(node.gpus)} NVIDIA GPUs on the PCI bus, and {absent}" if node.gpus and absent else ""


def _failures(run: Circumstances, holds: Callable[[ProbeFailure, Snapshot], bool], lead: str = "") -> Found:
    for number, node in run.nodes.items():
        for failure in node.snapshot.failures:
            if holds(failure, node.snapshot):
                likely, cure = _BROKEN.get(failure.stage, ("a bug in gpubench", ""))
                names = (f"{run.named(number)}, {failure.stage}",)
                sighting = of_node(run, number, f"{lead}{failure.error}", names=names)
                known = failure.timed_out or bool(lead)
                yield sighting if known else replace(sighting, likely=likely, cure=cure)


def _silent(run: Circumstances) -> Found:
    return _failures(run, lambda failure, _: failure.timed_out)


def _refuses(failure: ProbeFailure, snapshot: Snapshot) -> bool:
    """True if CUDA's refusal tells something of the machine, and is no failure to ask: the driver itself answers."""
    answers = not any(each.stage == "nvml" for each in snapshot.failures)
    return not failure.timed_out and _NOT_READY in failure.error and answers


def _cuda_refuses(run: Circumstances) -> Found:
    return _failures(run, _refuses, "NVML answers, and CUDA does not start: ")


def _broken(run: Circumstances) -> Found:
    return _failures(run, lambda failure, snapshot: not failure.timed_out and not _refuses(failure, snapshot))


_XID = "https://docs.nvidia.com/deploy/xid-errors/index.html"

DRIVER = Family.of(
    "driver",
    "The driver",
    Condition(
        id="driver-silent",
        title="nvidia-smi hangs: the NVIDIA driver does not answer",
        detection="every source of facts is read in a process of its own with a deadline",
        check="driver",
        expected="an answer within the time-out",
        likely="a GPU fell off the bus, or the driver hangs in the kernel",
        cure=f"{_KERNEL_LOG}; then nvidia-smi, which may hang the same way",
        link=_XID,
        look=_silent,
    ),
    Condition(
        id="cuda-refuses",
        title="CUDA error 802: system not yet initialized, although nvidia-smi works",
        detection="cuInit answers CUDA_ERROR_SYSTEM_NOT_READY, and NVML answers",
        check="driver",
        expected="CUDA on every GPU that NVML lists",
        likely="the fabric manager is not up, or of another version than the driver",
        cure=f"systemctl status nvidia-fabricmanager; {_KERNEL_LOG}",
        link="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html",
        look=_cuda_refuses,
        in_job=complained(r"system not yet initialized|(?:error|failure) 802\b"),
    ),
    Condition(
        id="probe-failed",
        title="NVML, CUDA or /sys cannot be read (library crashed, or of another driver version)",
        detection="how the process ends that reads them",
        check="driver",
        expected="facts",
        cure=f"nvidia-smi; {_KERNEL_LOG}",
        link=_XID,
        look=_broken,
    ),
    Condition(
        id="driver-missing",
        title="NVIDIA GPUs on the PCI bus and no driver loaded (NVIDIA-SMI has failed)",
        detection="NVIDIA devices in /sys/bus/pci, and whether libnvidia-ml finds a driver",
        check="driver",
        expected="the NVIDIA driver, loaded",
        likely="the driver is not installed or its module failed to load; a container was started without GPUs",
        cure="modprobe nvidia && nvidia-smi; in a container: docker run --gpus all",
        link="https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/index.html",
        look=of_every_node(_missing),
    ),
)


_MOST_CPUS = 65_536


def _wsl(node: Topology) -> str:
    return "the kernel is Microsoft's, or /dev/dxg is there" if node.snapshot.kernel.wsl else ""


def cpus_in(ranges: str) -> set[int] | None:
    """The numbers in a list of ranges ('0-31,64'); None for what is none, or is too long to be one."""
    found: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return None
        if not int(first) <= int(last or first) < _MOST_CPUS:
            return None
        found.update(range(int(first), int(last or first) + 1))
    return found


def _numa(run: Circumstances) -> Found:
    """Processes bound to CPUs of which none is near their GPU, or near one of those whose copies they make."""
    for facts in run.facts:
        node = run.nodes.get(facts.node)
        own = cpus_in(facts.affinity or "")
        gpus = run.gpus_of_rank(facts)
        makes_copies = not run.asked_of_nccl
        if node is None or own is None or not (len(gpus) == 1 or makes_copies):
            if node is not None:
                yield from unread(run.on(facts.node, f"rank {facts.rank}"), facts.unknown, "affinity")
            continue
        for position in sorted(gpus):
            gpu = run.wiring.gpu(position)
            near = None if gpu is None else _near(node, gpu.place.numa_node)
            if near and own.isdisjoint(near):
                seen = f"bound to CPUs {facts.affinity}, its GPU is on NUMA node {gpu and gpu.place.numa_node}"
                # Launches are a little later from there; copies to and from host memory are surely slower.
                yield of_gpu(run, position, seen, Confidence.PROVEN if makes_copies else Confidence.LIKELY)


def _near(node: Topology, numa_node: int | None) -> set[int] | None:
    memory = {each.number: each.cpus for each in node.snapshot.machine.numa_nodes}
    return cpus_in(memory[numa_node]) if numa_node in memory else None


def _topology_file(run: Circumstances) -> Found:
    """A file that NCCL takes for the machine: unusable, or of another one."""
    seen: set[tuple[int, str]] = set()
    for facts in run.facts:
        file, node = facts.topology_file, run.nodes.get(facts.node)
        if file is None or node is None or (facts.node, file.path) in seen:
            continue
        seen.add((facts.node, file.path))
        there = {gpu.bus_id for gpu in node.gpus} | {nic.bus_id for nic in node.nics}
        missing = sorted(each for each in {gpu.bus_id for gpu in node.gpus} if each and each not in file.links)
        if file.unusable:
            yield of_node(run, facts.node, f"{file.path} ({file.by}): {file.unusable}", Confidence.LIKELY)
        elif file.links and missing and there.isdisjoint(file.links):
            said = f"{file.path} ({file.by}) has none of this machine's devices: {joined(missing)}"
            yield of_node(run, facts.node, said)


def _flat(run: Circumstances) -> Found:
    """A virtual machine with RDMA NICs whose tree says nothing of which GPU is near which."""
    for number, node in run.nodes.items():
        snapshot = node.snapshot
        nics = [nic for nic in node.nics if nic.rdma]
        has_file = any(facts.topology_file is not None for facts in run.ranks_of(number))
        if not snapshot.machine.virtual_machine or has_file:
            continue
        if {node.path(gpu, nic) for gpu in node.gpus for nic in nics} == {"PHB"}:
            seen = f"all {len(node.gpus)} GPUs and {len(nics)} RDMA NICs hang on one host bridge"
            yield of_node(run, number, seen, Confidence.LIKELY)


def _node_differs(run: Circumstances) -> Found:
    """Every node that differs from its kind, and every further kind with the same GPU models.

    Where neither of two is the usual one, both are named: two nodes have no majority.
    """
    sizes = {kind.name: len(kind.alike) for kind in run.kinds}
    for kind in run.kinds:
        if kind.differs_from is not None and kind.rivals:
            yield _undecided(run, kind.rivals, kind.alike, kind.differs)
        elif kind.differs_from is not None:
            hosts = _hosts(run, kind.alike)
            others = f"what the {sizes[kind.differs_from]} nodes of kind {kind.differs_from} have"
            yield Sighting(
                subject=f"kind {kind.name}: {compress_names(hosts)}",
                heading=f"kind {kind.name}: {compress_names(hosts)}",
                names=hosts,
                seen="; ".join(condense(kind.differs)),
                expected=f"{others}, which have the same GPUs",
            )
        count = len(kind.alike)
        usual = f"what {count} other nodes of kind {kind.name} have" if count > 1 else "what the other node has"
        for number, differs in kind.odd.items():
            if run.nodes[number].snapshot.failures:
                continue  # what it did not answer is no difference, and is told as such
            if kind.differs_from is None and number in kind.rivals:
                yield _undecided(run, kind.alike, (number,), differs)
            else:
                yield of_node(run, number, "; ".join(condense(differs)), expected=usual)


def _undecided(
    run: Circumstances, some: Sequence[int], others: Sequence[int], differs: Sequence[Difference]
) -> Sighting:
    """What differs between as many nodes as others, of which neither are the usual ones; `differs` is of the others."""
    hosts = _hosts(run, (*some, *others))
    where = f"on {compress_names(_hosts(run, others))}"
    usual = f"on {compress_names(_hosts(run, some))}"
    return Sighting(
        subject=compress_names(hosts),
        heading=compress_names(hosts),
        names=hosts,
        seen=f"{where} {'; '.join(condense(differs, others=usual))}",
        expected="nodes that are alike; which of them is as it should be, these facts do not tell",
        gpus=frozenset(gpu for number in (*some, *others) for gpu in run.gpus_of(number)),
    )


def _hosts(run: Circumstances, numbers: Sequence[int]) -> tuple[str, ...]:
    return tuple(run.nodes[number].snapshot.host for number in numbers)


@in_each_node
def _network_down(run: Circumstances) -> Found:
    """All that a node without RDMA has to reach others by."""
    job_has_a_network = any(nic.state == "active" for node in run.nodes.values() for nic in node.nics)
    severity = Verdict.FAIL if job_has_a_network else None
    for number, node in run.nodes.items():
        if node.nics and not rdma_nics(node) and all(nic.state == "down" for nic in node.nics):
            names = tuple(run.named(number, nic) for nic in node.nics)
            yield of_node(run, number, "every network interface is down", names=names, severity=severity)


def _settings_differ(run: Circumstances) -> Found:
    """On the hosts of ranks that have another value than most; of two that are as frequent, unset is usual."""
    for name in sorted({name for rank in run.facts for name in rank.environment if name.startswith("NCCL_")}):
        values: dict[str | None, list[RankFacts]] = {}
        for rank in run.facts:
            values.setdefault(rank.environment.get(name), []).append(rank)
        if len(values) > 1:
            usual = max(values, key=lambda value: (len(values[value]), value is None))
            shown = (f"{value or 'unset'} on {joined(map(_rank_on, who))}" for value, who in values.items())
            odd = dict.fromkeys(rank.host for rank in run.facts if rank.environment.get(name) != usual)
            cure = f"mpirun -x {name} ..., or srun --export=ALL"
            yield Sighting(subject=name, heading=name, names=tuple(odd), seen="; ".join(shown), cure=cure)


def _rank_on(rank: RankFacts) -> str:
    return f"rank {rank.rank} on {rank.host}"


def _driver_differs(run: Circumstances) -> Found:
    drivers = {node.snapshot.host: node.snapshot.driver.version for node in run.nodes.values()}
    for host, version, usual in _odd({host: each for host, each in drivers.items() if each}):
        yield Sighting(subject=host, seen=f"driver {version}", expected=f"{usual}, as on the other nodes")


def _library_differs(run: Circumstances) -> Found:
    """Without libraries that belong to the driver, of which the driver's own version tells."""
    for name in sorted({name for rank in run.facts for name in rank.libraries} - {"cuda_driver", "nvml"}):
        files = {_rank_on(rank): rank.libraries[name] for rank in run.facts if name in rank.libraries}
        for where, file, usual in _odd(files):
            yield Sighting(subject=where, seen=f"{name} is {file}", expected=f"{usual}, as on the others")


def _odd(found: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Values that differ from the most frequent one: place, value, and that one; of several, the newest version."""
    tally = Counter(found.values())
    usual = max(tally, key=lambda version: (tally[version], _numbers(version)), default="")
    yield from ((where, version, usual) for where, version in found.items() if version != usual)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


_COMPARE = "check.md"


def _differs(id_: str, title: str, detection: str, look: Look) -> Condition:
    """A condition of drivers or libraries that differ between nodes."""
    return Condition(
        id=id_,
        title=title,
        detection=detection,
        check="versions",
        likely="a node that was updated, or not; another image, module or LD_LIBRARY_PATH",
        cure="nvidia-smi --version; ldconfig -p | grep nccl, on both nodes",
        link=_COMPARE,
        look=look,
    )


NODE = Family.of(
    "node",
    "Nodes and processes",
    Condition(
        id="wsl",
        title="WSL2 (Windows): no P2P between GPUs, no CUDA IPC; NCCL uses SHM",
        detection="/proc/version names Microsoft, or /dev/dxg is there",
        settles="uname -r",
        cure="nothing to repair under WSL: boot Linux itself for P2P",
        link="https://github.com/NVIDIA/TensorRT-LLM/pull/17034",
        look=of_every_node(_wsl, unknown="wsl"),
        implies=("cuda-ipc-refused", "cuda-nvml-disagree", "peer-access-refused"),
        by_design=True,
    ),
    Condition(
        id="vm-flat-topology",
        title="A virtual machine hides the PCIe topology: all GPUs and NICs are PHB, NUMA node -1",
        detection="a virtual machine whose GPUs and RDMA NICs all hang on one host bridge, without NCCL_TOPO_FILE",
        settles="nvidia-smi topo -m; NCCL_TOPO_DUMP_FILE=/tmp/topo.xml gpubench allreduce",
        cure="NCCL_TOPO_FILE=the provider's file (Azure: /opt/microsoft/*.xml; AWS: aws-ofi-nccl brings it)",
        link="https://github.com/NVIDIA/nccl-tests/issues/86",
        look=_flat,
        implies=("gpudirect-too-far",),
    ),
    Condition(
        id="topology-file-wrong",
        title="NCCL_TOPO_FILE is of another machine, or cannot be read",
        detection="bus ids in the file against those of the node's GPUs and NICs",
        settles="gpubench topo --from FILE beside gpubench topo",
        cure="unset NCCL_TOPO_FILE, or take the file made for this machine type",
        link="https://github.com/NVIDIA/nccl/issues/749",
        look=_topology_file,
    ),
    Condition(
        id="numa-far",
        title="A rank is bound to CPUs far from its GPU (NUMA): slow host copies and launches",
        detection="sched_getaffinity of every rank against the CPUs of its GPU's NUMA node; of p2p in one process "
        "against those of every GPU",
        settles="gpubench p2p --pairs 0-1 under numactl --cpunodebind of either node: host memory to GPU",
        cure="mpirun --bind-to numa --map-by numa, or srun --cpu-bind with the GPU's CPUs",
        link="https://github.com/NVIDIA/nccl/issues/1674",
        look=_numa,
    ),
    Condition(
        id="node-differs",
        title="A node differs from the others of its kind",
        detection="devices, links, settings and versions of nodes with the same GPUs",
        check="nodes_alike",
        likely="a fault, or another image, firmware or setting than on the other nodes",
        cure="gpubench topo on that node alone",
        link=_COMPARE,
        look=_node_differs,
    ),
    Condition(
        id="network-down",
        title="Every network interface of a node is down",
        detection="/sys/class/net/*/operstate of nodes without RDMA NICs",
        check="nic_state",
        expected="one that is up",
        likely="cable, switch port or driver; a machine that works alone needs none",
        cure="ip link; ethtool $(ls /sys/class/net)",
        link=_COMPARE,
        look=_network_down,
    ),
    Condition(
        id="settings-differ",
        title="NCCL_ variables are not the same on all ranks",
        detection="the environment of every rank",
        check="ranks_alike",
        expected="the same on every rank",
        likely="the launcher does not pass it on, or a host's profile sets it",
        cure="mpirun -x NAME ..., or srun --export=ALL",
        link="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
        look=_settings_differ,
    ),
    _differs(
        "driver-differs",
        "Nodes have different versions of the NVIDIA driver",
        "the driver's version on every node; of two the older one is named",
        _driver_differs,
    ),
    _differs(
        "library-differs",
        "Ranks load different files of a library (NCCL, MPI, UCX)",
        "the libraries that every rank has loaded",
        _library_differs,
    ),
)
