"""The driver of four GPUs that ranks, and who starts them, believe in; who only starts them loads no more."""

import os
from collections.abc import Mapping

from gpubench.machine.nvml import Driver

RANKS = 4
GPUS = int(os.environ.get("GPUBENCH_TEST_GPUS", RANKS))
DRIVER = Driver(version="580.159.04", cuda=13000, gpus=GPUS, visible=GPUS)


def read_driver(_environment: Mapping[str, str]) -> Driver:
    return DRIVER


def usable_driver(_for_what: str) -> Driver:
    return DRIVER


def check_installed(_driver: Driver) -> None:
    pass
