"""Read this node through three child processes, one for each source, with a deadline. A driver that hangs blocks
only its child.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from gpubench import __version__
from gpubench.errors import MPS_PERCENTAGE, UsageError
from gpubench.machine import stage
from gpubench.machine.children import die_with_parent, module_command, package_environment
from gpubench.machine.drivers import CudaFacts, CudaGpu
from gpubench.machine.gpus import NvmlFacts
from gpubench.machine.host import run_delay
from gpubench.machine.nvml import visible_count
from gpubench.machine.stage import CUDA, NVML, SYSFS
from gpubench.machine.sysfs import SysfsFacts
from gpubench.model.facts.health import HIDDEN, error_counts, growth
from gpubench.model.facts.snapshot import (
    WAITED_FOR_CPU,
    DriverFacts,
    DriverSettings,
    GpuFacts,
    PairFacts,
    PcieLink,
    ProbeFailure,
    Snapshot,
)
from gpubench.model.terms.plain import from_plain
from gpubench.model.terms.units import plural

# Time for a child to exit after it answered or was killed. A child inside a driver call may never exit
_SECONDS_TO_END = 1.0
# Time for a child to exit after its output ended. Only its exit status then explains the failure
_SECONDS_TO_EXIT = 10.0
_CHUNK_BYTES = 2**16
# A child that waited longer for a CPU is late because of load. In a hung driver, the child sleeps instead
_LEAST_WAIT_S = 1.0


class StageResult(Struct, frozen=True):
    """A child's answer, or the reason why it gave none."""

    document: dict[str, Any] | None = None
    error: str = ""
    timed_out: bool = False


def run_stages(
    commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], timeout_s: float
) -> dict[str, StageResult]:
    """Run all commands and return their results by name. Kill children that are late. Only one that survives
    SIGKILL remains.
    """
    with Stages(commands, environment) as stages:
        return stages.results(timeout_s)


class Stages:
    """Child processes that run in the background. Leaving the context ends those that are still running."""

    def __init__(self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> None:
        self._children = {name: _Child(command, environment) for name, command in commands.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for child in self._children.values():
            child.end()

    def results(self, timeout_s: float) -> dict[str, StageResult]:
        """Wait up to `timeout_s` for answers. Return each child's answer or failure by name."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for child in self._children.values():
                if child.output is not None:
                    selector.register(child.output, selectors.EVENT_READ, child)
            while selector.get_map():
                left = deadline - time.monotonic()
                for key, _ in selector.select(max(left, 0.0)):
                    if key.data.read():
                        selector.unregister(key.fileobj)
                if left <= 0:
                    break  # checked after reading, so that output which arrived in time counts
        return {name: child.result(timeout_s) for name, child in self._children.items()}


class _Child:
    """A child process and its output so far. Its answer is a line of JSON, whether or not the child exits
    afterwards.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.output: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._written = b""
        self._document: dict[str, Any] | None = None
        self._ended = False
        self._start_error = ""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                preexec_fn=die_with_parent,
            )
            self.output = self._process.stdout
        except (OSError, subprocess.SubprocessError) as error:
            self._start_error = str(error)

    def read(self) -> bool:
        """Read the available output. Return True at its end, or if the answer is complete."""
        assert self.output is not None
        chunk = os.read(self.output.fileno(), _CHUNK_BYTES)
        self._written += chunk
        self._ended = not chunk
        for line in self._written.splitlines(keepends=True) if b"\n" in chunk else ():
            with contextlib.suppress(ValueError):
                document = json.loads(line)
                self._document = document if isinstance(document, dict) else None
        return self._ended or self._document is not None

    def result(self, timeout_s: float) -> StageResult:
        if self._document is not None:
            return StageResult(self._document)
        if self._process is None:
            return StageResult(error=f"it does not start: {self._start_error}")
        if not self._ended:
            late = f"no answer within {timeout_s:g} s"
            delay = run_delay(self._process.pid)
            waited_s = 0.0 if delay is None else delay.waited_ns / 1e9
            if waited_s > max(_LEAST_WAIT_S, timeout_s / 2):
                return StageResult(error=f"{late}: it waited {waited_s:.0f} s {WAITED_FOR_CPU}")
            return StageResult(error=late, timed_out=True)
        return StageResult(error=self._why_ended(self._process))

    def _why_ended(self, process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_EXIT)
        code = process.returncode
        self._stderr.seek(0)
        *_, last_line = "", *self._stderr.read().decode(errors="replace").strip().splitlines()
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return f"killed by {name}" + (f": {last_line}" if last_line else "")
        if last_line and code != 0:
            return last_line
        return "it ended without an answer" + (f" (exit code {code})" if code else "")

    def end(self) -> None:
        self._stderr.close()
        if self._process is None or self.output is None:
            return
        self.output.close()
        if self._document is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_END)
        if self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SECONDS_TO_END)


