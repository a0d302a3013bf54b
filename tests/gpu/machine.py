"""The machine of the GPU tests, and how they start several ranks on one GPU.

With several GPUs every rank has its own. Otherwise ranks share one GPU through an MPS server in its own folder, and
need NCCL 2.30 or newer. Only jobs of several ranks use MPS.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from gpubench.errors import FIRST_NCCL_FOR_SHARED_GPUS
from gpubench.machine.host import MPS_PIPES, is_mps_running, sharing_settings
from gpubench.machine.nvml import read_driver
from tests.cli.running import MPI_ENVIRONMENT, environment

DRIVER = read_driver(os.environ)
SHARES = DRIVER.visible == 1
"""Ranks have to share a GPU"""

RANKS = 4 if DRIVER.visible >= 4 else 2
LAST_GPU = min(DRIVER.visible, 2) - 1
"""The second GPU, if there is one, for other users of a job's GPU"""

_NCCL = "GPUBENCH_TEST_NCCL"
_CONTROL = "nvidia-cuda-mps-control"
_LOGS = "CUDA_MPS_LOG_DIRECTORY"
_SECONDS_TO_START = 10.0
_SECONDS_TO_END = 40.0
_KEEPER = f"""
{_CONTROL} -d || exit 1
cat > /dev/null
servers=$(echo get_server_list | timeout 5 {_CONTROL})
echo quit -t 5 | timeout 15 {_CONTROL}
kill -9 $servers $(cat "${MPS_PIPES}"/{_CONTROL}.pid) 2> /dev/null
rm -rf "${MPS_PIPES}"
"""
"""Start a server, and end it when stdin is closed: by a fixture, or because the tests' process is gone."""

_folder: Path | None = None


def preloaded() -> dict[str, str]:
    """Return the variable that loads NCCL for ranks that share a GPU, if another NCCL than the default is set."""
    named = os.environ.get(_NCCL)
    return {} if named is None else {"LD_PRELOAD": named}


@cache
def _why_no_sharing() -> str:
    if shutil.which(_CONTROL) is None:
        return f"one GPU, and no {_CONTROL} here, without which ranks that share it wait for their turns"
    found = subprocess.run(
        [sys.executable, "-c", "from gpubench.backends.nccl.library import NcclLibrary as L; print(L().version_code)"],
        env=environment(**preloaded()),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    code = found.stdout.strip()
    if not code.isdecimal():
        return f"one GPU, and no NCCL is found: {found.stderr.strip()[-200:]}"
    if int(code) < FIRST_NCCL_FOR_SHARED_GPUS:
        return f"one GPU, and NCCL {code} lets no ranks share it: {_NCCL}=/path/libnccl.so.2 names 2.30 or newer"
    return ""


def why_no_ranks() -> str:
    """Return why no job of several ranks can run here, or ''."""
    if not DRIVER.visible:
        return "no GPU here"
    return _why_no_sharing() if SHARES else ""


has_gpu = pytest.mark.skipif(DRIVER.visible == 0, reason="no GPU here")
_has_ranks = pytest.mark.skipif(bool(why_no_ranks()), reason=why_no_ranks())
several_ranks = [_has_ranks, pytest.mark.usefixtures("mps")]
"""Marks of tests with jobs of several ranks"""

several_ranks_that_die = [_has_ranks, pytest.mark.usefixtures("own_mps")]
"""Marks of tests that kill or stop ranks, with a server of their own"""


def between_gpus(what: str) -> pytest.MarkDecorator:
    """Mark a test that needs two GPUs, because it is about the link between them."""
    return pytest.mark.skipif(DRIVER.visible < 2, reason=f"needs two GPUs: {what}")


def launch(ranks: int = RANKS) -> tuple[str, ...]:
    """Return the options with which a command launches these ranks."""
    return ("--ranks-per-gpu", str(ranks)) if SHARES else ("--np", str(ranks))


def launched(**changes: str) -> dict[str, str]:
    """Return the environment of a command that launches its own ranks."""
    if not SHARES:
        return environment(**changes)
    if _folder is None:
        raise ValueError("this test does not use the fixture mps")
    return environment(**{**preloaded(), **_places(_folder), **changes})


def under_mpirun(ranks: int = RANKS, kernels_at_once: int = 1, **changes: str) -> dict[str, str]:
    """Return the environment of a test's own mpirun. Ranks that also compute run 2 kernels concurrently."""
    sharing = sharing_settings(ranks, kernels_at_once) if SHARES else {}
    return launched(**{**MPI_ENVIRONMENT, **sharing, **changes})


def gpu_of_rank() -> str:
    """Return a line of shell that sets CUDA_VISIBLE_DEVICES of a rank with a single GPU."""
    return f"CUDA_VISIBLE_DEVICES=$((OMPI_COMM_WORLD_LOCAL_RANK % {max(1, DRIVER.visible)}))"


def _places(folder: Path) -> dict[str, str]:
    return {MPS_PIPES: str(folder), _LOGS: str(folder)}


@contextmanager
def serving() -> Iterator[None]:
    """Run an MPS server if ranks have to share a GPU."""
    global _folder
    if not SHARES or why_no_ranks():
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="gpubench-mps-"))
    places = _places(folder)
    with subprocess.Popen(
        ["bash", "-c", _KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(**places),
        start_new_session=True,
    ) as keeper:
        try:
            deadline = time.monotonic() + _SECONDS_TO_START
            while not is_mps_running(places):
                assert keeper.poll() is None, f"{_CONTROL} -d ended with {keeper.returncode}"
                assert time.monotonic() < deadline, "no MPS server"
                time.sleep(0.02)
            _folder = folder
            yield
        finally:
            _folder = None
            assert keeper.stdin is not None
            keeper.stdin.close()
            keeper.wait(_SECONDS_TO_END)
