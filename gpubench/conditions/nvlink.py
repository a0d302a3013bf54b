"""NVLinks inside a node that are down, slower than they could be, or without a working fabric."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain, permutations
from typing import Any

from gpubench.conditions.circumstances import Circumstances, Found, joined
from gpubench.conditions.condition import Condition, Family, error_severity, node_detector, single_node, unread
from gpubench.conditions.logged import doubted, remark_detector
from gpubench.conditions.profile import is_mesh_with_gaps
from gpubench.model.facts.health import decode_health, describe_health, nvlink_errors
from gpubench.model.facts.snapshot import GpuFacts, NvlinkPeer, is_amd
from gpubench.model.paths.nccl_log import RemarkKind
from gpubench.model.paths.topology import (
    NOT_SAID,
    XGMI,
    Topology,
    active_links,
    is_switched,
    lost_some_links,
    lost_switch_links,
)
from gpubench.model.paths.transport import Confidence, Pair
from gpubench.model.profiles.profile import Profile
from gpubench.model.results.report import Effect
from gpubench.model.terms.units import format_ranges, percent, plural
from gpubench.model.terms.verdict import Cure, Verdict

_REFUSED, _NOT_READY, _DOWN = "peer-access-refused", "fabric-not-ready", "nvlink-down"
_FABRIC_MANAGER = "nv-fabricmanager"


_MODES = ("min", "half", "3quarter")


def _limited(node: Topology) -> str:
    settings = node.snapshot.driver_settings
    if settings.nvlink_bandwidth_mode in _MODES:
        return f"NVLink bandwidth mode {settings.nvlink_bandwidth_mode}"
    reduced = joined(settings.nvlink_bandwidth_reduced or ())
    return f"reduced NVLink bandwidth mode on {reduced}" if reduced else ""


def _fabric_trouble(gpu: GpuFacts) -> str:
    """Describe why a GPU's NVLink fabric is not ready, by its state and status. Return an empty text if it is ready."""
    fabric = gpu.fabric
    if fabric is None or fabric.state in (None, "not_supported"):
        return ""
    state = "" if fabric.state == "completed" else f"fabric state {str(fabric.state).replace('_', ' ')}"
    status = "" if fabric.status in (None, "success") else f"fabric status {fabric.status}"
    return joined((state, status))


@single_node
def _not_ready(run: Circumstances) -> Found:
    """Find GPUs whose NVLink fabric is not ready according to NVML.

    Where NVML reports no ready fabric, refused peer access over active NVLinks to NVSwitches is evidence as well.
    """
    troubled = {position: trouble for position, _, gpu in run.gpus() if (trouble := _fabric_trouble(gpu))}
    for position, trouble in troubled.items():
        yield run.gpu_sighting(position, trouble)
    refused = _wired_and_refused(run)
    pairs = frozenset(pair for pair in refused if troubled.keys().isdisjoint(pair) and not _is_in_fabric(run, pair))
    if pairs:
        reasons = joined(run.wiring.peer_access(pair).reason for pair in sorted(pairs))
        seen = f"NVLinks to NVSwitches are active, but the driver refuses peer access: {reasons}"
        yield run.pair_sighting(pairs, seen, Confidence.LIKELY, quiet=True)


def _is_in_fabric(run: Circumstances, pair: Pair) -> bool:
    """True if NVML reports that both GPUs have joined their fabric."""
    fabrics = [None if gpu is None else gpu.fabric for gpu in map(run.wiring.gpu, pair)]
    return all(fabric is not None and fabric.state == "completed" for fabric in fabrics)


def _wired_and_refused(run: Circumstances) -> list[tuple[int, int]]:
    """Return pairs with active NVLinks to NVSwitches for which the driver refuses peer access.

    Pairs are left out if MIG or a driver registry key explains the refusal.
    """
    return [
        pair
        for pair, refusal in run.refusals.items()
        if refusal.wired
        and not refusal.mig
        and refusal.status not in ("", "OK", "DR")
        and all(
            gpu is not None and any(link.active and link.peer is NvlinkPeer.SWITCH for link in gpu.nvlinks or ())
            for gpu in map(run.wiring.gpu, pair)
        )
    ]


