"""No secret of the environment or a command line appears in an output, and no file is left behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import environment as cleaned
from tests.cli.running import gpubench

pytestmark = pytest.mark.mpi

IN_ENVIRONMENT, IN_ARGUMENTS = "token-7f3a-of-the-environment", "token-91bc-of-a-command-line"
OUTPUTS = ("result.json", "result.html", "result.csv", "result.xml", "result.md", "result.prom")


def test_no_output_holds_a_secret_and_nothing_is_left(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"--password={IN_ARGUMENTS}"])
    temporary, results = tmp_path / "temporary", tmp_path / "results"
    for folder in (temporary, results):
        folder.mkdir()
    try:
        outputs = [word for name in OUTPUTS for word in ("--output", str(results / name))]
        result = gpubench(
            *("allreduce", "--backend", "host", "--np", "2", "--sizes", "1K,64K", "--iters", "3", "-v"),
            *("--record", str(results / "recording"), *outputs),
            env=cleaned(TMPDIR=str(temporary), WANDB_API_KEY=IN_ENVIRONMENT, AWS_SECRET_ACCESS_KEY=IN_ENVIRONMENT),
        )
    finally:
        other.kill()
        other.wait()
    assert result.returncode == 0, result.stderr
    written = {path: path.read_text(errors="replace") for path in results.rglob("*") if path.is_file()}
    assert len(written) > len(OUTPUTS)
    for text in (result.stdout, result.stderr, *written.values()):
        assert IN_ENVIRONMENT not in text
        assert IN_ARGUMENTS not in text
    assert list(temporary.iterdir()) == []
