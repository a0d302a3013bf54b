"""Measure how long gpubench reads a huge machine: 4,096 CPUs, 64 GPUs, 1,000 PCI devices.

    python -m benchmarks.read_large_machine

Run at the root of a checkout. It builds a tree like /sys, /proc and /dev in a temporary folder, and reads it `--runs`
times as `gpubench topo` reads the real one. Then it looks for all causes in the facts, as if every GPU could reach
every other over PCIe. It prints the median and the fastest seconds, the processor's seconds, and the number of opened
files and listed folders. A real kernel's files cost more than cached ones: a PCI register about a microsecond, a NIC's
counter an answer of its firmware. The exit code is 1 if the median exceeds a second.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from gpubench.machine.probe import merge
from gpubench.machine.process import read_rank_facts
from gpubench.machine.sysfs import SysfsFacts, read_sysfs
from gpubench.measure.topo import prospects, survey
from gpubench.model.facts.process import RankFacts
from gpubench.model.facts.snapshot import PairFacts
from gpubench.model.paths.nodes import group_nodes
from gpubench.model.paths.topology import Topology
from tests.fakes.large_machine import LargeMachine

MOST_SECONDS = 1.0
_EVENTS = {"open": "files opened", "os.listdir": "folders listed", "os.scandir": "folders listed"}


class Count:
    """Count opened files and listed folders while `on` is set: Python cannot remove an audit hook."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.on = False
        sys.addaudithook(self._see)

    def _see(self, event: str, _arguments: tuple[object, ...]) -> None:
        if self.on and event in _EVENTS:
            self.seen[_EVENTS[event]] += 1


def timed(read: Callable[[], object], runs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of every run, by the clock and of the processor."""
    seconds, processor = [], []
    for _ in range(runs):
        start, processor_start = time.perf_counter(), time.process_time()
        read()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - processor_start)
    return seconds, processor


def look_for_causes(facts: SysfsFacts, process: RankFacts) -> None:
    """Do what `gpubench topo --causes` does with the facts."""
    snapshot = merge("large", facts, None, None)
    pairs = (
        PairFacts(source=one.device, destination=other.device, cuda=True, read="OK", write="OK")
        for one, other in permutations(snapshot.gpus, 2)
    )
    gpus = (replace(gpu, nvlinks=()) for gpu in snapshot.gpus)
    nodes = [Topology(replace(snapshot, pairs=tuple(pairs), gpus=tuple(gpus)))]
    explained = survey(nodes, group_nodes(nodes), [process])
    explained.conditions()
    explained.unread()
    prospects(nodes, group_nodes(nodes), explained)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    count, slow = Count(), False
    with tempfile.TemporaryDirectory() as folder:
        machine = LargeMachine()
        root = machine.build(Path(folder)).root
        print(machine)
        for name, read in (
            ("the node", lambda: read_sysfs(root)),
            ("one process", lambda: read_rank_facts(0, 0, 0, {}, root)),
            ("all causes", partial(look_for_causes, read_sysfs(root), read_rank_facts(0, 0, 0, {}, root))),
        ):
            count.seen.clear()
            count.on = True
            read()
            count.on = False
            seconds, processor = timed(read, runs)
            what = ", ".join(f"{number:,} {event}" for event, number in sorted(count.seen.items()))
            print(f"{name}: median {median(seconds):.3f} s, fastest {min(seconds):.3f} s,", end=" ")
            print(f"processor {median(processor):.3f} s" + (f"; {what}" if what else ""))
            slow = slow or median(seconds) > MOST_SECONDS
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
