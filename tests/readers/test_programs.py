"""Output of programs that gpubench does not read is named as theirs, whichever command gets it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpubench.errors import UsageError
from gpubench.readers.programs import PROGRAMS, find_program
from gpubench.readers.registry import other_text, read_file, read_results

ROCM = "====== ROCm System Management Interface ======\n       GPU0  GPU1\nGPU0   0     XGMI\nGPU1   XGMI  0\n"
ROCM_CUT = "===== Weight between two GPUs =====\n       GPU0  GPU1\nGPU0   0     15\nGPU1   15    0\n"
ROCM_COMMAND = "me@box:~$ rocm-smi --showtopotype\n       GPU0  GPU1\nGPU0   0     PCIE\nGPU1   PCIE  0\n"
AMD = "$ amd-smi topology -w\nWEIGHT TABLE:\n       0000:05:00.0 0000:26:00.0\n0000:05:00.0 0 15\n"
WRITE_BW = (
    "                    RDMA_Write BW Test\n Device : mlx5_0\n"
    " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n"
    " 65536       5000   370.1  369.9  0.7\n"
)
WRITE_BW_CUT = " #bytes     #iterations    BW average[MiB/sec]   MsgRate[Mpps]\n 65536      5000   23000.11   0.36\n"
READ_LATENCY = (
    "$ ib_read_lat node1\n                    RDMA_Read Latency Test\n"
    " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]\n 2       1000   1.6   5.9   1.7\n"
)
P2P = (
    "[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]\nDevice: 0, NVIDIA L4, pciBusID: 3, pciDeviceID: 0\n"
    "P2P Connectivity Matrix\n     D\\D     0     1\n     0\t     1     1\n     1\t     1     1\n"
)
P2P_CUT = "Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)\n   D\\D     0      1\n     0 720.1  25.3\n"
PERFTEST = (
    "+--------------+--------------+\n|    Stage     | # iterations | 50.0%ile | average | overall |\n"
    "[thread 0]  34  0.2  5.2  5.2  1798  1798  18  18\n"
)
INFO = "#\n# Memory domain: mlx5_0\n#     Component: ib\n#\n#      Transport: rc_mlx5\n#         Device: mlx5_0:1\n"
INFO_VERSION = "$ ucx_info -v\n# Library version: 1.17.0\n# Library path: /opt/ucx/lib/libucs.so.0\n"
IPERF = "[ ID] Interval           Transfer     Bitrate\n[  5]   0.00-10.00  sec  28.9 GBytes  24.8 Gbits/sec\n"
IBSTAT = "CA 'mlx5_0'\n\tCA type: MT4129\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n\t\tRate: 400\n"

PARTLY_READ = (WRITE_BW, WRITE_BW_CUT, P2P_CUT, PERFTEST)
"""Texts with tables that `gpubench report` reads."""

FOREIGN = {
    "rocm-smi": (ROCM, ROCM_CUT, ROCM_COMMAND),
    "amd-smi": (AMD,),
    "perftest": (WRITE_BW, WRITE_BW_CUT, READ_LATENCY),
    "p2pBandwidthLatencyTest": (P2P, P2P_CUT),
    "ucx_perftest": (PERFTEST,),
    "ucx_info": (INFO, INFO_VERSION),
    "iperf": (IPERF,),
    "ibstat": (IBSTAT,),
}


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        (name, text, read)
        for name, texts in FOREIGN.items()
        for text in texts
        for read in (read_file, read_results)
        if read is read_file or text not in PARTLY_READ
    ],
)
def test_output_of_another_program_is_named_as_its(
    name: str, text: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text(f"Hello, is this normal?\n\n{text}\nuser@box:~$ \n")
    with pytest.raises(UsageError) as caught:
        read(path)
    assert f"is {name}'s output" in caught.value.seen
    assert "NCCL_DEBUG" not in str(caught.value)
    assert caught.value.next_step.startswith(("gpubench ", "mpirun "))


TOPO = "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n"
MARKDOWN = "# How to\n\nSee [this](https://example.org): exit code 1.\n\n```sh\nls\n```\n"
COPIES = (
    "Running device_to_device_memcpy_read_ce.\nmemcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)\n"
    " 0 1\n 0 N/A 9.5\n 1 9.5 N/A\n"
)


@pytest.mark.parametrize("other", [text for texts in FOREIGN.values() for text in texts if text != COPIES])
def test_what_gpubench_reads_is_read_next_to_output_that_it_does_not(other: str, tmp_path: Path) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text(f"{COPIES}\n{other}")
    assert len(read_results(path).pairs) == 2
    if "GPU0" not in other:
        path.write_text(f"{TOPO}\n{other}")
        assert len(read_file(path).gpus) == 2


@pytest.mark.parametrize(
    "text",
    [
        TOPO,
        COPIES,
        "rocm-smi and ucx_perftest are programs that we did not run; perftest neither\n",
        "node1:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\n",
        "# OSU MPI Bandwidth Test v7.3\n# Size      Bandwidth (MB/s)\n1  2.00\n",
    ],
)
def test_other_texts_are_no_output_of_these_programs(text: str) -> None:
    assert find_program(text) is None


def test_every_program_has_a_name_of_its_own() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)


@pytest.mark.parametrize(
    ("text", "read", "command"),
    [
        ("node1:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\n", read_results, "explain"),
        ("node1:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\n", read_file, "explain"),
        (TOPO, read_results, "topo --from"),
        (COPIES, read_file, "report"),
        ("# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n", read_file, "report"),
    ],
)
def test_what_another_command_reads_is_sent_there(
    text: str, read: Callable[[Path], object], command: str, tmp_path: Path
) -> None:
    path = tmp_path / "pasted.txt"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read(path)
    assert caught.value.next_step == f"gpubench {command} {path}"


@pytest.mark.parametrize(
    ("text", "what", "next_step"),
    [
        ("ROCm System Management Interface\n", "rocm-smi's output", "topo --from"),
        ("   RDMA_Write BW Test\n", "perftest's output", "scan"),
        ("[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]\n", "p2pBandwidthLatencyTest's output", "p2p"),
        ("$ ucx_perftest -t tag_bw\n", "ucx_perftest's output", "p2p"),
        (TOPO, "nvidia-smi topo -m", "gpubench topo --from FILE"),
        (MARKDOWN, "a Markdown document", "explain"),
    ],
)
def test_explain_names_what_a_text_without_nccl_is(text: str, what: str, next_step: str) -> None:
    found = other_text(text, "standard input")
    assert found is not None
    assert what in found.what
    assert next_step in found.cure.text


def test_explain_names_nothing_that_it_does_not_know() -> None:
    assert other_text("", "log") is None
    assert other_text("hello\nworld\n", "log") is None
