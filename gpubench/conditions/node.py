"""Problems of a whole node: its driver, what hides GPUs or binds processes, and differences between nodes or
between ranks.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from gpubench.conditions.circumstances import Circumstances, Found, Sighting, joined
from gpubench.conditions.condition import Condition, Family, node_detector, rdma_nics, single_node, unread
from gpubench.conditions.logged import Complained
from gpubench.errors import LOAD_DRIVER
from gpubench.model.facts.process import ENVIRONMENT, RankFacts
from gpubench.model.facts.snapshot import WAITED_FOR_CPU, ProbeFailure, Snapshot
from gpubench.model.paths.nodes import Difference, describe_differences
from gpubench.model.paths.topology import Topology
from gpubench.model.paths.transport import Confidence
from gpubench.model.terms.ranks import DevicePlace
from gpubench.model.terms.units import compress_names, format_ranges, group_by, plural
from gpubench.model.terms.verdict import NO_CURE, Cure, Verdict

_NOT_READY = "CUDA_ERROR_SYSTEM_NOT_READY"
_KERNEL_LOG = "dmesg | grep -i -E 'NVRM|Xid'"

_BROKEN: Mapping[str, tuple[str, Cure]] = {
    "sysfs": ("/sys or /proc is not mounted, or a bug in gpubench", Cure.of("ls /sys/bus/pci/devices /proc/driver")),
    "nvml": ("libnvidia-ml crashed, belongs to another driver, or may not open /dev/nvidia*", NO_CURE),
    "cuda": (
        "libcuda crashed, belongs to another driver, or is missing (NVIDIA_DRIVER_CAPABILITIES=utility hides it)",
        Cure.of("ldconfig -p | grep libcuda", _KERNEL_LOG, comment="The second command shows the kernel log."),
    ),
}
"""By source of facts: the likely reason why it failed, and the cure."""

_OUT_OF_REACH = "a container without GPUs, or a user who may not open /dev/nvidia*"
_REACHED_AGAIN = Cure.of("ls -l /dev/nvidia*", comment="Start a container with `docker run --gpus all`.")


def _missing(node: Topology) -> str:
    """Describe the missing driver. Return an empty text if it is loaded but this process cannot reach it."""
    driver = node.snapshot.driver
    if not node.gpus or driver.absent is None or driver.version is not None:
        return ""
    return f"{plural(len(node.gpus), 'NVIDIA GPU')} on the PCI bus, but {driver.absent}"


def _out_of_reach(run: Circumstances) -> Found:
    for number, node in run.nodes.items():
        driver = node.snapshot.driver
        if node.gpus and driver.absent is not None and driver.version is not None:
            sighting = run.node_sighting(number, f"driver {driver.version} is loaded, but {driver.absent}")
            yield replace(sighting, likely=_OUT_OF_REACH, cure=_REACHED_AGAIN)


def _completed(node: Topology) -> str:
    completed = node.snapshot.completed
    return (
        f"no complete row for {completed}; the missing values come from the other rows, as far as these have them"
        if completed
        else ""
    )


def _failures(run: Circumstances, holds: Callable[[ProbeFailure, Snapshot], bool], lead: str = "") -> Found:
    for number, node in run.nodes.items():
        for failure in node.snapshot.failures:
            if holds(failure, node.snapshot):
                likely, cure = _BROKEN.get(failure.stage, ("a bug in gpubench", NO_CURE))
                if failure.error.endswith(WAITED_FOR_CPU):
                    likely, cure = "programs that use all CPUs of the node", Cure.of("uptime")
                names = (f"{run.names_with_ids(number)}, {failure.stage}",)
                sighting = run.node_sighting(number, f"{lead}{failure.error}", names=names)
                known = failure.timed_out or bool(lead)
                yield sighting if known else replace(sighting, likely=likely, cure=cure)


def _refuses(failure: ProbeFailure, snapshot: Snapshot) -> bool:
    """True if the driver responds but CUDA does not start. This is a problem of the machine, not a failed reading."""
    answers = not any(failure.stage == "nvml" for failure in snapshot.failures)
    return not failure.timed_out and _NOT_READY in failure.error and answers


def _broken(run: Circumstances) -> Found:
    yield from _failures(run, lambda failure, snapshot: not failure.timed_out and not _refuses(failure, snapshot))
    yield from _out_of_reach(run)


_XID = "https://docs.nvidia.com/deploy/xid-errors/index.html"

DRIVER = Family.of(
    "driver",
    "The driver",
    Condition(
        id="driver-silent",
        title="nvidia-smi hangs: the NVIDIA driver does not answer",
        check="driver",
        expected="an answer within the time-out",
        likely="a GPU fell off the bus, or the driver hangs in the kernel",
        command=_KERNEL_LOG,
        comment="Running nvidia-smi may hang the same way.",
        link=_XID,
        look=lambda run: _failures(run, lambda failure, _: failure.timed_out),
        implies=("not-measured",),
    ),
    Condition(
        id="cuda-refuses",
        title="CUDA error 802: system not yet initialized, although nvidia-smi works",
        check="driver",
        expected="CUDA on every GPU that NVML lists",
        likely="the fabric manager is not running, or its version differs from the driver's",
        command="systemctl status nvidia-fabricmanager",
        comment=f"Then look at the kernel log with `{_KERNEL_LOG}`.",
        link="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html",
        look=lambda run: _failures(run, _refuses, "NVML works, but CUDA does not start: "),
        in_job=Complained(r"system not yet initialized|(?:error|failure) 802\b"),
    ),
    Condition(
        id="probe-failed",
        title="NVML, CUDA or /sys cannot be read (the library crashed, or belongs to another driver version)",
        check="driver",
        expected="readable facts",
        command="nvidia-smi",
        comment=f"Then look at the kernel log with `{_KERNEL_LOG}`.",
        link="https://github.com/mozilla/translations/issues/1167",
        look=_broken,
    ),
    Condition(
        id="driver-missing",
        title="NVIDIA GPUs are on the PCI bus but no driver is loaded (NVIDIA-SMI has failed)",
        check="driver",
        expected="the NVIDIA driver, loaded",
        likely="the driver is not installed, its module failed to load, or a container was started without GPUs",
        command=LOAD_DRIVER,
        comment="Start a container with `docker run --gpus all`.",
        link="https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/index.html",
        look=node_detector(_missing),
        implies=("not-measured",),
    ),
    Condition(
        id="topology-text-cut",
        title="Rows are missing from the text of nvidia-smi topo -m",
        check="driver",
        expected="one row per device in the header",
        likely="a text that was truncated when it was copied (for NICs, only the paths to GPUs are known)",
        command="nvidia-smi topo -m > topo.txt",
        link="https://docs.nvidia.com/deploy/nvidia-smi/index.html",
        look=node_detector(_completed),
    ),
)

_MOST_CPUS = 65_536


def cpus_in(ranges: str) -> set[int] | None:
    """Parse CPU ranges such as '0-31,64'. Return None for other texts and for CPU numbers above the supported
    maximum.
    """
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
    """Find processes that may run only on CPUs far from their GPU. If a process copies data of several GPUs, check
    each GPU.
    """
    for facts in run.facts:
        node = run.nodes.get(facts.node)
        own = cpus_in(facts.affinity or "")
        gpus = run.rank_gpus(facts)
        makes_copies = not run.uses_nccl
        if node is None or own is None or not (len(gpus) == 1 or makes_copies):
            if node is not None:
                yield from unread(run.subject(facts.node, f"rank {facts.rank}"), facts.unknown, "affinity")
            continue
        for position in sorted(gpus):
            gpu = run.wiring.gpu(position)
            near = None if gpu is None else _near(node, gpu.place.numa_node)
            if near and own.isdisjoint(near):
                seen = f"bound to CPUs {facts.affinity}, but its GPU is on NUMA node {gpu and gpu.place.numa_node}"
                # From far CPUs, launches are slightly slower, and copies to and from host memory are clearly slower.
                yield run.gpu_sighting(position, seen, Confidence.PROVEN if makes_copies else Confidence.LIKELY)


def _near(node: Topology, numa_node: int | None) -> set[int] | None:
    memory = {domain.number: domain.cpus for domain in node.snapshot.machine.numa_nodes}
    return cpus_in(memory[numa_node]) if numa_node in memory else None


def _topology_file(run: Circumstances) -> Found:
    seen: set[tuple[int, str]] = set()
    for facts in run.facts:
        file, node = facts.topology_file, run.nodes.get(facts.node)
        if file is None or node is None or (facts.node, file.path) in seen:
            continue
        seen.add((facts.node, file.path))
        there = {gpu.bus_id for gpu in node.gpus} | {nic.bus_id for nic in node.nics}
        missing = sorted(bus_id for bus_id in {gpu.bus_id for gpu in node.gpus} if bus_id and bus_id not in file.links)
        if file.unusable:
            yield run.node_sighting(facts.node, f"{file.path} ({file.by}): {file.unusable}", Confidence.LIKELY)
        elif file.links and missing and there.isdisjoint(file.links):
            missed = f"{file.path} ({file.by}) has none of this machine's devices: {joined(missing)}"
            yield run.node_sighting(facts.node, missed)


def _flat(run: Circumstances) -> Found:
    """Find virtual machines whose PCI tree does not show which RDMA NIC is near which GPU."""
    for number, node in run.nodes.items():
        snapshot = node.snapshot
        nics = [nic for nic in node.nics if nic.rdma]
        has_file = any(facts.topology_file is not None for facts in run.node_ranks(number))
        if not snapshot.machine.virtual_machine or has_file:
            continue
        if {node.path(gpu, nic) for gpu in node.gpus for nic in nics} == {"PHB"}:
            seen = f"all {len(node.gpus)} GPUs and {len(nics)} RDMA NICs are on one host bridge"
            yield run.node_sighting(number, seen, Confidence.LIKELY)


def _node_differs(run: Circumstances) -> Found:
    sizes = {kind.name: len(kind.alike) for kind in run.kinds}
    for kind in run.kinds:
        if kind.differs_from is not None and kind.rivals:
            yield _undecided(run, kind.rivals, kind.alike, kind.differs)
        elif kind.differs_from is not None:
            others = f"the same as the {sizes[kind.differs_from]} nodes of kind {kind.differs_from}"
            yield run.nodes_sighting(
                kind.alike,
                "; ".join(describe_differences(kind.differs)),
                heading=f"kind {kind.name}: {_hosts(run, kind.alike)}",
                expected=f"{others}, which have the same GPUs",
            )
        count = len(kind.alike)
        usual = f"the same as {count} other nodes of kind {kind.name}" if count > 1 else "the same as the other node"
        for number, differs in kind.odd.items():
            snapshot = run.nodes[number].snapshot
            if snapshot.failures or snapshot.driver.absent:
                continue  # Failed readings and a missing driver are reported as such, not as differences
            if kind.differs_from is None and number in kind.rivals:
                yield _undecided(run, kind.alike, (number,), differs)
            else:
                yield run.node_sighting(number, "; ".join(describe_differences(differs)), expected=usual)


def _undecided(
    run: Circumstances, some: Sequence[int], others: Sequence[int], differs: Sequence[Difference]
) -> Sighting:
    """Return a sighting for two groups of nodes of equal size, so that neither is the usual one.

    `differs` describes how the second group differs from the first.
    """
    differences = "; ".join(describe_differences(differs, others=f"on {_hosts(run, some)}"))
    return run.nodes_sighting(
        (*some, *others),
        f"on {_hosts(run, others)} {differences}",
        heading=_hosts(run, (*some, *others)),
        expected="equal nodes (the facts do not show which of them is right)",
    )


def _hosts(run: Circumstances, numbers: Sequence[int]) -> str:
    return compress_names([run.nodes[number].snapshot.host for number in numbers])


@single_node
def _network_down(run: Circumstances) -> Found:
    job_has_a_network = any(nic.state == "active" for node in run.nodes.values() for nic in node.nics)
    severity = Verdict.FAIL if job_has_a_network else Verdict.SKIP if len(run.nodes) == 1 else None
    for number, node in run.nodes.items():
        if node.nics and not rdma_nics(node) and all(nic.state == "down" for nic in node.nics):
            names = tuple(run.names_with_ids(number, nic) for nic in node.nics)
            places = run.places(number, *node.nics)
            yield run.node_sighting(
                number, "every network interface is down", names=names, severity=severity, places=places
            )


def _settings_differ(run: Circumstances) -> Found:
    """Find hosts with ranks whose value of an NCCL setting is not the most frequent one.

    Settings come from the environment and NCCL's configuration files. In a tie, unset is the usual value.
    """
    settings = [(rank, rank.nccl_settings) for rank in run.facts]
    for name in sorted({name for _, known in settings for name in known}):
        values: dict[str | None, list[RankFacts]] = {}
        files: dict[str, None] = {}
        for rank, known in settings:
            value = known[name].value if name in known else None
            values.setdefault(value, []).append(rank)
            files |= {known[name].place: None} if name in known and known[name].place != ENVIRONMENT else {}
        if len(values) > 1:
            usual = max(values, key=lambda value: (len(values[value]), value is None))
            shown = [f"{value or 'unset'} on {joined(_ranks_on(who))}" for value, who in values.items()]
            shown += [f"in {joined(files)}"] if files else []
            odd = dict.fromkeys(rank.host for value, who in values.items() if value != usual for rank in who)
            cure = Cure(comment=f"Export {name} to all ranks, with `mpirun -x {name}` or `srun --export=ALL`.")
            if files:
                cure = Cure.of(
                    f"grep -n {name} {' '.join(files)}", comment="Run it on every node. Make the files alike."
                )
            places = tuple(map(DevicePlace, odd))
            yield Sighting(
                subject=name, heading=name, names=tuple(odd), places=places, seen="; ".join(shown), cure=cure
            )


def _ranks_on(ranks: Sequence[RankFacts]) -> Iterator[str]:
    """Yield the ranks on each host, such as 'ranks 8-15 on node1'."""
    for host, own in group_by(ranks, lambda rank: rank.host).items():
        numbers = format_ranges(rank.rank for rank in own)
        yield f"rank{'s' if len(own) > 1 else ''} {numbers} on {host}"


def _driver_differs(run: Circumstances) -> Found:
    drivers = {node.snapshot.host: node.snapshot.driver.version for node in run.nodes.values()}
    for host, version, usual in _odd({host: driver for host, driver in drivers.items() if driver}):
        expected = f"driver {usual}, as on the other nodes"
        yield Sighting(subject=host, places=(DevicePlace(host),), seen=f"driver {version}", expected=expected)


def _library_differs(run: Circumstances) -> Found:
    """Find ranks that load a different copy of a library. The driver's own libraries are compared by driver version
    instead.
    """
    for name in sorted({name for rank in run.facts for name in rank.libraries} - {"cuda_driver", "nvml"}):
        having = {f"rank {rank.rank} on {rank.host}": rank for rank in run.facts if name in rank.libraries}
        for where, file, usual in _odd({where: rank.libraries[name] for where, rank in having.items()}):
            seen, expected = f"{name} is {file}", f"{usual}, as on the other ranks"
            yield Sighting(subject=where, seen=seen, expected=expected, places=run.rank_places([having[where]]))


def _odd(found: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    tally = Counter(found.values())
    usual = max(tally, key=lambda version: (tally[version], _numbers(version)), default="")
    yield from ((where, version, usual) for where, version in found.items() if version != usual)


_MOST_DIGITS = 18  # Maximum digits of a number in a version, since Python refuses to parse thousands of digits


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal() and len(part) <= _MOST_DIGITS)


_COMPARE = "commands/check.md"


_differs = partial(
    Condition,
    check="versions",
    likely="an update of some nodes only, or a different image, module or LD_LIBRARY_PATH",
    command=("nvidia-smi --version", "ldconfig -p | grep nccl"),
    comment="Run it on both nodes and compare.",
    link=_COMPARE,
)


NODE = Family.of(
    "node",
    "Nodes and processes",
    Condition(
        id="wsl",
        title="WSL2 (Windows): no P2P between GPUs, no CUDA IPC; NCCL uses SHM",
        settles="uname -r",
        comment="Nothing to repair under WSL. For P2P, boot Linux on the machine itself.",
        link="https://github.com/NVIDIA/TensorRT-LLM/pull/17034",
        look=node_detector(
            lambda node: "a Microsoft kernel, or /dev/dxg exists" if node.snapshot.kernel.wsl else "", unknown="wsl"
        ),
        implies=("cuda-ipc-refused", "cuda-nvml-disagree", "peer-access-refused"),
        by_design=True,
    ),
    Condition(
        id="vm-flat-topology",
        title="A virtual machine hides the PCIe topology: all GPUs and NICs are PHB, NUMA node -1",
        settles="`nvidia-smi topo -m`, or `NCCL_TOPO_DUMP_FILE=/tmp/topo.xml gpubench allreduce`",
        command="ls /opt/microsoft/*.xml",
        comment="Set NCCL_TOPO_FILE to the cloud provider's file (the command lists Azure's; on AWS, "
        "aws-ofi-nccl includes it).",
        link="https://github.com/NVIDIA/nccl-tests/issues/86",
        look=_flat,
        implies=("gpudirect-too-far",),
    ),
    Condition(
        id="topology-file-wrong",
        title="NCCL_TOPO_FILE describes a different machine, or cannot be read",
        settles="compare `gpubench topo --from FILE` with `gpubench topo`",
        command="unset NCCL_TOPO_FILE",
        comment="Or use the file for this machine type.",
        link="https://github.com/NVIDIA/nccl/issues/749",
        look=_topology_file,
    ),
    Condition(
        id="numa-far",
        title="A rank is bound to CPUs far from its GPU (NUMA): slow host copies and launches",
        settles="run `gpubench p2p --pairs 0-1` under `numactl --cpunodebind` on each NUMA node, and compare "
        "copies from host memory",
        comment="Start the job with `mpirun --bind-to numa --map-by numa`. With Slurm, use `srun "
        "--cpu-bind` with the GPU's CPUs.",
        link="https://github.com/NVIDIA/nccl/issues/1674",
        look=_numa,
    ),
    Condition(
        id="node-differs",
        title="A node differs from the others of its kind",
        check="nodes_alike",
        likely="a fault, or a different image, firmware or setting",
        command="gpubench topo",
        comment="Run it on this node alone.",
        link=_COMPARE,
        look=_node_differs,
    ),
    Condition(
        id="network-down",
        title="Every network interface of a node is down",
        check="nic_state",
        expected="an interface that is up",
        likely="a faulty cable, switch port or driver (normal on a standalone machine)",
        command="ip link",
        link=_COMPARE,
        look=_network_down,
    ),
    Condition(
        id="settings-differ",
        title="NCCL_ variables are not the same on all ranks",
        check="ranks_alike",
        expected="the same value on every rank",
        likely="the launcher does not pass the variable on, or a host's shell profile sets it",
        comment="Export the variable to all ranks, with `mpirun -x` or `srun --export=ALL`.",
        link="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
        look=_settings_differ,
    ),
    _differs(
        id="driver-differs",
        title="Nodes have different versions of the NVIDIA driver",
        link="https://github.com/hiyouga/LlamaFactory/issues/6111",
        look=_driver_differs,
    ),
    _differs(
        id="library-differs",
        title="Ranks load different files of a library (NCCL, MPI, UCX)",
        link="https://github.com/NVIDIA/nccl/issues/1634",
        look=_library_differs,
    ),
)
