"""Options of the test run, the inputs of property tests, and the worker that runs MPI jobs."""

import atexit
import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import USUAL
from tests.modules import load_all_modules

# Tests start hundreds of processes: without bytecode, which some environments forbid to write, each compiles all anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests make and remove thousands of files, which takes a twentieth of their processor time on a disk.
_MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 2**32:
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)

# Tests share the cores: of ranks that look for messages without end, two on one core wait 8 ms for each message.
os.environ.update(OMPI_MCA_mpi_yield_when_idle="1")

# A shell without job control has these ignored in what stands before an &, and each process of a test inherits that.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

# How fast a machine is, or how busy, is no test: neither an example nor the making of one has a deadline.
_NOT_TIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
# The same inputs in every run: what a change breaks is seen with that change, and not in somebody else's run.
settings.register_profile("gpubench", _NOT_TIMED, derandomize=True, max_examples=USUAL)
# New inputs in every run, and more of them: pytest -m hypothesis --hypothesis-profile search
settings.register_profile("search", _NOT_TIMED, derandomize=False, max_examples=80 * USUAL)
settings.load_profile("gpubench")


_OF_A_CLUSTER = ("NCCL_", "CUDA_", "NVIDIA_", "NVSHMEM_", "TORCH_", "UCX_", "FI_", "OFI_", "SLURM_")
"""How the names of variables begin that a cluster sets, and that would change what commands say."""


def pytest_configure(config: pytest.Config) -> None:
    """All tests but those of GPUs take place on a machine without any, whatever this one has."""
    expression = config.getoption("markexpr").replace("not gpu", "")
    if "gpu" in expression:
        return
    for name in [each for each in os.environ if each.startswith(_OF_A_CLUSTER)]:
        del os.environ[name]
    with suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        _hide_driver(is_worker=hasattr(config, "workerinput"))


def _hide_driver(*, is_worker: bool) -> None:
    """Processes that are started find broken libraries before those of the driver, and NVML refuses this one."""
    import pynvml

    def refuse(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    pynvml.nvmlInit = pynvml.nvmlInitWithFlags = refuse
    if not is_worker:  # which has its variables from the process that hands out the tests
        folder = Path(tempfile.mkdtemp(prefix="no-driver-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
            (folder / name).write_text("not a library")
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH"))))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="write the golden outputs of tests/machines anew")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Load all of gpubench: Hypothesis also tries the constants of loaded modules, which the order of tests changes.

    Collected tests are most of what a worker holds, and they stay: keep them out of garbage collection.
    """
    if session.config.pluginmanager.hasplugin("dsession"):
        return (yield)
    gc.disable()
    load_all_modules()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` one worker runs all MPI jobs: ranks of two jobs would take the cores from each other."""
    for item in items:
        if item.get_closest_marker("mpi"):
            item.add_marker(pytest.mark.xdist_group("mpi"))
