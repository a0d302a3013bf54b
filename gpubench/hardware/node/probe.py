"""Read this node into a snapshot. Each source is a child process with a deadline: a driver may never answer."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gpubench.errors import MPS_PERCENTAGE, UsageError
from gpubench.hardware.launch.interpreter import module_command, with_package
from gpubench.hardware.node import stage
from gpubench.hardware.node.cuda_driver import CudaFacts
from gpubench.hardware.node.merge import merge
from gpubench.hardware.node.nvml.gpu import NvmlFacts
from gpubench.hardware.node.stage import CUDA, NVML, SYSFS
from gpubench.hardware.node.stages import StageResult, Stages, run_stages
from gpubench.hardware.node.sysfs import SysfsFacts
from gpubench.model.facts.error_counts import error_counts, growth
from gpubench.model.facts.snapshot import ProbeFailure, Snapshot
from gpubench.model.terms.plain import from_plain

COUNTING = (SYSFS, NVML)
"""The stages that know what devices have counted."""

T = TypeVar("T")


def probe(
    timeout_s: float,
    environment: Mapping[str, str],
    root: Path = Path("/"),
    stages: Mapping[str, Sequence[str]] | None = None,
) -> Snapshot:
    """This node, read in at most about `timeout_s`; what did not answer in time is in the snapshot's `failures`.

    `environment` is that of the user's processes, which decides what CUDA shows. `stages` are the command lines of the
    children, by name; `root` is where sysfs and procfs are found.
    """
    return _put_together(run_stages(stages or stage_commands(root), _of_whole_gpus(environment), timeout_s))


def watch_errors(
    before: Snapshot,
    timeout_s: float,
    environment: Mapping[str, str],
    root: Path = Path("/"),
    stages: Mapping[str, Sequence[str]] | None = None,
) -> Snapshot:
    """The snapshot of a node with the errors that its devices have counted since; as it was where one does not answer.

    Only the kernel and NVML are asked. `stages` are as in `probe`.
    """
    asked = {name: command for name, command in (stages or stage_commands(root)).items() if name in COUNTING}
    results = run_stages(asked, _of_whole_gpus(environment), timeout_s)
    after = _put_together({CUDA: StageResult(error="not asked"), **results})
    if any(failure.stage in COUNTING for failure in after.failures):
        return before
    return replace(before, errors_grown=growth(error_counts(before), error_counts(after)))


class Probe(Stages):
    """A probe that runs while something else is done here: it begins when this is made."""

    def __init__(self, environment: Mapping[str, str], stages: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(stages or stage_commands(), _of_whole_gpus(environment))

    def snapshot(self, timeout_s: float) -> Snapshot:
        """This node; what has not answered, and does not within the time from now on, is in its `failures`."""
        return _put_together(self.results(timeout_s))


def _of_whole_gpus(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the children, in which CUDA does not show this process's share of a GPU under MPS as the GPU.

    With 12 % of an H100's SMs the driver counts 14 multiprocessors, not 132.
    """
    return {name: value for name, value in with_package(environment).items() if name != MPS_PERCENTAGE}


def _put_together(results: Mapping[str, StageResult]) -> Snapshot:
    failures: list[ProbeFailure] = []
    sysfs = _understood(SysfsFacts, SYSFS, results, failures)
    nvml = _understood(NvmlFacts, NVML, results, failures)
    cuda = _understood(CudaFacts, CUDA, results, failures)
    return merge(socket.gethostname().split(".")[0], sysfs, nvml, cuda, failures)


def stage_commands(root: Path = Path("/")) -> dict[str, list[str]]:
    """The command lines of the three children."""
    return {each: module_command(stage.__name__, each, str(root)) for each in (SYSFS, NVML, CUDA)}


def _understood(kind: type[T], name: str, results: Mapping[str, StageResult], failures: list[ProbeFailure]) -> T | None:
    """The facts in a child's answer; None, with the failure noted, where there are none."""
    result = results[name]
    if result.document is None:
        failures.append(ProbeFailure(stage=name, error=result.error, timed_out=result.timed_out))
        return None
    try:
        return from_plain(kind, result.document)
    except UsageError as error:
        failures.append(ProbeFailure(stage=name, error=f"an answer that is none: {error.seen}"))
        return None
