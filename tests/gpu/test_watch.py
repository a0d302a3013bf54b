"""On real GPUs: a watch of jobs that are direct, staged, or only copy to the host."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import pytest

from tests.cli.running import ROOT, environment
from tests.gpu.machine import DRIVER, between_gpus, launch, launched, several_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, *several_ranks]
over_links = between_gpus("what links between GPUs count")

ALLREDUCE = ("-m", "gpubench", "allreduce", *launch(2), "--sizes", "256M", "--no-check", "--exit-zero", "--iters")
STAGED = {"NCCL_P2P_DISABLE": "1"}


def beside(command: Sequence[str], variables: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Return exit code and report of a watch that ran during a job."""
    watch = subprocess.Popen(
        [sys.executable, "-m", "gpubench", "watch", "--strict", "--width", "160"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watch.stdout is not None
    watch.stdout.readline()
    job = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=launched(**dict(variables or {})),
        stdout=subprocess.DEVNULL,
        check=False,
        timeout=100,
    )
    time.sleep(0.2)
    watch.send_signal(signal.SIGINT)
    told, _ = watch.communicate(timeout=30)
    assert job.returncode == 0
    return watch.returncode, told


def copies(kind: str) -> tuple[str, ...]:
    return ("-m", "benchmarks.traffic_jobs", kind, "--seconds", "6")


@over_links
def test_an_all_reduce_over_nvlinks_is_direct() -> None:
    code, told = beside((*ALLREDUCE, "4000"))
    assert code == 0, told
    assert re.search(r"  direct  GPU\d-\d", told)


@over_links
def test_one_through_host_memory_is_named_with_its_cause() -> None:
    code, told = beside((*ALLREDUCE, "400"), STAGED)
    assert code == 1, told
    assert "FAIL host-staged" in told
    assert "likely:   NCCL_P2P_DISABLE=1 in the environment" in told


@over_links
def test_one_through_sockets_of_this_host_is_named() -> None:
    code, told = beside((*ALLREDUCE, "60"), {**STAGED, "NCCL_SHM_DISABLE": "1"})
    assert code == 1, told
    assert re.search(r"  sockets GPU\d-\d", told)


@over_links
def test_copies_of_one_process_with_peer_access_are_direct() -> None:
    code, told = beside(copies("copies"))
    assert code == 0, told
    assert re.search(r"  direct  GPU\d-\d", told)


@over_links
def test_copies_of_one_process_without_peer_access_are_staged_and_may_be_its_wish() -> None:
    _, told = beside(copies("copies-without-peer-access"))
    assert "WARN host-staged" in told, told
    assert "perhaps on purpose" in told


@pytest.mark.skipif(DRIVER.visible < 4, reason="a ring of four GPUs")
def test_a_ring_with_one_staged_copy_is_named_with_both_its_gpus() -> None:
    _, told = beside(copies("ring-with-a-staged-copy"))
    assert "host-staged" in told, told
    assert "  staged  GPU0-3" in told, told


@pytest.mark.skipif(DRIVER.visible != 1, reason="several GPUs: their ranks share none")
def test_ranks_of_one_gpu_send_nothing_over_links_and_are_not_called_staged() -> None:
    code, told = beside(("-m", "gpubench", "allreduce", *launch(4), "--sizes", "64M", "--no-check", "--iters", "4000"))
    assert code in (0, 3), told
    assert "host-staged" not in told
    assert told.splitlines()[-1].partition(":")[0] in ("PASS", "SKIP"), told
