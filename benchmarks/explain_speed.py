"""Measure how fast `gpubench explain` reads a log of a chosen size, and its memory: MB/s of one core, peak MiB.

    python -m benchmarks.explain_speed --ranks 1024 --megabytes 1000

It writes the logs of a job, one file per rank or all in one, as NCCL 2.28 would. Each rank has a communicator of all
ranks, one of its node, and one of the ranks with its place on every node; in each it connects to both neighbours over
16 channels. In the first it also connects to all ranks, over as many channels as the size needs. Then TUNING lines of
rank 0 follow until the size is reached, with `--operations` each after a COLL line. A node has eight ranks, which use
P2P. Nodes use InfiniBand with GPUDirect RDMA, or sockets with `--sockets`. 1 MB is 1e6 bytes. The speed is the log's
size over the processor seconds of the whole command.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PER_NODE = 8
CHANNELS = 16
SIZES = [2**power for power in range(3, 30)]


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        size = write(Path(folder), arguments)
        command = [sys.executable, "-m", "gpubench", "explain", folder, "--format", arguments.format]
        with Path(os.devnull).open("w") as nowhere:
            begun = time.perf_counter()
            code = subprocess.run(command, stdout=None if arguments.show else nowhere, check=False).returncode
            wall = time.perf_counter() - begun
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = usage.ru_utime + usage.ru_stime
    print(
        f"{size / 1e6:.0f} MB, {arguments.ranks} ranks: {size / 1e6 / spent:.0f} MB/s of processor time, "
        f"{size / 1e6 / wall:.0f} MB/s elapsed, peak {usage.ru_maxrss / 1024:.0f} MiB, exit code {code}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--one-file", action="store_true", help="all ranks in one file, in turns of 100 lines")
    parser.add_argument("--sockets", action="store_true", help="sockets between nodes")
    parser.add_argument("--operations", action="store_true", help="lines of COLL too")
    parser.add_argument("--format", default="table")
    parser.add_argument("--folder", help="where to write the log; default: the folder for temporary files")
    parser.add_argument("--show", action="store_true", help="show the report too")
    return parser.parse_args()


def write(folder: Path, arguments: argparse.Namespace) -> int:
    """Write the logs; return their size in bytes."""
    ranks, wanted = arguments.ranks, int(arguments.megabytes * 1e6)
    line_bytes, pairs = 95, max(ranks * (ranks - 1) * 2, 1)
    rings = ranks * 3 * CHANNELS * 4 * line_bytes
    channels = min(max((wanted - rings) * 3 // 4 // (pairs * line_bytes), 1), 32)
    job = Job(ranks, channels, "NET/Socket/0" if arguments.sockets else "NET/IB/{}/GDRDMA/Shared")
    if arguments.one_file:
        with (folder / "job.log").open("w") as stream:
            waiting = [job.lines(rank) for rank in range(ranks)]
            while waiting:
                waiting = [lines for lines in waiting if take(lines, stream.write)]
    else:
        for rank in range(ranks):
            with (folder / f"nccl.{rank:04}.log").open("w") as stream:
                stream.writelines(job.lines(rank))
    size = sum(path.stat().st_size for path in folder.iterdir())
    first = min(folder.iterdir())
    with first.open("a") as stream:
        while size < wanted:
            size += stream.write("".join(job.tunings(operations=arguments.operations)))
    return sum(path.stat().st_size for path in folder.iterdir())


def take(lines: Iterator[str], write_line: Callable[[str], object]) -> bool:
    """Write the next 100 lines; return False if there were none."""
    some = [line for _, line in zip(range(100), lines, strict=False)]
    for line in some:
        write_line(line)
    return bool(some)


def operation(head: str, name: str, handle: int, ranks: int) -> str:
    """Return NCCL's COLL line of an operation."""
    buffers = "sendbuff 0x7f9266e00000 recvbuff 0x7f926ae00000 count 256 datatype 7 op 0 root 0"
    return f"{head}{name}: opCount 0 {buffers} comm {handle:#x} [nranks={ranks}] stream 0x557b64464420\n"


