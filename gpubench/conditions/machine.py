"""The machine around GPUs and links: Windows' Linux, virtual machines, memory nodes, clocks, memory errors."""

from collections.abc import Iterator

from gpubench.conditions.cause import Cause, Family, Sighting, Unread, joined
from gpubench.conditions.circumstances import Circumstances
from gpubench.conditions.sightings import of_gpu, of_node
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.topology import Topology
from gpubench.model.results.rows.causes import Effect

_HARMFUL = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake")
"""Reasons that mean trouble; a power cap is how a busy GPU runs."""

_MOST_CPUS = 65_536


def _wsl(around: Circumstances) -> Iterator[Sighting | Unread]:
    for number, node in around.nodes.items():
        kernel = node.snapshot.kernel
        if kernel.wsl:
            yield of_node(around, number, "the kernel is Microsoft's, or /dev/dxg is there", Confidence.PROVEN)
        elif kernel.wsl is None and "wsl" in kernel.unknown:
            yield Unread(around.on(number), kernel.unknown["wsl"])


def _throttled(around: Circumstances) -> Iterator[Sighting | Unread]:
    for position, _, gpu in around.gpus():
        reasons = [reason for reason in gpu.throttle_reasons or () if reason in _HARMFUL]
        if reasons:
            yield of_gpu(
                around, position, f"clocks are lowered: {joined(reasons).replace('_', ' ')}", Confidence.PROVEN
            )


def _memory_rows(around: Circumstances) -> Iterator[Sighting | Unread]:
    for position, _, gpu in around.gpus():
        rows = gpu.remapped_rows
        if rows is not None and (rows.pending or rows.failure):
            seen = "memory rows could not be remapped" if rows.failure else "memory rows wait for a reset"
            yield of_gpu(around, position, seen, Confidence.PROVEN)


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


def _numa(around: Circumstances) -> Iterator[Sighting | Unread]:
    """Processes bound to CPUs of which none is near their GPU, or near one of those whose copies they make."""
    for facts in around.facts:
        node = around.nodes.get(facts.node)
        own = cpus_in(facts.affinity or "")
        gpus = around.gpus_of_rank(facts)
        makes_copies = not around.asked_of_nccl
        if node is None or own is None or not (len(gpus) == 1 or makes_copies):
            if node is not None and "affinity" in facts.unknown:
                yield Unread(around.on(facts.node, f"rank {facts.rank}"), facts.unknown["affinity"])
            continue
        for position in sorted(gpus):
            gpu = around.wiring.gpu(position)
            near = None if gpu is None else _near(node, gpu.place.numa_node)
            if near and own.isdisjoint(near):
                seen = f"bound to CPUs {facts.affinity}, its GPU is on NUMA node {gpu and gpu.place.numa_node}"
                yield of_gpu(around, position, seen, Confidence.PROVEN)


def _near(node: Topology, numa_node: int | None) -> set[int] | None:
    memory = {each.number: each.cpus for each in node.snapshot.machine.numa_nodes}
    return cpus_in(memory[numa_node]) if numa_node in memory else None


def _topology_file(around: Circumstances) -> Iterator[Sighting | Unread]:
    """A file that NCCL takes for the machine: unusable, or of another one."""
    seen: set[tuple[int, str]] = set()
    for facts in around.facts:
        file, node = facts.topology_file, around.nodes.get(facts.node)
        if file is None or node is None or (facts.node, file.path) in seen:
            continue
        seen.add((facts.node, file.path))
        there = {gpu.bus_id for gpu in node.gpus} | {nic.bus_id for nic in node.nics}
        missing = sorted(each for each in {gpu.bus_id for gpu in node.gpus} if each and each not in file.links)
        if file.unusable:
            yield of_node(around, facts.node, f"{file.path} ({file.by}): {file.unusable}", Confidence.LIKELY)
        elif file.links and missing and there.isdisjoint(file.links):
            said = f"{file.path} ({file.by}) has none of this machine's devices: {joined(missing)}"
            yield of_node(around, facts.node, said, Confidence.PROVEN)


