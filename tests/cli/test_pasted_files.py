"""The files of tests/pasted, each of which once got a wrong answer: the command, its exit code, and what it says."""

from pathlib import Path

import pytest

from tests.cli.running import ROOT, gpubench

PASTED = ROOT / "tests" / "pasted"

ANSWERS = [
    ("report report_failure_line_inside.txt", 1, "FAIL nccl-call-failed: a program of the job"),
    ("report report_trailer_failed.txt", 1, "seen: Out of bounds values: 12, in the last lines of the run"),
    ("report report_negative_time.txt", 0, "1 row left out: line 36 (1073741824 bytes): '-5.00' is not a valid value"),
    ("report report-failed-before-rows.txt", 1, "seen: Test NCCL failure alltoall.cu:274 'remote process exited"),
    ("report report-root-prompt.txt", 0, "allreduce backend nccl 2 ranks on 1 host"),
    ("report report-elided-devices.txt", 0, "rank 8-15 on node-b: NVIDIA B200"),
    ("report nvbandwidth-7-of-8.txt --machine hgx-b200-8", 0, "WARN: hgx-b200-8: 7 of the 8 GPUs"),
    ("report nvbandwidth-7-of-8.txt --machine hgx-b200-8 --strict", 1, "WARN: hgx-b200-8: 7 of the 8 GPUs"),
    ("report nvbandwidth-row-cut.txt --machine hgx-b200-8", 3, "7 of 8 rows, without GPU7"),
    ("report rocm-smi-topo.txt", 2, "a topology of AMD GPUs try: gpubench topo --from rocm-smi-topo.txt"),
    ("topo --from rocm-smi-topo.txt", 0, "path GPU0 GPU1 GPU0 X XGMI GPU1 XGMI X"),
    (
        "topo --from topo-no-nic-rows.txt",
        0,
        "WARN topology-text-cut: topo-no-nic-rows seen: no complete row for NIC0, NIC1",
    ),
    ("explain ../../README.md", 3, "a Markdown document in"),
    ("explain prose-mail.txt", 3, "prose-mail.txt: prose in 7 lines, without NCCL lines"),
    ("report prose-mail.txt", 2, "is not the start of a file that gpubench can read"),
    ("explain prose-notes.rst", 3, "try: Use `gpubench explain` with the output of the job itself"),
    ("explain prose-and-an-ending.log", 1, "Segmentation fault (core dumped)"),
    ("explain openmpi-box.log", 1, "mpirun noticed that process rank 1"),
    ("topo --from topo-p2p-p.txt", 0, "over PCIe not supported (NS); nvidia-smi topo -p2p r and -p2p w show it"),
]


@pytest.mark.parametrize(("command", "code", "said"), ANSWERS)
def test_a_file_that_was_answered_wrongly_once(command: str, code: int, said: str) -> None:
    result = gpubench(*command.split(), cwd=PASTED)
    words = " ".join((result.stdout + result.stderr).split())
    assert (result.returncode, said in words) == (code, True), words


@pytest.mark.parametrize("path", sorted(PASTED.glob("report_*")), ids=lambda path: path.stem)
def test_a_table_that_lies_is_never_pass(path: Path) -> None:
    assert not gpubench("report", str(path), "--summary").stdout.startswith("PASS")


def test_a_slow_table_of_one_node_blames_the_node_and_says_what_to_do() -> None:
    said = " ".join(gpubench("report", "no-devices.txt", "--machine", "hgx-h100-8", cwd=PASTED).stdout.split())
    assert "5% of the limit of 700 with NVLS" in said
    assert "likely: copies in host memory, lost links, or slow or busy GPUs" in said
    assert "Try: export NCCL_DEBUG=INFO" in said
    assert "NIC" not in said
    assert "did not end" not in said


def test_two_tables_without_devices_are_compared() -> None:
    result = gpubench("compare", "no-devices.txt", "no-devices.txt", cwd=PASTED)
    assert (result.returncode, "PASS: 12 rows compared" in result.stdout) == (0, True), result.stderr