_MANAGER_NOT_NEEDED = {
    "confidence": Confidence.WEAK,
    "severity": Verdict.WARN,
    "likely": "the fabric manager stopped or was updated after it had set up the NVLink fabric",
}
"""Confidence, severity and likely reason if the fabric is up.

Then only the next reset or partition needs the fabric manager.
"""


def _manager(run: Circumstances, *, stopped: bool) -> Found:
    """Find fabric managers that are stopped, or whose version differs from the driver's.

    If the fabric is up, only the next reset or partition needs the manager. Then the severity is WARN, and only nodes
    with visible NVSwitches are reported.
    """
    refused = {run.wiring.gpus[gpu].node for pair in _wired_and_refused(run) for gpu in pair}
    for number, node in run.nodes.items():
        waiting = any(_fabric_trouble(gpu) for gpu in node.gpus) or number in refused
        if not (waiting or node.snapshot.nvswitches) or not any(is_switched(node, gpu) for gpu in node.gpus):
            continue
        settings = node.snapshot.driver_settings
        service = settings.services.get(_FABRIC_MANAGER)
        driver = node.snapshot.driver.version
        more: dict[str, Any] = {} if waiting else _MANAGER_NOT_NEEDED
        if (service is None or service.running is None) and waiting:
            yield from unread(run.subject(number), settings.unknown, f"services.{_FABRIC_MANAGER}.running")
        elif service is None:
            continue
        elif stopped and service.running is False:
            yield run.node_sighting(number, "nv-fabricmanager is not running", **more)
        elif not stopped and service.running and service.version and driver and service.version != driver:
            yield run.node_sighting(number, f"fabric manager {service.version}, driver {driver}", **more)


@single_node
def _unhealthy(run: Circumstances) -> Found:
    """Find faults in a GPU's fabric health mask, and NVSwitches that are missing from the PCI bus."""
    for position, _, gpu in run.gpus():
        mask = gpu.fabric.health_mask if gpu.fabric is not None and gpu.fabric.state != "not_supported" else None
        if mask is not None and any(decode_health(mask).values()):
            yield run.gpu_sighting(position, f"fabric health: {describe_health(mask)}")
    for number, node in run.nodes.items():
        profile, switches = run.exact_profile(number), set(node.snapshot.nvswitches)
        due = profile.nvlink.switches if profile is not None and profile.nvlink is not None else 0
        links = [link for gpu in node.gpus for link in gpu.nvlinks or () if link.peer is NvlinkPeer.SWITCH]
        gone = sorted({link.peer_bus_id for link in links if link.peer_bus_id} - switches) if switches else []
        if gone:
            seen = f"NVLinks lead to {plural(len(gone), 'NVSwitch')} that the PCI bus does not show: {joined(gone)}"
            yield run.node_sighting(number, seen.replace("NVSwitchs", "NVSwitches"))
        elif 0 < len(switches) < due and node.snapshot.machine.virtual_machine is False:
            seen, expected = (
                f"{len(switches)} NVSwitches on the PCI bus",
                f"{due}, as in profile {profile and profile.name}",
            )
            yield run.node_sighting(number, seen, Confidence.LIKELY, expected=expected, severity=Verdict.WARN)


@single_node
def _contradicted(run: Circumstances) -> Found:
    """Find NVLinks whose state NVML does not report, and contradictions about the NVLinks between two GPUs."""
    for position, _, gpu in run.gpus():
        states = {link.number: link.active for link in gpu.nvlinks or ()}
        unknown = [number for number, state in states.items() if state is None]
        if unknown and len(unknown) < len(states):
            numbers = f"link{'s' * (len(unknown) > 1)} {format_ranges(unknown)}"
            yield run.gpu_sighting(position, f"NVML reports no state for {numbers}, but does for the other NVLinks")
    denied: dict[str, list[tuple[int, int]]] = {}
    for pair in run.local_pairs:
        if denial := _denied(run, pair):
            denied.setdefault(denial, []).append(pair)
    for denial, pairs in denied.items():
        seen = f"NVML reports {denial}, but active NVLinks connect them"
        yield run.pair_sighting(pairs, seen, names=tuple(map(run.pair_with_ids, pairs)))
    for pair in run.local_pairs:
        if pair[0] < pair[1] and (seen := _differs_by_direction(run, pair)):
            yield run.pair_sighting([pair, (pair[1], pair[0])], seen)


