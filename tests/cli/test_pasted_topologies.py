"""`gpubench topo --from` of what people paste: prompts, prose, rows that are missing, and every matrix of -p2p."""

from pathlib import Path

import pytest

from tests.cli.running import gpubench

HEAD = "        GPU0    GPU1    GPU2    GPU3    NIC0    NIC1    CPU Affinity    NUMA Affinity   GPU NUMA ID\n"
ROWS = [
    "GPU0     X      NV6     NV6     NV6     PXB     SYS     0-31            0               N/A\n",
    "GPU1    NV6      X      NV6     NV6     PXB     SYS     0-31            0               N/A\n",
    "GPU2    NV6     NV6      X      NV6     SYS     PXB     32-63           1               N/A\n",
    "GPU3    NV6     NV6     NV6      X      SYS     PXB     32-63           1               N/A\n",
]
NICS = ["NIC0    PXB     PXB     SYS     SYS      X      SYS\n", "NIC1    SYS     SYS     PXB     PXB     SYS      X\n"]
GPUS = HEAD + "".join(ROWS)
WHOLE = GPUS + "".join(NICS)


def topo(text: str, tmp_path: Path) -> tuple[int, str]:
    path = tmp_path / "pasted.txt"
    path.write_text(text)
    result = gpubench("topo", "--from", str(path))
    assert "Traceback" not in result.stderr
    return result.returncode, " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize(
    "text",
    [
        WHOLE,
        f"root@box:~# nvidia-smi topo -m\n{WHOLE}root@box:~# exit\n",
        f"[root@gpu-7 ~]# nvidia-smi topo -m\n{WHOLE}",
        f"Hello,\n\nhere is our topology:\n\n```\n$ nvidia-smi topo -m\n{WHOLE}```\n\nWhat is wrong?\n",
        "\n".join(f"> {line}" for line in WHOLE.splitlines()),
        "\n".join(f"| {' | '.join(line.split())} |" for line in WHOLE.splitlines()),
        f"{WHOLE}\nLegend:\n\n  X    = Self\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n",
    ],
)
def test_what_stands_around_a_whole_matrix_does_not_matter(text: str, tmp_path: Path) -> None:
    code, said = topo(text, tmp_path)
    assert (code, "PASS: 4 × GPU" in said) == (0, True), said
    assert "(PXB)" in said


@pytest.mark.parametrize(
    ("text", "completed"),
    [
        (GPUS, "NIC0, NIC1"),
        (GPUS + NICS[0], "NIC1"),
        (GPUS + NICS[0] + NICS[1][:20], "NIC1"),
        (HEAD + "".join(ROWS[:3]) + ROWS[3][:30], "GPU3, NIC0, NIC1"),
        (HEAD + "".join(ROWS[:3]), "GPU3, NIC0, NIC1"),
        (f"$ nvidia-smi topo -m\n{GPUS}$ \n", "NIC0, NIC1"),
    ],
)
def test_missing_rows_are_completed_and_named(text: str, completed: str, tmp_path: Path) -> None:
    code, said = topo(text, tmp_path)
    assert (code, f"WARN topology-text-cut: pasted seen: no complete row for {completed};" in said) == (0, True), said
    assert "GPU3 NV6 NV6 NV6 X" in said
    assert "GPU0 0 NIC0 (PXB)" in said


@pytest.mark.parametrize("text", [HEAD + "".join(ROWS[:2]), HEAD, HEAD + ROWS[0] + ROWS[1].replace("NV6", "NV4")])
def test_too_few_rows_are_refused(text: str, tmp_path: Path) -> None:
    code, said = topo(text, tmp_path)
    assert (code, "there is no row of" in said) == (2, True), said


def p2p(letter: str, status: str) -> str:
    rows = f"        GPU0    GPU1\n GPU0   X       {status}\n GPU1   {status}      X\n"
    return f"user@box:~$ nvidia-smi topo -p2p {letter}\n{rows}"


@pytest.mark.parametrize(
    ("letter", "status", "said"),
    [
        ("p", "NS", "not known: over PCIe not supported (NS); nvidia-smi topo -p2p r and -p2p w show it"),
        ("p", "OK", "not known: over PCIe possible (OK); nvidia-smi topo -p2p r and -p2p w show it"),
        ("n", "NS", "not known: over NVLink not supported (NS); nvidia-smi topo -p2p r and -p2p w show it"),
        ("a", "CNS", "not known: atomics chipset not supported (CNS); nvidia-smi topo -p2p r and -p2p w show it"),
        ("r", "OK", "peer access all 2 ordered pairs: OK"),
        ("w", "OK", "peer access all 2 ordered pairs: OK"),
        ("r", "CNS", "chipset not supported"),
        ("w", "GNS", "GPU not supported"),
    ],
)
def test_every_matrix_of_peer_access_means_what_its_letter_says(
    letter: str, status: str, said: str, tmp_path: Path
) -> None:
    assert said in topo(p2p(letter, status), tmp_path)[1]


def test_reading_decides_next_to_another_matrix(tmp_path: Path) -> None:
    said = topo(p2p("p", "NS") + p2p("r", "OK"), tmp_path)[1]
    assert "-p2p w show" not in said
    assert "over PCIe" not in said


def test_output_of_rocm_smi_is_named(tmp_path: Path) -> None:
    text = "=== ROCm System Management Interface ===\n       GPU0  GPU1\nGPU0   0     XGMI\nGPU1   XGMI  0\n"
    code, said = topo(text, tmp_path)
    assert (code, "is rocm-smi's output: the topology of AMD GPUs" in said) == (2, True), said
