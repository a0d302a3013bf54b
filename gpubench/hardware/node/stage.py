"""A child of the probe: `python -P -m gpubench.hardware.node.stage STAGE ROOT` writes facts as a line of JSON."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpubench.errors import CouldNotMeasureError, GpubenchError
from gpubench.hardware.host import leave_core

if TYPE_CHECKING:
    from gpubench.hardware.node.drivers import CudaFacts
    from gpubench.hardware.node.gpus import NvmlFacts
    from gpubench.hardware.node.sysfs import SysfsFacts

SYSFS, NVML, CUDA = "sysfs", "nvml", "cuda"


def read_stage(stage: str, root: Path, environment: Mapping[str, str]) -> "SysfsFacts | NvmlFacts | CudaFacts":
    """The facts that a child reads; CouldNotMeasureError where the source is there and does not answer."""
    if stage == SYSFS:
        from gpubench.hardware.node.sysfs import read_sysfs

        return read_sysfs(root)
    if stage == NVML:
        from gpubench.hardware.node.nvml import read_nvml

        return read_nvml()
    return _read_cuda(environment.get("CUDA_VISIBLE_DEVICES"))


def _read_cuda(visible_devices: str | None) -> "CudaFacts":
    from gpubench.hardware.node.drivers import CudaFacts, CudaUnavailableError, load_cuda, read_cuda

    try:
        return read_cuda(load_cuda(), visible_devices)
    except CudaUnavailableError as error:
        if error.absent:
            return CudaFacts(absent=str(error), visible_devices=visible_devices)
        raise CouldNotMeasureError(str(error)) from error


def main(arguments: Sequence[str]) -> int:
    """The child: facts to stdout, or one line about what went wrong to stderr. Returns the exit code."""
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