def _differs_by_direction(run: Circumstances, pair: Pair) -> str:
    node, ends = run.pair_node(pair), [run.wiring.gpu(gpu) for gpu in pair]
    if ends[0] is None or ends[1] is None or not node.states_path(ends[0], ends[1]):
        return ""
    there, back = node.path(ends[0], ends[1]), node.path(ends[1], ends[0])
    return "" if there == back else f"nvidia-smi topo -m shows {there} in one direction, and {back} in the other"


def _denied(run: Circumstances, pair: tuple[int, int]) -> str:
    """Return what NVML reports as unsupported between two GPUs that have active NVLinks and peer access."""
    node, ends = run.pair_node(pair), [run.wiring.gpu(gpu) for gpu in pair]
    if ends[0] is None or ends[1] is None or not node.nvlinks(ends[0], ends[1]):
        return ""
    facts = node.pair_facts(ends[0], ends[1])
    known = {"NVLink": facts.nvlink, "atomics": facts.atomics}
    denied = [f"{status} for {what}" for what, status in known.items() if status not in (None, "OK", NOT_SAID)]
    return joined(denied) if node.peer_access(ends[0], ends[1]).possible else ""


@single_node
def _down(run: Circumstances) -> Found:
    """Find GPUs and pairs with fewer active NVLinks than their siblings.

    Siblings are GPUs of the same model on the node. The chip's number of links is no reference: an H100 NVL uses 12 of
    18. A GPU without active links, among siblings with bridges, may have been built without a bridge.
    """
    incomplete = {number for number, node in run.nodes.items() if is_mesh_with_gaps(node, run.profiles.get(number))}
    for position, node, gpu in run.gpus():
        if run.wiring.gpus[position].node in incomplete:
            continue  # Its inactive links lead to the missing GPU, which is reported instead
        active, usual = active_links(gpu), node.usual_active_links[gpu.name]
        due = min(usual, _least_links(run.exact_profile(run.wiring.gpus[position].node), usual))
        if active is None or active >= due or lost_switch_links(node, gpu):
            continue
        bridged = any(link.peer is NvlinkPeer.GPU for other in node.gpus for link in other.nvlinks or ())
        leads_here = any(link.peer_bus_id == gpu.bus_id for other in node.gpus for link in other.nvlinks or ())
        bare = active == 0 and bridged and not leads_here
        yield run.gpu_sighting(
            position,
            _seen(gpu, active),
            Confidence.WEAK if bare else Confidence.PROVEN,
            expected=f"{usual} active NVLinks, like its siblings",
            severity=Verdict.SKIP if bare else None,
            likely="this GPU has no NVLink bridge, or the bridge is not seated" if bare else "",
            effects=(Effect.SLOW,),
            # A link between two GPUs serves only that pair, and NVML does not show which pair lost how many links.
            expected_percent=None if bridged else percent(active, usual) or None,
        )
    yield from _pairs_without(run, incomplete)
    yield from _fewer_in_matrix(run)


def _least_links(profile: Profile | None, usual: int) -> int:
    """Return the minimum number of NVLinks that a healthy GPU may have.

    It is below `usual` if only a part of a board is visible, and pairs of the board have different numbers of links.
    """
    nvlink = None if profile is None else profile.nvlink
    if profile is None or nvlink is None or profile.match.visible == profile.match.board:
        return usual
    return nvlink.least_links(profile.match.visible, profile.match.board)


def _pairs_without(run: Circumstances, incomplete: Collection[int]) -> Found:
    for number, node in run.nodes.items():
        if number in incomplete:
            continue
        gpus = {position: gpu for position in sorted(run.node_gpus(number)) if (gpu := run.wiring.gpu(position))}
        lost = {position: gpu for position, gpu in gpus.items() if lost_some_links(node, gpu)}
        pairs = [pair for pair in permutations(lost, 2) if node.nvlinks(*(lost[gpu] for gpu in pair)) == 0]
        if pairs:
            yield run.pair_sighting(
                pairs,
                "no NVLink between them, and both have fewer NVLinks than their siblings",
                Confidence.LIKELY,
                names=tuple(map(run.pair_with_ids, pairs)),
                expected="an NVLink between them, if healthy machines of this kind have one",
            )


