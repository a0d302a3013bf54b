"""The lines of NCCL's log that explain a choice: devices found, access refused, settings taken."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from gpubench.model.paths.nccl_log import Note, RemarkKind
from gpubench.readers.nccl_log.lines import bus_id

_LONGEST = 300

_ADDRESS = r"([\w.@-]{1,60}):\[?([\da-fA-F.:]{2,60})(?:%\w+)?\]?<"
_BOOTSTRAP = rf"Bootstrap ?: Using (?:\[\d+\])?{_ADDRESS}"

_Form = tuple[RemarkKind, re.Pattern[str]]


def _form(kind: RemarkKind, pattern: str) -> _Form:
    return kind, re.compile(pattern, re.ASCII)


_PAIR_OF_DEVICES = r" between dev -?\d{1,6}\(=([0-9a-f]{1,12})\) and dev -?\d{1,6}\(=([0-9a-f]{1,12})\)"
_ABOUT_BUS_IDS = (RemarkKind.PEER_ACCESS_REFUSED, RemarkKind.PEER_QUERY_FAILED)
"""Of these all groups are bus ids."""

_ABOUT_OWN_GPU = (RemarkKind.GDR_FAR, RemarkKind.GDR_NEAR)
"""Of these NCCL 2.24 and later name the GPU by its rank, which only the communicator at hand tells from a bus id."""

_FORMS: Mapping[str, tuple[_Form, ...]] = {
    "NET/IB": (
        _form(RemarkKind.NO_RDMA_DEVICE, r"NET/IB ?: No device found"),
        _form(
            RemarkKind.GDR_DISTANT, r"NET/IB ?: GPU Direct RDMA Disabled for GPU \w+(?:\[\w+\])? / HCA \d+ \(distance"
        ),
        _form(RemarkKind.RDMA_DEVICES, r"NET/IB ?: Using(?: \[\d+\]\S+)+"),
        _form(RemarkKind.BOOTSTRAP, rf"NET/IB ?: Using \[RO\]; OOB {_ADDRESS}"),
        _form(RemarkKind.RDMA_DEVICES, r"NET/IB ?: Unable to open device \S+"),
    ),
    "NET/OFI": (
        _form(RemarkKind.RDMA_DEVICES, r"NET/OFI .*\b[Pp]rovider is (efa|verbs|cxi|psm\d?)\b"),
        _form(RemarkKind.GDR_DISABLED, r"NET/OFI .*(?:disabling GDR|GDR (?:is )?not supported)()()"),
        _form(RemarkKind.NETWORK_PLUGIN, r"NET/OFI "),
    ),
    "NET/Plugin": (_form(RemarkKind.NETWORK_PLUGIN, r"NET/Plugin ?: (?:Loaded|Using)\b"),),
    "Bootstrap": (_form(RemarkKind.BOOTSTRAP, _BOOTSTRAP),),
    "Bootstrap:": (_form(RemarkKind.BOOTSTRAP, _BOOTSTRAP),),
    "NET/Socket": (_form(RemarkKind.SOCKET_INTERFACES, r"NET/Socket ?: Using \[\d+\]"),),
    "Failed": (_form(RemarkKind.NO_VERBS_LIBRARY, r"Failed to open libibverbs\.so"),),
    "DMA-BUF": (_form(RemarkKind.DMA_BUF, r"DMA-BUF is available on GPU device (\d{1,6})"),),
    "Check": (
        _form(
            RemarkKind.P2P_TYPE,
            r"Check P2P Type (?:isAllDirectP2p|intraNodeP2pSupport) ([01]) directMode [01](?: isAllCudaP2p ([01]))?",
        ),
    ),
    "P2P": (
        _form(RemarkKind.DRIVER_REFUSED, r"P2P is disabled between connected GPUs (\d{1,6}) and (\d{1,6})"),
        _form(RemarkKind.DRIVER_REFUSED, r"P2P not supported between GPU(\d{1,6}) and GPU(\d{1,6})"),
        _form(RemarkKind.NVLINK_REFUSED, r"P2P is disabled between NVLINK connected GPUs (\d{1,6}) and (\d{1,6})"),
    ),
    "Could": (_form(RemarkKind.PEER_ACCESS_REFUSED, "Could not enable P2P" + _PAIR_OF_DEVICES),),
    "peer": (_form(RemarkKind.PEER_QUERY_FAILED, "peer query failed" + _PAIR_OF_DEVICES),),
    "Legacy": (_form(RemarkKind.LEGACY_IPC_REFUSED, r"Legacy IPC not supported"),),
    "NVLS": (_form(RemarkKind.MULTICAST, r"NVLS multicast support is (not )?available on dev (\d{1,6})"),),
    "CC": (_form(RemarkKind.CONFIDENTIAL, r"CC On\b"),),
    "No": (
        _form(
            RemarkKind.NO_TRANSPORT,
            r"No transport found(?: for rank (\d{1,7})\[[0-9a-f]{1,12}\] -> rank (\d{1,7})\[[0-9a-f]{1,12}\])?",
        ),
    ),
    "MNNVL": (
        _form(RemarkKind.MNNVL_BROKEN, r"MNNVL \(cliqueSize \d+\) is available but not working"),
        _form(
            RemarkKind.FABRIC,
            r"MNNVL busId 0x[0-9a-f]{1,12} fabric UUID ([0-9a-f]{1,16}\.[0-9a-f]{1,16}) cliqueId 0x([0-9a-f]{1,8})",
        ),
    ),
    "CPU/": (_form(RemarkKind.PROCESSOR, r"CPU/[0-9a-fA-F]{1,6}(?:-[0-9a-fA-F]{1,6})? \((\d/\d)/"),),
    "GPU": (
        _form(RemarkKind.GDR_FAR, r"GPU Direct RDMA Disabled for GPU ([0-9a-f]{1,16}) / HCA ([0-9a-f]{1,16})"),
        _form(RemarkKind.GDR_NEAR, r"GPU Direct RDMA Enabled for GPU ([0-9a-f]{1,16}) / HCA ([0-9a-f]{1,16})"),
    ),
}
"""By the first word of the message."""

FIRST_WORDS = frozenset(word.encode() for word in _FORMS)

_INTERFACE = re.compile(r"\[\d+\]([\w.@-]{1,60}):", re.ASCII)
_SHORTEST_BUS_ID = 4
_IN_PROGRESS = b"7"
_SOCKETS = re.compile(r"(?:^|/)(?:socket|proxy|bootstrap|ras|rasnet|peers|ipcsocket)\.cc:", re.ASCII)

_GDR = re.compile(r"NET/[^:]{1,60}: GPU Direct RDMA (Enabled|Disabled) for HCA (\d{1,6}) '([^']{0,60})'", re.ASCII)
_SETTING = re.compile(rb"(NCCL_\w{1,60}) set (?:by environment )?to (.*)", re.S)
_FAILED_CALL = re.compile(
    rb"(?:\[[\w ]{1,60}\] )?([\w./-]{1,120}\.(?:cc|cu|cpp|c|h):\d{1,6})(?: \(\w{1,80}\))? -> ([1-9]\d?)\b"
)
_NETWORK = re.compile(rb"Using network (.{1,60})")
_VERSION = re.compile(rb"NCCL version (\d[\w.]{0,30}(?:\+cuda[\d.]{1,10})?)")
_PATHS = re.compile(rb"GPU/(?:[0-9a-fA-F]{1,4}-)?([0-9a-fA-F]{1,14}) :")
_PATH = re.compile(rb"GPU/(?:[0-9a-fA-F]{1,4}-)?([0-9a-fA-F]{1,14}) \(\d+/[\d.]+/([A-Z0-9]{2,4})\)")
_NVLINK_SIGNS = (b"+ NVL[", b"NVS/", b"/NVL)", b"/NVB)", b"/C2C)", b", type NVL/")
_LOCAL_BITS = (1 << 40) - 1
"""NCCL 2.30 numbers several ranks on one GPU above the bus id."""


class OwnGpu(NamedTuple):
    """The rank of the writing thread in the communicator that it initialises, and its GPU's bus id as NCCL has it."""

    rank: int
    bus: int


