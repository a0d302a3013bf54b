"""Measure how often `gpubench check` gives false alarms on healthy simulated machines, and finds planted faults.

    python -m benchmarks.check_verdicts --seeds 1000

Every profile is simulated with 2 % noise on every sample and judged by its own profile. Any finding is a false alarm,
unless it says 'by design'. A fault is found if one of the findings that tests/fakes/planted_faults.py expects is there.
Simulated machines are a model: this measures the judgement, not the hardware.
"""

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from gpubench.profiles import profile_names
from tests.fakes.planted_faults import PLANTED, findings


def _alarms(task: tuple[str, int]) -> tuple[str, list[str]]:
    name, seed = task
    return name, [finding.id for finding in findings(name, (), seed)]


def _is_found(task: tuple[int, int]) -> tuple[int, bool]:
    number, seed = task
    machine, fault, expected = PLANTED[number]
    return number, any(finding.id in expected for finding in findings(machine, (fault,), seed))


def main() -> int:
    """Run both counts; return 1 after a false alarm, or if a fault is found in less than 99 % of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--fault-seeds", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="a part of the names of the machines that are simulated")
    given = parser.parse_args()
    started = time.monotonic()
    known = [name for name in profile_names() if given.only in name]
    planted = [number for number, (machine, _, _) in enumerate(PLANTED) if given.only in machine]
    with ProcessPoolExecutor(given.workers) as pool:
        alarms: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        healthy = [(name, seed) for name in known for seed in range(given.seeds)]
        for name, ids in pool.map(_alarms, healthy, chunksize=20):
            alarms[name] += bool(ids)
            kinds.update(f"{name}: {id_}" for id_ in ids)
        print(f"healthy: {len(healthy)} runs of {len(known)} profiles, {sum(alarms.values())} with an alarm")
        for kind, count in kinds.most_common():
            print(f"  {kind} {count}")
        tasks = [(number, seed) for number in planted for seed in range(given.fault_seeds)]
        found = Counter(number for number, is_found in pool.map(_is_found, tasks, chunksize=5) if is_found)
    missed = [number for number in planted if found[number] < given.fault_seeds]
    print(f"{len(planted)} faults, {given.fault_seeds} seeds each: {len(planted) - len(missed)} found in all of them")
    for number in missed:
        machine, fault, _ = PLANTED[number]
        print(f"  {machine} {fault}: {found[number]} of {given.fault_seeds}")
    print(f"{time.monotonic() - started:.0f} s")
    rare = any(found[number] < 0.99 * given.fault_seeds for number in missed)
    return int(bool(sum(alarms.values())) or rare)


if __name__ == "__main__":
    sys.exit(main())
