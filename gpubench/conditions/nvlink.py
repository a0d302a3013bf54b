"""NVLinks inside a node that are down, limited or without their fabric."""

from collections import Counter
from collections.abc import Iterator

from gpubench.conditions.cause import Cause, Family, Sighting, Unread, joined
from gpubench.conditions.circumstances import Circumstances
from gpubench.conditions.log_evidence import Reason, Staged
from gpubench.conditions.sightings import of_gpu, of_node, of_pairs, sureness
from gpubench.model.facts.error_counts import nvlink_errors
from gpubench.model.facts.fabric_health import decode_health, describe_health
from gpubench.model.facts.snapshot import GpuFacts, NvlinkPeer
from gpubench.model.paths.evidence import Confidence
from gpubench.model.paths.links import active_links
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.topology import Topology
from gpubench.model.results.rows.causes import Effect

_REFUSED, _NOT_READY, _DOWN = "peer-access-refused", "fabric-not-ready", "nvlink-down"

_FABRIC_MANAGER, _IMEX = "nv-fabricmanager", "nvidia-imex"

_MODES = ("min", "half", "3quarter")


def _disabled(around: Circumstances) -> Iterator[Sighting | Unread]:
    for number, node in around.nodes.items():
        settings = node.snapshot.driver_settings
        parameter = (settings.parameters or {}).get("NvLinkDisable")
        if parameter not in (None, "", "0"):
            yield of_node(around, number, f"NvLinkDisable: {parameter} in the driver's parameters", Confidence.PROVEN)
        elif settings.nvlink_bandwidth_mode == "off":
            yield of_node(around, number, "NVML says that the NVLink bandwidth mode is off", Confidence.PROVEN)
        elif "parameters" in settings.unknown:
            yield Unread(around.on(number), settings.unknown["parameters"])


def _limited(around: Circumstances) -> Iterator[Sighting | Unread]:
    for number, node in around.nodes.items():
        settings = node.snapshot.driver_settings
        if settings.nvlink_bandwidth_mode in _MODES:
            seen = f"the NVLink bandwidth mode is {settings.nvlink_bandwidth_mode}"
            yield of_node(around, number, seen, Confidence.PROVEN)
        elif settings.nvlink_bandwidth_reduced:
            seen = f"{joined(settings.nvlink_bandwidth_reduced)} below the best NVLink bandwidth mode"
            yield of_node(around, number, seen, Confidence.PROVEN)
        elif settings.nvlink_bandwidth_mode is None and "nvlink_bandwidth_mode" in settings.unknown:
            yield Unread(around.on(number), settings.unknown["nvlink_bandwidth_mode"])


def _is_switched(node: Topology, gpu: GpuFacts) -> bool:
    return bool(node.snapshot.nvswitches) or any(link.peer is NvlinkPeer.SWITCH for link in gpu.nvlinks or ())


def _fabric_trouble(gpu: GpuFacts) -> str:
    """What is not ready in a GPU's registration with its fabric; empty where all is, or nothing is known."""
    if gpu.fabric is None or gpu.fabric.state in (None, "not_supported"):
        return ""
    if gpu.fabric.state != "completed":
        return f"fabric state {str(gpu.fabric.state).replace('_', ' ')}"
    return "" if gpu.fabric.status in (None, "success") else f"fabric status {gpu.fabric.status}"


def _not_ready(around: Circumstances) -> Iterator[Sighting | Unread]:
    troubled = set[int]()
    for position, _, gpu in around.gpus():
        trouble = _fabric_trouble(gpu)
        if trouble:
            troubled.add(position)
            yield of_gpu(around, position, trouble, Confidence.PROVEN)
    refused = _wired_and_refused(around)
    pairs = frozenset(pair for pair in refused if troubled.isdisjoint(pair))
    if pairs:
        yield of_pairs(
            around,
            pairs,
            "NVLinks to NVSwitches are active, yet the driver refuses peer access: "
            + joined([around.wiring.peer_access(pair).reason for pair in sorted(pairs)]),
            Confidence.LIKELY,
        )


def _wired_and_refused(around: Circumstances) -> list[tuple[int, int]]:
    """Pairs that NVSwitches join and the driver refuses although no key and no instance explains it."""
    return [
        pair
        for pair, refusal in around.refusals.items()
        if refusal.wired
        and not refusal.mig
        and refusal.status not in ("", "OK", "DR")
        and all(known is not None and _leads_to_switch(known) for known in map(around.wiring.gpu, pair))
    ]


def _leads_to_switch(gpu: GpuFacts) -> bool:
    return any(link.active and link.peer is NvlinkPeer.SWITCH for link in gpu.nvlinks or ())