def _fewer_in_matrix(run: Circumstances) -> Found:
    """Find GPUs and pairs with fewer NVLinks in the topology matrix than their siblings.

    GPUs are skipped if a count of their active links already shows the loss.
    """
    for number, node in run.nodes.items():
        gpus = {gpu.device: position for position in run.node_gpus(number) if (gpu := run.wiring.gpu(position))}
        known = {
            gpu.device
            for gpu in node.gpus
            if gpu.device not in gpus
            or ((active := active_links(gpu)) is not None and active < node.usual_active_links[gpu.name])
        }
        lost = {pair: usual for pair, usual in node.lost_links.items() if known.isdisjoint(pair)}
        models = Counter(gpu.name for gpu in node.gpus)
        short = Counter(chain.from_iterable(lost))
        odd = {gpu.device for gpu in node.gpus if 0 < short[gpu.device] == models[gpu.name] - 1}
        for device in sorted(odd):
            own = {_pair(pair, gpus): usual for pair, usual in lost.items() if device in pair}
            yield run.gpu_sighting(
                gpus[device], f"{_paths(run, own)} to its siblings", Confidence.LIKELY, **_severity_words(run, own)
            )
        single = {_pair(pair, gpus): usual for pair, usual in lost.items() if odd.isdisjoint(pair)}
        for pair, usual in single.items():
            both = (pair, (pair[1], pair[0]))
            seen = f"{_paths(run, [pair])} between them"
            yield run.pair_sighting(both, seen, Confidence.LIKELY, **_severity_words(run, {pair: usual}))


def _severity_words(run: Circumstances, lost: Mapping[Pair, int]) -> dict[str, Any]:
    """Return severity, expected value and cure for pairs that lost NVLinks.

    If some links remain, the others are down. A pair without any link may have been built without one, so it is a WARN.
    """
    severity = None if any(map(run.wiring.has_nvlinks, lost)) else Verdict.WARN
    if any(is_amd(gpu.name) for gpu in map(run.wiring.gpu, chain(*lost)) if gpu is not None):
        return {
            "expected": f"{XGMI}, as between its siblings",
            "severity": severity,
            "likely": "an xGMI bridge or board that is not seated, or a failed link",
            "cure": Cure.of("amd-smi topology", comment="Its table of link types should show XGMI between siblings."),
            "effects": (Effect.SLOW,),
        }
    return {
        "expected": f"NV{max(lost.values())}, as between its siblings",
        "severity": severity,
        "cure": Cure.of(
            "nvidia-smi nvlink -s",
            comment="It shows links that are down. `nvidia-smi -L` shows whether the models differ.",
        ),
        "effects": (Effect.SLOW,),
    }


def _paths(run: Circumstances, pairs: Iterable[Pair]) -> str:
    return joined(dict.fromkeys(map(run.wiring.path, pairs)))


def _pair(devices: Iterable[str], positions: Mapping[str, int]) -> Pair:
    one, other = sorted(positions[device] for device in devices)
    return one, other


@single_node
def _all_down(run: Circumstances) -> Found:
    for position, node, gpu in run.gpus():
        if lost_switch_links(node, gpu):
            yield run.gpu_sighting(position, _seen(gpu, 0), expected=f"{len(gpu.nvlinks or ())} active NVLinks")


def _seen(gpu: GpuFacts, active: int) -> str:
    down = [link.number for link in gpu.nvlinks or () if link.active is False]
    if not down:
        return f"{active} NVLinks active"
    numbers = format_ranges(down)
    return f"{len(down)} of {len(gpu.nvlinks or ())} NVLinks down (link{'s' * (len(down) > 1)} {numbers})"


@single_node
def _errors(run: Circumstances) -> Found:
    found = {
        (number, errors.device): errors for number, node in run.nodes.items() for errors in nvlink_errors(node.snapshot)
    }
    for position, _, gpu in run.gpus():
        errors = found.get((run.wiring.gpus[position].node, gpu.device))
        if errors is not None:
            likely = f"a link that is about to fail{'' if errors.meanwhile else ', or a single disturbance'}"
            yield run.gpu_sighting(position, errors.seen, likely=likely, **error_severity(errors))


RESTART_FABRIC = (
    "`systemctl restart nvidia-fabricmanager` ends all jobs that use the GPUs, so run it while there are none."
)
_DSTACK = "https://github.com/Dstack-TEE/dstack/pull/1167"


