"""Provoke every cause that GPUs of this host allow; see whether gpubench names it, and what the cure gives.

    python -m benchmarks.provoked_causes --csv provoked.csv

Each cause gets a small sweep with it and one without: GB/s of the largest size, µs of the smallest, the verdict and the
first finding. Settings, files and foreign processes are set up and removed here; clocks, power and MIG are left alone.
Passes if every run with a cause names it first, and every run without is PASS. Needs two GPUs or more, and for `--etc`
the right to write /etc/nccl.conf.
"""

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = "1K,64K,1M,16M,256M"
SETTLING_SECONDS = 4.0
"""A foreign process imports CuPy and loads its GPU within this time."""

ETC = Path("/etc/nccl.conf")
_GEMM = """
import cupy as cp
cp.cuda.Device({gpu}).use()
a = cp.ones((8192, 8192), cp.float32); b = a.copy()
while True:
    c = a @ b; cp.cuda.get_current_stream().synchronize()
"""
_COPIES = """
import cupy as cp
r, n = cp.cuda.runtime, 2**29
r.setDevice(0); r.deviceEnablePeerAccess(1); a = r.malloc(n); r.setDevice(1); b = r.malloc(n); r.setDevice(0)
stream = cp.cuda.Stream(non_blocking=True)
while True:
    for _ in range(50): r.memcpyPeerAsync(b, 1, a, 0, n, stream.ptr)
    stream.synchronize()
"""
_LOOP = "while True: pass"


@dataclass(frozen=True)
class Provocation:
    """A cause: its environment, the command before gpubench's, the programs beside it, and the ids that may name it."""

    name: str
    ids: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    prefix: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    file: str = ""
    collective: str = "allreduce"
    copies: int = 1


def _set(name: str, value: str, *ids: str, collective: str = "allreduce") -> Provocation:
    return Provocation(f"{name}={value}", ids, environment=((name, value),), collective=collective)


def provocations(*, etc: bool) -> list[Provocation]:
    found = [
        _set("NCCL_MAX_NCHANNELS", "1", "nccl-few-channels"),
        _set("NCCL_MAX_CTAS", "1", "nccl-few-channels"),
        _set("NCCL_MAX_P2P_NCHANNELS", "1", "nccl-few-channels", collective="sendrecv"),
        _set("NCCL_BUFFSIZE", "32768", "nccl-small-buffers"),
        _set("NCCL_NTHREADS", "64", "nccl-few-threads"),
        _set("NCCL_PROTO", "LL", "nccl-algorithm-forced"),
        _set("NCCL_ALGO", "Tree", "nccl-algorithm-forced"),
        _set("NCCL_P2P_USE_CUDA_MEMCPY", "1", "nccl-p2p-memcpy"),
        _set("NCCL_P2P_DISABLE", "1", "host-staged"),
        _set("CUDA_LAUNCH_BLOCKING", "1", "cuda-launch-blocking"),
        Provocation("NCCL_CONF_FILE: NCCL_BUFFSIZE=65536", ("nccl-small-buffers",), file="NCCL_BUFFSIZE=65536\n"),
        Provocation("another process computes on GPU 1", ("gpu-in-use",), beside=(_GEMM.format(gpu=1),)),
        Provocation("another process copies GPU 0 → 1", ("foreign-nvlink-traffic",), beside=(_COPIES,)),
        Provocation("all ranks on one core", ("cores-shared",), prefix=("taskset", "-c", "0")),
        Provocation(
            "three busy loops a core",
            ("cpu-oversubscribed",),
            beside=(_LOOP,),
            copies=3 * len(os.sched_getaffinity(0)),
        ),
    ]
    if etc:
        found.insert(0, Provocation("/etc/nccl.conf: NCCL_MAX_NCHANNELS=1", ("nccl-few-channels",), file=str(ETC)))
    return found


def main() -> None:
    """Run everything, print the table, and exit with 1 if a cause is missed or a healthy run is not PASS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--etc", action="store_true", help="write /etc/nccl.conf too, and take it away again")
    parser.add_argument("--only", help="provocations whose name contains this")
    given = parser.parse_args()
    rows, missed = [], 0
    for provocation in provocations(etc=given.etc):
        if given.only and given.only not in provocation.name:
            continue
        with _provoked(provocation) as environment:
            slow = _measured(provocation, environment)
        after = _measured(Provocation("", (), collective=provocation.collective), dict(os.environ))
        row = _row(provocation, slow, after)
        missed += row["named"] != "yes" or after["verdict"] != "PASS"
        rows.append(row)
        print(" ".join(f"{row[name]!s:<{width}}" for name, width in _COLUMNS), flush=True)
        print(f"    {row['said']}", flush=True)
    if given.csv and rows:
        with given.csv.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print(f"{len(rows) - missed} of {len(rows)} named first, and PASS without")
    sys.exit(1 if missed else 0)


_COLUMNS = (("cause", 38), ("gb_s", 7), ("us", 7), ("verdict", 7), ("found", 24), ("named", 5), ("gb_s_after", 7),
            ("us_after", 7), ("verdict_after", 5))  # fmt: skip


def _row(provocation: Provocation, slow: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    graver = [finding for finding in slow["findings"] if finding["severity"] in ("FAIL", "WARN")]
    first = graver[0]["id"] if graver else ""
    return {
        "cause": provocation.name,
        "gb_s": slow["gb_s"],
        "us": slow["us"],
        "verdict": slow["verdict"],
        "found": first,
        "named": "yes" if first in provocation.ids else "NO",
        "gb_s_after": after["gb_s"],
        "us_after": after["us"],
        "verdict_after": after["verdict"],
        "said": slow["sentence"],
    }


@contextlib.contextmanager
def _provoked(provocation: Provocation) -> Iterator[dict[str, str]]:
    """Set up the cause and yield the environment of its run; undo everything afterwards."""
    environment = dict(os.environ) | dict(provocation.environment)
    with contextlib.ExitStack() as stack:
        if provocation.file == str(ETC):
            if ETC.exists():
                sys.exit(f"{ETC} exists: it is not overwritten")
            ETC.write_text("NCCL_MAX_NCHANNELS=1\n")
            stack.callback(ETC.unlink)
        elif provocation.file:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "nccl.conf").write_text(provocation.file)
            environment["NCCL_CONF_FILE"] = str(folder / "nccl.conf")
        for source in provocation.beside * provocation.copies:
            process = subprocess.Popen([sys.executable, "-c", source], env=dict(os.environ))
            stack.callback(process.wait)
            stack.callback(process.kill)
        time.sleep(SETTLING_SECONDS if provocation.beside else 0.0)
        yield environment


def _measured(provocation: Provocation, environment: dict[str, str]) -> dict[str, Any]:
    """Run gpubench; return verdict, findings, last sentence, GB/s of the largest size and µs of the smallest."""
    options = ("--sizes", SIZES, "--out-of-place", "--format", "json", "--no-progress")
    command = [*provocation.prefix, sys.executable, "-m", "gpubench", provocation.collective, *options]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    try:
        document: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        return {"verdict": "NONE", "findings": [], "sentence": result.stderr[-300:], "gb_s": "", "us": ""}
    rows = document["rows"]
    return document | {"gb_s": f"{rows[-1]['busbw_gb_s']:.1f}", "us": f"{rows[0]['time_us']:.1f}"}


if __name__ == "__main__":
    main()
