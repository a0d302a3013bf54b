"""Options of the test run, which inputs property tests try, and which tests may not run beside each other."""

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: two workers more than CPUs, as those with MPI jobs wait half of their time."""
    return len(os.sched_getaffinity(0)) + 2


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Load all of gpubench: Hypothesis also tries the constants of what is loaded, which the order of tests changes.

    What is collected stays, and is most of what a worker holds: no search for garbage goes through it. The process that
    hands out the tests to workers collects none.
    """
    if session.config.pluginmanager.hasplugin("dsession"):
        return (yield)
    gc.disable()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) / workers
    load_all_modules(first)
    if workers > 1:
        _load_tests(session, first)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000)  # for each 700 new objects, it takes one part in fifteen of all processor time


def _load_tests(session: pytest.Session, first: float) -> None:
    """Import what is collected, beginning with the test module at that part of all.

    In a fresh checkout nothing is compiled: of workers that begin elsewhere each finds what the others have compiled.
    """
    root = session.config.rootpath
    given = [Path(root, argument.partition("::")[0]) for argument in session.config.args]
    paths = sorted({path for each in given for path in (each.rglob("test_*.py") if each.is_dir() else [each])})
    begin = int(first * len(paths))
    for path in paths[begin:] + paths[:begin]:
        with suppress(Exception, pytest.skip.Exception):  # who collects it says so
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """MPI jobs come first, as whoever is done with the rest would else wait for them.

    One worker begins with those that compute, the next one with those that wait.
    """
    waiting: list[pytest.Item] = []
    computing: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        is_job, waits = (item.get_closest_marker(name) for name in ("mpi", "waits"))
        (waiting if waits else computing if is_job else others).append(item)
    stretch = len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    before = max(0, stretch - len(computing))
    items[:] = [*computing, *others[:before], *waiting, *others[before:]]


@pytest.hookimpl(specname="pytest_runtest_protocol")
def pytest_runtest_reports(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test as pytest does, but say nothing of a setup or teardown that passed in less than --durations shows.

    A worker sends each report to the process that hands out the tests, and for one of thousands of small tests three
    reports take as long as the test.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed or report.duration >= 0.005:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """One MPI job for two CPUs at a time, beside one that mostly waits: ranks of more would take the CPUs from it.

    Some have a deadline of seconds.
    """
    if not item.get_closest_marker("mpi"):
        return (yield)
    with place_of_a_job(waits=item.get_closest_marker("waits") is not None).open() as place:
        fcntl.flock(place, fcntl.LOCK_EX)
        try:
            return (yield)
        finally:  # also where a process that a test left behind has it open
            fcntl.flock(place, fcntl.LOCK_UN)


def place_of_a_job(*, waits: bool = False) -> Path:
    """The file that this worker locks while it runs an MPI job."""
    files = sorted(Path(__file__).with_name("mpi").glob("test_*.py"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    place = worker % max(1, len(os.sched_getaffinity(0)) // 2)
    return files[(2 * place + waits) % len(files)]
