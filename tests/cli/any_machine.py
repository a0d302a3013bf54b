"""Machines that exist in nobody's file: plausible healthy ones from parts, and one fault on one of their parts.

A machine is a profile that no file has, for the simulation alone, and edits of the facts that it shows. What judges it
are the profiles that gpubench has: some of its GPU models are among them, in numbers and surroundings that are not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from gpubench.collectives.registry import SUMMARIES
from gpubench.model.facts.snapshot import GpuFacts, GpuLimits, NicKind, NvlinkPeer, RemappedRows, Snapshot
from gpubench.model.profiles.profile import (
    Expected,
    ExpectedKind,
    ExpectedPeerAccess,
    FactsSource,
    GpuKind,
    MatchRule,
    NicKindOfMachine,
    NodeKind,
    NvlinkKind,
    Profile,
    SwitchKind,
)
from gpubench.profiles import load, match_whole_machine
from gpubench.simulated import machine as simulated
from gpubench.simulated.node import healthy_node

NAME = "any"


_GRANTED = ExpectedPeerAccess()


@dataclass(frozen=True, slots=True)
class Model:
    """A GPU model: its PCIe generation, NVLinks (version, raw GB/s, links; links 0: none) and how they may lead."""

    name: str
    capability: str
    memory_gb: int
    generation: int
    nvlink: tuple[str, float, int] = ("", 0.0, 0)
    ways: tuple[str, ...] = ("none",)
    ecc: bool | None = True
    mig: bool | None = None
    peer: ExpectedPeerAccess = _GRANTED


_GEFORCE = ExpectedPeerAccess(status="GNS", reason="the driver offers no peer access on GeForce")
_BRIDGED = ("none", "bridges")
MODELS = (
    Model("Tesla V100-SXM2-32GB", "7.0", 34, 3, ("2.0", 25.78125, 6), ("hidden",)),
    Model("NVIDIA A100-SXM4-80GB", "8.0", 85, 4, ("3.0", 25.0, 12), ("switches", "hidden"), mig=False),
    Model("NVIDIA A100 80GB PCIe", "8.0", 85, 4, ("3.0", 25.0, 12), _BRIDGED, mig=False),
    Model("NVIDIA H100 80GB HBM3", "9.0", 85, 5, ("4.0", 26.5625, 18), ("switches", "hidden"), mig=False),
    Model("NVIDIA H200", "9.0", 150, 5, ("4.0", 26.5625, 18), ("switches", "hidden"), mig=False),
    Model("NVIDIA H200 NVL", "9.0", 150, 5, ("4.0", 26.5625, 18), _BRIDGED, mig=False),
    Model("NVIDIA B200", "10.0", 192, 5, ("5.0", 53.125, 18), ("switches", "hidden"), mig=False),
    Model("NVIDIA A40", "8.6", 48, 4, ("3.0", 14.0625, 4), _BRIDGED),
    Model("NVIDIA L40S", "8.9", 48, 4),
    Model("NVIDIA L4", "8.9", 24, 4),
    Model("Tesla T4", "7.5", 16, 3),
    Model("NVIDIA RTX 6000 Ada Generation", "8.9", 48, 4),
    Model("NVIDIA GeForce RTX 4090", "8.9", 25, 4, ecc=False, peer=_GEFORCE),
    Model("NVIDIA GeForce RTX 3090", "8.6", 25, 4, ecc=None, peer=_GEFORCE),
    Model("NVIDIA X900", "13.0", 300, 6, ("5.0", 53.125, 18), ("switches", "hidden"), mig=False),
    Model("NVIDIA X90 PCIe", "13.0", 96, 6),
)


class Machine(Struct, frozen=True):
    """A healthy machine: the profile that it is simulated by, its nodes, and what of its facts nobody can see.

    Of one that is `split` all GPUs have MIG on, as somebody wants it.
    """

    profile: Profile
    nodes: int
    unseen: tuple[str, ...] = ()
    split: bool = False

    def __repr__(self) -> str:
        profile, node = self.profile, self.profile.node
        links = "no NVLinks" if profile.nvlink is None else f"NVLinks to {profile.nvlink.to} {profile.nvlink.pairs}"
        nics = ", ".join(f"{nic.kind} {nic.rate_gbit_s} {nic.place}" for nic in profile.nic)
        return (
            f"{self.nodes} × {profile.match.visible} × {profile.gpu.name}; {links}; unseen {self.unseen}; NICs {nics}; "
            f"{'VM' if node.virtual_machine else 'metal'}, {'flat' if node.flat_pci else profile.gpu.places}, "
            f"NUMA {node.numa_nodes}, driver {node.driver}, peermem {node.peermem}, MIG {self.split or profile.gpu.mig}"
        )

    @property
    def text(self) -> str:
        """What --simulate takes for it, while it is `known`."""
        return f"{NAME}*{self.nodes}" if self.nodes > 1 else NAME

    @property
    def settings(self) -> str:
        """The options that make it what it is."""
        gpus = [f"node{node}.gpu{gpu}" for node in range(self.nodes) for gpu in range(self.profile.match.visible)]
        return "".join(f" --fault {gpu}:mig=on" for gpu in gpus) if self.split else ""


def _nvlink(model: Model, way: str, gpus: int) -> NvlinkKind | None:
    version, raw_gb_s, links = model.nvlink
    if way == "none" or gpus == 1 or not links:
        return None
    if way == "bridges":
        pairs = tuple((first, first + 1, links) for first in range(0, gpus - 1, 2))
        return NvlinkKind(version=version, raw_gb_s=raw_gb_s, links=links, to=NvlinkPeer.GPU, pairs=pairs)
    return NvlinkKind(version=version, raw_gb_s=raw_gb_s, links=links, to=NvlinkPeer.SWITCH, switches=4)


@st.composite
def _nics(
    draw: st.DrawFn, gpus: int, switches: tuple[str, ...], generation: int, *, needs_rdma: bool
) -> tuple[NicKindOfMachine, ...]:
    """What a machine may have; boards whose profile has RDMA NICs have some, as without any it warns."""
    kinds = ["roce", "infiniband", "mixed"]
    kind = draw(st.sampled_from(kinds if needs_rdma else ["none", "ethernet", *kinds]))
    if kind == "none":
        return ()
    ethernet = NicKindOfMachine(
        name="eth0", kind=NicKind.ETHERNET, rate_gbit_s=draw(st.sampled_from([1.0, 10.0, 25.0, 100.0]))
    )
    if kind == "ethernet":
        return (ethernet,)
    rdma = NicKind.ROCE if kind == "roce" else NicKind.INFINIBAND
    count = len(switches) if switches else draw(st.sampled_from(sorted({1, 2, max(gpus // 2, 1), gpus})))
    rate = draw(st.sampled_from([100.0, 200.0, 400.0]))
    found = tuple(
        NicKindOfMachine(
            name=f"mlx5_{number}",
            kind=rdma,
            rate_gbit_s=rate,
            pcie_generation=min(generation, 5),
            pcie_width=16,
            place=switches[number] if switches else None,
            model={100.0: "ConnectX-5", 200.0: "ConnectX-6", 400.0: "ConnectX-7"}[rate],
        )
        for number in range(count)
    )
    return (*found, ethernet) if kind == "mixed" else found


@st.composite
def machines(draw: st.DrawFn, most_gpus: int = 16) -> Machine:
    """A plausible healthy machine."""
    model = draw(st.sampled_from(MODELS))
    way = draw(st.sampled_from(model.ways))
    virtual_machine = draw(st.booleans())
    # A board with NVSwitches has all its GPUs; a virtual machine shows a part of them.
    whole_board = way == "switches" and not virtual_machine
    gpus = 8 if whole_board else draw(st.integers(1, most_gpus))
    tree = draw(st.sampled_from(["root ports", "switches", "flat"] if virtual_machine else ["root ports", "switches"]))
    sockets = draw(st.integers(1, 2))
    numa_nodes = 0 if tree == "flat" else sockets
    per_switch = draw(st.sampled_from([1, 2, 4]))
    count = -(-gpus // per_switch) if tree == "switches" else 0
    switches = tuple(f"switch{number}" for number in range(count))
    driver, cuda = draw(
        st.sampled_from([("470.256.02", "11.4"), ("535.261.03", "12.2"), ("570.172.08", "12.8"), ("580.95.05", "13.0")])
    )
    nvlink = _nvlink(model, "switches" if way == "hidden" else way, gpus)
    shown = None if nvlink is None or way == "hidden" else nvlink.to is NvlinkPeer.SWITCH
    known = match_whole_machine([model.name], gpus, switched=shown)
    has_rdma = known is not None and any(nic.kind is not NicKind.ETHERNET for nic in known.profile.nic)
    nics = draw(_nics(gpus, switches, model.generation, needs_rdma=has_rdma and not virtual_machine))
    kind = GpuKind(
        name=model.name,
        compute_capability=model.capability,
        multiprocessors=100 if known is None else known.profile.gpu.multiprocessors,
        memory_bytes=model.memory_gb * 10**9 if known is None else known.profile.gpu.memory_bytes,
        pcie_generation=model.generation,
        pcie_width=16,
        ecc=model.ecc,
        mig=model.mig,
        places=tuple(switches[index // per_switch] for index in range(gpus)) if switches else (),
    )
    profile = Profile(
        schema=1,
        name=NAME,
        title="a machine from parts",
        match=MatchRule(gpus=(model.name,), visible=gpus),
        facts=FactsSource(kind=ExpectedKind.DERIVED, source="made up"),
        gpu=kind,
        nvlink=nvlink,
        node=NodeKind(
            sockets=sockets,
            cpus=64 * sockets,
            driver=driver,
            cuda=cuda,
            numa_nodes=numa_nodes,
            virtual_machine=virtual_machine,
            flat_pci=tree == "flat",
            peermem=draw(st.sampled_from([True, True, False, None])) if any(nic.model for nic in nics) else None,
            dma_buf=True if driver > "535" else None,
        ),
        peer_access=model.peer,
        switch=tuple(
            SwitchKind(
                name=name, pcie_generation=model.generation, pcie_width=16, numa=number * sockets // len(switches)
            )
            for number, name in enumerate(switches)
        ),
        nic=nics,
    )
    hidden = {"nvlinks": way == "hidden" and nvlink is not None, "sysfs": draw(st.integers(0, 7)) == 0}
    unseen = tuple(name for name, holds in hidden.items() if holds) + draw(st.sampled_from([(), *HEALTHY_EDITS]))
    bare = known is not None and nvlink is None and known.profile.nvlink is not None
    return Machine(
        with_figures(profile, None if bare and gpus > 1 else known),
        draw(st.sampled_from([1, 1, 2, 3, 4])),
        unseen,
        split=model.mig is not None and draw(st.integers(0, 5)) == 0,
    )


@dataclass(frozen=True)
class Planted:
    """A healthy machine with one fault on one of its parts: `device` is its name, empty for the node itself."""

    machine: Machine
    fault: str
    node: int
    device: str

    @property
    def name(self) -> str:
        """What findings call the part."""
        return self.machine.profile.nic[int(self.device[3:])].name if self.device.startswith("nic") else self.device

    @property
    def text(self) -> str:
        """What --fault takes for it."""
        where = self.device.lower() if self.device.startswith("GPU") else self.device
        return f"node{self.node}.{where}:{self.fault}" if where else f"node{self.node}:{self.fault}"


@st.composite
def planted(draw: st.DrawFn, most_gpus: int = 5) -> Planted:
    """One fault that the facts of a machine show by themselves, or beside the part's siblings."""
    machine = replace(draw(machines(most_gpus)), split=False)
    profile = machine.profile
    gpus = ["lost=yes", "throttle=hw_slowdown", "temperature=95", "width=4"]
    gpus += ["rows=pending", "errors=5"] if profile.gpu.ecc else []
    nvlink = profile.nvlink
    bridged = () if nvlink is None else {gpu for pair in nvlink.pairs for gpu in pair[:2]}
    index = draw(st.integers(0, profile.match.visible - 1))
    if nvlink is not None and not machine.unseen and (nvlink.to is NvlinkPeer.SWITCH or index in bridged):
        gpus.append(f"nvlink={nvlink.links - 1}")
    nics = [number for number, nic in enumerate(profile.nic) if nic.kind is not NicKind.ETHERNET]
    if len(nics) > 1 and draw(st.integers(0, 3)) == 0:  # A port alone may have no cable
        fault, device = draw(st.sampled_from(["state=down", "width=4"])), f"nic{draw(st.sampled_from(nics))}"
    else:
        fault, device = draw(st.sampled_from(gpus)), f"GPU{index}"
    return Planted(machine, fault, draw(st.integers(0, machine.nodes - 1)), device)