def _manager(around: Circumstances, *, stopped: bool) -> Iterator[Sighting | Unread]:
    """The fabric manager, of nodes whose fabric is not ready: with it ready, nobody misses the program."""
    refused = {around.wiring.gpus[gpu].node for pair in _wired_and_refused(around) for gpu in pair}
    for number, node in around.nodes.items():
        waiting = any(_fabric_trouble(gpu) for gpu in node.gpus) or number in refused
        if not waiting or not any(_is_switched(node, gpu) for gpu in node.gpus):
            continue
        settings = node.snapshot.driver_settings
        service = settings.services.get(_FABRIC_MANAGER)
        driver = node.snapshot.driver.version
        if service is None or service.running is None:
            reason = settings.unknown.get(f"services.{_FABRIC_MANAGER}.running")
            yield from [Unread(around.on(number), reason)] if reason else []
        elif stopped and service.running is False:
            yield of_node(around, number, "nv-fabricmanager does not run", Confidence.PROVEN)
        elif not stopped and service.running and service.version and driver and service.version != driver:
            seen = f"the fabric manager is {service.version}, the driver {driver}"
            yield of_node(around, number, seen, Confidence.PROVEN)


def _stopped(around: Circumstances) -> Iterator[Sighting | Unread]:
    return _manager(around, stopped=True)


def _other_version(around: Circumstances) -> Iterator[Sighting | Unread]:
    return _manager(around, stopped=False)


def _unhealthy(around: Circumstances) -> Iterator[Sighting | Unread]:
    for position, _, gpu in around.gpus():
        mask = gpu.fabric.health_mask if gpu.fabric is not None else None
        if mask is not None and any(decode_health(mask).values()):
            yield of_gpu(around, position, f"fabric health: {describe_health(mask)}", Confidence.PROVEN)


def _down(around: Circumstances) -> Iterator[Sighting | Unread]:
    """Fewer active links than most GPUs of the model on the node; GPUs on bridges may just have none."""
    for position, node, gpu in around.gpus():
        active, usual = active_links(gpu), _usual(node, gpu.name)
        bridged = any(link.peer is NvlinkPeer.GPU for each in node.gpus for link in each.nvlinks or ())
        if active is not None and active < usual and (active or not bridged):
            down = joined([str(link.number) for link in gpu.nvlinks or () if link.active is False])
            seen = f"{active} of {usual} NVLinks active" + (f"; down: {down}" if down else "")
            yield of_gpu(around, position, seen, Confidence.PROVEN)


def _all_down(around: Circumstances) -> Iterator[Sighting | Unread]:
    for position, node, gpu in around.gpus():
        if gpu.nvlinks and active_links(gpu) == 0 and _is_switched(node, gpu):
            yield of_gpu(around, position, f"none of {len(gpu.nvlinks)} NVLinks active", Confidence.PROVEN)


def _usual(node: Topology, model: str | None) -> int:
    """The most frequent count of active links; between equally frequent ones the larger."""
    tally = Counter(active_links(gpu) or 0 for gpu in node.gpus if gpu.name == model)
    return max(tally, key=lambda count: (tally[count], count))


def _errors(around: Circumstances) -> Iterator[Sighting | Unread]:
    found = {
        (number, errors.device): errors
        for number, node in around.nodes.items()
        for errors in nvlink_errors(node.snapshot)
    }
    for position, _, gpu in around.gpus():
        errors = found.get((around.wiring.gpus[position].node, gpu.device))
        if errors is not None:
            yield of_gpu(around, position, errors.seen, sureness(errors))


def _log_nvlink_refused(staged: Staged) -> Reason | None:
    refused = staged.found(RemarkKind.NVLINK_REFUSED)
    if not staged.inside or staged.network is not None or not refused:
        return None
    advice = "NVLinks without peer access are a fault: is the fabric manager running? gpubench topo"
    return f"NCCL says: {refused[0].gist}", advice


_DSTACK = "https://github.com/Dstack-TEE/dstack/pull/1167"

_AZURE = "https://github.com/Azure/azhpc-images/pull/506"

_FOLLOWS = (_NOT_READY, "cuda-nvml-disagree", "bar1-small", _REFUSED)