NVML_ALONE = ("confidential_computing", "nvlink_bandwidth_mode", "nvlink_bandwidth_reduced")
"""Driver settings that only NVML reports, because they are in no file."""

UNLISTED = "on the PCI bus, but the driver does not list it"


def merge(
    host: str,
    sysfs: SysfsFacts | None,
    nvml: NvmlFacts | None,
    cuda: CudaFacts | None,
    failures: Sequence[ProbeFailure] = (),
) -> Snapshot:
    """Merge the facts from three sources into a node's snapshot.

    A source that did not answer is None, and `failures` has the reason.
    """
    sysfs = sysfs or SysfsFacts()
    kernel = sysfs.node
    listed = _merge_gpus(sysfs, nvml)
    unseen = _why_unseen(len(listed), cuda)
    gpus = tuple(_add_cuda(gpu, cuda, unseen) for gpu in listed)
    driver = nvml.driver if nvml is not None else DriverFacts()
    is_driver_up = nvml is not None and driver.absent is None
    if gpus and is_driver_up and cuda is not None and cuda.absent is not None and unseen != HIDDEN:
        failures = (*failures, ProbeFailure(stage="cuda", error=cuda.absent))
    shown = {gpu.bus_id for gpu in gpus}
    dma_buf = [gpu.dma_buf for gpu in (cuda.gpus if cuda is not None else ()) if gpu.dma_buf is not None]
    return replace(
        kernel,
        host=host,
        source=f"gpubench {__version__}",
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        # If the driver does not respond, the kernel still has its version and whether the module is the open one.
        driver=replace(
            driver,
            version=driver.version or kernel.driver.version,
            open_kernel_module=kernel.driver.open_kernel_module,
        ),
        driver_settings=_driver_settings(kernel.driver_settings, nvml, failures),
        gpudirect=replace(kernel.gpudirect, dma_buf=all(dma_buf) if dma_buf else None),
        gpus=gpus,
        gpus_of_others=sum(gpu.bus_id not in shown for gpu in kernel.gpus),
        pairs=tuple(_merge_pairs(gpus, nvml, cuda, failures, unseen)),
        failures=tuple(failures),
    )


def _driver_settings(
    kernel: DriverSettings, nvml: NvmlFacts | None, failures: Sequence[ProbeFailure]
) -> DriverSettings:
    settings = nvml.settings if nvml is not None else DriverSettings()
    reason = next((failure.error for failure in failures if failure.stage == "nvml"), "NVML was not read")
    if nvml is not None:
        reason = nvml.driver.absent or reason
    values = {name: getattr(settings, name) for name in NVML_ALONE}
    unknown = {name: settings.unknown.get(name, reason) for name, value in values.items() if value is None}
    return replace(kernel, **values, unknown={**kernel.unknown, **unknown})


