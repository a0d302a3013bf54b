"""Exit codes of whole command lines; tests/model/results/test_exit_codes.py has every verdict and command."""

from pathlib import Path

import pytest

from tests.cli.running import environment, gpubench

BROKEN = ("--simulate", "hgx-h200-4", "--fault", "gpu2:nvlink=9")
LOG = "tests/logs/h200x4-p2p-disabled"
RUNS = {
    "": BROKEN,
    "topo": BROKEN,
    "p2p": (*BROKEN, "--no-patterns"),
    "kv": ("--simulate", "hgx-h200-4", "--fault", "node0:kv=pid"),
    "allreduce": (*BROKEN, "--sizes", "1G"),
    "alltoall": (*BROKEN, "--sizes", "1G"),
    "check": (*BROKEN, "--quick"),
    "scan": ("--simulate", "hgx-h100-8*4", "--fault", "node2.gpu1:speed=0.4"),
    "watch": ("--simulate", "hgx-h200-4", "--for", "3s", "--fault", "node0:traffic=staged"),
    "explain": (LOG,),
    "report": ("tests/results/h200x4/ar_NCCL_P2P_DISABLE_1.txt",),
    "compare": ("tests/results/h200x4/all_reduce.txt", "tests/results/h200x4/ar_NCCL_P2P_DISABLE_1.txt"),
}
"""By command, what fails."""


@pytest.mark.parametrize("command", RUNS)
def test_what_fails_exits_1_in_every_command_and_0_with_exit_zero(command: str) -> None:
    words = [*filter(None, [command]), *RUNS[command], "--summary"]
    failed, shown = gpubench(*words), gpubench(*words, "--exit-zero")
    assert (failed.returncode, shown.returncode) == (1, 0), failed.stdout + failed.stderr
    assert failed.stdout == shown.stdout
    assert failed.stdout.startswith("FAIL")
    assert "exit code" not in failed.stdout


@pytest.mark.parametrize(
    ("variables", "file", "options", "code"),
    [
        ({"GPUBENCH_EXIT_ZERO": "1"}, "", (), 0),
        ({}, "exit-zero = true", (), 0),
        ({"GPUBENCH_EXIT_ZERO": "1"}, "", ("--strict",), 1),
        ({"GPUBENCH_EXIT_ZERO": "1"}, "", ("--exit-style", "nagios"), 2),
        ({"GPUBENCH_STRICT": "1"}, "", ("--exit-zero",), 0),
        ({"GPUBENCH_STRICT": "1", "GPUBENCH_EXIT_ZERO": "1"}, "", (), 2),
        ({}, "", ("--strict", "--exit-zero"), 2),
        ({}, "", ("--exit-style", "nagios", "--exit-zero"), 3),
        ({}, "", ("--exit-zero", "--nonsense"), 2),
        ({}, "", ("--exit-zero", "--replay", "nowhere"), 2),
    ],
)
def test_the_command_line_decides_before_defaults_and_errors_keep_their_codes(
    variables: dict[str, str], file: str, options: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    (tmp_path / "gpubench.toml").write_text(file)
    ended = gpubench("topo", *BROKEN, *options, env=environment(**variables), cwd=tmp_path)
    assert ended.returncode == code, ended.stderr


def test_strict_measures_a_host_staged_row_and_fails() -> None:
    staged = gpubench(
        *("allreduce", "--simulate", "hgx-h200-4", "--sizes", "256M", "--strict"), env=environment(NCCL_P2P_DISABLE="1")
    )
    assert staged.returncode == 1
    assert " 256M " in staged.stdout
    assert "FAIL host-staged" in staged.stdout
    assert "NCCL_P2P_DISABLE=1" in staged.stdout.splitlines()[-1]
    assert "row was measured" not in staged.stdout + staged.stderr
