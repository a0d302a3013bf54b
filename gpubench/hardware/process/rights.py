"""Rights of this process and signs of a container around it. Nothing is opened and nothing is changed."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from gpubench.hardware.system_files import UnknownFields, exists, text_of

_CAPABILITIES = {
    2: "DAC_READ_SEARCH",
    12: "NET_ADMIN",
    13: "NET_RAW",
    14: "IPC_LOCK",
    17: "SYS_RAWIO",
    19: "SYS_PTRACE",
    21: "SYS_ADMIN",
    23: "SYS_NICE",
    24: "SYS_RESOURCE",
}
"""Numbers of linux/capability.h: those that memory sharing, RDMA and configuration spaces ask for."""

_EFFECTIVE = re.compile(r"^CapEff:\s*([0-9a-f]{1,16})$", re.ASCII | re.MULTILINE)
_MEMORY_NODES = re.compile(r"^Mems_allowed_list:\s*([\d,-]{1,300})$", re.ASCII | re.MULTILINE)
_MARKS = {"docker": ".dockerenv", "podman": "run/.containerenv", "singularity": ".singularity.d"}
_GROUPS = {
    "kubernetes": "kubepods",
    "docker": "docker",
    "podman": "libpod",
    "containerd": "containerd",
    "lxc": "lxc",
    "slurm": "slurm",
}


RUNTIMES = frozenset((*_MARKS, *_GROUPS)) - {"slurm"}
"""The signs among `container_hints` that a container's runtime leaves."""


def capabilities(status: str, unknown: UnknownFields) -> tuple[str, ...] | None:
    """Those in force, of the ones that count here, from the text of /proc/self/status."""
    match = _EFFECTIVE.search(status)
    if match is None:
        unknown.reasons["capabilities"] = "/proc/self/status has no CapEff"
        return None
    bits = int(match[1], 16)
    return tuple(name for bit, name in _CAPABILITIES.items() if bits >> bit & 1)


def memory_nodes(status: str, unknown: UnknownFields) -> str | None:
    """The memory nodes that this process may take memory from, as a list of ranges."""
    match = _MEMORY_NODES.search(status)
    if match is None:
        unknown.reasons["memory_nodes"] = "/proc/self/status has no Mems_allowed_list"
        return None
    return match[1]


def denied(paths: Iterable[str], root: Path) -> tuple[str, ...]:
    """The device files that this process may not read and write: by their mode, or by its group's list of devices.

    access(2) asks both and opens nothing (`inode_permission` in the kernel); opening a GPU's file could wake it up.
    """
    return tuple(
        path for path in paths if not os.access(root / path.removeprefix("/"), os.R_OK | os.W_OK, effective_ids=True)
    )


def container_hints(root: Path) -> tuple[str, ...]:
    """Signs of a container or a job's control group, by the names of what leaves them; none is a proof."""
    found = [name for name, mark in _MARKS.items() if exists(root / mark)]
    groups = text_of(root / "proc/self/cgroup") or ""
    found += [name for name, word in _GROUPS.items() if word in groups and name not in found]
    if _root_file_system(text_of(root / "proc/self/mountinfo") or "") in ("overlay", "fuse.fuse-overlayfs", "squashfs"):
        found.append("layered root")
    return tuple(found)


def _root_file_system(mounts: str) -> str | None:
    """The type of what is mounted on / last ('ID PARENT DEVICE ROOT PLACE OPTIONS ... - TYPE SOURCE OPTIONS')."""
    kind = None
    for line in mounts.splitlines():
        place, _, source = line.partition(" - ")
        fields = place.split(maxsplit=5)
        if len(fields) > 4 and fields[4] == "/" and source:
            kind = source.split(maxsplit=1)[0]
    return kind
