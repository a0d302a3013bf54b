"""Measure what files do that are made to break their reader: seconds, peak MiB, exit code, last words.

    python -m benchmarks.hostile_files --only logs

Each attack runs in a process of its own, limited to `--seconds` and to `--gigabytes` of address space.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.hostile_files import HOSTILE, NEVER, HostileFile

_EXPECTED_SECONDS, _EXPECTED_MIB = 25, 1024


@dataclass(frozen=True)
class Measured:
    seconds: float
    mib: int
    code: int
    ended: str
    is_well: bool


def main() -> None:
    arguments = parse()
    print(f"{'reader':<9} {'attack':<52} {'s':>6} {'MiB':>6} {'code':>4}  ended")
    well = total = 0
    for kind, attacks in HOSTILE.items():
        for attack in attacks:
            if arguments.only in (None, kind) and arguments.name in attack.name:
                found = run_attack(attack, seconds=arguments.seconds, gigabytes=arguments.gigabytes)
                total, well = total + 1, well + found.is_well
                mark = "" if found.is_well else "! "
                line = f"{found.seconds:6.1f} {found.mib:6} {found.code:>4}  {mark}{found.ended}"
                print(f"{kind:<9} {attack.name:<52} {line}", flush=True)
    print(f"{well} of {total} as they should")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(HOSTILE))
    parser.add_argument("--name", default="", help="attacks with this in their name")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--gigabytes", type=int, default=8)
    return parser.parse_args()


def run_attack(attack: HostileFile, *, seconds: float, gigabytes: int) -> Measured:
    """Run one attack; it is well if it ended in time, in little memory, and with the expected message."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        most_bytes = gigabytes * 2**30
        job = subprocess.Popen(
            ["prlimit", f"--as={most_bytes}", sys.executable, "-m", "gpubench", *attack.write(Path(folder))],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
        begun = time.monotonic()
        while (ended := os.wait4(job.pid, os.WNOHANG))[0] == 0:
            if time.monotonic() - begun > seconds:
                job.kill()
            time.sleep(0.01)
        spent = time.monotonic() - begun
        said.seek(0)
        text = said.read()
    code = job.returncode = os.waitstatus_to_exitcode(ended[1])
    mib = ended[2].ru_maxrss // 1024
    how = "hang" if code == -signal.SIGKILL else "traceback" if NEVER in text else text.partition("\n")[0][:90]
    is_well = code == attack.code and NEVER not in text and attack.said in text
    return Measured(spent, mib, code, how, is_well and spent <= _EXPECTED_SECONDS and mib <= _EXPECTED_MIB)


if __name__ == "__main__":
    main()