def with_figures(profile: Profile, known: object) -> Profile:
    """The profile with what its machine reaches: what the profile that judges it has, else shares of its links."""
    truth = getattr(known, "profile", None)
    if truth is not None:
        return replace(profile, expected=truth.expected, curve=truth.curve, sources=truth.sources)
    if profile.match.visible == 1:
        return profile
    links = profile.nvlink.links * profile.nvlink.link_gb_s if profile.nvlink is not None else profile.gpu.pcie_gb_s
    share = 0.78 if profile.nvlink is not None and profile.nvlink.to is NvlinkPeer.SWITCH else 0.43
    narrowest = links if share == 0.78 else profile.gpu.pcie_gb_s
    expected = [
        Expected(
            quantity=f"{name}.busbw_gb_s",
            value=share * narrowest,
            kind=ExpectedKind.DERIVED,
            source="",
            size_bytes=2**28,
        )
        for name in SUMMARIES
    ]
    return replace(profile, expected=tuple(expected))


_EDITS: dict[str, Callable[[Snapshot], Snapshot]] = {}


def _edit(name: str) -> Callable[[Callable[[Snapshot], Snapshot]], Callable[[Snapshot], Snapshot]]:
    def register(function: Callable[[Snapshot], Snapshot]) -> Callable[[Snapshot], Snapshot]:
        _EDITS[name] = function
        return function

    return register


