"""Differences from healthy machines of the same type. A comparison with siblings misses them if all siblings are
affected.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from msgspec.structs import replace

from gpubench.conditions.circumstances import Circumstances, Found, Unread, joined
from gpubench.conditions.condition import Condition, Family, rdma_nics, single_node
from gpubench.conditions.subjects import OF_THE_BOARD, is_desktop, is_mesh, is_soldered
from gpubench.model.facts.snapshot import GpuFacts, NicKind, NvLink, NvlinkPeer, find_display_cards
from gpubench.model.paths.topology import Topology, active_links, pcie_gb_s
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.units import plural
from gpubench.model.terms.verdict import NO_CURE, Cure, Verdict


@single_node
def _missing(run: Circumstances) -> Found:
    """Find nodes with fewer GPUs than requested, fewer than other nodes, or fewer than their board has.

    NVSwitches, or NVLinks to missing GPUs, show the size of the board. Virtual machines may have only a part of a
    board.
    """
    others = sum(bool(node.gpus) for node in run.nodes.values())
    for number, node in run.nodes.items():
        snapshot, profile, due = node.snapshot, run.profiles.get(number), _due(run, number)
        if due is not None and len(node.gpus) < due[0] and not snapshot.failures:
            hidden = len(node.gpus) + snapshot.gpus_of_others >= due[0]
            if not hidden or run.expected_gpus is not None:
                cause: dict[str, Any] = {"likely": _HIDDEN, "cure": Cure.of(_SHOW_HIDDEN)} if hidden else {}
                yield run.node_sighting(number, _unlike(len(node.gpus), due[0]), expected=due[1], **cause)
            continue
        if others and not node.gpus and not snapshot.failures:
            seen = f"no GPU{f': {snapshot.driver.absent}' if snapshot.driver.absent else ''}"
            expected, likely = f"GPUs, like {plural(others, 'other node')}", _NO_GPU
            yield run.node_sighting(number, seen, severity=Verdict.ERROR, expected=expected, likely=likely)
        if profile is None:
            continue
        count, board = len(snapshot.gpus) + snapshot.gpus_of_others, profile.match.board
        has_board = bool(snapshot.nvswitches) or is_mesh_with_gaps(node, profile)
        if snapshot.machine.virtual_machine is False and has_board and count < board:
            expected = f"{plural(board, 'GPU')}, as in profile {profile.name}"
            yield run.node_sighting(number, f"{plural(count, 'GPU')}, the board has {board}", expected=expected)


def is_mesh_with_gaps(node: Topology, profile: Profile | None) -> bool:
    """True if a GPU is missing from a board whose NVLinks join GPUs directly.

    The evidence is that at least as many links as one GPU has are down, or lead to a GPU that is not there.
    """
    here = {gpu.bus_id for gpu in node.gpus}
    gaps = sum(_leads_nowhere(link, here) for gpu in node.gpus for link in gpu.nvlinks or ())
    if profile is None or profile.nvlink is None or len(node.gpus) >= profile.match.board:
        return False
    return is_mesh(node) and gaps >= profile.nvlink.links


def _leads_nowhere(link: NvLink, here: Collection[str | None]) -> bool:
    elsewhere = link.peer is NvlinkPeer.GPU and link.peer_bus_id is not None and link.peer_bus_id not in here
    return link.active is False or (link.active is True and elsewhere)


_NOTHING = Cure(comment="Nothing to repair: the slot or board supports no more. `gpubench topo` shows the limit.")
_MORE_GPUS = "a different machine than expected, or a mistyped number"


def _unlike(count: int, expected: int) -> str:
    return f"{plural(count, 'GPU')}, {expected} expected"


def _due(run: Circumstances, number: int) -> tuple[int, str] | None:
    if run.expected_gpus is not None:
        return run.expected_gpus, f"{plural(run.expected_gpus, 'GPU')}, as --expect-gpus requires"
    profile = run.exact_profile(number) if run.profile_asked_for else None
    if profile is None:
        return None
    return profile.match.visible, f"{plural(profile.match.visible, 'GPU')}, as in profile {profile.name}"


@single_node
def _surplus(run: Circumstances) -> Found:
    for number, node in run.nodes.items():
        due = _due(run, number)
        if due is not None and len(node.gpus) > due[0]:
            seen = _unlike(len(node.gpus), due[0])
            yield run.node_sighting(number, seen, severity=Verdict.FAIL, expected=due[1], likely=_MORE_GPUS)


@single_node
def _model(run: Circumstances) -> Found:
    """Find surplus GPUs, GPUs that are not of the requested model, and GPUs whose model differs from most siblings."""
    yield from _surplus(run)
    for position, node, gpu in run.gpus():
        if gpu in find_display_cards(node.gpus):
            continue
        profile = run.exact_profile(run.wiring.gpus[position].node) if run.profile_asked_for else None
        if profile is not None and gpu.name and not profile.match.covers([gpu.name]):
            expected = " or ".join(profile.match.gpus)
            yield run.gpu_sighting(position, gpu.name, severity=Verdict.FAIL, expected=expected)
        models = Counter(other.name for other in node.gpus if other.name).most_common(2)
        usual = models[0][0] if len(models) == 1 or (models and models[0][1] > models[1][1]) else ""
        if gpu.name and usual and gpu.name != usual:
            yield run.gpu_sighting(position, gpu.name, expected=f"{usual}, like its siblings")


@single_node
def _differs(run: Circumstances) -> Found:
    """Find GPUs with less memory, fewer multiprocessors or slower NVLinks than comparable siblings.

    GPUs are comparable if model, MIG mode and ECC mode are equal.
    """
    for position, node, gpu in run.gpus():
        yield from _odd_variant(run, position, node, gpu)
        alike = [
            other for other in node.gpus if other.name == gpu.name and other.mig == gpu.mig and other.ecc == gpu.ecc
        ]
        for what, size in _sizes(gpu).items():
            most = max((_sizes(other).get(what, 0.0) for other in alike), default=0.0)
            if size < _AS_LARGE * most:
                expected = f"{what} {most:g}, like its siblings"
                yield run.gpu_sighting(position, f"{what} {size:g}", expected=expected)


def _odd_variant(run: Circumstances, position: int, node: Topology, gpu: GpuFacts) -> Found:
    """Find GPUs whose compute capability is unusual for their model. If two GPUs have different models, report the
    second.
    """
    if gpu in find_display_cards(node.gpus):
        return
    profile = run.exact_profile(run.wiring.gpus[position].node)
    same = Counter(
        other.compute_capability for other in node.gpus if other.name == gpu.name and other.compute_capability
    )
    usual = profile.gpu.compute_capability if profile is not None else next(iter(dict(same.most_common(1))), None)
    own = gpu.compute_capability
    if own and usual and own != usual:
        expected = f"compute capability {usual}, like others of its model"
        yield run.gpu_sighting(position, f"compute capability {own}", severity=Verdict.WARN, expected=expected)
    computing = [other for other in node.gpus if other not in find_display_cards(node.gpus)]
    first = computing[0]
    if (
        len(computing) == _TWO
        and gpu is not first
        and gpu in computing
        and gpu.name
        and first.name
        and gpu.name != first.name
    ):
        expected = f"{first.name}, like {first.device}"
        yield run.gpu_sighting(position, gpu.name, severity=Verdict.WARN, expected=expected)


def _less_than(gpu: GpuFacts, other: GpuFacts) -> bool:
    own = _sizes(gpu)
    return other.name == gpu.name and any(
        own.get(what, size) < _AS_LARGE * size for what, size in _sizes(other).items()
    )


def _sizes(gpu: GpuFacts) -> dict[str, float]:
    links = [link.raw_gb_s for link in gpu.nvlinks or () if link.active and link.raw_gb_s]
    sizes = {
        _MEMORY_GB: gpu.memory_bytes and gpu.memory_bytes / 1e9,
        _PROCESSORS: gpu.multiprocessors,
        _SLOWEST_LINK: min(links, default=None),
    }
    return {what: float(size) for what, size in sizes.items() if size is not None}


def _unknown(run: Circumstances) -> Found:
    for number, profile in run.profiles.items():
        gpus = run.nodes[number].gpus
        if profile.match.generic is not None and not run.profile_asked_for and gpus:
            names = ", ".join(sorted({gpu.name or "?" for gpu in gpus}))
            idle = any(gpu.nvlinks for gpu in gpus) and not any(active_links(gpu) for gpu in gpus)
            seen = f"no profile for {len(gpus)} × {names}" + (" without any active NVLink" if idle else "")
            yield run.node_sighting(number, seen, likely=f"profile {profile.name} is used instead")


@single_node
def _below(run: Circumstances) -> Found:
    most = {number: max((active_links(gpu) or 0 for gpu in node.gpus), default=0) for number, node in run.nodes.items()}
    for position, _, gpu in run.gpus():
        number = run.wiring.gpus[position].node
        profile = run.exact_profile(number)
        alike = profile is not None and not any(_less_than(gpu, other) for other in run.nodes[number].gpus)
        if gpu in find_display_cards(run.nodes[number].gpus):
            continue
        found = _shortfalls(gpu, most[number], profile, alike=alike) if profile is not None else ()
        for seen, expected in found:
            more: dict[str, Any] = _OF_ANOTHER_MODEL if seen.startswith((_MEMORY_GB, _PROCESSORS)) else {}
            yield run.gpu_sighting(
                position, seen, expected=f"{expected}, as in profile {profile and profile.name}", **more
            )
        slot = None if profile is None else pcie_gb_s(profile.gpu.pcie_generation, profile.gpu.pcie_width)
        reaches = pcie_gb_s(gpu.pcie.max_generation, gpu.pcie.max_width)
        if profile is not None and slot is not None and reaches is not None and reaches < slot:
            expected = f"PCIe {profile.gpu.pcie_generation} x{profile.gpu.pcie_width}, as in profile {profile.name}"
            seen = f"PCIe at most {gpu.pcie.max_generation} x{gpu.pcie.max_width}"
            yield run.gpu_sighting(position, seen, expected=expected, **_slot_severity(run.nodes[number], gpu, reaches))


def _shortfalls(gpu: GpuFacts, most: int, profile: Profile, *, alike: bool) -> Iterator[tuple[str, str]]:
    """Yield values below the profile that all GPUs of the node share. Other detectors compare a GPU with its
    siblings.
    """
    links = profile.nvlink.least_links(profile.match.visible, profile.match.board) if profile.nvlink is not None else 0
    if active_links(gpu) == most < links:
        yield f"{most} NVLinks active on every GPU", f"{links} NVLinks"
    due = {_MEMORY_GB: (profile.gpu.memory_bytes or 0) / 1e9, _PROCESSORS: float(profile.gpu.multiprocessors or 0)}
    due |= {} if profile.nvlink is None else {_SLOWEST_LINK: profile.nvlink.raw_gb_s}
    for what, size in _sizes(gpu).items() if alike and not gpu.mig and gpu.ecc == profile.gpu.ecc else ():
        if size < _AS_LARGE * due.get(what, 0.0):
            yield f"{what} {size:g}", f"{what} {due[what]:g}"


def _slot_severity(node: Topology, gpu: GpuFacts, reaches: float) -> dict[str, Any]:
    """Return the severity, likely reason and cure for a slot that is slower than the profile's.

    It is the board's limit, unless siblings have a faster slot.
    """
    if is_soldered(gpu):
        return {}
    speeds = (
        pcie_gb_s(other.pcie.max_generation, other.pcie.max_width) for other in node.gpus if other.name == gpu.name
    )
    if any(speed is not None and speed > reaches for speed in speeds) and not is_desktop(node):
        return {}
    return {"severity": Verdict.SKIP, "likely": OF_THE_BOARD, "cure": _NOTHING}


@single_node
def _all_gone(run: Circumstances) -> Found:
    """Find bare-metal nodes without any RDMA NIC although their profile has some."""
    for number, node in run.nodes.items():
        profile = run.exact_profile(number)
        due = [] if profile is None else [nic for nic in profile.nic if nic.kind is not NicKind.ETHERNET]
        bare = node.snapshot.machine.virtual_machine is False and not node.snapshot.failures
        if due and bare and node.gpus and not rdma_nics(node):
            expected = f"{plural(len(due), 'RDMA NIC')}, as in profile {profile and profile.name}"
            severity = Verdict.SKIP if len(run.nodes) == 1 else None  # A single node needs no network
            yield run.node_sighting(number, "no RDMA NIC", expected=expected, severity=severity)


@single_node
def _nics_below(run: Circumstances) -> Found:
    """Compare NICs with the profile only if the user named it, since an HGX board does not determine the NICs."""
    for number, node in run.nodes.items() if run.profile_asked_for else ():
        profile = run.exact_profile(number)
        if profile is None:
            continue
        has_rdma = any(nic.kind is not NicKind.ETHERNET for nic in profile.nic)
        due = [nic.rate_gbit_s for nic in profile.nic if nic.kind is not NicKind.ETHERNET or not has_rdma]
        nics = [nic for nic in node.nics if nic.rdma or not has_rdma]
        wanted, have = ([rate for rate in rates if rate] for rates in (due, [nic.rate_gbit_s for nic in nics]))
        all_there = len(nics) >= len(due)
        fastest = sorted(have, reverse=True)[: len(wanted)]
        if all_there and len(fastest) == len(wanted) and all(rate >= min(wanted) for rate in fastest):
            continue
        if all_there and len(have) < len(nics):
            yield Unread(
                run.subject(number), f"unknown rate of {joined([nic.name for nic in nics if not nic.rate_gbit_s])}"
            )
            continue
        seen = plural(len(nics), "RDMA port" if has_rdma else "network interface")
        seen += f" of {_rates(have)}" if have else ""
        expected = f"{len(due)} of {_rates(wanted)}, as in profile {profile.name}"
        cure = NO_CURE if has_rdma else Cure.of("ip link")
        yield run.node_sighting(number, seen, expected=expected, cure=cure)


def _rates(rates: list[float]) -> str:
    return f"{joined([f'{rate:g}' for rate in sorted(set(rates))], 99)} Gb/s" if rates else "any rate"


_MEMORY_GB, _PROCESSORS, _SLOWEST_LINK = "memory in GB", "multiprocessors", "slowest NVLink in GB/s"
_OF_ANOTHER_MODEL: dict[str, Any] = {
    "likely": "GPUs of another model or variant than the profile's",
    "cure": Cure.of("nvidia-smi -L", comment="`gpubench profiles match` shows the machine's profile."),
}
_TWO = 2  # With more than two GPUs, the most frequent model is the usual one
_AS_LARGE = 0.95  # Tolerance, since drivers reserve a few hundred MB of memory and round link rates
_PROFILES = "reference/profiles.md"
_HIDDEN = "CUDA_VISIBLE_DEVICES hides the other GPUs, or they belong to another container"
_SHOW_HIDDEN = "echo $CUDA_VISIBLE_DEVICES"
_NO_GPU = "an unexpected kind of node, a driver that is not loaded, or a container without GPUs"
_MODEL = Condition(
    id="gpu-model",
    title="The number or model of GPUs differs from what the machine should have",
    check="gpu_model",
    likely="a different machine than expected, a GPU replaced by a different model, or a missing GPU",
    command="nvidia-smi -L",
    comment="`gpubench profiles match` shows the machine's profile.",
    link="https://github.com/aikitoria/open-gpu-kernel-modules/issues/13",
    look=_model,
    implies=("below-profile", "nic-below-profile", "gpu-differs"),
)
SURPLUS = replace(_MODEL, look=_surplus)  # Same condition, but only for surplus GPUs, which every command reports

PROFILE = Family.of(
    "profile",
    "Machines compared with their profile",
    Condition(
        id="gpu-missing",
        title="Fewer GPUs than the machine should have: a GPU is missing from the PCI bus (lspci shows fewer GPUs)",
        check="gpu_present",
        likely="a GPU that no longer trains its PCIe link, or a GPU that was removed",
        command="lspci -d 10de: | grep -c 3D",
        comment="Power-cycle the node, then look at the server's log (ipmitool sel list).",
        look=_missing,
        implies=("below-profile", "peer-access-refused"),
    ),
    _MODEL,
    Condition(
        id="gpu-differs",
        title="A GPU has less memory, fewer multiprocessors or slower NVLinks than other GPUs of its model on the node",
        check="gpu_model",
        likely="a GPU replaced by a different variant, or a GPU with disabled parts",
        command="nvidia-smi -q -i GPU",
        comment="Have the GPU replaced.",
        look=_differs,
    ),
    Condition(
        id="profile-unknown",
        title="No profile for these GPUs: they are judged only against siblings and shares of the limits",
        check="gpu_model",
        expected="a profile of this machine (without one, it is judged only against siblings and shares of the limits)",
        comment="Make a profile from results of healthy machines with `gpubench profiles learn`, and "
        "name it with `--profile`.",
        look=_unknown,
    ),
    Condition(
        id="below-profile",
        title="All GPUs have fewer NVLinks or a narrower PCIe link than healthy machines of this type",
        check="profile",
        likely="a setting that limits the links (NVreg_NvLinkDisable, NVreg_RmNvlinkBandwidth, the slot's "
        "generation in the BIOS), or a machine that differs from the profile's",
        command="grep -i nvlink /proc/driver/nvidia/params",
        comment="`nvidia-smi nvlink -s` shows the links.",
        look=_below,
    ),
    Condition(
        id="nics-missing",
        title="No RDMA NIC, although the machine's profile has some (lspci and ibstat show none)",
        check="nic_state",
        likely="NIC drivers that are not loaded, NICs missing from the bus, or a machine without these NICs",
        command="lspci -d 15b3:",
        comment="If it lists NICs, run `modprobe mlx5_ib`. Otherwise, look at dmesg.",
        link="https://github.com/Azure/azurehpc-health-checks",
        look=_all_gone,
        implies=("nics-differ",),
    ),
    Condition(
        id="nic-below-profile",
        title="Fewer or slower NICs than in the profile",
        check="nic_profile",
        likely="a missing NIC, a cable with a lower rate, or a machine that differs from the profile's",
        command="ibstat",
        comment="`lspci -d 15b3:` lists the NICs on the bus.",
        look=_nics_below,
    ),
    link=_PROFILES,
)