class ReturnedError(NamedTuple):
    """A place in NCCL's source, and the error that it hands on: 1 CUDA, 2 system, 3 internal, 6 a remote process."""

    place: str
    code: int

    @property
    def is_of_sockets(self) -> bool:
        """True if it is of what reads and serves sockets, and is told of nothing else."""
        return _SOCKETS.search(self.place) is not None


def parse_remark(message: bytes, own: OwnGpu | None = None) -> Note | None:
    """The note in a message; None where it is none of these lines, or about the GPU of another process."""
    text = message[:_LONGEST].decode("ascii", "replace").rstrip()
    if text.startswith("NET/") and (found := _GDR.match(text)):
        kind = RemarkKind.GDR_ENABLED if found[1] == "Enabled" else RemarkKind.GDR_DISABLED
        return Note(kind, (found[2], found[3]), text)
    for kind, pattern in _FORMS.get("CPU/" if text.startswith("CPU/") else text.partition(" ")[0], ()):
        if found := pattern.match(text):
            if kind is RemarkKind.SOCKET_INTERFACES:
                return Note(kind, tuple(_INTERFACE.findall(text)), text)
            groups = tuple(group or "" for group in found.groups())
            if kind in _ABOUT_OWN_GPU:
                bus = _own_bus(groups[0], own)
                return None if bus is None else Note(kind, (bus_id(bus), groups[1]), text)
            about = tuple(bus_id(int(group, 16)) for group in groups) if kind in _ABOUT_BUS_IDS else groups
            return Note(kind, about, text)
    return None