@_edit("nvlinks")
def _without_nvlinks(node: Snapshot) -> Snapshot:
    """As hypervisors hide them: NVML supports no query of links, and says nothing of NVSwitches."""

    def hidden(gpu: GpuFacts) -> GpuFacts:
        return replace(gpu, nvlinks=None, fabric=None, unknown={**gpu.unknown, "nvlinks": "Not Supported"})

    pairs = tuple(replace(pair, nvlink="NS", pci="OK") for pair in node.pairs)
    return replace(node, gpus=tuple(map(hidden, node.gpus)), nvswitches=(), pairs=pairs)


@_edit("sysfs")
def _without_product(node: Snapshot) -> Snapshot:
    """As in a container that shows little of the host."""
    return replace(node, machine=replace(node.machine, product=None, virtual_machine=None, numa_nodes=()))


def _first(node: Snapshot, **facts: Any) -> Snapshot:
    return replace(node, gpus=(replace(node.gpus[0], **facts), *node.gpus[1:]))


@_edit("warm")
def _with_a_warm_gpu(node: Snapshot) -> Snapshot:
    return _first(node, temperature_c=68, slowdown_margin_c=19)


@_edit("capped")
def _capped(node: Snapshot) -> Snapshot:
    """As an operator limits the power of all GPUs; idle ones report that as their power cap."""
    limits = GpuLimits(power_w=250.0, default_power_w=350.0)
    return replace(
        node, gpus=tuple(replace(gpu, limits=limits, throttle_reasons=("sw_power_cap",)) for gpu in node.gpus)
    )


@_edit("old")
def _old(node: Snapshot) -> Snapshot:
    """After 200 days: a few replays and remapped rows, and memory that the driver holds."""
    replaced = RemappedRows(correctable=1, uncorrectable=2, pending=False, failure=False)
    rows = replaced if node.gpus[0].remapped_rows else None
    return _first(node, pcie_replays=140, remapped_rows=rows, memory_used_bytes=1500 * 2**20)


HEALTHY_EDITS = (("warm",), ("capped",), ("old",), ("warm", "capped", "old"))
"""What healthy machines show beside what they are made of."""


@contextmanager
def known(machine: Machine) -> Iterator[None]:
    """Have `--simulate` know a machine, by its `text`, while the block lasts."""

    def seen(profile: Profile) -> Snapshot:
        node = healthy_node(profile)
        for each in machine.unseen:
            node = _EDITS[each](node)
        return node

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "load", lambda name: machine.profile if name == NAME else load(name))
        patch.setattr(simulated, "healthy_node", seen)
        yield
