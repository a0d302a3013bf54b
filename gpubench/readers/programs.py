"""Recognizes programs whose output gpubench cannot read, or reads only in part, although users often paste it.

Each program has phrases that only it prints. `report`, `topo --from` and `explain` look for them if a text contains
nothing that they can read. To add a program, add an entry to `PROGRAMS`.
"""

import re
from typing import NamedTuple

from gpubench.errors import UsageError
from gpubench.model.terms.verdict import Cure


class Program(NamedTuple):
    """A program and what its output shows.

    - `instead`: the gpubench command to use instead
    - `sign`: a pattern for phrases that only this program prints
    - `reads`: the part that `gpubench report` reads
    """

    name: str
    output: str
    instead: Cure
    sign: re.Pattern[str]
    reads: str = ""

    def refusal(self, file: str, expected: str) -> UsageError:
        """Return the error for a file with this program's output."""
        return UsageError(
            f"{file} is {self.name}'s output: {self.output}",
            expected=expected,
            reason=f"only `gpubench report` reads it, and only {self.reads}"
            if self.reads
            else f"this command does not read output of {self.name}",
            next_step=self.instead.text,
        )


def _program(name: str, output: str, instead: Cure, *signs: str, reads: str = "") -> Program:
    return Program(name, output, instead, re.compile("|".join(signs), re.MULTILINE), reads)


def _command(name: str) -> str:
    """Return a pattern for a command line, with the name at the start of a line or after a prompt. It does not
    match prose.
    """
    return rf"(?:^|[$#] )\s*(?:[\w./~-]{{1,200}}/)?{name}(?: -|\s*$)"


_COPIES = Cure.of(
    "gpubench p2p",
    comment="It measures the same copies and judges them. `gpubench report` reads nvbandwidth's matrices.",
)
_NETWORK = Cure.of(
    "mpirun gpubench scan",
    comment="Start it on all hosts, with --hostfile. It measures GPUs over their NICs, and names a slow NIC or node.",
)
_UCX = Cure.of("gpubench p2p", comment="It measures copies between GPUs, and names the path of each pair.")
_AMD = Cure.of(
    "gpubench topo --from topo.txt",
    comment="It reads rocm-smi --showtopo and amd-smi topology. `gpubench report` reads rccl-tests.",
)

PROGRAMS = (
    _program(
        "rocm-smi",
        "the topology of AMD GPUs",
        _AMD,
        r"ROCm System Management Interface",
        r"End of ROCm SMI Log",
        _command("rocm-smi"),
        r"(?i:(?:weight|hops|link type) between two gpus)",
    ),
    _program("amd-smi", "AMD GPUs", _AMD, _command("amd-smi"), r"AMDSMI Tool:", r"^\s*(?:ACCESS|WEIGHT|HOPS) TABLE:"),
    _program("rocm-bandwidth-test", "copies of AMD GPUs", _AMD, r"RocmBandwidthTest Version"),
    _program(
        "perftest",
        "RDMA between two NICs (ib_write_bw and its like)",
        _NETWORK,
        r"\b(?:RDMA_Write|RDMA_Read|Send|Atomic|Raw_?\w*) (?:Bidirectional )?(?:BW|Latency) Test\b",
        r"#bytes +#iterations +(?:BW peak|BW average|t_min|t_avg|tps)",
        r'^"?test_info"?: \{',
        r"\b(?:local|remote) address: ?LID\b.{0,40}\bQPN\b",
        reads="the tables of its bandwidth tests",
    ),
    _program(
        "p2pBandwidthLatencyTest",
        "copies between pairs of GPUs",
        _COPIES,
        r"P2P \(Peer-to-Peer\) GPU Bandwidth Latency Test",
        r"P2P Connectivity Matrix",
        r"\b(?:Uni|Bi)directional P2P=(?:Dis|En)abled",
        r"\bP2P=(?:Dis|En)abled Latency",
        reads="its matrices of bandwidth and latency",
    ),
    _program(
        "bandwidthTest",
        "copies between a GPU and host memory",
        _COPIES,
        r"\[CUDA Bandwidth Test\]",
        r"(?:PINNED|PAGEABLE) Memory Transfers",
    ),
    _program(
        "ucx_perftest",
        "UCX transfers between two processes",
        _UCX,
        _command("ucx_perftest"),
        r"(?:Stage|# iterations) *\| *# iterations",
        r"# iterations \| +(?:50\.0%ile|typical|average)",
        r"\|\s+API:\s+(?:protocol layer|transport layer)",
        reads="the row 'Final:' of its bandwidth tests",
    ),
    _program(
        "nixlbench",
        "NIXL transfers between two processes",
        _UCX,
        r"^NIXLBench Configuration",
        r"Block Size \(B\) +Batch Size",
        reads="its table",
    ),
    _program(
        "ucx_info",
        "build options and devices of UCX",
        _UCX,
        _command("ucx_info"),
        r"# Library version: \d[\d.]*\s+# Library path: \S*libuc[spt]",
        r"# (?:Memory domain|UCP context|UCP endpoint|UCP worker|UCT version)\b",
        r"#\s+Transport: (?:self|tcp|sysv|posix|cma|knem|xpmem|cuda_\w+|gdr_copy|(?:rc|dc|ud)_\w+)\b",
    ),
    _program(
        "iperf",
        "TCP or UDP between two hosts",
        _NETWORK,
        r"\[ *ID\] +Interval +Transfer +Bit(?:rate|width)|\[ *ID\] Interval",
    ),
    _program(
        "ibstat",
        "the ports of InfiniBand NICs",
        Cure.of("gpubench topo", comment="Run it on that machine, to read NICs, their ports and rates."),
        r"^CA '\w+'$",
        r"^hca_id:\s",
        r"\bPhysical state: \w+",
    ),
    _program(
        "dcgmi diag",
        "DCGM's tests of a node",
        Cure.of("gpubench check", comment="Run it on that machine, to judge links, copies and NCCL."),
        r"Successfully ran diagnostic for group",
        r"\bDCGM Diagnostic\b|\+-+ +Deployment +-+\+",
    ),
)
"""Known programs. If several match a text, the first one wins."""


def find_program(text: str) -> Program | None:
    """Return the program that printed a text. None if no program matches."""
    return next((program for program in PROGRAMS if program.sign.search(text)), None)