NVLINK = Family(
    "nvlink",
    "NVLink and its fabric",
    (
        Cause(
            id="nvlink-disabled",
            title="NVLink is switched off by a driver setting (NVreg_NvLinkDisable=1, NVreg_RmNvlinkBandwidth=OFF)",
            effects=(Effect.STAGED, Effect.SLOW),
            detection="/proc/driver/nvidia/params; nvmlSystemGetNvlinkBwMode",
            settles="grep -i nvlink /proc/driver/nvidia/params /etc/modprobe.d/*",
            cure="take the setting out of /etc/modprobe.d and reboot",
            link="https://github.com/NVIDIA/open-gpu-kernel-modules",
            look=_disabled,
            implies=("nvlinks-all-down", _DOWN, *_FOLLOWS),
        ),
        Cause(
            id="fabric-manager-stopped",
            title="NVSwitch without a running fabric manager: links are active, P2P refused, CUDA error 802",
            seen_as=(
                "CUDA error 802: system not yet initialized",
                "cudaErrorSystemNotReady",
                "Fabric State : In Progress",
            ),
            effects=(Effect.STAGED,),
            detection="no process nv-fabricmanager on a host with NVSwitches whose GPUs' fabric is not ready",
            settles="systemctl status nvidia-fabricmanager",
            cure="systemctl enable --now nvidia-fabricmanager, of the driver's version",
            link=_DSTACK,
            look=_stopped,
            implies=_FOLLOWS,
        ),
        Cause(
            id="fabric-manager-version",
            title="Fabric manager version does not match the NVIDIA driver version",
            effects=(Effect.STAGED,),
            detection="the version in its log against the driver's, where the GPUs' fabric is not ready",
            settles="nv-fabricmanager --version; nvidia-smi",
            cure="install nvidia-fabricmanager of the driver's version, then restart it",
            link=_DSTACK,
            look=_other_version,
            implies=_FOLLOWS,
        ),
        Cause(
            id=_NOT_READY,
            title="The NVLink fabric is not ready: fabric state is not Completed, P2P over NVLink refused (NS)",
            effects=(Effect.STAGED,),
            detection="nvmlDeviceGetGpuFabricInfo; or the driver's refusal between GPUs whose links to NVSwitches are "
            "active; `P2P is disabled between NVLINK connected GPUs` in NCCL's log",
            settles="nvidia-smi -q | grep -A 12 Fabric",
            cure="systemctl status nvidia-fabricmanager; systemctl restart nvidia-fabricmanager",
            link=_AZURE,
            look=_not_ready,
            in_log=_log_nvlink_refused,
            implies=_FOLLOWS[1:],
        ),
        Cause(
            id="nvlinks-all-down",
            title="All NVLinks of a GPU are inactive on a board with NVSwitches",
            effects=(Effect.STAGED, Effect.SLOW),
            detection="no active link of a GPU that has some, beside NVSwitches",
            settles="nvidia-smi nvlink -s; grep -i nvlink /proc/driver/nvidia/params; dmesg | grep 'Xid.*74'",
            cure="systemctl restart nvidia-fabricmanager, then nvidia-smi --gpu-reset; else have the board looked at",
            link="https://github.com/NVIDIA/DCGM/issues/198",
            look=_all_down,
            implies=(_DOWN, *_FOLLOWS),
        ),
        Cause(
            id=_DOWN,
            title="NVLinks are down or inactive on a GPU (nvidia-smi nvlink -s, Xid 74)",
            seen_as=("Link 4: <inactive>", "Xid 74"),
            effects=(Effect.SLOW,),
            detection="active links of each GPU against those of its siblings",
            settles="nvidia-smi nvlink -s; nvidia-smi nvlink -e; dmesg | grep 'Xid.*74'",
            cure="nvidia-smi --gpu-reset -i GPU; if a link stays down, reseat the board or bridge, or have it replaced",
            link="https://github.com/NVIDIA/nccl/issues/2329",
            look=_down,
        ),
        Cause(
            id="nvlink-bandwidth-limited",
            title="NVLink bandwidth mode is reduced (NVreg_RmNvlinkBandwidth=MIN, HALF, 3QUARTER)",
            effects=(Effect.SLOW,),
            detection="nvmlSystemGetNvlinkBwMode, nvmlDeviceGetNvlinkBwMode",
            settles="grep -i nvlink /etc/modprobe.d/*",
            cure="take NVreg_RmNvlinkBandwidth out of /etc/modprobe.d and reboot",
            link="https://github.com/NVIDIA/open-gpu-kernel-modules",
            look=_limited,
            implies=(_DOWN,),
        ),
        Cause(
            id="fabric-unhealthy",
            title="The NVLink fabric reports degraded bandwidth or an unhealthy route (health mask)",
            effects=(Effect.SLOW,),
            detection="the two-bit fields of nvmlGpuFabricInfo's health mask: 0xaa is healthy",
            settles="nvidia-smi -q | grep -A 12 Fabric",
            cure="systemctl restart nvidia-fabricmanager; then replace what its log names",
            link="https://github.com/NVIDIA/nccl/issues/2186",
            look=_unhealthy,
            implies=(_DOWN,),
        ),
        Cause(
            id="nvlink-errors",
            title="NVLinks count replay, recovery or CRC errors",
            effects=(Effect.SLOW,),
            detection="the error counters of every link: what comes while p2p or check runs; weak where they were read "
            "once: totals far above those of siblings",
            settles="nvidia-smi nvlink -e, again after gpubench p2p: do they grow?",
            cure="reseat or replace the link whose counters grow",
            link="https://github.com/NVIDIA/DCGM/issues/198",
            look=_errors,
        ),
    ),
)
