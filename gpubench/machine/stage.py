"""A child process of the probe: `python -P -m gpubench.machine.stage STAGE ROOT` prints facts as one line of JSON."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.errors import CouldNotMeasureError, GpubenchError
from gpubench.machine.host import leave_core

if TYPE_CHECKING:
    from gpubench.machine.drivers import CudaFacts
    from gpubench.machine.gpus import NvmlFacts
    from gpubench.machine.sysfs import SysfsFacts

SYSFS, NVML, CUDA = "sysfs", "nvml", "cuda"
# names of further stages, which backends/libraries.py runs
SEARCH, NCCL4PY, MPI4PY, VERSION = "search", "nccl4py", "mpi4py", "version"


def read_stage(stage: str, root: Path, environment: Mapping[str, str]) -> "SysfsFacts | NvmlFacts | CudaFacts":
    """Read one stage's facts. Raise CouldNotMeasureError if the source exists but does not respond."""
    if stage == SYSFS:
        from gpubench.machine.sysfs import read_sysfs

        return read_sysfs(root)
    if stage == NVML:
        from gpubench.machine.nvml import read_nvml

        return read_nvml()
    return _read_cuda(environment.get("CUDA_VISIBLE_DEVICES"))


def _read_cuda(visible_devices: str | None) -> "CudaFacts":
    from gpubench.machine.drivers import CudaFacts, CudaUnavailableError, load_cuda, read_cuda

    try:
        return read_cuda(load_cuda(), visible_devices)
    except CudaUnavailableError as error:
        if error.absent:
            return CudaFacts(absent=str(error), visible_devices=visible_devices)
        raise CouldNotMeasureError(str(error)) from error


def main(arguments: Sequence[str]) -> int:
    """Print the facts to stdout, or an error line to stderr. Return the exit code."""
    stage, root = arguments
    leave_core()
    try:
        facts = read_stage(stage, Path(root), os.environ)
    except GpubenchError as error:
        sys.stderr.write(f"{error.seen}\n")
        return error.exit_code
    from gpubench.model.terms.plain import to_plain

    sys.stdout.write(json.dumps(to_plain(facts)) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
