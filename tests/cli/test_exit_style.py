"""`--exit-style` as monitoring calls it: one line, the right exit code, whatever happens."""

import ast
import re
import sys
from pathlib import Path

import pytest

import gpubench as package
from gpubench.cli import app
from gpubench.formats.registry import ExitStyle
from gpubench.model.terms.verdict import Verdict
from tests.cli.running import gpubench, mpirun, without_gpus

STAGED = ("p2p", "--simulate", "hgx-h200-4", "--fault", "link0-1:staged=yes")
HEALTHY = ("p2p", "--simulate", "hgx-h200-4")
FIGURE = re.compile(r"'[^'=]{1,40}'=-?[\d.e+-]+;;;0;[\d.e+]*")


@pytest.mark.parametrize(
    ("arguments", "state", "code"),
    [
        (HEALTHY, "OK", 0),
        (STAGED, "CRITICAL", 2),
        ((*STAGED, "--strict"), "CRITICAL", 2),
        (("topo", "--replay", "tests/machines/driver-silent"), "UNKNOWN", 3),
        (("topo", "--replay", "nowhere"), "UNKNOWN", 3),
        (("topo", "--width", "wide"), "UNKNOWN", 3),
        (("explain", "tests/logs/h200x4-p2p-disabled"), "CRITICAL", 2),
    ],
    ids=["healthy", "staged", "strict", "silent", "nowhere", "usage", "explain"],
)
def test_nagios_gets_a_line_and_its_code(arguments: tuple[str, ...], state: str, code: int) -> None:
    result = gpubench(*arguments, "--exit-style", "nagios")
    assert result.returncode == code
    assert result.stdout.count("\n") == 1
    text, _, figures = result.stdout.strip().partition(" | ")
    assert re.match(rf"GPUBENCH.* {state} - ", text)
    assert all(FIGURE.fullmatch(figure) for figure in figures.split())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(HEALTHY, 0), (STAGED, 1), ((*STAGED, "--strict"), 1), (("topo", "--replay", "nowhere"), 2), (("topo", "--x"), 2)],
    ids=["healthy", "staged", "strict", "nowhere", "usage"],
)
def test_node_problem_detector_gets_eighty_bytes_and_its_code(arguments: tuple[str, ...], code: int) -> None:
    result = gpubench(*arguments, "--exit-style=npd")
    assert result.returncode == code
    assert result.stdout.count("\n") == 1
    assert len(result.stdout.strip().encode()) <= 80
    assert result.stdout.isascii()
    assert "?" not in result.stdout


@pytest.mark.parametrize(
    ("style", "arguments", "line"),
    [
        ("nagios", "", "GPUBENCH CHECK (SIMULATED) OK - 8 × H100 80GB HBM3, speed not measured | 'findings'=0;;;0;"),
        ("npd", "--fault gpu2:mig=on", "PASS (simulated): 8 x H100 80GB HBM3, speed not measured"),
        ("npd", "--fault gpu1:p2p=CNS", "FAIL (simulated): node0 GPU1: no peer access. Try: nvidia-smi topo -p2p r"),
        ("npd", "--expect-gpus 9", "FAIL (simulated): node0: 8 GPUs, 9 expected. See gpu-missing"),
        ("slurm", "--expect-gpus 9", "drain: (simulated) node0: 8 GPUs, 9 expected. Try: lspci -d 10de: | grep -c 3D"),
    ],
)
def test_a_line_ends_with_a_command_that_monitoring_keeps_or_with_the_finding(
    style: str, arguments: str, line: str
) -> None:
    quick = "check", "--quick", "--simulate", "hgx-h100-8", *arguments.split()
    assert gpubench(*quick, "--exit-style", style).stdout.strip() == line


def test_nagios_reads_once_that_a_machine_is_simulated() -> None:
    line = gpubench("check", "--quick", "--simulate", "hgx-h100-8", "--exit-style", "nagios").stdout
    assert line.lower().count("simulated") == 1


SIMULATED = ("check", "--quick", "--simulate", "hgx-h100-8")
DOWN = "(simulated) node0 GPU3: 9 of 18 NVLinks down (links 9-17). Try: nvidia-smi --gpu-reset -i 0000:19:00.0"
GATED = (
    (SIMULATED, 0, "keep: (simulated) 8 x H100 80GB HBM3, speed not measured"),
    ((*SIMULATED, "--fault", "gpu3:busy=7"), 0, "keep: (simulated) node0 GPU3: in use by process 7."),
    ((*SIMULATED, "--fault", "gpu3:nvlink=9"), 1, f"drain: {DOWN}"),
    ((*SIMULATED, "--fault", "gpu3:lost=yes"), 1, "drain: (simulated) node0 GPU3: GPU is lost. Try: dmesg | grep Xid"),
    ((*SIMULATED, "--fault", "node0:silent=nvml"), 1, "drain: (simulated) node0, nvml: no answer"),
    ((*SIMULATED, "--fault", "node0:driver_missing=yes"), 1, "drain: (simulated) node0: 8 NVIDIA GPUs on the PCI bus"),
    (("check", "--quick", "--replay", "nowhere"), 2, "unknown: "),
    (("check", "--nonsense"), 2, "unknown: "),
)
"""Command lines, and the exit code and line that a script of Slurm's gets."""