def _flat(around: Circumstances) -> Iterator[Sighting | Unread]:
    """A virtual machine with RDMA NICs whose tree says nothing of which GPU is near which."""
    for number, node in around.nodes.items():
        snapshot = node.snapshot
        nics = [nic for nic in node.nics if nic.rdma]
        has_file = any(facts.topology_file is not None for facts in around.ranks_of(number))
        if not snapshot.machine.virtual_machine or has_file:
            continue
        if {node.path(gpu, nic) for gpu in node.gpus for nic in nics} == {"PHB"}:
            seen = f"all {len(node.gpus)} GPUs and {len(nics)} RDMA NICs hang on one host bridge"
            yield of_node(around, number, seen, Confidence.LIKELY)


MACHINE = Family(
    "machine",
    "The machine",
    (
        Cause(
            id="wsl",
            title="WSL2 (Windows): no P2P between GPUs, no CUDA IPC; NCCL uses SHM",
            effects=(Effect.STAGED,),
            detection="/proc/version names Microsoft, or /dev/dxg is there",
            settles="uname -r",
            cure="nothing to repair under WSL: boot Linux itself for P2P",
            link="https://github.com/NVIDIA/TensorRT-LLM/pull/17034",
            look=_wsl,
            implies=("cuda-ipc-refused", "cuda-nvml-disagree", "peer-access-refused"),
            by_design=True,
        ),
        Cause(
            id="vm-flat-topology",
            title="A virtual machine hides the PCIe topology: all GPUs and NICs are PHB, NUMA node -1",
            effects=(Effect.NO_GPUDIRECT, Effect.SLOW),
            detection="a virtual machine whose GPUs and RDMA NICs all hang on one host bridge, without NCCL_TOPO_FILE",
            settles="nvidia-smi topo -m; NCCL_TOPO_DUMP_FILE=/tmp/topo.xml gpubench allreduce",
            cure="NCCL_TOPO_FILE=the provider's file (Azure: /opt/microsoft/*.xml; AWS: aws-ofi-nccl brings it)",
            link="https://github.com/NVIDIA/nccl-tests/issues/86",
            look=_flat,
            implies=("gpudirect-too-far",),
        ),
        Cause(
            id="topology-file-wrong",
            title="NCCL_TOPO_FILE is of another machine, or cannot be read",
            effects=(Effect.SLOW, Effect.NO_GPUDIRECT),
            detection="bus ids in the file against those of the node's GPUs and NICs",
            settles="gpubench topo --from FILE beside gpubench topo",
            cure="unset NCCL_TOPO_FILE, or take the file made for this machine type",
            link="https://github.com/NVIDIA/nccl/issues/749",
            look=_topology_file,
        ),
        Cause(
            id="gpu-throttled",
            title="GPU clocks are throttled (HW Slowdown, SW Thermal Slowdown, Power Brake)",
            seen_as=("HW Slowdown : Active", "SW Thermal Slowdown : Active", "HW Power Brake Slowdown : Active"),
            effects=(Effect.SLOW,),
            detection="nvmlDeviceGetCurrentClocksEventReasons, without idling and power caps",
            settles="nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
            cure="cooling, or the power supply whose brake signal is on",
            link="https://github.com/NVIDIA/NVSentinel/issues/890",
            look=_throttled,
        ),
        Cause(
            id="memory-rows-pending",
            title="Row remapping pending or failed (uncorrectable ECC errors)",
            seen_as=("Remapping Failure Occurred : Yes", "Pending : Yes", "Xid 63", "Xid 64"),
            effects=(Effect.SLOW,),
            detection="nvmlDeviceGetRemappedRows",
            settles="nvidia-smi -q -d ROW_REMAPPER",
            cure="nvidia-smi --gpu-reset -i GPU, or reboot; have a GPU replaced whose remapping failed",
            link="https://github.com/NVIDIA/DCGM/issues/198",
            look=_memory_rows,
        ),
        Cause(
            id="numa-far",
            title="A rank is bound to CPUs far from its GPU (NUMA): slow host copies and launches",
            effects=(Effect.SLOW,),
            detection="sched_getaffinity of every rank against the CPUs of its GPU's NUMA node; of p2p in one process "
            "against those of every GPU",
            settles="gpubench p2p --pairs 0-1 under numactl --cpunodebind of either node: host memory to GPU",
            cure="mpirun --bind-to numa --map-by numa, or srun --cpu-bind with the GPU's CPUs",
            link="https://github.com/NVIDIA/nccl/issues/1674",
            look=_numa,
        ),
    ),
)