def _merge_gpus(sysfs: SysfsFacts, nvml: NvmlFacts | None) -> list[GpuFacts]:
    if nvml is None or nvml.driver.absent is not None:
        return list(sysfs.node.gpus)
    gpus_on_bus = {gpu.bus_id: gpu for gpu in sysfs.node.gpus}
    listed = {gpu.bus_id for gpu in nvml.gpus if gpu.bus_id is not None}
    unlisted = [gpu for gpu in sysfs.node.gpus if gpu.bus_id not in listed]
    nameless = [gpu for gpu in nvml.gpus if gpu.bus_id is None]
    names: dict[int, str | None] = {}
    if nameless and len(nameless) == len(unlisted):
        # NVML numbers GPUs by bus ID. The numbers include GPUs that were lost before NVML could read their bus ID.
        names.update((gpu.index, other.bus_id) for gpu, other in zip(nameless, unlisted, strict=True))
        unlisted = []
    gpus = [_add_place(replace(gpu, bus_id=gpu.bus_id or names.get(gpu.index)), gpus_on_bus) for gpu in nvml.gpus]
    following = max((gpu.index for gpu in gpus), default=-1) + 1
    # A GPU that NVML does not list is not always lost. A GPU of another virtual machine is bound to another driver. A
    # container sees every GPU on the bus, but has device files only for its own GPUs. A lost GPU keeps its device file.
    has_all_files = not 0 < sysfs.device_files <= len(nvml.gpus)
    lost_drivers = (None, "nvidia") if has_all_files else (None,)
    lost = [gpu for gpu in unlisted if sysfs.gpu_drivers.get(gpu.bus_id or "") in lost_drivers]
    return [*gpus, *(replace(gpu, index=following + i, lost=UNLISTED) for i, gpu in enumerate(lost))]


def _add_place(gpu: GpuFacts, gpus_on_bus: Mapping[str | None, GpuFacts]) -> GpuFacts:
    other = gpus_on_bus.get(gpu.bus_id)
    if gpu.bus_id is None or other is None:
        return gpu
    link, kernel_link = asdict(gpu.pcie), asdict(other.pcie)
    pcie = PcieLink(**{name: value or kernel_link[name] for name, value in link.items()})
    return replace(gpu, name=gpu.name or other.name, uuid=gpu.uuid or other.uuid, place=other.place, pcie=pcie)


def _add_cuda(gpu: GpuFacts, cuda: CudaFacts | None, unseen: str) -> GpuFacts:
    found = _find_in_cuda(gpu, cuda)
    if found is None:
        return replace(gpu, unknown={**gpu.unknown, "cuda_index": unseen}) if unseen and not gpu.lost else gpu
    gpu = replace(gpu, cuda_index=found.index, cuda_features=found.features)
    if gpu.mig:
        return replace(gpu, unknown={**gpu.unknown, "multiprocessors": "under MIG, CUDA counts the SMs of an instance"})
    return replace(gpu, multiprocessors=found.multiprocessors)


def _why_unseen(gpus: int, cuda: CudaFacts | None) -> str:
    """Return why CUDA lists fewer GPUs than the driver. '' if CUDA_VISIBLE_DEVICES does not explain it."""
    if cuda is None or cuda.visible_devices is None:
        return ""
    named = visible_count(gpus, cuda.visible_devices)
    if len(cuda.gpus) >= named or (cuda.gpus and "MIG-" in cuda.visible_devices):
        return HIDDEN
    return f"CUDA lists {len(cuda.gpus)} of the {plural(named, 'GPU')} that CUDA_VISIBLE_DEVICES names"


def _find_in_cuda(gpu: GpuFacts, cuda: CudaFacts | None) -> CudaGpu | None:
    if cuda is None or gpu.bus_id is None:
        return None
    return next((found for found in cuda.gpus if found.bus_id == gpu.bus_id), None)