def _own_bus(gpu: str, own: OwnGpu | None) -> int | None:
    """The bus id of the writer's GPU where a line is about that; without a communicator, of a GPU that has one."""
    if own is None:
        return int(gpu, 16) if len(gpu) >= _SHORTEST_BUS_ID else None
    return own.bus if gpu in (f"{own.bus:x}", str(own.rank)) else None


def parse_setting(message: bytes) -> tuple[str, str] | None:
    """'NCCL_P2P_DISABLE set by environment to 1', some of which end with a full stop; 'NCCL_IB_HCA set to mlx5_0'."""
    found = _SETTING.match(message[:_LONGEST])
    if found is None:
        return None
    value = found[2].decode("utf-8", "replace").strip()
    number = value.removesuffix(".")
    return found[1].decode(), number if number.lstrip("-").isdigit() else value


def parse_failed_call(message: bytes) -> ReturnedError | None:
    """'transport/shm.cc:551 -> 2'; 7 is no error but an operation in progress."""
    found = _FAILED_CALL.match(message)
    if found is None or found[2] == _IN_PROGRESS:
        return None
    return ReturnedError(found[1].decode(), int(found[2]))


def parse_network(message: bytes) -> str | None:
    """'Using network IB'."""
    found = _NETWORK.match(message)
    return None if found is None else found[1].decode("ascii", "replace").strip()


def parse_version(line: bytes) -> str | None:
    """'NCCL version 2.28.9+cuda13.0', which has no prefix below the level INFO, anywhere in a line."""
    found = _VERSION.search(line)
    return None if found is None else found[1].decode()


def shows_nvlinks(message: bytes) -> bool:
    """True if a line of NCCL's topology, its matrix, or its search shows NVLinks, of whatever GPUs of the node."""
    return any(sign in message for sign in _NVLINK_SIGNS)


def parse_paths(message: bytes) -> dict[tuple[str, str], str]:
    """A row of NCCL's matrix of path types: 'GPU/60 :GPU/60 (0/5000.0/LOC) GPU/70 (2/240.0/NVL) ...', by bus ids."""
    row = _PATHS.match(message)
    if row is None:
        return {}
    source = _bus(row[1])
    return {(source, _bus(found[1])): found[2].decode() for found in _PATH.finditer(message, row.end())}


def _bus(text: bytes) -> str:
    return bus_id(int(text, 16) & _LOCAL_BITS)
