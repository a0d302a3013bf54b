"""Causes that this machine can really produce: processes with their own namespaces, mounts and limits.

The GPUs are simulated, because this machine may have none; the facts of processes are read from real processes.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import cache

import pytest
from msgspec.structs import replace

from gpubench.model.facts.process import RankFacts
from gpubench.model.terms.plain import from_plain
from tests.cli.running import ROOT
from tests.fakes.planted import Job, simulated, with_ranks

pytestmark = pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="unshare needs root")

READ = """
import json, os
from pathlib import Path
from gpubench.machine.process import read_rank_facts
from gpubench.model.terms.plain import to_plain
names = ("NCCL_P2P_DISABLE",)
print(json.dumps(to_plain(read_rank_facts(0, 0, 0, {name: os.environ[name] for name in names if name in os.environ}))))
"""
OWN_SHM = ("unshare", "-m", "bash", "-c", 'mount -t tmpfs -o size=64g tmpfs /dev/shm && exec "$@"', "bash")
OWN_PROCESSES = ("unshare", "-pf", "--mount-proc")
LITTLE_LOCKED = ("bash", "-c", 'ulimit -l 64 && exec "$@"', "bash")


@cache
def process(*inside: str, **environment: str) -> RankFacts:
    """Start a process and return its facts."""
    result = subprocess.run(
        [*inside, sys.executable, "-c", READ],
        capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, **environment}, timeout=300,
    )  # fmt: skip
    return from_plain(RankFacts, json.loads(result.stdout))


def job(machine: str, second: RankFacts, *ranks: int) -> Job:
    """A job of plain processes, with `second` in place of some ranks; only UCX and facts of GPUs are made up.

    This machine's limit of locked memory counts as no limit.
    """
    first = process()

    def real(each: RankFacts) -> RankFacts:
        read = second if each.rank in ranks else first
        return replace(
            each, namespaces=read.namespaces, shm_device=read.shm_device, shm_bytes=read.shm_bytes,
            shm_free_bytes=read.shm_free_bytes, environment=read.environment,
            memlock_bytes=-1 if read.memlock_bytes == first.memlock_bytes else read.memlock_bytes,
            libraries={**each.libraries, "libucp": "/usr/lib/libucp.so.0"},
        )  # fmt: skip

    return with_ranks(simulated(machine), real)


def named(found: Job) -> list[str]:
    return [each.cause.id for each in found.diagnosis().named]


@pytest.mark.parametrize(
    ("machine", "inside", "environment", "cause"),
    [
        ("hgx-h200-2", OWN_SHM, {}, "shm-not-shared"),
        ("hgx-h200-2", OWN_PROCESSES, {}, "namespaces-differ"),
        ("hgx-h100-8*2", LITTLE_LOCKED, {}, "memlock-limited"),
        ("hgx-h200-2", (), {"NCCL_P2P_DISABLE": "1"}, "nccl-p2p-disabled"),
    ],
    ids=["own /dev/shm", "own processes", "little locked memory", "a variable"],
)
def test_a_process_that_differs_is_named_first(
    machine: str, inside: tuple[str, ...], environment: dict[str, str], cause: str
) -> None:
    assert named(job(machine, process())) == []
    assert named(job(machine, process(*inside, **environment), 1))[:1] == [cause]


def test_a_dev_shm_that_is_too_small_is_named_where_all_share_it() -> None:
    small = ("unshare", "-m", "bash", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "bash")
    found = named(job("hgx-h200-2", replace(process(*small), namespaces=process().namespaces), 0, 1))
    assert found[:1] == ["shm-too-small"]