@single_node
def _in_other_domain(run: Circumstances) -> Found:
    """Find GPUs outside the NVLink domain that most GPUs of the node belong to. Groups of equal size are intended
    partitions.
    """
    for number, node in run.nodes.items():
        groups: dict[tuple[str, int], list[int]] = {}
        for position in sorted(run.node_gpus(number)):
            known = run.wiring.gpu(position)
            fabric = None if known is None else known.fabric
            if fabric is None or fabric.state != "completed" or fabric.cluster_uuid is None or fabric.clique is None:
                continue
            groups.setdefault((fabric.cluster_uuid, fabric.clique), []).append(position)
        sizes = [len(group) for group in groups.values()]
        most = max(sizes, default=0)
        if len(groups) < 2 or (most > 1 and len(set(sizes)) == 1):
            continue
        usual = next(domain for domain, group in groups.items() if len(group) == most)
        expected = f"clique {usual[1]} of cluster {usual[0]}, like {most} of {len(node.gpus)} GPUs"
        for (cluster, clique), group in groups.items():
            for position in group if (cluster, clique) != usual else ():
                yield run.gpu_sighting(position, f"clique {clique} of cluster {cluster}", expected=expected)


_AZURE = "https://github.com/Azure/azhpc-images/pull/506"
_FOLLOWS = (_NOT_READY, "cuda-nvml-disagree", "bar1-small", _REFUSED)