def _merge_pairs(
    gpus: Sequence[GpuFacts],
    nvml: NvmlFacts | None,
    cuda: CudaFacts | None,
    failures: Sequence[ProbeFailure],
    unseen: str,
) -> Iterator[PairFacts]:
    nvml_pairs = {(pair.source, pair.destination): pair for pair in nvml.pairs} if nvml is not None else {}
    for source, destination in permutations(gpus, 2):
        names = source.device, destination.device
        access = None
        if cuda is not None and source.bus_id is not None and destination.bus_id is not None:
            access = cuda.peers.get(source.bus_id, {}).get(destination.bus_id)
        if access is None and names not in nvml_pairs:
            continue
        pair = nvml_pairs.get(names, PairFacts(source=names[0], destination=names[1]))
        if access is not None:
            yield replace(pair, cuda=access)
            continue
        is_shown = _find_in_cuda(source, cuda) is not None and _find_in_cuda(destination, cuda) is not None
        if unseen and not is_shown:
            reason = unseen
        elif cuda is None:
            reason = next((failure.error for failure in failures if failure.stage == "cuda"), "CUDA was not read")
        elif cuda.absent is None and (source.mig or destination.mig):
            reason = "under MIG, CUDA shows one instance"
        else:
            reason = cuda.absent or "CUDA does not list it"
        yield replace(pair, unknown={**pair.unknown, "cuda": reason})


COUNTING = (SYSFS, NVML)  # The stages that read devices' error counters
T = TypeVar("T")


def probe(
    timeout_s: float,
    environment: Mapping[str, str],
    root: Path = Path("/"),
    stages: Mapping[str, Sequence[str]] | None = None,
) -> Snapshot:
    """Read this node within about `timeout_s`. `failures` in the snapshot lists sources that did not answer.

    `stages` are the children's command lines by name. sysfs and procfs are read below `root`.
    """
    return _merge_results(run_stages(stages or stage_commands(root), _whole_gpu_environment(environment), timeout_s))


def watch_errors(
    before: Snapshot,
    timeout_s: float,
    environment: Mapping[str, str],
    root: Path = Path("/"),
    stages: Mapping[str, Sequence[str]] | None = None,
) -> Snapshot:
    """Read the error counters again from the kernel and NVML, and return `before` with the increases since then."""
    commands = {name: command for name, command in (stages or stage_commands(root)).items() if name in COUNTING}
    results = run_stages(commands, _whole_gpu_environment(environment), timeout_s)
    after = _merge_results({CUDA: StageResult(error="not read"), **results})
    if any(failure.stage in COUNTING for failure in after.failures):
        return before
    return replace(before, errors_grown=growth(error_counts(before), error_counts(after)))


class Probe(Stages):
    """A probe that starts on construction and runs in the background."""

    def __init__(self, environment: Mapping[str, str], stages: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(stages or stage_commands(), _whole_gpu_environment(environment))

    def snapshot(self, timeout_s: float) -> Snapshot:
        """Return this node's snapshot. `failures` lists sources that did not answer within `timeout_s`."""
        return _merge_results(self.results(timeout_s))


def _whole_gpu_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without MPS's limit on SMs, because CUDA would report fewer multiprocessors."""
    return {name: value for name, value in package_environment(environment).items() if name != MPS_PERCENTAGE}


def _merge_results(results: Mapping[str, StageResult]) -> Snapshot:
    failures: list[ProbeFailure] = []
    sysfs = _parse_result(SysfsFacts, SYSFS, results, failures)
    nvml = _parse_result(NvmlFacts, NVML, results, failures)
    cuda = _parse_result(CudaFacts, CUDA, results, failures)
    return merge(socket.gethostname().split(".")[0], sysfs, nvml, cuda, failures)


def stage_commands(root: Path = Path("/")) -> dict[str, list[str]]:
    """Return the command lines of the three child processes, by stage."""
    return {name: module_command(stage.__name__, name, str(root)) for name in (SYSFS, NVML, CUDA)}


def _parse_result(
    kind: type[T], name: str, results: Mapping[str, StageResult], failures: list[ProbeFailure]
) -> T | None:
    result = results[name]
    if result.document is None:
        failures.append(ProbeFailure(stage=name, error=result.error, timed_out=result.timed_out))
        return None
    try:
        return from_plain(kind, result.document)
    except UsageError as error:
        failures.append(ProbeFailure(stage=name, error=f"an answer that is none: {error.seen}"))
        return None