@pytest.mark.parametrize(("arguments", "code", "line"), GATED, ids=lambda each: str(each)[-40:])
def test_a_script_that_drains_nodes_gets_the_decision_and_the_whole_reason(
    arguments: tuple[str, ...], code: int, line: str
) -> None:
    result = gpubench(*arguments, "--exit-style", "slurm")
    assert (result.returncode, result.stdout.count("\n")) == (code, 1), result.stdout
    assert result.stdout.startswith(line)
    assert len(result.stdout) <= len("unknown: ") + 240
    assert "..." not in result.stdout
    npd = gpubench(*arguments, "--exit-style", "npd")
    assert npd.returncode == code, "node-problem-detector and Slurm have one policy"


@without_gpus
def test_a_node_without_gpus_is_drained_only_if_gpus_are_expected() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has GPUs")
    plain = gpubench("check", "--quick", "--exit-style", "slurm")
    assert (plain.returncode, plain.stdout.split()[0]) == (2, "unknown:")
    expecting = gpubench("check", "--quick", "--expect-gpus", "8", "--exit-style", "slurm")
    assert (expecting.returncode, expecting.stdout.split()[0]) == (1, "drain:")


def test_every_verdict_has_a_code() -> None:
    assert {verdict: ExitStyle.NAGIOS.code(verdict) for verdict in Verdict} == {
        Verdict.PASS: 0,
        Verdict.SKIP: 3,
        Verdict.WARN: 1,
        Verdict.INCONCLUSIVE: 1,
        Verdict.FAIL: 2,
        Verdict.ERROR: 3,
    }
    for style in (ExitStyle.NPD, ExitStyle.SLURM):
        assert {verdict: style.code(verdict) for verdict in Verdict} == {
            Verdict.PASS: 0,
            Verdict.SKIP: 2,
            Verdict.WARN: 0,
            Verdict.INCONCLUSIVE: 2,
            Verdict.FAIL: 2,
            Verdict.ERROR: 2,
        }
        assert {verdict: style.code(verdict, drains=True) for verdict in (Verdict.FAIL, Verdict.ERROR)} == {
            Verdict.FAIL: 1,
            Verdict.ERROR: 1,
        }
        doubts = (Verdict.WARN, Verdict.INCONCLUSIVE, Verdict.SKIP)
        assert [style.code(verdict, strict=True) for verdict in doubts] == [1, 1, 2]


@pytest.mark.parametrize(
    ("words", "style"),
    [
        (["topo", "--exit-style", "nagios"], ExitStyle.NAGIOS),
        (["topo", "--exit-style=npd", "--nonsense"], ExitStyle.NPD),
        (["topo", "--exit-style"], None),
        (["topo", "nagios"], None),
        (["run", "--", "gpubench", "check", "--exit-style", "nagios"], None),  # The option of the job
        (["run", "./job", "--exit-style", "nagios"], None),
        (["run", "--exit-style", "nagios", "--", "./job"], ExitStyle.NAGIOS),
    ],
)
def test_the_style_is_found_before_options_are_read(
    words: list[str], style: ExitStyle | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpubench", *words])
    assert app._exit_style() is style


def test_a_format_beside_it_is_refused() -> None:
    result = gpubench("topo", "--exit-style", "nagios", "--format", "json")
    assert result.returncode == 3
    assert "--exit-style and --format exclude each other" in result.stderr


@pytest.mark.slow
@pytest.mark.mpi
def test_a_launcher_has_exit_codes_of_its_own() -> None:
    result = mpirun(2, "topo", "--exit-style", "nagios")
    assert result.returncode != 0
    assert "--exit-style under" in result.stderr


@pytest.mark.mpi
def test_a_job_of_our_own_ends_with_the_style_s_code() -> None:
    result = gpubench("allreduce", "--backend", "host", "--sizes", "1K", "--exit-style", "nagios")
    assert result.returncode == 3, "nobody judged its speed: UNKNOWN of a plugin"
    assert result.stdout.startswith("GPUBENCH ALLREDUCE UNKNOWN - all-reduce")
    assert "'wrong_elements'=0;;;0;" in result.stdout


def test_commands_take_their_exit_code_from_the_presentation() -> None:
    """Ranks may call `exit_code` themselves: the process that launched them ends with the style's."""
    ranks = {"job.py", "p2p_ranks.py", "exit_style.py", "presentation.py"}
    for path in (Path(package.__file__).parent / "cli").rglob("*.py"):
        calls = {node.func.id for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
        assert path.name in ranks or "exit_code" not in calls, path.name