NVLINK = Family.of(
    "nvlink",
    "NVLink and its fabric",
    Condition(
        id="nvlink-disabled",
        title="A driver setting switches NVLink off (NVreg_NvLinkDisable=1, NVreg_RmNvlinkBandwidth=OFF)",
        settles="grep -i nvlink /proc/driver/nvidia/params /etc/modprobe.d/*",
        command="grep -i nvlink /etc/modprobe.d/*",
        comment="Remove the setting from the file and reboot. Before running any jobs, verify the data with `gpubench "
        "p2p`, because the links may be off after a failure.",
        link="https://github.com/NVIDIA/open-gpu-kernel-modules",
        look=node_detector(lambda node: node.snapshot.driver_settings.nvlink_disabled, unknown="parameters"),
        implies=("nvlinks-all-down", _DOWN, *_FOLLOWS),
    ),
    Condition(
        id="fabric-manager-stopped",
        title="The fabric manager is not running: NVLinks are active, but P2P is refused or CUDA fails with error 802",
        settles="systemctl status nvidia-fabricmanager",
        check="fabric",
        expected="a running fabric manager (without it, the next reset or job fails)",
        command="systemctl enable --now nvidia-fabricmanager",
        comment="It must have the driver's version.",
        link=_DSTACK,
        look=single_node(partial(_manager, stopped=True)),
        implies=_FOLLOWS,
    ),
    Condition(
        id="fabric-manager-version",
        title="The fabric manager's version does not match the NVIDIA driver's version",
        settles="nv-fabricmanager --version; nvidia-smi",
        check="fabric",
        expected="the driver's version (with any other version, the next reset or job fails)",
        command="nv-fabricmanager --version",
        comment="Install the fabric manager with the driver's version, and restart it while no job uses the GPUs.",
        link=_DSTACK,
        look=single_node(partial(_manager, stopped=False)),
        implies=_FOLLOWS,
    ),
    Condition(
        id=_NOT_READY,
        title="The NVLink fabric is not ready (state is not Completed): P2P over NVLink is refused (NS)",
        settles="nvidia-smi -q | grep -A 12 Fabric",
        check="fabric",
        expected="state completed, status success",
        likely="the fabric manager is not running, or its version differs from the driver's",
        command="systemctl status nvidia-fabricmanager",
        comment=RESTART_FABRIC,
        link=_AZURE,
        look=_not_ready,
        in_log=remark_detector(
            RemarkKind.NVLINK_REFUSED,
            Cure.of(
                "systemctl status nvidia-fabricmanager",
                comment="NVLinks without peer access are a fault. `gpubench topo` shows the state.",
            ),
        ),
        in_job=doubted(r"P2P is disabled between NVLINK connected GPUs"),
        implies=_FOLLOWS[1:],
    ),
    Condition(
        id="fabric-differs",
        title="A GPU is in a different NVLink domain (clique, cluster_uuid) than the other GPUs of its node",
        settles="nvidia-smi -q | grep -A 12 Fabric",
        check="fabric",
        likely="a fabric manager partition that leaves this GPU out, or a GPU that joined the fabric later",
        command="fmpm -l",
        comment="It lists the fabric's partitions. If none is intended, restart nvidia-fabricmanager while the "
        "GPUs are idle.",
        link=_AZURE,
        look=_in_other_domain,
        implies=_FOLLOWS[1:],
    ),
    Condition(
        id="nvlinks-all-down",
        title="All NVLinks of a GPU are inactive on a board with NVSwitches",
        check="nvlink_active",
        likely="a fault of the board (Xid 74), or a driver setting (NVreg_NvLinkDisable, NVreg_RmNvlinkBandwidth)",
        aliases=(_DOWN,),
        settles="nvidia-smi nvlink -s; grep -i nvlink /proc/driver/nvidia/params; dmesg | grep 'Xid.*74'",
        command="systemctl status nvidia-fabricmanager",
        comment=f"{RESTART_FABRIC} Then reset the GPU with `nvidia-smi --gpu-reset`. If the links stay down, have "
        "the board serviced.",
        link="https://github.com/NVIDIA/DCGM/issues/198",
        look=_all_down,
        implies=(_DOWN, *_FOLLOWS),
    ),
    Condition(
        id=_DOWN,
        title="NVLinks are down or inactive on a GPU (nvidia-smi nvlink -s, Xid 74)",
        check="nvlink_active",
        likely="a bridge or board that is not seated, a failed link (Xid 74), or a driver setting "
        "(NVreg_NvLinkDisable, NVreg_RmNvlinkBandwidth)",
        settles="nvidia-smi nvlink -s; nvidia-smi nvlink -e; dmesg | grep 'Xid.*74'",
        command="nvidia-smi --gpu-reset -i GPU",
        comment="If a link stays down, reseat or replace the board or bridge.",
        link="https://github.com/NVIDIA/nccl/issues/2329",
        look=_down,
        implies=("kv-get-without-nvlink",),
    ),
    Condition(
        id="nvlink-doubtful",
        title="Sources disagree about NVLinks, for example nvidia-smi topo -p2p n and nvidia-smi nvlink -s",
        check="nvlink_active",
        expected="the same answer from every source",
        likely="a link that is about to fail, or a driver that lost track of it",
        command="nvidia-smi nvlink -s",
        comment="Compare it with `nvidia-smi topo -p2p n`. `gpubench p2p` shows which one is right.",
        link="https://github.com/NVIDIA/nccl/issues/2329",
        look=_contradicted,
    ),
    Condition(
        id="nvlink-bandwidth-limited",
        title="The NVLink bandwidth mode is reduced (NVreg_RmNvlinkBandwidth=MIN, HALF, 3QUARTER)",
        settles="grep -i nvlink /etc/modprobe.d/*",
        check="nvlink_active",
        expected="full bandwidth on every GPU",
        likely="a driver setting that saves power",
        command="grep -i nvlink /etc/modprobe.d/*",
        comment="Remove NVreg_RmNvlinkBandwidth from the file and reboot.",
        link="https://github.com/NVIDIA/open-gpu-kernel-modules",
        look=node_detector(_limited, unknown="nvlink_bandwidth_mode"),
        implies=(_DOWN,),
    ),
    Condition(
        id="fabric-unhealthy",
        title="The NVLink fabric reports degraded bandwidth or an unhealthy route (health mask)",
        settles="nvidia-smi -q | grep -A 12 Fabric",
        check="fabric",
        expected="a health mask without a fault",
        likely="failed links, switches or routes of the fabric",
        aliases=(_NOT_READY,),
        command="systemctl status nvidia-fabricmanager",
        comment=f"{RESTART_FABRIC} Then replace the parts named in its log.",
        link="https://github.com/NVIDIA/nccl/issues/2186",
        look=_unhealthy,
        implies=(_DOWN,),
    ),
    Condition(
        id="nvlink-errors",
        title="NVLinks count replay, recovery or CRC errors",
        settles="`nvidia-smi nvlink -e` before and after `gpubench p2p` (growing counters confirm it)",
        check="nvlink_errors",
        command="nvidia-smi nvlink -e",
        comment="Run it again after `gpubench p2p`. Reseat or replace any link with growing counters.",
        link="https://github.com/NVIDIA/DCGM/issues/198",
        look=_errors,
    ),
)
