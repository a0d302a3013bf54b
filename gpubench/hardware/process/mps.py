"""CUDA's MPS as a process meets it: whether a server can be reached, and what ranks that share a GPU need."""

import errno
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from gpubench.errors import MPS_PERCENTAGE, SHARED_GPU_VARIABLE

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPES = "/tmp/nvidia-mps"
_CONTROL = "control"

_MAX_CTAS = "NCCL_MAX_CTAS"
_CAPPED_FROM = 8
_CTAS_OF_A_GPU = 64
"""Of all ranks together, where a rank's share of the SMs is less than NCCL's usual number of CTAs: 8 ranks with 8 each
ran on the 132 SMs of an H100; four ran without a cap."""

_TURNS_MS = {2: 4.5, 4: 27.0, 8: 126.0}
"""Milliseconds that an operation took on one H100 where so many ranks took turns, whatever its size (NCCL 2.32.3)."""


def mps_serves(environment: Mapping[str, str]) -> bool:
    """True where a process with this environment reaches an MPS control daemon."""
    control = Path(environment.get(PIPES) or _DEFAULT_PIPES, _CONTROL)
    try:
        kind = control.stat().st_mode
        if stat.S_ISFIFO(kind):
            os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))
            return True
        return stat.S_ISSOCK(kind) and _is_heard(control)
    except OSError:
        return False


def _is_heard(control: Path) -> bool:
    """True where somebody listens on a socket, who is told nothing: it is of another type, which the kernel finds out
    after it has found a listener (unix(7)).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(str(control)) in (0, errno.EPROTOTYPE)


def sharing_settings(ranks_per_gpu: int, kernels_at_once: int = 1) -> dict[str, str]:
    """The variables with which so many ranks share a GPU; without MPS those of MPS change nothing.

    `kernels_at_once` are those of a rank that have to fit beside each other, 2 where it computes beside a collective:
    two ranks of an H100 hung with 50 % of its SMs each, and ran with 25 %.
    """
    if ranks_per_gpu == 1:
        return {}
    parts = ranks_per_gpu * kernels_at_once
    settings = {SHARED_GPU_VARIABLE: "1", MPS_PERCENTAGE: str(max(1, 100 // parts))}
    if parts >= _CAPPED_FROM:
        settings[_MAX_CTAS] = str(max(1, _CTAS_OF_A_GPU // parts))
    return settings


def sm_percent(environment: Mapping[str, str]) -> float:
    """The percentage of a GPU's SMs that MPS leaves a process with this environment; 100 where nothing limits it."""
    try:
        return min(100.0, float(environment.get(MPS_PERCENTAGE, "100")))
    except ValueError:
        return 100.0


def cost_of_turns(ranks_per_gpu: int) -> str:
    """What it costs that ranks of a GPU take turns, in words."""
    alike = min(_TURNS_MS, key=lambda ranks: abs(ranks - ranks_per_gpu))
    least = "at least " if ranks_per_gpu > max(_TURNS_MS) else ""
    return (
        f"no MPS server runs, so the {ranks_per_gpu} ranks of a GPU take turns: an operation of any size takes "
        f"{least}about {_TURNS_MS[alike]:g} ms (as on an H100 with {alike} ranks). "
        "Try: nvidia-cuda-mps-control -d, which lets them run at the same time"
    )
