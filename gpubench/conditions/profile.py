"""Machines that have other or fewer parts than healthy ones of their type, all alike, so that siblings do not tell."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from gpubench.conditions.definition.circumstances import Circumstances
from gpubench.conditions.definition.condition import Condition, Family, Found, in_each_node, joined
from gpubench.conditions.definition.sightings import of_gpu, of_node
from gpubench.model.facts.snapshot import GpuFacts, NicKind, NvLink, NvlinkPeer
from gpubench.model.paths.links import active_links, pcie_gb_s
from gpubench.model.paths.topology import Topology
from gpubench.model.profiles.profile import Profile
from gpubench.model.terms.units import counted
from gpubench.model.terms.verdict import Verdict


@in_each_node
def _missing(run: Circumstances) -> Found:
    """Fewer GPUs than were asked for; none where other nodes have some; and those that left no trace on a board that is
    here: by its NVSwitches, or by NVLinks that lead nowhere. In virtual machines a part of a board is normal.
    """
    others = sum(bool(node.gpus) for node in run.nodes.values())
    for number, node in run.nodes.items():
        snapshot, profile, due = node.snapshot, run.profiles.get(number), _due(run, number)
        if due is not None and len(node.gpus) < due[0] and not snapshot.failures:
            yield of_node(run, number, counted(len(node.gpus), "GPU"), expected=due[1])
            continue
        if others and not node.gpus and not snapshot.failures:
            seen = f"no GPU{f': {snapshot.driver.absent}' if snapshot.driver.absent else ''}"
            expected, likely = f"GPUs, as {counted(others, 'other node')} {'has' if others == 1 else 'have'}", _NO_GPU
            yield of_node(run, number, seen, severity=Verdict.ERROR, expected=expected, likely=likely)
        if profile is None:
            continue
        count, board = len(snapshot.gpus) + snapshot.gpus_of_others, profile.match.board
        has_board = bool(snapshot.nvswitches) or _is_mesh_with_gaps(node)
        if snapshot.machine.virtual_machine is False and has_board and count < board:
            expected = f"{counted(board, 'GPU')}, as profile {profile.name} has it"
            yield of_node(run, number, f"{counted(count, 'GPU')}, the board has {board}", expected=expected)


def _is_mesh_with_gaps(node: Topology) -> bool:
    """True if NVLinks join GPUs directly, and every GPU has some that are down, or lead to a GPU that is not here.

    Those to a processor (POWER9), and those of which nothing is known, are no gap.
    """
    here = {gpu.bus_id for gpu in node.gpus}
    links = [gpu.nvlinks or () for gpu in node.gpus]
    joined_here = all(any(link.active and link.peer_bus_id in here for link in own) for own in links)
    return len(links) > 1 and joined_here and all(any(_leads_nowhere(link, here) for link in own) for own in links)


def _leads_nowhere(link: NvLink, here: Collection[str | None]) -> bool:
    elsewhere = link.peer is NvlinkPeer.GPU and link.peer_bus_id is not None and link.peer_bus_id not in here
    return link.active is False or (link.active is True and elsewhere)


_MORE_GPUS = "another machine than was thought, or a number that was mistyped"


def _due(run: Circumstances, number: int) -> tuple[int, str] | None:
    """The number of GPUs that a node was said to have, and by what; None where nobody said it."""
    if run.expected_gpus is not None:
        return run.expected_gpus, f"{counted(run.expected_gpus, 'GPU')}, as --expect-gpus says"
    profile = run.exact_profile(number) if run.profile_asked_for else None
    if profile is None:
        return None
    return profile.match.visible, f"{counted(profile.match.visible, 'GPU')}, as profile {profile.name} has it"


@in_each_node
def _surplus(run: Circumstances) -> Found:
    """More GPUs than were asked for."""
    for number, node in run.nodes.items():
        due = _due(run, number)
        if due is not None and len(node.gpus) > due[0]:
            seen = f"{counted(len(node.gpus), 'GPU')}, {due[0]} expected"
            yield of_node(run, number, seen, severity=Verdict.FAIL, expected=due[1], likely=_MORE_GPUS)


@in_each_node
def _model(run: Circumstances) -> Found:
    """More GPUs than were asked for, or of another model than the profile that was; the odd model among siblings."""
    yield from _surplus(run)
    for position, node, gpu in run.gpus():
        profile = run.exact_profile(run.wiring.gpus[position].node) if run.profile_asked_for else None
        if profile is not None and gpu.name and gpu.name not in profile.match.gpus:
            expected = " or ".join(profile.match.gpus)
            yield of_gpu(run, position, gpu.name, severity=Verdict.FAIL, expected=expected)
        usual = Counter(each.name for each in node.gpus if each.name).most_common(1)
        if gpu.name and gpu.name != usual[0][0]:
            yield of_gpu(run, position, gpu.name, expected=f"{usual[0][0]}, as its siblings are")


def _unknown(run: Circumstances) -> Found:
    for number, profile in run.profiles.items():
        gpus = run.nodes[number].gpus
        if profile.match.generic is not None and not run.profile_asked_for and gpus:
            names = ", ".join(sorted({gpu.name or "?" for gpu in gpus}))
            seen = f"no profile names {len(gpus)} of {names}"
            yield of_node(run, number, seen, likely=f"profile {profile.name} stands in")


@in_each_node
def _below(run: Circumstances) -> Found:
    most = {number: max((active_links(gpu) or 0 for gpu in node.gpus), default=0) for number, node in run.nodes.items()}
    for position, _, gpu in run.gpus():
        number = run.wiring.gpus[position].node
        profile = run.exact_profile(number)
        for seen, expected in _shortfalls(gpu, most[number], profile) if profile is not None else ():
            yield of_gpu(run, position, seen, expected=f"{expected}, as profile {profile and profile.name} has it")


def _shortfalls(gpu: GpuFacts, most: int, profile: Profile) -> Iterator[tuple[str, str]]:
    """Shortfalls of all GPUs against the profile; those of some are found by comparing siblings."""
    due = profile.nvlink.least_links(profile.match.visible, profile.match.board) if profile.nvlink is not None else 0
    if active_links(gpu) == most < due:
        yield f"{most} NVLinks active on every GPU", f"{due} NVLinks"
    link = gpu.pcie
    reaches = pcie_gb_s(link.max_generation, link.max_width)
    if reaches is not None and reaches < profile.gpu.pcie_gb_s:
        expected = f"{profile.gpu.pcie_generation} x{profile.gpu.pcie_width}"
        yield f"PCIe at most {link.max_generation} x{link.max_width}", f"PCIe {expected}"


@in_each_node
def _nics_below(run: Circumstances) -> Found:
    """Only of a profile that was asked for: an HGX board says nothing of the NICs around it, and clouds have others."""
    for number, node in run.nodes.items() if run.profile_asked_for else ():
        profile = run.exact_profile(number)
        nics = () if profile is None else profile.nic
        wanted = [nic.rate_gbit_s or 0.0 for nic in nics if nic.kind is not NicKind.ETHERNET]
        have = [nic.rate_gbit_s or 0.0 for nic in node.nics if nic.rdma]
        enough = len(have) >= len(wanted) and (not wanted or min(sorted(have)[-len(wanted) :]) >= min(wanted))
        if profile is not None and not enough:
            expected = f"{len(wanted)} of {_rates(wanted)}, as profile {profile.name} has it"
            yield of_node(run, number, f"{len(have)} RDMA ports of {_rates(have)}", expected=expected)


def _rates(rates: list[float]) -> str:
    return f"{joined([f'{rate:g}' for rate in sorted(set(rates))], 99)} Gb/s" if rates else "any rate"


_PROFILES = "../profiles/README.md"
GPU_MISSING = "gpu-missing"
_NO_GPU = "another kind of node than was thought, a driver that is not loaded, or a container without GPUs"
_MODEL = Condition(
    id="gpu-model",
    title="Another number or model of GPUs than the machine should have",
    detection="models among siblings; number and model against --expect-gpus and a profile that was asked for",
    check="gpu_model",
    severity=Verdict.WARN,
    likely="another machine than was thought, a GPU that was replaced by another model, or one that is gone",
    cure="nvidia-smi -L; gpubench profiles match",
    look=_model,
)
SURPLUS = replace(_MODEL, look=_surplus)
"""More GPUs than were asked for, which every command reports."""


PROFILE = Family.of(
    "profile",
    "Machines beside their profile",
    Condition(
        id=GPU_MISSING,
        title="Fewer GPUs than the machine should have: one is not on the PCI bus (lspci shows fewer GPUs)",
        detection="GPUs on a board whose NVSwitches are there, or where every GPU has NVLinks to others and some that "
        "lead nowhere, on bare metal, against the profile; against --expect-gpus and a profile that was asked for; "
        "none where other nodes have some",
        check="gpu_present",
        severity=Verdict.FAIL,
        likely="a GPU that does not train its PCIe link any more is not even on the bus; or somebody took it out",
        cure="lspci -d 10de: | grep -c 3D; a power cycle, then the server's log (ipmitool sel list)",
        look=_missing,
        implies=("below-profile",),
    ),
    _MODEL,
    Condition(
        id="profile-unknown",
        title="No profile names these GPUs: only siblings and shares of the limits judge them",
        detection="the models that profiles name",
        check="gpu_model",
        severity=Verdict.WARN,
        expected="a profile of this machine: only siblings and shares of the limits judge it without one",
        cure="gpubench profiles learn RESULT... on healthy machines, then check --profile FILE",
        look=_unknown,
    ),
    Condition(
        id="below-profile",
        title="All GPUs have fewer NVLinks or a narrower PCIe link than healthy machines of this type",
        detection="active NVLinks and maximal PCIe link of every GPU against the profile",
        check="profile",
        severity=Verdict.FAIL,
        likely="a setting that limits the links (NVreg_NvLinkDisable, NVreg_RmNvlinkBandwidth, the slot's "
        "generation in the BIOS), or another machine than the profile's",
        cure="grep -i nvlink /proc/driver/nvidia/params; nvidia-smi nvlink -s",
        look=_below,
    ),
    Condition(
        id="nic-below-profile",
        title="Fewer or slower RDMA NICs than the profile has",
        detection="rates of RDMA ports against a profile that was asked for",
        check="nic_profile",
        severity=Verdict.FAIL,
        likely="a NIC that is gone, a cable of a lower rate, or another machine than the profile's",
        cure="ibstat; lspci -d 15b3:",
        look=_nics_below,
    ),
    link=_PROFILES,
)
