"""Jobs of ranks on fake GPUs."""

import json
import subprocess
import sys
from typing import Any

from tests.cli.running import environment, gpubench, mpirun
from tests.formats.schema import VALIDATOR

FAKE_GPUS = (sys.executable, "-m", "tests.mpi.fake_gpus")


def on_fake_gpus(*arguments: str, logs: str = "tuning", **variables: str) -> subprocess.CompletedProcess[str]:
    """Let gpubench start four ranks on fake GPUs, whose NCCL writes these logs."""
    return gpubench(*arguments, env=environment(GPUBENCH_TEST_LOGS=logs, **variables), program=FAKE_GPUS)


def mpirun_on_fake_gpus(
    ranks: int, *arguments: str, logs: str = "tuning", **variables: str
) -> subprocess.CompletedProcess[str]:
    return mpirun(ranks, *arguments, env=environment(GPUBENCH_TEST_LOGS=logs, **variables), program=FAKE_GPUS)


def document_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(result.stdout)
    VALIDATOR.validate(document)
    return document