class Job:
    """A job's ranks and their log lines."""

    def __init__(self, ranks: int, channels: int, across: str) -> None:
        self.ranks = ranks
        self.channels = channels
        self.across = across
        nodes = -(-ranks // PER_NODE)
        world = list(range(ranks))
        self.communicators = [(0xA000, world)]
        self.communicators += [(0xB000 + node, world[node * PER_NODE :][:PER_NODE]) for node in range(nodes)]
        self.communicators += [(0xC000 + place, world[place::PER_NODE]) for place in range(min(PER_NODE, ranks))]

    def head(self, rank: int) -> str:
        """Return the prefix of a rank's messages."""
        return f"node{rank // PER_NODE:03}:{1000 + rank}:{1000 + rank} [{rank % PER_NODE}] NCCL INFO "

    def lines(self, rank: int) -> Iterator[str]:
        head, place = self.head(rank), rank % PER_NODE
        yield f"{head}NCCL version 2.28.9+cuda13.0\n"
        yield f"{head}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>\n"
        for number, (name, members) in enumerate(self.communicators):
            if rank in members:
                own, handle, size = members.index(rank), 0x5500 + number, len(members)
                where = (
                    f"comm {handle:#x} rank {own} nranks {size} cudaDev {place} nvmlDev {place} busId {place + 1}a000"
                )
                yield f"{head}ncclCommInitRankConfig {where} commId {name:#x} - Init START\n"
                nodes = len({member // PER_NODE for member in members})
                shape = f"nNodes {nodes} localRanks {size // nodes} localRank {own % PER_NODE} MNNVL 0"
                yield f"{head}comm {handle:#x} rank {own} nRanks {size} {shape}\n"
                yield f"{head}ncclCommInitRankConfig {where} commId {name:#x} - Init COMPLETE\n"
                yield operation(head, "AllReduce", handle, size)
                yield from self.rings(head, members, own)
        yield operation(head, "SendRecv", 0x5500, self.ranks)
        for step in range(1, self.ranks):
            for peer, sends in (((rank + step) % self.ranks, True), ((rank - step) % self.ranks, False)):
                yield from self.pair(head, self.communicators[0][1], rank, peer, sends=sends, index=1)

    def rings(self, head: str, members: list[int], own: int) -> Iterator[str]:
        """Yield the connections to both neighbours."""
        size = len(members)
        for peer in dict.fromkeys(((own + 1) % size, (own - 1) % size)):
            if peer != own:
                yield from self.pair(head, members, own, peer, sends=False, index=0)
                yield from self.pair(head, members, own, peer, sends=True, index=0)

    def pair(self, head: str, members: list[int], own: int, peer: int, *, sends: bool, index: int) -> Iterator[str]:
        """Yield one end of the connection of two ranks, over all channels."""
        inside = members[own] // PER_NODE == members[peer] // PER_NODE
        if inside and not sends:
            return
        source, destination = (own, peer) if sends else (peer, own)
        ends = f"{source}[{members[source] % PER_NODE}] -> {destination}[{members[destination] % PER_NODE}]"
        end = "" if inside else " [send]" if sends else " [receive]"
        via = "P2P/CUMEM" if inside else self.across.format(members[own] % PER_NODE)
        for channel in range(self.channels if index else CHANNELS):
            yield f"{head}Channel {channel:02}/{index} : {ends}{end} via {via}\n"

    def tunings(self, *, operations: bool) -> Iterator[str]:
        """Yield rank 0's lines about operations of every size, on three communicators in turn."""
        head = self.head(0)
        for number in (0, 1, len(self.communicators) - min(PER_NODE, self.ranks)):
            for size in SIZES:
                if operations:
                    yield operation(head, "AllReduce", 0x5500 + number, len(self.communicators[number][1]))
                yield f"{head}AllReduce: {size} Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..15}}\n"


if __name__ == "__main__":
    main()
