"""Facts of this process from system calls: passing descriptors between processes, and the memory policy.

A filter of calls (seccomp) that no container's runtime made could end a process for a call that it does not know, so
under one nothing is tried.
"""

import ctypes
import os
import platform
from collections.abc import Iterable

from gpubench.hardware.process.rights import RUNTIMES
from gpubench.hardware.system_files import UnknownFields
from gpubench.model.terms.cpu_ranges import ranges_of

_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
"""Call numbers, alike on every architecture. Python may have been built without its own pidfd_open."""

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "ppc64le": 260}
_POLICIES = ("default", "preferred", "bind", "interleave", "local", "preferred many", "weighted interleave")
"""MPOL_* in linux/mempolicy.h, from 0 on; above them stand flags."""

_MODE_BITS = 0xFF
_MOST_NODES = 4096
_BITS_PER_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_FILTERED = 2
_NOT_TRIED = "not tried: a seccomp filter is in force, and whose is not known"


def may_call(seccomp: int | None, hints: Iterable[str]) -> bool:
    """True where calls may be tried: no filter, or a container runtime's, which refuses calls and kills nobody."""
    return seccomp != _FILTERED or not RUNTIMES.isdisjoint(hints)


def pidfd_getfd(unknown: UnknownFields, *, allowed: bool) -> bool | None:
    """True where processes can pass descriptors of GPU memory by pidfd_getfd, as expandable segments do.

    It is tried on this process itself, which no setting of ptrace forbids: those are facts of their own.
    """
    if not allowed:
        unknown.reasons["pidfd_getfd"] = _NOT_TRIED
        return None
    library = ctypes.CDLL(None, use_errno=True)
    own = library.syscall(_PIDFD_OPEN, os.getpid(), 0)
    if own < 0:
        unknown.reasons["pidfd_getfd"] = f"pidfd_open: {os.strerror(ctypes.get_errno())}"
        return False
    taken = library.syscall(_PIDFD_GETFD, own, own, 0)
    if taken < 0:
        unknown.reasons["pidfd_getfd"] = f"pidfd_getfd: {os.strerror(ctypes.get_errno())}"
    for descriptor in (own, taken):
        if descriptor >= 0:
            os.close(descriptor)
    return bool(taken >= 0)


def memory_policy(unknown: UnknownFields, *, allowed: bool) -> str | None:
    """From which memory nodes this process takes memory: 'default', or 'bind 0-1' as numactl sets it."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if not allowed or number is None:
        unknown.reasons["memory_policy"] = _NOT_TRIED if number else f"not asked on {platform.machine()}"
        return None
    mode, words = ctypes.c_int(), (ctypes.c_ulong * (_MOST_NODES // _BITS_PER_WORD))()
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, ctypes.byref(mode), words, _MOST_NODES, None, 0):
        unknown.reasons["memory_policy"] = f"get_mempolicy: {os.strerror(ctypes.get_errno())}"
        return None
    nodes = ranges_of(sum(word << _BITS_PER_WORD * position for position, word in enumerate(words)))
    policy = mode.value & _MODE_BITS
    name = _POLICIES[policy] if policy < len(_POLICIES) else f"policy {policy}"
    return f"{name} {nodes}".rstrip()
