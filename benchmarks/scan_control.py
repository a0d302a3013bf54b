"""Measure what a round of a scan costs rank 0: orders to thousands of supervisors, and figures from their replies.

    python -m benchmarks.scan_control --supervisors 4096

The supervisors are simulated: a child process holds their sockets and answers every order at once, without measuring.
The time is the processor time of rank 0's process; the memory is what its connections and the rounds add.
"""

import argparse
import multiprocessing
import os
import random
import resource
import selectors
import socket
import time
from pathlib import Path
from statistics import median

from gpubench.model.results.scan import NodePair, PlannedRound, ScanPhase
from gpubench.ranks.scan.coordinator import Coordinator, NodeRanks
from gpubench.ranks.scan.messages import (
    ClockReply,
    EndOrder,
    RoundOrder,
    RoundReply,
    greet,
    receive,
    send,
    wrap_socket,
)

SECRET = b"benchmark of the control path..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--supervisors", type=int, default=4096)
    parser.add_argument("--rails", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    count, rails = arguments.supervisors, tuple(range(arguments.rails))
    allow_files(count)
    before = memory_mib()
    nodes = NodeRanks(tuple((rank,) for rank in range(count)), (rails,) * count)
    coordinator = Coordinator(nodes, SECRET, 10.0)
    child = multiprocessing.get_context("fork").Process(target=supervise, args=(coordinator.port, count, len(rails)))
    child.start()
    start = time.monotonic()
    coordinator.accept(300.0)
    print(f"{count} supervisors of {len(rails)} rails connected in {time.monotonic() - start:.1f} s; simulated")
    spent, waited, figures = [], [], 0
    for number in range(1, arguments.rounds + 1):
        order = random.Random(number).sample(range(count), count)
        pairs = tuple(NodePair(*order[place : place + 2]) for place in range(0, count - 1, 2))
        cpu, wall = time.process_time(), time.monotonic()
        outcome = coordinator.measure(PlannedRound(number, ScanPhase.SCREENING, pairs))
        spent.append(time.process_time() - cpu)
        waited.append(time.monotonic() - wall)
        figures += sum(not sample.failure for sample in outcome.samples)
    print(f"figures of {arguments.rounds} rounds: {figures}, gone: {len(coordinator.gone)}")
    print(f"rank 0, CPU time of a round: median {1e3 * median(spent):.0f} ms, most {1e3 * max(spent):.0f} ms")
    print(f"a round, beside the child on {os.cpu_count()} cores: median {1e3 * median(waited):.0f} ms")
    print(f"memory of rank 0: {before:.0f} MiB before, {memory_mib():.0f} MiB after {arguments.rounds} rounds")
    coordinator.close()
    child.join()


def supervise(port: int, count: int, rails: int) -> None:
    """Simulate all supervisors in one process."""
    selector = selectors.DefaultSelector()
    for rank in range(count):
        line = socket.create_connection(("127.0.0.1", port))
        greet(line, SECRET, str(rank).encode())
        connection = wrap_socket(line, 60.0)
        send(connection, ClockReply(0.0))
        selector.register(connection, selectors.EVENT_READ, connection)
    figures = tuple((rail, 92.0 + rail, 0) for rail in range(rails))
    while selector.get_map():
        for key, _ in selector.select():
            order = receive(key.data)
            if isinstance(order, EndOrder):
                selector.unregister(key.data)
                key.data.close()
            elif isinstance(order, RoundOrder):
                send(key.data, RoundReply(order.number, figures))


def allow_files(count: int) -> None:
    """Allow a socket per supervisor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 256, hard), hard))


def memory_mib() -> float:
    """Return the resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS:"))) / 1024


if __name__ == "__main__":
    main()
